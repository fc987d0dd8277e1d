"""What all ranks of a call, and its forward and backward, must agree on.

By the names that errors use.
"""

from typing import Any

import torch
from torch import Tensor

from cutefce.cute_kernels.workspace import Stat
from cutefce.ops.interface.options import LossOptions, TensorOptions
from cutefce.ops.operators.operands import NO_GRADIENTS

UPSTREAM_ROUNDINGS = 16
"""Roundings, in the dtype of the loss, by which a known upstream gradient may differ from the
backward's: each division or loss scale has one."""
HOSTS = ("cpu",)
"""Types of the devices whose values are known without waiting."""
RUNS_AGAIN = "backward through what an earlier backward freed"


def agreed_forward(
    y: Tensor,
    options: LossOptions,
    tensors: TensorOptions,
    grads: tuple[bool, ...] = NO_GRADIENTS,
) -> dict[str, Any]:
    """Return what all ranks must agree on in a forward."""
    given = dict(zip(TensorOptions.names(), tensors.pack(), strict=True))
    own = {name: given.pop(name) for name in TensorOptions.OF_CLASSES}
    del given["seed"]  # all ranks take that of the first one
    if tensors.is_dense:
        given["target_probs"] = None  # of a rank's own classes
    return {
        "operator": "forward",
        "requires_grad of (input, linear_weight, linear_bias)": list(grads),
        **({} if tensors.soft_targets else {"target": y}),
        **({"target": f"probabilities of {len(y)} tokens"} if tensors.is_dense else {}),
        **dict(zip(LossOptions.names(), options.pack(), strict=True)),
        **given,
        **{f"{name} given": x is not None for name, x in own.items()},
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
    """Return the backward's `upstream` (), NaN if the forward was given another one.

    The first row of the buffer then becomes NaN too.

    Raises:
        RuntimeError: on a CPU, if it was.  A GPU is not synchronized for this.
    """
    grad_output, buffer = tensors.grad_output, tensors.accumulate_into
    if grad_output is None or buffer is None:
        return upstream
    given = grad_output.to(upstream.dtype)
    bound = UPSTREAM_ROUNDINGS * torch.finfo(upstream.dtype).eps * given.abs()
    is_same = (upstream - given).abs() <= bound
    if upstream.device.type in HOSTS and not is_same:
        raise RuntimeError(
            f"grad_output: got {given.item()}, expected {upstream.item()}, the gradient that the "
            "backward of the loss got"
        )
    upstream = torch.where(is_same, upstream, torch.nan)
    buffer[0] += 0 * upstream
    return upstream
