"""Megatron's protocol of gradient accumulation: dW is added to `weight.main_grad`.

The backward then sets `weight.grad_added_to_main_grad`, where the weight has it, and gives autograd
a gradient that nobody reads, so that the hooks of data parallelism run.
"""

from typing import Any

import torch
from torch import Tensor


def with_main_grad(weight: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the weight (V, D) of a call, and what its `accumulate_into` is.

    That is None without gradients, else `weight.main_grad` (V, D).

    Raises:
        AttributeError: if the weight has no `main_grad`.
    """
    if not (torch.is_grad_enabled() and weight.requires_grad):
        return weight, None
    buffer = getattr(weight, "main_grad", None)
    if not isinstance(buffer, Tensor):
        raise AttributeError(
            f"main_grad: got {buffer!r} of the output layer's weight, expected a tensor, as "
            "Megatron's DistributedDataParallel makes it"
        )
    used: Tensor = _Accumulated.apply(weight)  # type: ignore[no-untyped-call]
    return used, buffer


class _Accumulated(torch.autograd.Function):
    """The weight itself, whose gradient is in `main_grad` when its backward runs."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        """Return a view of the weight."""
        ctx.weight = weight
        ctx.set_materialize_grads(False)
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> Tensor | None:
        """Return a gradient that is not read; zeros where Megatron adds others to it."""
        weight: Any = ctx.weight
        if not hasattr(weight, "grad_added_to_main_grad"):
            return None
        weight.grad_added_to_main_grad = True
        if getattr(weight, "zero_out_wgrad", False):
            return torch.zeros_like(weight)
        return torch.empty_like(weight)
