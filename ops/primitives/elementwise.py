"""The arithmetic between the products, in plain torch code that can be fused.

R rows, D hidden, V vocab, P pieces of C columns.  Every function writes to its first argument;
results are rounded once, when they are written.
"""

import torch
from torch import Tensor

from cutefce.cute_kernels.problem import SLACK


def target_logit_(
    out: Tensor, h: Tensor, index: Tensor, address: Tensor, active: Tensor, w: Tensor
) -> None:
    """Write h_i · w_address_i to `out` (R,); NaN where address and index differ, +inf if inactive.

    h is (R, D), index, address and active are (R,), w is (V, D).
    """
    logit = w[address].to(out.dtype).mul_(h).sum(1)
    logit = torch.where(address == index, logit, torch.nan)
    out.copy_(torch.where(active, logit, torch.inf))


def scaled_rows_(out: Tensor, x: Tensor, scale: Tensor) -> None:
    """Write scale_i x_i to `out` (R, D); `scale` is (R,)."""
    out.copy_(x * scale[:, None])


def scale_rows_(x: Tensor, scale: Tensor) -> None:
    """Multiply each row of `x` (R, C) by its `scale` (R,)."""
    x.mul_(scale[:, None])


def finish_dx_(
    out: Tensor, sums: Tensor, address: Tensor, scale: Tensor, weight: Tensor, w: Tensor
) -> None:
    """Write scale_i (sums_i + weight_i w_address_i) to `out` (R, D)."""
    target_grad = w[address].to(sums.dtype).mul_(weight[:, None])
    out.copy_(target_grad.add_(sums).mul_(scale[:, None]))


def finish_dw_(out: Tensor, sums: Tensor, line: Tensor, target_sums: Tensor, unit: Tensor) -> None:
    """Write (sums_v + target_sums_line_v) * unit to `out` (R, D); `out` may be `sums` itself."""
    out.copy_(target_sums[line].add_(sums).mul_(unit))


def exponentials_(
    logits: Tensor,
    start: Tensor,
    reference: Tensor,
    target: Tensor,
    sums: Tensor | None,
    references: Tensor | None,
    exps: Tensor | None,
) -> None:
    """Turn `logits` (R, P, C) into exponentials, 0 at the `target` (R,).

    The tile begins at vocabulary entry `start` ().  The exponentials are relative to `reference`
    (R,); with `references` (R, P), a piece whose largest logit lies far above it takes that logit
    instead, and `references` receives the choice.  `sums` (R, P) receives the row sums, `exps`
    (R, P, C) a copy of the result.
    """
    _, pieces, width = logits.shape
    columns = start + torch.arange(pieces * width, device=logits.device).view(pieces, width)
    reference = reference[:, None]
    if references is not None:
        largest = logits.amax(2)
        reference = torch.where(largest - reference > SLACK, largest, reference)
        references.copy_(reference)
    logits.masked_fill_(target[:, None, None] == columns, -torch.inf)
    logits.sub_(reference[:, :, None]).exp_()
    if sums is not None:
        sums.copy_(logits.sum(2))
    if exps is not None:
        exps.copy_(logits)


def exponentials(logits: Tensor, *rest: Tensor | None) -> None:
    """`exponentials_` that leaves the logits alone, so that a fused kernel need not write them."""
    exponentials_(logits.clone(), *rest)  # type: ignore[arg-type]
