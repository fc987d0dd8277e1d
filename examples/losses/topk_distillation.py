"""Divergences from a teacher's top k of each token, without logits: as of NeMo-RL and verl."""

from typing import Any

import torch
from torch import Tensor

import cutefce


def topk_divergence(
    hidden: Tensor,
    weight: Tensor,
    indices: Tensor,
    teacher: Tensor,
    kind: str = "mixed",
    rest: str = "dropped",
    share: float = 0.5,
) -> Tensor:
    """Return the divergence (...) of each token.

    `hidden` is (..., D), `weight` (V, D); `indices` (..., K) are the teacher's classes, -100 for
    none, `teacher` (..., K) its log-probabilities.  `kind` is "forward", "reverse", or "mixed":
    `share` of the forward KL.  What is beyond the K classes is "dropped"; "normalized" away, each
    side adding up to 1; or "corrected": to the teacher, log p is -100 there.
    """
    shares = {"forward": 1.0, "reverse": 0.0, "mixed": share}
    if kind not in shares or rest not in ("dropped", "normalized", "corrected"):
        raise ValueError(f"kind, rest: got {kind!r}, {rest!r}, expected those of the docstring")
    outputs: Any = ("entropy",) if rest == "corrected" and kind != "forward" else ()
    found: Any = cutefce.linear_log_probs(hidden, weight, target_indices=indices, outputs=outputs)
    student, teacher = (x.masked_fill(indices == -100, -1e4) for x in (found.log_probs, teacher))
    if rest == "normalized":
        student, teacher = student.log_softmax(-1), teacher.log_softmax(-1)
    p, q = student.exp(), teacher.exp()
    forward, reverse = (q * (teacher - student)).sum(-1), (p * (student - teacher)).sum(-1)
    if outputs:  # Σ p (log p + 100) over the other classes
        reverse = reverse - found.entropy - (p * student).sum(-1) + 100 * (1 - p.sum(-1))
    return torch.lerp(reverse, forward, shares[kind])
