"""Comparison of new results with committed ones: is anything slower or larger?

Only ratios of interleaved runs and memory are compared: times depend on the machine and the day.
Ratios of other projects and of torch's own losses are not, where an experiment has both.  A
measurement that fails now and succeeded before counts as infinite.  Measurements of an experiment
are found in whichever of its files they are.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from bench.harness.records import FILE_OF_A_PART, OUT_OF_MEMORY, RESULTS, Row, precedence, read

Key = tuple[tuple[str, Any], ...]
"""Columns that identify a row of an experiment, by name."""
Measured = dict[tuple[str, Key], Row]
"""Rows by experiment and key."""

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
    """Compare the results in FOLDER with the committed ones; fail if a ratio or memory grew.

    It also fails if no measurement is committed for a GPU that has committed results.
    """
    grown = []
    for new in sorted(path for path in folder.iterdir() if path.is_dir()):
        if not (RESULTS / new.name).exists():
            click.echo(f"nothing is committed for {new.name}: commit these results")
            continue
        grown += [f"{new.name}/{text}" for text in regressions(new, RESULTS / new.name)]
    if grown:
        raise click.ClickException("worse than committed:\n" + "\n".join(grown))


def regressions(new: Path, committed: Path) -> list[str]:
    """Return what grew or runs out of memory now, of the measurements that both folders have.

    A text says so if they have none in common.
    """
    old, now = _measured(committed), _measured(new)
    too_large = [
        f"{_named(*measurement)}: runs out of memory now"
        for experiment, key in _out_of_memory(new)
        for measurement in old.keys() - now.keys()
        if measurement[0] == experiment and key.items() <= dict(measurement[1]).items()
    ]
    if not old.keys() & now.keys() and not too_large:
        return ["no measurement of these is committed: nothing was compared"]
    return [*sorted(too_large), *_grown(old, now)]


def row_key(row: Row) -> Key:
    """Return the columns that identify a measurement: names and sizes, which are not floats."""
    return tuple(
        (name, value)
        for name, value in sorted(row.items())
        if isinstance(value, (str, int)) and name not in DESCRIPTIONS
    )


def _measured(folder: Path) -> Measured:
    """Return the rows of a folder; `precedence` says which file counts."""
    files = [(path, *read(path)) for path in folder.glob("*.jsonl")]
    return {
        (_experiment(path, row), row_key(row)): row
        for path, _, rows in sorted(files, key=lambda file: precedence(*file[:2]))
        for row in _own(rows)
    }


def _out_of_memory(folder: Path) -> Iterator[tuple[str, Row]]:
    """Yield experiments and keys of what ran out of memory."""
    for path in sorted(folder.glob("*.jsonl")):
        for key in read(path)[0].get(OUT_OF_MEMORY, ()):
            yield _experiment(path, key), key


def _experiment(path: Path, row: Row) -> str:
    """Return the name of the experiment, with the shape if rows do not have it."""
    return FILE_OF_A_PART.sub("", path.stem) if "tokens" in row else path.stem


def _grown(committed: Measured, new: Measured) -> Iterator[str]:
    for measurement, row in new.items():
        old = committed.get(measurement, {})
        for name in row.keys() & old.keys() & {*RATIOS, "peak_mib"}:
            before, now = (_number(some[name]) for some in (old, row))
            if name == "peak_mib":
                has_grown = now > before * (1 + MEMORY_SLACK) + MEMORY_SLACK_MIB
            else:
                low, high = now * _spread(row)[0], before * _spread(old)[1]
                has_grown = low > high * (1 + TIME_SLACK)
            if has_grown:
                yield f"{_named(*measurement)}: {name} was {before:.3f}, is {now:.3f}"


def _named(experiment: str, key: Key) -> str:
    return f"{experiment}: {', '.join(f'{column} {value}' for column, value in key)}"


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
