"""A training step of the head: forward and backward, against the plain products and two stages.

products    h wᵀ, z w and zᵀ h alone: what any exact method must at least compute
two-stage   F.cross_entropy(F.linear(h, w).float(), y), forward and backward
cutefce X   cutefce.linear_cross_entropy with workspace=X, forward and backward
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

import cutefce
from bench.measure import Call, interleaved, peak_bytes

WORKSPACES: dict[str, str | None] = {"max": "max", "default": None, "min": "min"}


@dataclass(frozen=True)
class Shape:
    """Sizes and dtype of one head."""

    tokens: int
    hidden: int
    vocab: int
    dtype: str


@dataclass(frozen=True)
class Row:
    """One form's result; times are medians of interleaved runs."""

    form: str
    median_ms: float
    quartiles_ms: tuple[float, float]
    ratio_to_products: float
    ratio_to_two_stage: float
    peak_mib: float
    """Peak memory in MiB beyond the inputs and the gradients."""


def run(shape: Shape, device: str, repeats: int) -> list[Row]:
    """Measure every form on fresh random data."""
    forms, gradient_bytes = _forms(shape, device)
    times = interleaved(forms, device, repeats)
    products, two_stage = times["products"].median_ms, times["two-stage"].median_ms
    return [
        Row(
            form=name,
            median_ms=times[name].median_ms,
            quartiles_ms=times[name].quartiles_ms,
            ratio_to_products=times[name].median_ms / products,
            ratio_to_two_stage=times[name].median_ms / two_stage,
            peak_mib=(peak_bytes(form, device) - gradient_bytes) / 2**20,
        )
        for name, form in forms.items()
    ]


def _forms(shape: Shape, device: str) -> tuple[dict[str, Call], int]:
    dtype = getattr(torch, shape.dtype)
    h = torch.randn(shape.tokens, shape.hidden, device=device, dtype=dtype)
    # logits of standard deviation 1, as an untrained head gives
    w = torch.randn(shape.vocab, shape.hidden, device=device).div_(shape.hidden**0.5).to(dtype)
    y = torch.randint(shape.vocab, (shape.tokens,), device=device)
    z = torch.randn(shape.tokens, shape.vocab, device=device, dtype=dtype)
    leaves = h.requires_grad_(), w.requires_grad_()

    def products() -> None:
        with torch.no_grad():
            torch.mm(h, w.t(), out=z)
            torch.mm(z, w)
            torch.mm(z.t(), h)

    def two_stage() -> None:
        loss = F.cross_entropy(F.linear(h, w).float(), y)
        torch.autograd.grad(loss, leaves)

    def ours(workspace: str | None) -> Call:
        def step() -> None:
            loss = cutefce.linear_cross_entropy(h, w, y, workspace=workspace)
            torch.autograd.grad(loss, leaves)

        return step

    forms: dict[str, Call] = {"products": products, "two-stage": two_stage}
    forms |= {f"cutefce {name}": ours(value) for name, value in WORKSPACES.items()}
    return forms, sum(leaf.numel() * leaf.element_size() for leaf in leaves)
