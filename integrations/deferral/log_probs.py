"""The log-probabilities and the entropies of deferred logits, without the logits."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from cutefce.integrations.deferral.divergence import transforms_of
from cutefce.integrations.deferral.logits import DeferredLogits
from cutefce.integrations.deferral.loss import operands
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
        target: (...) the class of each token; None with `target_indices`, or for `outputs` alone.
        target_indices: (..., K) classes of each token.
        outputs: as of `linear_log_probs`.
    """
    if not isinstance(logits, DeferredLogits):
        return None
    classes = target_indices if target is None else target[..., None]
    reason = _obstacle(logits, classes, outputs)
    transforms = transforms_of("linear_log_probs", logits, reason=reason)
    if transforms is None:
        return None
    (transform,) = transforms

    def fused(*given: Any) -> Any:
        hidden, weight, bias = operands(logits, transform, *given)
        return linear_log_probs(
            hidden,
            weight,
            target,
            target_indices=target_indices,
            outputs=outputs,
            linear_bias=bias,
            **transform.options(),
            **logits.call.loss_options,
        )

    found: Any = logits.evaluate(fused)
    logits.call.note_fused()
    return LogProbs(*found)


def entropy_of(logits: Any) -> Tensor | None:
    """Return the entropies (...) of the logits (..., V), in nats; None if they are not served."""
    found = log_probs_of(logits, outputs=("entropy",))
    return None if found is None else found.entropy


def _obstacle(logits: DeferredLogits, indices: Tensor | None, outputs: Sequence[str]) -> str:
    """Return why values of these classes need logits, "" if they do not."""
    if indices is not None and logits.shape[:-1] != indices.shape[:-1]:
        return "classes of other tokens"
    is_served = indices is None or 1 <= indices.shape[-1] <= MAX_CLASSES
    if not is_served or (indices is not None and indices.device != logits.device):
        return "more classes than are served, or on another device"
    if "entropy" not in outputs or not logits.requires_grad:
        return ""
    if any(name == "tanh" for name, _ in logits.steps):
        return "entropy of capped logits"
    if logits.call.loss_options["gradient"] != "exact":
        return "entropy with sampled gradients"
    return ""
