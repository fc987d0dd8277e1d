"""Exact fused linear cross entropy: the loss of `softmax(h @ w.T)` without the logits.

Importing this package registers `torch.ops.cutefce.loss`.  Without torch, only
`cutefce.ops.planning`, `cutefce.autotune_cache` except `tuning`, and `cutefce.cute_kernels` can be
imported.
"""

from importlib.util import find_spec

from cutefce.version import __version__ as __version__

if find_spec("torch") is not None:
    from cutefce.ops.interface.api import LinearCrossEntropyLoss, linear_cross_entropy, plan
    from cutefce.ops.primitives.dispatch import backend_for, set_strict

    __all__ = [
        "LinearCrossEntropyLoss",
        "backend_for",
        "linear_cross_entropy",
        "plan",
        "set_strict",
    ]
