"""Inputs, launch arguments and exact results of `project_exp`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from cutefce.cute_kernels.integers import ceil_div, round_up
from cutefce.cute_kernels.spec.gemm import ProjectExpSpec
from cutefce.cute_kernels.variant import IDENTITY, LogitTransform
from cutefce.cute_kernels.workspace import Semaphore
from tests.support.outputs import floors

SLOPE = 0.3
"""s of a softcap."""


@dataclass
class Launch:
    """The arguments of a launch, as numpy arrays; 16-bit numbers are patterns."""

    h: Any
    w: Any
    reference: Any
    target: Any
    sums: Any
    exps: Any
    semaphores: Any
    first: int
    vocab_splits: int
    transform: tuple[Any, Any, float | None] | None
    reductions: Any
    samples: tuple[Any, ...] | None = None
    count: int | None = None
    """Rows that count; None for all."""
    may_skip: bool = False
    """Whether nothing is written where none counts."""

    def run(
        self, run: Callable[..., None], kernel: ProjectExpSpec, clusters: int, **how: Any
    ) -> None:
        """Run the kernel with a `run` of this package."""
        vectors = self.reference, self.target, self.sums, self.exps, self.semaphores
        count = np.array([self.count or 0], np.int32), int(self.count is not None) + self.may_skip
        options = self.transform, self.reductions, self.samples
        rest = *options, *count, self.first, self.vocab_splits, clusters
        run(kernel, self.h, self.w, *vectors, *rest, **how)


class Case:
    """Inputs and exact results."""

    def __init__(
        self,
        tokens: int,
        hidden: int,
        vocab: int,
        first: int = 0,
        scale: float = 3.0,
        transform: LogitTransform = IDENTITY,
    ):
        generator = torch.Generator().manual_seed(0)
        self.h = torch.randn(tokens, hidden, generator=generator).bfloat16()
        self.w = torch.randn(vocab, hidden, generator=generator) * scale / hidden**0.5
        self.w = self.w.bfloat16()
        self.y = torch.randint(vocab, (tokens,), generator=generator) + first
        self.y[tokens // 2] = -100
        self.first, self.columns = first, round_up(vocab, 8)
        self.softcap = transform.softcap
        scales = 2 + 4 * torch.rand(tokens, generator=generator)
        biases = torch.randn(vocab, generator=generator)
        self.row_scale = scales if transform.row_scale else torch.ones(tokens)
        self.bias = biases if transform.bias else torch.zeros(vocab)
        operands: tuple[Any, ...] = (
            scales.numpy() if transform.row_scale else None,
            biases.numpy() if transform.bias else None,
            SLOPE if transform.softcap else None,
        )
        self.floor = torch.full((tokens,), -torch.inf)
        if transform.floor:
            operands = *operands, self.floor.numpy()
        self.transform = None if transform == IDENTITY else operands
        self.rows, self.own = torch.arange(tokens), (self.y - first).clamp(0)
        if transform.floor:
            self.draw_floors()
        self.reference = self.logits()[0][self.rows, self.own].float()

    def draw_floors(self) -> None:
        """Choose floors of rows with a target, far from their logits."""
        self.floor.fill_(-torch.inf)
        self.floor[:] = torch.where(self.y >= 0, floors(self.logits()[0]).float(), -torch.inf)

    def repeat_row(self) -> None:
        """Make all rows equal; every other target is the class of the largest logit."""
        self.h[:], self.row_scale[:] = self.h[:1].clone(), self.row_scale[:1].clone()
        u = self.logits()[0][0]
        self.y[::2], self.y[len(self.y) // 2] = int(u.argmax()) + self.first, -100
        self.own = (self.y - self.first).clamp(0)
        self.reference = self.logits()[0][self.rows, self.own].float()

    def logits(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits u and the derivative of tanh, 1 without softcap, in float64.

        Those below floors, but for targets', are -inf.
        """
        z = self.h.double() @ self.w.double().t() + self.bias.double()
        tanh = torch.tanh(z * float(np.float32(SLOPE))) if self.softcap else z
        scaled = self.row_scale.double()[:, None] * tanh
        is_target = torch.arange(len(self.w)) == (self.y - self.first)[:, None]
        scaled.masked_fill_((scaled < self.floor.double()[:, None]) & ~is_target, -torch.inf)
        return scaled, 1 - tanh**2 if self.softcap else torch.ones_like(z)

    def others(self) -> torch.Tensor:
        """Return u, -inf at the target, in float64."""
        u, _ = self.logits()
        u[self.rows, self.own] += torch.where(self.y >= 0, -torch.inf, 0.0).double()
        return u

    def exact(self) -> Any:
        """Return exp(u - ρ), 0 at the target, in float64."""
        return torch.exp(self.others() - self.reference.double()[:, None]).numpy()

    def launch(self, kernel: ProjectExpSpec, vocab_splits: int, semaphore: int = 0) -> Launch:
        """Return launch arguments with outputs to fill, and semaphores of a value."""
        blocks = ceil_div(len(self.y), kernel.config.rows)
        shape = len(self.y), vocab_splits * kernel.config.partials_per_row
        exps = np.full((len(self.y), self.columns), 0x7FFF, np.uint16)
        planes = kernel.reductions.planes
        return Launch(
            h=patterns(self.h),
            w=patterns(self.w),
            reference=self.reference.numpy(),
            target=self.y.numpy(),
            sums=np.full(shape, np.nan, np.float32) if kernel.sums else None,
            exps=exps if kernel.store else None,
            semaphores=np.full(Semaphore.REPAIR_FLAGS + blocks, semaphore, np.int32),
            first=self.first,
            vocab_splits=vocab_splits,
            transform=self.transform,
            reductions=np.full((planes, *shape), np.nan, np.float32) if planes else None,
        )


def patterns(x: torch.Tensor) -> Any:
    return x.view(torch.int16).numpy().view(np.uint16)


def numbers(exps: Any) -> Any:
    """Return the numbers of bfloat16 patterns."""
    return (exps.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def check(launch: Launch, case: Case) -> None:
    """Compare sums and exponentials of the rows that count with the exact ones."""
    rows = slice(launch.count)
    exact = case.exact()[rows]
    if launch.sums is not None:
        # the log2 sum of a split without tiles is -inf
        total = np.exp2(launch.sums[rows].astype(np.float64)).sum(1)
        np.testing.assert_allclose(total, exact.sum(1), rtol=1e-5)
    if launch.exps is not None:
        got, vocab = numbers(launch.exps[rows]), len(case.w)
        stored = exact * case.logits()[1][rows].numpy()
        # 1 - tanh² cancels: its error is relative to 1
        allowed = 1.01 * 2**-8 * stored + 1e-30 + (1e-6 * exact if case.softcap else 0)
        assert (abs(got[:, :vocab] - stored) <= allowed).all()
        assert (got[:, vocab:] == 0).all()
