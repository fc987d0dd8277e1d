"""The head and its loss as a module, with the names of `torch.nn.LinearCrossEntropyLoss`."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from cutefce.ops.interface import checks, option_checks
from cutefce.ops.interface.api import linear_cross_entropy


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

    The other arguments are those of `linear_cross_entropy`.

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
        **removed: Any,
    ) -> None:
        """Make the head; the parameters are those of torch's module and of the function."""
        super().__init__()
        numbers: dict[str, Any] = {
            "label_smoothing": label_smoothing,
            "z_loss": z_loss,
            "logit_scale": logit_scale,
            "softcap": softcap,
        }
        for name, value in {
            "reduction": reduction,
            "bias": bias,
            "gradient": gradient,
            "samples": samples,
            **numbers,
            **removed,
        }.items():
            checks.check_type(name, value)
        option_checks.check_sizes(in_features, num_classes, out_features)
        checks.check_type("weight", weight)
        if weight is not None:
            option_checks.check_factors("weight", weight, weight, (num_classes,))
        if ignore_index is not None:
            checks.check_ignore_index(ignore_index)
        checks.check_reduction(reduction)
        checks.workspace_bytes(workspace)
        checks.refuse_options(options)
        option_checks.check_numbers(**numbers)
        option_checks.check_sampling(gradient, samples)
        self.out_features = tuple(out_features)
        rows = math.prod(self.out_features, start=num_classes)
        self.linear = nn.Linear(in_features, rows, bias=bias, device=device, dtype=dtype)
        self.register_buffer("weight", weight)
        self.num_classes = num_classes
        self.reduction = reduction
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing
        self.z_loss = z_loss
        self.logit_scale = logit_scale
        self.softcap = softcap
        self.gradient = gradient
        self.samples = samples
        self.workspace = workspace

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
        option_checks.check_linear(self.linear)
        weight: Tensor = self.linear.weight
        option_checks.check_features(input, weight.shape[1])
        bias: Tensor | None = self.linear.bias
        if self.out_features:
            sizes = self.num_classes, *self.out_features
            weight = weight.reshape(*sizes, -1)
            bias = None if bias is None else bias.reshape(sizes)
        return linear_cross_entropy(
            input,
            weight,
            target,
            target_indices=target_indices,
            target_probs=target_probs,
            linear_bias=bias,
            weight=self.weight,
            reduction=self.reduction,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            token_weights=token_weights,
            z_loss=self.z_loss,
            logit_scale=self.logit_scale,
            softcap=self.softcap,
            temperature=temperature,
            gradient=self.gradient,
            samples=self.samples,
            workspace=self.workspace,
            denominator=denominator,
            accumulate_into=accumulate_into,
            grad_output=grad_output,
        )

    def extra_repr(self) -> str:
        """Show the common options, and others that are not at their defaults."""
        shown = {
            name: getattr(self, name)
            for name, default in (
                ("out_features", ()),
                ("label_smoothing", 0.0),
                ("z_loss", 0.0),
                ("logit_scale", 1.0),
                ("softcap", None),
                ("gradient", "exact"),
                ("samples", 256),
            )
            if getattr(self, name) != default
        }
        if self.out_features:
            shown["num_classes"] = self.num_classes
        more = "".join(f", {name}={value!r}" for name, value in shown.items())
        return (
            f"reduction={self.reduction!r}, ignore_index={self.ignore_index}, "
            f"workspace={self.workspace!r}{more}"
        )
