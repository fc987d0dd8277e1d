"""Tuned tables: reading, writing, updating and merging files."""

import dataclasses
import itertools
import json
import threading
from pathlib import Path

import pytest

from cutefce.autotune_cache import lookup, tables, verdicts
from cutefce.autotune_cache.verdicts import PARTS
from tests.support.tables import ENTRY, GPU, KEY, OLD, OTHER, TABLE, VERSIONS, write

SHIPPED = sorted(lookup.SHIPPED_FOLDER.glob("*.json"))


@pytest.fixture
def file(folder: Path) -> Path:
    """Return the path of the user's table for the test's GPU."""
    return lookup.user_folder() / tables.file_name(GPU)


def test_round_trip(file: Path) -> None:
    write(file, TABLE)
    assert tables.read(file) == TABLE
    assert not list(file.parent.glob("*.tmp"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: str(path.stem))
def test_shipped_table_has_one_entry_a_line_and_round_trips(path: Path) -> None:
    text, shipped = path.read_text(), tables.read(path)
    assert tables.to_json(shipped) == text
    lines = [line.strip().removesuffix(",") for line in text.splitlines()]
    items = [json.loads(line) for line in lines if line.startswith("{") and len(line) > 1]
    assert len(items) == len(shipped.entries) > 0
    times = [item[name] for item in items for name in ("ms", "default_ms")]
    assert all(time == float(f"{time:.4g}") for time in times)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: str(path.stem))
def test_shipped_table_proves_nothing_about_other_kernels(path: Path, folder: Path) -> None:
    """A verdict without a verification needs what was verified to be of these sources.

    Before a release, `cutefce verify --table` renews the table.
    """
    shipped = tables.read(path)
    is_current = shipped.build == lookup.current_build()
    for dtype in shipped.dtypes:
        found = verdicts.known(shipped.gpu, dtype, *PARTS)
        assert found == (verdicts.Verdict(True) if is_current else None)


def test_cublas_can_win_but_not_for_project_exp(file: Path) -> None:
    cublas = dataclasses.replace(ENTRY, config=None)
    key = dataclasses.replace(KEY, kernel="grad_hidden")
    write(file, dataclasses.replace(TABLE, entries={key: cublas, KEY: cublas}))
    assert tables.read(file).entries == {key: cublas}


def test_reading_leaves_out_configurations_that_are_not_listed(file: Path) -> None:
    """Tables of another version may have some, of whatever fields, for which the defaults serve."""
    write(file, TABLE)
    data = json.loads(file.read_text())
    (item,) = data["entries"]
    data["entries"].append(item | {"kernel": "grad_of_more"})
    for change in ({"raster_group": 3}, {"stages": 60}, {"tile_k": 64}, {"pingpong": "yes"}):
        config = item["config"] | change
        data["entries"].append(item | {"vocab": 1000, "config": config})
    file.write_text(json.dumps(data))
    assert tables.read(file) == TABLE


def merged(*found: tables.Table) -> tables.Table:
    return tables.merge(found)


def test_merge_keeps_the_faster() -> None:
    """Whatever the order; the proof is what all have."""
    slower = dataclasses.replace(ENTRY, config=OTHER, ms=12.6)
    new = dataclasses.replace(KEY, vocab=50304)
    found = (
        dataclasses.replace(TABLE, entries={KEY: slower}, versions={**VERSIONS, "torch": "2.9"}),
        TABLE,
        dataclasses.replace(TABLE, entries={KEY: slower, new: ENTRY}),
    )
    for order in itertools.permutations(found):
        assert merged(*order) == dataclasses.replace(TABLE, entries={KEY: ENTRY, new: ENTRY})
    old = dataclasses.replace(TABLE, versions=OLD, entries={new: ENTRY})
    assert set(merged(TABLE, old).build.values()) == {None}


def test_tables_of_other_gpus_are_refused(file: Path) -> None:
    write(file, dataclasses.replace(TABLE, gpu=dataclasses.replace(GPU, num_sms=114)))
    with pytest.raises(tables.TableError, match=f"{file}: num_sms: got 114, expected 132"):
        tables.read(file, GPU)


def test_an_unusable_file_is_renamed(file: Path) -> None:
    file.parent.mkdir(parents=True)
    for text, suffix in (("precious, but no table", ".old"), ("precious too", ".old1")):
        file.write_text(text)
        with pytest.warns(UserWarning, match=f"aside, to .*{suffix}: .*Expecting value"):
            tables.update(file, TABLE)
        assert tables.read(file) == TABLE
        assert file.with_suffix(suffix).read_text() == text
    assert file.with_suffix(".old").read_text() == "precious, but no table"


def test_a_file_is_read_and_rewritten_under_one_lock(file: Path) -> None:
    """An entry that another process adds meanwhile waits, and is not lost."""
    write(file, TABLE)
    new = dataclasses.replace(KEY, vocab=777)
    found = dataclasses.replace(TABLE, entries={new: ENTRY})
    tuner = threading.Thread(target=tables.update, args=(file, found))

    def made() -> tables.Table:
        held = tables.read(file)
        tuner.start()
        tuner.join(0.3)
        assert tuner.is_alive()
        return held

    tables.rewrite(file, made)
    tuner.join()
    assert tables.read(file).entries == {KEY: ENTRY, new: ENTRY}


@pytest.mark.parametrize("tokens", [1, 2, 3, 64, 65, 8192, 8193])
def test_buckets(tokens: int) -> None:
    assert tables.bucket(tokens) * 2 / 3 < tokens <= tables.bucket(tokens)
