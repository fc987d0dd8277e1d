"""Plans of tensors on `meta`: those of a GPU, on every machine."""

from typing import Any

import pytest
import torch
from torch import Tensor

import cutefce
from cutefce.cute_kernels.problem import Problem
from cutefce.ops.divergence.plan import make_plan
from cutefce.ops.divergence.problem import DivergenceProblem
from cutefce.ops.dtypes import dtype_name
from cutefce.ops.interface import checks
from cutefce.ops.interface.arguments import DIVERGENCES
from cutefce.ops.program.plan import plan as make_loss_plan
from cutefce.ops.program.problem import LossProblem

TOKENS, HIDDEN, VOCAB = 8192, 4096, 128256


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = True) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=grad)


@pytest.mark.parametrize("workspace", ["min", 1 << 30, None, "max"])
@pytest.mark.parametrize(
    ("dtype", "arch"),
    [(torch.bfloat16, "sm_90a"), (torch.float16, "sm_90a"), (torch.float32, None)],
    ids=str,
)
def test_a_plan_is_that_of_a_hopper_gpu(
    dtype: torch.dtype, arch: str | None, workspace: Any
) -> None:
    sizes = TOKENS, HIDDEN, VOCAB, dtype_name(dtype), "cuda"
    stores, selects = dtype != torch.float16, arch is not None
    problem = LossProblem(*sizes, arch=arch, stores=stores, selects=selects)
    want = make_loss_plan(problem, checks.workspace_bytes(workspace))
    w = empty(VOCAB, HIDDEN, dtype=dtype)
    for shape in ((TOKENS, HIDDEN), (8, TOKENS // 8, HIDDEN)):
        assert cutefce.plan(empty(*shape, dtype=dtype), w, workspace=workspace) == want


FROZEN: dict[str, Any] = {"grad": False}
OPTIONS: dict[str, dict[str, Any]] = {
    "each token's": {"reduction": "none"},
    "sampled": {"gradient": "sampled"},
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
    assert (plan.strategy == "sampled") == (name == "sampled")
    with torch.no_grad():
        assert cutefce.plan(h, w).workspace_bytes < 100 << 20


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_a_plan_of_a_divergence_is_that_of_a_gpu(divergence: str) -> None:
    sizes = TOKENS, HIDDEN, VOCAB, "bfloat16", "cuda"
    sides = Problem(*sizes), Problem(*sizes, False, False)
    want = make_plan(DivergenceProblem(*sides, TOKENS, divergence=divergence), 1 << 30)
    h, w = empty(8, TOKENS // 8, HIDDEN), empty(VOCAB, HIDDEN)
    form: dict[str, Any] = {"temperature": (0.9, 1.1), "workspace": 1 << 30}
    form |= {"divergence": divergence}
    heads = h, w, h.detach(), w.detach()
    assert cutefce.plan_divergence(*heads, **form) == want
    with pytest.raises(ValueError, match="target: got one on meta"):
        cutefce.plan_divergence(*heads, empty(8, TOKENS // 8, dtype=torch.long, grad=False))


def test_calls_on_meta_have_shapes_alone() -> None:
    h, w = empty(6, 16), empty(40, 16)
    loss = cutefce.linear_cross_entropy(h, w, empty(6, dtype=torch.long, grad=False))
    divergence = cutefce.linear_divergence(h, w, h, w, reduction="none")
    (loss + divergence.sum()).backward()
    assert loss.is_meta and divergence.shape == (6,)
    assert h.grad is not None and h.grad.is_meta and h.grad.shape == h.shape
