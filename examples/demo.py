"""Train one small transformer twice: with cutefce's loss, and with torch's on all logits.

Run as `python -m examples.demo`.  Both trainings start from the same parameters and see the same
batches, and their steps alternate, so that other load on the machine slows down both.  On a CPU
everything is float32; on a GPU matrix products run in bfloat16 by autocast.
"""

import argparse
import copy
import dataclasses
import json
import math
import os
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # silences the profiler at its start

import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress
from rich.table import Table

import cutefce
from examples.corpus import load_corpus
from examples.training import (
    CPU,
    GPU,
    SEED,
    VALIDATION_BATCHES,
    Batch,
    Training,
    Transformer,
    logits_loss,
    sample_batches,
)

FINAL_STEPS = 10
"""Steps at the end whose mean is reported as the training loss."""


@dataclass(frozen=True)
class Result:
    """Results of one training; losses in nats a token."""

    name: str
    train_loss: float
    validation_loss: float
    tokens_per_second: float
    peak_bytes: int
    losses: list[float]


def alternate_steps(trainings: list[Training], batches: Iterator[Batch], steps: int) -> None:
    """Take a step of each training with every batch, behind one progress bar a training."""
    loss, speed = "loss {task.fields[loss]:.3f}", "{task.fields[speed]:,.0f} tokens/s"
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), loss, speed)
    with Progress(*columns) as progress:
        tasks = [progress.add_task(t.name, total=steps, loss=math.nan, speed=0) for t in trainings]
        for batch in batches:
            for training, task in zip(trainings, tasks, strict=True):
                training.step(batch)
                rate = batch[0].numel() / training.seconds[-1]
                progress.update(task, advance=1, loss=training.losses[-1], speed=rate)


def summarize(training: Training, peak: int, validation: list[Batch]) -> Result:
    """Validate a finished training and gather its numbers."""
    with torch.no_grad():
        validation_loss = statistics.fmean(training.evaluate(b).item() for b in validation)
    return Result(
        name=training.name,
        train_loss=statistics.fmean(training.losses[-FINAL_STEPS:]),
        validation_loss=validation_loss,
        tokens_per_second=validation[0][0].numel() / statistics.median(training.seconds),
        peak_bytes=peak,
        losses=training.losses,
    )


def print_table(console: Console, results: list[Result], title: str) -> None:
    """Print the results side by side."""
    table = Table("", title=title)
    for result in results:
        table.add_column(result.name, justify="right")
    final = f"train loss, mean of the last {FINAL_STEPS} steps"
    table.add_row(final, *(f"{r.train_loss:.4f}" for r in results))
    table.add_row("validation loss", *(f"{r.validation_loss:.4f}" for r in results))
    table.add_row("tokens/s, median step", *(f"{r.tokens_per_second:,.0f}" for r in results))
    peaks = (f"{r.peak_bytes / 2**20:,.0f} MiB" for r in results)
    table.add_row("peak memory of forward and backward", *peaks)
    console.print(table)


def save_curves(path: Path, results: list[Result], title: str) -> None:
    """Draw both loss curves: the first wide and pale, the second thin and dashed over it."""
    first, second = results
    figure = Figure(figsize=(8, 5))
    axes = figure.subplots()
    steps = range(1, len(first.losses) + 1)
    axes.plot(steps, first.losses, label=first.name, color="tab:orange", linewidth=6, alpha=0.5)
    axes.plot(steps, second.losses, label=second.name, color="black", linewidth=1.2, linestyle="--")
    axes.set(xlabel="step", ylabel="training loss (nats a token)", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150, bbox_inches="tight")


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    steps = f"default: {CPU.steps} on a CPU, {GPU.steps} on a GPU"
    parser.add_argument("--steps", type=int, help=steps)
    parser.add_argument("--output", type=Path, default="demo-output", help="folder to write to")
    return parser.parse_args()


def main() -> None:
    """Train both ways; write loss-curves.png, results.json and tokenizer.json."""
    arguments, console = parse_arguments(), Console(markup=False)
    output: Path = arguments.output
    output.mkdir(parents=True, exist_ok=True)
    device, where, sizes = torch.device("cpu"), "CPU, float32", CPU
    if torch.cuda.is_available():
        device, sizes = torch.device("cuda"), GPU
        where = f"{torch.cuda.get_device_name()}, bfloat16 autocast"
    if arguments.steps:
        sizes = dataclasses.replace(sizes, steps=arguments.steps)
    with console.status("Tokenizing Python's standard library"):
        corpus = load_corpus(output / "tokenizer.json")
    title = f"vocabulary {corpus.vocab:,}; {where}"

    torch.manual_seed(SEED)
    model = Transformer(corpus.vocab, sizes).to(device)
    trainings = [
        Training("cutefce", cutefce.linear_cross_entropy, model, sizes),
        Training("all logits", logits_loss, copy.deepcopy(model), sizes),
    ]
    validation = list(sample_batches(corpus.validation, sizes, VALIDATION_BATCHES, device))
    peaks = [training.measure_peak(validation[0]) for training in trainings]
    batches = sample_batches(corpus.train, sizes, sizes.steps, device)
    alternate_steps(trainings, batches, sizes.steps)
    results = [summarize(t, peak, validation) for t, peak in zip(trainings, peaks, strict=True)]

    curves = zip(*(result.losses for result in results), strict=True)
    difference = max(abs(a - b) for a, b in curves)
    print_table(console, results, title)
    console.print(f"Largest difference of the loss curves: {difference:.1e} nats")
    save_curves(output / "loss-curves.png", results, title)
    report = {
        "title": title,
        "sizes": dataclasses.asdict(sizes),
        "largest_difference": difference,
        "results": [dataclasses.asdict(result) for result in results],
    }
    (output / "results.json").write_text(json.dumps(report, indent=1) + "\n")
    console.print(f"Loss curves, numbers and tokenizer are in {output}")


if __name__ == "__main__":
    main()
