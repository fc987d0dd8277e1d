"""The head of a model, as the benchmarks measure it."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Shape:
    """Sizes and dtype of one head."""

    tokens: int
    hidden: int
    vocab: int
    dtype: str


def random_head(shape: Shape, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return random h (N, D), w (V, D) and y (N,), with logits as an untrained head gives them."""
    dtype = getattr(torch, shape.dtype)
    h = torch.randn(shape.tokens, shape.hidden, device=device, dtype=dtype)
    w = torch.randn(shape.vocab, shape.hidden, device=device, dtype=dtype)
    w.mul_(shape.hidden**-0.5)
    return h, w, torch.randint(shape.vocab, (shape.tokens,), device=device)
