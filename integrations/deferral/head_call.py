"""What the logits of one call of a head share: its operands, and whether they have changed."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from cutefce.integrations.deferral import runners
from cutefce.ops import torch_compat
from cutefce.ops.operators.context import PLAIN_TYPES, outside_autocast

OPERANDS = "the head's input", "the head's weight", "the head's bias"
Compute = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Maps hidden states (..., D), weight (V, D) and bias (V,) or None to a result."""
WATCHING = "retain_grad", "register_hook", "register_post_accumulate_grad_hook"
"""Methods of tensors that watch their gradients."""


def is_here(w: Tensor) -> bool:
    """Whether a weight is whole and here, and not a shard or a placeholder of it."""
    if type(w) not in PLAIN_TYPES or w.ndim != 2:
        return False
    return torch.compiler.is_compiling() or w.untyped_storage().size() > 0


class HeadCall:
    """What all logits of one call of a head share."""

    def __init__(self, head: Any, hidden: Tensor) -> None:
        self.head, self.counts, self.loss_options = head, head.counts, head.loss_options
        self.dtype = hidden.dtype
        self.grad = torch.is_grad_enabled()
        self.inference = is_inference_mode()
        self.classes = head.weight.shape[0]
        """V, which the weight tells: `out_features` is no more than a name of it."""
        self.operands = hidden, head.weight, head.bias
        named = zip(OPERANDS, self.operands, strict=True)
        self.watched = [(name, x, _state(x)) for name, x in named if x is not None]
        """What logits are made of, operands and what was added to them, and its state then."""
        has_graph = self.grad and runners.looks_for_parameters()
        parameters = [x for x in self.operands[1:] if x is not None and x.requires_grad]
        self.graph = tuple(x[:0] for x in parameters) if has_graph else ()
        """Tensors without elements whose graphs contain the head's parameters."""
        self.is_in_function = self.grad and torch_compat.is_in_autograd_function()
        self.engine: Any = runners.deepspeed_engine() if self.grad else None
        """DeepSpeed's engine that runs the model."""
        self.is_fused = self.is_watched = False
        """Whether a loss was computed without logits, and whether their gradient is watched."""

    def add(self, x: Tensor) -> None:
        """Watch x, which was added to the logits, for changes before they are used."""
        self.watched.append(("what was added to them", x, _state(x)))

    def note_fused(self) -> None:
        """Count a loss that was computed without logits."""
        self.check_watched()
        self.is_fused = True
        self.counts.add()

    def check_watched(self) -> None:
        """Raise RuntimeError if gradients of these logits would pass those that are watched by."""
        if self.is_watched:
            raise RuntimeError(
                "logits: got a use of a view that was taken before retain_grad or a hook of the "
                "logits, which would miss its gradient; expected the view to be taken afterwards"
            )

    def watch(self, method: str) -> None:
        """Raise RuntimeError if a method that watches gradients of logits would miss some."""
        if self.is_fused:
            raise RuntimeError(
                f"logits: got {method} after a loss that was computed without them, expected it "
                "before; the loss then computes the logits"
            )
        self.is_watched = True

    def evaluate(self, compute: Compute, hidden: Tensor) -> Tensor:
        """Return `compute` of hidden states that are taken from the call's, weight and bias.

        Raises:
            RuntimeError: if what logits are made of has changed since, or is not here.
        """
        for name, x, state in self.watched:
            if state is not None and not torch.compiler.is_compiling():
                _check(state == _state(x), name)
        self.check_function()
        is_late = self._is_behind_engine()
        with outside_autocast(hidden.device.type):
            result = self._compute(compute, hidden)
        if is_late:
            for x in result if isinstance(result, tuple) else (result,):
                if isinstance(x, Tensor) and x.requires_grad:
                    x.register_hook(functools.partial(_check_engine, self.engine))
        return result

    def _compute(self, compute: Compute, hidden: Tensor) -> Tensor:
        _, weight, bias = self.operands
        if is_here(weight):  # the head may hold others, as after functional_call
            return compute(hidden, weight, bias)
        if is_here(self.head.weight):
            return compute(hidden, self.head.weight, self.head.bias)
        result: Tensor = self.head(hidden, compute)
        return result

    def check_function(self) -> None:
        """Raise RuntimeError in a torch.autograd.Function that got logits: it sees no tensor."""
        if self.grad and not self.is_in_function and torch_compat.is_in_autograd_function():
            raise RuntimeError(
                "logits: got deferred ones in torch.autograd.Function.apply, which would lose "
                "their gradient; pass logits + 0, or call cutefce.undefer(model)"
            )

    def is_lost_by_engine(self) -> bool:
        """Whether DeepSpeed's engine would miss the gradient of these logits, under ZeRO-3."""
        return self.engine is not None and not self.is_fused and hasattr(self.head.weight, "ds_id")

    def _is_behind_engine(self) -> bool:
        """Whether DeepSpeed's engine has returned and found nothing of these logits.

        It begins its backward where it finds the gradient of a tensor that it returned.

        Raises:
            RuntimeError: under ZeRO-3, which cannot do without.
        """
        if self.engine is None or self.is_fused or runners.deepspeed_engine() is self.engine:
            return False
        if self.is_lost_by_engine():
            raise RuntimeError(
                "logits: got a use of them after DeepSpeed's engine returned, under ZeRO-3, "
                "expected it in the forward of the model; compute the loss there, return "
                "logits + 0, or call cutefce.defer on the model in place of its head"
            )
        return True


class Memory:
    """The memory that torch's logits would have, and views of them; a copy has its own."""

    def __init__(self) -> None:
        self.is_changed = False
        """Whether something was written that those who have this memory do not see."""
        self.made: list[tuple[Tensor, int]] = []
        """Logits that were made, and their version then."""

    def check(self, own: Tensor | None = None) -> None:
        """Raise RuntimeError if logits of the memory, but for `own`, have changed since."""
        is_same = torch.compiler.is_compiling() or all(
            x is own or _version(x) == version for x, version in self.made
        )
        _check(is_same and not self.is_changed, "others that may share their memory")

    def note_made(self, logits: Tensor) -> None:
        """Watch logits that were made for changes that others of their memory do not see."""
        self.made.append((logits, _version(logits)))


def _check(is_same: bool, what: str) -> None:
    if not is_same:
        raise RuntimeError(
            f"logits: got a use of deferred ones after {what} changed (in place, or its "
            "requires_grad), expected it before, since they are computed when they are used: "
            "use them earlier, as a metric before optimizer.step(); or keep logits + 0, or "
            "call cutefce.undefer(model)"
        )


def _check_engine(engine: Any, gradient: Tensor) -> None:
    """Raise RuntimeError in a backward that DeepSpeed's engine has not begun."""
    if not engine._running_engine_backward:
        raise RuntimeError(
            "loss: got backward() of one that was computed after DeepSpeed's engine returned, "
            "expected engine.backward(loss)"
        )


def is_inference_mode() -> bool:
    """Whether inference mode is on; False in a compiled graph, which does not know it."""
    return not torch.compiler.is_compiling() and torch.is_inference_mode_enabled()


def _state(x: Tensor) -> tuple[int, bool] | None:
    """Return how often x was changed, and whether it needs a gradient.

    In a graph, None but for parameters: what else changes is not noticed.
    """
    if torch.compiler.is_compiling():
        return (x._version, x.requires_grad) if type(x) is nn.Parameter else None
    return _version(x), x.requires_grad


def _version(x: Tensor) -> int:
    """Return how often x was changed in place, as far as it counts that."""
    return 0 if torch.compiler.is_compiling() or x.is_inference() else x._version
