"""Plots of what the benchmarks measured, from their data."""

import json
from itertools import groupby
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure


def draw(folder: Path) -> list[Path]:
    """Draw what `folder` has data for; return the pictures."""
    pictures = []
    drawings = {"step": _step, "equivalence": _equivalence, "paper": _paper}
    for name, function in drawings.items():
        path = folder / f"{name}.json"
        if path.exists():
            record = json.loads(path.read_text())
            figure = Figure(figsize=(9, 5), layout="constrained")
            function(figure, record["rows"])
            figure.suptitle(f"{record['device']}, {record['date']}")
            pictures.append(path.with_suffix(".png"))
            figure.savefig(pictures[-1], dpi=120)
    return pictures


def _step(figure: Figure, rows: list[dict[str, Any]]) -> None:
    """Draw time over memory: one line a shape, one point a budget."""
    axes = figure.subplots()
    for shape, of_shape in groupby(rows, lambda row: (row["tokens"], row["hidden"], row["vocab"])):
        forms = list(of_shape)
        ours = sorted(
            (row["peak_mib"], row["ratio_to_products"])
            for row in forms
            if row["form"].startswith("cutefce")
        )
        (line,) = axes.plot(*zip(*ours, strict=True), marker="o", label=" × ".join(map(str, shape)))
        for row in forms:
            if row["form"] == "two-stage":
                axes.plot(
                    row["peak_mib"], row["ratio_to_products"], marker="x", color=line.get_color()
                )
    axes.set_xscale("log")
    axes.set_xlabel("peak memory beyond inputs and gradients, MiB (crosses: all logits in float32)")
    axes.set_ylabel("forward and backward / three plain products")
    axes.legend(title="tokens × hidden × vocab")


def _equivalence(figure: Figure, rows: list[dict[str, Any]]) -> None:
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


def _paper(figure: Figure, rows: list[dict[str, Any]]) -> None:
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
