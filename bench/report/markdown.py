"""One report of what the benchmarks measured on a GPU model, from their data alone."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from bench.experiments.paper_grid import PUBLISHED
from bench.harness.problems import title
from bench.harness.records import Row, read

INEXACT = 2.0
"""Errors of gradients over those of two stages from which on a peer is marked."""
TIE = 1.0
"""MiB that make no difference."""


def write(folder: Path, pictures: Sequence[Path]) -> Path:
    """Write report.md beside the data in `folder`, with `pictures` of the same names."""
    parts = [f"# {folder.name}"]
    for name, section in SECTIONS.items():
        files = sorted(folder.glob(f"{name}*.jsonl"))
        if not files and name not in ON_GPUS:
            parts.append(f"## {name}\n\nNot measured: `python -m bench {name}`.")
        for path in files:
            header, rows = read(path)
            parts += [f"## {path.stem}", _origin(name, header), "\n".join(section(rows))]
            if path.with_suffix(".png") in pictures:
                parts.append(f"![{path.stem}]({path.stem}.png)")
    report = folder / "report.md"
    report.write_text("\n\n".join(parts) + "\n")
    return report


def beaten(peer: Row, rows: Iterable[Row]) -> list[str]:
    """Return the forms of cutefce among `rows` that `peer` is both faster and leaner than.

    None, if another of them is neither slower nor larger than the peer.
    """
    ours = [row for row in rows if _is_ours(row)]
    time, memory = peer["median_ms"], peer["peak_mib"]
    if any(row["median_ms"] <= time and row["peak_mib"] <= memory + TIE for row in ours):
        return []
    return [
        row["form"] for row in ours if time < row["median_ms"] and memory < row["peak_mib"] - TIE
    ]


def _origin(name: str, header: Row) -> str:
    versions = ", ".join(f"{package} {text}" for package, text in header["versions"].items())
    return f"`python -m bench {name}` on {header['device']}, {header['date']}: {versions}."


def _paper(rows: list[Row]) -> Iterator[str]:
    yield from _table(
        {
            "tokens": lambda r: str(r["tokens"]),
            "vocab": lambda r: str(r["vocab"]),
            "canonical, ms": lambda r: _number(r["canonical_ms"]),
            "ours, ms": lambda r: _number(r["ours_ms"]),
            "gain": lambda r: _percent(1 - r["ratio"]),
            "paper, ms": lambda r: _published(r, 0),
            "paper's gain": lambda r: _gain(r["published_ratio"]),
            "canonical, MiB": lambda r: _number(r["canonical_mib"]),
            "ours, MiB": lambda r: _number(r["ours_mib"]),
            "less": lambda r: _percent(1 - r["memory_ratio"]),
            "paper, MB": lambda r: _published(r, 2),
            "paper's less": lambda r: _gain(r["published_memory_ratio"]),
            "cuBLAS, TFLOP/s": lambda r: _number(r["product_tflops"]),
        },
        rows,
    )
    faster, leaner = (sum(r[name] < 1 for r in rows) for name in ("ratio", "memory_ratio"))
    published = [r["published_ratio"] for r in rows if r["published_ratio"]]
    yield ""
    yield (
        f"Faster than canonical in {faster} of {len(rows)} cells, with less memory in {leaner}. "
        f"Geometric mean of ours / canonical: {_mean(r['ratio'] for r in rows):.3f}"
        + (f"; of the paper's: {_mean(published):.3f}." if published else ".")
    )


def _forward(rows: list[Row]) -> Iterator[str]:
    yield from _table(
        {
            "tokens × hidden × vocab": title,
            **{name: FORM[name] for name in ("form", "ms", "quartiles")},
            "time / product": lambda r: _number(r["ratio_to_product"]),
            **{name: FORM[name] for name in ("TFLOP/s", "memory, MiB")},
        },
        rows,
    )


def _tuned(rows: list[Row]) -> Iterator[str]:
    yield from _table(
        {
            "tokens × hidden × vocab": title,
            "other configurations": lambda r: r["kernels"] or "–",
            "forward / defaults": lambda r: _number(r["forward"]),
            "step / defaults": lambda r: _number(r["step"]),
            "smallest step / defaults": lambda r: _number(r["smallest"]),
            "forward / product": lambda r: _number(r["forward_to_product"]),
            "step / products": lambda r: _number(r["step_to_products"]),
        },
        rows,
    )


def _step(rows: list[Row]) -> Iterator[str]:
    yield from _table({"tokens × hidden × vocab": title, **FORM}, rows)


def _peers(rows: list[Row]) -> Iterator[str]:
    both: list[str] = []
    for shape, of_shape in groupby(rows, title):
        measured = list(of_shape)
        forms = [_marked(row, measured) for row in measured]
        both += [f"{r['form']} at {shape}: {', '.join(r['beaten'])}" for r in forms if r["beaten"]]
        yield f"### {shape}\n"
        yield from _table(FORM | ERRORS, forms)
        yield ""
    yield (
        "(*) faster than every budget of cutefce, with more memory. (!) faster and leaner than a "
        "budget, where none is at least as fast and lean. (†) errors of gradients more than "
        f"{INEXACT:g} times those of two stages.\n"
    )
    if both:
        yield "Both faster and leaner than a budget of cutefce:\n"
        yield from (f"- {text}" for text in both)
    else:
        yield "No peer is both faster and leaner than any budget of cutefce at any of these shapes."


def _marked(row: Row, rows: list[Row]) -> Row:
    """Return `row` with the budgets that it beats, and with marks for its name."""
    row = {**row, "beaten": [], "marks": ""}
    if row["median_ms"] is None or row["form"] == "products" or _is_ours(row):
        return row
    row["beaten"] = beaten(row, rows)
    ours = [other["median_ms"] for other in rows if _is_ours(other)]
    two_stage = next(other for other in rows if other["form"] == "two-stage")
    marks = {
        " (!)": bool(row["beaten"]),
        " (*)": not row["beaten"] and row["median_ms"] < min(ours, default=0),
        " (†)": any(
            row[name] > INEXACT * two_stage[name]
            for name in ("dx_error", "dw_error")
            if two_stage[name]
        ),
    }
    row["marks"] = "".join(mark for mark, holds in marks.items() if holds)
    return row


def _ceiling(rows: list[Row]) -> Iterator[str]:
    yield from _table(
        {
            "form": lambda r: r["form"],
            "hidden × vocab": lambda r: f"{r['hidden']} × {r['vocab']}",
            "most tokens": lambda r: str(r["tokens"]),
            "over two stages": lambda r: _number(r["tokens"] / (rows[0]["tokens"] or math.inf)),
            "peak, MiB": lambda r: _number(r["peak_mib"]),
            "failed at": lambda r: str(r["failed_tokens"] or "–"),
            "note": lambda r: r["note"],
        },
        rows,
    )


def _sustained(rows: list[Row]) -> Iterator[str]:
    columns = "form", "ms", "quartiles", "time / products", "TFLOP/s"
    yield from _table(
        {"tokens × hidden × vocab": title, **{name: FORM[name] for name in columns}}, rows
    )


def _breakdown(rows: list[Row]) -> Iterator[str]:
    yield from _table(
        {
            "tokens × hidden × vocab": title,
            "workspace": lambda r: r["workspace"],
            "part": lambda r: r["part"],
            "ms": lambda r: _number(r["ms"]),
            "share": lambda r: _percent(r["share"]),
            "TFLOP/s": lambda r: _number(r["tflops"]),
            "cuBLAS, TFLOP/s": lambda r: _number(r["cublas_tflops"]),
        },
        rows,
    )


def _stability(rows: list[Row]) -> Iterator[str]:
    kinds: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        kinds.setdefault((row["dtype"], row["quantity"]), []).append(row)

    def largest(name: str) -> Callable[[tuple[str, str]], str]:
        return lambda kind: _number(max(row[name] for row in kinds[kind]))

    yield from _table(
        {
            "dtype": lambda kind: kind[0],
            "quantity": lambda kind: kind[1],
            "cases": lambda kind: str(len(kinds[kind])),
            "largest error": largest("ours"),
            "of two stages": largest("two_stage"),
            "at least as exact in": lambda kind: str(
                sum(row["ours"] <= row["two_stage"] for row in kinds[kind])
            ),
            "largest ratio": lambda kind: _number(
                max((r["ours"] / r["two_stage"] for r in kinds[kind] if r["two_stage"]), default=0)
            ),
        },
        kinds,
    )
    scales, vocabs = (sorted({row[name] for row in rows}) for name in ("logit_std", "vocab"))
    yield ""
    yield (
        f"Relative errors against float64, over vocabularies {', '.join(map(str, vocabs))}, logits "
        f"of standard deviations {', '.join(f'{scale:g}' for scale in scales)} and targets: "
        + ", ".join(dict.fromkeys(row["targets"] for row in rows))
        + "."
    )


def _equivalence(rows: list[Row]) -> Iterator[str]:
    yield from _table(
        {
            "form": lambda r: r["form"],
            "plan": lambda r: r["plan"],
            "seed": lambda r: str(r["seed"]),
            "largest distance from the first curve, nats": lambda r: _number(
                r["largest_difference"]
            ),
            "last loss, nats": lambda r: _number(r["losses"][-1]),
        },
        rows,
    )


def _table(columns: dict[str, Callable[[Any], str]], rows: Iterable[Any]) -> Iterator[str]:
    yield f"| {' | '.join(columns)} |"
    yield "|---" * len(columns) + "|"
    for row in rows:
        yield f"| {' | '.join(text(row).replace('|', '/') for text in columns.values())} |"


def _is_ours(row: Row) -> bool:
    return bool(row["form"].startswith("cutefce") and row["median_ms"] is not None)


def _published(row: Row, first: int) -> str:
    if row["published_ratio"] is None:
        return "–"
    numbers = PUBLISHED[row["tokens"], row["vocab"]]
    return f"{numbers[first]} → {numbers[first + 1]}"


def _gain(ratio: float | None) -> str:
    return "–" if ratio is None else _percent(1 - ratio)


def _percent(share: float) -> str:
    return f"{share:.1%}"


def _number(value: float | None) -> str:
    """Return three significant digits, or all digits before the point."""
    if value is None:
        return "–"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _mean(ratios: Iterable[float]) -> float:
    """Return the geometric mean."""
    logarithms = [math.log(ratio) for ratio in ratios]
    return math.exp(sum(logarithms) / len(logarithms))


def _spread(row: Row) -> str:
    return "–" if row["quartiles_ms"] is None else " to ".join(map(_number, row["quartiles_ms"]))


FORM: dict[str, Callable[[Row], str]] = {
    "form": lambda r: r["form"] + r.get("marks", ""),
    "ms": lambda r: _number(r["median_ms"]),
    "quartiles": _spread,
    "time / products": lambda r: _number(r["ratio_to_products"]),
    "TFLOP/s": lambda r: _number(r["tflops"]),
    "cuBLAS, TFLOP/s": lambda r: _number(r["products_tflops"]),
    "memory, MiB": lambda r: _number(r["peak_mib"]),
    "note": lambda r: r["note"].replace("\n", " "),
}
ERRORS: dict[str, Callable[[Row], str]] = {
    "loss error": lambda r: _number(r["loss_error"]),
    "dX error": lambda r: _number(r["dx_error"]),
    "dW error": lambda r: _number(r["dw_error"]),
}
SECTIONS: dict[str, Callable[[list[Row]], Iterator[str]]] = {
    "paper": _paper,
    "forward": _forward,
    "step": _step,
    "peers": _peers,
    "sustained": _sustained,
    "ceiling": _ceiling,
    "breakdown": _breakdown,
    "stability": _stability,
    "equivalence": _equivalence,
    "tuned": _tuned,
}
ON_GPUS = ("forward", "tuned")
"""Those that a CPU has not."""
