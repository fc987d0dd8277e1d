"""How a call would run: on which backend, and by which plan."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from cutefce.ops.interface import checks
from cutefce.ops.interface.arguments import Sharding, check_arguments, check_types
from cutefce.ops.interface.call import checked_call
from cutefce.ops.interface.heads import check_head, token_shape
from cutefce.ops.interface.probabilities import is_probabilities
from cutefce.ops.interface.public_function import runs
from cutefce.ops.interface.scalars import with_tensors
from cutefce.ops.operators.context import autocast, is_mixed
from cutefce.ops.operators.plans import plan_for
from cutefce.ops.parallel.dtensor import localize
from cutefce.ops.primitives import dispatch
from cutefce.ops.primitives.dispatch import Backend
from cutefce.ops.program.plan import Plan


def set_strict(enabled: bool) -> None:
    """Make calls that the kernels cannot serve raise RuntimeError, on a CPU too, or warn once.

    Raises:
        TypeError: for what is no bool.
    """
    check_types(enabled=enabled)
    dispatch.set_strict(enabled)


def backend_for(input: Tensor, linear_weight: Tensor) -> Backend:
    """Return which backend serves hidden states (..., D) and a weight (V, D), and why.

    Raises:
        TypeError, ValueError: for what `linear_cross_entropy` would not take.
    """
    check_types(input=input, linear_weight=linear_weight)
    h, w = autocast(input, linear_weight)
    check_head(h, w, is_cast=True)
    checks.check_device("linear_weight", w, h)
    h = h if h.ndim == 2 else h.reshape(-1, h.shape[-1])
    return dispatch.backend_of(h, w.detach().to(h.dtype) if is_mixed(h, w) else w)


def _plan(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor | None = None,
    **given: Any,
) -> Plan:
    """Return what `plan` returns; `given` are its other arguments."""
    check_arguments(given)
    if is_probabilities(target):
        raise NotImplementedError(
            "target: got probabilities of all classes, whose loss has no plan, expected class "
            "indices or None"
        )
    some = torch.empty(input.shape[:-1], dtype=torch.long, device=input.device)
    part = localize(input, linear_weight, some if target is None else target, given)
    local = with_tensors(part.options, part.h)
    y = target
    if "target_indices" not in given and "target_probs" not in given:
        parts = Sharding.from_keywords(local).parts(part.h)
        y = some.new_empty(token_shape(part.h, parts))
    return plan_for(checked_call(part.h, part.w, y, local).computed())


@runs(_plan, meets_ranks=False)
def plan(  # type: ignore[empty-body]
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor | None = None,
    *,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    gradient: str = "exact",
    samples: int = 256,
    workspace: int | str | None = None,
    accumulate_into: Tensor | None = None,
    grad_output: Tensor | float | None = None,
    target_indices: Tensor | None = None,
    target_probs: Tensor | None = None,
    group: ProcessGroup | None = None,
    shards: Sequence[int] | None = None,
    sequence_parallel: bool = False,
    **others: Any,
) -> Plan:
    """Return how `linear_cross_entropy` would run with these arguments; print it to read it.

    The plan is that of a call in which every token counts.  Tensors on `meta`, which take no
    memory, are planned for as on a Hopper GPU without a tuned table, whatever GPU is here.

    Args:
        input: (..., D) hidden states.  Set requires_grad on input, linear_weight or both, as for
            the call; under `torch.no_grad` the plan is that of a forward alone.
        linear_weight: (V, D).
        target: class indices of the call.  They do not change the plan, and are not checked.
        reduction: as for the call, and so are the other arguments.
        label_smoothing: share of the uniform distribution; it changes plans of sampled gradients.
        gradient: "exact" or "sampled".
        samples: expected number of entries of a token, at most, with sampled gradients.
        workspace: peak memory, as for the call.
        accumulate_into: buffer of the weight's gradient, as for the call.
        grad_output: gradient of the loss; only whether it is given matters.
        target_indices: (..., K) those of the call, of which only the shape matters.
        target_probs: (..., K) the same.
        group: process group over which the vocabulary is sharded.
        shards: rows of every rank's weight.
        sequence_parallel: whether input holds this rank's share of the tokens.
        **others: other options of the loss.  `token_weights`, `weight`, `z_loss` and a temperature
            of each token may add a copy of the hidden states, others little or nothing.

    More than eight parameters: they are arguments of the call.

    Returns:
        Problem and layout of the program, and predicted memory (bytes) and time (seconds).

    Raises:
        TypeError, ValueError, NotImplementedError: as the call does.
    """
