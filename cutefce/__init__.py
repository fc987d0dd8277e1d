"""Exact fused linear cross entropy: the loss of `softmax(h @ w.T)` without the logits.

Importing this package registers `torch.ops.cutefce.loss`.  Only `cutefce.ops.planner` and the
folders below it can be imported where torch is not installed.
"""

from importlib.util import find_spec

from cutefce.version import __version__ as __version__

if find_spec("torch") is not None:
    from cutefce.ops.call import plan
    from cutefce.ops.dispatch import backend_for, set_strict
    from cutefce.ops.functional import LinearCrossEntropyLoss, linear_cross_entropy

    __all__ = [
        "LinearCrossEntropyLoss",
        "backend_for",
        "linear_cross_entropy",
        "plan",
        "set_strict",
    ]
