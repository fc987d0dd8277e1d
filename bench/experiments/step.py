"""How a step is measured: forward and backward, against the plain GEMMs and the unfused loss.

GEMMs       h wᵀ, g w and gᵀ h alone, g being the logits' gradient: the least that any exact method
            computes
unfused     F.cross_entropy(F.linear(h, w).float(), y)
cutefce X   cutefce.linear_cross_entropy with workspace=X
others      the losses of `bench.experiments.peers`

All implementations run interleaved on the same inputs.  One that fails gives a row with the reason.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

import cutefce
from bench.harness.accuracy import Errors, relative_errors
from bench.harness.problems import (
    Loss,
    Shape,
    cutefce_loss,
    gradients,
    hidden_gradient,
    ignore_some,
    plain_gemms,
    random_inputs,
)
from bench.harness.reference import float64_mean_reference, unfused
from bench.harness.timing import Call, Timing, interleaved, peak_bytes, preceding_gemms
from cutefce.ops.program.plan import Plan

GIB = 1 << 30
WORKSPACES: dict[str, str | int | None] = {
    "max": "max",
    "4 GiB": 4 * GIB,
    "default": None,
    "2 GiB": 2 * GIB,
    "1.5 GiB": 15 * GIB // 10,
    "1 GiB": GIB,
    "min": "min",
}
"""Budgets by name; of several that lead to the same plan, the first is measured."""
SMALL_WORKSPACES: dict[str, str | int | None] = {"280 MiB": 280 << 20, "110 MiB": 110 << 20}
"""More budgets, for frozen heads."""
MAX_ERROR = 0.05
"""Relative error of loss or gradients above which an implementation counts as wrong."""
MAX_NOTE_LENGTH = 300


@dataclass(frozen=True)
class Task:
    """What a step computes."""

    is_frozen: bool = False
    """Whether the weight has no gradient."""
    ignored_percent: int = 0
    """Targets that are ignored, at random."""

    def step(self, loss: Loss, h: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        """Return the loss and the gradients that are wanted, dX first."""
        return (hidden_gradient if self.is_frozen else gradients)(loss, h, w, y)


PLAIN, FROZEN = Task(), Task(is_frozen=True)
"""Both gradients, and dX alone; no target is ignored."""


@dataclass(frozen=True)
class Row:
    """One implementation; times are medians of interleaved runs."""

    implementation: str
    median_ms: float | None = None
    quartiles_ms: tuple[float, float] | None = None
    ratio_to_gemms: float | None = None
    tflops: float | None = None
    """Operations of the three GEMMs, of a frozen head's two, without recomputation, over time."""
    cublas_tflops: float | None = None
    """Rate of the plain GEMMs in the same run."""
    peak_mib: float | None = None
    """Peak memory in MiB beyond the inputs and the gradients."""
    predicted_mib: float | None = None
    """The plan's prediction of `peak_mib`."""
    loss_error: float | None = None
    """Relative to float64, in the Euclidean norm; so are the next two."""
    dx_error: float | None = None
    dw_error: float | None = None
    note: str = ""
    """Why there are no numbers."""


def run(
    shape: Shape,
    device: str,
    repeats: int | None,
    workspaces: tuple[str, ...],
    peers: Mapping[str, Loss | str] | None = None,
    task: Task = PLAIN,
) -> list[Row]:
    """Measure every implementation on random inputs.

    `workspaces` are keys of `WORKSPACES` and `SMALL_WORKSPACES`; `peers` are losses by name, or why
    one is unavailable.  The GEMMs are those of all rows, and of both gradients, whatever the task.
    """
    h, w, y = random_inputs(shape, device)
    plans = distinct_plans(h, w, workspaces, task.is_frozen)
    losses: dict[str, Loss | str] = {"unfused": unfused}
    budgets = WORKSPACES | SMALL_WORKSPACES
    losses |= {f"cutefce {name}": cutefce_loss(workspace=budgets[name]) for name in plans}
    losses |= dict(peers or {})
    gemms = plain_gemms(h, w, y)
    y = ignore_some(y, task.ignored_percent)
    steps, errors, failures = _checked_steps(losses, h, w, y, task)
    calls = {"GEMMs": gemms, **steps}
    times = interleaved(calls, device, repeats, before=preceding_gemms(device))
    gradient_bytes = h.nbytes + (0 if task.is_frozen else w.nbytes)
    rows = []
    for name in ("GEMMs", *losses):
        if name in failures:
            rows.append(Row(name, note=failures[name]))
            continue
        plan = plans.get(name.removeprefix("cutefce "))
        loss_error, dx_error, dw_error = (*errors.get(name, ()), None, None, None)[:3]
        peak = peak_bytes(steps[name], device) - gradient_bytes if name in steps else None
        rows.append(
            Row(
                name,
                median_ms=times[name].median_ms,
                quartiles_ms=times[name].quartiles_ms,
                ratio_to_gemms=times[name].median_ms / times["GEMMs"].median_ms,
                tflops=_tflops(shape, times[name], 2 if task.is_frozen and name in steps else 3),
                cublas_tflops=_tflops(shape, times["GEMMs"]),
                peak_mib=None if peak is None else peak / 2**20,
                predicted_mib=plan.workspace_bytes / 2**20 if plan else None,
                loss_error=loss_error,
                dx_error=dx_error,
                dw_error=dw_error,
            )
        )
    return rows


def _checked_steps(
    losses: Mapping[str, Loss | str], h: Tensor, w: Tensor, y: Tensor, task: Task
) -> tuple[dict[str, Call], dict[str, Errors], dict[str, str]]:
    """Return the steps that work, their errors, and why the others do not."""
    want = float64_mean_reference(h, w, y)
    steps: dict[str, Call] = {}
    errors: dict[str, Errors] = {}
    failures: dict[str, str] = {}
    for name, loss in losses.items():
        if isinstance(loss, str):
            failures[name] = loss
            continue
        try:
            errors[name] = _checked(relative_errors(task.step(loss, h, w, y), want))
            steps[name] = functools.partial(task.step, loss, h, w, y)
        except torch.OutOfMemoryError:
            failures[name] = "out of memory"
        except Exception as error:  # a peer may raise anything: the row reports it
            failures[name] = f"{type(error).__name__}: {error}"[:MAX_NOTE_LENGTH]
    return steps, errors, failures


def _checked(errors: Errors) -> Errors:
    if not all(error <= MAX_ERROR for error in errors):  # also true of NaN
        text = ", ".join(f"{error:.2g}" for error in errors)
        raise ArithmeticError(f"relative errors of loss, dX and dW are {text}")
    return errors


def distinct_plans(
    h: Tensor, w: Tensor, workspaces: tuple[str, ...], is_frozen: bool = False
) -> dict[str, Plan]:
    """Return the distinct plans, by the first workspace that leads to each."""
    plans: dict[str, Plan] = {}
    leaves = h.detach().requires_grad_(), w.detach().requires_grad_(not is_frozen)
    for name in workspaces:
        plan = cutefce.plan(*leaves, workspace=(WORKSPACES | SMALL_WORKSPACES)[name])
        if plan not in plans.values():
            plans[name] = plan
    return plans


def _tflops(shape: Shape, timing: Timing, products: int = 3) -> float:
    """Return the rate of the three GEMMs, or of two, in 10¹² operations per second."""
    return products * shape.gemm_flop / timing.median_ms / 1e9
