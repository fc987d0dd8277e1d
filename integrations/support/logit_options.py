"""What a transformers model does to the logits of its head, as options of the loss."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

SOFTCAPS = "final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap"
FACTORS = "logit_scale", "output_multiplier", "lm_head_multiplier"


def logit_options(model: Any, forward: Callable[..., Any]) -> dict[str, Any]:
    """Return `logit_scale` and `softcap` of a model with a backbone `model` and a head `lm_head`.

    They are those of its configuration, and compared with what its own `forward` does.

    Raises:
        NotImplementedError: if the forward does something else, or cannot be called.
    """
    config = model.config.get_text_config()
    factors = [getattr(config, name, None) for name in FACTORS]
    divisor = getattr(config, "logits_scaling", None)
    if divisor is not None:
        factors.append(divisor if config.model_type == "hyperclovax" else 1 / divisor)
    caps = [getattr(config, name, None) for name in SOFTCAPS]
    candidates = [x for x in factors if x is not None], [x for x in caps if x is not None]
    name = type(model).__name__
    raw = torch.linspace(-50, 50, config.vocab_size).expand(1, 1, -1)
    try:
        found = _logits(model, forward, raw)
    except Exception as error:
        raise NotImplementedError(
            f"{name}: got an error where its forward would tell what it does to its logits: {error}"
        ) from error
    for scale in (1.0, *candidates[0]):  # a model may ignore what its configuration has
        for cap in (None, *candidates[1]):
            expected = scale * raw if cap is None else cap * torch.tanh(scale * raw / cap)
            if found.shape == raw.shape and torch.allclose(found, expected, rtol=1e-5, atol=1e-4):
                return {"logit_scale": float(scale), "softcap": cap}
    raise NotImplementedError(
        f"{name}: got logits that are not those of its head, expected them unchanged, or with the "
        f"scale or softcap of {', '.join((*FACTORS, 'logits_scaling', *SOFTCAPS))}"
    )


def _logits(model: Any, forward: Callable[..., Any], raw: Tensor) -> Tensor:
    """Return what `forward` makes of logits (1, 1, V) of the head, without running the model."""
    hidden = torch.linspace(-1, 1, model.config.get_text_config().hidden_size).expand(1, 1, -1)
    shell = copy.copy(model)  # shares everything but its modules
    head = _Head(hidden, raw)
    replaced = {"model": _Backbone(model.model, hidden), "lm_head": head}
    vars(shell)["_modules"] = {**model._modules, **replaced}
    with torch.no_grad():
        found: Tensor = forward(shell, input_ids=torch.zeros(1, 1, dtype=torch.long)).logits
    return found


class _Head(nn.Module):
    """A head that knows its input and answers with given logits."""

    def __init__(self, hidden: Tensor, raw: Tensor) -> None:
        super().__init__()
        self.weight = torch.ones(1)
        self.hidden, self.raw = hidden, raw

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the logits, if the hidden states are those of the backbone."""
        if not torch.equal(hidden, self.hidden):
            raise NotImplementedError("the hidden states change before the head")
        return self.raw


class _Backbone(nn.Module):
    """A backbone whose last hidden states are given, and its other outputs None."""

    def __init__(self, own: nn.Module, hidden: Tensor) -> None:
        super().__init__()
        vars(self)["own"] = own
        self.hidden = hidden

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["own"], name)

    def forward(self, *_: Any, **__: Any) -> Any:
        """Return the outputs."""
        return _Outputs(self.hidden)


class _Outputs:
    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]
