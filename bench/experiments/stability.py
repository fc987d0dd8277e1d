"""Errors of loss and gradients against float64, ours and the two-stage form's.

Over the vocabulary, the scale of the logits, and how the targets lie; relative to the norm of what
is exact.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from bench.harness.accuracy import relative_error
from tests.support.reference import Case, Result, exact, ours, random_case, two_stage

TOKENS, HIDDEN = 256, 64
VOCABS = {"cpu": (1024, 8192), "cuda": (1024, 8192, 50257, 262144)}
SCALES = (1e-3, 1e-1, 1.0, 10.0, 1e2, 1e3)
"""Standard deviations of the logits."""


@dataclass(frozen=True)
class Row:
    """One quantity of one case; relative errors."""

    vocab: int
    logit_std: float
    targets: str
    dtype: str
    quantity: str
    ours: float
    two_stage: float


def run(vocab: int, device: str) -> list[Row]:
    """Evaluate every case of one vocabulary, in float32 and bfloat16."""
    rows = []
    for scale in SCALES:
        for dtype in (torch.float32, torch.bfloat16):
            case = random_case(
                TOKENS, HIDDEN, vocab, dtype=dtype, device=device, logit_std=scale, ignored=0
            )
            for name, placed in _placed(case):
                found = exact(placed), ours(placed), two_stage(placed)
                rows += _rows(vocab, scale, name, str(dtype), *found)
    return rows


def _placed(case: Case) -> Iterator[tuple[str, Case]]:
    """Yield the case with other targets."""
    vocab, count = case.w.shape[0], len(case.y)
    places = {
        "random": case.y,
        "one for all": torch.full_like(case.y, vocab // 2),
        "each its own": torch.arange(count, device=case.y.device) * (vocab // count),
        "the largest logit": (case.h.float() @ case.w.float().t()).argmax(1),
        "the smallest logit": (case.h.float() @ case.w.float().t()).argmin(1),
    }
    for name, y in places.items():
        yield name, dataclasses.replace(case, y=y)


def _rows(
    vocab: int, scale: float, targets: str, dtype: str, want: Result, got: Result, other: Result
) -> list[Row]:
    kind = dtype.removeprefix("torch.")
    return [
        Row(
            vocab,
            scale,
            targets,
            kind,
            name,
            *(relative_error(getattr(x, name), getattr(want, name)) for x in (got, other)),
        )
        for name in ("loss", "dx", "dw")
    ]
