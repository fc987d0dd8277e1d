"""Plots of recorded results."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from bench.experiments.peers import MAIN_HEAD
from bench.harness.problems import sizes_of, title
from bench.harness.records import Row, newest, read

TIMES = (0.9, 1, 1.2, 1.5, 2, 3, 5)
"""Ticks of time relative to the plain GEMMs."""
MIB_TICKS = {1: "1 MiB", 10: "10 MiB", 100: "100 MiB", 1024: "1 GiB", 10240: "10 GiB"}
LABELS = {"unfused": "F.linear + F.cross_entropy"}
"""Labels of `overview.png` that differ from the names of the implementations."""
LABEL_GAP = 1.085
"""Least ratio of the heights of two labels in a column of `overview.png`."""
CROWDED_MIB, LABELS_MIB = 1000, 24_000
"""Points of `overview.png` right of the first have their labels in a column at the second."""


def draw(folder: Path) -> list[Path]:
    """Draw everything that `folder` has results for; return the pictures."""
    return [*_sampled_curves(folder), *_overview(folder)]


def _is_cutefce(row: Row) -> bool:
    return str(row["implementation"]).startswith("cutefce")


def _point(row: Row) -> tuple[float, float]:
    return max(row["peak_mib"], 0.5), row["ratio_to_gemms"]


def _sampled_curves(folder: Path) -> list[Path]:
    """Draw validation losses, and what they are above the mean of the exact trainings.

    Thin lines are seeds, thick ones their means.
    """
    path = folder / "sampled_curves.jsonl"
    if not path.exists():
        return []
    header, rows = read(path)
    figure = Figure(figsize=(9, 5), layout="constrained")
    figure.suptitle(f"{header['device']}, {header['date']}")
    curves, distances = figure.subplots(1, 2)
    steps = rows[0]["validation_steps"]
    by_name: dict[str, list[list[float]]] = {}
    for row in rows:
        by_name.setdefault(row["gradient"], []).append(row["validation_losses"])
    reference = _mean(by_name["exact"])
    for number, (name, seeds) in enumerate(by_name.items()):
        above = [[a - b for a, b in zip(losses, reference, strict=True)] for losses in seeds]
        for axes, lines in ((curves, seeds), (distances, above)):
            for line in lines:
                axes.plot(steps, line, color=f"C{number}", linewidth=0.6, alpha=0.6)
            axes.plot(steps, _mean(lines), color=f"C{number}", linewidth=1.8, label=name)
    curves.set_ylabel("validation loss, nats per token")
    distances.set_ylabel("above the mean of the exact trainings, nats")
    for axes in (curves, distances):
        axes.set_xlabel("step")
    curves.legend(title="gradient")
    picture = path.with_suffix(".png")
    figure.savefig(picture, dpi=120)
    return [picture]


def _mean(lines: Sequence[Sequence[float]]) -> list[float]:
    return [statistics.fmean(values) for values in zip(*lines, strict=True)]


def _overview(folder: Path) -> list[Path]:
    """Draw `overview.png`, time over memory of the first head, if peers were measured there."""
    try:
        header, rows = newest(folder, "peers", **sizes_of(MAIN_HEAD))
    except LookupError:
        return []
    rows = [row for row in rows if row["peak_mib"] is not None]
    figure = Figure(figsize=(8, 4.2), layout="constrained")
    axes = figure.subplots()
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(list(MIB_TICKS), MIB_TICKS.values())
    axes.set_yticks(TIMES, [f"{time:g}×" for time in TIMES])
    axes.minorticks_off()
    axes.set_xlim(0.4, 20_000)
    axes.set_ylim(0.88, max(5, *(1.1 * row["ratio_to_gemms"] for row in rows)))
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("peak memory beyond inputs and gradients")
    axes.set_ylabel("time / three plain GEMMs")
    axes.set_title(f"Loss, forward and backward: {title(rows[0])}, {header['device']}", fontsize=11)
    axes.text(0.5, 0.8, "↙ better", transform=axes.transAxes, color="gray", fontsize=14)
    _draw_budgets(axes, [row for row in rows if _is_cutefce(row)])
    _draw_peers(axes, [row for row in rows if not _is_cutefce(row)])
    picture = folder / "overview.png"
    figure.savefig(picture, dpi=200)
    return [picture]


def _draw_budgets(axes: Any, rows: list[Row]) -> None:
    """Draw cutefce's budgets as one labeled line, above the time of the GEMMs alone."""
    axes.axhline(1, color="gray", linestyle="--", linewidth=1)
    axes.text(0.45, 1.02, "the three GEMMs alone, by cuBLAS", color="gray")
    points = sorted((*_point(row), row["implementation"]) for row in rows)
    x, y, names = zip(*points, strict=True)
    axes.plot(x, y, marker="o", color="C3", linewidth=3, markersize=8, zorder=3)
    budgets = [name.removeprefix("cutefce ") for name in names]
    ends = {0: f"cutefce, workspace={budgets[0]}", -1: f"cutefce, workspace={budgets[-1]}"}
    for i, label in ends.items():
        axes.annotate(
            label,
            (x[i], y[i]),
            xytext=(-8, -4 if i == 0 else -15),
            textcoords="offset points",
            ha="right",
            color="C3",
            weight="bold",
        )


def _draw_peers(axes: Any, rows: list[Row]) -> None:
    """Draw every peer as a point with its name; names of crowded points share a column."""
    height = 0.0
    for row in sorted(rows, key=lambda row: float(row["ratio_to_gemms"])):
        (x, y), name = _point(row), row["implementation"]
        axes.plot(x, y, "o", color="C0", markersize=7)
        label = LABELS.get(name, name)
        if x < CROWDED_MIB:
            axes.annotate(label, (x, y), (9, -4), textcoords="offset points")
            continue
        height = max(y / LABEL_GAP, height * LABEL_GAP)
        axes.annotate(
            label,
            (x, y),
            xytext=(LABELS_MIB, height),
            va="center",
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": "gray", "linewidth": 0.7, "relpos": (0, 0.5)},
        )
