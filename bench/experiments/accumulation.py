"""Steps that add dW to a float32 buffer, as gradient accumulation in mixed precision does.

GEMMs               h wᵀ, g w and gᵀ h alone, g being the logits' gradient
dW, then added      dW is returned in the dtype of the weight, and added by torch
backward X          `accumulate_into`, with workspace=X
forward X           `accumulate_into` and `grad_output`, with workspace=X: plans with gradients in
                    forward add dW there
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import click
import torch
from torch import Tensor

import cutefce
from bench.harness.accuracy import relative_errors
from bench.harness.cli import (
    DEVICE,
    Output,
    chosen_shapes,
    per_shape,
    repeats_option,
    shape_options,
)
from bench.harness.problems import CPU_SHAPE, Shape, plain_gemms, random_inputs
from bench.harness.reference import float64_mean_reference
from bench.harness.timing import Call, interleaved, peak_bytes, preceding_gemms

SHAPES = {
    "cpu": (CPU_SHAPE,),
    "cuda": (Shape(32768, 4096, 131072, "bfloat16"), Shape(8192, 4096, 131072, "bfloat16")),
}
WORKSPACES: dict[str, str | int] = {
    "max": "max",
    "1.1 GiB": 11 * (1 << 30) // 10,
    "300 MiB": 300 << 20,
    "min": "min",
}
"""Budgets by name."""
UPSTREAM = 0.125
"""Gradient of each loss, as of one of eight microbatches."""
GEMMS, ADDED = "GEMMs", "dW, then added"


@dataclass(frozen=True)
class Row:
    """One implementation at one shape; times are medians of interleaved runs."""

    implementation: str
    median_ms: float
    quartiles_ms: tuple[float, float]
    ratio_to_gemms: float
    peak_mib: float | None = None
    """Peak memory in MiB beyond the inputs, dX and the buffer."""
    predicted_mib: float | None = None
    """The plan's prediction of `peak_mib`."""
    plan: str = ""
    dx_error: float | None = None
    """Relative to float64, in the Euclidean norm; so is the next."""
    dw_error: float | None = None


@click.command("accumulation")
@shape_options
@repeats_option
@click.pass_obj
def command(output: Output, /, repeats: int | None, **sizes: Any) -> None:
    """Steps that add dW to a float32 buffer, in the backward or in the forward."""
    name, shapes = chosen_shapes("accumulation", SHAPES[DEVICE], sizes)
    output.record(name, per_shape(shapes, functools.partial(run, device=DEVICE, repeats=repeats)))


def run(shape: Shape, device: str, repeats: int | None) -> list[Row]:
    """Measure every implementation, interleaved, on random inputs."""
    h, w, y = random_inputs(shape, device)
    buffer = torch.zeros(w.shape, device=device)
    options = implementations(buffer)
    steps = {
        name: functools.partial(step, h, w, y, buffer, given) for name, given in options.items()
    }
    loss, dx, dw = float64_mean_reference(h, w, y)
    want, errors = (loss, dx.mul_(UPSTREAM), dw.mul_(UPSTREAM)), {}
    for name, call in steps.items():
        buffer.zero_()
        errors[name] = relative_errors((loss, call(), buffer), want)[1:]
    del want, dx, dw
    calls: dict[str, Call] = {GEMMS: plain_gemms(h, w, y), **steps}
    times = interleaved(calls, device, repeats, before=preceding_gemms(device))
    rows, leaves = [], (h.detach().requires_grad_(), w.detach().requires_grad_())
    for name, time in times.items():
        ratio = time.median_ms / times[GEMMS].median_ms
        row = name, time.median_ms, time.quartiles_ms, ratio
        if name == GEMMS:
            rows.append(Row(*row))
            continue
        plan, peak = cutefce.plan(*leaves, **options[name]), peak_bytes(steps[name], device)
        returned = w.nbytes if name == ADDED else 0
        memory = (peak - h.nbytes) / 2**20, (plan.workspace_bytes + returned) / 2**20
        rows.append(Row(*row, *memory, str(plan), *errors[name]))
    return rows


def implementations(buffer: Tensor) -> dict[str, dict[str, Any]]:
    """Return the arguments of each implementation's call."""
    found: dict[str, dict[str, Any]] = {ADDED: {}}
    for place, given in (("backward", {}), ("forward", {"grad_output": UPSTREAM})):
        for name, budget in WORKSPACES.items():
            options = {"workspace": budget, "accumulate_into": buffer, **given}
            found[f"{place} {name}"] = options
    return found


def step(h: Tensor, w: Tensor, y: Tensor, buffer: Tensor, options: Mapping[str, Any]) -> Tensor:
    """Add dW to the buffer; return dX (N, D)."""
    h, w = h.detach().requires_grad_(), w.detach().requires_grad_()
    loss = cutefce.linear_cross_entropy(h, w, y, **options)
    (loss * UPSTREAM).backward()
    if w.grad is not None:
        buffer += w.grad
    assert h.grad is not None
    return h.grad
