"""slime: log-probabilities and entropies of its Megatron policies, without logits.

    import cutefce.integrations.slime

    cutefce.integrations.slime.enable()  # in each process, before its models are made

slime's own function still runs, with logits, where it masks classes for `--rollout-top-p`.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cutefce.integrations import megatron
from cutefce.integrations.support import hooks
from cutefce.ops.interface.log_probs import linear_log_probs

TESTED = "slime 0.3.1"
VALUES = "slime.backends.megatron_utils.loss:calculate_log_probs_and_entropy"
PROVIDER = "slime.backends.megatron_utils.model_provider:get_model_provider_func"

Values = tuple[Tensor, Tensor | None]
"""Log-probabilities (T, 1), and entropies (T,) or None."""


def enable() -> None:
    """Defer the logits of actors that are made from now on, and replace what is computed of them.

    Raises:
        ImportError: if slime is not installed.
        RuntimeError: if a function of slime has other parameters.
    """
    values, unused = log_probs_and_entropy, ["tp_group", "chunk_size"]
    hooks.replace(VALUES, values, tested=TESTED, importers="slime", unused=unused)
    options: dict[str, Any] = {"unused": ["args"], "is_counted": False}
    hooks.replace(PROVIDER, model_provider, tested=TESTED, importers="slime", **options)


def model_provider(
    role: str = "actor", *, own: Callable[[], Callable[..., Any]]
) -> Callable[..., Any]:
    """Return slime's function that makes a model, whose logits are deferred unless it is a critic.

    That raises what `cutefce.integrations.megatron.enable` raises.
    """
    make = own()
    if role == "critic":
        return make

    @functools.wraps(make)
    def make_deferred(*arguments: Any, **named: Any) -> Any:
        model = make(*arguments, **named)
        megatron.replace_head(model, HeadLogits)
        return model

    return make_deferred


def log_probs_and_entropy(
    logits: Any,
    tokens: Tensor,
    with_entropy: bool = False,
    log_prob_keep_mask: Tensor | None = None,
    with_entropy_grad: bool = True,
    *,
    own: Callable[..., Values],
) -> Values:
    """Return log-probabilities (T, 1) and entropies (T,), or None for these, in float32.

    The parameters are slime's, but for `tp_group` and `chunk_size`.

    Args:
        logits: (T, V / ranks), deferred or not.
        tokens: (T,) token ids of all ranks' classes.
        with_entropy: whether entropies are wanted.
        log_prob_keep_mask: (T, V / ranks) the classes that count, or None.
        with_entropy_grad: whether entropies have a gradient.
        own: slime's function, for other logits and for masks.
    """
    if not isinstance(logits, Logits) or log_prob_keep_mask is not None:
        return own(logits=logits.logits() if isinstance(logits, Logits) else logits)
    weight, options = megatron.head_options(logits.head, logits.weight)
    found = linear_log_probs(
        logits.hidden,
        weight,
        tokens[:, None],
        outputs=("entropy",) if with_entropy else (),
        logit_scale=logits.scale,
        **options,
    )
    entropy = None if found.entropy is None else found.entropy[:, 0]
    if entropy is not None and not with_entropy_grad:
        entropy = entropy.detach()
    return found.log_probs, entropy


@dataclass(frozen=True, eq=False)
class Logits(megatron.DeferredLogits):
    """What a model returns: logits (B, S, V / ranks) in float32, or (S, V / ranks) of one batch.

    Megatron casts tensors that a model returns to float32, but not this object.
    """

    shape: tuple[int, ...] = ()

    dtype = torch.float32

    @property
    def device(self) -> torch.device:
        """Where the logits would be."""
        return self.hidden.device

    def size(self, dim: int | None = None) -> Any:
        """Return the shape, or one of its sizes."""
        return self.shape if dim is None else self.shape[dim]

    def contiguous(self) -> Any:
        """Return the same logits."""
        return self

    def squeeze(self, dim: int) -> Any:
        """Return the logits of the only batch."""
        if dim != 0 or len(self.shape) != 3 or self.shape[0] != 1:
            return self.logits().squeeze(dim)
        return replace(self, project=lambda: self.project().squeeze(0), shape=self.shape[1:])

    def div(self, number: Any) -> Any:
        """Return the logits divided by a temperature."""
        return self * (1 / number) if isinstance(number, float | int) else self.logits() / number

    __truediv__ = div

    def __getitem__(self, index: Any) -> Tensor:
        return self.logits()[index]


class HeadLogits(megatron.DeferredLogits):
    """What the head of an actor returns: logits (S, B, V / ranks)."""

    def transpose(self, dim0: int, dim1: int) -> Any:
        """Return what the model returns."""
        if (dim0, dim1) != (0, 1):
            return self.logits().transpose(dim0, dim1)
        length, batch, _ = self.hidden.shape
        if self.head.sequence_parallel:
            length *= self.head.tp_group.size()

        def project() -> Tensor:
            return self.project().transpose(0, 1).float()

        operands = self.head, self.hidden, self.weight
        return Logits(*operands, project, self.scale, (batch, length, len(self.weight)))
