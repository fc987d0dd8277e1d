"""Timing, memory, references and records: calls of known duration and size."""

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bench.harness import problems, reference, timing
from bench.harness.accuracy import relative_errors
from bench.harness.problems import Shape
from bench.harness.records import (
    RESULTS,
    SOURCES,
    Measurement,
    collect,
    newest,
    read,
    sources_digest,
    write,
)
from tests.support.reference import random_case

TINY = Shape(tokens=48, hidden=16, vocab=256, dtype="float32")


def test_a_known_allocation_is_what_is_counted() -> None:
    def call() -> Tensor:
        torch.empty(1 << 20)  # freed before the next
        return torch.empty(3 << 20)

    assert timing.peak_bytes(call, "cpu") == 4 * (3 << 20)


def test_chunks_of_the_reference_join(monkeypatch: pytest.MonkeyPatch) -> None:
    case = random_case(48, 16, 256)
    inputs = case.h, case.w, case.y, case.upstream
    want = reference.float64_reference(*inputs)
    monkeypatch.setattr(reference, "ROWS", 20)
    assert max(relative_errors(reference.float64_reference(*inputs), want)) < 1e-15


def test_the_reference_is_the_gradient_of_the_unfused_loss_in_float64() -> None:
    h, w, y = problems.random_inputs(replace(TINY, dtype="float64"), "cpu")
    for targets in (y, problems.ignore_some(y, 80)):
        want = reference.float64_mean_reference(h, w, targets)
        got = problems.gradients(reference.unfused, h, w, targets)
        of_frozen = problems.hidden_gradient(reference.unfused, h, w, targets)
        assert max(*relative_errors(got, want), *relative_errors(of_frozen, want)) < 1e-14


@dataclass(frozen=True)
class Row:
    """What a benchmark may find."""

    size: int
    ms: float | None
    spread: tuple[float, float]


def test_recorded_measurements_are_not_repeated(tmp_path: Path) -> None:
    path, measured = tmp_path / "data.jsonl", []

    def measurement(size: int, fails: bool = False) -> Measurement:
        def rows() -> list[Row]:
            if fails:
                raise KeyboardInterrupt
            measured.append(size)
            return [Row(size, 1.5, (1.0, 2.0)), Row(size, None, (0.0, 0.0))]

        return Measurement({"size": size}, rows)

    with pytest.raises(KeyboardInterrupt):
        collect(path, [measurement(1), measurement(2, fails=True)], resume=False)
    rows = collect(path, [measurement(1), measurement(2)], resume=True)
    assert measured == [1, 2]
    assert [row["size"] for row in rows] == [1, 1, 2, 2]
    assert read(path)[1] == json.loads(json.dumps(rows))
    collect(path, [measurement(1)], resume=False)
    assert measured == [1, 2, 1] and len(read(path)[1]) == 2
    header, rows = read(path)
    write(path, {**header, "versions": {"torch": "another"}}, rows)
    collect(path, [measurement(1)], resume=True)
    assert measured == [1, 2, 1, 1]


def test_the_newest_rows_with_the_columns_are_found(tmp_path: Path) -> None:
    def put(name: str, date: str, *sizes: int) -> None:
        rows = [{"size": size, "name": name} for size in sizes]
        write(tmp_path / f"{name}.jsonl", {"date": date}, rows)

    put("peers", "2026-01-02", 1, 2)
    put("peers_2x3x4_bfloat16", "2026-01-03", 2)
    put("peers_frozen_head", "2026-01-04", 1, 2)
    put("peers_1x3x4_bfloat16", "2026-01-02", 1)
    put("peers_quick", "2026-01-05", 1, 4)
    assert newest(tmp_path, "peers", size=1)[1] == [{"size": 1, "name": "peers"}]
    assert newest(tmp_path, "peers", size=2)[1] == [{"size": 2, "name": "peers_2x3x4_bfloat16"}]
    assert newest(tmp_path, "peers", size=4)[1] == [{"size": 4, "name": "peers_quick"}]
    assert len(newest(tmp_path, "peers_frozen_head")[1]) == 2
    with pytest.raises(LookupError, match="no rows of peers"):
        newest(tmp_path, "peers", size=3)


def test_the_digest_covers_subfolders(tmp_path: Path) -> None:
    source = tmp_path / "sub" / "kernel.py"
    source.parent.mkdir()
    source.write_text("1")
    before = sources_digest([tmp_path])
    (tmp_path / "sub" / "kernel.pyc").write_text("1")
    assert sources_digest([tmp_path]) == before
    source.write_text("2")
    assert sources_digest([tmp_path]) != before
    assert all(next(folder.rglob("*.py"), None) for folder in SOURCES)


def test_bench_does_not_import_tests() -> None:
    for source in RESULTS.parent.rglob("*.py"):
        assert not re.search(r"^\s*(from|import) tests\b", source.read_text(), re.MULTILINE), source
