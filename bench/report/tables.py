"""Markdown tables, and how numbers are written in them."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from bench.harness.records import Row

Columns = dict[str, Callable[[Any], str]]
"""Heading of each column, and its text for a row."""


def table(columns: Columns, rows: Iterable[Any]) -> Iterator[str]:
    """Yield the lines of a table."""
    yield f"| {' | '.join(columns)} |"
    yield "|---" * len(columns) + "|"
    for row in rows:
        yield f"| {' | '.join(text(row).replace('|', '/') for text in columns.values())} |"


def fields(rows: list[Row]) -> Iterator[str]:
    """Yield the lines of a table with a column for each field."""
    yield from table({name.replace("_", " "): _any(name) for name in rows[0]}, rows)


def _any(name: str) -> Callable[[Row], str]:
    """Return a column's text function for a field of any type."""

    def write(row: Row) -> str:
        value = row[name]
        if isinstance(value, float):
            return number(value)
        return quartiles(name)(row) if isinstance(value, list) else text(name)(row)

    return write


def text(name: str) -> Callable[[Row], str]:
    """Return a column's text function that writes a field as it is, or a dash for none."""
    return lambda row: "–" if row[name] in (None, "") else str(row[name])


def field(name: str) -> Callable[[Row], str]:
    """Return a column's text function that writes a field by `number`."""
    return lambda row: number(row[name])


def number(value: float | None) -> str:
    """Return three significant digits, or all digits before the decimal point."""
    if value is None:
        return "–"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def quartiles(name: str) -> Callable[[Row], str]:
    """Return a column's text function that writes a pair of quartiles."""
    return lambda row: "–" if row[name] is None else " to ".join(map(number, row[name]))
