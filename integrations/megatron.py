"""Megatron-Core: the loss of models whose head is parallel over the vocabulary, without logits.

Call `enable(model)` after the model is built: it serves MuP and multi-token prediction.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import megatron.core
import torch
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from cutefce.integrations.options import loss_options
from cutefce.integrations.report import note_call
from cutefce.integrations.support import hooks
from cutefce.integrations.support.main_grad import with_main_grad
from cutefce.integrations.support.nested import replaced
from cutefce.ops.interface.api import linear_cross_entropy

TESTED = "megatron-core 0.16.1 0.19.2"


def enable(model: Any) -> None:
    """Let the loss of `model` be fused: its head defers the logits, its loss is cutefce's.

    Logits are computed if something else than the loss asks for them, or if they are gathered.
    Losses of negative labels are 0; Megatron's are left to the loss mask.

    Args:
        model: GPTModel, MambaModel or HybridModel, also wrapped.  A pipeline stage without head
            stays as it is.

    Raises:
        TypeError: if the head is not a `ColumnParallelLinear`.
        RuntimeError: if it was enabled before, or this version has other parameters.
        NotImplementedError, ValueError: naming an option that is not served.
    """
    replace_head(model, DeferredLogits)


def replace_head(model: Any, kind: "type[DeferredLogits]") -> None:
    """Do what `enable` does, with a head that returns objects of `kind`."""
    version = megatron.core.__version__
    path = "megatron.core.tensor_parallel.layers:ColumnParallelLinear.forward"
    parameters = "self", "input_", "weight", "runtime_gather_output"
    hooks.check(path, parameters, TESTED, version=version)
    path = f"{LanguageModule.__module__}:LanguageModule.compute_language_model_loss"
    hooks.check(path, ("self", "labels", "logits"), TESTED, version=version)
    while not isinstance(model, LanguageModule):
        if not hasattr(model, "module"):
            raise TypeError(f"model: got {type(model).__name__}, expected a LanguageModule")
        model = model.module
    if not model.post_process:
        return
    head = getattr(model, "output_layer", None)
    if not isinstance(head, ColumnParallelLinear):
        raise TypeError(f"output_layer: got {type(head).__name__}, expected a ColumnParallelLinear")
    check_options(head)
    config = head.config
    if config.cross_entropy_loss_fusion and config.cross_entropy_fusion_impl == "linear":
        raise ValueError("cross_entropy_fusion_impl: got 'linear', expected another")
    if "forward" in vars(head) or "compute_language_model_loss" in vars(model):
        raise RuntimeError(
            "model: its head or loss is replaced already, expected one enable(model)"
        )
    own_forward: Callable[..., tuple[Tensor, Tensor | None]] = head.forward
    own_loss: Callable[[Tensor, Tensor], Tensor] = model.compute_language_model_loss

    def forward(
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
        **options: Any,
    ) -> tuple[Any, Tensor | None]:
        gather = head.gather_output if runtime_gather_output is None else runtime_gather_output
        used = head.weight if weight is None else weight
        if gather or options or used is None:
            return own_forward(input_, weight, runtime_gather_output, **options)
        check_whole(head, used)
        return kind(head, input_, used, lambda: own_forward(input_, used)[0]), None

    def loss_of(labels: Tensor, logits: Any) -> Tensor:
        is_deferred = isinstance(logits, DeferredLogits)
        note_call(path, is_fused=is_deferred)
        if is_deferred:
            return losses(head, logits.hidden, logits.weight, labels, logits.scale)
        return own_loss(labels, logits)

    head.forward, model.compute_language_model_loss = forward, loss_of


@dataclass(frozen=True, eq=False)
class DeferredLogits:
    """What the head returns: logits (S, B, V / ranks), which are computed when needed."""

    head: Any
    """A `ColumnParallelLinear`."""
    hidden: Tensor
    """(S, B, D), or with sequence parallelism (S / ranks, B, D)"""
    weight: Tensor
    """(V / ranks, D)"""
    project: Callable[[], Tensor]
    """Computes the logits without scale."""
    scale: float = 1.0

    def __mul__(self, factor: Any) -> Any:
        if isinstance(factor, float | int):
            return replace(self, scale=self.scale * factor)
        return self.logits() * factor

    def logits(self) -> Tensor:
        """Return the logits."""
        return self._compute() if torch.is_grad_enabled() else self._without_gradient

    @cached_property
    def _without_gradient(self) -> Tensor:
        return self._compute()

    def _compute(self) -> Tensor:
        logits = self.project()
        return logits if self.scale == 1 else logits * self.scale

    def __getattr__(self, name: str) -> Any:
        return getattr(self.logits(), name)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call a function of torch on the logits."""
        made, named = replaced((args, kwargs or {}), cls, cls.logits)
        return function(*made, **named)


def losses(head: Any, hidden: Tensor, weight: Tensor, labels: Tensor, scale: float) -> Tensor:
    """Return the losses (B, S), in the layout of `labels`."""
    weight, options = head_options(head, weight)
    loss: Tensor = linear_cross_entropy(
        hidden,
        weight,
        labels.masked_fill(labels < 0, -100).transpose(0, 1),
        logit_scale=scale,
        reduction="none",
        **options,
    )
    return loss.transpose(0, 1).contiguous()


def head_options(head: Any, weight: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """Return the weight of a call for a head, and those arguments that the head decides."""
    options: dict[str, Any] = loss_options()
    if head.gradient_accumulation_fusion:
        weight, options["accumulate_into"] = with_main_grad(weight)
    options["group"] = head.tp_group if head.tp_group.size() > 1 else None
    options["sequence_parallel"] = head.sequence_parallel
    return weight, options


def check_options(head: Any) -> None:
    """Raise NotImplementedError, naming the option, if the head has one that is not served."""
    unserved = {
        "defer_embedding_wgrad_compute": head.config.defer_embedding_wgrad_compute,
        "disable_grad_reduce": head.disable_grad_reduce,
        "add_bias_linear": head.bias is not None,
        "gtp_remat_size": getattr(head, "gtp_remat_size", 1) > 1,
    }
    for name, on in unserved.items():
        if on:
            raise NotImplementedError(f"{name}: on in the output layer, expected off")


def check_whole(head: Any, weight: Tensor) -> None:
    """Raise NotImplementedError if the weight is gathered in the head's forward alone."""
    sharded = isinstance(head, FSDPModule) or isinstance(weight, DTensor) or not weight.numel()
    if sharded or hasattr(weight, "__fsdp_param__"):
        raise NotImplementedError(
            f"output_layer: got a weight that {type(head).__name__}'s FSDP shards, expected one "
            "that is sharded over the vocabulary alone"
        )
