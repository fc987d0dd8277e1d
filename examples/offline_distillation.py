"""Distil from stored log-probabilities of a teacher's top k, as Megatron's offline distillation.

    python -m examples.offline_distillation

The teacher runs once, and what is stored of each token are k classes and their log-probabilities.
The loss is (1 - alpha) times the cross entropy of the labels plus alpha times the forward KL over
the stored classes.  Both are cross entropies against fixed probabilities, so they are one call with
k + 1 soft targets.  Megatron-LM (`megatron/training/distillation`) adds one class for all others,
whose logarithm of a sum is no cross entropy of soft targets: that takes the log-probabilities.
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import cutefce
from examples.training import fit

VOCAB, SIZE, K, TOKENS, BATCH, STEPS = 200, 32, 16, 4096, 512, 60


def offline_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    stored: tuple[Tensor, Tensor],
    alpha: float = 0.5,
    has_rest: bool = False,
    **sharding: Any,
) -> Tensor:
    """Return the mean loss () of the tokens.

    Args:
        hidden: (..., D) hidden states of the student.
        weight: (V, D) of its head.
        labels: (...) the next tokens.
        stored: (..., k) the teacher's log-probabilities, and their classes; k is at most 255.
            Padding is -1000, and -1.
        alpha: share of the KL.
        has_rest: whether all other classes count as one, as in Megatron-LM.
        **sharding: `group` and what belongs to it, of tensor parallelism.
    """
    teacher, indices = stored[0].float(), stored[1].long()
    classes = torch.cat([indices, labels[..., None]], -1)
    q = teacher.exp()
    if not has_rest:
        probs = torch.cat([alpha * q, torch.full_like(q[..., :1], 1 - alpha)], -1)
        given: dict[str, Any] = {"target_indices": classes, "target_probs": probs}
        loss: Tensor = cutefce.linear_cross_entropy(hidden, weight, **given, **sharding)
        return loss + alpha * (q * teacher).sum(-1).mean()
    found = cutefce.linear_log_probs(
        hidden, weight, target_indices=classes, ignore_index=-1, **sharding
    )
    student, own = found.log_probs[..., :-1], found.log_probs[..., -1]
    rest = [1 - (x.exp() * (indices >= 0)).sum(-1) for x in (teacher, student)]
    r, s = (x.clamp(min=1e-8) for x in rest)
    kl = (q * (teacher - student)).sum(-1) + r * (r / s).log()
    return (alpha * kl - (1 - alpha) * own).mean()


def store(path: Path) -> None:
    """Write tokens, their next ones, and a teacher's top k, whose logits depend on the token."""
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(VOCAB, VOCAB, generator=generator)
    tokens = torch.randint(VOCAB, (TOKENS,), generator=generator)
    labels = logits.softmax(-1)[tokens].multinomial(1, generator=generator)[:, 0]
    top = logits.log_softmax(-1)[tokens].topk(K)
    torch.save((tokens, labels, top.values.half(), top.indices.short()), path)


def train(path: Path, steps: int = STEPS, has_rest: bool = False) -> list[float]:
    """Train an embedding and a head from what is stored, and return the losses."""
    tokens, labels, values, indices = torch.load(path)
    torch.manual_seed(0)
    embedding, head = nn.Embedding(VOCAB, SIZE), nn.Linear(SIZE, VOCAB, bias=False)

    def loss() -> Tensor:
        batch = torch.randint(TOKENS, (BATCH,))
        stored = values[batch], indices[batch]
        hidden = embedding(tokens[batch])
        return offline_loss(hidden, head.weight, labels[batch], stored, has_rest=has_rest)

    return fit([embedding.weight, head.weight], loss, steps)


def main() -> None:
    """Store a teacher's top k, then train without the teacher."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "teacher.pt"
        store(path)
        train(path)


if __name__ == "__main__":
    main()
