"""The time of a plan, for comparing plans of one problem.

With N tokens, D hidden, V vocab, K columns kept, L aliased (`dw_aliasing`) and G gradients (0 to
2), it is

    windows                2·N·D·((1 + G)·V + (V - K - L)) FLOP; dX's sums are read and written
                           once a window, recomputed logits once; the more columns are aliased,
                           the more windows there are
    gradients in forward   2·N·D·(1 + G)·V FLOP, a chunk's at the rate of memory where reading w
                           takes longer; dW's sums are read and written once a chunk, in part
                           while MMAs run, and the gradients once more in the backward; a
                           chunk has its own cost, and windows inside it read and write dX's
                           sums once each
    sampled                2·N·D·(V + S) FLOP with S drawn columns, and rows of w and h for each
                           entry, which kernels find in the L2 cache in part; on a GPU without
                           kernels, that of windows that keep nothing

On a GPU, the tiles of dX may leave SMs idle in their last wave.  So may those of exponentials, in
the last wave of each window: it counts where chunks have dX alone.
"""

from collections.abc import Sequence
from math import gcd

from cutefce.cute_kernels.arch import arch_named
from cutefce.cute_kernels.config import GemmConfig
from cutefce.cute_kernels.integers import ceil_div
from cutefce.cute_kernels.problem import Problem
from cutefce.cute_kernels.process_cache import process_cache
from cutefce.cute_kernels.schedule.order import (
    MAX_K_SPLITS,
    MIN_K_TILES_PER_SPLIT,
    choose_k_splits,
    num_waves,
)
from cutefce.ops.planning.call_problem import (
    CallProblem,
    accumulates,
    adds_in_forward,
    soft_targets,
)
from cutefce.ops.planning.chunks.windows import split_columns
from cutefce.ops.planning.dw_aliasing import DwMemory
from cutefce.ops.planning.sample_sizes import estimate_count
from cutefce.ops.planning.step_memory import has_weight_kernels, keeps_weight_sums, kept_low_bits

DEVICE_RATES = {"cpu": (1e11, 2e10, 0.0, 0.0), "cuda": (7e14, 4e12, 1e-4, 2.2e-4)}
"""(FLOP/s, bytes/s, seconds a window, seconds a chunk) by device type; a GPU's are an H200's, where
GEMMs of few columns or rows leave SMs idle at their start and end.  The tuned GEMMs of 256 and 512
tokens take 35 to 50 µs longer than their share of those of 8192, last waves included; a chunk has
two, and launches.  A window has three: of steps of 12 to 22 windows, an H100 takes 0.15 to 0.2 ms
more for each, of which dX's sums take 0.07."""
DX_CHUNK_SECONDS, DX_WINDOW_SECONDS, SPLIT_SECONDS = 4e-5, 2.5e-5, 1e-5
"""Of a chunk where kernels form dX alone; of a window in it: two launches, and two more that exit
at once; and of splitting the last tiles of its dX.  With what waves of their own tiles leave idle,
whole steps of six plans at two heads take within 1 % of that."""
FREE_IDLE = 0.04
"""Part of the SMs that may wait at no cost while dX alone is computed: an H200 that runs at its
power limit then computes the others faster."""
SUMS_TIME, HIDING_MMAS = 0.9, 0.25
"""Time of kept sums over that of their bytes, and how much of it the MMAs of a product hide on
Hopper, over their own time.  With the time of a chunk, whole steps of 4 to 64 equal chunks, with
sums of 2, 2.5 and 3 bytes, take within 2 % of that at 32768x4096x131072 on an H200."""
SAMPLING_TIME = 0.035
"""Time of sampling, over that of the product; of 8192 x 4096 x 131072 on an H200, as the next."""
ENTRY_TIME, LIST_BYTES = 0.66, 400
"""Bytes of rows of w or h that an entry moves, over theirs: some are in the L2 cache; and those
that sorting and listing it is worth.  dX of 256 entries takes 2.8 ms, dW 2.5, lists 0.2 to 0.7."""
CLUSTERS, TILE = 66, 256
"""Clusters of two SMs of an H200, and rows and columns of their tiles of dX.  The K of tiles that
are added to kept sums is not split."""


def windows_seconds(
    p: Problem, window: int, aliased: int, kept: int, hidden_bits: int | None = None
) -> float:
    """Return the time of a "windows" plan with `aliased` and `kept` columns.

    With `hidden_bits`, these are kept of dX's sums beside 16.  That takes no less time.
    """
    gradients = p.grad_hidden + p.grad_weight
    recomputed = max(p.vocab - aliased - kept, 0) if gradients else 0
    columns = (1 + gradients) * p.vocab + recomputed
    windows = recomputed / window
    if p.grad_weight and not p.wide_grad_weight:
        memory, least = DwMemory(p.tokens, p.hidden, p.vocab, 1), ceil_div(window, 2)
        windows = memory.window_count(aliased, recomputed, least)
    passes = windows + 1 if p.grad_hidden else 0
    sum_bytes: float = p.accumulator_bytes
    if hidden_bits is not None and not has_weight_kernels(p):
        sum_bytes = _kept_sum_bytes(p, hidden_bits)
    moved = 2 * passes * p.tokens * p.hidden * sum_bytes
    moved += p.tokens * recomputed * p.accumulator_bytes
    moved += 2 * _buffer_bytes(p) + _scaled_bytes(p) * (aliased + kept > 0)
    idle = _idle_seconds(p, p.tokens)
    if hidden_bits is not None and p.arch is not None:
        idle = max(idle, _idle_seconds(p, p.tokens, *_kept_tile(p, window)))
    return _seconds(p, columns, moved) + windows * rates(p)[2] + idle


def chunked_seconds(p: Problem, chunk: int, window: int, stored: int) -> float:
    """Return that of gradients in forward, with chunks of `chunk` tokens.

    A chunk's exponentials of `window` columns exist at a time, of the last ones up to `stored`;
    of all columns if `stored` >= V.
    """
    parts = list(split_columns(p.vocab, window, stored))
    count, windows = max(ceil_div(p.tokens, chunk), 1), len(parts)
    moved = 2 * p.gradient_bytes
    moved += 3 * _buffer_bytes(p) * (not adds_in_forward(p)) + _scaled_bytes(p)
    moved += 2 * (windows - 1) * p.tokens * p.hidden * p.accumulator_bytes
    reads = (1 + p.grad_hidden) * count * p.vocab * p.hidden * p.item_bytes
    flop_rate, byte_rate, _, each = rates(p)
    products = 2 * (1 + p.grad_hidden) * p.tokens * p.hidden * p.vocab / flop_rate
    waits, rows = max(reads / byte_rate - products, 0), min(chunk, p.tokens)
    idle = _idle_seconds(p, rows) + _exps_idle_seconds(p, rows, parts)
    if p.arch is not None and not p.grad_weight:
        splits = _busy_part(p, chunk)[1]
        each = DX_CHUNK_SECONDS + windows * (DX_WINDOW_SECONDS + SPLIT_SECONDS * (splits > 1))
    columns = (1 + p.grad_hidden + p.grad_weight) * p.vocab
    sums = _weight_sums_seconds(p, chunk, count)
    return _seconds(p, columns, moved) + sums + count * each + waits + idle


def sampled_seconds(p: Problem, window: int) -> float:
    """Return that of sampled gradients; without kernels, a GPU multiplies windows as a whole."""
    if not isinstance(p, CallProblem) or (p.device != "cpu" and p.arch is None):
        return windows_seconds(p, window, 0, 0)
    entries = (p.grad_hidden + p.grad_weight) * p.tokens * p.samples
    drawn = estimate_count(p.vocab * p.ranks) // p.ranks
    if p.arch is None:
        return _seconds(p, p.vocab + drawn, entries * p.hidden * p.accumulator_bytes)
    moved = entries * (p.hidden * p.item_bytes * ENTRY_TIME + LIST_BYTES)
    moved += p.vocab * p.hidden * p.item_bytes * p.grad_weight
    return _seconds(p, (1 + SAMPLING_TIME) * p.vocab + drawn, moved)


def _weight_sums_seconds(p: Problem, chunk: int, count: int) -> float:
    """Return the time in which dW's sums are read and written in each chunk, beside the MMAs.

    There are `count` chunks of `chunk` tokens; the last one has the rest.
    """
    sum_bytes = float(p.accumulator_bytes * p.grad_weight)
    if keeps_weight_sums(p):
        sum_bytes = _kept_sum_bytes(p, kept_low_bits(p, count))
    moving = _seconds(p, 0, 2 * p.vocab * p.hidden * sum_bytes)
    if not has_weight_kernels(p) or not p.grad_weight:
        return count * moving
    product = _seconds(p, p.vocab, 0) / max(p.tokens, 1)
    last = p.tokens - (count - 1) * chunk
    each, of_last = (
        max(SUMS_TIME * moving - HIDING_MMAS * product * size, 0) for size in (chunk, last)
    )
    return (count - 1) * each + of_last


def _kept_sum_bytes(p: Problem, low_bits: int) -> float:
    """Return the bytes of a sum in 16 bits and `low_bits`.

    Without a kernel that adds to them, products are written and read beside them.
    """
    return 2 + low_bits / 8 + p.accumulator_bytes * (not has_weight_kernels(p))


def _buffer_bytes(p: Problem) -> int:
    """Return the bytes of dW where a backward adds it to a buffer."""
    return p.vocab * p.hidden * p.accumulator_bytes * accumulates(p)


def _scaled_bytes(p: Problem) -> int:
    """Return the bytes that move where exponentials get the factors of tokens: of soft targets."""
    narrow = p.item_bytes < p.accumulator_bytes
    return (
        2 * p.tokens * p.vocab * p.item_bytes * (soft_targets(p) > 0 and p.grad_weight and narrow)
    )


def _idle_seconds(p: Problem, rows: int, tile: int = TILE, column_time: float = 1.0) -> float:
    """Return the time for which SMs wait in the last waves of dX, of `rows` tokens at a time.

    Its tiles have `tile` columns; with fast ones, of a relative `column_time` below 1, less.
    """
    if p.device == "cpu" or not p.grad_hidden or not rows * p.hidden:
        return 0
    free = FREE_IDLE if p.arch is not None and not p.grad_weight else 0
    return _seconds(p, p.vocab, 0) * max(column_time / _busy_part(p, rows, tile)[0] - 1 - free, 0)


@process_cache
def _kept_tile(p: Problem, window: int) -> tuple[int, float]:
    """Return the columns of a tile that is added to kept sums of dX, and their relative time."""
    arch = arch_named(p.arch or "")
    config = arch.default_configs(p.tokens, p.hidden, 2 * CLUSTERS).kept_sums
    return (TILE, 1.0) if config is None else (config.tile_n, arch.kept_sums_time(config, window))


def _busy_part(p: Problem, rows: int, tile: int = TILE) -> tuple[float, int]:
    """Return the part of dX's waves that SMs compute, and the splits of the last wave's K.

    The time in which splits are added is left out.
    """
    tiles, splits = ceil_div(rows, TILE) * ceil_div(p.hidden, tile), 1
    if tile == TILE:
        splits = choose_k_splits(tiles, CLUSTERS, MAX_K_SPLITS * MIN_K_TILES_PER_SPLIT)
    waves = num_waves(tiles, CLUSTERS, splits)
    return rows * p.hidden / (CLUSTERS * TILE * tile * waves), splits


def whole_waves(p: Problem, rows: int) -> int:
    """Return the fewest columns whose tiles of exponentials, of `rows` tokens, fill whole waves.

    Every cluster then computes as many tiles as any other.  Tiles are the default ones, not tuned.
    """
    config, clusters = _exps_tiles(p)
    return config.columns * (clusters // gcd(clusters, ceil_div(rows, config.rows)))


def _exps_idle_seconds(p: Problem, rows: int, windows: Sequence[tuple[int, int]]) -> float:
    """Return the time for which SMs wait in the last waves of exponentials, window by window.

    `rows` tokens are computed at a time.  Only where kernels form dX alone do chunks have windows.
    """
    if p.arch is None or p.grad_weight or not rows:
        return 0
    config, clusters = _exps_tiles(p)
    blocks = ceil_div(rows, config.rows)
    idle = sum(
        -blocks * ceil_div(last - first, config.columns) % clusters for first, last in windows
    )
    tile_seconds = 2 * config.rows * config.columns * p.hidden / rates(p)[0]
    return idle * tile_seconds * p.tokens / rows


def _exps_tiles(p: Problem) -> tuple[GemmConfig, int]:
    """Return the default tiles of exponentials, and the clusters that compute them."""
    config = arch_named(p.arch or "").default(p.tokens)
    return config, 2 * CLUSTERS // config.cluster


def _seconds(p: Problem, columns: float, moved_bytes: float) -> float:
    """Return the time of GEMMs over `columns` vocabulary columns in all, and of moving bytes."""
    flop_rate, byte_rate, *_ = rates(p)
    return 2 * p.tokens * p.hidden * columns / flop_rate + moved_bytes / byte_rate


def rates(p: Problem) -> tuple[float, float, float, float]:
    """Return the FLOP per second, bytes per second, and seconds of a window and of a chunk."""
    return DEVICE_RATES.get(p.device, DEVICE_RATES["cuda"])
