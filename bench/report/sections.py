"""The tables of report.md: one section per experiment, from its rows."""

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby

from bench.experiments.paper_grid import PUBLISHED
from bench.harness.problems import title
from bench.harness.records import Row
from bench.report import trainings
from bench.report.tables import Columns, field, number, percent, quartiles, table, text

INEXACT = 2.0
"""Ratio of a peer's gradient errors to those of the unfused loss above which it is marked."""
TIE_MIB = 1.0
"""Difference in memory that counts as none."""


def beaten(peer: Row, rows: Iterable[Row]) -> list[str]:
    """Return the budgets of cutefce among `rows` that `peer` is both faster and leaner than.

    Empty, if another budget is neither slower nor larger than the peer.
    """
    ours = [row for row in rows if _is_cutefce(row)]
    time, memory = peer["median_ms"], peer["peak_mib"]
    if any(row["median_ms"] <= time and row["peak_mib"] <= memory + TIE_MIB for row in ours):
        return []
    return [
        row["implementation"]
        for row in ours
        if time < row["median_ms"] and memory < row["peak_mib"] - TIE_MIB
    ]


def _paper(rows: list[Row]) -> Iterator[str]:
    yield from table(
        {
            "tokens": text("tokens"),
            "vocab": text("vocab"),
            "unfused, ms": field("unfused_ms"),
            "cutefce, ms": field("cutefce_ms"),
            "time saved": lambda r: percent(1 - r["ratio"]),
            "paper, ms": lambda r: _published(r, 0),
            "paper's time saved": lambda r: _saved(r["published_ratio"]),
            "unfused, MiB": field("unfused_mib"),
            "cutefce, MiB": field("cutefce_mib"),
            "memory saved": lambda r: percent(1 - r["memory_ratio"]),
            "paper, MB": lambda r: _published(r, 2),
            "paper's memory saved": lambda r: _saved(r["published_memory_ratio"]),
            "cuBLAS, TFLOP/s": field("cublas_tflops"),
        },
        rows,
    )
    faster, leaner = (sum(r[name] < 1 for r in rows) for name in ("ratio", "memory_ratio"))
    published = [r["published_ratio"] for r in rows if r["published_ratio"]]
    yield ""
    yield (
        f"Faster than unfused in {faster} of {len(rows)} cells, with less memory in {leaner}. "
        f"Geometric mean of cutefce / unfused: {_geometric_mean(r['ratio'] for r in rows):.3f}"
        + (f"; of the paper's: {_geometric_mean(published):.3f}." if published else ".")
    )


def _step(rows: list[Row]) -> Iterator[str]:
    yield from table(SIZES | IMPLEMENTATION, rows)


def _forward(rows: list[Row]) -> Iterator[str]:
    yield from table(
        {
            **SIZES,
            **_columns("implementation", "ms", "quartiles"),
            "time / GEMM": field("ratio_to_gemm"),
            **_columns("TFLOP/s", "memory, MiB"),
        },
        rows,
    )


def _few_tokens(rows: list[Row]) -> Iterator[str]:
    yield from table(
        {
            **SIZES,
            "forward, ms": field("forward_ms"),
            "forward / GEMM": field("forward_to_gemm"),
            "step, ms": field("step_ms"),
            "step / GEMMs": field("step_to_gemms"),
        },
        rows,
    )


def _steady_state(rows: list[Row]) -> Iterator[str]:
    columns = _columns("implementation", "ms", "quartiles", "time / GEMMs", "TFLOP/s")
    yield from table(SIZES | columns, rows)


def _cpu_overhead(rows: list[Row]) -> Iterator[str]:
    yield from table(
        {
            **SIZES,
            "call": text("call"),
            "cutefce, µs": field("cutefce_us"),
            "cutefce quartiles": quartiles("cutefce_quartiles_us"),
            "torch, µs": field("torch_us"),
            "torch quartiles": quartiles("torch_quartiles_us"),
        },
        rows,
    )


def _first_call(rows: list[Row]) -> Iterator[str]:
    columns = {"step": text("case"), "seconds": field("seconds"), "kernels": text("kernels")}
    yield from table({**SIZES, **columns}, rows)


def _tuned(rows: list[Row]) -> Iterator[str]:
    yield from table(
        {
            **SIZES,
            "tuned": text("kernels"),
            "forward / default": field("forward_to_default"),
            "step / default": field("step_to_default"),
            "min step / default": field("min_step_to_default"),
            "forward / GEMM": field("forward_to_gemm"),
            "step / GEMMs": field("step_to_gemms"),
        },
        rows,
    )


def _peers(rows: list[Row]) -> Iterator[str]:
    wins: list[str] = []
    for shape, group in groupby(rows, title):
        of_shape = list(group)
        marked = [_marked(row, of_shape) for row in of_shape]
        wins += [
            f"{row['implementation']} at {shape}: {', '.join(row['beaten'])}"
            for row in marked
            if row["beaten"]
        ]
        yield f"### {shape}\n"
        yield from table(IMPLEMENTATION | ERRORS, marked)
        yield ""
    yield (
        "(*) faster than every budget of cutefce, with more memory. (!) faster and leaner than a "
        "budget, where no budget is at least as fast and lean. (†) gradient errors more than "
        f"{INEXACT:g} times those of the unfused loss.\n"
    )
    if wins:
        yield "Both faster and leaner than a budget of cutefce:\n"
        yield from (f"- {win}" for win in wins)
    else:
        yield "No peer is both faster and leaner than any budget of cutefce at any of these shapes."


def _marked(row: Row, rows: list[Row]) -> Row:
    """Return `row` with the budgets that it beats, and with marks for its name."""
    row = {**row, "beaten": [], "marks": ""}
    if row["median_ms"] is None or row["implementation"] == "GEMMs" or _is_cutefce(row):
        return row
    row["beaten"] = beaten(row, rows)
    ours = [other["median_ms"] for other in rows if _is_cutefce(other)]
    unfused = next(other for other in rows if other["implementation"] == "unfused")
    marks = {
        " (!)": bool(row["beaten"]),
        " (*)": not row["beaten"] and row["median_ms"] < min(ours, default=0),
        " (†)": any(
            row[name] > INEXACT * unfused[name]
            for name in ("dx_error", "dw_error")
            if unfused[name]
        ),
    }
    row["marks"] = "".join(mark for mark, applies in marks.items() if applies)
    return row


def _max_tokens(rows: list[Row]) -> Iterator[str]:
    yield from table(
        {
            "implementation": text("implementation"),
            "hidden × vocab": lambda r: f"{r['hidden']} × {r['vocab']}",
            "most tokens": text("tokens"),
            "over unfused": lambda r: number(r["tokens"] / (rows[0]["tokens"] or math.inf)),
            "peak, MiB": field("peak_mib"),
            "failed at": text("failed_tokens"),
            "note": lambda r: r["note"],
        },
        rows,
    )


def _breakdown(rows: list[Row]) -> Iterator[str]:
    yield from table(
        {
            **SIZES,
            "workspace": text("workspace"),
            "part": text("part"),
            "ms": field("ms"),
            "share": lambda r: percent(r["share"]),
            "TFLOP/s": field("tflops"),
            "cuBLAS, TFLOP/s": field("cublas_tflops"),
        },
        rows,
    )


def _stability(rows: list[Row]) -> Iterator[str]:
    kinds: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        kinds.setdefault((row["dtype"], row["quantity"]), []).append(row)

    def largest(name: str) -> Callable[[tuple[str, str]], str]:
        return lambda kind: number(max(row[name] for row in kinds[kind]))

    yield from table(
        {
            "dtype": lambda kind: kind[0],
            "quantity": lambda kind: kind[1],
            "cases": lambda kind: str(len(kinds[kind])),
            "largest error": largest("cutefce"),
            "largest error, unfused": largest("unfused"),
            "cases at least as accurate": lambda kind: str(
                sum(row["cutefce"] <= row["unfused"] for row in kinds[kind])
            ),
            "largest ratio to unfused": lambda kind: number(
                max((r["cutefce"] / r["unfused"] for r in kinds[kind] if r["unfused"]), default=0)
            ),
        },
        kinds,
    )
    scales, vocabs = (sorted({row[name] for row in rows}) for name in ("logit_std", "vocab"))
    yield ""
    yield (
        f"Relative errors against float64, over vocabularies {', '.join(map(str, vocabs))}, "
        f"standard deviations of the logits {', '.join(f'{scale:g}' for scale in scales)} and "
        f"targets: {', '.join(dict.fromkeys(row['targets'] for row in rows))}."
    )


def _is_cutefce(row: Row) -> bool:
    return bool(row["implementation"].startswith("cutefce") and row["median_ms"] is not None)


def _published(row: Row, first: int) -> str:
    if row["published_ratio"] is None:
        return "–"
    numbers = PUBLISHED[row["tokens"], row["vocab"]]
    return f"{numbers[first]} → {numbers[first + 1]}"


def _saved(ratio: float | None) -> str:
    return percent(None if ratio is None else 1 - ratio)


def _geometric_mean(ratios: Iterable[float]) -> float:
    logarithms = [math.log(ratio) for ratio in ratios]
    return math.exp(sum(logarithms) / len(logarithms))


def _columns(*names: str) -> Columns:
    return {name: IMPLEMENTATION[name] for name in names}


SIZES: Columns = {"tokens × hidden × vocab": title}
IMPLEMENTATION: Columns = {
    "implementation": lambda r: r["implementation"] + r.get("marks", ""),
    "ms": field("median_ms"),
    "quartiles": quartiles("quartiles_ms"),
    "time / GEMMs": field("ratio_to_gemms"),
    "TFLOP/s": field("tflops"),
    "cuBLAS, TFLOP/s": field("cublas_tflops"),
    "memory, MiB": field("peak_mib"),
    "note": lambda r: r["note"].replace("\n", " "),
}
ERRORS: Columns = {
    "loss error": field("loss_error"),
    "dX error": field("dx_error"),
    "dW error": field("dw_error"),
}
SECTIONS: dict[str, Callable[[list[Row]], Iterator[str]]] = {
    "training_step": trainings.training_step,
    "paper": _paper,
    "forward": _forward,
    "few_tokens": _few_tokens,
    "step": _step,
    "peers": _peers,
    "steady_state": _steady_state,
    "max_tokens": _max_tokens,
    "breakdown": _breakdown,
    "stability": _stability,
    "loss_curves": trainings.loss_curves,
    "sampled_curves": trainings.sampled_curves,
    "cpu_overhead": _cpu_overhead,
    "first_call": _first_call,
    "tuned": _tuned,
}
GPU_ONLY = ("forward", "few_tokens", "tuned", "cpu_overhead", "first_call")
"""Experiments that a CPU does not run."""
