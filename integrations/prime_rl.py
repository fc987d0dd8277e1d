"""prime-rl: log-probabilities and entropies of its fused head, for RL and SFT.

Call `cutefce.integrations.prime_rl.enable()` in the trainer, before the first step.
"""

from typing import Any

from torch import Tensor

from cutefce.integrations.options import loss_options
from cutefce.integrations.support import hooks
from cutefce.ops.interface.log_probs import linear_log_probs

TESTED = "prime-rl 0.8.0"
LAYERS = "prime_rl.trainer.models.layers"
HEADS = f"{LAYERS}.lm_head:FusedOutputLinear", f"{LAYERS}.lm_head_gemma:GemmaFusedOutputLinear"


def enable() -> None:
    """Replace the forwards of prime-rl's fused heads; that of Gemma has a softcap.

    Raises:
        ImportError: if prime-rl is not installed.
        RuntimeError: if a forward has other parameters.
    """
    for head in HEADS:
        hooks.replace(f"{head}.forward", forward, tested=TESTED)


def forward(
    self: Any, hidden_states: Tensor, labels: Tensor | None = None, temperature: Any = None
) -> dict[str, Tensor]:
    """Return "logprobs" and "entropy" (b, s).

    Args:
        self: a linear layer without bias, with a `softcap` or without.
        hidden_states: (b, s, D).
        labels: (b, s) token ids.
        temperature: (b, s), of each token.

    Raises:
        ValueError: without labels or temperature.
    """
    if labels is None or temperature is None:
        raise ValueError("labels, temperature: got None, expected tensors (b, s)")
    found = linear_log_probs(
        hidden_states,
        self.weight,
        labels,
        outputs=("entropy",),
        softcap=getattr(self, "softcap", None),
        temperature=temperature,
        **loss_options(),
    )
    assert found.entropy is not None
    return {"logprobs": found.log_probs, "entropy": found.entropy}
