"""The operators of a divergence, and its derivative.

    divergence            the reduced divergence, and the statistics of the tokens
    divergence_backward   the gradients of both sides

Both plan when they run, and the factors that a forward saves are found by its statistics.
"""

from typing import Any

import torch
from torch import Tensor, is_tensor

from cutefce.ops import torch_compat
from cutefce.ops.divergence.calls import backward, forward
from cutefce.ops.divergence.inputs import DivergenceInputs, Side
from cutefce.ops.divergence.options import (
    OPERANDS,
    RECORDS,
    STUDENT,
    TEACHER,
    Divergence,
)
from cutefce.ops.divergence.plan import make_plan, problem_of
from cutefce.ops.divergence.steps import STATS
from cutefce.ops.dtypes import sum_dtype
from cutefce.ops.operators import saved
from cutefce.ops.operators.autograd import differentiate
from cutefce.ops.operators.context import isolated_context
from cutefce.ops.operators.meta import empty_gradients
from cutefce.ops.operators.operators import IMPLS, LIBRARY, UNSAFE, define, restored
from cutefce.ops.parallel.consistency import report_errors
from cutefce.ops.parallel.shard import shard_of
from cutefce.ops.primitives.dispatch import falls_back
from cutefce.ops.primitives.products import dense
from cutefce.ops.primitives.select_rows import select_on_host
from cutefce.ops.rows.logit_map import LogitMap
from cutefce.ops.rows.targets import inverse_of
from cutefce.ops.schema import unpack

BIAS = OPERANDS + Divergence.names().index("student_bias")
PLACES = 0, 1, BIAS, 2, 3, BIAS + 1
"""Places of hidden states, weight and bias of either side among the arguments."""
_HEADS = "Tensor h_s, Tensor w_s, Tensor h_t, Tensor w_t, Tensor? y"
_OPTIONS = ", ".join(record.schema() for record in RECORDS)
_GRADIENTS = ", ".join(f"Tensor {x}{side}" for side in "st" for x in ("dx_", "dw_", "dbias_"))


def divergence(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Return the reduced divergence, and the statistics (7, N), 0 of tokens that do not count.

    The arguments are (N, D) and (V, D) of the student and of the teacher, (N,) targets or None, and
    those of `RECORDS`.
    """
    x = _inputs(arguments)
    rows, memory = forward(x)
    values = x.options.values(rows)
    loss = values if x.loss_scale is None else values.sum() * x.loss_scale
    stats = rows if x.selection is None else x.selection.restore(rows)
    saved.save(stats, memory)
    return restored(loss, x.selection), stats


def divergence_backward(upstream: Tensor, stats: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    """Return dX, dW and the bias' gradient of student and teacher, without rows if not asked for.

    `upstream` is the gradient of the reduced divergence; `stats` and the arguments are those of
    `divergence`.
    """
    x = _inputs(arguments, upstream, stats)
    rows = stats if x.selection is None else x.selection.take(stats)
    return (*backward(x, saved.saved_with(stats), rows),)


def _inputs(
    arguments: Any, upstream: Tensor | None = None, stats: Tensor | None = None
) -> DivergenceInputs:
    """Return the divergence of the tokens that count, planned; that of a backward has an upstream.

    A GPU with targets is synchronized to learn how many tokens count.
    """
    h_s, w_s, h_t, w_t, y, *more = arguments
    options, sharding = unpack(more, *RECORDS)
    heads = (h_s, w_s), (h_t, w_t)
    selection = None if y is None else select_on_host(y, y, options.ignore_index)
    counted = len(h_s) if selection is None else len(selection.order)
    problem, sides = problem_of(heads, counted, options, sharding), list[Side]()
    for i, (h, w) in enumerate(heads):
        own, added = options.of_logits(i)
        if selection is not None:
            h, added = h.index_select(0, selection.order), selection.take_options(added)
        logits = LogitMap.of(own, added, h.new_empty(len(h)), sum_dtype(h.dtype))
        boost = options.boost(i) if h.dtype == torch.float16 else 1.0
        sides.append(Side(dense(h), dense(w), logits, boost))
    same = {}  # one device has nobody to agree with
    if sharding.group is not None:
        same = _agreed(h_t, y, options, upstream, stats)
    shard = shard_of(sharding, h_s, w_s, **same)
    if upstream is not None and upstream.ndim and selection is not None:
        upstream = selection.take(upstream)
    loss_scale = _loss_scale(sides[STUDENT].h, options) if options.is_scalar else None
    plan = make_plan(problem, options.workspace)
    return DivergenceInputs(sides, options, plan, shard, loss_scale, upstream, selection)


def _agreed(
    h_t: Tensor,
    y: Tensor | None,
    options: Divergence,
    upstream: Tensor | None,
    stats: Tensor | None,
) -> dict[str, Any]:
    """Return what all ranks must agree on, by names in errors; a backward has an upstream."""
    given = options.by_name()
    own = {name: given.pop(name) for name in ("student_bias", "teacher_bias")}
    same = {
        "operator": "divergence",
        "rows of teacher_input, and hidden size": list(h_t.shape),
        "dtype of teacher_input": str(h_t.dtype),
        **{f"{name} given": x is not None for name, x in own.items()},
        "target": y,
        **given,
    }
    if upstream is not None:
        same |= {"operator": "divergence_backward", "gradient of the divergence": upstream}
        same["statistics of the forward"] = stats
    return same


def _loss_scale(h: Tensor, options: Divergence) -> Tensor:
    """Return () the factor of each token's divergence in that of h (M, D), which is reduced."""
    if options.denominator is not None:
        return inverse_of(options.denominator, sum_dtype(h.dtype))
    count = max(len(h), 1) if options.reduction == "mean" else 1
    return h.new_full((), 1 / count, dtype=sum_dtype(h.dtype))


def _fake_divergence(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Return an empty divergence and empty statistics."""
    h, options = arguments[0], unpack(arguments[OPERANDS:], *RECORDS)[0]
    dtype, tokens = sum_dtype(h.dtype), h.shape[0]
    shape = () if options.is_scalar else (tokens,)
    return h.new_empty(shape, dtype=dtype), h.new_empty((STATS, tokens), dtype=dtype)


def _fake_backward(upstream: Tensor, stats: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    """Return empty gradients."""
    options, _ = unpack(arguments[OPERANDS:], *RECORDS)
    student = *arguments[:2], options.student_bias, *options.gradients(STUDENT)
    teacher = *arguments[2:4], options.teacher_bias, *options.gradients(TEACHER)
    return *empty_gradients(*student), *empty_gradients(*teacher)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Save the arguments and the statistics."""
    (options, sharding), stats = unpack(inputs[OPERANDS:], *RECORDS), output[1]
    ctx.trained, ctx.group = options.trained, sharding.group
    ctx.others = [None if is_tensor(x) else x for x in inputs]
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(stats)
    ctx.save_for_backward(stats, *(x if is_tensor(x) else None for x in inputs))


def _backward(ctx: Any, upstream: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the gradients of all inputs."""
    results: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
    if upstream is not None:
        with report_errors(ctx.group):
            stats, *tensors = ctx.saved_tensors
            given = (y if x is None else x for x, y in zip(tensors, ctx.others, strict=True))
            gradients = differentiate(divergence_backward, (upstream, stats, *given))
        for i, x, is_wanted in zip(PLACES, gradients, ctx.trained, strict=True):
            if is_wanted:  # others may be at their defaults, which are left out
                results[i] = x
    return (*results,)


for function, first, results, fake in (
    (divergence, "", "Tensor loss, Tensor stats", _fake_divergence),
    (divergence_backward, "Tensor upstream, Tensor stats, ", _GRADIENTS, _fake_backward),
):
    schema = f"({first}{_HEADS}, {_OPTIONS}) -> ({results})"
    IMPLS[function] = isolated_context(falls_back(function))
    define(function, schema, fake, IMPLS[function], UNSAFE)
torch.library.register_autograd("cutefce::divergence", _backward, setup_context=_save, lib=LIBRARY)

torch_compat.import_behind("torch.utils.flop_counter", "cutefce.ops.divergence.flops")
