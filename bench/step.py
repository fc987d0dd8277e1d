"""A training step of the head: forward and backward, against the plain products and two stages.

products    h wᵀ, g w and gᵀ h alone, with g the logits' gradient: what any exact method must at
            least compute; on the very numbers, as a GPU's clock depends on them
two-stage   F.cross_entropy(F.linear(h, w).float(), y), forward and backward
cutefce X   cutefce.linear_cross_entropy with workspace=X, forward and backward
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

import cutefce
from bench.head import Shape, random_head
from bench.measure import Call, interleaved, peak_bytes
from cutefce.ops.planner import Plan

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


DEFAULT_SHAPES = {
    "cpu": (Shape(2048, 1024, 50257, "float32"),),
    "cuda": tuple(
        Shape(tokens, hidden, vocab, "bfloat16")
        for tokens, hidden, vocab in (
            (8192, 4096, 131072),
            (8192, 2304, 256000),
            (4096, 4096, 128256),
            (1024, 4096, 262144),
            (16384, 7168, 129280),
            (32768, 4096, 131072),
        )
    ),
}


@dataclass(frozen=True)
class Row:
    """One form's result at one shape; times are medians of interleaved runs."""

    tokens: int
    hidden: int
    vocab: int
    form: str
    median_ms: float
    quartiles_ms: tuple[float, float]
    ratio_to_products: float
    ratio_to_two_stage: float
    peak_mib: float
    """Peak memory in MiB beyond the inputs and the gradients."""
    predicted_mib: float | None
    """What the plan says of it."""


def run(shape: Shape, device: str, repeats: int) -> list[Row]:
    """Measure every form on fresh random data."""
    forms, plans, gradient_bytes = _forms(shape, device)
    times = interleaved(forms, device, repeats)
    products, two_stage = times["products"].median_ms, times["two-stage"].median_ms
    return [
        Row(
            tokens=shape.tokens,
            hidden=shape.hidden,
            vocab=shape.vocab,
            form=name,
            median_ms=times[name].median_ms,
            quartiles_ms=times[name].quartiles_ms,
            ratio_to_products=times[name].median_ms / products,
            ratio_to_two_stage=times[name].median_ms / two_stage,
            peak_mib=(peak_bytes(form, device) - gradient_bytes) / 2**20,
            predicted_mib=plans[name].workspace_bytes / 2**20 if name in plans else None,
        )
        for name, form in forms.items()
    ]


def _forms(shape: Shape, device: str) -> tuple[dict[str, Call], dict[str, Plan], int]:
    h, w, y = random_head(shape, device)
    z = h @ w.t()
    g = z.float().softmax(1)
    g[torch.arange(shape.tokens, device=device), y] -= 1
    g = g.div_(shape.tokens).to(h.dtype)
    leaves = h.requires_grad_(), w.requires_grad_()

    def products() -> None:
        with torch.no_grad():
            torch.mm(h, w.t(), out=z)
            torch.mm(g, w)
            torch.mm(g.t(), h)

    def two_stage() -> None:
        loss = F.cross_entropy(F.linear(h, w).float(), y)
        torch.autograd.grad(loss, leaves)

    def ours(workspace: str | int | None) -> Call:
        def step() -> None:
            loss = cutefce.linear_cross_entropy(h, w, y, workspace=workspace)
            torch.autograd.grad(loss, leaves)

        return step

    forms: dict[str, Call] = {"products": products, "two-stage": two_stage}
    plans: dict[str, Plan] = {}
    for name, workspace in WORKSPACES.items():
        plan = cutefce.plan(h, w, workspace=workspace)
        if plan not in plans.values():
            forms[f"cutefce {name}"] = ours(workspace)
            plans[f"cutefce {name}"] = plan
    return forms, plans, sum(leaf.numel() * leaf.element_size() for leaf in leaves)
