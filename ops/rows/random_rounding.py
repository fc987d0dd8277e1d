"""Sums of dW in 16 bits, rounded at random: up with the probability of what is cut off.

So each sum is right on average.  The random bits of an element are a function of a seed and of its
place: the same call with the same seed has the same bits, on any device.  R rows, D hidden.
"""

import torch
from torch import Tensor

from cutefce.cute_kernels.integers import ceil_div
from cutefce.cute_kernels.problem import NOISE_STEPS


def row_numbers(kept: Tensor) -> Tensor:
    """Return the numbers (V,) int32 of the rows of `kept` (V, D)."""
    return torch.arange(len(kept), device=kept.device, dtype=torch.int32)


def keep_at_random_(
    halves: Tensor,
    sums: Tensor,
    slot: Tensor,
    factor: Tensor | None,
    rows: Tensor,
    totals: Tensor,
    row: Tensor | None,
    seed: Tensor,
) -> None:
    """Keep sums_v + totals_slot_v, rounded, in `halves` (R, D), the bits of bfloat16 as int16.

    With `factor` (R,) and `row` (1, D), factor_v row is added.  `rows` (R,) are the rows' numbers,
    and `seed` is (1,), both int32.
    """
    total = totals[slot].add_(sums)
    if factor is not None and row is not None:
        total.addcmul_(factor[:, None], row)
    round_at_random_(halves, total, rows, seed)


def add_at_random_(halves: Tensor, sums: Tensor, *rest: Tensor | None) -> None:
    """Do what `keep_at_random_` does, and add what `halves` keep."""
    before = halves.to(torch.int32).bitwise_left_shift_(16).view(torch.float32)
    keep_at_random_(halves, before.add_(sums), *rest)  # type: ignore[arg-type]


def scale_at_random_(halves: Tensor, rows: Tensor, scale: Tensor, seed: Tensor) -> None:
    """Multiply what `halves` (R, D) keep by `scale` (R,), rounded at random; 1 changes nothing."""
    sums = halves.to(torch.int32).bitwise_left_shift_(16).view(torch.float32)
    round_at_random_(halves, sums.mul_(scale[:, None]), rows, seed)


def round_at_random_(halves: Tensor, sums: Tensor, rows: Tensor, seed: Tensor) -> None:
    """Write float32 `sums` (R, D), rounded to 16 bits, to `halves` (R, D) int16."""
    columns = torch.arange(sums.shape[1], device=sums.device, dtype=torch.int32)
    pairs = ceil_div(sums.shape[1], 2)
    noise = _noise(rows[:, None] * pairs + columns // 2, seed)
    noise = noise.bitwise_right_shift_(columns % 2 * 16).bitwise_and_(0xFFFF)
    bits = sums.view(torch.int32).masked_fill(sums.isnan(), 0x7FC00000)
    halves.copy_(bits.add_(noise).bitwise_right_shift_(16))


def _noise(pair: Tensor, seed: Tensor) -> Tensor:
    """Return the random bits of pairs of columns: 16 of the even one, then those of the odd one."""
    x = pair ^ seed
    for shift, factor in NOISE_STEPS:
        x = (x ^ ((x >> shift) & (1 << 32 - shift) - 1)) * factor
    return x ^ ((x >> 16) & 0xFFFF)
