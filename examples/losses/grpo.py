"""GRPO (arXiv 2402.03300) without logits, its KL penalty times the ratio (arXiv 2512.02556)."""

from typing import Any

from torch import Tensor

import cutefce


def grpo_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    advantages: Tensor,
    old: Tensor,
    reference: Tensor,
    *,
    epsilon: float = 0.2,
    beta: float = 0.04,
    entropy_coef: float = 0.0,
    temperature: float = 1.0,
) -> Tensor:
    """Return the mean loss () of B completions.

    `hidden` is (B, T, D), `weight` (V, D); `labels` (B, T) are the sampled tokens, -100 in padding;
    `advantages` (B,); `old` and `reference` (B, T) are log-probabilities by the model that sampled
    and by the reference model.  The parameters are those of the formula.
    """
    more: Any = {"outputs": ("entropy",), "temperature": temperature}
    found: Any = cutefce.linear_log_probs(hidden, weight, labels, **more)
    mask, advantages = labels != -100, advantages[:, None]
    ratio, far = (found.log_probs - old).exp(), reference - found.log_probs
    gain = (ratio * advantages).minimum(ratio.clamp(1 - epsilon, 1 + epsilon) * advantages)
    losses = (beta * ratio * (far.exp() - far - 1) - gain).masked_fill(~mask, 0)
    bonus = entropy_coef * found.entropy.sum() / mask.sum().clamp(min=1)  # 0 in padding
    mean: Tensor = (losses.sum(1) / mask.sum(1).clamp(min=1)).mean() - bonus
    return mean
