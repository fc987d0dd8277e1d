"""The inner operators: schemas, kernels, autograd; `fakes.py` has no numbers.

`torch.ops.cutefce.loss` (`call.py`), which users call, composes them, so that gradients,
`torch.compile` and graph capture see tensors in and tensors out; the ranks of a `group` exchange
what `parallel.py` says inside of them:

    forward            the loss, where no gradient is wanted
    loss_forward       the forward of a step: loss, stats and what the backward needs of it
    loss_backward  the backward of "windows" plans
    scale_gradients    the backward of plans that form gradients in the forward
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cutefce.ops.interface import meta
from cutefce.ops.interface.context import isolated_context
from cutefce.ops.parallel.shard import Unsharded, shard_of
from cutefce.ops.primitives.dispatch import primitives_for, problem_of
from cutefce.ops.primitives.interface import Primitives
from cutefce.ops.primitives.rows import RowStats, Targets, sum_dtype
from cutefce.ops.strategies import gradients_in_forward, windows
from cutefce.ops.strategies.dw_views import aliased_views
from cutefce.ops.strategies.grad_accumulator import GradAccumulator

LIBRARY = torch.library.Library("cutefce", "DEF")
RANKS = "str? group=None, int[]? shards=None, bool sequence_parallel=False"
SHARING = f"Tensor? denominator=None, {RANKS}"

LIBRARY.define(
    f"forward(Tensor h, Tensor w, Tensor y, str reduction, int ignore_index, {SHARING}) -> Tensor"
)
LIBRARY.define(
    "loss_forward(Tensor h, Tensor w, Tensor y, str reduction, int ignore_index, "
    "bool grad_hidden, bool grad_weight, str strategy, SymInt window, SymInt aliased, SymInt kept, "
    f"SymInt chunk, {SHARING}) "
    "-> (Tensor loss, Tensor stats, Tensor exps, Tensor dx, Tensor dw, Tensor dx_rest, "
    "Tensor dw_rest)"
)
LIBRARY.define(
    "loss_backward(Tensor upstream, Tensor h, Tensor w, Tensor y, Tensor stats, Tensor exps, "
    "Tensor dw, str reduction, int ignore_index, bool grad_hidden, bool grad_weight, "
    f"SymInt window, SymInt aliased, {SHARING}) -> (Tensor dx, Tensor dw)"
)
LIBRARY.define(
    "scale_gradients(Tensor upstream, Tensor h, Tensor w, Tensor dx, Tensor dw, Tensor dx_rest, "
    f"Tensor dw_rest, {RANKS}) -> (Tensor dx, Tensor dw)"
)


def _prepare(
    shard: Unsharded,
    h: Tensor,
    w: Tensor,
    y: Tensor,
    ignore_index: int,
    denominator: Tensor | None,
    grads: tuple[bool, bool],
) -> tuple[Primitives, Tensor, Tensor, Targets]:
    """Return primitives, h (N, D), w and targets as `strategies` takes them."""
    h = shard.gather(h)
    own = primitives_for(h, w, problem_of(h, w, *grads))
    h, w = own.prepare(h, w)
    targets = shard.make_targets(y.long(), w.shape[0], ignore_index, denominator)
    return shard.primitives(own), h, w, targets


def forward(
    h: Tensor,
    w: Tensor,
    y: Tensor,
    reduction: str,
    ignore_index: int,
    denominator: Tensor | None = None,
    group: str | None = None,
    shards: list[int] | None = None,
    sequence_parallel: bool = False,
) -> Tensor:
    """Return the reduced loss."""
    same = {"operator": "forward", "reduction": reduction, "ignore_index": ignore_index}
    shard = shard_of(group, shards, sequence_parallel, h, w, **same)
    inputs = _prepare(shard, h, w, y, ignore_index, denominator, (False, False))
    return windows.forward(*inputs, reduction)[0]


def loss_forward(
    h: Tensor,
    w: Tensor,
    y: Tensor,
    reduction: str,
    ignore_index: int,
    grad_hidden: bool,
    grad_weight: bool,
    strategy: str,
    window: int,
    aliased: int,
    kept: int,
    chunk: int,
    denominator: Tensor | None = None,
    group: str | None = None,
    shards: list[int] | None = None,
    sequence_parallel: bool = False,
) -> tuple[Tensor, ...]:
    """Return the reduced loss, stats (4, N), exponentials (N, kept), dX, dW and the rests of both.

    Of the last five, those that the strategy and the flags do not ask for are empty.  Gradients in
    forward are `GradAccumulator` with these rests; of ranks that share a call, each has a rest alone, of some
    rows of dX.  With `aliased` columns, dW is where exponentials lie.
    """
    same = {"operator": "loss_forward", "reduction": reduction, "ignore_index": ignore_index}
    plan = {"dX is wanted": grad_hidden, "strategy": strategy, "tokens of a chunk": chunk}
    shard = shard_of(group, shards, sequence_parallel, h, w, **same, **plan)
    grads = grad_hidden, grad_weight
    inputs = _, h, w, targets = _prepare(shard, h, w, y, ignore_index, denominator, grads)
    if strategy == "gradients_in_forward":
        weight, hidden = targets.loss_scale(reduction, sum_dtype(h.dtype)), h.shape[1]
        # the ranks' parts of dX are added before they are rounded
        dtype = h.dtype if group is None else weight.dtype
        dx = h.new_empty(len(h) if grad_hidden else 0, hidden, dtype=dtype)
        dw = w.new_empty(len(w) if grad_weight else 0, hidden)
        sums = of_dx, of_dw = (
            GradAccumulator.empty(dx, weight.dtype),
            GradAccumulator.empty(dw, weight.dtype),
        )
        saved = gradients_in_forward.gradients_in_forward(*inputs, weight, kept, chunk, *sums)
        loss, exps = targets.reduce(saved.loss, reduction), h.new_empty(0, 0)
        dx_rest, dw_rest = of_dx.rest, of_dw.rest
        if group is not None:
            dx, dx_rest = h.new_empty(0, hidden), shard.reduce_dx(dx) if grad_hidden else dx
    else:
        exps = h.new_empty(h.shape[0], kept)
        dx, dw = h.new_empty(0, h.shape[1]), w.new_empty(w.shape if aliased else (0, w.shape[1]))
        dx_rest, dw_rest = dx.new_empty(0, h.shape[1]), dw.new_empty(0, w.shape[1])
        stored = _stored(exps, dw, window, aliased)
        loss, saved = windows.forward(*inputs, reduction, stored)
        loss = loss.clone() if reduction == "none" else loss  # not a view of another result
    return loss, saved.rows, exps, dx, dw, dx_rest, dw_rest


def loss_backward(
    upstream: Tensor,
    h: Tensor,
    w: Tensor,
    y: Tensor,
    stats: Tensor,
    exps: Tensor,
    dw: Tensor,
    reduction: str,
    ignore_index: int,
    grad_hidden: bool,
    grad_weight: bool,
    window: int,
    aliased: int,
    denominator: Tensor | None = None,
    group: str | None = None,
    shards: list[int] | None = None,
    sequence_parallel: bool = False,
    in_place: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return dX (N, D) and dW (V, D) of a "windows" plan, without rows if not asked for.

    `dw` is what `loss_forward` aliased the exponentials of `aliased` columns, or has no rows if they are
    lost.  What an operator returns is new; `in_place`, which is none's, writes to `dw` instead.
    """
    shard = shard_of(group, shards, sequence_parallel, h, w, operator="loss_backward")
    grads = grad_hidden, grad_weight
    inputs = _, h, w, targets = _prepare(shard, h, w, y, ignore_index, denominator, grads)
    upstream = upstream * targets.loss_scale(reduction, sum_dtype(h.dtype))
    stored = _stored(exps, dw, window, aliased)
    to = (dw if in_place else w.new_empty(w.shape)) if grad_weight else None
    options = window, grad_hidden, to, aliased > 0
    dx = windows.backward(*inputs, RowStats(stats), stored, upstream, *options)
    return (
        h.new_empty(0, h.shape[1]) if dx is None else shard.finish_dx(dx, h.dtype),
        w.new_empty(0, w.shape[1]) if to is None else to,
    )


def _stored(exps: Tensor, dw: Tensor, window: int, aliased: int) -> windows.StoredExps:
    """Return where exponentials lie: those of `aliased` columns in dW, then `exps` (N, K)."""
    rooms = aliased_views(dw, exps.shape[0], window, aliased) if len(dw) else []
    return [*rooms, (aliased, exps)] if exps.shape[1] else rooms


def scale_gradients(
    upstream: Tensor,
    h: Tensor,
    w: Tensor,
    dx: Tensor,
    dw: Tensor,
    dx_rest: Tensor,
    dw_rest: Tensor,
    group: str | None = None,
    shards: list[int] | None = None,
    sequence_parallel: bool = False,
    in_place: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return dX (N, D) and dW (V, D) times `upstream` (), of the `GradAccumulator` that they are.

    What an operator returns is new; `in_place`, which is none's, writes to `dx` and `dw` instead.
    """
    shard = shard_of(group, shards, sequence_parallel, h, w, operator="scale_gradients")
    primitives = primitives_for(w, w, problem_of(w, w, True, True))
    if group is not None:
        dx = h.new_empty(dx_rest.shape)
    dx = GradAccumulator(dx, dx_rest).finish(
        primitives, upstream, in_place=in_place or group is not None
    )
    return (
        shard.gather_dx(dx, len(h)) if len(dx) else dx,
        GradAccumulator(dw, dw_rest).finish(primitives, upstream, in_place=in_place),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    h, w, y, *options, strategy, window, aliased, _, _ = inputs[:12]
    denominator, *sharing = inputs[12:]
    _, *saved = output
    ctx.set_materialize_grads(False)
    ctx.chunked, ctx.inputs = strategy == "gradients_in_forward", len(inputs)
    ctx.options, ctx.sharing = (*options, window, aliased), sharing
    ctx.buffers_consumed = False
    ctx.save_for_backward(h, w, y, *saved, denominator)


def _backward(ctx: Any, upstream: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    _, _, grad_hidden, grad_weight, *_ = ctx.options
    if upstream is None:
        return (*[None] * ctx.inputs,)
    h, w, y, stats, exps, dx, dw, *rests, denominator = ctx.saved_tensors
    # a graph, also one of second derivatives, must not see a saved tensor change
    in_place = type(dw) is Tensor and not torch.is_grad_enabled()
    run: Callable[..., Any]
    if ctx.chunked and not ctx.buffers_consumed:
        run = torch.ops.cutefce.scale_gradients
        if in_place:
            ctx.buffers_consumed, dx, dw = True, dx.data, dw.data
            run = functools.partial(IMPLS[scale_gradients], in_place=True)
        dx, dw = run(upstream, h, w, dx, dw, *rests, *ctx.sharing)
    else:
        run = torch.ops.cutefce.loss_backward
        if ctx.buffers_consumed:  # what the first backward wrote over is computed again
            dw = dw[:0]
        elif in_place and len(dw):
            ctx.buffers_consumed, dw = True, dw.data
            run = functools.partial(IMPLS[loss_backward], in_place=True)
        saved = h, w, y, stats, exps, dw
        dx, dw = run(upstream, *saved, *ctx.options, denominator, *ctx.sharing)
    gradients = dx if grad_hidden else None, dw if grad_weight else None
    return *gradients, *[None] * (ctx.inputs - 2)


def _no_second_derivative(ctx: Any, *_: Any) -> None:
    raise NotImplementedError("cutefce: the loss has no second derivatives (create_graph=True)")


IMPLS = {
    kernel: isolated_context(kernel)
    for kernel in (forward, loss_forward, loss_backward, scale_gradients)
}
for kernel, wrapped in IMPLS.items():
    LIBRARY.impl(kernel.__name__, wrapped, "CompositeExplicitAutograd")
torch.library.register_fake("cutefce::forward", meta.forward, lib=LIBRARY)
torch.library.register_fake("cutefce::loss_forward", meta.loss, lib=LIBRARY)
torch.library.register_fake("cutefce::loss_backward", meta.gradients, lib=LIBRARY)
torch.library.register_fake("cutefce::scale_gradients", meta.scaled, lib=LIBRARY)
torch.library.register_autograd(
    "cutefce::loss_forward", _backward, setup_context=_setup_context, lib=LIBRARY
)
for name in ("loss_backward", "scale_gradients"):
    torch.library.register_autograd(f"cutefce::{name}", _no_second_derivative, lib=LIBRARY)
