"""Distillation: forward and backward of divergences of a student and a frozen teacher.

cutefce X   cutefce.linear_divergence with workspace=X
logits      the same from all logits of both in float32
Liger JSD   its fused JSD, by chunks of logits

Times are in units of one product, h wᵀ of one head.
"""

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click
import torch
from torch import Tensor

import cutefce
from bench.harness.cli import DEVICE, Output, chosen_shape, repeats_option, shape_options
from bench.harness.problems import CPU_SHAPE, Shape, random_inputs, sizes_of
from bench.harness.records import Measurement
from bench.harness.timing import Call, interleaved, peak_bytes, preceding_gemms

SHAPE = Shape(8192, 4096, 131072, "bfloat16")
DIVERGENCES = "forward_kl", "reverse_kl", "jsd", "tv"
WORKSPACES: dict[str, str | int | None] = {
    "max": "max",
    "default": None,
    "600 MiB": 600 << 20,
    "min": "min",
}
PRODUCT, LOGITS, LIGER = "product", "logits", "Liger JSD"
LIGER_MODULE = "liger_kernel.chunked_loss.jsd_loss"


@dataclass(frozen=True)
class Row:
    """One implementation."""

    implementation: str
    median_ms: float | None = None
    products: float | None = None
    """Time over that of one product in the same run."""
    peak_mib: float | None = None
    """Peak memory in MiB beyond the inputs and the gradients."""
    quartiles_ms: tuple[float, float] | None = None
    note: str = ""
    """Why there are no numbers."""


@click.command("divergence")
@shape_options
@repeats_option
@click.pass_obj
def command(output: Output, /, repeats: int | None, **sizes: Any) -> None:
    """Divergences of a student and a teacher, against all logits and Liger."""
    shape = chosen_shape(CPU_SHAPE if DEVICE == "cpu" else SHAPE, sizes)
    measurements = [
        Measurement(
            {**sizes_of(shape), "divergence": name}, functools.partial(run, shape, name, repeats)
        )
        for name in DIVERGENCES
    ]
    output.record("divergence", measurements)


def run(shape: Shape, divergence: str, repeats: int | None) -> list[Row]:
    """Measure every implementation of one divergence, interleaved."""
    h, w, y = random_inputs(shape, DEVICE)
    h_t, w_t = (x.detach() for x in random_inputs(shape, DEVICE)[:2])
    h, w = h.detach().requires_grad_(), w.detach().requires_grad_()
    heads = h, w, h_t, w_t
    losses: dict[str, Callable[[], Tensor]] = {}
    for name, workspace in WORKSPACES.items():
        options: Any = {"divergence": divergence, "workspace": workspace}
        losses[f"cutefce {name}"] = functools.partial(cutefce.linear_divergence, *heads, **options)
    losses[LOGITS] = functools.partial(of_logits, *heads, divergence)
    calls: dict[str, Call] = {PRODUCT: functools.partial(torch.mm, h.detach(), w.detach().t())}
    calls |= {name: functools.partial(_step, loss, (h, w)) for name, loss in losses.items()}
    notes: dict[str, str] = {}
    if divergence == "jsd":
        try:
            function = importlib.import_module(LIGER_MODULE).LigerFusedLinearJSDFunction
            loss = functools.partial(_liger, function, *heads, y)
            calls[LIGER] = functools.partial(_step, loss, (h, w))
            calls[LIGER]()
        except Exception as error:  # a peer may be missing, or fail in any way
            calls.pop(LIGER, None)
            notes[LIGER] = f"{type(error).__name__}: {error}"[:300]
    for name in list(calls):
        try:
            calls[name]()
        except torch.OutOfMemoryError:
            calls.pop(name)
            notes[name] = "out of memory"
    times = interleaved(calls, DEVICE, repeats, before=preceding_gemms(DEVICE))
    gradients = h.nbytes + w.nbytes
    rows = [Row(name, note=note) for name, note in notes.items()]
    for name, timing in times.items():
        ratio = timing.median_ms / times[PRODUCT].median_ms
        beyond = h.shape[0] * w.shape[0] * h.element_size() if name == PRODUCT else gradients
        peak = (peak_bytes(calls[name], DEVICE) - beyond) / 2**20
        rows.append(Row(name, timing.median_ms, ratio, peak, timing.quartiles_ms))
    return rows


def of_logits(h_s: Tensor, w_s: Tensor, h_t: Tensor, w_t: Tensor, divergence: str) -> Tensor:
    """Return the mean divergence (), from log-probabilities (N, V) of both sides in float32."""
    with torch.no_grad():
        q = torch.nn.functional.linear(h_t, w_t).float().log_softmax(1)
    p = torch.nn.functional.linear(h_s, w_s).float().log_softmax(1)
    if divergence == "jsd":
        m = torch.logaddexp(p, q) - torch.log(p.new_full((), 2.0))
        total = (kl_div(m, q) + kl_div(m, p)) / 2
    elif divergence == "tv":
        total = (p.exp() - q.exp()).abs().sum() / 2
    else:
        total = kl_div(p, q) if divergence == "forward_kl" else kl_div(q, p)
    return total / len(h_s)


def kl_div(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return Σ q (log q - log p) ()."""
    return torch.nn.functional.kl_div(log_p, log_q, reduction="sum", log_target=True)


def _liger(function: Any, *operands: Tensor) -> Tensor:
    hard, soft, beta = 0.0, 1.0, 0.5
    result = function.apply(*operands, None, None, hard, soft, beta)
    loss: Tensor = result[0] if isinstance(result, tuple) else result
    return loss


def _step(loss: Callable[[], Tensor], leaves: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the gradients of a forward and a backward."""
    return torch.autograd.grad(loss(), leaves)
