"""ORPO (arXiv 2403.07691) without logits."""

import torch
from torch import Tensor
from torch.nn import functional as F

import cutefce


def orpo_loss(
    hidden: Tensor, weight: Tensor, labels: Tensor, completions: Tensor, beta: float = 0.1
) -> Tensor:
    """Return the loss () of P pairs: that of the chosen sequences, and the odds ratio.

    Args:
        hidden: (2 P, T, D) of the P chosen sequences, then of the rejected ones.
        weight: (V, D) of the head.
        labels: (2 P, T) the next tokens, those of prompts too; -100 in padding.
        completions: (2 P, T) bool, where labels are those of completions; at least one of each
            sequence.
        beta: factor of the odds ratio.
    """
    log_probs = cutefce.linear_log_probs(hidden, weight, labels).log_probs
    chosen, counted = log_probs.chunk(2)[0], (labels != -100).chunk(2)[0]
    mean = (log_probs * completions).sum(1) / completions.sum(1)
    log_odds = mean - torch.log(-torch.expm1(mean))
    better, worse = log_odds.chunk(2)
    return -chosen.sum() / counted.sum() - beta * F.logsigmoid(better - worse).mean()
