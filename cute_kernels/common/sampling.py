"""Sampling of softmax entries: which columns of a row enter its gradients.

With an estimate l̂ of a row's log-sum-exp, entry (i, v) is kept with probability

    q_iv = min(1, samples · exp(u_iv - l̂_i))          times 1 - (u_iv/κ_i)² with a softcap

where a hash of the seed, the row and the column decides: all arithmetic modulo 2³²,

    x_i  = mix(seed_0 ^ i · ROW_FACTOR) ^ seed_1
    x_iv = mix(x_i ^ v · COLUMN_FACTOR)          kept where x_iv < q_iv · 2³²

compared as float32.  So the entries depend on no tiling, and target columns have none: their logit
is masked.  Entries are appended to their row in any order, which `sampling.sort_samples` removes.

Where l̂ is found to be too low, lse takes its place.  Fewer entries are kept then, all of them
among those that were: a column's x_iv is the same, and only its q_iv is less.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from cutefce.cute_kernels.common.dsl import LOG2_E, exp2, matrix, vector
from cutefce.cute_kernels.common.logit_transform import softcap_derivative
from cutefce.cute_kernels.spec import gemm as spec
from cutefce.cute_kernels.spec.sampling import COLUMN_FACTOR, HASH_BITS, MIX_FACTORS

WORD, GROUP = 32, 4
"""Columns of a word of decisions, and of those that are looked at together for entries."""


class Samples(NamedTuple):
    """A launch argument of `project_exp`: vectors (N,), which `sampling.prepare_samples` writes."""

    threshold: cute.Tensor
    """Float32: q · 2³² is 2^(u·log2 e - threshold), but for a softcap; +inf without gradient."""
    row_hash: cute.Tensor
    """Int32: x_i."""
    counts: cute.Tensor
    """Int32, from 0: entries of the row; beyond K some are missing, and the number is undefined."""
    entries: cute.Tensor
    """(N, K) int64: u_iv in the lower 32 bits as float32, and v above, in the weight's rows."""
    shard_start: Int32
    """Vocabulary entry of the weight's first row: v of the hash is counted from it."""
    order: cute.Tensor
    """(N,) int64"""
    maps: Int32
    """Whether row i of the launch is row `order`_i of the fields above."""


def samples_argument(kernel: spec.ProjectExpSpec, tokens: Any) -> Samples | None:
    """Return the argument to compile a kernel for, None if it does not sample."""
    if not kernel.samples:
        return None
    vectors = vector(Float32, tokens), vector(Int32, tokens), vector(Int32, tokens)
    entries = matrix(Int64, tokens, cute.sym_int(), aligned=False)
    return Samples(*vectors, entries, Int32(0), vector(Int64, tokens), Int32(0))


@cute.jit
def mix(x: Uint32) -> Uint32:
    """Return a bijection of 32 bits whose results look independent."""
    x = x ^ (x >> 16)
    x = x * Uint32(MIX_FACTORS[0])
    x = x ^ (x >> 15)
    x = x * Uint32(MIX_FACTORS[1])
    return x ^ (x >> 16)


class RowEntries(NamedTuple):
    """The entries of a row among a thread's columns, of which `place_entries` knows the places."""

    kept: cute.Tensor
    """(columns / 32,) Uint32 in registers: a bit a column."""
    row: Int32
    column: Int32
    """The first column's."""
    place: Int32
    """The first entry's."""


@cute.jit
def place_entries(
    u: cute.Tensor,
    samples: Samples,
    launch_row: Any,
    column: Int32,
    offsets: Any,
    scale: Any = None,
) -> RowEntries:
    """Find what is kept of logits u of one row, whose columns are `column` + `offsets`.

    `launch_row` is the row, and whether it counts; `scale` its κ with a softcap, else None.  The
    places come from one atomic operation, which takes as long as many columns: the entries of
    another row may be found before `append_entries`.
    """
    row, counts = launch_row
    columns = cute.size(u)
    kept = cute.make_rmem_tensor(((columns + WORD - 1) // WORD,), Uint32)
    kept.fill(Uint32(0))
    place, inverse_scale = Int32(0), None
    if cutlass.const_expr(scale is not None):
        inverse_scale = cute.arch.rcp_approx(scale)
    if counts:
        if samples.maps != 0:
            row = Int32(samples.order[row])
        threshold, row_hash = samples.threshold[row], Uint32(samples.row_hash[row])
        if samples.counts[row] > samples.entries.shape[1]:
            threshold = Float32.inf  # the row is done without samples
        first, number = Uint32(column + samples.shard_start) * Uint32(COLUMN_FACTOR), Int32(0)
        for start in cutlass.range_constexpr(0, columns, WORD):
            word = Uint32(0)
            for i in cutlass.range_constexpr(start, min(start + WORD, columns)):
                x = mix((first + Uint32(offsets[i] * COLUMN_FACTOR % (1 << 32))) ^ row_hash)
                if is_kept(x, u[i], threshold, inverse_scale):
                    word = word | Uint32(1 << (i - start))
            kept[start // WORD] = word
            number += Int32(cute.arch.popc(word))
        if number > 0:
            counter = samples.counts.iterator + row
            place = Int32(cute.arch.atomic_add(counter, number, sem="relaxed", scope="gpu"))
    return RowEntries(kept, row, column, place)


@cute.jit
def append_entries(u: cute.Tensor, samples: Samples, entries: RowEntries, offsets: Any) -> None:
    """Write the entries of a row to their places, as far as there are such."""
    (tokens, capacity), pitch = samples.entries.shape, Int32(samples.entries.stride[0])
    # one index, of 32 bits: there would be as much code again to find the row for every column
    slots = cute.make_tensor(samples.entries.iterator, cute.make_layout(tokens * pitch))
    first = entries.row * pitch
    place, end = first + entries.place, first + capacity
    for start in cutlass.range_constexpr(0, cute.size(u), GROUP):
        word = entries.kept[start // WORD] >> (start % WORD)
        if word & Uint32((1 << GROUP) - 1) != 0:
            for i in cutlass.range_constexpr(start, min(start + GROUP, cute.size(u))):
                if word & Uint32(1 << (i - start)) != 0:
                    if place < end:
                        slots[place] = pack(entries.column + offsets[i], u[i])
                    place += 1


@cute.jit
def final_threshold(threshold: Float32, lse: Float32, log2_samples: Float32) -> Float32:
    """Return the threshold that decides in the end, of the larger of lse and its estimate.

    lse is in units of ln 2.
    """
    return cute.arch.fmax(threshold, lse - log2_samples - HASH_BITS)


@cute.jit
def is_kept(x: Uint32, u: Float32, threshold: Float32, inverse_scale: Any) -> Any:
    """Return whether the column with hash x and logit u is kept; with a softcap, of 1/κ."""
    limit = exp2(u * LOG2_E - threshold)
    if cutlass.const_expr(inverse_scale is not None):
        limit *= softcap_derivative(u, inverse_scale)
    return Float32(x) < limit


@cute.jit
def pack(column: Int32, number: Float32) -> Int64:
    """Return an entry; entries compare as their columns do."""
    return (Int64(column) << 32) | Int64(Uint32(number.bitcast(Int32)))


@cute.jit
def column_of(entry: Int64) -> Int32:
    """Return the column of an entry."""
    return Int32(entry >> 32)


@cute.jit
def number_of(entry: Int64) -> Float32:
    """Return the number of an entry."""
    return Int32(entry).bitcast(Float32)
