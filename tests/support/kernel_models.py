"""Torch models of the kernels on a CPU, to test the host code that launches them without a GPU.

They round where the kernels round, and read and write the same memory; all sums are written to the
first partial, the other partials are empty.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cutefce.cute_kernels import spec
from cutefce.cute_kernels.problem import GRADIENT_LOSS, LOWEST_LOGIT, SLACK
from cutefce.cute_kernels.variant import SUM_ONLY
from cutefce.cute_kernels.workspace import Semaphore, Stat
from cutefce.ops.primitives import cute_gradients, cute_projection
from tests.support.row_reductions import reduced


def model_of(kernel: spec.KernelSpec) -> Callable[..., None]:
    """Return the function that replaces a compiled kernel."""
    models: dict[type, Callable[..., None]] = {
        spec.TargetLogitSpec: _target_logit,
        spec.ProjectExpSpec: _project_exp,
        spec.ReducePartialsSpec: _reduce_partials,
        spec.FusedForwardSpec: _fused_forward,
        spec.ScaleAddRowsSpec: _scale_add_rows,
        spec.GradGemmSpec: _grad_gemm,
        spec.AddTargetsSpec: _add_targets,
    }
    return functools.partial(models[type(kernel)], kernel)


Transform = tuple[Tensor | None, Tensor | None, float | None]
"""κ (N,), b (V,) and s of a logit transform; None for what it lacks."""


def transformed(t: Tensor, transform: Transform | None) -> Tensor:
    """Return the model's logits for raw ones (N, V)."""
    row_scale, bias, slope = transform or (None, None, None)
    u = t if bias is None else t + bias
    u = u if slope is None else torch.tanh(slope * u)
    return u if row_scale is None else row_scale[:, None] * u


def _check(kernel: Any, transform: Transform | None) -> None:
    given = transform or (None, None, None)
    assert kernel.transform == tuple(operand is not None for operand in given)


def _target_logit(
    kernel: spec.TargetLogitSpec,
    h: Tensor,
    w: Tensor,
    target: Tensor,
    logit: Tensor,
    zeros: Tensor,
    transform: Transform | None,
    ignored: int,
) -> None:
    _check(kernel, transform)
    assert len(zeros) <= kernel.max_zeros(len(h))
    zeros.fill_(0)
    in_vocab = (target >= 0) & (target < len(w))
    index = torch.where(in_vocab, target, 0)
    logit[:] = (h.float() * w[index].float()).sum(1)
    if transform is not None:
        row_scale, bias, slope = transform
        own = row_scale, None if bias is None else bias[index, None], slope
        logit[:] = transformed(logit[:, None], own)[:, 0]
    logit.clamp_(min=LOWEST_LOGIT)
    logit[~in_vocab | (logit == torch.inf)] = torch.nan
    logit[target == ignored] = torch.inf


def _project_exp(
    kernel: spec.ProjectExpSpec,
    h: Tensor,
    w: Tensor,
    reference: Tensor,
    target: Tensor,
    sums: Tensor | None,
    exps: Tensor | None,
    semaphores: Tensor,
    transform: Transform | None,
    reductions: Tensor | None,
    first: int,
    *_: int,
) -> None:
    _check(kernel, transform)
    u = transformed(h.float() @ w.float().t(), transform)
    relative = u - reference[:, None]
    columns = torch.arange(first, first + len(w))
    relative[target[:, None] == columns] = -torch.inf
    if sums is not None:
        sums.fill_(-torch.inf)
        sums[:, 0] = relative.logsumexp(1) / math.log(2)
    assert (reductions is not None) == (kernel.reductions != SUM_ONLY)
    if reductions is not None:
        empty = torch.full((1, 1), -torch.inf)
        reductions[:] = reduced(empty, torch.zeros(1), first, kernel.reductions)[:, :, None]
        masked = u.masked_fill(target[:, None] == columns, -torch.inf)
        reductions[..., 0] = reduced(masked, reference, first, kernel.reductions)
    rows = torch.ones(len(h), dtype=torch.bool)
    if kernel.only_flagged:
        assert semaphores[Semaphore.DONE_COUNTER] > 0, "runs after reduce_partials"
        blocks = torch.arange(len(h)) // kernel.config.rows
        rows = semaphores[Semaphore.REPAIR_FLAGS + blocks] == 1
    else:
        assert not semaphores.any()
        semaphores[Semaphore.SYNC_COUNTER] = 1
    if exps is not None:
        count = min(exps.shape[1], len(w))
        stored = relative.exp()
        if kernel.transform.softcap:
            assert transform is not None and transform[0] is not None
            stored *= 1 - (u / transform[0][:, None]) ** 2
        exps[rows, :count] = stored[rows, :count].to(exps.dtype)


def _reduce_partials(
    kernel: spec.ReducePartialsSpec,
    partials: Tensor,
    logit: Tensor,
    target: Tensor,
    stats: Tensor,
    reduced: Tensor,
    semaphores: Tensor,
    ignored: int,
    mean: int,
) -> None:
    assert semaphores[Semaphore.DONE_COUNTER] == 0
    partials = torch.where((target == ignored)[:, None], -torch.inf, partials)
    # a maximum drops NaN, as on the GPU
    largest = partials.nan_to_num(-torch.inf, torch.inf, -torch.inf).amax(1)
    far = largest > SLACK / math.log(2)
    reference = torch.where(far, logit + largest * math.log(2), logit)
    semaphores[Semaphore.REPAIR_FLAGS + far.nonzero()[:, 0] // kernel.rows] = 1
    semaphores[Semaphore.DONE_COUNTER] = 1
    distance = torch.where(reference == logit, 0, reference - logit)
    others = torch.exp2(partials - distance[:, None] / math.log(2)).sum(1)
    bounded = torch.where(distance == 0, others, others.clamp(0.5, 2.0**31))
    excess = bounded + torch.expm1(-distance)
    stats[Stat.REFERENCE] = reference
    stats[Stat.SUM_EXP_OTHERS] = others
    loss = distance + torch.log1p(excess)
    loss = torch.where(logit == LOWEST_LOGIT, loss * torch.inf, loss)
    stats[Stat.SUM_EXP] = torch.where(loss < GRADIENT_LOSS, excess + 1, torch.nan)
    stats[Stat.LOSS] = loss
    count = (target != ignored).sum().clamp(min=1) if mean else 1
    reduced.copy_(stats[Stat.LOSS].sum() / count)


def _fused_forward(
    kernel: spec.FusedForwardSpec,
    h: Tensor,
    w: Tensor,
    target: Tensor,
    workspace: Tensor,
    stats: Tensor,
    reduced: Tensor,
    transform: Transform | None,
    ignored: int,
    vocab_splits: int,
    clusters: int,
    mean: int,
) -> None:
    tokens, partials = len(h), vocab_splits * kernel.config.partials_per_row
    assert len(workspace) == kernel.workspace_size(tokens, vocab_splits)
    count = len(workspace) - tokens * (1 + partials)
    logit, sums, rest = workspace.split([tokens, tokens * partials, count])
    sums, semaphores = sums.view(tokens, partials), rest.view(torch.int32)
    model_of(kernel.target_logit)(h, w, target, logit, semaphores, transform, ignored)
    rows = logit, target, sums, None, semaphores, transform, None
    model_of(kernel.row_sums)(h, w, *rows, 0, vocab_splits, clusters)
    results = stats, reduced, semaphores
    model_of(kernel.reduce_partials)(sums, logit, target, *results, ignored, mean)


def _scale_add_rows(
    kernel: spec.ScaleAddRowsSpec,
    out: Tensor,
    x: Tensor,
    table: Tensor | None,
    row_scale: Tensor,
    gather_scale: Tensor | None,
    index: Tensor | None,
    rank_one: tuple[Tensor, Tensor] | None,
) -> None:
    assert (rank_one is not None) == kernel.rank_one
    total = row_scale[:, None] * x.float()
    if table is not None and gather_scale is not None and index is not None:
        total = total + gather_scale[:, None] * table[index].float()
        is_zero = (row_scale == 0) & (gather_scale == 0)
        if rank_one is not None:
            factor, row = rank_one
            total = total + factor[:, None] * row
            is_zero &= factor == 0
        total[is_zero] = 0
    out[:] = total.to(out.dtype)


def _grad_gemm(
    kernel: spec.GradGemmSpec,
    a: Tensor,
    b: Tensor,
    out: Tensor,
    targets: Any,
    rank_one: tuple[Tensor, Tensor] | None,
    semaphores: Tensor,
    clusters: int,
    k_splits: int | None,
    overwrite: int | None,
) -> None:
    counters = semaphores[: kernel.semaphore_count(clusters)]
    assert counters.tolist() == [0] * kernel.semaphore_count(clusters)
    counters.fill_(1)
    assert (k_splits is None) == (overwrite is None) == kernel.final
    assert (rank_one is not None) == kernel.rank_one
    product = a.float() @ b.float().t()
    if rank_one is not None:
        product += rank_one[0][:, None] * rank_one[1]
    if kernel.final:
        *csr, grad_scale = targets
        _add_targets(None, product, *csr)
        out[:] = (product * grad_scale).to(out.dtype)
    else:
        out[:] = product if overwrite else out + product


def _add_targets(
    _: Any, sums: Tensor, order: Tensor, offsets: Tensor, coef: Tensor, h: Tensor
) -> None:
    spans = zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)
    for row, (begin, end) in enumerate(spans):
        slots = slice(begin, end)
        sums[row] += (coef[slots, None] * h[order[slots]].float()).sum(0)


def use_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launch the models in the place of compiled kernels."""
    for module in (cute_projection, cute_gradients):
        monkeypatch.setattr(module, "compiled", model_of)
