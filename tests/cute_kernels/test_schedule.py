"""The order of tiles visits everything once, and the number of windows is as promised."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cutefce.cute_kernels.arch.sm90 import Sm90
from cutefce.cute_kernels.config import GemmConfig
from cutefce.cute_kernels.schedule.order import (
    MIN_STEPS_PER_SPLIT,
    PARTIAL_BYTES,
    choose_k_splits,
    choose_vocab_splits,
    num_waves,
    piece,
    tiles_per_cluster,
    unit,
)


@given(st.integers(1, 40), st.integers(1, 30), st.integers(1, 12))
def test_every_unit_is_visited_once(row_blocks: int, windows: int, group: int) -> None:
    units = {unit(i, row_blocks, windows, group) for i in range(row_blocks * windows)}
    assert units == {(row, window) for row in range(row_blocks) for window in range(windows)}


def test_a_group_is_finished_before_the_next() -> None:
    rows = [unit(i, 20, 7, 8)[0] // 8 for i in range(20 * 7)]
    assert rows == sorted(rows)


@given(st.integers(0, 100_000), st.integers(1, 300_000), st.integers(1, 200))
def test_windows_are_within_bounds(tokens: int, vocab: int, clusters: int) -> None:
    config = Sm90().default(tokens)
    windows = choose_vocab_splits(tokens, vocab, config, clusters)
    assert 1 <= windows <= -(-vocab // config.tile_n)
    if windows > 1:
        assert tokens * windows * config.partials_per_row * 4 <= PARTIAL_BYTES


@pytest.mark.parametrize(
    ("tokens", "vocab"), [(8192, 131072), (1024, 262144), (4096, 128256), (32768, 262144)]
)
def test_clusters_finish_together(tokens: int, vocab: int) -> None:
    config = GemmConfig(128, 192, cluster=2, stages=5, pingpong=True)
    tiles, row_blocks = -(-vocab // config.tile_n), -(-tokens // config.rows)
    windows = choose_vocab_splits(tokens, vocab, config, 66)
    assert (
        max(tiles_per_cluster(row_blocks, tiles, windows, config.raster_group, 66))
        <= 1.004 * tiles * row_blocks / 66
    )


@given(
    st.integers(1, 40),
    st.integers(1, 60),
    st.integers(1, 30),
    st.integers(1, 12),
    st.integers(1, 70),
)
def test_loads_are_those_of_the_units(
    row_blocks: int, tiles: int, windows: int, group: int, clusters: int
) -> None:
    windows = min(windows, tiles)
    counted = [0] * clusters
    for index in range(row_blocks * windows):
        _, window = unit(index, row_blocks, windows, group)
        counted[index % clusters] += len(range(window, tiles, windows))
    assert tiles_per_cluster(row_blocks, tiles, windows, group, clusters) == counted


@given(st.integers(1, 300), st.integers(1, 70), st.integers(1, 8))
def test_pieces_make_up_the_units_of_the_last_round(units: int, clusters: int, cuts: int) -> None:
    left = units % clusters
    pieces = [piece(i, units, clusters) for i in range(units - left, units + left * (cuts - 1))]
    assert sorted(pieces) == [(u, c) for u in range(units - left, units) for c in range(cuts)]
    # a cluster that waits for an earlier piece does not wait for one that is begun later
    assert [c for _, c in pieces] == sorted(c for _, c in pieces)


@pytest.mark.parametrize("units", [1024, 512, 576, 32, 100], ids=str)
def test_cuts_share_the_last_round(units: int) -> None:
    cuts = choose_k_splits(units, 66, 2048)
    assert num_waves(units, 66, 1) >= num_waves(units, 66, cuts) >= units / 66
    assert num_waves(units, 66, cuts) <= units / 66 + 0.12


@given(st.integers(1, 300), st.integers(1, 70), st.integers(1, 3000))
def test_pieces_are_not_too_short(units: int, clusters: int, steps: int) -> None:
    cuts = choose_k_splits(units, clusters, steps)
    assert cuts == 1 or steps // cuts >= MIN_STEPS_PER_SPLIT
    assert choose_k_splits(units * clusters, clusters, steps) == 1
