"""What a transformers model does to the logits of its head, as options of the loss."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from cutefce.integrations.deferral.logits import DeferredLogits
from cutefce.integrations.deferral.loss import transform_of
from cutefce.integrations.deferral.model import defer


def logit_options(model: Any, forward: Callable[..., Any]) -> dict[str, Any]:
    """Return what a model with a backbone `model` and a head `lm_head` does to its logits.

    These are the steps that its own `forward` takes with deferred logits, as arguments of the loss.

    Raises:
        NotImplementedError: if the forward does something else, or cannot be called.
    """
    config, name = model.config.get_text_config(), type(model).__name__
    hidden = torch.linspace(-1, 1, config.hidden_size).expand(1, 1, -1)
    head = nn.Linear(1, 1, bias=False)
    head.weight = nn.Parameter(torch.ones(1, 1).expand(config.vocab_size, config.hidden_size))
    defer(head, evaluation=True)
    shell = copy.copy(model)  # shares everything but its modules
    replaced = {"model": _Backbone(model.model, hidden), "lm_head": head}
    vars(shell)["_modules"] = {**model._modules, **replaced}
    try:
        with torch.no_grad():
            found = forward(shell, input_ids=torch.zeros(1, 1, dtype=torch.long)).logits
    except Exception as error:
        raise NotImplementedError(
            f"{name}: got an error where its forward would tell what it does to its logits: {error}"
        ) from error
    transform = None
    if isinstance(found, DeferredLogits) and found.shape == (1, 1, config.vocab_size):
        transform = transform_of(found.steps) if torch.equal(found.states, hidden) else None
    if transform is None or transform.shift is not None:
        raise NotImplementedError(
            f"{name}: got logits that are not those of its head, expected them scaled, capped or "
            "unchanged"
        )
    return transform.options()


class _Backbone:
    """A backbone whose last hidden states are given, and its other outputs None."""

    def __init__(self, own: nn.Module, hidden: Tensor) -> None:
        self.own, self.hidden = own, hidden

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)

    def __call__(self, *_: Any, **__: Any) -> Any:
        return _Outputs(self.hidden)


class _Outputs:
    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]
