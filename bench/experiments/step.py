"""A training step of the head: forward and backward, against the plain products and two stages.

products    h wᵀ, g w and gᵀ h alone, with g the logits' gradient: what any exact method must at
            least compute; on the very numbers, as a GPU's clock depends on them
two-stage   F.cross_entropy(F.linear(h, w).float(), y), forward and backward
cutefce X   cutefce.linear_cross_entropy with workspace=X, forward and backward
others      the losses of `bench.peers`

All of a shape run in turns on the same inputs.  A form that fails is a row that says why.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

import cutefce
from bench.experiments import paper_grid
from bench.harness.accuracy import Errors, errors, exact
from bench.harness.problems import (
    HEADS,
    SMALL,
    Loss,
    Shape,
    gradients,
    logits_gradient,
    ours,
    random_head,
    two_stage,
)
from bench.harness.timing import Call, Timing, interleaved, peak_bytes
from cutefce.ops.planning.planner import Plan

GIB = 1 << 30
WORKSPACES: dict[str, str | int | None] = {
    "max": "max",
    "4 GiB": 4 * GIB,
    "3.2 GiB": 32 * GIB // 10,
    "default": None,
    "2 GiB": 2 * GIB,
    "1.5 GiB": 15 * GIB // 10,
    "1 GiB": GIB,
    "min": "min",
}
"""Of those that lead to the same plan, the first is measured."""
LARGEST_ERROR = 0.05
"""Relative, of loss or gradients: a form with more computes something else."""
MOST_CHARACTERS = 300
"""Of a note."""
FEW = ("max", "default", "min")
SHAPES = {"cpu": (SMALL,), "cuda": (*HEADS, *paper_grid.SHAPES["cuda"])}


@dataclass(frozen=True)
class Row:
    """One form's result at one shape; times are medians of interleaved runs."""

    tokens: int
    hidden: int
    vocab: int
    form: str
    median_ms: float | None = None
    quartiles_ms: tuple[float, float] | None = None
    ratio_to_products: float | None = None
    ratio_to_two_stage: float | None = None
    tflops: float | None = None
    """The products' operations over the time, whatever a form computes again."""
    products_tflops: float | None = None
    """Rate of cuBLAS in the same minute."""
    peak_mib: float | None = None
    """Peak memory in MiB beyond the inputs and the gradients."""
    predicted_mib: float | None = None
    """What the plan says of it."""
    loss_error: float | None = None
    """Relative to float64, in the Euclidean norm; so are the next two."""
    dx_error: float | None = None
    dw_error: float | None = None
    note: str = ""
    """Why there are no numbers."""


def run(
    shape: Shape,
    device: str,
    repeats: int,
    workspaces: tuple[str, ...],
    peers: Mapping[str, Loss | str] | None = None,
) -> list[Row]:
    """Measure every form on fresh random data.

    `workspaces` are keys of `WORKSPACES`; `peers` are losses by name, or why there is none.
    """
    h, w, y = random_head(shape, device)
    plans = plans_of(h, w, workspaces)
    losses: dict[str, Loss | str] = {"two-stage": two_stage}
    losses |= {f"cutefce {name}": ours(WORKSPACES[name]) for name in plans} | dict(peers or {})
    steps, found, notes = _tried(losses, h, w, y)
    forms = {"products": products_of(h, w, y), **steps}
    times = interleaved(forms, device, repeats)
    gradient_bytes = h.nbytes + w.nbytes
    peaks = {
        name: (peak_bytes(step, device) - gradient_bytes) / 2**20 for name, step in steps.items()
    }
    rows = []
    for name in ("products", *losses):
        place = shape.tokens, shape.hidden, shape.vocab, name
        if name in notes:
            rows.append(Row(*place, note=notes[name]))
            continue
        plan = plans.get(name.removeprefix("cutefce "))
        loss_error, dx_error, dw_error = found.get(name, (None, None, None))
        rows.append(
            Row(
                *place,
                median_ms=times[name].median_ms,
                quartiles_ms=times[name].quartiles_ms,
                ratio_to_products=_ratio(times, name, "products"),
                ratio_to_two_stage=_ratio(times, name, "two-stage"),
                tflops=tflops_of(shape, times[name]),
                products_tflops=tflops_of(shape, times["products"]),
                peak_mib=peaks.get(name),
                predicted_mib=plan.workspace_bytes / 2**20 if plan else None,
                loss_error=loss_error,
                dx_error=dx_error,
                dw_error=dw_error,
            )
        )
    return rows


def _tried(
    losses: Mapping[str, Loss | str], h: Tensor, w: Tensor, y: Tensor
) -> tuple[dict[str, Call], dict[str, Errors], dict[str, str]]:
    """Return the steps that run, their errors, and why the others do not."""
    truth = exact(h, w, y)
    steps: dict[str, Call] = {}
    found: dict[str, Errors] = {}
    notes: dict[str, str] = {}
    for name, loss in losses.items():
        if isinstance(loss, str):
            notes[name] = loss
            continue
        try:
            found[name] = _checked(errors(gradients(loss, h, w, y), truth))
            steps[name] = functools.partial(gradients, loss, h, w, y)
        except torch.OutOfMemoryError:
            notes[name] = "out of memory"
        except Exception as error:  # whatever a peer does is a row
            notes[name] = f"{type(error).__name__}: {error}"[:MOST_CHARACTERS]
    return steps, found, notes


def _checked(found: Errors) -> Errors:
    if not all(error <= LARGEST_ERROR for error in found):  # NaN is not
        text = ", ".join(f"{error:.2g}" for error in found)
        raise ArithmeticError(f"relative errors of loss, dX and dW are {text}")
    return found


def plans_of(h: Tensor, w: Tensor, workspaces: tuple[str, ...]) -> dict[str, Plan]:
    """Return the plans that differ, by the first workspace that leads to each."""
    plans: dict[str, Plan] = {}
    leaves = h.detach().requires_grad_(), w.detach().requires_grad_()
    for name in workspaces:
        plan = cutefce.plan(*leaves, workspace=WORKSPACES[name])
        if plan not in plans.values():
            plans[name] = plan
    return plans


def products_of(h: Tensor, w: Tensor, y: Tensor) -> Call:
    """Return the products that any exact method computes, on the very numbers."""
    g = logits_gradient(h, w, y)

    def products() -> None:
        torch.mm(h, w.t())
        torch.mm(g, w)
        torch.mm(g.t(), h)

    return products


def _ratio(times: dict[str, Timing], name: str, base: str) -> float | None:
    return times[name].median_ms / times[base].median_ms if base in times else None


def tflops_of(shape: Shape, timing: Timing) -> float:
    """Return the products' 10¹² operations a second."""
    return 3 * shape.product_flop / timing.median_ms / 1e9
