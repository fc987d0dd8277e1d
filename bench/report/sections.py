"""The tables of report.md: one section per experiment, from its rows."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from itertools import groupby

from bench.experiments.sampled_curves import summarize
from bench.harness.problems import title
from bench.harness.records import Row
from bench.report.tables import Columns, field, fields, number, quartiles, table

INEXACT = 2.0
"""Ratio of a peer's gradient errors to those of the unfused loss above which it is marked."""
TIE_MIB = 1.0
"""Difference in memory that counts as none."""
TIE = 1.01
"""Ratio of errors that counts as equality."""


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


def _peers(rows: list[Row]) -> Iterator[str]:
    wins: list[str] = []
    for shape, group in groupby(rows, title):
        of_shape = list(group)
        marked = [_marked(row, of_shape) for row in of_shape]
        rows_of = {row["implementation"]: row for row in of_shape}
        wins += [
            f"{row['implementation']} at {shape}: "
            + ", ".join(name + _larger_errors(row, rows_of[name]) for name in row["beaten"])
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


def _larger_errors(peer: Row, own: Row) -> str:
    """Return by how much the gradients' errors of `peer` exceed those of `own`, if they do."""
    names = [name for name in ("dx_error", "dw_error") if own[name]]
    ratio = max((peer[name] / own[name] for name in names), default=1)
    return f" (with errors of gradients up to {ratio:.2f} times as large)" if ratio > TIE else ""


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


def _sampled_curves(rows: list[Row]) -> Iterator[str]:
    """Yield the final losses of each kind of gradient, in nats per token."""
    first = rows[0]
    yield from fields(list(map(asdict, summarize(rows))))
    yield ""
    yield (
        f"Final validation losses in nats per token, and differences from exact gradients. A "
        f"transformer of {first['parameters'] / 1e6:.0f} M parameters "
        f"with a tied head of {first['vocab']} × {first['hidden']}, trained for "
        f"{len(first['losses'])} steps of {first['batch_tokens']} tokens, from a corpus of "
        f"{first['corpus_tokens'] / 1e6:.1f} M. A seed decides parameters, batches and draws."
    )


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
    "training_step": fields,
    "peers": _peers,
    "forward": fields,
    "stability": _stability,
    "sampled_curves": _sampled_curves,
    "cpu_overhead": fields,
    "first_call": fields,
    "options": fields,
    "sampled": fields,
    "accumulation": fields,
    "divergence": fields,
    "parallel": fields,
    "causal_lms": fields,
}
"""What writes the section of each experiment; `fields` makes a column for each field."""
GPU_ONLY = ("forward", "cpu_overhead", "first_call")
"""Experiments that a CPU does not run."""
