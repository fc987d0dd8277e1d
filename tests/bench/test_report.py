"""The report of given rows, and figures of the pages: those of the committed records."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from bench.harness.records import RESULTS, newest, read
from bench.report import figures, markdown

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
    """That is of an earlier day than the last record; the report names the version of each."""
    are_older = []

    def found(folder: Path, *given: Any, **columns: Any) -> Any:
        header, rows = newest(folder, *given, **columns)
        last = max(str(read(path)[0]["date"]) for path in folder.glob("*.jsonl"))
        are_older.append(str(header["date"]) < last)
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
