"""The classes that log-sum-exps are estimated of: frequent targets, and some drawn of the others.

Four kernels: zeros, the number of targets of each class, the choice by one block, and where each
row's target is among the chosen ones.  Counters are integers that atomic operations change, so the
result depends on no order of events.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32
from cutlass.memory import SmemAllocator

from cutefce.cute_kernels.common.dsl import USE_PDL, pdl_wait, vector
from cutefce.cute_kernels.common.launch import HostFunction, Signature, blocks_of, row_launch
from cutefce.cute_kernels.common.sampling import mix
from cutefce.cute_kernels.common.scan import inclusive_sum, sums_of_warps
from cutefce.cute_kernels.spec import sampling as spec
from cutefce.cute_kernels.spec.sampling import (
    COLUMN_FACTOR,
    ROW_FACTOR,
    STRATUM_BITS,
    STRATUM_ROW,
)

THREADS = 256
CHOICE_THREADS, CHOICE_WARPS = 1024, 32
"""Of the block that chooses."""
LEVELS = CHOICE_THREADS
"""Numbers of targets that are told apart; fewer classes have more than can be chosen."""
CLASSES = 4
"""Classes that are loaded at a time."""
SEARCH_STEPS = spec.ChooseClassesSpec.MAX_FREQUENT.bit_length()
STRATUM_ROW_KEY = STRATUM_ROW * ROW_FACTOR % (1 << 32)


def compile_signature(kernel: spec.ChooseClassesSpec) -> Signature:
    """Return the host function of a step and the arguments to compile it for."""
    rows = cute.sym_int()
    index, classes = vector(Int64, rows), vector(Int64, cute.sym_int())
    if kernel.step == "choose":
        return ChooseClasses().signature(
            index=index,
            seed=vector(Int32, 2),
            classes=classes,
            counts=vector(Int32, cute.sym_int(), aligned=True),
            frequent=Int32(0),
            first=Int64(0),
            ignored=Int64(0),
        )
    return row_launch(
        place_kernel,
        blocks_of("index", THREADS),
        index=index,
        classes=classes,
        of_frequent=vector(Int64, rows),
        of_drawn=vector(Int64, rows),
        frequent=Int32(0),
        first=Int64(0),
    )


class ChooseClasses(HostFunction):
    """The launches of the choice."""

    @cute.jit
    def launch(self, operands: Any, stream: Any) -> None:
        """Write the `frequent` most frequent targets and drawn others to classes (M + S,).

        Both ascend; of equally frequent ones, the first.  Targets are `index` (N,) + `first`, those
        that are `ignored` or outside of `counts` (V,), which is between the kernels, do not count.
        """
        index, seed, classes, counts, frequent, first, ignored = operands
        launch = {"stream": stream, **USE_PDL}
        blocks = (counts.shape[0] + THREADS - 1) // THREADS
        row_blocks = (index.shape[0] + THREADS - 1) // THREADS
        clear_kernel(counts).launch(grid=[blocks, 1, 1], block=[THREADS, 1, 1], **launch)
        count_kernel(index, counts, first, ignored).launch(
            grid=[row_blocks, 1, 1], block=[THREADS, 1, 1], **launch
        )
        choose_kernel(seed, classes, counts, frequent).launch(
            grid=[1, 1, 1], block=[CHOICE_THREADS, 1, 1], **launch
        )


@cute.kernel
def clear_kernel(counts: cute.Tensor) -> None:
    """Write a zero a thread."""
    pdl_wait()
    i = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
    if i < counts.shape[0]:
        counts[i] = Int32(0)


@cute.kernel
def count_kernel(index: cute.Tensor, counts: cute.Tensor, first: Int64, ignored: Int64) -> None:
    """Count the target of a row a thread."""
    pdl_wait()
    row = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
    if row < index.shape[0]:
        target = index[row] + first
        if index[row] != ignored and target >= 0 and target < counts.shape[0]:
            counter = counts.iterator + Int32(target)
            add = {"op": "add", "dtype": "s32", "sem": "relaxed", "scope": "gpu"}
            cute.arch.red(counter, Int32(1), **add)


@cute.kernel
def choose_kernel(
    seed: cute.Tensor, classes: cute.Tensor, counts: cute.Tensor, frequent: Int32
) -> None:
    """Choose by one block."""
    smem = SmemAllocator()
    levels = smem.allocate_tensor(Int32, cute.make_layout(LEVELS), 16)
    parts = smem.allocate_tensor(Int32, cute.make_layout(CHOICE_WARPS), 16)
    limits = smem.allocate_tensor(Int32, cute.make_layout(2), 8)
    most = spec.ChooseClassesSpec.MAX_FREQUENT
    chosen = smem.allocate_tensor(Int32, cute.make_layout(most), 16)
    thread, vocab = cute.arch.thread_idx()[0], counts.shape[0]
    levels[thread] = Int32(0)
    pdl_wait()
    cute.arch.sync_threads()
    own = cute.make_rmem_tensor((CLASSES,), Int32)
    for i in cutlass.range(thread * CLASSES, vocab, CHOICE_THREADS * CLASSES, unroll=8):
        load_levels(counts, i, own)
        for j in cutlass.range_constexpr(CLASSES):
            if own[j] > 0:
                place = levels.iterator + own[j]
                cute.arch.atomic_add(place, Int32(1), sem="relaxed", scope="cta")
    cute.arch.sync_threads()
    find_limits(levels, parts, limits, vocab, frequent)
    choose_frequent(counts, parts, chosen, (limits[0], limits[1]))
    for i in cutlass.range(thread, frequent, CHOICE_THREADS, unroll=1):
        classes[i] = Int64(chosen[i])
    draws = classes.shape[0] - frequent
    state = mix(Uint32(seed[0]) ^ Uint32(STRATUM_ROW_KEY)) ^ Uint32(seed[1])
    for i in cutlass.range(thread, draws, CHOICE_THREADS, unroll=1):
        bits = mix(state ^ (Uint32(i) * Uint32(COLUMN_FACTOR)))
        place = (Int64(i) << STRATUM_BITS) + Int64(bits >> (32 - STRATUM_BITS))
        draw = Int32(place * (vocab - frequent) // (Int64(draws) << STRATUM_BITS))
        low, high = Int32(0), frequent  # frequent classes before the drawn one
        for _ in cutlass.range(SEARCH_STEPS, unroll=1):
            if low < high:
                middle = (low + high) >> 1
                if chosen[middle] - middle <= draw:
                    low = middle + 1
                else:
                    high = middle
        classes[frequent + i] = Int64(draw + low)


@cute.jit
def load_levels(counts: cute.Tensor, first: Int32, levels: cute.Tensor) -> None:
    """Load the numbers of targets of classes from `first` on, as far as they are told apart.

    Those of no class are -1; `first` is a multiple of their number.
    """
    if first + CLASSES <= counts.shape[0]:
        vectors = cute.zipped_divide(counts, (CLASSES,))
        cute.autovec_copy(vectors[None, first // CLASSES], levels)
    else:
        for j in cutlass.range_constexpr(CLASSES):
            levels[j] = Int32(-1)
            if first + j < counts.shape[0]:
                levels[j] = counts[first + j]
    for j in cutlass.range_constexpr(CLASSES):
        levels[j] = cutlass.min(levels[j], LEVELS - 1)


@cute.jit
def find_limits(
    levels: cute.Tensor, parts: cute.Tensor, limits: cute.Tensor, vocab: Int32, frequent: Int32
) -> None:
    """Write the level of the last class to choose, and how many of this level are chosen."""
    level = LEVELS - 1 - cute.arch.thread_idx()[0]
    own = levels[level]
    if level == 0:
        own = vocab  # those of no target are not counted; there are enough
    up_to = sum_before(own, parts) + own
    if up_to >= frequent and up_to - own < frequent:
        limits[0], limits[1] = level, frequent - (up_to - own)
    cute.arch.sync_threads()


@cute.jit
def choose_frequent(
    counts: cute.Tensor, parts: cute.Tensor, chosen: cute.Tensor, limits: Any
) -> None:
    """Write the classes above the last level and the first `limits`_1 of this level, in order."""
    thread, (last_level, room), vocab = cute.arch.thread_idx()[0], limits, counts.shape[0]
    share = (vocab + CHOICE_THREADS * CLASSES - 1) // (CHOICE_THREADS * CLASSES) * CLASSES
    first = thread * share
    end = cutlass.min(first + share, vocab)
    own = cute.make_rmem_tensor((CLASSES,), Int32)
    own_above, own_last = Int32(0), Int32(0)
    for i in cutlass.range(first, end, CLASSES, unroll=8):
        load_levels(counts, i, own)
        for j in cutlass.range_constexpr(CLASSES):
            own_above += Int32(own[j] > last_level)
            own_last += Int32(own[j] == last_level)
    above, last = sum_before(own_above, parts), sum_before(own_last, parts)
    if own_above > 0 or (own_last > 0 and last < room):
        for i in cutlass.range(first, end, CLASSES, unroll=4):
            load_levels(counts, i, own)
            for j in cutlass.range_constexpr(CLASSES):
                is_above, is_last = own[j] > last_level, own[j] == last_level
                if is_above or (is_last and last < room):
                    chosen[above + cutlass.min(last, room)] = i + j
                above, last = above + Int32(is_above), last + Int32(is_last)
    cute.arch.sync_threads()


@cute.jit
def sum_before(value: Int32, parts: cute.Tensor) -> Int32:
    """Return the sum of `value` over the threads before this one; all call this."""
    warp, lane = cute.arch.warp_idx(), cute.arch.lane_idx()
    up_to = inclusive_sum(value, lane)
    if lane == 31:
        parts[warp] = up_to
    cute.arch.sync_threads()
    before, _ = sums_of_warps(parts, warp, lane)
    cute.arch.sync_threads()
    return before + up_to - value


@cute.kernel
def place_kernel(operands: Any) -> None:
    """Write where `index` (N,) + `first` is among the frequent and among the drawn classes.

    Places are from 0 in each; -1 if it is not there.  A thread has a row.
    """
    index, classes, of_frequent, of_drawn, frequent, first = operands
    pdl_wait()
    row = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
    if row < index.shape[0]:
        target, count = index[row] + first, Int32(classes.shape[0])
        of_frequent[row] = Int64(place_of(classes, target, Int32(0), frequent))
        of_drawn[row] = Int64(place_of(classes, target, frequent, count))


@cute.jit
def place_of(classes: cute.Tensor, target: Int64, begin: Int32, end: Int32) -> Int32:
    """Return the place of `target` among the ascending classes from `begin` to `end`, or -1."""
    low, high = begin, end
    for _ in cutlass.range(SEARCH_STEPS, unroll=1):
        if low < high:
            middle = (low + high) >> 1
            if classes[middle] < target:
                low = middle + 1
            else:
                high = middle
    result = Int32(-1)
    if low < end and classes[cutlass.min(low, end - 1)] == target:
        result = low - begin
    return result
