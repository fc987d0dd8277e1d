"""The forward on a GPU against one plain product h wᵀ, which writes all logits.

product      torch.mm(h, w.t())
loss         torch.ops.cutefce.loss without gradients
loss, kept   the forward of a training step that keeps every exponential
"""

from dataclasses import dataclass

import torch

import cutefce
from bench.harness.problems import Shape, random_head
from bench.harness.timing import Call, interleaved, peak_bytes
from cutefce.ops.primitives import rows
from cutefce.ops.primitives.dispatch import primitives_for, problem_of
from cutefce.ops.strategies import windows

SHAPES = tuple(
    Shape(tokens, hidden, vocab, "bfloat16")
    for tokens, hidden, vocab in (
        (8192, 4096, 131072),
        (8192, 2304, 256000),
        (1024, 4096, 262144),
        (16384, 7168, 129280),
        (4096, 4096, 128256),
        (32768, 4096, 262144),
        (384, 4096, 131072),
        (256, 4096, 131072),
        (200, 4096, 131072),
        (130, 4096, 131072),
        (100, 4096, 131072),
        (64, 4096, 131072),
        (8, 4096, 131072),
        (1, 4096, 131072),
    )
)
LARGEST_KEPT_BYTES = 8 << 30


@dataclass(frozen=True)
class Row:
    """One form at one shape; times are medians of interleaved runs."""

    tokens: int
    hidden: int
    vocab: int
    form: str
    median_ms: float
    quartiles_ms: tuple[float, float]
    ratio_to_product: float
    tflops: float
    peak_mib: float
    """Peak memory in MiB beyond the inputs and, where they are kept, the exponentials."""


def run(shape: Shape, repeats: int) -> list[Row]:
    """Measure every form at `shape` on fresh random data."""
    forms = _forms(shape)
    times = interleaved(forms, "cuda", repeats)
    return [
        Row(
            tokens=shape.tokens,
            hidden=shape.hidden,
            vocab=shape.vocab,
            form=name,
            median_ms=timing.median_ms,
            quartiles_ms=timing.quartiles_ms,
            ratio_to_product=timing.median_ms / times["product"].median_ms,
            tflops=shape.product_flop / timing.median_ms / 1e9,
            peak_mib=peak_bytes(forms[name], "cuda") / 2**20,
        )
        for name, timing in times.items()
    ]


def _forms(shape: Shape) -> dict[str, Call]:
    h, w, y = random_head(shape, "cuda")
    z = h.new_empty(shape.tokens, shape.vocab)
    cutefce.set_strict(True)
    primitives = primitives_for(h, w, problem_of(h, w, False, False))

    def loss() -> None:
        with torch.no_grad():
            torch.ops.cutefce.loss(h, w, y)

    def kept() -> None:
        targets = rows.make_targets(y, shape.vocab, -100)
        windows.forward(primitives, h, w, targets, "mean", [(0, z)])

    forms: dict[str, Call] = {"product": lambda: torch.mm(h, w.t(), out=z), "loss": loss}
    if z.numel() * z.element_size() <= LARGEST_KEPT_BYTES:
        forms["loss, kept"] = kept
    return forms
