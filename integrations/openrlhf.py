"""OpenRLHF: log-probabilities and entropies of its actors, without logits.

    import cutefce.integrations.openrlhf

    cutefce.integrations.openrlhf.enable()  # in each process, before its models are made

OpenRLHF's own functions still run, with logits, under ZeRO-3, and for the gradient of an entropy of
capped logits.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from cutefce.integrations.deferral.log_probs import entropy_of, log_probs_of
from cutefce.integrations.deferral.model import defer
from cutefce.integrations.deferral.record import made_all
from cutefce.integrations.options import loss_options
from cutefce.integrations.support import hooks

TESTED = "openrlhf 0.11.2"
ACTOR = "openrlhf.models.actor:Actor.__init__"
LOG_PROBS = "openrlhf.models.utils:log_probs_from_logits"
ENTROPY = "openrlhf.models.utils:compute_entropy"


def enable() -> None:
    """Defer the logits of actors that are made from now on, and replace what is computed of them.

    Actors are the models of PPO's policy and reference, of SFT and of DPO.

    Raises:
        ImportError: if OpenRLHF is not installed.
        RuntimeError: if a function of OpenRLHF has other parameters.
    """
    hooks.replace(LOG_PROBS, log_probs_from_logits, tested=TESTED, importers="openrlhf")
    hooks.replace(ENTROPY, compute_entropy, tested=TESTED, importers="openrlhf")
    hooks.replace(ACTOR, make_actor, tested=TESTED, unused=None, is_counted=False)


def make_actor(self: Any, *, own: Callable[[], None]) -> None:
    """Do what the `__init__` of an actor does, and defer the logits of its model.

    Raises:
        TypeError: for a model whose head is not a plain `nn.Linear`.
    """
    own()
    defer(self.model, evaluation=True, **loss_options())


def log_probs_from_logits(
    logits: Any, labels: Tensor, temperature: float = 1.0, *, own: Callable[..., Tensor]
) -> Tensor:
    """Return the log-probabilities (...) of labels, in float32 if the logits are deferred.

    Args:
        logits: (..., V), deferred or not; a temperature divides them in place, as in OpenRLHF.
        labels: (...) token ids.
        temperature: divisor of the logits.
        own: OpenRLHF's function, for other logits.
    """
    if temperature != 1.0:
        logits.div_(temperature)
    found = log_probs_of(logits, labels)
    if found is not None:
        return found.log_probs
    return own(logits=made_all(LOG_PROBS, logits), temperature=1.0)


def compute_entropy(logits: Any, *, own: Callable[..., Tensor]) -> Tensor:
    """Return the entropies (...) of logits (..., V), in nats; `own` is OpenRLHF's function."""
    found = entropy_of(logits)
    return own(logits=made_all(ENTROPY, logits)) if found is None else found
