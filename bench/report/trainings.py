"""The tables of report.md about trainings of whole models."""

from collections.abc import Iterator
from dataclasses import asdict
from itertools import groupby

from bench.experiments.sampled_curves import summarize
from bench.experiments.training_step import LLAMA
from bench.harness.records import Row
from bench.report.tables import field, number, quartiles, table, text


def training_step(rows: list[Row]) -> Iterator[str]:
    """Yield a table for each model."""
    for model, group in groupby(rows, lambda row: str(row.get("model", LLAMA))):
        of_model = list(group)
        yield from table(
            {
                "implementation": text("implementation"),
                "ms": field("median_ms"),
                "quartiles": quartiles("quartiles_ms"),
                "time / library": field("ratio_to_library"),
                "peak, GiB": lambda r: number(r["peak_mib"] / 1024),
                "first loss": lambda r: f"{r['loss']:.5f}",
                "first gradient norm": lambda r: f"{r['gradient_norm']:.5f}",
            },
            of_model,
        )
        first = of_model[0]
        yield ""
        yield (
            f"{model} of {first['parameters'] / 1e9:.2f} B parameters, vocabulary "
            f"{first['vocab']}, {first['batch']} × {first['context']} tokens, activation "
            "checkpointing, AdamW; peak memory includes parameters, gradients and optimizer "
            "states.\n"
        )


def sampled_curves(rows: list[Row]) -> Iterator[str]:
    """Yield the final losses of each kind of gradient, and then of each training."""
    first = rows[0]
    yield from table(
        {
            "gradient": text("gradient"),
            "seeds": text("seeds"),
            "final validation loss, mean": lambda r: f"{r['mean']:.4f}",
            "standard deviation over seeds": lambda r: f"{r['std']:.4f}",
            "mean difference from exact": lambda r: f"{r['mean_difference']:+.4f}",
            "largest difference of a seed": lambda r: f"{r['largest_difference']:.4f}",
        },
        map(asdict, summarize(rows)),
    )
    yield ""
    yield (
        f"Losses in nats per token. A transformer of {first['parameters'] / 1e6:.0f} M parameters "
        f"with a tied head of {first['vocab']} × {first['hidden']}, trained for "
        f"{len(first['losses'])} steps of {first['batch_tokens']} tokens, "
        f"{len(first['losses']) * first['batch_tokens'] / 1e6:.1f} M in all, from a corpus of "
        f"{first['corpus_tokens'] / 1e6:.1f} M. A seed decides parameters, batches and draws.\n"
    )
    yield from table(
        {
            "gradient": text("gradient"),
            "seed": text("seed"),
            "plan": text("plan"),
            "final validation loss": lambda r: f"{r['final_loss']:.4f}",
            "seconds": field("seconds"),
        },
        rows,
    )
