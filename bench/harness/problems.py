"""Problems to measure: sizes of LM heads, random inputs, and losses with their gradients."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import cutefce
from bench.harness.reference import IGNORED, Gradients

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Maps h (N, D), w (V, D) and y (N,) to the mean loss ()."""


@dataclass(frozen=True)
class Shape:
    """Sizes and dtype of one problem: N tokens, D hidden, V vocab."""

    tokens: int
    hidden: int
    vocab: int
    dtype: str

    @property
    def gemm_flop(self) -> int:
        """Floating-point operations of one of the three GEMMs."""
        return 2 * self.tokens * self.hidden * self.vocab


MODEL_NAMES = {
    (4096, 128256): "Llama 3 8B",
    (4096, 151936): "Qwen 3 8B",
    (2304, 256000): "Gemma 2 2B",
    (5376, 262144): "Gemma 3 27B",
    (7168, 129280): "DeepSeek V3",
    (2880, 201088): "gpt-oss",
}
"""Published models by hidden size and vocabulary of their head."""
CPU_SHAPE = Shape(512, 256, 8192, "float32")
"""Measured on a CPU instead of the models' heads."""


def sizes_of(shape: Shape) -> dict[str, int]:
    """Return the columns of results that have the sizes."""
    return {"tokens": shape.tokens, "hidden": shape.hidden, "vocab": shape.vocab}


def title(row: dict[str, Any]) -> str:
    """Return the sizes of a row of results, the model that has them, and what else varies."""
    sizes = row["tokens"], row["hidden"], row["vocab"]
    name = f", {MODEL_NAMES[sizes[1:]]}" if sizes[1:] in MODEL_NAMES else ""
    if "frozen" in row:
        name += f", frozen {row['frozen']}"
    if "ignored_percent" in row:
        name += f", {row['ignored_percent']}% of the targets ignored"
    return " × ".join(map(str, sizes)) + name


def random_inputs(
    shape: Shape, device: str, logit_std: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Return random h (N, D), w (V, D) and y (N,) whose logits have the given deviation."""
    dtype = getattr(torch, shape.dtype)
    h = torch.randn(shape.tokens, shape.hidden, device=device, dtype=dtype)
    w = torch.randn(shape.vocab, shape.hidden, device=device, dtype=dtype)
    w.mul_(logit_std * shape.hidden**-0.5)
    return h, w, torch.randint(shape.vocab, (shape.tokens,), device=device)


def cutefce_loss(**options: Any) -> Loss:
    """Return cutefce's loss with these arguments."""
    loss: Loss = functools.partial(cutefce.linear_cross_entropy, **options)
    return loss


def gradients(loss: Loss, h: Tensor, w: Tensor, y: Tensor) -> Gradients:
    """Run a forward and a backward: return the loss (), dX (N, D) and dW (V, D)."""
    h, w = h.detach().requires_grad_(), w.detach().requires_grad_()
    value = loss(h, w, y)
    dx, dw = torch.autograd.grad(value, (h, w))
    return value.detach(), dx, dw


def hidden_gradient(loss: Loss, h: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Run a forward and a backward with a frozen weight: return the loss () and dX (N, D)."""
    h, w = h.detach().requires_grad_(), w.detach()
    value = loss(h, w, y)
    (dx,) = torch.autograd.grad(value, (h,))
    return value.detach(), dx


def ignore_some(y: Tensor, percent: int) -> Tensor:
    """Return y (N,) with this percentage of its targets ignored, chosen at random."""
    ignored = torch.randperm(len(y), device=y.device)[: len(y) * percent // 100]
    return y.index_fill(0, ignored, IGNORED)


def logits_gradient(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
    """Return the gradient (N, V) of the mean loss with respect to the logits, in h's dtype."""
    g = (h @ w.t()).float().softmax(1)
    g[torch.arange(len(y), device=y.device), y] -= 1
    return g.div_(len(y)).to(h.dtype)


def plain_gemms(h: Tensor, w: Tensor, y: Tensor) -> Callable[[], None]:
    """Return the three GEMMs that every exact method computes, on the actual operands.

    Operands matter: a GPU's power draw, and with it the clock, depends on the numbers.
    """
    g = logits_gradient(h, w, y)

    def gemms() -> None:
        torch.mm(h, w.t())
        torch.mm(g, w)
        torch.mm(g.t(), h)

    return gemms
