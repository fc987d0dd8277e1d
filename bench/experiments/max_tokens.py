"""How many tokens a step can have before memory runs out: all logits, and ours.

The number of tokens is doubled until a step fails, then the middle is tried.  Each attempt runs in
a child process, on random data, forward and backward.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from bench.harness.problems import Loss, Shape, gradients, ours, random_head, two_stage
from bench.harness.timing import peak_bytes
from cutefce.autotune_cache.tuning.subprocess_worker import Child, ChildError

SHAPES = {"cpu": Shape(512, 256, 8192, "float32"), "cuda": Shape(16384, 4096, 131072, "bfloat16")}
"""The first attempt."""
MOST_TOKENS = {"cpu": 2048, "cuda": 1 << 25}
"""No attempt has more."""
SECONDS = 180
"""Time limit of an attempt."""
LOSSES: dict[str, Loss] = {
    "two-stage": two_stage,
    "cutefce max": ours("max"),
    "cutefce min": ours("min"),
}


@dataclass(frozen=True)
class Row:
    """The most tokens of one form."""

    hidden: int
    vocab: int
    form: str
    tokens: int
    """The most that succeeded; 0 if none did."""
    peak_mib: float | None
    """Peak memory of that attempt in MiB beyond the inputs, with the gradients."""
    failed_tokens: int | None
    """The fewest that failed."""
    note: str
    """Why these failed, or that nothing did."""


def run(form: str, device: str) -> list[Row]:
    """Find the most tokens of `form`, a key of `LOSSES`."""
    shape, most = SHAPES[device], MOST_TOKENS[device]
    with Child() as child:

        def peak_mib(tokens: int) -> float:
            call = functools.partial(attempt, form, replace(shape, tokens=tokens), device)
            return child.ask(call, SECONDS)

        return [Row(shape.hidden, shape.vocab, form, *most_tokens(peak_mib, shape.tokens, most))]


def most_tokens(
    peak_mib: Callable[[int], float], first: int, most: int
) -> tuple[int, float | None, int | None, str]:
    """Return the last four columns of a row; `peak_mib` raises a `ChildError` if it fails."""
    tokens = 0
    peak: float | None = None
    failed: int | None = None
    note = f"no more than {most} tokens were tried"

    def fits(number: int) -> bool:
        nonlocal tokens, peak, failed, note
        try:
            peak = peak_mib(number)
        except ChildError as error:
            failed = number
            note = "out of memory" if error.is_out_of_memory else str(error)
            return False
        tokens = number
        return True

    number = first
    while number <= most and fits(number):
        number *= 2
    if tokens and failed:
        fits(tokens * 3 // 2)
    return tokens, peak, failed, note


def attempt(form: str, shape: Shape, device: str) -> float:
    """Run a step of `form`; return its peak memory in MiB."""
    if device != "cpu":
        torch.cuda.empty_cache()  # as in a new process
    h, w, y = random_head(shape, device)
    return peak_bytes(lambda: gradients(LOSSES[form], h, w, y), device) / 2**20
