"""The tuned tables: what is found in them, and that a bad file never changes a result."""

import dataclasses
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from cutefce import autotune_cache
from cutefce.__main__ import main
from cutefce.autotune_cache import table as tables
from cutefce.autotune_cache.table import Entry, Key, Table
from cutefce.cute_kernels import jit_cache
from cutefce.cute_kernels.arch import Sm90
from cutefce.cute_kernels.config import ProjectExpConfig
from cutefce.cute_kernels.problem import Problem

DEVICE, SIZE = "NVIDIA Test 9000", 132
TUNED, OTHER = Sm90().configs()[3:5]
KEY = Key("project_exp", "bfloat16", 4096, 131072, 8192)
ENTRY = Entry(TUNED, 12.5, 13.0, verified=True)
TABLE = Table(DEVICE, SIZE, "sm_90a", {"cutefce": "0"}, {KEY: ENTRY})
PROBLEM = Problem(8192, 4096, 131072, "bfloat16", "cuda", arch="sm_90a")


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return where the user's table for the test's GPU lies."""
    monkeypatch.setenv(jit_cache.CACHE_VARIABLE, str(tmp_path))
    forget()
    yield autotune_cache.user_folder() / tables.file_name(DEVICE)
    forget()


def forget() -> None:
    """Do what a new process does: know no table."""
    autotune_cache.tables.cache_clear()
    autotune_cache.lookup_project_exp.cache_clear()


def look(problem: Problem = PROBLEM, size: int = SIZE) -> ProjectExpConfig:
    return autotune_cache.lookup_project_exp(problem, Sm90(), DEVICE, size)


def test_round_trip(file: Path) -> None:
    tables.write(file, TABLE)
    assert tables.read(file) == TABLE
    assert [path.name for path in file.parent.iterdir()] == ["nvidia_test_9000.json"]


def test_exact_then_nearest_then_default(file: Path) -> None:
    far = dataclasses.replace(KEY, tokens=512)
    entries = {KEY: ENTRY, far: Entry(OTHER, 1.0, 2.0, verified=True)}
    tables.write(file, dataclasses.replace(TABLE, entries=entries))
    assert look() == TUNED
    assert look(dataclasses.replace(PROBLEM, tokens=5000)) == TUNED, "the same bucket"
    assert look(dataclasses.replace(PROBLEM, tokens=700, vocab=128256)) == OTHER
    for other in ({"dtype": "float16"}, {"tokens": 8}):
        problem = dataclasses.replace(PROBLEM, **other)
        assert look(problem) == Sm90().default(problem.tokens)


def test_unverified_entries_are_not_used(file: Path) -> None:
    unverified = dataclasses.replace(ENTRY, verified=False)
    tables.write(file, dataclasses.replace(TABLE, entries={KEY: unverified}))
    assert look() == Sm90().default(8192)


def test_an_edited_configuration_is_what_is_launched(file: Path) -> None:
    tables.write(file, TABLE)
    data = json.loads(file.read_text())
    data["entries"][0]["config"]["group"] = 3
    file.write_text(json.dumps(data))
    assert look() == dataclasses.replace(TUNED, group=3)


def edited(**changes: object) -> str:
    return json.dumps(json.loads(text_of(TABLE)) | changes)


def text_of(table: Table) -> str:
    entries = [dataclasses.asdict(k) | dataclasses.asdict(e) for k, e in table.entries.items()]
    return json.dumps({"schema": 1, **dataclasses.asdict(dataclasses.replace(table, entries={}))}
                      | {"entries": entries})  # fmt: skip


def broken_entry(**changes: object) -> str:
    data = json.loads(text_of(TABLE))
    data["entries"][0] |= changes
    return json.dumps(data)


BAD = {
    "empty": ("", "not JSON"),
    "cut off": (text_of(TABLE)[:200], "not JSON"),
    "a list": ("[]", "schema: got"),
    "an older schema": (edited(schema=0), "schema: got 0, expected 1"),
    "a newer schema": (edited(schema=2), "schema: got 2, expected 1"),
    "another GPU": (edited(device="NVIDIA Other"), "device: got 'NVIDIA Other'"),
    "another size": (edited(multiprocessors=114), "multiprocessors: got 114"),
    "an unknown architecture": (edited(arch="sm_80"), "arch: got 'sm_80'"),
    "no entries": (edited(entries=None), "a field is missing"),
    "an illegal configuration": (
        broken_entry(config=dataclasses.asdict(dataclasses.replace(TUNED, stages=60))),
        "stages: got 60",
    ),
    "an unknown field": (broken_entry(config={"warps": 4}), "a field is missing"),
    "a size of 0": (broken_entry(tokens=0), "expected sizes and times above 0"),
}


@pytest.mark.parametrize(("text", "said"), BAD.values(), ids=BAD)
def test_a_bad_file_is_said_once_and_ignored(text: str, said: str, file: Path) -> None:
    file.parent.mkdir(parents=True)
    file.write_text(text)
    with pytest.warns(UserWarning, match=said) as warned:
        assert look() == Sm90().default(8192)
        assert look(dataclasses.replace(PROBLEM, tokens=100)) == Sm90().default(100)
    assert len(warned) == 1


def test_lookups_are_fast(file: Path) -> None:
    tables.write(file, TABLE)
    look()
    begin = time.perf_counter()
    for _ in range(1000):
        look()
    assert (time.perf_counter() - begin) / 1000 <= 5e-6


def test_merge_keeps_the_verified_and_the_faster(file: Path) -> None:
    slower = dataclasses.replace(ENTRY, config=OTHER, milliseconds=12.6)
    faster_unverified = dataclasses.replace(ENTRY, config=OTHER, milliseconds=1.0, verified=False)
    new = dataclasses.replace(KEY, vocab=50304)
    first = dataclasses.replace(TABLE, entries={KEY: slower})
    third = dataclasses.replace(TABLE, entries={KEY: faster_unverified, new: ENTRY})
    assert tables.merge([first, TABLE, third]).entries == {KEY: ENTRY, new: ENTRY}
    with pytest.raises(ValueError, match="multiprocessors: got 114"):
        tables.merge([TABLE, dataclasses.replace(TABLE, multiprocessors=114)])


def test_commands(file: Path, tmp_path: Path) -> None:
    tables.write(file, TABLE)
    run = CliRunner().invoke
    assert "8192 × 4096 × 131072" in run(main, ["cache", "show"]).output
    assert "1 entries" in run(main, ["cache", "validate", str(file)]).output
    into = tmp_path / "joined.json"
    assert run(main, ["cache", "merge", str(file), str(file), "--into", str(into)]).exit_code == 0
    assert tables.read(into) == TABLE
    assert run(main, ["cache", "clear"]).exit_code == 0
    assert not file.exists()
    into.write_text("{}")
    result = run(main, ["cache", "validate", str(into)])
    assert result.exit_code == 1
    assert "schema: got None, expected 1" in result.output


@pytest.mark.parametrize("tokens", [1, 2, 3, 64, 65, 8192, 8193])
def test_buckets(tokens: int) -> None:
    assert tables.bucket(tokens) / 2 < tokens <= tables.bucket(tokens)
