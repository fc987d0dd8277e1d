"""What the kernel of divergences computes, in plain torch."""

import math
from typing import Any

import torch
from torch import Tensor

from cutefce.cute_kernels.spec import divergence as spec
from cutefce.ops.rows.blocks import blocks
from tests.support.divergence import token_divergences


def divergence_rows(
    kernel: spec.DivergenceRowsSpec,
    a: Tensor,
    b: Tensor,
    sums_a: Tensor | None,
    sums_b: Tensor | None,
    out_a: Tensor | None,
    out_b: Tensor | None,
    stats: Tensor,
    exchange: Tensor,
    numbers: Tensor,
    side: int,
    narrow: int,
    first: int,
    columns: int,
    shift: int,
    *pitches: int,
) -> None:
    """Write statistics and factors, in float64 before they are rounded."""
    assert len(exchange) == kernel.EXCHANGE * len(a)
    for x, sums in ((a, sums_a), (b, sums_b)):
        assert kernel.sums_given == (sums is not None)
        if sums is not None:
            lse = (sums[1].double().log() + sums[0].double() * math.log(2)).logsumexp(1)
            torch.testing.assert_close(lse, x.double().logsumexp(1), rtol=1e-6, atol=1e-5)
    for written, out in ((kernel.factors_a, out_a), (kernel.factors_b, out_b)):
        assert written == (out is not None) and (out is None or out.dtype == torch.bfloat16)
    form: dict[str, Any] = {"divergence": "reverse_kl" if kernel.form == "kl" else kernel.form}
    if kernel.form == "jsd":
        form["beta"] = float(numbers[1])
    with torch.enable_grad():
        wide = [x.double().requires_grad_() for x in (a, b)]
        loss = token_divergences(*wide, **form)
        gradients = torch.autograd.grad(loss.sum(), wide)
    logs = [x.double().log_softmax(1) for x in (a, b)]
    kls = [loss, torch.zeros_like(loss)]
    if kernel.form == "jsd":
        shares = numbers[:2].double()
        m = (shares[0] * logs[0].exp() + shares[1] * logs[1].exp()).log()
        kls = [(x.exp() * (x - m)).sum(1) for x in logs]
    if kernel.form == "tv":
        signs = (logs[0] - logs[1]).sign()
        kls = [(logs[0].exp() * signs).sum(1), -(logs[1].exp() * signs).sum(1)]
    for i, x in zip((side, 1 - side), (a, b), strict=True):
        stats[2 * i] = x.amax(1)
        stats[2 * i + 1] = x.double().logsumexp(1) - x.amax(1)
    stats[4 + side], stats[5 - side] = (kl.detach() for kl in kls)
    stats[6] = token_divergences(a.double(), b.double(), divergence="tv")
    (rows, vocab), given = a.shape, zip((out_a, out_b), gradients, numbers[2:], strict=True)
    assert shift == (31 if columns >= vocab else columns.bit_length() - 1)
    for pitch, (out, gradient, scale) in zip(pitches, given, strict=True):
        if out is not None:
            memory = out.view(torch.float16) if narrow else out
            of_windows = (gradient * scale).split(columns, 1)
            places = windows_of(memory, vocab, rows, first, columns, pitch)
            for place, factors in zip(places, of_windows, strict=True):
                place.copy_(factors)


def windows_of(
    memory: Tensor, vocab: int, rows: int, first: int, columns: int, pitch: int
) -> list[Tensor]:
    """Return factors (R, C) of windows of C of V classes, rows of matrices a `pitch` apart.

    They are those from row `first` on.
    """
    windows = []
    for number, part in enumerate(blocks(vocab, columns)):
        width = part.stop - part.start
        begin = number * pitch + first * width
        windows.append(memory[begin : begin + rows * width].view(rows, width))
    return windows


def sums_of(logits: Tensor, parts: int) -> Tensor:
    """Return (2, R, P) what the kernel of logits sums of P parts of logits (R, V)."""
    sums = []
    for part in logits.float().tensor_split(parts, 1):
        top = part.amax(1) if part.shape[1] else part.new_full(part.shape[:1], -torch.inf)
        top = (top / math.log(2)).clamp(min=-3e38)
        sums.append(torch.stack([top, (part / math.log(2) - top[:, None]).exp2().sum(1)]))
    return torch.stack(sums, 2)
