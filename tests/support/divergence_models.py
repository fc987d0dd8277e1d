"""What the kernel of divergences computes, in plain torch."""

from typing import Any

import torch
from torch import Tensor

from cutefce.cute_kernels import spec
from cutefce.ops.divergence.factors import FactorRows
from tests.support.divergence import token_divergences


def divergence_rows(
    kernel: spec.DivergenceRowsSpec,
    a: Tensor,
    b: Tensor,
    out_a: Tensor | None,
    out_b: Tensor | None,
    stats: Tensor,
    exchange: Tensor,
    numbers: Tensor,
    side: int,
    first: int,
    columns: int,
    shift: int,
    *pitches: int,
) -> None:
    """Write statistics and factors, in float64 before they are rounded."""
    assert len(exchange) == kernel.EXCHANGE * len(a)
    for dtype, out in ((kernel.factors_a, out_a), (kernel.factors_b, out_b)):
        assert dtype == (None if out is None else str(out.dtype).removeprefix("torch."))
    form: dict[str, Any] = {"divergence": "forward_kl"}
    if kernel.mixture:
        form = {"divergence": "jsd", "beta": float(numbers[1])}
    with torch.enable_grad():
        wide = [x.double().requires_grad_() for x in (a, b)]
        loss = token_divergences(wide[1], wide[0], **form)
        if kernel.mixture:
            loss = token_divergences(*wide, **form)
        gradients = torch.autograd.grad(loss.sum(), wide)
    logs = [x.double().log_softmax(1) for x in (a, b)]
    kls = [loss, torch.zeros_like(loss)]
    if kernel.mixture:
        shares = numbers[:2].double()
        m = (shares[0] * logs[0].exp() + shares[1] * logs[1].exp()).log()
        kls = [(x.exp() * (x - m)).sum(1) for x in logs]
    for i, x in zip((side, 1 - side), (a, b), strict=True):
        stats[2 * i] = x.amax(1)
        stats[2 * i + 1] = x.double().logsumexp(1) - x.amax(1)
    stats[4 + side], stats[5 - side] = (kl.detach() for kl in kls)
    (rows, vocab), given = a.shape, zip((out_a, out_b), gradients, numbers[2:], strict=True)
    assert shift == (31 if columns >= vocab else columns.bit_length() - 1)
    for pitch, (out, gradient, scale) in zip(pitches, given, strict=True):
        if out is not None:
            place = FactorRows(out, first, rows, vocab, columns, pitch)
            for window, factors in place.windows():
                factors.copy_((gradient * scale)[:, window])


def logits(
    _: spec.LogitsSpec, h: Tensor, w: Tensor, out: Tensor, zeros: Tensor, clusters: int
) -> None:
    """Write products in float32; `zeros` are the semaphores of one launch."""
    assert clusters > 0 and out.is_contiguous() and zeros.tolist() == [0]
    zeros.fill_(1)
    out[:] = h.float() @ w.float().t()
