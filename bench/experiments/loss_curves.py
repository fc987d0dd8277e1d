"""Loss curves of the demo's transformer with every strategy, against two seeds of the unfused loss.

Each strategy starts from the parameters of the first seed and sees the same batches; in bfloat16 on
a GPU.
"""

import dataclasses
import tempfile
from dataclasses import dataclass
from pathlib import Path

import click
import torch
from torch import Tensor

import cutefce
from bench.harness.cli import Output
from bench.harness.records import Measurement
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
"""Workspace and reduction.  On a GPU these store all exponentials, compute gradients in the
forward, and recompute all exponentials."""


@dataclass(frozen=True)
class Row:
    """One training."""

    implementation: str
    plan: str
    seed: int
    largest_difference: float
    """From the first seed of the unfused loss, over all steps, in nats."""
    losses: list[float]
    """Of each step, in nats per token."""


@click.command("loss-curves")
@click.option("--steps", type=int, help="Steps per training; the demo's number if not given.")
@click.pass_obj
def command(output: Output, /, steps: int | None) -> None:
    """Loss curves of the demo's training with every strategy."""
    output.record("loss_curves", [Measurement({}, lambda: run(steps))])


def run(steps: int | None) -> list[Row]:
    """Train with every implementation for `steps`, or for as many as the demo takes."""
    from examples.corpus import load_corpus  # needs tokenizers, a dependency of the demo alone

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sizes = dataclasses.replace(GPU, batch=4) if device.type == "cuda" else CPU
    sizes = dataclasses.replace(sizes, steps=steps or sizes.steps)
    with tempfile.TemporaryDirectory() as folder:
        corpus = load_corpus(Path(folder) / "tokenizer.json")
    batches = list(sample_batches(corpus.train, sizes, sizes.steps, device))
    trainings: list[tuple[str, str, int, Loss]] = [("unfused", "", s, logits_loss) for s in SEEDS]
    for workspace, reduction in CALLS:
        plan = _plan(workspace, reduction, sizes, corpus.vocab)
        name, loss = f"cutefce {workspace}, {reduction}", _cutefce_loss(workspace, reduction)
        trainings.append((name, plan, 0, loss))
    rows: list[Row] = []
    for name, plan, seed, loss in trainings:
        losses = _train(loss, seed, sizes, corpus.vocab, batches)
        pairs = zip(losses, rows[0].losses if rows else losses, strict=True)
        rows.append(Row(name, plan, seed, max(abs(a - b) for a, b in pairs), losses))
    return rows


def _train(loss: Loss, seed: int, sizes: Sizes, vocab: int, batches: list[Batch]) -> list[float]:
    """Return the loss of each step of one training."""
    torch.manual_seed(seed)
    model = Transformer(vocab, sizes).to(batches[0][0].device)
    training = Training("", loss, model, sizes)
    for batch in batches:
        training.step(batch)
    return training.losses


def _cutefce_loss(workspace: str, reduction: str) -> Loss:
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
