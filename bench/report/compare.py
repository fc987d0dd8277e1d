"""New results against committed ones: is anything slower, or does it take more memory?

Times of two machines, or of two days, say little; ratios of interleaved runs, and memory, do.  What
fails now and did not before counts as infinite.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.harness.records import read

SLACK = 0.05
"""By how much of itself a number may grow."""
SLACK_MIB = 1.0


def regressions(new: Path, committed: Path) -> list[str]:
    """Return what grew, of all result files that both folders of one GPU model have."""
    found = []
    for path in sorted(committed.glob("*.jsonl")):
        if (new / path.name).exists():
            found += [f"{path.name}: {text}" for text in _grown(new / path.name, path)]
    return found


def _grown(new: Path, committed: Path) -> Iterator[str]:
    committed_rows = {_key(row): row for row in read(committed)[1]}
    for row in read(new)[1]:
        old = committed_rows.get(_key(row), {})
        for name in row.keys() & old.keys():
            slack = SLACK_MIB if name == "peak_mib" else 0.0
            if name != "peak_mib" and not name.startswith("ratio"):
                continue
            before, now = (math.inf if r[name] is None else r[name] for r in (old, row))
            if now > before + abs(before) * SLACK + slack:
                what = ", ".join(f"{n} {v}" for n, v in _key(row))
                yield f"{what}: {name} was {before:.3f}, is {now:.3f}"


def _key(row: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Return what was measured: names and sizes, which are no floats."""
    return tuple(
        (name, v) for name, v in sorted(row.items()) if isinstance(v, (str, int)) and name != "note"
    )
