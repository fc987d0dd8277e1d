"""Plans of tensors on `meta`: those of a GPU, on every machine."""

from typing import Any

import pytest
import torch
from torch import Tensor

import cutefce

TOKENS, HIDDEN, VOCAB = 8192, 4096, 128256


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = True) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=grad)


LEAST = {torch.bfloat16: 100 << 20, torch.float16: 150 << 20, torch.float32: 400 << 20}
"""Bytes that the smallest plan of a GPU takes at most; a CPU's takes several times as much, in
16 bits, and minutes."""


@pytest.mark.parametrize("dtype", LEAST, ids=str)
def test_plans_are_those_of_a_hopper_gpu(dtype: torch.dtype) -> None:
    w, plans = empty(VOCAB, HIDDEN, dtype=dtype), []
    for workspace in ("min", 1 << 30, None, "max"):
        plan, other = (
            cutefce.plan(empty(*shape, dtype=dtype), w, workspace=workspace)
            for shape in ((TOKENS, HIDDEN), (8, TOKENS // 8, HIDDEN))
        )
        assert plan == other and plan.seconds < 0.1
        plans.append(plan)
    assert plans[0].workspace_bytes <= LEAST[dtype] and plans[1].workspace_bytes <= 1 << 30
    seconds = [plan.seconds for plan in plans]
    assert seconds == sorted(seconds, reverse=True)


FROZEN: dict[str, Any] = {"grad": False}
OPTIONS: dict[str, dict[str, Any]] = {
    "each token's": {"reduction": "none"},
    "sampled": {"gradient": "sampled"},
    "probabilities": {"target": empty(TOKENS, VOCAB, **FROZEN)},
    "soft targets": {
        "target_indices": empty(TOKENS, 8, dtype=torch.long, **FROZEN),
        "target_probs": empty(TOKENS, 8, **FROZEN),
    },
    "a buffer": {
        "accumulate_into": empty(VOCAB, HIDDEN, dtype=torch.float32, **FROZEN),
        "grad_output": 1.0,
    },
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_are_planned(name: str) -> None:
    h, w, options = empty(TOKENS, HIDDEN), empty(VOCAB, HIDDEN), OPTIONS[name]
    plan = cutefce.plan(h, w, workspace=600 << 20, **options)
    assert 0 < plan.workspace_bytes <= 600 << 20 and plan.seconds < 0.1
    with torch.no_grad():
        assert cutefce.plan(h, w).workspace_bytes < 100 << 20


@pytest.mark.parametrize("divergence", ["forward_kl", "jsd"])
def test_plans_of_divergences_are_those_of_a_gpu(divergence: str) -> None:
    h, w = empty(8, TOKENS // 8, HIDDEN), empty(VOCAB, HIDDEN)
    heads = h, w, h.detach(), w.detach()
    form: dict[str, Any] = {"temperature": (0.9, 1.1), "divergence": divergence}
    plan = cutefce.plan_divergence(*heads, **form, workspace=1 << 30)
    assert 0 < plan.workspace_bytes <= 1 << 30 and plan.seconds < 0.2


def test_calls_on_meta_have_shapes_alone() -> None:
    h, w = empty(6, 16), empty(40, 16)
    loss = cutefce.linear_cross_entropy(h, w, empty(6, dtype=torch.long, grad=False))
    divergence = cutefce.linear_divergence(h, w, h, w, reduction="none")
    (loss + divergence.sum()).backward()
    assert loss.is_meta and divergence.shape == (6,)
    assert h.grad is not None and h.grad.is_meta and h.grad.shape == h.shape
