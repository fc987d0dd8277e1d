"""What all ranks of a call must agree on, by the names that errors use."""

from typing import Any

from torch import Tensor

from cutefce.cute_kernels.workspace import Stat
from cutefce.ops.interface.options import LossOptions, TensorOptions
from cutefce.ops.operators.operands import NO_GRADIENTS

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
