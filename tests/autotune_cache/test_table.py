"""Tuned tables: reading, writing, updating and merging files."""

import dataclasses
import json
from pathlib import Path

import pytest

from cutefce.autotune_cache import lookup, table, table_io
from cutefce.autotune_cache.table import DSL_PACKAGE, Rejection
from cutefce.cute_kernels.jit import cache as jit_cache
from tests.support.tables import ENTRY, GPU, KERNELS, KEY, OTHER, REJECTED, TABLE, TUNED, VERSIONS

SHIPPED = sorted(lookup.SHIPPED_FOLDER.glob("*.json"))


@pytest.fixture
def file(folder: Path) -> Path:
    """Return the path of the user's table for the test's GPU."""
    return lookup.user_folder() / table_io.file_name(GPU)


def test_round_trip(file: Path) -> None:
    table_io.write(file, TABLE)
    assert table_io.read(file) == TABLE
    assert not list(file.parent.glob("*.tmp"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: str(path.stem))
def test_shipped_table_has_one_entry_a_line_and_round_trips(path: Path) -> None:
    text, shipped = path.read_text(), table_io.read(path)
    assert table_io.to_json(shipped) == text
    lines = [line.strip().removesuffix(",") for line in text.splitlines()]
    items = [json.loads(line) for line in lines if line.startswith("{") and len(line) > 1]
    assert len(items) == len(shipped.entries) + len(shipped.rejected) > 0
    times = [item[name] for item in items for name in ("ms", "default_ms", "cublas_ms")]
    assert all(time == float(f"{time:.4g}") for time in times)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: str(path.stem))
def test_shipped_table_is_of_these_sources(path: Path) -> None:
    """Otherwise run `cutefce verify --table` on that GPU, or `make autotune` to time anew."""
    shipped = table_io.read(path)
    found = {entry.kernels for entry in shipped.entries.values()} | {shipped.versions["kernels"]}
    assert found == {jit_cache.source_fingerprint()}


def test_entries_and_rejections_are_lines(file: Path) -> None:
    elsewhere = dataclasses.replace(KEY, hidden=512)
    table_io.write(file, dataclasses.replace(TABLE, entries={KEY: ENTRY, elsewhere: ENTRY}))
    lines = file.read_text().splitlines()
    begins = [line for line in lines if line.startswith('  {"kernel": "project_exp"')]
    assert len(begins) == 3
    assert '"hidden": 512' in begins[0], "sizes are sorted as numbers"
    assert '"reason": "no answer within 30 s"' in begins[2]


def test_cublas_can_win_but_not_for_project_exp(file: Path) -> None:
    cublas = dataclasses.replace(ENTRY, config=None)
    key = dataclasses.replace(KEY, kernel="grad_hidden")
    table_io.write(file, dataclasses.replace(TABLE, entries={key: cublas}))
    assert table_io.read(file).entries == {key: cublas}
    table_io.write(file, dataclasses.replace(TABLE, entries={KEY: cublas}))
    with pytest.raises(ValueError, match="a field is missing"):
        table_io.read(file)


@pytest.mark.parametrize("columns", [0, -8448, 8448.0, "8448", True, None, {"window": 8448}])
def test_wrong_windows_are_refused(columns: object, file: Path) -> None:
    data = json.loads(table_io.to_json(TABLE))
    data["entries"][0] |= {"kernel": table.WINDOW, "config": columns}
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(data))
    with pytest.raises(ValueError, match="expected the columns of a window"):
        table_io.read(file)


def test_merge_keeps_the_verified_and_the_faster() -> None:
    slower = dataclasses.replace(ENTRY, config=OTHER, ms=12.6)
    faster_unverified = dataclasses.replace(ENTRY, config=OTHER, ms=1.0, verified=False)
    new = dataclasses.replace(KEY, vocab=50304)
    first = dataclasses.replace(TABLE, entries={KEY: slower}, rejected={})
    third = dataclasses.replace(first, entries={KEY: faster_unverified, new: ENTRY})
    merged = table.merge([first, TABLE, third], KERNELS)
    assert merged.entries == {KEY: ENTRY, new: ENTRY}
    assert table.merge([first, TABLE], KERNELS).rejected == REJECTED
    other_size = dataclasses.replace(TABLE, gpu=dataclasses.replace(GPU, num_sms=114))
    with pytest.raises(ValueError, match="num_sms: got 114"):
        table.merge([TABLE, other_size], KERNELS)


def test_merge_prefers_entries_of_these_sources() -> None:
    stale = dataclasses.replace(ENTRY, config=OTHER, ms=1.0, kernels="0123")
    old = dataclasses.replace(
        TABLE, versions={**VERSIONS, "kernels": "0123"}, entries={KEY: stale}, rejected={}
    )
    for tables in ([old, TABLE], [TABLE, old]):
        assert table.merge(tables, KERNELS) == TABLE


def test_candidates_rejected_for_all_shapes_lose_their_entries(file: Path) -> None:
    elsewhere = dataclasses.replace(KEY, vocab=32000)
    won = {elsewhere: dataclasses.replace(ENTRY, config=OTHER), KEY: ENTRY}
    table_io.update(file, dataclasses.replace(TABLE, entries=won, rejected={}))
    small: table.Rejections = {(KEY, TUNED): Rejection("out of memory", for_all_shapes=False)}
    table_io.update(file, dataclasses.replace(TABLE, entries={}, rejected={**REJECTED, **small}))
    assert table_io.read(file).entries == {KEY: ENTRY}


@pytest.mark.parametrize("changed", ["kernels", DSL_PACKAGE])
def test_rejections_of_other_kernels_or_compilers_are_dropped(changed: str, file: Path) -> None:
    table_io.write(file, TABLE)
    new = dataclasses.replace(TABLE, versions={**VERSIONS, changed: "new"}, rejected={})
    table_io.update(file, new)
    assert table_io.read(file) == new


def test_an_unusable_file_is_renamed(file: Path) -> None:
    file.parent.mkdir(parents=True)
    file.write_text("precious, but no table")
    table_io.update(file, TABLE)
    assert table_io.read(file) == TABLE
    assert file.with_suffix(".unusable").read_text() == "precious, but no table"


@pytest.mark.parametrize("tokens", [1, 2, 3, 64, 65, 8192, 8193])
def test_buckets(tokens: int) -> None:
    assert table.bucket(tokens) * 2 / 3 < tokens <= table.bucket(tokens)
