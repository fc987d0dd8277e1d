"""Tuned tables: reading, writing, updating and merging files."""

import dataclasses
import itertools
import json
import threading
from pathlib import Path

import pytest

from cutefce.autotune_cache import lookup, table, table_io, verdicts
from cutefce.autotune_cache.table import DSL_PACKAGE
from cutefce.cute_kernels.arch.sm90 import Sm90
from cutefce.cute_kernels.config import GemmConfig
from cutefce.cute_kernels.jit import cache as jit_cache
from tests.support.tables import ENTRY, GPU, KEY, OTHER, REJECTED, TABLE, VERSIONS

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
def test_shipped_table_proves_nothing_about_other_kernels(path: Path, folder: Path) -> None:
    """A verdict without a verification needs what is in use to be of these sources.

    Before a release, `cutefce verify --table` renews the entries on that GPU.
    """
    shipped, build = table_io.read(path), (jit_cache.source_fingerprint(), lookup.dsl_version())
    for dtype in sorted({key.dtype for key in shipped.entries}):
        entries = [(k.kernel, e) for k, e in shipped.entries.items() if k.dtype == dtype]
        proven = {(k, e.config) for k, e in entries if (e.kernels, e.dsl) == build}
        default = shipped.gpu.default_configs(8192, 4096)
        expected = verdicts.Verdict(True) if proven else None
        assert verdicts.known(shipped.gpu, dtype, verdicts.uses(default)) == expected
        defaults = Sm90().prebuilt_configs()
        for kernel, entry in entries:
            if kernel == "project_exp" and entry.config not in defaults:
                assert isinstance(entry.config, GemmConfig)
                used = dataclasses.replace(default, project_exp=entry.config)
                expected = verdicts.Verdict(True) if (kernel, entry.config) in proven else None
                assert verdicts.known(shipped.gpu, dtype, verdicts.uses(used)) == expected


def test_cublas_can_win_but_not_for_project_exp(file: Path) -> None:
    cublas = dataclasses.replace(ENTRY, config=None)
    key = dataclasses.replace(KEY, kernel="grad_hidden")
    table_io.write(file, dataclasses.replace(TABLE, entries={key: cublas}))
    assert table_io.read(file).entries == {key: cublas}
    table_io.write(file, dataclasses.replace(TABLE, entries={KEY: cublas}))
    with pytest.raises(ValueError, match="a field is missing"):
        table_io.read(file)


def merged(*tables: table.Table) -> table.Table:
    return table.merge({str(number): each for number, each in enumerate(tables)})


def test_merge_keeps_the_verified_and_the_faster() -> None:
    slower = dataclasses.replace(ENTRY, config=OTHER, ms=12.6)
    faster_unverified = dataclasses.replace(ENTRY, config=OTHER, ms=1.0, verified=False)
    stale = dataclasses.replace(ENTRY, ms=1.0, kernels="0123")
    new = dataclasses.replace(KEY, vocab=50304)
    first = dataclasses.replace(TABLE, entries={KEY: slower}, rejected={})
    second = dataclasses.replace(TABLE, rejected={})
    third = dataclasses.replace(first, entries={KEY: faster_unverified, new: ENTRY})
    fourth = dataclasses.replace(first, entries={KEY: stale})
    for tables in itertools.permutations((first, second, third, fourth)):
        assert merged(*tables).entries == {KEY: ENTRY, new: ENTRY}


def test_merge_refuses_other_gpus_kernels_and_compilers() -> None:
    other_size = dataclasses.replace(TABLE, gpu=dataclasses.replace(GPU, num_sms=114))
    with pytest.raises(ValueError, match="1: num_sms: got 114, expected 132"):
        merged(TABLE, other_size)
    for name in VERSIONS:
        old = dataclasses.replace(TABLE, versions={**VERSIONS, name: "0123"})
        for tables in ((TABLE, old), (old, TABLE)):
            with pytest.raises(ValueError, match=f"1: {name}: got .*cutefce verify --table"):
                merged(*tables)


def test_rejections_survive_every_merge() -> None:
    """Whatever the order, and although another table has the candidate as its winner."""
    wrong = dataclasses.replace(ENTRY, config=OTHER, ms=1.0)
    elsewhere = dataclasses.replace(KEY, tokens=1024)
    tables = (
        dataclasses.replace(TABLE, versions={**VERSIONS, "torch": "2.9"}),
        dataclasses.replace(TABLE, entries={KEY: wrong, elsewhere: wrong}, rejected={}),
        dataclasses.replace(TABLE, entries={}),
    )
    texts = set()
    for order in itertools.permutations(tables):
        result = merged(*order)
        assert result.entries == {KEY: ENTRY}
        assert result.rejected == REJECTED
        texts.add(table_io.to_json(result))
    assert len(texts) == 1


def test_reading_leaves_out_what_the_file_itself_rejects(file: Path) -> None:
    wrong = dataclasses.replace(ENTRY, config=OTHER)
    elsewhere = dataclasses.replace(KEY, tokens=1024)
    table_io.write(file, dataclasses.replace(TABLE, entries={KEY: ENTRY, elsewhere: wrong}))
    assert table_io.read(file) == TABLE


def test_rejected_candidates_lose_their_entries(file: Path) -> None:
    elsewhere = dataclasses.replace(KEY, vocab=32000)
    won = {elsewhere: dataclasses.replace(ENTRY, config=OTHER), KEY: ENTRY}
    table_io.update(file, dataclasses.replace(TABLE, entries=won, rejected={}))
    table_io.update(file, dataclasses.replace(TABLE, entries={}))
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
    file.write_text("precious too")
    table_io.update(file, TABLE)
    assert file.with_suffix(".unusable1").read_text() == "precious too"
    assert file.with_suffix(".unusable").read_text() == "precious, but no table"


def test_a_file_is_read_and_rewritten_under_one_lock(file: Path) -> None:
    """An entry that another process adds meanwhile waits, and is not lost."""
    table_io.write(file, TABLE)
    new = dataclasses.replace(KEY, vocab=777)
    found = dataclasses.replace(TABLE, entries={new: ENTRY}, rejected={})
    tuner = threading.Thread(target=table_io.update, args=(file, found))

    def made() -> table.Table:
        held = table_io.read(file)
        tuner.start()
        tuner.join(0.3)
        assert tuner.is_alive()
        return held

    table_io.rewrite(file, made)
    tuner.join()
    assert table_io.read(file).entries == {KEY: ENTRY, new: ENTRY}


@pytest.mark.parametrize("tokens", [1, 2, 3, 64, 65, 8192, 8193])
def test_buckets(tokens: int) -> None:
    assert table.bucket(tokens) * 2 / 3 < tokens <= table.bucket(tokens)
