"""What a call adds to its problem: copies of operands, and where dW goes."""

from dataclasses import dataclass
from typing import Any

from cutefce.cute_kernels.problem import Problem


@dataclass(frozen=True)
class CallProblem(Problem):
    """A problem whose operands are copied, or whose dW is added to a buffer of the caller's."""

    copied_hidden: int = 0
    """Bytes per element of the hidden states as given, if the call works on a copy of them that
    lives until its backward, as under autocast; else 0."""
    copied_weight: int = 0
    """The same of the weight."""
    dense_bytes: int = 0
    """Bytes of operands that forward and backward each copy to a layout that GEMMs can address."""
    accumulates: bool = False
    """Whether dW is added to a buffer and not returned."""
    soft_targets: int = 0
    """Classes of each token's soft targets; 0 without any."""
    returns_classes: bool = False
    """Whether these are classes whose log-probabilities are returned."""
    adds_in_place: bool = True
    """Whether GEMMs can add to that buffer; else dW is computed beside it, some rows at a time."""
    knows_upstream: bool = False
    """Whether the upstream gradient of the loss is known before the backward."""
    samples: int = 0
    """Entries of a token that sampled gradients expect to keep; 0 for exact gradients."""
    smooths: bool = False
    """Whether label smoothing adds a part to sampled gradients."""

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients that are returned."""
        dw = self.vocab * self.hidden * self.grad_weight_bytes * self.grad_weight
        return super().gradient_bytes - dw * self.accumulates


def with_call(p: Problem, **fields: Any) -> CallProblem:
    """Return the problem of a call, with the `fields` given and all others those of `p`."""
    return CallProblem(**{**vars(p), **fields})


def accumulates(p: Problem) -> bool:
    """Whether dW is added to a buffer of the caller's."""
    return isinstance(p, CallProblem) and p.accumulates and p.grad_weight


def adds_in_forward(p: Problem) -> bool:
    """Whether gradients in forward add dW to that buffer, and need no sums of their own."""
    return isinstance(p, CallProblem) and accumulates(p) and p.adds_in_place and p.knows_upstream


def soft_targets(p: Problem) -> int:
    """Return the classes of each token beside its target that are handled one by one."""
    return p.soft_targets if isinstance(p, CallProblem) and p.soft_targets > 1 else 0


def is_sampled(p: Problem) -> bool:
    """Whether gradients are formed of sampled exponentials."""
    return isinstance(p, CallProblem) and p.samples > 0 and forms_gradients(p)


def forms_gradients(p: Problem) -> bool:
    """Whether any gradient is computed."""
    return p.gradient_bytes > 0 or accumulates(p)
