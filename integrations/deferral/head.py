"""The head, whose forward returns deferred logits where a loss may follow."""

from typing import Any

import torch
from torch import Tensor, nn

from cutefce.integrations.deferral import runners
from cutefce.integrations.deferral.head_call import Compute, HeadCall, Memory, is_here
from cutefce.integrations.deferral.logits import DeferredLogits
from cutefce.integrations.deferral.report import Counts
from cutefce.ops import torch_compat
from cutefce.ops.interface.checks import DTYPES
from cutefce.ops.operators.context import PLAIN_TYPES, is_autocasting


class DeferringLinear(nn.Linear):
    """A linear head whose logits are deferred in training; `defer` makes it of an `nn.Linear`."""

    counts: Counts
    in_evaluation: bool
    """Whether logits are deferred in evaluation and without gradients too."""
    loss_options: dict[str, Any]
    """Arguments of `linear_cross_entropy` beside those of the model's loss."""
    runner: str = ""
    """Why what runs the model needs logits of the head itself, "" if it does not."""

    @property
    def is_deferring(self) -> bool:
        """Whether it was not undone, which leaves the class of a head that FSDP has wrapped."""
        return "counts" in self.__dict__

    def forward(self, input: Tensor, compute: Compute | None = None) -> Tensor:
        """Return the logits (..., V) of input (..., D), deferred or not.

        With `compute`, return its result of input, weight and bias, for wrappers that gather the
        weight around the call of a module.
        """
        if compute is not None:
            if not is_here(self.weight):
                raise RuntimeError(
                    "logits: got a use of them where the head's weight is sharded, expected it "
                    "before the backward, and in the forward of the model, or with FSDP2 applied "
                    "to the head: fully_shard(head)"
                )
            return compute(input, self.weight, self.bias)
        is_tensor = isinstance(input, Tensor)  # and not of a tracer
        if not self.is_deferring or not is_tensor or not self._is_asked(input):
            return super().forward(input)
        obstacle = self._obstacle(input)
        if obstacle:
            self.counts.add(obstacle)
            return super().forward(input)
        if is_autocasting(input.device.type) and input.dtype != torch.float64:
            input = input.to(torch.get_autocast_dtype(input.device.type))
        call = HeadCall(self, input)
        classes, dtype = (0, call.classes), input.dtype
        logits: Any = DeferredLogits(call, input, input.ndim - 1, classes, (), dtype, Memory())
        return logits  # type: ignore[no-any-return]

    def _is_asked(self, input: Tensor) -> bool:
        """Whether logits are deferred here: in training, by mode or by gradients, or anywhere."""
        operands = input, self.weight, self.bias
        needs_grad = any(x is not None and x.requires_grad for x in operands)
        return self.in_evaluation or (torch.is_grad_enabled() and (self.training or needs_grad))

    def _obstacle(self, input: Tensor) -> str:
        """Return why the logits of input cannot be deferred, "" if they can."""
        if torch_compat.is_transformed():
            return "torch.func"
        if torch.compiler.is_exporting():
            return "torch.export"
        if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
            return "torch.jit.trace"
        weight = self.weight
        if not is_here(weight):
            kind = "a DTensor" if torch_compat.is_dtensor(weight) else "not a whole, plain tensor"
            return f"weight: {kind}"
        if type(input) not in PLAIN_TYPES:
            return f"input: {type(input).__name__}"
        if getattr(self, "_is_replica", False):
            return "nn.DataParallel"
        if not torch.is_grad_enabled() and torch_compat.is_in_reentrant_checkpoint():
            return "checkpoint with use_reentrant=True"
        if torch_compat.checkpoint_returned_rows():
            return "checkpoint with use_reentrant=True that returns more than a loss"
        if self._backward_hooks or self._backward_pre_hooks:
            return "backward hooks of the head"
        if not torch_compat.is_in_backward():  # a checkpoint decides again as in its forward
            self.runner = runners.obstacle()
        if self.runner:
            return self.runner
        casts = is_autocasting(input.device.type) and torch.float64 not in (
            input.dtype,
            weight.dtype,
        )
        if not {input.dtype, weight.dtype} <= DTYPES or not (casts or input.dtype == weight.dtype):
            return f"dtypes: {input.dtype} beside {weight.dtype}"
        if input.device != weight.device or input.ndim == 0 or input.shape[-1] != weight.shape[1]:
            return "input: not on the weight's device, or of another size"
        return ""
