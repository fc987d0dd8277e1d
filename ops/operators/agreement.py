"""What all ranks of a call, and its forward and backward, must agree on, by names in errors."""

from typing import Any

import torch
from torch import Tensor

from cutefce.cute_kernels.workspace import Stat
from cutefce.ops.interface.arguments import LossCall, TensorOptions

UPSTREAM_TOLERANCE = 2.0**-7
"""How far, relative to it, a known upstream gradient may be from the backward's: one that passes
through a loss in 16 bits is rounded to these."""
RUNS_AGAIN = "backward through what an earlier backward freed"


def agreed_forward(x: LossCall) -> dict[str, Any]:
    """Return what all ranks must agree on in a forward."""
    given = x.tensors.by_name()
    own = {name: given.pop(name) for name in TensorOptions.OF_CLASSES}
    del given["seed"]  # all ranks take that of the first one
    cast = given.pop("weight_cast")  # of a rank's own classes
    return {
        "operator": "forward",
        "requires_grad of (input, linear_weight, linear_bias)": list(x.step.gradients),
        **({} if x.tensors.soft_targets else {"target": x.y}),
        **x.options.by_name(),
        **given,
        "linear_weight cast to 16 bits": cast is not None,
        **{f"{name} given": value is not None for name, value in own.items()},
    }


def agreed_backward(upstream: Tensor, stats: Tensor, runs_again: bool) -> dict[str, Any]:
    """Return what all ranks must agree on in a backward."""
    return {
        "operator": "loss_backward",
        RUNS_AGAIN: runs_again,
        "gradient of the loss": upstream,
        "losses of the forward, of which this is the backward": stats[Stat.LOSS],
    }


def agreed_upstream(upstream: Tensor, tensors: TensorOptions) -> Tensor:
    """Return the backward's `upstream` (), NaN if it is not finite or the forward got another one.

    The first row of the buffer then becomes NaN too.

    Raises:
        RuntimeError: on a CPU, if the forward got another one than this finite one.  A GPU is not
            synchronized for this.
    """
    grad_output, buffer = tensors.grad_output, tensors.accumulate_into
    if grad_output is None or buffer is None:
        return upstream
    given = grad_output.to(upstream.dtype)
    is_same = given.isfinite() & ((upstream - given).abs() <= UPSTREAM_TOLERANCE * given.abs())
    if _is_known(upstream) and upstream.isfinite() and not is_same:
        raise RuntimeError(
            f"grad_output: got {given.item()}, expected {upstream.item()}, the gradient that the "
            "backward of the loss got; zero accumulate_into, which may hold sums of this forward"
        )
    upstream = torch.where(is_same, upstream, torch.nan)
    buffer[0] += 0 * upstream
    return upstream


def _is_known(x: Tensor) -> bool:
    """Whether a value can be looked at without waiting for a device."""
    return x.is_cpu
