"""The plan of a call.

Operators make their plans when they run, where sizes are integers: a graph compiler sees no
comparison of sizes, and one graph serves all of them.
"""

from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from cutefce.cute_kernels.problem import MIN_SELECTED, Problem, can_keep
from cutefce.cute_kernels.process_cache import MAX_ENTRIES, on_reset, process_cache
from cutefce.ops import torch_compat
from cutefce.ops.dtypes import sum_dtype
from cutefce.ops.interface.arguments import LossCall, LossOptions, TensorOptions
from cutefce.ops.outputs.needs import needs_of
from cutefce.ops.primitives.dispatch import (
    options_unsupported_reason,
    problem_of,
    triton_serves,
    try_compiler,
)
from cutefce.ops.primitives.products import is_dense
from cutefce.ops.primitives.select_rows import has_aligned_rows
from cutefce.ops.program.layout import Layout
from cutefce.ops.program.plan import Plan, plan
from cutefce.ops.program.problem import LossProblem, Upstream
from cutefce.ops.program.weight import can_add_in_place
from cutefce.ops.rows.logit_map import copies_tiles
from cutefce.ops.rows.targets import OUTPUTS
from cutefce.ops.sampling.kernels import is_in_place, unsupported_reason

SORTED = 1.05
"""Times the time of a plan that one may take which could leave out tokens, if all count."""

_plans: dict[Any, Plan] = {}
on_reset(_plans.clear)


def plan_for(x: LossCall, counted: int | None = None, leaves_out: bool = False) -> Plan:
    """Return the plan of this rank's part of a call.

    It is made once for a layout of operands.  `counted` tokens count, if the host knows that.  The
    plan computes them alone, if `leaves_out` says so, or if with a copy of their hidden states and
    one of their dX it takes no more memory than the plan for all.
    """
    h, w, _, step, options, tensors, sharding = x
    operands = layout_of(h), layout_of(w), *map(layout_of, tensors.given.values())
    records = step, options, *tensors.given, sharding.group, *(sharding.shards or ())
    key = operands, records, sharding.sequence_parallel, counted, leaves_out
    found = _plans.get(key)
    if found is None:
        if sharding.group is not None:  # ranks cannot fall back once they have agreed
            try_compiler(h.device, h.dtype)
        leading = own = loss_problem(x)
        if sharding.group is not None:
            widest = max(sharding.shards) if sharding.shards else own.vocab
            leading = own.of_ranks(widest, tensors.grad_output is not None)
        found = _plan_like(leading, own, (h.device, step.budget), counted, leaves_out)
        # kernels that do not serve a call in a graph's capture may serve the next one
        if not (h.is_cuda and torch.cuda.is_current_stream_capturing()):
            if len(_plans) >= MAX_ENTRIES:
                _plans.clear()
            _plans[key] = found
    return found


def layout_of(x: Tensor) -> tuple[Any, ...]:
    """Return what plans depend on of a tensor."""
    return x.dtype, x.shape, x.stride(), x.data_ptr() % 16, x.device


def _plan_like(
    leading: LossProblem,
    own: LossProblem,
    more: tuple[torch.device, int],
    counted: int | None,
    leaves_out: bool,
) -> Plan:
    """Return the plan of the problem `own`, with the chunks and the tokens of the leading one's.

    Ranks must use the same strategy and chunks, but may have different shards, copies and buffers:
    these are planned for the widest shard, without copies, and a buffer that GEMMs can add to.
    `more` are the device and the budget, the others arguments of `plan_for`.
    """
    if counted is not None and counted < own.tokens:
        part = leading.of_tokens(counted)
        limit = _plan(leading, *more).workspace_bytes
        if leaves_out or _plan(part, *more).workspace_bytes <= limit:
            leading, own = part, own.of_tokens(counted)
    may_sort = leading.triton and leading.needs_gradients
    if may_sort and leading.tokens >= MIN_SELECTED:
        as_given, sorted_first = _plan(leading, *more), _plan(leading.sorted(), *more)
        is_cheap = sorted_first.seconds <= SORTED * as_given.seconds
        if sorted_first.workspace_bytes <= more[1] and is_cheap:
            leading, own = leading.sorted(), own.sorted()
    made = _plan(leading, *more)
    return made if leading == own else _plan(own, *more, made.layout)


def loss_problem(x: LossCall) -> LossProblem:
    """Return what the plan of this rank's part of a call depends on."""
    h, w, _, step, options, tensors, sharding = x
    in_group, ranks = sharding.group is not None, sharding.ranks()
    tokens = h.shape[0] * ranks if sharding.sequence_parallel else None
    own = problem_of(h, w, *step.gradients, tokens)
    is_served = own.arch is not None
    if is_served and options_unsupported_reason(own, h.device, options, tensors) is not None:
        is_served, own = False, replace(own, arch=None, triton=triton_serves(h, w))
    samples = 0
    if is_served and options.is_sampled and any(step.gradients):
        reason = unsupported_reason(own, h.device, options, tensors)
        samples = options.samples if reason is None else 0
    buffer = tensors.accumulate_into if step.grad_weight else None
    in_place = buffer is None or can_add_in_place(buffer, h.dtype, sum_dtype(h.dtype))
    upstream = Upstream.SCALAR if options.is_scalar else Upstream.ROWS
    if buffer is not None and in_place and tensors.grad_output is not None:
        upstream = Upstream.KNOWN
    if buffer is not None and samples:
        in_place = is_in_place(buffer, h.dtype)
    soft = 0 if tensors.target_indices is None else tensors.target_indices.shape[-1]
    return LossProblem(
        **asdict(own),
        upstream=upstream,
        soft=soft if soft > 1 else 0,
        returns_classes=soft > 1 and options.reduction == OUTPUTS,
        stores=can_keep(own.dtype) and not samples,
        selects=own.selects_rows,
        wide_grad_weight=tensors.weight_cast is not None or buffer is not None,
        into=0 if buffer is None else buffer.itemsize,
        adds_in_place=in_place,
        samples=samples,
        ranks=ranks if in_group else 0,
        sequence_parallel=sharding.sequence_parallel,
        copied_hidden=step.copied_hidden,
        copied_weight=step.copied_weight,
        copied=_copied_bytes(own, h, w, sharding.sequence_parallel),
        **option_fields(options, tensors, is_served),
    )


def option_fields(
    options: LossOptions, tensors: TensorOptions, has_kernels: bool
) -> dict[str, Any]:
    """Return the fields of a problem that options decide alone, on kernels in CuTe or others."""
    return {
        "scales_rows": options.scales_rows or tensors.scales_rows,
        "every_class": options.label_smoothing != 0 or "mean_logit" in options.output_names,
        "scales_exps": options.scales_exps,
        "outputs": needs_of(options, has_kernels),
        "tile_copies": max(int(copies_tiles(options, tensors)), 2 * options.reduces_rows),
    }


def copied_item_bytes(given: Tensor, taken: Tensor) -> int:
    """Return the bytes per element of a tensor `given` to a call that works on `taken` instead.

    0 if `taken` is `given` or a view of it.  It does not depend on sizes.
    """
    if taken is given or torch_compat.shares_memory(given, taken):
        return 0
    return given.element_size()


def _copied_bytes(of: Problem, h: Tensor, w: Tensor, is_gathered: bool) -> int:
    """Return the bytes of h (N, D) and w (V, D) that `PortableProjection.prepare` copies.

    Hidden states that a rank has gathered need no copy.
    """
    accepts = has_aligned_rows if of.arch is not None or of.triton else is_dense
    return sum(x.nbytes for x in ((w,) if is_gathered else (h, w)) if not accepts(x))


@process_cache
def _plan(p: LossProblem, device: torch.device, budget: int, like: Layout | None = None) -> Plan:
    """Return the plan of a problem; with a layout `like`, of chunks of as many tokens."""
    return replace(plan(p, budget, like), device=device)
