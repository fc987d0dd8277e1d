"""Loss curves of the demo's transformer with exact and with sampled gradients, over seeds.

A seed decides the initial parameters, the batches and the draws: trainings of one seed differ in
their gradients alone.  The corpus is Python: the demo's, and the
sources of torch and, where it is installed, transformers; one of 20 files is held out.
"""

import dataclasses
import functools
import importlib.util
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import click
import torch

import cutefce
from bench.harness.cli import DEVICE, Output
from bench.harness.problems import cutefce_loss
from bench.harness.records import Measurement
from examples import training
from examples.training import CPU, VALIDATION_BATCHES, Sizes, Training, Transformer

GRADIENTS: dict[str, dict[str, Any]] = {
    "exact": {},
    "sampled 256": {"gradient": "sampled", "samples": 256},
    "sampled 64": {"gradient": "sampled", "samples": 64},
}
"""Arguments of the loss by name."""
SEEDS = 0, 1
GPU = Sizes(hidden=512, layers=4, heads=8, context=1024, batch=32, steps=300, learning_rate=6e-4)
"""13 M parameters beside the head, and 32768 tokens a step."""
SOURCES = "torch", "transformers"
"""Packages whose sources are added to the demo's corpus."""
VALIDATIONS = 20
"""Validations of a training, at equal distances."""
DIGITS = 5
"""Decimals of the recorded losses."""


@dataclass(frozen=True)
class Row:
    """One training; losses in nats per token."""

    plan: str
    parameters: int
    hidden: int
    vocab: int
    batch_tokens: int
    """Tokens per step."""
    corpus_tokens: int
    """Tokens of the corpus that training draws from."""
    seconds: float
    final_loss: float
    """Validation loss at the end."""
    validation_steps: list[int]
    validation_losses: list[float]
    losses: list[float]
    """Training loss of each step."""


@dataclass(frozen=True)
class Summary:
    """Final validation losses of the trainings with one kind of gradient, in nats per token."""

    gradient: str
    seeds: int
    mean: float
    std: float
    """Standard deviation over seeds; 0 of one seed."""
    mean_difference: float
    """Mean minus that of the exact gradients, over the seeds that both have."""
    largest_difference: float
    """Largest absolute difference from the exact training of the same seed."""


@click.command("sampled-curves")
@click.option("--seed", "seeds", type=int, multiple=True, help="Some of the seeds alone.")
@click.option("--steps", type=click.IntRange(min=1), help="Steps per training.")
@click.pass_obj
def command(output: Output, /, seeds: tuple[int, ...], steps: int | None) -> None:
    """Loss curves of trainings with exact and with sampled gradients, over seeds."""
    sizes = GPU if DEVICE == "cuda" else CPU
    sizes = dataclasses.replace(sizes, steps=steps or sizes.steps)
    output.require_kernels()
    measurements = [
        Measurement({"gradient": name, "seed": seed}, functools.partial(run, name, seed, sizes))
        for seed, name in product(seeds or SEEDS, GRADIENTS)
    ]
    output.record("sampled_curves", measurements, steps=sizes.steps)


def run(name: str, seed: int, sizes: Sizes) -> list[Row]:
    """Train a model with one kind of gradient, from one seed."""
    corpus, device = load(), torch.device(DEVICE)
    torch.manual_seed(seed)
    model = Transformer(corpus.vocab, sizes).to(device)
    if device.type == "cuda":
        model.compile()  # halves the time of a training; the loss is called as everywhere
    trained = Training(name, cutefce_loss(**GRADIENTS[name]), model, sizes)
    validation = list(training.sample_batches(corpus.validation, sizes, VALIDATION_BATCHES, device))
    begin, steps, losses = time.perf_counter(), [], []
    batches = training.sample_batches(corpus.train, sizes, sizes.steps, device, seed)
    for step, batch in enumerate(batches, 1):
        trained.step(batch)
        if step % max(1, sizes.steps // VALIDATIONS) == 0 or step == sizes.steps:
            with torch.no_grad():
                each = [trained.evaluate(batch) for batch in validation]
            steps.append(step)
            losses.append(round(torch.stack(each).mean().item(), DIGITS))
    return [
        Row(
            plan=_plan(name, sizes, corpus.vocab),
            parameters=sum(x.numel() for x in model.parameters()),
            hidden=sizes.hidden,
            vocab=corpus.vocab,
            batch_tokens=sizes.batch * sizes.context,
            corpus_tokens=len(corpus.train),
            seconds=round(time.perf_counter() - begin, 1),
            final_loss=losses[-1],
            validation_steps=steps,
            validation_losses=losses,
            losses=[round(loss, DIGITS) for loss in trained.losses],
        )
    ]


def summarize(rows: Sequence[dict[str, Any]]) -> list[Summary]:
    """Return the final losses of each kind of gradient, the exact ones first."""
    final: dict[str, dict[int, float]] = {name: {} for name in GRADIENTS}
    for row in rows:
        final[row["gradient"]][row["seed"]] = row["final_loss"]
    exact = final["exact"]
    summaries = []
    for name, losses in final.items():
        differences = [losses[seed] - exact[seed] for seed in losses.keys() & exact.keys()]
        if differences:
            values = list(losses.values())
            std = statistics.stdev(values) if len(values) > 1 else 0.0
            mean, largest = statistics.fmean(differences), max(map(abs, differences))
            summaries.append(
                Summary(name, len(values), statistics.fmean(values), std, mean, largest)
            )
    return summaries


@functools.cache
def load() -> Any:
    """Return the corpus, which all trainings share."""
    from examples.corpus import load_corpus, read_sources  # needs tokenizers, of the demo alone

    specs = map(importlib.util.find_spec, SOURCES if DEVICE == "cuda" else ())
    folders = [Path(spec.origin).parent for spec in specs if spec and spec.origin]
    more = [text for folder in folders for text in read_sources(folder)]
    with tempfile.TemporaryDirectory() as folder:
        return load_corpus(Path(folder) / "tokenizer.json", more)


def _plan(name: str, sizes: Sizes, vocab: int) -> str:
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    h = torch.empty(sizes.batch * sizes.context, sizes.hidden, dtype=dtype, device=DEVICE)
    w = torch.empty(vocab, sizes.hidden, dtype=dtype, device=DEVICE)
    leaves = h.requires_grad_(), w.requires_grad_()
    return str(cutefce.plan(*leaves, **GRADIENTS[name]))
