"""Rows of two models' logits to their log-sum-exps, divergences and factors, read once.

A cluster of thread blocks has a row.  Each block has a part of the classes, of which it holds as
many as fit in registers and shared memory; the others are read again, from L2.  A block asks for
all it holds at once, while the SM's others compute.  Blocks exchange their sums in global memory,
and all add them in the same order.  Of a JSD whose second side gets no factors, log a - log m takes
the place of b's logits that are held, as it is needed twice; of total variation, the sign of log a
- log b does.

The GEMMs of logits may have summed their exponentials already.  Then a divergence needs one pass,
and so do factors that do not depend on it, those of b of a KL: a block streams its classes for
these, with shared memory as a ring of stages.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from cutefce.cute_kernels.common.dsl import matrix, pdl_wait, vector
from cutefce.cute_kernels.common.launch import Signature, row_launch
from cutefce.cute_kernels.common.row_vectors import row_vectors
from cutefce.cute_kernels.divergence.log_sum_exps import (
    LOWEST,
    add_exps,
    given_exps,
    merged,
    natural,
    sums_argument,
)
from cutefce.cute_kernels.divergence.terms import (
    kl_term,
    mixture_log,
    mixture_terms,
    probability,
    sign,
    size,
    variation_terms,
    weighted,
)
from cutefce.cute_kernels.spec import divergence as spec

VECTOR = 4
"""Logits that a thread loads at once."""
STATS = 7
"""Top and rest of the log-sum-exps of the student and of the teacher, both divergences, or the sums
of `variation_terms` in their places, and total variation."""


def compile_signature(kernel: spec.DivergenceRowsSpec) -> Signature:
    """Return the host function of `kernel` and the arguments to compile it for."""
    rows, vocab = cute.sym_int(), cute.sym_int(divisibility=8)
    out_a, out_b = (
        vector(BFloat16, cute.sym_int64(), aligned=True) if written else None
        for written in (kernel.factors_a, kernel.factors_b)
    )
    return row_launch(
        DivergenceRows(kernel).kernel,
        lambda x: (kernel.BLOCKS * x.a.shape[0],),
        warps=kernel.threads // 32,
        launch_options={"cluster": [kernel.BLOCKS, 1, 1]},
        a=matrix(Float32, rows, vocab),
        b=matrix(Float32, rows, vocab),
        sums_a=sums_argument(rows) if kernel.sums_given else None,
        sums_b=sums_argument(rows) if kernel.sums_given else None,
        out_a=out_a,
        out_b=out_b,
        stats=matrix(Float32, STATS, rows, aligned=False),
        exchange=vector(Float32, cute.sym_int(), aligned=True),
        numbers=vector(Float32, 4),
        side=Int32(0),
        narrow=Int32(0),
        first=Int32(0),
        columns=Int32(0),
        shift=Int32(0),
        pitch_a=Int32(0),
        pitch_b=Int32(0),
    )


class Places(NamedTuple):
    """Where factors are in memory: in row-major matrices of windows of classes."""

    narrow: Int32
    """Whether these are of float16, not bfloat16."""
    first: Int32
    """Row of the matrices that the first row of logits belongs to."""
    vocab: Int32
    columns: Int32
    """Classes of a window; the last one may have fewer."""
    shift: Int32
    """Their binary logarithm; 31 if all classes are one window."""
    pitches: Any
    """Elements from the beginning of a matrix of a, of b, to that of the next one."""


class DivergenceRows:
    """The kernel and its launch."""

    def __init__(self, kernel: spec.DivergenceRowsSpec) -> None:
        self.form, self.held, self.streams = kernel.form, kernel.held, kernel.streams
        self.of_both = kernel.form != "kl"
        self.keeps_logs = bool(self.of_both and kernel.factors_a and not kernel.factors_b)
        self.blocks, self.threads, self.warps = kernel.BLOCKS, kernel.threads, kernel.threads // 32

    @cute.kernel
    def kernel(self, operands: Any) -> None:
        """Write the statistics (7, R) of the logits a and b (R, V), and factors to `out`.

        `side` is 0 where a is the student's, 1 where it is the teacher's.  The divergence is KL(a
        || b), both sides' from their mixture, or total variation.  `sums` (2, R, P) are those of
        `given_exps`.  `exchange` is memory of `spec.EXCHANGE` numbers for each row; `numbers` are
        what the factors of a and b have as shares of a JSD or total variation, 1 for a KL
        divergence, and as scales.  The places of the factors are those of `Places`.  A cluster has
        a row.
        """
        a, b, sums_a, sums_b, out_a, out_b, stats, exchange, numbers, side, *more = operands
        narrow, first_row, columns, shift, *pitches = more
        outs = out_a, out_b, Places(narrow, first_row, a.shape[1], columns, shift, pitches)
        pdl_wait()
        smem = SmemAllocator()
        shape = (VECTOR, self.threads, 2, self.held)
        memory = smem.allocate_tensor(Float32, cute.make_layout(shape), 16)
        sums = smem.allocate_tensor(Float32, cute.make_layout((4, self.warps)), 16)
        thread, block = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        row, part = block // self.blocks, block % self.blocks
        words = exchange.iterator + Int64(row) * spec.DivergenceRowsSpec.EXCHANGE
        exchange = cute.make_tensor(words, cute.make_layout((4, self.blocks, 2)))
        operands = (row_vectors(a, row, VECTOR), row_vectors(b, row, VECTOR)), memory
        # the vectors of this block, and of this thread
        vectors = a.shape[1] // VECTOR
        length = (vectors + self.blocks - 1) // self.blocks
        begin, end = part * length + thread, cutlass.min(part * length + length, vectors)
        count = cutlass.max((end - begin + self.threads - 1) // self.threads, Int32(0))
        for k in cutlass.range_constexpr(self.held):
            self.begin_load(operands, (begin, count), Int32(k + 1), k)
        first = self.load(operands, (begin, count), Int32(0))
        if cutlass.const_expr(sums_a is not None):
            rows = sums_a[None, row, None], sums_b[None, row, None]
            own = [given_exps(row, thread, self.threads) for row in rows]
            lses = self.reduced_exps(*own, (sums,))
        else:
            own = self.exps(operands, first, (begin, count))
            lses = self.reduced_exps(*own, (sums, exchange[None, None, 0]))
        shares, scales = (numbers[0], numbers[1]), (numbers[2], numbers[3])
        reader = operands, first, lses, shares, scales
        kls = self.divergences(reader, (begin, count), outs, row)
        *kls, variation = self.total(kls, (sums, exchange[None, None, 1]))
        if part == 0 and thread == 0:
            (top_a, rest_a), (top_b, rest_b) = lses
            stats[2 * side, row], stats[2 * side + 1, row] = top_a, rest_a
            stats[2 - 2 * side, row], stats[3 - 2 * side, row] = top_b, rest_b
            stats[4 + side, row], stats[5 - side, row] = kls
            stats[6, row] = 0.5 * variation
        if cutlass.const_expr(outs[0] is not None or (self.of_both and outs[1] is not None)):
            self.write_factors(reader, (begin, count), kls, outs, row)

    @cute.jit
    def load(self, operands: Any, places: Any, k: Int32) -> Any:
        """Return vector `k` of this thread, of both sides, if there is one."""
        ((row_a, row_b), _), (begin, count) = operands, places
        x, y = (cute.make_rmem_tensor((VECTOR,), Float32) for _ in range(2))
        if k < count:
            cute.autovec_copy(row_a[None, begin + k * self.threads], x)
            cute.autovec_copy(row_b[None, begin + k * self.threads], y)
        return x, y

    @cute.jit
    def begin_load(self, operands: Any, places: Any, k: Int32, slot: int) -> None:
        """Begin to load vector `k` of this thread, of both sides, to shared memory: one group."""
        (rows, memory), (begin, count) = operands, places
        thread = cute.arch.thread_idx()[0]
        operation = cpasync.CopyG2SOp(cpasync.LoadCacheMode.GLOBAL)
        atom = cute.make_copy_atom(operation, Float32, num_bits_per_copy=Float32.width * VECTOR)
        if k < count:
            for side in cutlass.range_constexpr(2):
                source = rows[side][None, begin + k * self.threads]
                cute.copy(atom, source, memory[None, thread, side, slot])
        cute.arch.cp_async_commit_group()

    @cute.jit
    def load_again(self, operands: Any, places: Any, k: Int32) -> Any:
        """Return vector `k` > 0 once more."""
        ((row_a, row_b), memory), begin = operands, places[0]
        thread, place = cute.arch.thread_idx()[0], begin + k * self.threads
        x, y = (cute.make_rmem_tensor((VECTOR,), Float32) for _ in range(2))
        if k <= self.held:
            cute.autovec_copy(memory[None, thread, 0, k - 1], x)
            cute.autovec_copy(memory[None, thread, 1, k - 1], y)
        else:
            cute.autovec_copy(row_a[None, place], x)
            cute.autovec_copy(row_b[None, place], y)
        return x, y

    @cute.jit
    def store(self, outs: Any, index: int, row: Int32, place: Int32, values: Any) -> None:
        """Write a vector of factors of a (0) or b (1), rounded once."""
        out, places = outs[index], outs[2]
        window = (place * VECTOR) >> places.shift
        start = window * places.columns
        width = cutlass.min(places.columns, places.vocab - start)
        begin = Int64(window) * places.pitches[index] + Int64(places.first + row) * width
        begin = cute.assume(begin + (place * VECTOR - start), divby=VECTOR)
        for dtype in (BFloat16, Float16):
            if (places.narrow != 0) == (dtype is Float16):
                rounded = cute.make_rmem_tensor((VECTOR,), dtype)
                rounded.store(values.load().to(dtype))
                memory = cute.recast_ptr(out.iterator + begin, dtype=dtype)
                cute.autovec_copy(rounded, cute.make_tensor(memory, cute.make_layout(VECTOR)))

    @cute.jit
    def exps(self, operands: Any, first: Any, places: Any) -> Any:
        """Return `add_exps` of this thread's logits, of both sides; `first` is their vector 0."""
        (memory, count), thread = (operands[1], places[1]), cute.arch.thread_idx()[0]
        top_a, top_b = Float32(LOWEST), Float32(LOWEST)
        sum_a, sum_b = Float32(0.0), Float32(0.0)
        behind = self.load(operands, places, Int32(self.held + 1))
        if count > 0:
            top_a, sum_a = add_exps(top_a, sum_a, first[0])
            top_b, sum_b = add_exps(top_b, sum_b, first[1])
        for k in cutlass.range_constexpr(self.held):
            cute.arch.cp_async_wait_group(self.held - 1 - k)
            if k + 1 < count:
                top_a, sum_a = add_exps(top_a, sum_a, loaded(memory[None, thread, 0, k]))
                top_b, sum_b = add_exps(top_b, sum_b, loaded(memory[None, thread, 1, k]))
        if self.held + 1 < count:
            top_a, sum_a = add_exps(top_a, sum_a, behind[0])
            top_b, sum_b = add_exps(top_b, sum_b, behind[1])
        for k in cutlass.range(self.held + 2, count, unroll=1):
            vectors = self.load(operands, places, k)
            top_a, sum_a = add_exps(top_a, sum_a, vectors[0])
            top_b, sum_b = add_exps(top_b, sum_b, vectors[1])
        return (top_a, sum_a), (top_b, sum_b)

    @cute.jit
    def reduced_exps(self, of_a: Any, of_b: Any, memory: Any) -> Any:
        """Return (top, rest) of the row's log-sum-exps, of both sides, from each thread's.

        `memory` is what warps exchange theirs in, and then blocks, if they have parts of the row.
        """
        parts = merged(of_a, of_b)
        for level in cutlass.range_constexpr(len(memory)):
            source = self.exchanged(parts, memory[level], level)
            top_a, top_b = Float32(LOWEST), Float32(LOWEST)
            sum_a, sum_b = Float32(0.0), Float32(0.0)
            lane = cute.arch.lane_idx()
            if lane < source.shape[1]:
                top_a, sum_a = source[0, lane], source[1, lane]
                top_b, sum_b = source[2, lane], source[3, lane]
            parts = merged((top_a, sum_a), (top_b, sum_b))
        return natural(*parts[:2]), natural(*parts[2:])

    @cute.jit
    def total(self, numbers: Any, memory: Any) -> Any:
        """Return the sums of three numbers over all threads of the cluster."""
        x, y, z = (cute.arch.warp_reduction_sum(number) for number in numbers)
        for level in cutlass.range_constexpr(2):
            source = self.exchanged((x, y, z), memory[level], level)
            x, y, z = Float32(0.0), Float32(0.0), Float32(0.0)
            lane = cute.arch.lane_idx()
            if lane < source.shape[1]:
                x, y, z = source[0, lane], source[1, lane], source[2, lane]
            x, y, z = (cute.arch.warp_reduction_sum(number) for number in (x, y, z))
        return x, y, z

    @cute.jit
    def exchanged(self, numbers: Any, memory: cute.Tensor, level: int) -> cute.Tensor:
        """Return the numbers of all warps of the block (level 0), or blocks of the cluster (1)."""
        if cutlass.const_expr(level == 0):
            warp = cute.arch.warp_idx()
            cute.arch.sync_threads()  # the memory may still be read
            if cute.arch.lane_idx() == 0:
                for i in cutlass.range_constexpr(len(numbers)):
                    memory[i, warp] = numbers[i]
            cute.arch.sync_threads()
            return memory
        if cute.arch.thread_idx()[0] == 0:
            for i in cutlass.range_constexpr(len(numbers)):
                memory[i, cute.arch.block_idx()[0] % self.blocks] = numbers[i]
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        return memory

    @cute.jit
    def divergences(self, reader: Any, places: Any, outs: Any, row: Int32) -> Any:
        """Return this thread's terms of both divergences and of twice the total variation.

        Write the factors of b, if of a KL.
        """
        kl_a, kl_b, variation = Float32(0.0), Float32(0.0), Float32(0.0)
        memory, thread = reader[0][1], cute.arch.thread_idx()[0]
        if places[1] > 0:
            kl_a, kl_b, variation = self.terms(reader, reader[1], places[0], outs, row)
        if cutlass.const_expr(self.streams):
            for start in cutlass.range(1, places[1], self.held, unroll=1):
                for i in cutlass.range_constexpr(self.held):
                    k = start + i
                    cute.arch.cp_async_wait_group(self.held - 1)
                    if k < places[1]:
                        vectors = [loaded(memory[None, thread, side, i]) for side in range(2)]
                        place = places[0] + k * self.threads
                        more = self.terms(reader, vectors, place, outs, row)
                        kl_a += more[0]
                        kl_b += more[1]
                        variation += more[2]
                    self.begin_load(reader[0], places, k + self.held, i)
            cute.arch.cp_async_wait_group(0)
            return kl_a, kl_b, variation
        cute.arch.cp_async_wait_group(0)
        for k in cutlass.range(1, places[1], unroll=1):
            vectors = self.load_again(reader[0], places, k)
            more = self.terms(reader, vectors, places[0] + k * self.threads, outs, row)
            kl_a += more[0]
            kl_b += more[1]
            variation += more[2]
            if cutlass.const_expr(self.keeps_logs) and k <= self.held:
                cute.autovec_copy(vectors[1], memory[None, thread, 1, k - 1])
        return kl_a, kl_b, variation

    @cute.jit
    def terms(self, reader: Any, vectors: Any, place: Int32, outs: Any, row: Int32) -> Any:
        """Do what `divergences` does for one vector of each side.

        If the kernel keeps logs, log a - log m or the sign takes the place of b's logits.
        """
        (x, y), (_, _, (lse_a, lse_b), shares, scales) = vectors, reader
        gap = (lse_a[0] - lse_b[0]) + (lse_a[1] - lse_b[1])
        kl_a, kl_b, variation = Float32(0.0), Float32(0.0), Float32(0.0)
        factors = cute.make_rmem_tensor((VECTOR,), Float32)
        for i in cutlass.range_constexpr(VECTOR):
            p, q = probability(x[i], lse_a), probability(y[i], lse_b)
            distance = (x[i] - y[i]) - gap
            if cutlass.const_expr(self.of_both):
                if cutlass.const_expr(self.form == "tv"):
                    (to_a, to_b), log_a, change = variation_terms(p, q, distance)
                else:
                    (to_a, to_b), log_a, change = mixture_terms(p, q, distance, shares)
                kl_a += to_a
                kl_b += to_b
                if cutlass.const_expr(self.keeps_logs):
                    y[i] = log_a
            else:
                term, change = kl_term(p, q, -distance)
                kl_a += term
                factors[i] = change * scales[1]
            variation += size(change)
        if cutlass.const_expr(not self.of_both and outs[1] is not None):
            self.store(outs, 1, row, place, factors)
        return kl_a, kl_b, variation

    @cute.jit
    def write_factors(self, reader: Any, places: Any, kls: Any, outs: Any, row: Int32) -> None:
        """Write the factors that depend on the row's divergences."""
        if places[1] > 0:
            self.write(reader, reader[1], (places[0], Int32(0)), kls, outs, row)
        for k in cutlass.range(1, places[1], unroll=1):
            vectors = self.load_again(reader[0], places, k)
            self.write(reader, vectors, (places[0] + k * self.threads, k), kls, outs, row)

    @cute.jit
    def write(self, reader: Any, vectors: Any, where: Any, kls: Any, outs: Any, row: Int32) -> None:
        """Do what `write_factors` does for one vector of each side; `where` are its place and k."""
        (x, y), (_, _, (lse_a, lse_b), shares, scales) = vectors, reader
        place, k = where
        gap = (lse_a[0] - lse_b[0]) + (lse_a[1] - lse_b[1])
        logs, of_a, of_b = (cute.make_rmem_tensor((VECTOR,), Float32) for _ in range(3))
        for i in cutlass.range_constexpr(VECTOR):
            logs[i] = y[i]
        if cutlass.const_expr(not self.keeps_logs) or k > self.held:
            for i in cutlass.range_constexpr(VECTOR):
                logs[i] = self.log((x[i] - y[i]) - gap, shares)
        for i in cutlass.range_constexpr(VECTOR):
            of_a[i] = weighted(probability(x[i], lse_a), logs[i] - kls[0]) * (shares[0] * scales[0])
        if cutlass.const_expr(outs[0] is not None):
            self.store(outs, 0, row, place, of_a)
        if cutlass.const_expr(self.of_both and outs[1] is not None):
            for i in cutlass.range_constexpr(VECTOR):
                log_b = self.log(gap - (x[i] - y[i]), (shares[1], shares[0]))
                q = probability(y[i], lse_b)
                of_b[i] = weighted(q, log_b - kls[1]) * (shares[1] * scales[1])
            self.store(outs, 1, row, place, of_b)

    @cute.jit
    def log(self, distance: Float32, shares: Any) -> Float32:
        """Return what the factors of a side hold, with `distance` = log a - log b of that side.

        It is `distance` itself of a KL, log a - log m of a JSD, and the sign of total variation.
        """
        if cutlass.const_expr(self.form == "jsd"):
            return mixture_log(distance, shares)
        return sign(distance) if cutlass.const_expr(self.form == "tv") else distance


@cute.jit
def loaded(source: cute.Tensor) -> cute.Tensor:
    """Return a vector of shared memory in registers."""
    vector = cute.make_rmem_tensor((VECTOR,), Float32)
    cute.autovec_copy(source, vector)
    return vector
