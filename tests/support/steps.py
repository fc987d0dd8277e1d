"""Small training steps on the kernels, and their results."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import cutefce
from tests.support.reference import are_same, random_case
from tests.support.stand_in_gpu import forget

SIZES = TOKENS, HIDDEN, VOCAB = 40, 32, 3000
"""Small, and yet of more than one window."""
SOME = 96 << 10
"""A workspace in which some exponentials are stored and others computed again, on every device."""
WORKSPACES = "min", SOME, "max"
ROWS = {"all rows": False, "selected rows": True}

Results = tuple[Tensor, ...]


def operands(
    device: str, dtype: torch.dtype = torch.bfloat16, ignored: float = 0.3
) -> tuple[Tensor, Tensor, Tensor]:
    """Return h and w, which require gradients, and targets."""
    case = random_case(*SIZES, dtype=dtype, device=device, ignored=ignored)
    return case.h.requires_grad_(), case.w.requires_grad_(), case.y


def gradients(loss: Tensor, *inputs: Tensor, **more: Any) -> Results:
    """Return those of the inputs that require one; every token has another upstream gradient."""
    upstream = torch.linspace(-1, 2, loss.numel(), device=loss.device).view(loss.shape)
    wanted = [x for x in inputs if x.requires_grad]
    return torch.autograd.grad(loss, wanted, upstream, **more)


def step(input: Tensor, linear_weight: Tensor, target: Tensor | None, **options: Any) -> Results:
    """Return the loss and the gradients of all that requires some."""
    loss = cutefce.linear_cross_entropy(input, linear_weight, target, **options)
    leaves = [x for x in (input, linear_weight, *options.values()) if isinstance(x, Tensor)]
    if not loss.requires_grad:
        return (loss,)
    return loss.detach(), *gradients(loss, *leaves)


def alone(call: Callable[[], Results]) -> Results:
    """Return the results of a call in a process that has computed nothing before."""
    forget()
    return call()


def have_same_bits(*results: Results) -> bool:
    """Whether these results of equal calls are the same."""
    first, *others = results
    return all(len(first) == len(other) and all(map(are_same, first, other)) for other in others)
