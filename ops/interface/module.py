"""The head and its loss as a module, with the names of `torch.nn.LinearCrossEntropyLoss`."""

import inspect
import math
from typing import Any

import torch
from torch import Tensor, nn

from cutefce.ops.interface import checks
from cutefce.ops.interface.api import linear_cross_entropy, refuse_chunking
from cutefce.ops.interface.arguments import LossOptions, check_arguments, refuse
from cutefce.ops.parallel.consistency import report_errors

ATTRIBUTES = *LossOptions.names(of="loss"), "workspace"
"""The arguments that are attributes of a module."""
DEFAULTS = LossOptions()


class LinearCrossEntropyLoss(nn.Module):
    """A linear head and its cross entropy, with the names of `torch.nn.LinearCrossEntropyLoss`.

    The parameters are `linear.weight` (num_classes, in_features) and, with `bias`, `linear.bias`.
    State dicts can be exchanged with torch's module.  A weight that is sharded by vocabulary, as a
    DTensor beside an input that is one, selects the group that shares the loss.

    Shapes: forward takes input (..., in_features) and target (...); with `out_features`
    (d_1, ..., d_K), input (N, in_features) and target (N, d_1, ..., d_K).

    Args:
        in_features: D, the hidden size.
        num_classes: V, the size of the vocabulary.
        out_features: (d_1, ..., d_K) of a loss of K dimensions; () of a plain one.
        bias: whether the head has a bias.
        device: device of the parameters.
        dtype: dtype of the parameters.
        weight: (num_classes,) factor of each class's losses, a buffer of the module.

    The other arguments are those of `linear_cross_entropy`; `**others` are refused.

    Raises:
        TypeError, ValueError, NotImplementedError: naming the argument, what was got and what is
            expected.
    """

    weight: Tensor | None

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        out_features: tuple[int, ...] = (),
        bias: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        reduction: str = "mean",
        weight: Tensor | None = None,
        ignore_index: int | None = None,
        label_smoothing: float = 0.0,
        options: Any = None,
        z_loss: float = 0.0,
        logit_scale: float = 1.0,
        softcap: float | None = None,
        gradient: str = "exact",
        samples: int = 256,
        workspace: int | str | None = None,
        **others: Any,
    ) -> None:
        """Make the head; the parameters are those of torch's module and of the function."""
        super().__init__()
        for name, value in others.items():
            of_call = name in inspect.signature(self.forward).parameters
            refuse({name: value}, ATTRIBUTES, "; pass it to the call" if of_call else "")
        self.reduction = reduction
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing
        self.z_loss = z_loss
        self.logit_scale = logit_scale
        self.softcap = softcap
        self.gradient = gradient
        self.samples = samples
        self.workspace = workspace
        given = self._attributes()
        more = {"in_features": in_features, "num_classes": num_classes, "bias": bias}
        check_arguments(given | more | {"weight": weight, "out_features": out_features})
        LossOptions.from_keywords({n: x for n, x in given.items() if x is not None}).check()
        checks.workspace_bytes(workspace)
        if dtype is not None:
            checks.check_dtype("dtype", torch.empty(0, dtype=dtype, device="meta"))
        refuse_chunking(options)
        if weight is not None:
            of = checks.Operands(weight, weight, (), num_classes)
            checks.check_floats("weight", weight, of, (num_classes,))
        self.num_classes = num_classes
        self.out_features = tuple(out_features)
        rows = math.prod(self.out_features, start=num_classes)
        self.linear = nn.Linear(in_features, rows, bias=bias, device=device, dtype=dtype)
        self.register_buffer("weight", weight)

    def _attributes(self) -> dict[str, Any]:
        """Return the arguments that are attributes of the module."""
        return {name: getattr(self, name) for name in ATTRIBUTES}

    def forward(
        self,
        input: Tensor,
        target: Tensor | None = None,
        denominator: Tensor | float | None = None,
        token_weights: Tensor | None = None,
        temperature: Tensor | float = 1.0,
        accumulate_into: Tensor | None = None,
        target_indices: Tensor | None = None,
        target_probs: Tensor | None = None,
        grad_output: Tensor | float | None = None,
    ) -> Tensor:
        """Return the loss of input (..., in_features) against target (...), or soft targets.

        A floating-point target is (..., num_classes).  More than eight parameters: those of the
        function that differ from call to call.
        """
        with report_errors(None, getattr(self.linear, "weight", None)):
            _check_linear(self.linear)
            weight: Tensor = self.linear.weight
        bias: Tensor | None = self.linear.bias
        if self.out_features:
            sizes = self.num_classes, *self.out_features
            weight = weight.reshape(*sizes, -1)
            bias = None if bias is None else bias.reshape(sizes)
        loss: Tensor = linear_cross_entropy(
            input,
            weight,
            target,
            target_indices=target_indices,
            target_probs=target_probs,
            linear_bias=bias,
            weight=self.weight,
            token_weights=token_weights,
            temperature=temperature,
            denominator=denominator,
            accumulate_into=accumulate_into,
            grad_output=grad_output,
            **self._attributes(),
        )
        return loss

    def extra_repr(self) -> str:
        """Show the common options, and others that are not at their defaults."""
        given, always = self._attributes(), ("reduction", "ignore_index", "workspace")
        shown: dict[str, Any] = {name: given.pop(name) for name in always}
        if self.out_features:
            shown["out_features"] = self.out_features
        shown |= {name: x for name, x in given.items() if x != getattr(DEFAULTS, name)}
        if self.out_features:
            shown["num_classes"] = self.num_classes
        return ", ".join(f"{name}={value!r}" for name, value in shown.items())


def _check_linear(linear: Any) -> None:
    """Raise TypeError unless the head is a plain `nn.Linear`, whose parameters alone are used."""
    hooks = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
    if not isinstance(linear, nn.Linear) or type(linear).forward is not nn.Linear.forward:
        got = type(linear).__name__
    elif any(getattr(linear, name) for name in hooks):
        got = "hooks"
    else:
        return
    raise TypeError(
        f"linear: got {got}, expected a torch.nn.Linear without hooks: the loss uses its "
        "parameters and does not call it; merge an adapter into the weight, apply fully_shard to "
        "the module that holds it, call torch.nn.utils.prune.remove, or take weight_norm of "
        "torch.nn.utils.parametrizations"
    )
