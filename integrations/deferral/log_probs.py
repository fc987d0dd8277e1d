"""The log-probabilities and the entropies of deferred logits, without the logits."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cutefce.integrations.deferral.divergence import sides_of
from cutefce.integrations.deferral.logits import DeferredLogits
from cutefce.ops.interface.log_probs import LogProbs, linear_log_probs
from cutefce.ops.interface.soft_targets import MAX_CLASSES


def log_probs_of(
    logits: Any,
    target: Tensor | None = None,
    *,
    target_indices: Tensor | None = None,
    outputs: Sequence[str] = (),
) -> LogProbs | None:
    """Return `linear_log_probs` of the logits (..., V), None if it is not served.

    Args:
        logits: what may be deferred logits.
        target: (...) the class of each token; None with `target_indices`.
        target_indices: (..., K) classes of each token.
        outputs: as of `linear_log_probs`.
    """
    if not isinstance(logits, DeferredLogits):
        return None
    classes = target_indices if target is None else target[..., None]
    assert classes is not None
    reason = _obstacle(logits, classes, outputs)
    sides = sides_of("linear_log_probs", logits, reason=reason)
    if sides is None:
        return None
    (side,) = sides

    def fused(*given: Any) -> Any:
        hidden, weight, bias = side.operands(*given)
        return linear_log_probs(
            hidden,
            weight,
            target,
            target_indices=target_indices,
            outputs=outputs,
            linear_bias=bias,
            **side.transform.options(),
            **logits.call.loss_options,
        )

    found: Any = logits.call.evaluate(fused, logits.states, logits.memory)
    logits.call.note_fused()
    return LogProbs(*found)


def entropy_of(logits: Any) -> Tensor | None:
    """Return the entropies (...) of the logits (..., V), in nats; None if they are not served."""
    if not isinstance(logits, DeferredLogits):
        return None
    any_class = torch.zeros(logits.shape[:-1], dtype=torch.long, device=logits.device)
    found = log_probs_of(logits, any_class, outputs=("entropy",))
    return None if found is None else found.entropy


def _obstacle(logits: DeferredLogits, indices: Tensor, outputs: Sequence[str]) -> str:
    """Return why values of these classes need logits, "" if they do not."""
    if logits.shape[:-1] != indices.shape[:-1]:
        return "classes of other tokens"
    if not 1 <= indices.shape[-1] <= MAX_CLASSES or indices.device != logits.device:
        return "more classes than are served, or on another device"
    if "entropy" not in outputs or not logits.requires_grad:
        return ""
    if any(name == "tanh" for name, _ in logits.steps):
        return "entropy of capped logits"
    if logits.call.loss_options["gradient"] != "exact":
        return "entropy with sampled gradients"
    return ""
