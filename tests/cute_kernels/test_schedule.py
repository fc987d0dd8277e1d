"""Tile order: every tile is computed once, and splits balance the clusters within their limits."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cutefce.cute_kernels.arch.sm90 import Sm90
from cutefce.cute_kernels.config import GemmConfig
from cutefce.cute_kernels.integers import ceil_div
from cutefce.cute_kernels.schedule.order import (
    MIN_FIRST_K_TILES,
    MIN_K_TILES_PER_SPLIT,
    choose_k_splits,
    choose_vocab_splits,
    most_vocab_splits,
    num_waves,
    rescale_vocab_splits,
    split_k,
    split_start,
    tile_coord,
    tiles_per_cluster,
)


@given(st.integers(1, 40), st.integers(1, 30), st.integers(1, 12))
def test_every_work_tile_is_visited_once(row_blocks: int, splits: int, group: int) -> None:
    coords = {tile_coord(i, row_blocks, splits, group) for i in range(row_blocks * splits)}
    assert coords == {(row, split) for row in range(row_blocks) for split in range(splits)}


@pytest.mark.parametrize(
    ("tokens", "vocab"), [(8192, 131072), (1024, 262144), (4096, 128256), (32768, 262144)]
)
def test_vocab_splits_balance_clusters(tokens: int, vocab: int) -> None:
    config = GemmConfig(128, 192, cluster=2, stages=5, pingpong=True)
    n_tiles, row_blocks = ceil_div(vocab, config.tile_n), ceil_div(tokens, config.rows)
    splits = choose_vocab_splits(tokens, vocab, config, 66)
    assert (
        max(tiles_per_cluster(row_blocks, n_tiles, splits, config.raster_group, 66))
        <= 1.004 * n_tiles * row_blocks / 66
    )


@given(
    st.integers(1, 40),
    st.integers(1, 60),
    st.integers(1, 30),
    st.integers(1, 12),
    st.integers(1, 70),
)
def test_tiles_per_cluster_are_those_of_its_work_tiles(
    row_blocks: int, n_tiles: int, splits: int, group: int, clusters: int
) -> None:
    splits = min(splits, n_tiles)
    counted = [0] * clusters
    for index in range(row_blocks * splits):
        _, split = tile_coord(index, row_blocks, splits, group)
        counted[index % clusters] += len(range(split, n_tiles, splits))
    assert tiles_per_cluster(row_blocks, n_tiles, splits, group, clusters) == counted


@given(st.integers(1, 300), st.integers(1, 70), st.integers(1, 8))
def test_k_splits_cover_the_last_wave(work_tiles: int, clusters: int, k_splits: int) -> None:
    last_wave = work_tiles % clusters
    whole = work_tiles - last_wave
    indices = range(whole, work_tiles + last_wave * (k_splits - 1))
    coords = [split_k(i, work_tiles, clusters) for i in indices]
    expected = [(t, k) for t in range(whole, work_tiles) for k in range(k_splits)]
    assert sorted(coords) == expected
    # a cluster that waits for an earlier split never waits for one that starts later
    assert [k for _, k in coords] == sorted(k for _, k in coords)


@given(st.integers(1, 5000), st.integers(1, 8), st.integers(0, 30))
def test_k_splits_cover_k_and_grow(k_tiles: int, k_splits: int, more: int) -> None:
    starts = [split_start(k_tiles, k, k_splits, more) for k in range(k_splits + 1)]
    assert starts[0] == 0 and starts[-1] == k_tiles
    sizes = [b - a for a, b in itertools.pairwise(starts)]
    if k_tiles // k_splits >= MIN_K_TILES_PER_SPLIT:
        assert sizes[0] >= MIN_FIRST_K_TILES
        assert all(b - a + 1 >= 0 and b - a <= more + 1 for a, b in itertools.pairwise(sizes))


@pytest.mark.parametrize("work_tiles", [1024, 512, 576, 32, 100], ids=str)
def test_k_splits_fill_the_last_wave(work_tiles: int) -> None:
    k_splits = choose_k_splits(work_tiles, 66, 2048)
    waves = num_waves(work_tiles, 66, k_splits)
    assert num_waves(work_tiles, 66, 1) >= waves >= work_tiles / 66
    assert waves <= work_tiles / 66 + 0.12


@pytest.mark.parametrize(
    ("tokens", "vocab", "most_on_average"),
    [
        (8192, 131072, 1.015),
        (2816, 131072, 1.02),
        (4096, 128256, 1.02),
        (32768, 131072, 1.045),
        (32768, 32000, 1.05),
        (16384, 32000, 1.045),
        (32768, 8000, 1.1),
    ],
)
def test_fewer_rows_fill_the_clusters(tokens: int, vocab: int, most_on_average: float) -> None:
    """Well enough with several raster groups too, which the choice takes for one."""
    config = Sm90().default(tokens)
    n_tiles, planned = ceil_div(vocab, config.tile_n), ceil_div(tokens, config.rows)
    splits = choose_vocab_splits(tokens, vocab, config, 66)
    most = max(splits, most_vocab_splits(tokens, vocab, config))
    shares = []
    for rows in range(1, planned):
        chosen = rescale_vocab_splits(splits, planned, rows, n_tiles, 66, most)
        counts = tiles_per_cluster(rows, n_tiles, chosen, config.raster_group, 66)
        shares.append(max(counts) * 66 / (rows * n_tiles))
        assert max(counts) <= 1 + 1.17 * rows * n_tiles / 66 or rows * most < 2 * 66
    assert sum(shares) / len(shares) <= most_on_average
