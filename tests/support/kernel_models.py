"""Torch models of the kernels on a CPU, to test the host code that launches them without a GPU.

They round where the kernels round, and read and write the same memory.  All sums are written to
the first partial, the other partials are empty; so are reductions, but where each partial is of one
tile at most.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cutefce.autotune_cache.tuning.outputs import samples as checked
from cutefce.cute_kernels import kernel_set
from cutefce.cute_kernels import problem as problem_module
from cutefce.cute_kernels.arch.base import TILE_K, Arch
from cutefce.cute_kernels.config import KernelConfigs, PortableTiles
from cutefce.cute_kernels.integers import ceil_div
from cutefce.cute_kernels.problem import (
    FLOAT16_TOTAL,
    FLOAT32_LOW_BITS,
    GRADIENT_LOSS,
    LOWEST_LOGIT,
    SLACK,
    Problem,
)
from cutefce.cute_kernels.spec.divergence import DivergenceRowsSpec
from cutefce.cute_kernels.spec.gemm import GradGemmSpec, ProjectExpSpec
from cutefce.cute_kernels.spec.kernel import KernelSpec
from cutefce.cute_kernels.spec.rowwise import (
    OUT_AND_SUMS,
    MoveRowsSpec,
    PackedSumsSpec,
    PutSoftSpec,
    ReducePartialsSpec,
    RowCoefficientsSpec,
    ScaleAddRowsSpec,
    SelectRowsSpec,
    SoftLogitsSpec,
    SortTargetsSpec,
    TargetLogitSpec,
)
from cutefce.cute_kernels.spec.sampling import (
    ListSamplesSpec,
    PrepareSamplesSpec,
    SortSamplesSpec,
    SparseRowsSpec,
)
from cutefce.cute_kernels.variant import SUM_ONLY, LogitTransform
from cutefce.cute_kernels.workspace import (
    Coefficient,
    Move,
    Semaphore,
    Stat,
)
from cutefce.ops.divergence import kernels as divergence_kernels
from cutefce.ops.dtypes import dtype_name
from cutefce.ops.interface.arguments import LossCall
from cutefce.ops.operators import operands, operators, plans
from cutefce.ops.primitives import (
    cute_gradients,
    cute_projection,
    cute_rowwise,
    dispatch,
    select_rows,
)
from cutefce.ops.primitives.primitives import Primitives
from cutefce.ops.program import problem as program_problem
from cutefce.ops.program.plan import Plan
from cutefce.ops.rows import blocks as row_blocks
from cutefce.ops.rows.targets import Targets, variant_of
from cutefce.ops.sampling import kernels as sampling
from cutefce.ops.soft_targets import kernels as soft_kernels
from tests.support import divergence_models, sampling_models
from tests.support.packed_sums import joined_sums, split_sums
from tests.support.row_reductions import reduced


def model_of(kernel: KernelSpec) -> Callable[..., None]:
    """Return the function that replaces a compiled kernel."""
    models: dict[type, Callable[..., None]] = {
        SelectRowsSpec: _select_rows,
        MoveRowsSpec: _move_rows,
        TargetLogitSpec: _target_logit,
        SoftLogitsSpec: _soft_logits,
        PutSoftSpec: _put_soft,
        ProjectExpSpec: _project_exp,
        ReducePartialsSpec: _reduce_partials,
        ScaleAddRowsSpec: _scale_add_rows,
        PackedSumsSpec: _packed_sums,
        GradGemmSpec: _grad_gemm,
        RowCoefficientsSpec: _row_coefficients,
        SortTargetsSpec: _sort_targets,
        DivergenceRowsSpec: divergence_models.divergence_rows,
        PrepareSamplesSpec: sampling_models.prepare_samples,
        SortSamplesSpec: sampling_models.sort_samples,
        ListSamplesSpec: sampling_models.list_samples,
        SparseRowsSpec: sampling_models.sparse_rows,
    }
    return functools.partial(models[type(kernel)], kernel)


Replacement = Callable[[KernelSpec], Callable[..., None]]
"""From a kernel to what is launched instead."""
Transform = tuple[Any, ...]
"""κ (N,), b (V,) and s of a logit transform, None for what it lacks, and floors (N,) if any."""


def transformed(t: Tensor, transform: Transform | None) -> Tensor:
    """Return the model's logits for raw ones (N, V)."""
    row_scale, bias, slope = (transform or (None, None, None))[:3]
    u = t if bias is None else t + bias
    u = u if slope is None else torch.tanh(slope * u)
    return u if row_scale is None else row_scale[:, None] * u


def _check(kernel: Any, transform: Transform | None) -> None:
    given = transform or (None, None, None)
    assert kernel.transform == LogitTransform(*(operand is not None for operand in given))


def _select_rows(
    _: SelectRowsSpec,
    target: Tensor,
    order: Tensor,
    selected: Tensor,
    counts: Tensor,
    chunk: int,
    ignored: int,
) -> None:
    count = int((target != ignored).sum())
    order[:] = (target == ignored).long().argsort(stable=True)
    selected[:] = target[order]
    counts[:] = (count - chunk * torch.arange(len(counts))).clamp(0, chunk)


def _move_rows(
    kernel: MoveRowsSpec,
    out: Tensor,
    x: Tensor,
    order: Tensor | None,
    scale: Tensor | None,
    count: Tensor | None,
    move: int,
) -> None:
    assert (scale is not None) == (kernel.dtype is not None)
    assert (order is not None) == (count is not None) == kernel.orders
    rows = len(out) if count is None else int(count[0])
    if move == Move.SCATTER:
        assert order is not None
        out[order[:rows]] = x[:rows]
        out[order[rows:]] = 0
        return
    if move == Move.GATHER:
        moved = x[:rows] if order is None else x[order[:rows]]
        out[:rows] = moved if scale is None else (moved * scale[:rows, None]).to(out.dtype)
    out[rows:] = 0


def _soft_logits(
    _: SoftLogitsSpec,
    h: Tensor,
    w: Tensor,
    index: Tensor,
    coefficient: Tensor,
    logits: Tensor,
    order: Tensor,
    selects: int,
) -> None:
    rows = h[order] if selects else h
    products = (rows.float()[:, None] * w[index.clamp(0, len(w) - 1)].float()).sum(2)
    logits.copy_(torch.where(coefficient == 0, torch.nan, products))


def _put_soft(kernel: PutSoftSpec, *operands: Any) -> None:
    (_scale_soft if kernel.scales else _put_entries)(*operands)


def _put_entries(
    exps: Tensor,
    index: Tensor,
    coefficient: Tensor,
    entries: Tensor,
    first: int,
    clears: int,
) -> None:
    inside = (coefficient != 0) & (index >= first) & (index < first + exps.shape[1])
    row, place = inside.nonzero(as_tuple=True)
    values = torch.zeros_like(entries) if clears else entries
    exps[row, index[row, place] - first] = values[row, place].to(exps.dtype)


def _scale_soft(
    exps: Tensor,
    index: Tensor,
    coefficient: Tensor,
    entries: Tensor,
    lead: Tensor,
    of_lead: Tensor,
    scale: Tensor,
    first: int,
) -> None:
    exps.copy_(exps * scale[:, None])
    _put_entries(exps, index, coefficient, entries * scale[:, None], first, 0)
    rows = ((lead >= first) & (lead < first + exps.shape[1])).nonzero()[:, 0]
    exps[rows, lead[rows] - first] = of_lead[rows].to(exps.dtype)


def _counted(count: Tensor, selects: int, rows: int) -> int:
    """Return how many of `rows` rows count; -1 if nothing is computed."""
    if not selects:
        return rows
    return int(count[0]) if selects - 1 <= int(count[0]) <= rows else -1


def _target_logit(
    kernel: TargetLogitSpec,
    h: Tensor,
    w: Tensor,
    target: Tensor,
    logit: Tensor,
    zeros: Tensor,
    transform: Transform | None,
    order: Tensor,
    ignored: int,
    selects: int,
    class_row: tuple[Tensor, Tensor] | None = None,
) -> None:
    _check(kernel, transform)
    assert (class_row is not None) == kernel.class_row
    assert len(zeros) <= kernel.max_zeros(len(target))
    zeros.fill_(0)
    h = h[order] if selects else h
    if class_row is not None:
        row, products = class_row
        products[:] = torch.where(target == ignored, 0, (h.float() * row).sum(1))
    in_vocab = (target >= 0) & (target < len(w))
    index = torch.where(in_vocab, target, 0)
    logit[:] = (h.float() * w[index].float()).sum(1)
    if transform is not None:
        row_scale, bias, slope = transform[:3]
        own = row_scale, None if bias is None else bias[index, None], slope
        logit[:] = transformed(logit[:, None], own)[:, 0]
    logit.clamp_(min=LOWEST_LOGIT)
    logit[~in_vocab | (logit == torch.inf)] = torch.nan
    logit[target == ignored] = torch.inf


def _project_exp(
    kernel: ProjectExpSpec,
    h: Tensor,
    w: Tensor,
    reference: Tensor | None,
    target: Tensor | None,
    sums: Tensor | None,
    exps: Tensor | None,
    semaphores: Tensor,
    transform: Transform | None,
    reductions: Tensor | None,
    samples: tuple[Any, ...] | None,
    count: Tensor,
    selects: int,
    first: int,
    vocab_splits: int,
    *_: int,
) -> None:
    _check(kernel, transform)
    counted = _counted(count, selects, len(h))
    if sums is not None:
        splits = sums.shape[1] // kernel.config.partials_per_row
        assert splits >= vocab_splits if selects else splits == vocab_splits
    if counted < 0:
        return
    u = transformed(h.float() @ w.float().t(), transform)
    if kernel.logits:
        assert sums is not None and exps is not None and reductions is not None
        assert not (selects or semaphores.any()) and reference is target is None
        semaphores[Semaphore.SYNC_COUNTER] = 1
        exps[:] = u
        sums[:], reductions[0] = divergence_models.sums_of(u, sums.shape[1])
        return
    assert reference is not None and target is not None
    columns = torch.arange(first, first + len(w))
    is_target = target[:, None] == columns
    if kernel.transform.floor:
        assert transform is not None
        u.masked_fill_((u < transform[3][:, None]) & ~is_target, -torch.inf)
    masked = u.masked_fill(is_target, -torch.inf)
    relative = masked - reference[:, None]
    if sums is not None:
        sums.fill_(-torch.inf)
        sums[:, 0] = relative.logsumexp(1) / math.log(2)
    assert (reductions is not None) == (kernel.reductions != SUM_ONLY)
    if reductions is not None:
        no_logits, no_target = torch.full((1, 1), -torch.inf), target.new_tensor([-1])
        of_none = reduced(no_logits, no_target, reference[:1], first, kernel.reductions)
        reductions[:] = of_none[:, :, None]
        if kernel.reductions.of_all:
            assert (target < first + len(w)).all(), "classes behind the window are -1"
        columns_of = {0: slice(0, len(w))}
        tiles, parts = ceil_div(len(w), kernel.config.tile_n), kernel.config.partials_per_row
        if tiles <= vocab_splits * parts:  # each part has one tile at most
            columns_of = {
                tile % vocab_splits * parts + tile // vocab_splits: columns
                for tile, columns in enumerate(row_blocks.blocks(len(w), kernel.config.tile_n))
            }
        for part, own in columns_of.items():
            given = reference, first + own.start, kernel.reductions
            reductions[..., part] = reduced(u[:, own], target, *given)
    inside = torch.arange(len(h)) < counted
    assert (samples is not None) == kernel.samples
    if samples is not None:
        scale = None if transform is None or not kernel.transform.softcap else transform[0]
        sampling_models.sample(masked[:counted], columns, scale, samples)
    if sums is not None:
        sums[~inside] = torch.nan  # undefined
    if reductions is not None:
        reductions[:, ~inside] = torch.nan
    last = max(1, ceil_div(counted, kernel.config.rows)) * kernel.config.rows
    rows = torch.arange(len(h)) < last
    if kernel.only_flagged:
        assert semaphores[Semaphore.DONE_COUNTER] > 0, "runs after reduce_partials"
        blocks = torch.arange(len(h)) // kernel.config.rows
        rows &= semaphores[Semaphore.REPAIR_FLAGS + blocks] == 1
    else:
        assert not semaphores.any()
        semaphores[Semaphore.SYNC_COUNTER] = 1
    if exps is not None:
        width = min(exps.shape[1], len(w))
        stored = relative.exp()
        if kernel.transform.softcap:
            assert transform is not None and transform[0] is not None
            stored *= (1 - (u / transform[0][:, None]) ** 2).clamp(min=0)
        stored[~inside] = 0
        exps[rows, :width] = stored[rows, :width].to(exps.dtype)
        if not kernel.only_flagged:
            exps[~rows] = torch.nan  # undefined


def _reduce_partials(
    kernel: ReducePartialsSpec,
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
    semaphores[Semaphore.REPAIR_ROWS] = len(logit) * int(far.any())
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


def _scale_add_rows(
    kernel: ScaleAddRowsSpec,
    out: Tensor,
    x: Tensor,
    table: Tensor,
    row_scale: Tensor,
    gather_scale: Tensor,
    index: Tensor,
    rank_one: tuple[Tensor, Tensor] | None,
    order: Tensor,
    scatters: int,
) -> None:
    assert (rank_one is not None) == kernel.rank_one
    total = row_scale[:, None] * x.float()
    rows = table[index.clamp(0, len(table) - 1)]
    total = total + gather_scale[:, None] * rows.float()
    is_zero = (row_scale == 0) & (gather_scale == 0)
    if rank_one is not None:
        factor, row = rank_one
        total = total + factor[:, None] * row
        is_zero &= factor == 0
    total[is_zero] = 0
    if scatters:
        assert out.data_ptr() != x.data_ptr()
        out[order] = total.to(out.dtype)
    else:
        out[:] = total.to(out.dtype)


def _packed_sums(kernel: PackedSumsSpec, *operands: Any) -> None:
    steps: dict[str, Callable[..., None]] = {"pack": _pack_sums, "finish": _finish_packed}
    steps.get(kernel.step, _scale_packed)(kernel, *operands)


def _pack_sums(
    kernel: PackedSumsSpec,
    packed: Tensor,
    low: Tensor,
    sums: Tensor,
    table: Tensor,
    target: Tensor,
    others: Tensor,
    ignored: int,
    order: Tensor,
    scatters: int,
) -> None:
    index = target.clamp(0, len(table) - 1)
    total = sums - others[:, None] * table[index].float()
    assert low.shape[1] == packed.shape[1] * kernel.low_bits // 8
    upper, byte = packed.new_empty(sums.shape), low.new_empty(len(sums), low.shape[1])
    split_sums(upper, byte, total.masked_fill(target[:, None] == ignored, 0))
    places = order if scatters else torch.arange(len(sums))
    assert scatters or len(packed) == len(sums)
    packed[places], low[places] = upper, byte


def _finish_packed(
    kernel: PackedSumsSpec,
    out: Tensor,
    packed: Tensor,
    low: Tensor,
    table: Tensor,
    target: Tensor,
    scale: Tensor,
    target_scale: Tensor,
    rank_one: tuple[Tensor, Tensor] | None,
    order: Tensor,
    scatters: int,
) -> None:
    assert (rank_one is not None) == kernel.rank_one
    names = kernel.arch, kernel.dtype, "float32", kernel.dtype, kernel.rank_one
    sums, index = joined_sums(packed, low), target.clamp(0, len(table) - 1)
    assert low.shape[1] == packed.shape[1] * kernel.low_bits // 8
    sums = sums[order] if scatters == OUT_AND_SUMS else sums
    rows = table, scale, target_scale, index, rank_one, order, scatters
    _scale_add_rows(ScaleAddRowsSpec(*names), out, sums, *rows)


def _scale_packed(kernel: PackedSumsSpec, packed: Tensor, low: Tensor, factor: Tensor) -> None:
    assert low.shape[1] == packed.shape[1] * kernel.low_bits // 8
    if kernel.step == "scale":
        split_sums(packed, low, joined_sums(packed, low) * factor[:, None])
    else:
        packed[:] = (joined_sums(packed, low) * factor).to(packed.dtype)


def _grad_gemm(
    kernel: GradGemmSpec,
    a: Tensor,
    b: Tensor,
    out: Any,
    targets: Any,
    rank_one: tuple[Tensor, Tensor] | None,
    semaphores: Tensor,
    count: Tensor,
    selects: int,
    clusters: int,
    k_splits: int | None,
    overwrite: int | None,
) -> None:
    tokens = a.shape[1] if kernel.wrt == "weight" else len(a)
    e = a.t() if kernel.wrt == "weight" else a
    assert e.stride(1) == 1 and (len(e) == 1 or e.stride(0) % 8 == 0)
    counted = _counted(count, selects, tokens)
    counters = semaphores[: kernel.semaphore_count(clusters)]
    assert counters.tolist() == [0] * kernel.semaphore_count(clusters)
    counters.fill_(1)
    if counted < 0:
        return
    assert (k_splits is None) == (kernel.final or kernel.packed)
    assert (overwrite is None) == kernel.final
    assert (rank_one is not None) == kernel.rank_one
    if kernel.wrt == "weight" and selects:
        # whole stages are read
        counted = min(max(1, ceil_div(counted, TILE_K)) * TILE_K, tokens)
        a, b = a[:, :counted], b[:, :counted]
    product = a.float() @ b.float().t()
    if kernel.wrt == "hidden":
        product[counted:] = torch.nan  # undefined
    if rank_one is not None:
        product += rank_one[0][:, None] * rank_one[1]
    if kernel.has_targets:
        *csr, grad_scale = targets
        _add_targets(product, *csr)
        assert (grad_scale is None) == kernel.packed
        product *= 1 if grad_scale is None else grad_scale
    if kernel.final:
        out[:] = product.to(out.dtype)
    elif kernel.low_bits == FLOAT32_LOW_BITS:
        sums, low = out
        assert sums.dtype == torch.float32 and low is None
        sums[:] = product if overwrite else sums + product
    elif kernel.packed:
        packed, low = out
        split_sums(packed, low, product if overwrite else joined_sums(packed, low) + product)
    else:
        out[:] = product if overwrite else out + product


def _row_coefficients(
    kernel: RowCoefficientsSpec,
    stats: Tensor,
    target: Tensor,
    upstream: Tensor,
    coefficients: Tensor,
    grad_scale: Tensor,
    zeros: Tensor,
    count: Tensor,
    selects: int,
    ignored: int,
    mean: int,
) -> None:
    zeros.fill_(0)
    coefficients.fill_(torch.nan)
    active = target != ignored
    assert not selects or int(active.sum()) == int(count[0])
    given = upstream / active.sum().clamp(min=1) if mean else upstream
    total = FLOAT16_TOTAL if kernel.narrow else 1.0
    over = torch.full_like(given[:1], total) if kernel.in_reference else given
    scale = torch.where(active, over / stats[Stat.SUM_EXP], 0)
    gradient = -scale * stats[Stat.SUM_EXP_OTHERS]
    factor = torch.ones(())
    if kernel.in_reference:
        factor = given[0] / total
        coefficients[Coefficient.REFERENCE] = stats[Stat.REFERENCE] - scale.log()
    elif kernel.narrow:
        largest = scale.abs().amax()
        factor = torch.where(largest == 0, 1, largest)
        coefficients[Coefficient.DW_SCALE] = scale / factor
    grad_scale.copy_(factor)
    if kernel.in_reference:
        coefficients[Coefficient.DW_SCALE] = scale
        coefficients[Coefficient.DW_TARGET] = gradient
        scale = torch.where(active, factor, 0)
        gradient = gradient * scale
    elif kernel.narrow:
        coefficients[Coefficient.DW_TARGET] = gradient / factor
    coefficients[: Coefficient.DW_SCALE] = torch.stack([scale, gradient])


def _sort_targets(
    _: SortTargetsSpec,
    target: Tensor,
    coefficient: Tensor,
    rows: Tensor,
    order: Tensor,
    offsets: Tensor,
    sorted_coefficient: Tensor,
    ignored: int,
    maps: int,
) -> None:
    vocab = len(offsets) - 1
    inside = (target != ignored) & (target >= 0) & (target < vocab)
    key, tokens = torch.where(inside, target, vocab).sort(stable=True)
    offsets[:] = torch.searchsorted(key, torch.arange(vocab + 1))
    order[:] = rows[tokens] if maps else tokens
    sorted_coefficient[:] = coefficient[tokens]
    order[offsets[-1] :], sorted_coefficient[offsets[-1] :] = -1, torch.nan


def _add_targets(sums: Tensor, order: Tensor, offsets: Tensor, coef: Tensor, h: Tensor) -> None:
    if not len(order):
        return
    begins, ends = offsets[:-1].tolist(), offsets[1:].tolist()
    rows = [row for row, span in enumerate(zip(begins, ends, strict=True)) if span[0] < span[1]]
    for row in rows:  # a target's tokens are added before they are added to its row
        slots = slice(begins[row], ends[row])
        sums[row] += (coef[slots, None] * h[order[slots]].float()).sum(0)


def serve_calls(
    monkeypatch: pytest.MonkeyPatch,
    arch: Arch,
    tiles: PortableTiles,
    *,
    selects: bool,
    configs: KernelConfigs | None = None,
    replacement: Replacement | None = None,
    num_sms: int = 132,
) -> None:
    """Route calls on a CPU to models of the kernels, which select rows or compute all.

    `configs` are those of the kernels, by default the architecture's; the models may have another
    `replacement`.  More than a few parameters: they stand for a GPU.
    """
    use_models(monkeypatch, replacement or model_of)
    if configs is None:
        configs = arch.default_configs(tokens=8192, hidden=4096, num_sms=132)
        # windows of few columns have the kernel that scales exponentials, too
        configs = dataclasses.replace(configs, grad_hidden_short=configs.grad_hidden)

    def problem_of(h: Tensor, *others: Any) -> Problem:
        own = dispatch.problem_of(h, *others)
        dtype = dtype_name(h.dtype)
        return dataclasses.replace(own, arch=arch.name, dtype=dtype)

    def primitives_for(
        h: Tensor, w: Tensor, problem: Problem, tiles: PortableTiles, targets: Targets, *_: Any
    ) -> Any:
        if problem.arch is None:
            return Primitives(tiles)
        variant = variant_of(targets)
        kernels = kernel_set.kernel_set(arch, problem.dtype, configs, variant)
        return dispatch.kernel_primitives(tiles, kernels, num_sms, problem.grad_bias)

    def plan_of(x: LossCall) -> Plan:
        """Plan without knowing how many tokens count, as on a GPU."""
        # that of `layouts.pinned`, if there is one
        plan: Plan = vars(operands)["plan_for"](x)
        return plan

    monkeypatch.setattr(problem_module, "MIN_SELECTED", 1 if selects else 1 << 30)
    monkeypatch.setattr(operators, "plan_of", plan_of)
    monkeypatch.setattr(plans, "problem_of", problem_of)
    monkeypatch.setattr(program_problem, "window_configs", lambda *_: (tiles,))
    monkeypatch.setattr(operands, "primitives_for", primitives_for)


def use_models(
    monkeypatch: pytest.MonkeyPatch,
    replacement: Replacement = model_of,
) -> None:
    """Launch the models, or another replacement, in the place of compiled kernels: unverified."""
    monkeypatch.setattr(dispatch, "_unproven_reason", lambda *_: None)
    modules = cute_projection, cute_gradients, cute_rowwise, dispatch
    for module in (*modules, select_rows, sampling, divergence_kernels, soft_kernels, checked):
        monkeypatch.setattr(module, "compiled", replacement)
