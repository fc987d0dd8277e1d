"""New results against committed ones."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bench.__main__ import main
from bench.harness.records import RESULTS
from bench.report.compare import regressions

ROW = {
    "tokens": 8192,
    "implementation": "cutefce",
    "median_ms": 10.0,
    "quartiles_ms": [9.9, 10.2],
    "ratio_to_gemm": 0.95,
    "peak_mib": 200.0,
}


def write(folder: Path, *rows: dict[str, Any], name: str = "forward", **header: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    lines = ({"device": "some gpu", "date": "2026-01-02", **header}, *rows)
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({}, []),
        ({"median_ms": 20.0, "quartiles_ms": [19.8, 20.4]}, []),
        # to be 3 % slower beyond the spreads of 2 % and of 1 %
        ({"ratio_to_gemm": 1.005}, []),
        ({"ratio_to_gemm": 1.015}, ["ratio_to_gemm was 0.950, is 1.015"]),
        ({"ratio_to_gemm": 1.015, "quartiles_ms": [9.6, 10.2]}, []),
        ({"ratio_to_gemm": 0.5}, []),
        ({"peak_mib": 202.0}, []),
        ({"peak_mib": 203.0}, ["peak_mib was 200.000, is 203.000"]),
        ({"peak_mib": 2.0}, []),
        ({"peak_mib": None, "note": "failed"}, ["peak_mib was 200.000, is inf"]),
    ],
    ids=str,
)
def test_regressions_are_named(changes: dict[str, Any], named: list[str], tmp_path: Path) -> None:
    committed, new = write(tmp_path / "old", ROW), write(tmp_path / "new", {**ROW, **changes})
    found = regressions(new, committed)
    assert len(found) == len(named)
    for text, part in zip(found, named, strict=True):
        assert part in text
        assert "implementation cutefce, tokens 8192" in text


def test_measurements_are_found_in_any_file_of_an_experiment(tmp_path: Path) -> None:
    shape = "peers_8192x4096x131072_bfloat16"
    committed = write(tmp_path / "old", ROW, name=shape)
    write(committed, {**ROW, "ratio_to_gemm": 9.0}, name="peers", date="2026-01-01")
    write(committed, {**ROW, "ratio_to_gemm": 9.0}, name="peers_quick", date="2026-01-03")
    for name in ("peers", "peers_quick", shape):
        new = write(tmp_path / name, {**ROW, "ratio_to_gemm": 1.2}, name=name)
        (text,) = regressions(new, committed)
        assert text.startswith("peers: implementation") and "was 0.950, is 1.200" in text


def test_nothing_to_compare_is_an_error(tmp_path: Path) -> None:
    new = write(tmp_path / "new", {**ROW, "tokens": 1})
    (text,) = regressions(new, write(tmp_path / "old", ROW))
    assert "nothing was compared" in text


def test_committed_results_do_not_differ_from_themselves() -> None:
    for folder in RESULTS.iterdir():
        assert regressions(folder, folder) == []


def test_the_command_fails_where_something_grew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.report.compare.RESULTS", tmp_path / "committed")
    new = write(tmp_path / "new" / "some_gpu", {**ROW, "ratio_to_gemm": 2.0}).parent
    run = CliRunner().invoke
    result = run(main, ["compare", str(new)])
    assert result.exit_code == 0
    assert "nothing is committed for some_gpu" in result.output
    write(tmp_path / "committed" / "some_gpu", ROW)
    result = run(main, ["compare", str(new)])
    assert result.exit_code == 1
    assert "ratio_to_gemm was 0.950, is 2.000" in result.output
