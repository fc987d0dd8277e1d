"""The head of a model and its loss, as the benchmarks measure them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import cutefce

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""h (N, D), w (V, D) and y (N,) → the mean loss, a scalar."""


@dataclass(frozen=True)
class Shape:
    """Sizes and dtype of one head."""

    tokens: int
    hidden: int
    vocab: int
    dtype: str

    @property
    def product_flop(self) -> int:
        """Operations of one of the three products."""
        return 2 * self.tokens * self.hidden * self.vocab


HEADS = {
    Shape(8192, 4096, 128256, "bfloat16"): "Llama 3 8B",
    Shape(8192, 4096, 151936, "bfloat16"): "Qwen 3 8B",
    Shape(8192, 2304, 256000, "bfloat16"): "Gemma 2 2B",
    Shape(8192, 5376, 262144, "bfloat16"): "Gemma 3 27B",
    Shape(8192, 7168, 129280, "bfloat16"): "DeepSeek V3",
    Shape(8192, 2880, 201088, "bfloat16"): "gpt-oss",
    Shape(32768, 4096, 128256, "bfloat16"): "Llama 3 8B",
}
"""Heads of real models, and whose they are."""
NAMES = {(shape.tokens, shape.hidden, shape.vocab): name for shape, name in HEADS.items()}
SMALL = Shape(512, 256, 8192, "float32")
"""What a CPU measures in their place."""


def title(row: dict[str, Any]) -> str:
    """Return sizes of a row of results, and whose head they are."""
    sizes = row["tokens"], row["hidden"], row["vocab"]
    return " × ".join(map(str, sizes)) + (f", {NAMES[sizes]}" if sizes in NAMES else "")


def random_head(shape: Shape, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return random h (N, D), w (V, D) and y (N,), with logits as an untrained head gives them."""
    dtype = getattr(torch, shape.dtype)
    h = torch.randn(shape.tokens, shape.hidden, device=device, dtype=dtype)
    w = torch.randn(shape.vocab, shape.hidden, device=device, dtype=dtype)
    w.mul_(shape.hidden**-0.5)
    return h, w, torch.randint(shape.vocab, (shape.tokens,), device=device)


def two_stage(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
    """Return the loss by way of all logits, rounded to the inputs' dtype, then in float32."""
    return F.cross_entropy(F.linear(h, w).float(), y)


def ours(workspace: str | int | None) -> Loss:
    """Return cutefce's loss within a budget."""

    def loss(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
        return cutefce.linear_cross_entropy(h, w, y, workspace=workspace)

    return loss


def gradients(loss: Loss, h: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Run a forward and a backward: return the loss, dX (N, D) and dW (V, D)."""
    h, w = h.detach().requires_grad_(), w.detach().requires_grad_()
    value = loss(h, w, y)
    dx, dw = torch.autograd.grad(value, (h, w))
    return value.detach(), dx, dw


def logits_gradient(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
    """Return the gradient (N, V) of the mean loss by the logits, in h's dtype."""
    g = (h @ w.t()).float().softmax(1)
    g[torch.arange(len(y), device=y.device), y] -= 1
    return g.div_(len(y)).to(h.dtype)
