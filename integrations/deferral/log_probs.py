"""The log-probabilities of K classes of each token, of deferred logits."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cutefce.integrations.deferral.divergence import Side
from cutefce.integrations.deferral.head import is_whole
from cutefce.integrations.deferral.logits import DeferredLogits
from cutefce.integrations.deferral.loss import Transform, transform_of
from cutefce.ops.interface.log_probs import LogProbs, linear_log_probs
from cutefce.ops.interface.soft_targets import MAX_CLASSES


def log_probs_of(
    logits: Any, target_indices: Tensor, outputs: Sequence[str] = ()
) -> LogProbs | None:
    """Return `linear_log_probs` of the logits (..., V), None if it is not served.

    Args:
        logits: what may be deferred logits.
        target_indices: (..., K) classes of each token.
        outputs: as of `linear_log_probs`.
    """
    if not isinstance(logits, DeferredLogits):
        return None
    transform = transform_of(logits.steps)
    obstacle = _obstacle(logits, transform, target_indices, outputs)
    if obstacle or transform is None:
        logits.call.counts.add(obstacle or "linear_log_probs: steps before it")
        return None
    side = Side(logits, transform)

    def fused(*given: Any) -> Any:
        hidden, weight, bias = side.operands(*given)
        return linear_log_probs(
            hidden,
            weight,
            target_indices=target_indices,
            outputs=outputs,
            linear_bias=bias,
            logit_scale=side.transform.scale,
            softcap=side.transform.cap,
            **logits.call.loss_options,
        )

    found: Any = logits.call.evaluate(fused, logits.states, logits.memory)
    logits.call.note_fused()
    return LogProbs(*found)


def _obstacle(
    logits: DeferredLogits, transform: Transform | None, indices: Tensor, outputs: Sequence[str]
) -> str:
    """Return why the values need logits, "" if they do not."""
    if not logits.is_deferred:
        return "linear_log_probs: after the logits were made, or in another mode of gradients"
    if not is_whole(logits.call.head):
        return "linear_log_probs: a weight that is not a whole, plain tensor"
    if logits.class_dim != logits.ndim - 1 or logits.shape[:-1] != indices.shape[:-1]:
        return "linear_log_probs: classes of other tokens, or not in the last dimension"
    if not 1 <= indices.shape[-1] <= MAX_CLASSES or not (
        indices.device == logits.device == logits.hidden.device
    ):
        return "linear_log_probs: more classes than are served, or on another device"
    if logits.dtype == torch.float64 != logits.call.dtype:
        return "linear_log_probs: logits cast to float64"
    if "entropy" in outputs and transform is not None and transform.cap is not None:
        return "linear_log_probs: entropy of capped logits"
    if "entropy" in outputs and logits.call.loss_options["gradient"] != "exact":
        return "linear_log_probs: entropy with sampled gradients"
    return ""
