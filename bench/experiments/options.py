"""What options and outputs of the loss cost: time and memory over the plain call."""

import functools
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
SCORED = Shape(8192, 4096, 151936, "bfloat16")
FORWARD, SCORES = "forward", "forward, min"
"""Calls without gradients, of all tokens at once, and of `SCORES_OPTIONS` in little memory."""
PLAIN, UNFUSED = "none", "log-probabilities and ranks of logits"
TOP = "rank and top 8"
SCORES_OPTIONS = PLAIN, TOP
OUTPUTS = ("is_top1", "argmax", "rank", "sum_p_squared", "entropy")
SOFT_TARGETS = 8, 64
"""Classes of each token that have a target probability."""
KEPT = 64
"""Classes of each token that a sampler kept."""


@dataclass(frozen=True)
class Row:
    """One option."""

    option: str
    median_ms: float
    ratio_to_plain: float
    peak_mib: float | None = None
    """Peak memory in MiB beyond the inputs and the gradients."""
    more_mib: float | None = None
    """Beyond that of the plain call."""
    quartiles_ms: tuple[float, float] | None = None


@click.command("options")
@shape_options
@repeats_option
@click.pass_obj
def command(output: Output, /, repeats: int | None, **sizes: Any) -> None:
    """Options and outputs of the loss, against the plain call."""
    shape = chosen_shape(CPU_SHAPE if DEVICE == "cpu" else SHAPE, sizes)
    cases = [(shape, workspace) for workspace in ("max", "min", FORWARD)]
    cases.append((SCORED if shape == SHAPE else shape, SCORES))
    measurements = [
        Measurement({**sizes_of(own), "workspace": w}, functools.partial(run, own, w, repeats))
        for own, w in cases
    ]
    output.record("options", measurements)


def options(tokens: int, vocab: int, device: str) -> dict[str, dict[str, Any]]:
    """Return the arguments of calls by what they measure; those with outputs are log_probs'."""
    numbers = functools.partial(torch.rand, device=device)
    bias = torch.randn(vocab, device=device).requires_grad_()
    per_token = numbers(tokens) + 0.5
    loss: dict[str, dict[str, Any]] = {
        PLAIN: {},
        "logit_scale": {"logit_scale": 0.0625},
        "temperature": {"temperature": 0.7},
        "temperature of each token": {"temperature": per_token},
        "softcap": {"softcap": 30.0},
        "linear_bias": {"linear_bias": bias},
        "z_loss": {"z_loss": 1e-4},
        "weight": {"weight": numbers(vocab) + 0.5},
        "token_weights": {"token_weights": numbers(tokens) + 0.5},
        "label_smoothing": {"label_smoothing": 0.1},
        "lse": {"return_lse": True},
    }
    loss |= {
        f"{count} soft targets": soft_targets(tokens, vocab, count, device)
        for count in SOFT_TARGETS
    }
    outputs: dict[str, dict[str, Any]] = {
        name: {"outputs": (name,), "gradients": ("log_probs",)} for name in ("mean_logit", *OUTPUTS)
    }
    outputs["entropy with gradient"] = {
        "outputs": ("entropy",),
        "gradients": ("log_probs", "entropy"),
        "temperature": per_token,
    }
    floors = torch.zeros(tokens, device=device)
    outputs["logit_floor"] = {"logit_floor": floors, "outputs": (), "gradients": ("log_probs",)}
    kept = torch.randint(vocab, (tokens, min(KEPT, vocab)), device=device)
    outputs[f"{KEPT} kept_classes"] = {
        "kept_classes": kept,
        "outputs": (),
        "gradients": ("log_probs",),
    }
    outputs["top 8"] = {"outputs": (), "top_k": 8, "gradients": ("log_probs",)}
    outputs[TOP] = {"outputs": ("rank",), "top_k": 8, "gradients": ("log_probs",)}
    outputs["lse without a target"] = {"outputs": ("lse",), "gradients": ("lse",), "target": None}
    return loss | outputs


def soft_targets(tokens: int, vocab: int, count: int, device: str) -> dict[str, Any]:
    """Return random classes (N, K), which may repeat, and probabilities that add up to 1."""
    count = min(count, vocab)
    indices = torch.randint(vocab, (tokens, count), device=device)
    probs = torch.randn(tokens, count, device=device).softmax(dim=-1)
    return {"target_indices": indices, "target_probs": probs}


def value(h: Tensor, w: Tensor, y: Tensor, workspace: str | None, given: dict[str, Any]) -> Tensor:
    """Return the loss () of a call with the arguments `given`."""
    given = dict(given)
    if "outputs" not in given:
        target = None if "target_indices" in given else y
        result = cutefce.linear_cross_entropy(h, w, target, workspace=workspace, **given)
        return result.loss if isinstance(result, cutefce.LossOutput) else result
    names, target = given.pop("gradients"), given.pop("target", y)
    rows = cutefce.linear_log_probs(h, w, target, workspace=workspace, **given)
    return sum((getattr(rows, name).mean() for name in names), start=h.new_zeros(()))


def run(shape: Shape, workspace: str, repeats: int | None) -> list[Row]:
    """Measure options with one workspace or without gradients, interleaved with the plain call."""
    h, w, y = random_inputs(shape, DEVICE)
    has_gradient = workspace not in (FORWARD, SCORES)
    given = options(shape.tokens, shape.vocab, DEVICE)
    if workspace == SCORES:
        given = {name: given[name] for name in SCORES_OPTIONS}
    own = (step, workspace) if has_gradient else (forward, "min" if workspace == SCORES else None)
    calls: dict[str, Call] = {
        name: functools.partial(own[0], h, w, y, own[1], option) for name, option in given.items()
    }
    if not has_gradient:
        calls[UNFUSED] = functools.partial(unfused_scores, h, w, y)
    times = interleaved(calls, DEVICE, repeats, before=preceding_gemms(DEVICE))
    peaks = {name: peak_bytes(call, DEVICE) / 2**20 for name, call in calls.items()}
    gradients = (h.nbytes + w.nbytes) / 2**20 if has_gradient else 0.0
    return [
        Row(
            name,
            times[name].median_ms,
            times[name].median_ms / times[PLAIN].median_ms,
            peaks[name] - gradients,
            peaks[name] - peaks[PLAIN],
            times[name].quartiles_ms,
        )
        for name in calls
    ]


def step(
    h: Tensor, w: Tensor, y: Tensor, workspace: str | None, given: dict[str, Any]
) -> tuple[Any, ...]:
    """Return the gradients of a forward and a backward."""
    h, w = h.detach().requires_grad_(), w.detach().requires_grad_()
    leaves = [h, w, given["linear_bias"]] if "linear_bias" in given else [h, w]
    return torch.autograd.grad(value(h, w, y, workspace, given), leaves)


def unfused_scores(h: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and ranks of targets (N,) from logits (N, V)."""
    with torch.no_grad():
        logits = h @ w.t()
        own = logits.gather(1, y[:, None])
        ranks = (logits > own).sum(1)
        return -torch.nn.functional.cross_entropy(logits.float(), y, reduction="none"), ranks


def forward(
    h: Tensor, w: Tensor, y: Tensor, workspace: str | None, given: dict[str, Any]
) -> Tensor:
    """Return the loss without gradients."""
    with torch.no_grad():
        return value(h, w, y, workspace, given)
