"""Comparison of new results with committed ones: is anything slower or larger?

Only ratios of interleaved runs and memory are compared: times depend on the machine and the day.
A measurement that fails now and succeeded before counts as infinite.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from bench.harness.records import RESULTS, read

SLACK = 0.05
"""Relative growth that is tolerated."""
SLACK_MIB = 1.0


@click.command("compare")
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
def command(folder: Path) -> None:
    """Compare the results in FOLDER with the committed ones; fail if a ratio or memory grew."""
    grown = []
    for new in sorted(path for path in folder.iterdir() if path.is_dir()):
        if not (RESULTS / new.name).exists():
            click.echo(f"nothing is committed for {new.name}: commit these results")
            continue
        grown += [f"{new.name}/{text}" for text in regressions(new, RESULTS / new.name)]
    if grown:
        raise click.ClickException("worse than committed:\n" + "\n".join(grown))


def regressions(new: Path, committed: Path) -> list[str]:
    """Return what grew, over all result files that both folders have."""
    grown = []
    for path in sorted(committed.glob("*.jsonl")):
        if (new / path.name).exists():
            grown += [f"{path.name}: {text}" for text in _grown(new / path.name, path)]
    return grown


def _grown(new: Path, committed: Path) -> Iterator[str]:
    committed_rows = {row_key(row): row for row in read(committed)[1]}
    for row in read(new)[1]:
        old = committed_rows.get(row_key(row), {})
        for name in row.keys() & old.keys():
            slack = SLACK_MIB if name == "peak_mib" else 0.0
            if name != "peak_mib" and not name.startswith("ratio"):
                continue
            before, now = (math.inf if r[name] is None else r[name] for r in (old, row))
            if now > before + abs(before) * SLACK + slack:
                key = ", ".join(f"{column} {value}" for column, value in row_key(row))
                yield f"{key}: {name} was {before:.3f}, is {now:.3f}"


def row_key(row: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Return the columns that identify a measurement: names and sizes, which are not floats."""
    return tuple(
        (name, value)
        for name, value in sorted(row.items())
        if isinstance(value, (str, int)) and name != "note"
    )
