"""Steps of sampled gradients on the CuTe DSL kernels: what their launches are given.

Where a token's estimate of lse is too low, its lse decides in the end: of the entries that were
kept, `sort_samples` leaves out those that lse does not keep.  If there was no room for them, the
token is sampled once more, with its lse; this finds the same entries, so that what decides on it,
the number of those before, has no part in the result.  The launches exit at once where there is no
such token.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, cast

import torch
from torch import Tensor

from cutefce.autotune_cache.verdicts import SAMPLES
from cutefce.cute_kernels.jit.cache import compiled
from cutefce.cute_kernels.problem import MAX_SELECTED, Problem
from cutefce.cute_kernels.sampling_set import MAX_SAMPLE_SLOTS, sort_entries, weight_sums
from cutefce.cute_kernels.spec.sampling import (
    ListSamplesSpec,
    PrepareSamplesSpec,
    SparseRowsSpec,
)
from cutefce.ops.dtypes import dtype_name
from cutefce.ops.interface.arguments import LossOptions, TensorOptions
from cutefce.ops.outputs.needs import unsampled_reason
from cutefce.ops.primitives.cute_projection import CuteProjection
from cutefce.ops.primitives.dispatch import unproven_reason
from cutefce.ops.primitives.portable_projection import Logits
from cutefce.ops.primitives.select_rows import (
    gather_rows,
    has_aligned_rows,
    row_order,
    select_on_device,
)
from cutefce.ops.program.hidden import class_term, finish_dx
from cutefce.ops.program.run import Call
from cutefce.ops.program.steps import Home, Step
from cutefce.ops.program.weight import every_row, finish_dbias
from cutefce.ops.rows.blocks import blocks
from cutefce.ops.rows.coefficients import RowCoefficients
from cutefce.ops.rows.packed_sums import Sums
from cutefce.ops.rows.selection import RowSelection
from cutefce.ops.rows.targets import Targets
from cutefce.ops.sampling.estimates import class_sums
from cutefce.ops.sampling.sample_sizes import slots
from cutefce.ops.sampling.steps import SampleKind


def _projection(call: Call) -> CuteProjection:
    return cast(CuteProjection, call.inputs.primitives)


def _arch(call: Call) -> str:
    return _projection(call).kernels.row_sums.arch


def _log2_samples(call: Call) -> float:
    return math.log2(call.program.problem.samples)


@dataclass(frozen=True)
class Entries:
    """The entries that were chosen of N tokens, K at most of each."""

    entries: Tensor
    """(N, K) int64: v above e / q in 32 bits, ascending; u in its place until they are sorted."""
    threshold: Tensor
    """(N,) that of `common.sampling`."""
    counts: Tensor
    """(N,) int32: entries of each token; -1 for none, where more were kept than fit."""
    row_hash: Tensor
    """(N,) int32"""

    @staticmethod
    def of(call: Call) -> "Entries":
        """Return those of a call."""
        threshold, *words = call.view("drawn")
        entries = call.view("entries").view(torch.int64)
        return Entries(entries, threshold, *(x.view(torch.int32) for x in words))


def estimate(call: Call, s: Step) -> None:
    """Estimate log-sum-exps, +inf of ignored tokens."""
    (frequent, drawn, log_ratio), logit = class_sums(call, s), call.values["logits"]
    result = call.values["estimate"] = torch.empty_like(logit)
    sums = drawn.sums if frequent is None else frequent.sums
    numbers = log_ratio / math.log(2), int(frequent is None)
    kernel = PrepareSamplesSpec(_arch(call), "estimate")
    compiled(kernel)(sums, drawn.sums, logit, result, *numbers)


def sample(call: Call, s: Step) -> None:
    """Sum the exponentials of all columns, and append the entries that the estimates keep.

    The sums have the bits of those of `project_exp`.
    """
    own, targets = Entries.of(call), call.inputs.targets
    order, selects = row_order(targets.order, targets.index)
    rows = call.values.pop("estimate"), order, targets.tensors.seed
    results = own.threshold, own.row_hash, own.counts
    kernel = PrepareSamplesSpec(_arch(call), "first")
    compiled(kernel)(*rows, *results, _log2_samples(call), selects)
    given = call.states(s), call.values["logits"], targets
    call.values["partials"].append(_fill(call, own, *given))


def _fill(
    call: Call,
    own: Entries,
    h: Tensor,
    reference: Tensor,
    targets: Targets,
    order: Tensor | None = None,
) -> Any:
    """Append the entries of rows, or of rows `order` (N,); return row sums."""
    maps = row_order(order, targets.index)
    chosen = own.threshold, own.row_hash, own.counts, own.entries, targets.first, *maps
    w, projection = call.inputs.w, _projection(call)
    logits = Logits(h, w, (0, len(w)), reference, targets)
    return projection.launch_sums(projection.kernels.sampled_sums, logits, samples=chosen)


def _sample_again(call: Call, s: Step) -> None:
    """Sample tokens without room for their entries again, with their log-sum-exps."""
    own, targets, stats = Entries.of(call), call.inputs.targets, call.values["stats"]
    projection, ignored = _projection(call), targets.options.ignore_index
    again = torch.where(own.counts > own.entries.shape[1], targets.index, ignored)
    arch = _arch(call)
    selection = select_on_device(arch, again, ignored, len(again)).skipping()
    order, reference = selection.order, torch.empty_like(own.threshold)
    given = order, selection.count, stats.reference, stats.sum_exp
    results = own.threshold, own.counts, reference
    kernel = PrepareSamplesSpec(arch, "again")
    compiled(kernel)(*given, *results, _log2_samples(call))
    rows = gather_rows(projection.kernels, call.states(s), selection, out=call.view("again"))
    _fill(call, own, rows, reference, _of_rows(targets, selection), order)


def _of_rows(targets: Targets, selection: RowSelection) -> Targets:
    """Return `targets` of the rows of a selection of them, as far as row sums need them."""
    logits, options = targets.logits, targets.options.per_token()
    logits = None if logits is None else logits.rows(selection.order)
    part = Targets(selection.targets, targets.vocab, options, logits=logits, first=targets.first)
    part.selection = selection
    return part


def finish_entries(call: Call, s: Step) -> None:
    """Sort the entries that the log-sum-exps keep, and give them their values."""
    _sample_again(call, s)
    own, targets, stats = Entries.of(call), call.inputs.targets, call.values["stats"]
    transform = _projection(call).kernels.row_sums.transform
    kernel = sort_entries(_arch(call), own.entries.shape[1], transform.softcap)
    scale = None if targets.logits is None or not kernel.softcap else targets.logits.row_scale
    vectors = own.counts, own.threshold, own.row_hash, stats.reference, stats.sum_exp, scale
    compiled(kernel)(own.entries, *vectors, _log2_samples(call), targets.first)


def sparse_hidden(call: Call, s: Step) -> None:
    """Write s_i Σ (e / q) w_v + c_i w_y of token i to its row of dX."""
    x, factors = call.inputs, call.values["scaling"].dx
    order = x.targets.order
    if class_term(x, factors) is None:
        _sparse_hidden(call, call.view("dx"), factors, order)
        return
    # the class row's part is added before dX is rounded
    sums = call.view("sums")
    _sparse_hidden(call, sums, factors, None)
    ones, zeros = x.targets.active.to(sums.dtype), torch.zeros_like(factors.target)
    finish_dx(x, call.view("dx"), Sums(sums), replace(factors, scale=ones, target=zeros), order)


def _sparse_hidden(call: Call, out: Tensor, factors: RowCoefficients, order: Tensor | None) -> None:
    """Write to row i, or `order`_i, of `out` (N, D)."""
    own, w, index = Entries.of(call), call.inputs.w, call.inputs.targets.index
    spec = SparseRowsSpec(_arch(call), dtype_name(w.dtype), "hidden", blocks=3)
    rows = own.entries, own.counts, factors.scale.contiguous(), factors.target.contiguous()
    places = index, *row_order(order, index)
    compiled(_with_result(spec, out))(out, w, (*rows, *places))


def list_entries(call: Call, s: Step) -> None:
    """List the entries of every class, with s_i e / q, and c_i of its targets.

    See `cute_kernels.sampling.list_samples`.
    """
    own, targets, factors = Entries.of(call), call.inputs.targets, call.values["scaling"].dx
    states = call.states(s) if call.program.problem.grad_weight else None
    row = None if states is None else every_row(call.inputs, factors.every, states)
    # 0, or NaN if a token has no defined gradient
    start = own.threshold.new_empty(1)
    call.values |= {"row": row, "start": start}
    lists, ends, *between = _lists(call, s.writes)
    rows = own.entries, own.counts, targets.index
    coefficients = factors.scale.contiguous(), factors.target.contiguous()
    maps = row_order(targets.order, targets.index)
    # of float16, the reference tells which rows have no gradient
    more = call.values["stats"].reference, targets.options.ignore_index
    results = lists, ends, *between, start
    compiled(ListSamplesSpec(_arch(call)))((*rows, *coefficients, *maps, *more), results)


def _lists(call: Call, names: tuple[str, ...]) -> list[Tensor]:
    """Return lists (M,) int64, and (.,) int32 what is known of them, of these names."""
    found = [call.view(name)[0].view(torch.int32) for name in names]
    return [found[0].view(torch.int64), *found[1:]]


def sparse_weight(call: Call, s: Step) -> None:
    """Write dW (V, D), or add to it, and the gradient of the bias.

    Sums are formed beside dW where more is added to these, or kernels cannot add to its memory.
    """
    x, p, adds = call.inputs, call.program.problem, call.program.problem.into > 0
    dw = x.accumulate_into if adds else call.memory.get(Home.DW)
    row, dbias = call.values.pop("row"), None
    if p.grad_bias:
        dbias = call.values["dbias"] = call.values["stats"].rows.new_zeros(p.vocab)
    if "room" in s.writes:
        room = call.view("room")
        for rows in blocks(p.vocab, len(room)):
            sums = room[: rows.stop - rows.start]
            _sparse_weight(call, sums, None if dbias is None else dbias[rows], rows.start)
            if row is not None:
                term = row.rows(rows)
                sums.addr_(term.factor, term.row)
            if dw is not None and adds:
                dw[rows] += sums
            elif dw is not None:
                dw[rows] = sums
    else:
        assert dw is not None
        _sparse_weight(call, dw, dbias, 0, adds=adds)
    if dbias is not None:
        finish_dbias(dbias, x.targets, None, call.values["scaling"].dx.every)


def _sparse_weight(
    call: Call, out: Tensor, dbias: Tensor | None, first: int, *, adds: bool = False
) -> None:
    """Write rows of dW from `first` on to `out` (K, D), or add to it, and sums to `dbias` (K,)."""
    h = call.inputs.h
    spec = weight_sums(_arch(call), dtype_name(h.dtype), call.program.problem.tokens)
    spec = replace(_with_result(spec, out), adds=adds, bias=dbias is not None)
    lists, ends = _lists(call, ("lists", "ends"))
    own = lists, ends[first : first + len(out) + 1], call.values["start"], dbias
    compiled(spec)(out, h, own)


def _with_result(spec: SparseRowsSpec, out: Tensor) -> SparseRowsSpec:
    """Return the kernel whose result has the dtype of `out`."""
    name = dtype_name(out.dtype)
    return spec if name == spec.dtype else replace(spec, out=name)


def unsupported_reason(
    problem: Problem, device: torch.device, options: LossOptions, tensors: TensorOptions
) -> str | None:
    """Return why kernels that serve a call cannot sample its gradients, None if they can."""
    tokens, most = problem.tokens, slots(options.samples)
    reason = unsampled_reason(options)
    if reason is not None:
        return reason
    if tensors.logit_floor is not None:
        return "logit_floor: got one, with which no kernel samples"
    if tensors.soft_targets:
        return "target_indices: got several classes of a token, whose gradients no kernel samples"
    if most > MAX_SAMPLE_SLOTS:
        taken = f"{most} slots, expected at most {MAX_SAMPLE_SLOTS}"
        return f"samples: got {options.samples}, which take {taken}"
    if tokens > MAX_SELECTED or tokens * max(problem.hidden, most + 1) >= 1 << 31:
        return f"input: got {tokens} tokens, more than gradient='sampled' can index"
    return None if device.type == "meta" else unproven_reason(device, problem.dtype, SAMPLES)


def is_in_place(buffer: Tensor, dtype: torch.dtype) -> bool:
    """Whether kernels with operands of `dtype` can add to `buffer` (V, D)."""
    return has_aligned_rows(buffer) and buffer.dtype in (dtype, torch.float32)


SAMPLING: dict[Enum, Callable[[Call, Step], None]] = {
    SampleKind.ESTIMATE: estimate,
    SampleKind.SAMPLE: sample,
    SampleKind.FINISH_ENTRIES: finish_entries,
    SampleKind.LIST: list_entries,
    SampleKind.SPARSE_HIDDEN: sparse_hidden,
    SampleKind.SPARSE_WEIGHT: sparse_weight,
}
"""Which function runs which step of sampled gradients."""
