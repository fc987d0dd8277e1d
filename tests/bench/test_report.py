"""The report of given rows, and figures of the pages: those of the committed records."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from bench.experiments import step
from bench.harness.records import RESULTS, newest, read, write
from bench.report import figures, markdown, plots


def result(name: str, ms: float | None, mib: float | None, **more: Any) -> dict[str, Any]:
    row = step.Row(name, ms, (1.0, 2.0), 1.0, 1.0, 1.0, mib, None, 0.1, 0.1, 0.1)
    return {"tokens": 64, "hidden": 16, "vocab": 256, **vars(row), **more}


BASE = (result("GEMMs", 1, None), result("unfused", 2, 100), result("cutefce max", 1.1, 50))


@pytest.mark.parametrize(
    ("rows", "said", "unsaid"),
    [
        ([result("peer", 1.2, 40)], ["No peer is both"], ["peer ("]),
        ([result("peer", 1.0, 60)], ["peer (*)", "No peer is both"], ["peer (!)"]),
        (
            [result("peer", 1.0, 40)],
            ["peer (!)", "- peer at 64 × 16 × 256: cutefce max\n"],
            ["No peer"],
        ),
        (
            [result("peer", 1.0, 40, dw_error=0.15)],
            ["cutefce max (with errors of gradients up to 1.50 times as large)\n"],
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
    ids=["neither", "time", "both", "both, inexact", "another budget", "inexact", "failed"],
)
def test_the_report_marks_peers(
    rows: list[dict[str, Any]], said: list[str], unsaid: list[str], tmp_path: Path
) -> None:
    header = {"date": "2026-01-01", "device": "some gpu", "versions": {"torch": "2"}}
    write(tmp_path / "peers.jsonl", header, [*BASE, *rows])
    text = markdown.write(tmp_path, plots.draw(tmp_path)).read_text()
    for part in (*said, "## Not measured\n\n", "`python -m bench options`"):
        assert part in text
    table = text.split("(*) faster")[0]
    for part in unsaid:
        assert part not in (table if part.startswith("peer") else text)


def test_the_report_says_which_records_are_of_other_sources(tmp_path: Path) -> None:
    def put(name: str, sources: str) -> None:
        header = {"date": "2026-01-01", "device": "some gpu"}
        versions = {"sources": sources, "torch": "2"}
        write(tmp_path / f"{name}.jsonl", {**header, "versions": versions}, list(BASE))

    put("peers", "abc")
    put("peers_frozen_head", "abc")
    one = ["All records are of one version: device some gpu, sources abc, torch 2."]
    assert markdown.origins(tmp_path) == one
    put("options", "def")
    said = markdown.origins(tmp_path)
    assert "**The records are of 2 versions.** `peers`, `peers_frozen_head`: " in said[0]
    assert said[-1] == "- `options`: sources def"
    assert "\n\n".join(said) in markdown.text_of(tmp_path, [])


def test_the_report_says_what_ran_out_of_memory(tmp_path: Path) -> None:
    header: dict[str, Any] = {
        "date": "2026-01-01",
        "device": "some gpu",
        "versions": {"torch": "2"},
    }
    header["out_of_memory"] = [{"tokens": 64, "hidden": 16}]
    for name in ("peers", "stability"):
        write(tmp_path / f"{name}.jsonl", header, [])
    assert plots.draw(tmp_path) == []
    text = markdown.text_of(tmp_path, [])
    for name in ("peers", "stability"):
        said = f"## {name}\n\n`python -m bench {name}`, 2026-01-01.\n\nOut of memory: tokens 64"
        assert f"{said}, hidden 16." in text


REPORTS = sorted(RESULTS.glob("*/report.md"))


@pytest.mark.parametrize("report", REPORTS, ids=lambda path: path.parent.name)
def test_committed_reports_are_of_the_committed_records(report: Path) -> None:
    text = markdown.text_of(report.parent, sorted(report.parent.glob("*.png")))
    assert report.read_text() == text, "make bench-report writes it"


@pytest.mark.parametrize("name", figures.PAGES)
def test_figures_of_the_pages_are_those_of_the_records(name: str) -> None:
    text = (figures.ROOT / name).read_text()
    assert figures.filled(text, figures.PAGES[name]()) == text, "make bench-report writes them"


@pytest.mark.parametrize("name", figures.PAGES)
def test_pages_say_so_if_their_figures_are_of_an_older_version(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That is not the one of the last record of the folder."""
    are_older = []

    def found(folder: Path, *given: Any, **columns: Any) -> Any:
        header, rows = newest(folder, *given, **columns)
        headers = [read(path)[0] for path in folder.glob("*.jsonl")]
        last = max(headers, key=lambda x: str(x["date"]))
        are_older.append(header["versions"] != last["versions"])
        return header, rows

    monkeypatch.setattr(figures, "newest", found)
    assert [*figures.PAGES[name]()] and are_older
    text = " ".join((figures.ROOT / name).read_text().split())
    assert ("an older version" in text) == any(are_older)


def test_figures_replace_tables_and_numbers() -> None:
    text = "# Page\n\nIt takes 1.5 GiB\nand 20 ms.\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\nEnd.\n"
    words = figures.Words("takes {} GiB and {} ms", ["2", "-0.25"])
    table = ["| a | b |", "|---|---|", "| 3 | 4 |", "| 5 | 6 |"]
    filled = figures.filled(text, iter([words, table]))
    assert filled == text.replace("1.5", "2").replace("20", "-0.25").replace(
        "| 1 | 2 |", "| 3 | 4 |\n| 5 | 6 |"
    )
    with pytest.raises(ValueError, match="got 0 times, expected once"):
        figures.filled(text, iter([figures.Words("takes {} days", ["1"])]))
