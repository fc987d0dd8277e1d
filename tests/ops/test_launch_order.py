"""What the host launches for a step, and in which order, on models of the kernels."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import cutefce
from cutefce.cute_kernels.config import PortableTiles
from cutefce.cute_kernels.spec.kernel import KernelSpec
from tests.support.backends import KERNELS
from tests.support.kernel_models import model_of

Noted = list[KernelSpec]
"""What was launched."""


@pytest.mark.parametrize("name", ["kernels of sm_90a", "kernels of sm_90a, all rows"])
@pytest.mark.parametrize("workspace", ["min", 40 << 10, "max"])
def test_every_step_launches_the_kernels_of_the_first(
    workspace: int | str, name: str, small_tiles: PortableTiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its order, so that a CUDA graph may be captured after one eager step."""
    noted: Noted = []

    def recorded(kernel: KernelSpec) -> Callable[..., None]:
        def launch(*arguments: Any) -> None:
            noted.append(kernel)
            model_of(kernel)(*arguments)

        return launch

    KERNELS[name].serve(monkeypatch, small_tiles, replacement=recorded)
    h, w = (torch.randn(rows, 64).bfloat16().requires_grad_() for rows in (150, 333))
    given = h, w, torch.randint(333, (150,))

    def loss(*given: Tensor) -> Tensor:
        found: Tensor = cutefce.linear_cross_entropy(*given, workspace=workspace)
        return found

    def launches(function: Callable[..., Tensor]) -> tuple[Noted, Noted]:
        noted.clear()
        found = function(*given)
        forward = [*noted]
        found.backward()
        return forward, noted[len(forward) :]

    (forward, backward), *others = [launches(loss) for _ in range(4)]
    assert forward and backward and others == [(forward, backward)] * 3
    checkpointed = functools.partial(checkpoint, loss, use_reentrant=False)
    assert launches(checkpointed) == (forward, forward + backward)
    torch.compiler.reset()
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    assert launches(compiled) == launches(compiled) == (forward, backward)
