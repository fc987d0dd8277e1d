"""The O(N·D) kernels: what a row needs before and after the products.

    target_logit   r_i = h_i · w_y, a warp a row; zeros for the notes of what follows
    finish         partial sums to S, T, ρ and the loss, a warp a row; the last block reduces
    combine        out_i = a_i (x_i + b_i t_{k_i}), a block a row: the last step of dX, and s ⊙ h
    add_targets    sums_v += Σ_{i: y_i = v} c_i h_i, a block a row

Each reads and writes everything once, 16 bytes a thread at a time, and adds in a fixed order.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.runtime import make_fake_stream
from cutlass.memory import SmemAllocator

from cutefce.cute_kernels import kernels
from cutefce.cute_kernels.dsl import (
    BLOCK_NOTES,
    DTYPES,
    EARLY,
    FINISHED_NOTE,
    LN_2,
    LOG2_E,
    await_previous,
    exp2,
    matrix,
    number,
    vector,
)
from cutefce.cute_kernels.problem import SLACK

WARPS = kernels.TargetLogit.WARPS
"""Warps of a block."""


def trace(kernel: kernels.Kernel) -> tuple[Any, tuple[Any, ...]]:
    """Return the host function of `kernel` and arguments to compile it for."""
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    rows = cute.sym_int()
    if isinstance(kernel, kernels.TargetLogit):
        dtype, hidden = DTYPES[kernel.dtype], cute.sym_int(divisibility=8)
        h, w = matrix(dtype, rows, hidden), matrix(dtype, cute.sym_int(), hidden)
        vectors = vector(Int64, rows), vector(Float32, rows), vector(Int32, cute.sym_int())
        return target_logit, (h, w, *vectors, Int64(0), stream)
    if isinstance(kernel, kernels.Finish):
        parts = matrix(Float32, rows, cute.sym_int(), aligned=False)
        stats = matrix(Float32, 4, rows, aligned=False)
        logit, target = vector(Float32, rows), vector(Int64, rows)
        outputs = stats, number(Float32), vector(Int32, cute.sym_int())
        return Finish(kernel.rows), (parts, logit, target, *outputs, Int64(0), Int32(0), stream)
    if isinstance(kernel, kernels.AddTargets):
        dtype, tokens, hidden = DTYPES[kernel.dtype], cute.sym_int(), cute.sym_int(divisibility=8)
        lists = vector(Int64, tokens), vector(Int32, cute.sym_int()), vector(Float32, tokens)
        sums = matrix(Float32, rows, hidden)
        return add_targets, (sums, *lists, matrix(dtype, tokens, hidden), stream)
    assert isinstance(kernel, kernels.Combine)
    hidden, table, index = cute.sym_int(divisibility=8), None, None
    x, out = (matrix(DTYPES[name], rows, hidden) for name in (kernel.x, kernel.out))
    if kernel.table is not None:
        table = matrix(DTYPES[kernel.table], cute.sym_int(), hidden)
        index = vector(Int64, rows)
    a = vector(Float32, rows) if kernel.scaled else None
    b = vector(Float32, rows) if kernel.weighted else None
    return combine, (out, x, table, a, b, index, stream)


@cute.jit
def target_logit(
    h: cute.Tensor,
    w: cute.Tensor,
    target: cute.Tensor,
    logit: cute.Tensor,
    zeros: cute.Tensor,
    ignored: Int64,
    stream: Any,
) -> None:
    """Write r (N,): +inf where the target (N,) is `ignored`, NaN where it lies outside [0, V).

    Set `zeros`, which are at most `kernels.TargetLogit.zeros(N)`, to 0.
    """
    blocks = (h.shape[0] + WARPS - 1) // WARPS
    target_logit_kernel(h, w, target, logit, zeros, ignored).launch(
        grid=[blocks, 1, 1], block=[32 * WARPS, 1, 1], stream=stream, **EARLY
    )


@cute.kernel
def target_logit_kernel(
    h: cute.Tensor,
    w: cute.Tensor,
    target: cute.Tensor,
    logit: cute.Tensor,
    zeros: cute.Tensor,
    ignored: Int64,
) -> None:
    """Compute one row a warp; a thread has one of the zeros."""
    await_previous()
    lane = cute.arch.lane_idx()
    place = cute.arch.block_idx()[0] * 32 * WARPS + cute.arch.thread_idx()[0]
    if place < zeros.shape[0]:
        zeros[place] = Int32(0)
    row = cute.arch.block_idx()[0] * WARPS + cute.arch.warp_idx()
    if row < h.shape[0]:
        index = target[row]
        inside = index >= 0 and index < w.shape[0]
        address = Int64(0)
        if inside:
            address = index
        total = dot(chunks(h, row), chunks(w, address), lane, h.shape[1] // 8)
        total = cute.arch.warp_reduction_sum(total)
        if not inside:
            total = Float32.nan
        if index == ignored:
            total = Float32.inf
        if lane == 0:
            logit[row] = total


@cute.jit
def chunks(x: cute.Tensor, row: Any) -> cute.Tensor:
    """Return row `row` of x (N, D) as (8, D / 8)."""
    return cute.zipped_divide(x[row, None], (8,))


@cute.jit
def dot(a: cute.Tensor, b: cute.Tensor, lane: Int32, count: Int32) -> Float32:
    """Return the part of Σ a·b of every 32nd chunk from `lane` on, of `count` chunks."""
    total = Float32(0.0)
    for chunk in cutlass.range(lane, count, 32, unroll=4):
        x, y = load(a, chunk), load(b, chunk)
        for i in cutlass.range_constexpr(8):
            total += x[i] * y[i]
    return total


@cute.jit
def load(x: cute.Tensor, chunk: Int32) -> cute.Tensor:
    """Return chunk number `chunk` of x (8, n) as float32 registers."""
    raw = cute.make_rmem_tensor((8,), x.element_type)
    cute.autovec_copy(x[None, chunk], raw)
    wide = cute.make_rmem_tensor((8,), Float32)
    wide.store(raw.load().to(Float32))
    return wide


class Finish:
    """Join the parts of every row, and reduce the losses."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    @cute.jit
    def __call__(
        self,
        parts: cute.Tensor,
        logit: cute.Tensor,
        target: cute.Tensor,
        stats: cute.Tensor,
        reduced: cute.Tensor,
        notes: cute.Tensor,
        ignored: Int64,
        mean: Int32,
        stream: Any,
    ) -> None:
        """Write ρ, S, T and the loss to stats (4, N), of parts (N, P) and r (N,).

        ρ is r, unless a part lies beyond the slack: then ρ is about the largest part, and the row
        block is noted.  Losses of rows with r = +inf are 0.  `reduced` () receives their sum, or
        the mean over the targets that are not `ignored`.

        notes (2 + row blocks,) are described in `dsl`.
        """
        blocks = (logit.shape[0] + WARPS - 1) // WARPS
        self.kernel(parts, logit, target, stats, reduced, notes, ignored, mean).launch(
            grid=[blocks, 1, 1], block=[32 * WARPS, 1, 1], stream=stream, **EARLY
        )

    @cute.kernel
    def kernel(
        self,
        parts: cute.Tensor,
        logit: cute.Tensor,
        target: cute.Tensor,
        stats: cute.Tensor,
        reduced: cute.Tensor,
        notes: cute.Tensor,
        ignored: Int64,
        mean: Int32,
    ) -> None:
        """Join one row a warp; the block that finishes last adds all losses."""
        await_previous()
        thread = cute.arch.thread_idx()[0]
        smem = SmemAllocator()
        shared = smem.allocate_tensor(Float32, cute.make_layout(2 * WARPS), 16)
        ticket = smem.allocate_tensor(Int32, cute.make_layout(1), 4)
        row = cute.arch.block_idx()[0] * WARPS + cute.arch.warp_idx()
        if row < logit.shape[0]:
            self.join(parts, logit, stats, notes, row)
        others = cute.arch.grid_dim()[0] - 1
        if others > 0:  # for a few rows the round trips to memory would take longer than the rest
            cute.arch.fence_acq_rel_gpu()
        cute.arch.sync_threads()
        if thread == 0:
            ticket[0] = Int32(0)
            if others > 0:
                ticket[0] = cute.arch.atomic_add(
                    notes.iterator + FINISHED_NOTE, Int32(1), sem="acq_rel", scope="gpu"
                )
        cute.arch.sync_threads()
        if ticket[0] == others:
            self.reduce(stats, target, reduced, shared, ignored, mean)

    @cute.jit
    def join(
        self,
        parts: cute.Tensor,
        logit: cute.Tensor,
        stats: cute.Tensor,
        notes: cute.Tensor,
        row: Int32,
    ) -> None:
        """Join the parts of one row."""
        lane = cute.arch.lane_idx()
        largest = -Float32.inf
        for part in cutlass.range(lane, parts.shape[1], 32, unroll=4):
            largest = cute.arch.fmax(largest, parts[row, part])
        largest = cute.arch.warp_reduction_max(largest)
        own = logit[row]
        reference = own
        if largest > SLACK * LOG2_E:
            reference = own + largest * LN_2
            if lane == 0:
                notes[BLOCK_NOTES + row // self.rows] = Int32(1)
        # what the rounded reference is above the target's logit; not inf - inf
        distance = Float32(0.0)
        if reference != own:
            distance = reference - own
        shift = distance * LOG2_E
        total = Float32(0.0)
        for part in cutlass.range(lane, parts.shape[1], 32, unroll=4):
            total += exp2(parts[row, part] - shift)
        total = cute.arch.warp_reduction_sum(total)
        if lane == 0:
            stats[0, row] = reference
            stats[1, row] = total
            stats[2, row] = total + exp2(-shift)
            # exp(r - ρ) - 1 is exactly 0 where the target's logit is the reference
            excess = total
            if distance != 0.0:
                excess = total + (exp2(-shift) - 1.0)
            stats[3, row] = distance + log1p(excess)

    @cute.jit
    def reduce(
        self,
        stats: cute.Tensor,
        target: cute.Tensor,
        reduced: cute.Tensor,
        shared: cute.Tensor,
        ignored: Int64,
        mean: Int32,
    ) -> None:
        """Add all losses, in an order that is always the same."""
        thread, warp = cute.arch.thread_idx()[0], cute.arch.warp_idx()
        total, count = Float32(0.0), Float32(0.0)
        for row in cutlass.range(thread, target.shape[0], 32 * WARPS, unroll=8):
            total += stats[3, row]
            if target[row] != ignored:
                count += 1.0
        total = cute.arch.warp_reduction_sum(total)
        count = cute.arch.warp_reduction_sum(count)
        if cute.arch.lane_idx() == 0:
            shared[warp] = total
            shared[WARPS + warp] = count
        cute.arch.sync_threads()
        if thread == 0:
            total, count = Float32(0.0), Float32(0.0)
            for other in cutlass.range_constexpr(WARPS):
                total += shared[other]
                count += shared[WARPS + other]
            if mean != 0:
                total = total / cute.arch.fmax(count, Float32(1.0))
            reduced[()] = total


@cute.jit
def log1p(x: Float32) -> Float32:
    """Return log(1 + x): 2·atanh(x / (2 + x)) by its series where 1 + x would round x away."""
    result = Float32(0.0)
    if cute.arch.fmax(x, -x) < 0.5:
        u = x / (2.0 + x)
        square = u * u
        series = Float32(1.0 / 13.0)
        for odd in cutlass.range_constexpr(11, 0, -2):
            series = series * square + 1.0 / odd
        result = 2.0 * u * series
    else:
        result = cute.math.log2(1.0 + x) * LN_2
    return result


@cute.jit
def combine(
    out: cute.Tensor,
    x: cute.Tensor,
    table: cute.Tensor | None,
    a: cute.Tensor | None,
    b: cute.Tensor | None,
    index: cute.Tensor | None,
    stream: Any,
) -> None:
    """Write a_i (x_i + b_i table_{index_i}) to out (N, D), of x (N, D), a, b, index (N,)."""
    combine_kernel(out, x, table, a, b, index).launch(
        grid=[x.shape[0], 1, 1], block=[32 * WARPS, 1, 1], stream=stream, **EARLY
    )


@cute.kernel
def combine_kernel(
    out: cute.Tensor,
    x: cute.Tensor,
    table: cute.Tensor | None,
    a: Any,
    b: Any,
    index: Any,
) -> None:
    """Combine one row a block."""
    await_previous()
    row = cute.arch.block_idx()[0]
    scale, factor = Float32(1.0), Float32(1.0)
    if cutlass.const_expr(a is not None):
        scale = a[row]
    if cutlass.const_expr(b is not None):
        factor = b[row]
    to, source = chunks(out, row), chunks(x, row)
    extra = source
    if cutlass.const_expr(table is not None):
        extra = chunks(table, index[row])
    for chunk in cutlass.range(cute.arch.thread_idx()[0], x.shape[1] // 8, 32 * WARPS, unroll=2):
        values = load(source, chunk)
        if cutlass.const_expr(table is not None):
            others = load(extra, chunk)
            for i in cutlass.range_constexpr(8):
                values[i] = values[i] + factor * others[i]
        for i in cutlass.range_constexpr(8):
            values[i] = values[i] * scale
        rounded = cute.make_rmem_tensor((8,), out.element_type)
        rounded.store(values.load().to(out.element_type))
        cute.autovec_copy(rounded, to[None, chunk])


@cute.jit
def add_targets(
    sums: cute.Tensor,
    order: cute.Tensor,
    starts: cute.Tensor,
    coefficient: cute.Tensor,
    h: cute.Tensor,
    stream: Any,
) -> None:
    """Add Σ c_i h_i over the tokens i of v to sums_v (V, D).

    Those are `order` (N,) from `starts`_v to `starts`_{v+1} (V + 1,); c is `coefficient` (N,), in
    that order.
    """
    add_targets_kernel(sums, order, starts, coefficient, h).launch(
        grid=[sums.shape[0], 1, 1], block=[32 * WARPS, 1, 1], stream=stream, **EARLY
    )


@cute.kernel
def add_targets_kernel(
    sums: cute.Tensor,
    order: cute.Tensor,
    starts: cute.Tensor,
    coefficient: cute.Tensor,
    h: cute.Tensor,
) -> None:
    """Add to one row a block."""
    await_previous()
    row = cute.arch.block_idx()[0]
    to, begin, end = chunks(sums, row), starts[row], starts[row + 1]
    if begin < end:
        for chunk in cutlass.range(cute.arch.thread_idx()[0], sums.shape[1] // 8, 32 * WARPS):
            values = load(to, chunk)
            for place in cutlass.range(begin, end, unroll=4):
                factor, others = coefficient[place], load(chunks(h, order[place]), chunk)
                for i in cutlass.range_constexpr(8):
                    values[i] = values[i] + factor * others[i]
            cute.autovec_copy(values, to[None, chunk])
