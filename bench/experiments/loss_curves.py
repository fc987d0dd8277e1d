"""The demo's transformer trained with every strategy, against two seeds of the two-stage form.

Each strategy starts as the first seed does and sees the same batches.  In bfloat16 on a GPU.
"""

import dataclasses
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import cutefce
from examples.corpus import load_corpus
from examples.training import (
    CPU,
    GPU,
    Batch,
    Loss,
    Sizes,
    Training,
    Transformer,
    logits_loss,
    sample_batches,
)

SEEDS = (0, 1)
CALLS = (("max", "mean"), ("min", "mean"), ("min", "none"))
"""Workspace and reduction: at the GPU's sizes they keep all exponentials, form gradients in the
forward, and compute all exponentials again."""


@dataclass(frozen=True)
class Row:
    """One training."""

    form: str
    plan: str
    seed: int
    largest_difference: float
    """From the first seed of the two-stage form, at any step, in nats."""
    losses: list[float]
    """Of each step, in nats a token."""


def run(steps: int | None) -> list[Row]:
    """Train every form for `steps`, or for as many as the demo takes."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sizes = dataclasses.replace(GPU, batch=4) if device.type == "cuda" else CPU
    sizes = dataclasses.replace(sizes, steps=steps or sizes.steps)
    with tempfile.TemporaryDirectory() as folder:
        corpus = load_corpus(Path(folder) / "tokenizer.json")
    batches = list(sample_batches(corpus.train, sizes, sizes.steps, device))
    forms: list[tuple[str, str, int, Loss]] = [("two-stage", "", s, logits_loss) for s in SEEDS]
    for workspace, reduction in CALLS:
        plan = _plan(workspace, reduction, sizes, corpus.vocab)
        forms.append((f"cutefce {workspace}, {reduction}", plan, 0, _ours(workspace, reduction)))
    rows: list[Row] = []
    for form, plan, seed, loss in forms:
        losses = _train(form, loss, seed, sizes, corpus.vocab, batches)
        pairs = zip(losses, rows[0].losses if rows else losses, strict=True)
        rows.append(Row(form, plan, seed, max(abs(a - b) for a, b in pairs), losses))
    return rows


def _train(
    form: str, loss: Loss, seed: int, sizes: Sizes, vocab: int, batches: list[Batch]
) -> list[float]:
    torch.manual_seed(seed)
    model = Transformer(vocab, sizes).to(batches[0][0].device)
    training = Training(form, loss, model, sizes)
    for batch in batches:
        training.step(batch)
    return training.losses


def _ours(workspace: str, reduction: str) -> Loss:
    def loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        losses = cutefce.linear_cross_entropy(
            hidden, weight, target, reduction=reduction, workspace=workspace
        )
        return losses.mean()

    return loss


def _plan(workspace: str, reduction: str, sizes: Sizes, vocab: int) -> str:
    cuda = torch.cuda.is_available()
    dtype, device = (torch.bfloat16, "cuda") if cuda else (torch.float32, "cpu")
    h = torch.empty(sizes.batch * sizes.context, sizes.hidden, dtype=dtype, device=device)
    w = torch.empty(vocab, sizes.hidden, dtype=dtype, device=device)
    leaves = h.requires_grad_(), w.requires_grad_()
    return str(cutefce.plan(*leaves, reduction=reduction, workspace=workspace))
