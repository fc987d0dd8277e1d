"""Train a draft model whose head has a part of the teacher's classes, for speculative decoding.

    python -m examples.draft_vocabulary

A teacher accepts a token that the draft proposes with probability Σ min(p, q), the overlap of both
distributions, which total variation trains.  speculators and SpecForge compare with the teacher's
probabilities over the classes of the draft alone, where the teacher's likeliest class is one of
them.  The teacher accepts by its probabilities over all classes: these are compared with a draft's
that are 0 for the classes it lacks.
"""

from typing import Any

import torch
from torch import Tensor, nn

import cutefce
from examples.training import fit

VOCAB, CLASSES, SIZE, TEACHER_SIZE, TOKENS, BATCH, STEPS = 400, 120, 32, 48, 64, 512, 60


def draft_loss(
    hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor, classes: Tensor
) -> Tensor:
    """Return the mean total variation () over the draft's classes.

    Args:
        hidden: (..., D) hidden states of the draft.
        weight: (C, D) of its head.
        teacher_hidden: (..., D_t) hidden states of the teacher, without gradient.
        teacher_weight: (V, D_t) of its head, without gradient.
        classes: (C,) the teacher's classes that the draft has.
    """
    found: Any = cutefce.linear_log_probs(teacher_hidden, teacher_weight, outputs=("argmax",))
    counts = torch.isin(found.argmax, classes)
    return cutefce.linear_divergence(
        hidden, weight, teacher_hidden, teacher_weight[classes], counts, divergence="tv"
    )


def acceptance_rates(
    hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor, classes: Tensor
) -> Tensor:
    """Return (...) how often the teacher accepts what the draft proposes; has gradients.

    The arguments are those of `draft_loss`.  The draft's weight is copied among rows of 0, (V, D):
    memory of that copy and its gradient, and the time of products with all V classes.
    """
    every = weight.new_zeros(len(teacher_weight), weight.shape[1]).index_copy(0, classes, weight)
    bias = weight.new_full((len(every),), -torch.inf).index_fill(0, classes, 0)
    return 1 - cutefce.linear_divergence(
        hidden,
        every,
        teacher_hidden,
        teacher_weight,
        divergence="tv",
        student_bias=bias,
        reduction="none",
    )


def train(is_exact: bool) -> list[float]:
    """Train an embedding and a head of the most frequent classes, and return the losses.

    Args:
        is_exact: whether the loss is that of acceptance rates, not `draft_loss`.
    """
    torch.manual_seed(0)
    teacher_weight = torch.randn(VOCAB, TEACHER_SIZE) / 4
    states = torch.randn(TOKENS, TEACHER_SIZE)
    classes = (states @ teacher_weight.t()).softmax(-1).sum(0).topk(CLASSES).indices
    embedding, head = nn.Embedding(TOKENS, SIZE), nn.Linear(SIZE, CLASSES, bias=False)

    def operands(tokens: Tensor) -> tuple[Tensor, ...]:
        return embedding(tokens), head.weight, states[tokens], teacher_weight, classes

    def loss() -> Tensor:
        given = operands(torch.randint(TOKENS, (BATCH,)))
        return 1 - acceptance_rates(*given).mean() if is_exact else draft_loss(*given)

    losses = fit([embedding.weight, head.weight], loss, STEPS)
    rates = acceptance_rates(*operands(torch.arange(TOKENS)))
    print(f"{'exact' if is_exact else 'usual'} loss: acceptance rate {rates.mean().item():.3f}")
    return losses


def main() -> None:
    """Train with each loss."""
    for is_exact in (False, True):
        train(is_exact)


if __name__ == "__main__":
    main()
