"""What the kernels do, in torch on a CPU: so that what launches them can be tested without a GPU.

They round where the kernels round, and read and write nothing else than these; sums lie in the
first part, the others hold none.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cutefce.cute_kernels import spec
from cutefce.cute_kernels.problem import SLACK
from cutefce.cute_kernels.workspace import Semaphore
from cutefce.ops.primitives import cute_gradients, cute_projection


def model_of(kernel: spec.KernelSpec) -> Callable[..., None]:
    """Return the function that stands for a compiled kernel."""
    models: dict[type, Callable[..., None]] = {
        spec.TargetLogitSpec: _target_logit,
        spec.ProjectExpSpec: _project_exp,
        spec.ReducePartialsSpec: _finish,
        spec.FusedForwardSpec: _forward,
        spec.ScaleAddRowsSpec: _combine,
        spec.GradGemmSpec: _gradient,
        spec.AddTargetsSpec: _add_targets,
    }
    return functools.partial(models[type(kernel)], kernel)


def _target_logit(
    kernel: spec.TargetLogitSpec,
    h: Tensor,
    w: Tensor,
    y: Tensor,
    out: Tensor,
    zeros: Tensor,
    ignored: int,
) -> None:
    assert len(zeros) <= kernel.max_zeros(len(h))
    zeros.fill_(0)
    here = (y >= 0) & (y < len(w))
    out[:] = (h.float() * w[torch.where(here, y, 0)].float()).sum(1)
    out[~here] = torch.nan
    out[y == ignored] = torch.inf


def _project_exp(
    kernel: spec.ProjectExpSpec,
    h: Tensor,
    w: Tensor,
    reference: Tensor,
    target: Tensor,
    sums: Tensor | None,
    exps: Tensor | None,
    notes: Tensor,
    first: int,
    *_: int,
) -> None:
    relative = h.float() @ w.float().t() - reference[:, None]
    columns = torch.arange(first, first + len(w))
    relative[target[:, None] == columns] = -torch.inf
    if sums is not None:
        sums.fill_(-torch.inf)
        sums[:, 0] = relative.logsumexp(1) / math.log(2)
    if kernel.masked:
        assert notes[Semaphore.DONE_COUNTER] > 0, "after the kernel that notes blocks"
    else:
        assert not notes.any()
        notes[Semaphore.SYNC_COUNTER] = 1
    if exps is not None:
        blocks = torch.arange(len(h)) // kernel.config.rows
        rows = (
            notes[Semaphore.REPAIR_FLAGS + blocks] == 1
            if kernel.masked
            else torch.ones(len(h)) == 1
        )
        count = min(exps.shape[1], len(w))
        exps[rows, :count] = relative[rows, :count].exp().to(exps.dtype)


def _finish(
    kernel: spec.ReducePartialsSpec,
    parts: Tensor,
    logit: Tensor,
    target: Tensor,
    stats: Tensor,
    reduced: Tensor,
    notes: Tensor,
    ignored: int,
    mean: int,
) -> None:
    assert notes[Semaphore.DONE_COUNTER] == 0
    largest = parts.amax(1)
    far = largest > SLACK / math.log(2)
    reference = torch.where(far, logit + largest * math.log(2), logit)
    notes[Semaphore.REPAIR_FLAGS + far.nonzero()[:, 0] // kernel.rows] = 1
    notes[Semaphore.DONE_COUNTER] = 1
    distance = torch.where(reference == logit, 0, reference - logit)
    total = torch.exp2(parts - distance[:, None] / math.log(2)).sum(1)
    excess = total + torch.expm1(-distance)
    stats[:] = torch.stack([reference, total, excess + 1, distance + torch.log1p(excess)])
    reduced.copy_(stats[3].sum() / ((target != ignored).sum().clamp(min=1) if mean else 1))


def _forward(
    kernel: spec.FusedForwardSpec,
    h: Tensor,
    w: Tensor,
    y: Tensor,
    between: Tensor,
    stats: Tensor,
    reduced: Tensor,
    ignored: int,
    windows: int,
    clusters: int,
    mean: int,
) -> None:
    tokens, parts = len(h), windows * kernel.config.partials_per_row
    assert len(between) == kernel.workspace_size(tokens, windows)
    noted = len(between) - tokens * (1 + parts)
    logit, sums, rest = between.split([tokens, tokens * parts, noted])
    sums, notes = sums.view(tokens, parts), rest.view(torch.int32)
    model_of(kernel.target_logit)(h, w, y, logit, notes, ignored)
    model_of(kernel.sums)(h, w, logit, y, sums, None, notes, 0, windows, clusters)
    model_of(kernel.finish)(sums, logit, y, stats, reduced, notes, ignored, mean)


def _combine(
    _: Any,
    out: Tensor,
    x: Tensor,
    table: Tensor | None,
    scale: Tensor,
    weight: Tensor | None,
    index: Tensor | None,
) -> None:
    total = scale[:, None] * x.float()
    if table is not None and weight is not None and index is not None:
        total = total + weight[:, None] * table[index].float()
    out[:] = total.to(out.dtype)


def _gradient(
    kernel: spec.GradGemmSpec,
    a: Tensor,
    b: Tensor,
    out: Tensor,
    lists: Any,
    notes: Tensor,
    clusters: int,
    cuts: int | None,
    fresh: int | None,
) -> None:
    own = notes[: kernel.semaphore_count(clusters)]
    assert own.tolist() == [0] * kernel.semaphore_count(clusters)
    own.fill_(1)
    assert (cuts is None) == (fresh is None) == kernel.final
    product = a.float() @ b.float().t()
    if kernel.final:
        *targets, unit = lists
        _add_targets(None, product, *targets)
        out[:] = (product * unit).to(out.dtype)
    else:
        out[:] = product if fresh else out + product


def _add_targets(
    _: Any, sums: Tensor, order: Tensor, starts: Tensor, coefficient: Tensor, h: Tensor
) -> None:
    for row, (begin, end) in enumerate(zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)):
        some = slice(begin, end)
        sums[row] += (coefficient[some, None] * h[order[some]].float()).sum(0)


def use_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launch the models in the place of compiled kernels."""
    for module in (cute_projection, cute_gradients):
        monkeypatch.setattr(module, "compiled", model_of)
