"""Steps that run for long, one form after another, beside the plain products.

A GPU slows down for the power that it draws, a while later: in turns with other work, as `step`
measures, a form has the clock of all of it, and for long that of its own.  What it saves of power
is time for the rest of a training.
"""

import functools
from dataclasses import dataclass

from bench.experiments.step import FEW, WORKSPACES, plans_of, products_of, tflops_of
from bench.harness.problems import (
    HEADS,
    SMALL,
    Loss,
    Shape,
    gradients,
    ours,
    random_head,
    two_stage,
)
from bench.harness.timing import Call, sustained

SHAPES = {"cpu": (SMALL,), "cuda": tuple(HEADS)}


@dataclass(frozen=True)
class Row:
    """One form's result at one shape; times are medians of stretches of runs."""

    tokens: int
    hidden: int
    vocab: int
    form: str
    median_ms: float
    quartiles_ms: tuple[float, float]
    ratio_to_products: float
    tflops: float
    """The products' operations over the time, whatever a form computes again."""


def run(shape: Shape, device: str, seconds: float) -> list[Row]:
    """Measure every form on fresh random data, in stretches of `seconds`."""
    h, w, y = random_head(shape, device)
    losses: dict[str, Loss] = {"two-stage": two_stage}
    losses |= {f"cutefce {name}": ours(WORKSPACES[name]) for name in plans_of(h, w, FEW)}
    forms: dict[str, Call] = {"products": products_of(h, w, y)}
    for name, loss in losses.items():
        forms[name] = functools.partial(gradients, loss, h, w, y)
    times = sustained(forms, device, seconds)
    return [
        Row(
            shape.tokens,
            shape.hidden,
            shape.vocab,
            name,
            median_ms=time.median_ms,
            quartiles_ms=time.quartiles_ms,
            ratio_to_products=time.median_ms / times["products"].median_ms,
            tflops=tflops_of(shape, time),
        )
        for name, time in times.items()
    ]
