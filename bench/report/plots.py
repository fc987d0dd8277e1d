"""Plots of what the benchmarks measured, from their data."""

import math
from itertools import groupby
from pathlib import Path

from matplotlib.figure import Figure

from bench.harness.problems import title
from bench.harness.records import Row, read

TIMES = (0.9, 1, 1.2, 1.5, 2, 3, 5)
"""Marked on the frontier's axis, relative to the plain products."""
MARKERS = "xsv^D*P<>Xph"


def draw(folder: Path) -> list[Path]:
    """Draw what `folder` has data for; return the pictures."""
    pictures = []
    drawings = {"peers": _frontier, "equivalence": _equivalence, "paper": _paper}
    for name, function in drawings.items():
        for path in sorted(folder.glob(f"{name}*.jsonl")):
            header, rows = read(path)
            figure = Figure(figsize=(9, 5), layout="constrained")
            function(figure, rows)
            figure.suptitle(f"{header['device']}, {header['date']}")
            pictures.append(path.with_suffix(".png"))
            figure.savefig(pictures[-1], dpi=120)
    return pictures


def _frontier(figure: Figure, rows: list[Row]) -> None:
    """Draw time over memory: a panel a shape, a line through our budgets, a mark a peer."""
    measured = [row for row in rows if row["peak_mib"] is not None]
    shapes = [(name, list(some)) for name, some in groupby(measured, title)]
    columns = math.ceil(math.sqrt(len(shapes)))
    lines = math.ceil(len(shapes) / columns)
    figure.set_size_inches(4 * columns, 3 * lines + 3)
    panels = figure.subplots(lines, columns, sharey=True, squeeze=False).flatten()
    peers = [row["form"] for row in measured if not row["form"].startswith("cutefce")]
    markers = dict(zip(dict.fromkeys(peers), MARKERS, strict=False))
    for axes, (name, forms) in zip(panels, shapes, strict=False):
        ours = sorted(_point(row) for row in forms if row["form"].startswith("cutefce"))
        axes.plot(*zip(*ours, strict=True), marker="o", color="black", label="cutefce, by budget")
        for number, (peer, marker) in enumerate(markers.items()):
            points = [_point(row) for row in forms if row["form"] == peer]
            coordinates = zip(*points, strict=True) if points else ([], [])
            axes.plot(*coordinates, marker, color=f"C{number}", label=peer)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_yticks(TIMES, map(str, TIMES))
        axes.minorticks_off()
        axes.set_xlabel("peak beyond inputs and gradients, MiB", fontsize="small")
        axes.set_title(name, fontsize="small")
    for axes in panels[len(shapes) :]:
        axes.remove()
    figure.supylabel("forward and backward / three plain products")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=columns)


def _point(row: Row) -> tuple[float, float]:
    return max(row["peak_mib"], 1.0), row["ratio_to_products"]


def _equivalence(figure: Figure, rows: list[Row]) -> None:
    """Draw loss curves, and their distance from the first."""
    curves, distances = figure.subplots(1, 2)
    for row in rows:
        label = f"{row['form']}, seed {row['seed']}"
        curves.plot(row["losses"], linewidth=1, label=label)
        distance = [abs(a - b) for a, b in zip(row["losses"], rows[0]["losses"], strict=True)]
        distances.plot(distance, linewidth=1, label=label)
    curves.set_ylabel("loss, nats a token")
    distances.set_ylabel("distance from the first curve, nats")
    distances.set_yscale("log")
    for axes in (curves, distances):
        axes.set_xlabel("step")
    curves.legend()


def _paper(figure: Figure, rows: list[Row]) -> None:
    """Draw the paper's Figures 4 and 5: latency and memory over the vocabulary."""
    latency, memory = figure.subplots(1, 2)
    for tokens, of_tokens in groupby(rows, lambda row: int(row["tokens"])):
        cells = list(of_tokens)
        vocab = [row["vocab"] for row in cells]
        for axes, unit in ((latency, "ms"), (memory, "mib")):
            (line,) = axes.plot(
                vocab, [r[f"ours_{unit}"] for r in cells], marker="o", label=f"{tokens} tokens"
            )
            canonical = [row[f"canonical_{unit}"] for row in cells]
            axes.plot(vocab, canonical, "--", marker="x", color=line.get_color())
    for axes, label in ((latency, "forward, ms"), (memory, "memory with inputs, MiB")):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("vocabulary")
        axes.set_ylabel(f"{label} (dashed: all logits)")
    latency.legend()
