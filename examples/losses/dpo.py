"""DPO (arXiv 2305.18290) without logits."""

from torch import Tensor
from torch.nn import functional as F

import cutefce


def dpo_loss(
    hidden: Tensor, weight: Tensor, labels: Tensor, reference: Tensor, beta: float = 0.1
) -> Tensor:
    """Return the mean loss () of P pairs.

    Args:
        hidden: (2 P, T, D) of the P chosen sequences, then of the rejected ones.
        weight: (V, D) of the head.
        labels: (2 P, T) the next tokens; -100 in prompts and padding.
        reference: (2 P,) log-probabilities of the completions by the reference model.
        beta: factor of the rewards.
    """
    log_probs = cutefce.linear_log_probs(hidden, weight, labels).log_probs.sum(1)
    chosen, rejected = (log_probs - reference).chunk(2)
    return -F.logsigmoid(beta * (chosen - rejected)).mean()
