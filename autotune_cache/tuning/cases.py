"""Inputs of checks, and the comparison of what kernels and the portable path make of them.

A kernel is compared on small problems with float64 results of the portable path on the CPU.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from cutefce.cute_kernels.problem import Problem

SMALL_PROBLEMS: dict[str, tuple[int, int, int]] = {
    "one row of few columns": (1, 8, 17),
    "rows far above their targets": (1100, 136, 3001),
    "a row of NaN": (257, 64, 1500),
}
"""(tokens, hidden, vocab) by the regime that each covers."""
SUM_ERROR = 2.0**-16
"""Relative error of float32 sums, which the kernels pass on as logarithms of up to 2**7."""
LOGIT_ERROR = 2.0**-13
"""Error of float32 logits of up to 2**8, hence the relative error of their exponentials."""


class MismatchError(Exception):
    """An output differs from the expected one by more than rounding explains."""


@dataclass(frozen=True)
class Case:
    """Inputs of one call."""

    problem: Problem
    h: Tensor
    """(N, D) hidden states."""
    w: Tensor
    """(V, D) weight."""
    y: Tensor
    """(N,) targets."""
    upstream: Tensor
    """(N,) gradient of each row's loss."""

    def exact(self) -> "Case":
        """Return the case, which is on the CPU, in float64."""
        problem = dataclasses.replace(self.problem, dtype="float64", device="cpu", arch=None)
        h, w, upstream = self.h.double(), self.w.double(), self.upstream.double()
        return Case(problem, h, w, self.y, upstream)

    def to(self, device: str) -> "Case":
        """Return the case with its tensors on `device`."""
        tensors = (x.to(device) for x in (self.h, self.w, self.y, self.upstream))
        return Case(self.problem, *tensors)


def small_case(name: str, problem: Problem) -> Case:
    """Return the inputs of a small `problem` on the CPU, in the regime of that `name`."""
    tokens, hidden, vocab = SMALL_PROBLEMS[name]
    dtype, random = getattr(torch, problem.dtype), torch.Generator().manual_seed(0)
    h = torch.randn(tokens, hidden, generator=random)
    w = torch.randn(vocab, hidden, generator=random) / hidden**0.5
    y = torch.randint(vocab, (tokens,), generator=random)
    upstream = torch.randn(tokens, generator=random)
    if name == "rows far above their targets":
        y[tokens // 2 :] = vocab - 1  # tiles whose tokens have one target
        far = torch.tensor([3, 130, 700, tokens - 1])
        h[far] *= 60
        y[far] = (h[far] @ w.t()).argmin(1)
        y[5::7] = -100
    elif name == "a row of NaN":
        h[100, 5] = torch.nan
    return Case(problem, h.to(dtype), w.to(dtype), y, upstream)


def full_case(problem: Problem, device: str) -> Case:
    """Return random inputs of `problem`, whose logits are as at the start of training."""
    torch.manual_seed(0)
    dtype = getattr(torch, problem.dtype)
    h = torch.randn(problem.tokens, problem.hidden, device=device, dtype=dtype)
    w = torch.randn(problem.vocab, problem.hidden, device=device, dtype=dtype)
    w.mul_(problem.hidden**-0.5)
    y = torch.randint(problem.vocab, (problem.tokens,), device=device)
    return Case(problem, h, w, y, torch.ones_like(y, dtype=torch.float32))


@dataclass(frozen=True)
class CheckedOutput:
    """An output, with how far it may be from the portable path's."""

    values: Tensor
    """(N, C), whose errors are relative to the largest value of a row, or (N,)."""
    roundings: int
    """How often its terms are rounded to their dtype."""
    floor: float = 1e-30
    """Added to the denominator of relative errors."""


Outputs = Mapping[str, CheckedOutput]
"""Outputs by name."""


def compare(got: Outputs, expected: Outputs, where: str) -> None:
    """Raise MismatchError where outputs differ from exact ones by more than rounding explains."""
    for name, output in got.items():
        dtype = output.values.dtype
        is_narrow = dtype.itemsize == 2
        unit = torch.finfo(dtype).eps / 2 if is_narrow else SUM_ERROR
        allowed = output.roundings * unit + (LOGIT_ERROR if is_narrow else 0)
        error = _max_relative_error(output, expected[name])
        if not error <= allowed:
            raise MismatchError(f"{where}: {name} is off by {error:.2g}, allowed {allowed:.2g}")


def _max_relative_error(got: CheckedOutput, expected: CheckedOutput) -> float:
    """Return the largest relative error; inf where only one of two values is finite."""
    a, b = (x.values.view(len(x.values), -1).cpu().double() for x in (got, expected))
    finite = b.isfinite()
    if not torch.equal(a.isfinite(), finite):
        return float("inf")
    size = b.abs().where(finite, 0).amax(1, keepdim=True)
    error = (a - b).abs() / (size + got.floor)
    return float(error.where(finite, 0).max())
