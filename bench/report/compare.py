"""Comparison of new results with committed ones: is anything slower or larger?

Only ratios of interleaved runs and memory are compared: times depend on the machine and the day.
Ratios of other projects and of torch's own losses are not, where an experiment has both.  A
measurement that fails now and succeeded before counts as infinite.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from bench.harness.records import RESULTS, Row, read

TIME_SLACK = 0.03
"""Relative growth of a ratio that is tolerated beyond the quartiles of both runs."""
MEMORY_SLACK = 0.01
MEMORY_SLACK_MIB = 0.1
"""Growth of memory that is tolerated."""
RATIOS = (
    "ratio_to_gemm",
    "ratio_to_gemms",
    "ratio_to_library",
    "ratio_to_plain",
    "ratio_to_unsharded",
    "products",
)
"""Columns with a time over that of another call in the same run."""
DESCRIPTIONS = "note", "plan"
"""Columns with text that does not identify a measurement."""


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
    for row in _own(read(new)[1]):
        old = committed_rows.get(row_key(row), {})
        for name in row.keys() & old.keys() & {*RATIOS, "peak_mib"}:
            before, now = (_number(some[name]) for some in (old, row))
            if name == "peak_mib":
                has_grown = now > before * (1 + MEMORY_SLACK) + MEMORY_SLACK_MIB
            else:
                low, high = now * _spread(row)[0], before * _spread(old)[1]
                has_grown = low > high * (1 + TIME_SLACK)
            if has_grown:
                key = ", ".join(f"{column} {value}" for column, value in row_key(row))
                yield f"{key}: {name} was {before:.3f}, is {now:.3f}"


def _own(rows: list[Row]) -> list[Row]:
    """Return the rows of cutefce, or all if none is named so."""
    own = [row for row in rows if str(row.get("implementation", "")).startswith("cutefce")]
    return own or rows


def _number(value: float | None) -> float:
    return math.inf if value is None else value


def _spread(row: Row) -> tuple[float, float]:
    """Return the quartiles over the median, or 1 and 1 where they are not recorded."""
    if not row.get("quartiles_ms"):
        return 1.0, 1.0
    low, high = row["quartiles_ms"]
    return low / row["median_ms"], high / row["median_ms"]


def row_key(row: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Return the columns that identify a measurement: names and sizes, which are not floats."""
    return tuple(
        (name, value)
        for name, value in sorted(row.items())
        if isinstance(value, (str, int)) and name not in DESCRIPTIONS
    )
