"""Weighted sums of rows: of h and w for label smoothing, of exponentials for a bias.

Also those of soft targets, of K gathered rows of w for each token, and their products with h.

On a GPU a 16-bit operand is read once, as it is: each factor becomes a sum of three numbers of its
dtype, which hold the 24 bits of a float32, and one GEMM with float32 sums multiplies all three.
"""

import torch
from torch import Tensor

from cutefce.cute_kernels.integers import round_up
from cutefce.ops.dtypes import sum_dtype
from cutefce.ops.primitives.elementwise import add_soft_rows_, gathered_dots_
from cutefce.ops.primitives.portable_gradients import apply_rowwise, scale_rows
from cutefce.ops.primitives.products import matmul_into
from cutefce.ops.rows.blocks import row_blocks
from cutefce.ops.rows.targets import Targets

TERMS = 3
"""Numbers that a factor is split into."""
LARGEST_FLOAT16 = 2.0**14
"""The largest factor of float16 rows is scaled to below twice this, which float16 holds whatever it
is rounded to; that of others to below 2.  Terms in float16 are multiples of 2^-24, which is then
2^-38 of it or less."""
EXPONENT_BITS, LEAST_NORMAL = 0x7F800000, 1 << 23
"""Of a float32 as an integer: a mask that leaves the power of 2 below a number, and 2^-126."""
ALIGNMENT = 8
"""Rows of a 16-bit GEMM operand begin at multiples of 16 bytes."""
BATCH_ROWS = 2048
"""Rows of one GEMM of many: a GPU sums few columns of many rows in parallel."""
MAX_BATCHED_COLUMNS = 1 << 14


def weighted_sum(x: Tensor, factor: Tensor | None) -> Tensor:
    """Return Σ_i factor_i x_i (K,) in the dtype of sums.

    The result is deterministic.  Errors are relative to the largest factor.  A row that is not
    finite spreads, even if its factor is 0; a factor that is not finite makes the sum NaN or
    infinite.

    Args:
        x: (M, K), with rows of any pitch.
        factor: (M,) in the dtype of sums; None for 1.
    """
    dtype = sum_dtype(x.dtype)
    if not x.numel():
        return x.new_zeros(x.shape[1], dtype=dtype)
    if factor is None:
        factor = x.new_ones(len(x))
    if x.dtype == dtype:
        return torch.mv(x.t(), factor)
    if not x.is_cuda:
        total = x.new_zeros(x.shape[1], dtype=dtype)
        for rows in row_blocks(x):
            total += torch.mv(x[rows].to(dtype).t(), factor[rows].to(dtype))
        return total
    terms, scale = factor[None], None
    if factor.dtype == dtype:
        terms, scale = _terms(factor, x.dtype)
    sums, done = x.new_empty(len(terms), x.shape[1], dtype=dtype), 0
    batches = len(x) // BATCH_ROWS
    if batches > 1 and x.shape[1] <= MAX_BATCHED_COLUMNS:
        done = batches * BATCH_ROWS
        parts = terms[:, :done].unflatten(1, (batches, BATCH_ROWS)).transpose(0, 1)
        rows_of_parts = x[:done].unflatten(0, (batches, BATCH_ROWS))
        torch.sum(torch.bmm(parts, rows_of_parts, out_dtype=dtype), 0, out=sums)
    if done < len(x):
        matmul_into(sums, terms[:, done:], x[done:], accumulate=done > 0)
    return sums[0] if scale is None else sums.sum(0).mul_(scale)


def _terms(factor: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return terms (T, M) of a 16-bit `dtype` that add up to factor / scale, and the scale ().

    `factor` (M,) is float32, on a GPU; the scale is a power of 2.
    """
    powers = factor.view(torch.int32) & EXPONENT_BITS
    scale = powers.amax().clamp_(min=LEAST_NORMAL).view(torch.float32)
    if dtype == torch.float16:
        scale = scale / LARGEST_FLOAT16
    rest = factor / scale
    pitch = round_up(len(factor), ALIGNMENT)
    terms = torch.empty(TERMS, pitch, dtype=dtype, device=factor.device)[:, : len(factor)]
    for term in terms[:-1]:
        term.copy_(rest)
        rest -= term
    terms[-1].copy_(rest)
    return terms, scale


class SoftTargetSteps:
    """The steps of the forward that soft targets add."""

    def soft_excess(self, h: Tensor, w: Tensor, targets: Targets, target_logit: Tensor) -> Tensor:
        """Return Σ_k b (u - r) (N,) of the soft targets; h is as for `target_logit`."""
        soft, logits = targets.soft, targets.logits
        assert soft is not None
        u = soft.coefficient.new_empty(soft.index.shape)
        self.soft_logits(u, h, w, targets)
        if logits is not None:
            u = logits.apply_at(u, soft.index)
        soft.logits = u
        return soft.excess_of(u, target_logit)

    def soft_logits(self, out: Tensor, h: Tensor, w: Tensor, targets: Targets) -> None:
        """Write the raw logits of soft targets to `out` (N, K)."""
        assert targets.soft is not None
        index = targets.soft.index
        gathered = index.shape[1] * w.shape[1]
        apply_rowwise(gathered_dots_, out, index, h, whole=(w,), gathered=gathered)

    def put_soft(self, entries: Tensor | None, exps: Tensor, first: int, targets: Targets) -> None:
        """Write the `SoftTargets.entries` (N, K) to `exps` (N, W), of columns from `first` on.

        None is for entries of 0.
        """
        assert targets.soft is not None
        targets.soft.put(entries, exps, first)

    def scale_soft(
        self,
        entries: Tensor,
        lead: Tensor,
        exps: Tensor,
        first: int,
        targets: Targets,
        scale: Tensor,
    ) -> None:
        """Multiply `exps` and `entries` by `scale` (N,), and do what `put_soft` does.

        Also put `lead` (N,) in the places of the targets.
        """
        scale_rows(exps, scale)
        self.put_soft(entries * scale[:, None], exps, first, targets)
        column = targets.index - first
        inside = (column >= 0) & (column < exps.shape[1])
        column = column.masked_fill_(~inside, 0)
        rows = torch.arange(len(exps), device=exps.device)
        exps[rows, column] = torch.where(inside, lead.to(exps.dtype), exps[rows, column])


def add_soft_rows(sums: Tensor, entries: Tensor, targets: Targets, w: Tensor) -> None:
    """Add Σ_k entries_ik w_{c_ik} to `sums` (N, D); `entries` are (N, K)."""
    assert targets.soft is not None
    index = targets.soft.index
    gathered = index.shape[1] * w.shape[1]
    apply_rowwise(add_soft_rows_, sums, index, entries, whole=(w,), gathered=gathered)
