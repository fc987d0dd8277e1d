"""The report of given rows: tables, marks of peers, means."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from bench.experiments import (
    paper_grid,
    step,
)
from bench.harness.records import write
from bench.report import markdown, plots


def result(name: str, ms: float | None, mib: float | None, **more: Any) -> dict[str, Any]:
    row = step.Row(64, 16, 256, name, ms, (1.0, 2.0), 1.0, 1.0, 1.0, 1.0, mib, None, 0.1, 0.1, 0.1)
    return {**vars(row), **more}


BASE = (result("GEMMs", 1, None), result("unfused", 2, 100), result("cutefce max", 1.1, 50))


@pytest.mark.parametrize(
    ("rows", "said", "unsaid"),
    [
        ([result("peer", 1.2, 40)], ["No peer is both"], ["peer ("]),
        ([result("peer", 1.0, 60)], ["peer (*)", "No peer is both"], ["peer (!)"]),
        (
            [result("peer", 1.0, 40)],
            ["peer (!)", "- peer at 64 × 16 × 256: cutefce max"],
            ["No peer"],
        ),
        (
            [result("peer", 1.05, 45), result("cutefce min", 1.05, 40)],
            ["No peer is both"],
            ["peer ("],
        ),
        ([result("peer", 1.2, 40, dw_error=0.3)], ["peer (†)"], []),
        ([result("peer", None, None, note="it\nfailed")], ["it failed"], ["peer ("]),
    ],
    ids=["neither", "time", "both", "another budget", "inexact", "failed"],
)
def test_the_report_marks_peers(
    rows: list[dict[str, Any]], said: list[str], unsaid: list[str], tmp_path: Path
) -> None:
    header = {"date": "2026-01-01", "device": "some gpu", "versions": {"torch": "2"}}
    write(tmp_path / "peers.jsonl", header, [*BASE, *rows])
    text = markdown.write(tmp_path, plots.draw(tmp_path)).read_text()
    for part in (*said, "![peers](peers.png)", "## Not measured\n\n", "`python -m bench paper`"):
        assert part in text
    table = text.split("(*) faster")[0]
    for part in unsaid:
        assert part not in (table if part.startswith("peer") else text)


def test_the_paper_counts_cells_and_their_mean(tmp_path: Path) -> None:
    rows = [
        vars(paper_grid.Row(1024, 4096, 32768, 2.0, 1.0, 0.5, 0.95, 600.0, 100.0, 50.0, 0.5, 0.26)),
        vars(paper_grid.Row(1024, 4096, 65536, 1.0, 2.0, 2.0, 0.69, 600.0, 100.0, 50.0, 0.5, 0.26)),
    ]
    header = {"date": "2026-01-01", "device": "some gpu", "versions": {}}
    write(tmp_path / "paper.jsonl", header, rows)
    text = markdown.write(tmp_path, []).read_text()
    assert "Faster than unfused in 1 of 2 cells, with less memory in 2." in text
    assert "Geometric mean of cutefce / unfused: 1.000" in text
    assert "0.73 → 0.69" in text
