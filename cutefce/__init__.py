"""Exact fused linear cross entropy: the loss of `softmax(h @ w.T)` without the logits.

Importing this package registers `torch.ops.cutefce.loss`.  Without torch, only
`cutefce.autotune_cache` except `tuning`, and `cutefce.cute_kernels` can be imported.
"""

from importlib.util import find_spec
from typing import Any

from cutefce.autotune_cache import verdicts
from cutefce.version import __version__ as __version__


def _verify(gpu: Any, device: str, dtype: str, part: str) -> verdicts.Verdict:
    """Verify a part of calls; what does is imported for the first that is unproven."""
    from cutefce.autotune_cache.tuning import runner, verify
    from cutefce.autotune_cache.verdicts import parts_of

    return verify.verify_once(runner.Runner(gpu, device), dtype, parts_of(part))


verdicts.verify = _verify
if find_spec("torch") is not None:
    from cutefce.integrations.deferral import DeferralReport, defer, deferral_report, undefer
    from cutefce.ops.divergence.api import (
        DivergenceOutput,
        linear_divergence,
        plan_divergence,
    )
    from cutefce.ops.interface.api import LossOutput, linear_cross_entropy
    from cutefce.ops.interface.log_probs import LogProbs, linear_log_probs
    from cutefce.ops.interface.module import LinearCrossEntropyLoss
    from cutefce.ops.interface.plan import backend_for, plan, set_strict

    __all__ = [
        "DeferralReport",
        "DivergenceOutput",
        "LinearCrossEntropyLoss",
        "LogProbs",
        "LossOutput",
        "backend_for",
        "defer",
        "deferral_report",
        "linear_cross_entropy",
        "linear_divergence",
        "linear_log_probs",
        "plan",
        "plan_divergence",
        "set_strict",
        "undefer",
    ]
