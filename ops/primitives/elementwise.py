"""The arithmetic between the GEMMs, in plain torch functions that a compiler can fuse.

On a GPU with Triton they run as single kernels.

R rows, D hidden, V vocab, P reference blocks of C columns.  Every function writes to its first
argument; results are rounded once, when they are written.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from cutefce.cute_kernels.problem import SLACK
from cutefce.cute_kernels.process_cache import process_cache, warn_once
from cutefce.ops import torch_compat
from cutefce.ops.rows.packed_sums import join, write


def gathered_dot_(out: Tensor, h: Tensor, index: Tensor, w: Tensor) -> None:
    """Write h_i · w_index_i to `out` (R,); h is (R, D), index (R,), w (V, D)."""
    out.copy_(w[index].to(out.dtype).mul_(h).sum(1))


def gathered_dots_(out: Tensor, index: Tensor, h: Tensor, w: Tensor) -> None:
    """Write h_i · w_index_ik to `out` (R, K); h is (R, D), index (R, K), w (V, D)."""
    products = w[index].to(out.dtype).mul_(h.to(out.dtype)[:, None])
    out.copy_(products.sum(2))


def add_soft_rows_(sums: Tensor, index: Tensor, coefficient: Tensor, w: Tensor) -> None:
    """Add Σ_k coefficient_ik w_index_ik to `sums` (R, D); index is (R, K)."""
    sums.add_(w[index].to(sums.dtype).mul_(coefficient[:, :, None]).sum(1))


def scale_by_log_(exps: Tensor, a: Tensor, b: Tensor) -> None:
    """Multiply e (R, C) by a_i + b_i log e_iv, with a and b (R,); 0 stays 0."""
    wide = exps.to(a.dtype)
    scaled = wide * (a[:, None] + b[:, None] * wide.log())
    exps.copy_(torch.where(wide == 0, 0, scaled))


def combine_(
    out: Tensor,
    low: Tensor | None,
    x: Tensor | None,
    packed: Tensor | None,
    packed_low: Tensor | None,
    scale: Tensor | None,
    index: Tensor | None,
    coefficient: Tensor | None,
    factor: Tensor | None,
    table: Tensor | None,
    row: Tensor | None,
    last: Tensor | None,
) -> None:
    """Write ((x_r + packed_r) scale_r + b_r table_index_r + factor_r row) last to `out` (R, D).

    See `PortableGradients.combine`.  What is packed, and `out` beside it, are words, see
    `packed_sums.Sums`; `row` is (1, D).  More than eight parameters: fused kernels take tensors.
    """
    words = out if low is not None else packed
    count, parts = 1 if words is None else words.element_size() // 2, []
    for i in range(count):
        sums = None if x is None else x[:, i::count]
        if packed is not None and packed_low is not None:
            before = join(packed, packed_low, i)
            sums = before if sums is None else before.add_(sums)
        assert sums is not None
        if table is None:
            result = sums if scale is None else sums * scale[:, None]
        else:
            result = table[:, i::count][index].to(sums.dtype)
            if coefficient is not None:
                result.mul_(coefficient[:, None])
            result = result.add_(sums) if scale is None else result.addcmul_(sums, scale[:, None])
        if factor is not None and row is not None:
            result.addcmul_(factor[:, None], row[:, i::count])
        if last is not None:
            result.mul_(last)
        if coefficient is not None:
            is_zero = (scale == 0) & (coefficient == 0)
            if factor is not None:
                is_zero &= factor == 0
            result.masked_fill_(is_zero[:, None], 0)
        parts.append(result)
        del sums, result  # freed before the next ones are allocated
    if words is None:
        out.copy_(parts[0])
    else:
        write(out, low, parts)


def statistics_(
    reference: Tensor,
    others: Tensor,
    total: Tensor,
    loss: Tensor,
    logit: Tensor,
    active: Tensor,
    sums: Tensor,
    references: Tensor,
) -> None:
    """Write the statistics of rows, (R,) each, see `RowStats`, from partial sums (R, P).

    Each sum is relative to its own one of `references`; `logit` (R,) are those of the targets.  Of
    rows that are not `active` (R,) nothing else need be defined.
    More than eight parameters: fused kernels take tensors.
    """
    row_sum, highest = joined(sums, references, 1)
    row_sum = torch.where(active, row_sum, 0)
    highest = torch.where(active, highest, torch.inf)
    distance = torch.where(active, highest - logit, 0)
    # exp(r - ρ) - 1, which is exactly 0 where the target's logit is the reference
    excess = row_sum + torch.expm1(-distance)
    reference.copy_(highest)
    others.copy_(row_sum)
    total.copy_(excess + 1)
    loss.copy_(distance + torch.log1p(excess))


def joined(sums: Tensor, references: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return sums of exponentials over `dim`, relative to the largest reference, and this.

    Each of `sums` is relative to its own one of `references`.
    """
    reference = references.amax(dim)
    factors = exp_difference(references, reference.unsqueeze(dim))
    return (sums * factors).sum(dim), reference


def exp_difference(a: Tensor, b: Tensor) -> Tensor:
    """Return exp(a - b), 1 where both are the same infinity."""
    return torch.where(a == b, 1, torch.exp(a - b))


def exponentials_(
    logits: Tensor,
    start: Tensor,
    reference: Tensor,
    target: Tensor,
    exps: Tensor | None,
    cap: Tensor | None,
    floor: Tensor | None,
    sums: Tensor | None = None,
    references: Tensor | None = None,
    of_all: Tensor | None = None,
    largest: Tensor | None = None,
    of_others: Tensor | None = None,
) -> None:
    """Replace `logits` (R, P, C) by their exponentials, 0 at the `target` (R,).

    The tile begins at vocabulary entry `start` ().  Exponentials are relative to `reference` (R,);
    with `references` (R, P), a block whose largest logit is more than `SLACK` above it takes that
    logit instead, and `references` receives the choice.  `sums` (R, P) receives the row sums,
    `exps` (R, P, C) a copy of the result.  With `cap` (R,), κ of `LogitMap`, the results are
    exponentials times 1 - (logit / κ)²; their sums are not.  `of_all` (4, R, P) receives the sums
    over all logits, see `sum_all_`, `largest` (R, P) the largest logit but the target's, and
    `of_others` (2, R, P) its vocabulary entry, the lowest of equal ones, and how many are above
    `reference`.
    Logits below `floor` (R,), but for the target's, count as -inf.
    More than eight parameters: fused kernels take tensors.
    """
    _, blocks, width = logits.shape
    columns = start + torch.arange(blocks * width, device=logits.device).view(blocks, width)
    is_target = target[:, None, None] == columns
    if floor is not None:
        logits.masked_fill_((logits < floor[:, None, None]) & ~is_target, -torch.inf)
    if of_all is not None:
        sum_all_(of_all, logits)
    # the target's logit, rounded as by a GEMM, must not become the reference of the others
    logits.masked_fill_(is_target, -torch.inf)
    reference = reference[:, None]
    if of_others is not None:
        indices = logits.argmax(2)
        of_others[0] = columns.gather(1, indices.t()).t().to(logits.dtype)
        of_others[1] = (logits > reference[:, :, None]).sum(2)
    if references is not None:
        highest = logits.amax(2)
        if largest is not None:
            largest.copy_(highest)
        reference = torch.where(highest - reference > SLACK, highest, reference)
        references.copy_(reference)
    reference = torch.where(reference == -torch.inf, 0, reference)  # -inf - -inf is NaN
    derivative = None
    if cap is not None:
        cap = cap[:, None, None]
        # a masked logit is -inf
        derivative = logits.clamp(min=-cap.abs()).div_(cap).square_().neg_().add_(1)
    logits.sub_(reference[:, :, None]).exp_()
    if sums is not None:
        sums.copy_(logits.sum(2))
    if derivative is not None:
        logits.mul_(derivative)
    if exps is not None:
        exps.copy_(logits)


def sum_all_(out: Tensor, logits: Tensor) -> None:
    """Write the sums over all columns of `logits` (R, P, C) to `out` (4, R, P).

    They are the first fields of `PartialOutputs`: the largest logit m, Σ e with e = exp(logit - m),
    Σ e (logit - m), and Σ e², without the e of the first largest logit.
    """
    out[0], place = logits.max(2)
    base = torch.where(out[0] == -torch.inf, 0, out[0])  # -inf - -inf is NaN
    distances = logits - base[:, :, None]
    is_left_out = torch.arange(logits.shape[2], device=logits.device) == place[:, :, None]
    distances.masked_fill_(is_left_out, -torch.inf)
    exps = distances.exp()
    out[1] = exps.sum(2)
    out[2] = distances.clamp_(min=-1e30).mul_(exps).sum(2)  # the exponential of -inf is 0
    out[3] = torch.mul(exps, exps, out=distances).sum(2)


def exponentials(logits: Tensor, *rest: Tensor | None) -> None:
    """Do what `exponentials_` does without changing `logits`: fused kernels do not write them."""
    exponentials_(logits.clone(), *rest)  # type: ignore[arg-type]


def can_fuse(x: Tensor) -> bool:
    """Whether functions of the rows of x run fused: on a GPU with Triton, for two rows or more."""
    return x.is_cuda and x.shape[0] > 1 and _has_triton()


@process_cache
def fused(function: Callable[..., None]) -> Callable[..., None]:
    """Return `function`, which writes to its arguments, as one kernel for any number of rows."""
    return torch_compat.compile_pointwise(function)


@process_cache
def _has_triton() -> bool:
    if not torch_compat.has_triton():
        warn_once("no Triton; the portable path runs unfused on the GPU")
        return False
    return True
