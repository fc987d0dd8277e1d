"""The plan of a call.

Operators make their plans when they run, where sizes are integers: a graph compiler sees no
comparison of sizes, and one graph serves all of them.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cutefce.autotune_cache.defaults import window_configs
from cutefce.cute_kernels.problem import MIN_SELECTED, Problem, can_keep
from cutefce.cute_kernels.process_cache import MAX_ENTRIES, on_reset, process_cache
from cutefce.ops import torch_compat
from cutefce.ops.costs.device import device_of
from cutefce.ops.dtypes import sum_dtype
from cutefce.ops.interface.options import LossCall
from cutefce.ops.primitives.dispatch import (
    options_unsupported_reason,
    problem_of,
    sampling_unsupported_reason,
    triton_serves,
    try_compiler,
)
from cutefce.ops.primitives.portable_projection import is_dense, planes
from cutefce.ops.primitives.select_rows import has_aligned_rows
from cutefce.ops.program.cost_model import Copies, CostModel
from cutefce.ops.program.layout import Layout
from cutefce.ops.program.plan import Plan, plan
from cutefce.ops.program.problem import LossProblem, Upstream
from cutefce.ops.program.weight import can_add_in_place
from cutefce.ops.rows.targets import OUTPUTS, reductions_of
from cutefce.ops.sampling.cost_model import SampledCostModel
from cutefce.ops.sampling.kernels import is_in_place


@dataclass(frozen=True)
class PlanRequest:
    """What the planner is asked: what to compute, and what serves it."""

    problem: LossProblem
    """What its program depends on."""
    kernel_problem: Problem
    """What kernels are chosen by, on which device."""
    copies: Copies
    """What the call copies before."""
    sorts: bool = False
    """See `CostModel`."""

    def of_ranks(self, vocab: int, knows_upstream: bool) -> "PlanRequest":
        """Return the same for the widest shard, without copies, and a buffer that GEMMs add to."""
        problem = replace(self.problem, vocab=vocab, adds_in_place=True)
        if problem.into and knows_upstream:
            problem = replace(problem, upstream=Upstream.KNOWN)
        kernel_problem = replace(self.kernel_problem, vocab=vocab)
        return replace(self, problem=problem, kernel_problem=kernel_problem, copies=Copies())

    def of_tokens(self, tokens: int) -> "PlanRequest":
        """Return the same of some tokens, copied with their dX."""
        problem = replace(self.problem, tokens=tokens)
        copied = (1 + problem.grad_hidden) * tokens * problem.hidden * problem.item
        copies = replace(self.copies, dense=self.copies.dense + copied)
        kernel_problem = replace(self.kernel_problem, tokens=tokens)
        return replace(self, problem=problem, kernel_problem=kernel_problem, copies=copies)

    def sorted(self) -> "PlanRequest":
        """Return the same with the tokens that count first, in a copy of the hidden states.

        A copy of dX is made when what the call has saved, and this one, are freed.
        """
        copied = self.problem.tokens * self.problem.hidden * self.problem.item
        copies = replace(self.copies, dense=self.copies.dense + copied)
        return replace(self, copies=copies, sorts=True)


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
        leading = own = request_of(x)
        if sharding.group is not None:
            widest = max(sharding.shards) if sharding.shards else own.problem.vocab
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
    leading: PlanRequest,
    own: PlanRequest,
    more: tuple[torch.device, int],
    counted: int | None,
    leaves_out: bool,
) -> Plan:
    """Return the plan of the request `own`, with the chunks and the tokens of the leading one's.

    Ranks must use the same strategy and chunks, but may have different shards, copies and buffers:
    these are planned for the widest shard, without copies, and a buffer that GEMMs can add to.
    `more` are the device and the budget, the others arguments of `plan_for`.
    """
    if counted is not None and counted < own.problem.tokens:
        part = leading.of_tokens(counted)
        limit = _plan(leading, *more).workspace_bytes
        if leaves_out or _plan(part, *more).workspace_bytes <= limit:
            leading, own = part, own.of_tokens(counted)
    may_sort = leading.kernel_problem.triton and leading.problem.needs_gradients
    if may_sort and leading.problem.tokens >= MIN_SELECTED:
        as_given, sorted_first = _plan(leading, *more), _plan(leading.sorted(), *more)
        is_cheap = sorted_first.seconds <= SORTED * as_given.seconds
        if sorted_first.workspace_bytes <= more[1] and is_cheap:
            leading, own = leading.sorted(), own.sorted()
    made = _plan(leading, *more)
    return made if leading == own else _plan(own, *more, made.layout)


def request_of(x: LossCall) -> PlanRequest:
    """Return what the planner is asked for this rank's part of a call."""
    h, w, _, step, options, tensors, sharding = x
    ranks = sharding.ranks()
    tokens = h.shape[0] * ranks if sharding.sequence_parallel else None
    kernel_problem = problem_of(h, w, *step.gradients, tokens)
    buffer = tensors.accumulate_into if step.grad_weight else None
    wide = tensors.weight_cast is not None or buffer is not None
    # copies of a tile of logits that options make in plain torch
    copies = max(int(options.softcap is not None), 2 * options.reduces_rows)
    if wide or copies:
        kernel_problem = replace(kernel_problem, wide_grad_weight=wide, tile_copies=copies)
    if sharding.group is not None:
        kernel_problem = replace(
            kernel_problem, ranks=ranks, sequence_parallel=sharding.sequence_parallel
        )
    is_served = kernel_problem.arch is not None
    # no kernel of row sums in CuTe has those of blocks of classes, as Triton's has
    if is_served and (
        options.top_k or options_unsupported_reason(kernel_problem, h.device, tensors) is not None
    ):
        is_served = False
        kernel_problem = replace(kernel_problem, arch=None, triton=triton_serves(h, w))
    problem = _loss_problem(x, kernel_problem, buffer)
    is_sampled = is_served and options.is_sampled and any(step.gradients)
    given = kernel_problem, h.device, options, tensors
    if is_sampled and sampling_unsupported_reason(*given) is None:
        problem = replace(problem, samples=options.samples, stores=False)
        if buffer is not None:
            problem = replace(problem, adds_in_place=is_in_place(buffer, h.dtype))
    copied = step.copied_hidden, step.copied_weight
    return PlanRequest(problem, kernel_problem, _copies(kernel_problem, h, w, copied))


def _loss_problem(x: LossCall, of: Problem, buffer: Tensor | None) -> LossProblem:
    """Return what a program of a call depends on, with the buffer that it adds dW to, if any."""
    options, tensors, in_group = x.options, x.tensors, x.sharding.group is not None
    in_place = buffer is None or can_add_in_place(buffer, x.h.dtype, sum_dtype(x.h.dtype))
    upstream = Upstream.SCALAR if options.is_scalar else Upstream.ROWS
    if buffer is not None and in_place and tensors.grad_output is not None:
        upstream = Upstream.KNOWN
    soft = 0 if tensors.target_indices is None else tensors.target_indices.shape[-1]
    return LossProblem(
        of.tokens,
        of.hidden,
        of.vocab,
        of.item_bytes,
        of.accumulator_bytes,
        of.grad_hidden,
        of.grad_weight,
        of.grad_bias,
        upstream,
        scales_rows=options.scales_rows or tensors.scales_rows,
        every_class=options.label_smoothing != 0 or "mean_logit" in options.output_names,
        soft=soft if soft > 1 else 0,
        returns_classes=soft > 1 and options.reduction == OUTPUTS,
        scales_exps=options.scales_exps,
        reductions=reductions_of(options).planes if of.arch else planes(options),
        top_k=options.top_k,
        stores=can_keep(of.dtype),
        selects=of.selects_rows,
        grad_hidden_item=of.accumulator_bytes if in_group else 0,
        ranks=of.ranks if in_group else 0,
        grad_weight_item=of.accumulator_bytes if of.wide_grad_weight and buffer is None else 0,
        into=0 if buffer is None else buffer.itemsize,
        adds_in_place=in_place,
    )


def copied_item_bytes(given: Tensor, taken: Tensor) -> int:
    """Return the bytes per element of a tensor `given` to a call that works on `taken` instead.

    0 if `taken` is `given` or a view of it.  It does not depend on sizes.
    """
    if taken is given or torch_compat.shares_memory(given, taken):
        return 0
    return given.element_size()


def _copies(of: Problem, h: Tensor, w: Tensor, copied: tuple[int, int]) -> Copies:
    """Return the copies of h (N, D) and w (V, D) that a call makes.

    `copied` are the `copied_item_bytes` of h and w.  The others depend on their layouts: they are
    those of `Projection.prepare`.
    """
    accepts = has_aligned_rows if of.arch is not None or of.triton else is_dense
    gathered = (w,) if of.sequence_parallel else (h, w)
    return Copies(*copied, sum(x.nbytes for x in gathered if not accepts(x)))


@process_cache
def _plan(x: PlanRequest, device: torch.device, budget: int, like: Layout | None = None) -> Plan:
    """Return the plan of a request; with a layout `like`, of chunks of as many tokens."""
    rates = device_of(x.kernel_problem.device)
    return plan(x.problem, cost_model_of(x, device), rates, budget, like)


def cost_model_of(x: PlanRequest, device: torch.device) -> CostModel:
    """Return what programs cost on the primitives that serve a request."""
    configs = window_configs(x.kernel_problem)
    widths = tuple(config.window for config in configs)
    kind = SampledCostModel if x.problem.samples else CostModel
    return kind(x.kernel_problem, configs[0], widths, x.copies, device, x.sorts)
