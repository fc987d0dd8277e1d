"""Candidates for the tuner that need no GPU: the portable primitives, right, slow or faulty."""

import ctypes
import resource
import time
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import torch

from cutefce import autotune_cache
from cutefce.autotune_cache.table import Choice
from cutefce.autotune_cache.tunables import ProjectExp
from cutefce.cute_kernels.config import GemmConfig
from cutefce.cute_kernels.kernels import Kernel
from cutefce.cute_kernels.problem import Problem
from cutefce.ops.primitives import Primitives
from cutefce.ops.torch_primitives import TorchPrimitives


class Kind(IntEnum):
    """How a candidate behaves; the raster group of its configuration says it."""

    SLOW = 1
    FAST = 2
    HANGS = 3
    CRASHES = 4
    WRONG_GRADIENTS = 5
    WRONG_SUMS = 6
    LEAKS = 7


def config(kind: Kind) -> GemmConfig:
    """Return a configuration that stands for `kind`."""
    return GemmConfig(128, 128, cluster=1, stages=6, pingpong=True, group=kind)


class Faulty(TorchPrimitives):
    """The portable primitives, with a fault."""

    kind: Kind
    held: list[torch.Tensor] = []  # noqa: RUF012 - leaks for good

    def project_exp(self, *arguments: Any) -> Any:
        if self.kind is Kind.SLOW:
            time.sleep(0.1)
        elif self.kind is Kind.HANGS:
            time.sleep(3600)
        elif self.kind is Kind.CRASHES:
            ctypes.string_at(0)
        elif self.kind is Kind.LEAKS:
            _limit_memory(1 << 30)
            self.held.append(torch.empty(300 << 20, dtype=torch.uint8))
        return super().project_exp(*arguments)

    def finish(self, *arguments: Any) -> Any:
        stats, loss = super().finish(*arguments)
        if self.kind is Kind.WRONG_SUMS:
            stats.sum.mul_(1.0001)
        return stats, loss

    def finish_dw(self, out: torch.Tensor, *arguments: Any) -> None:
        super().finish_dw(out, *arguments)
        if self.kind is Kind.WRONG_GRADIENTS:
            out[len(out) // 2].mul_(1.03)


def _limit_memory(more: int) -> None:
    """Let this process take no more than `more` bytes beyond what it has, from the first call."""
    if resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY:
        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[0])
        limit = pages * resource.getpagesize() + more
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


class StandIn(ProjectExp):
    """`project_exp` with one candidate of each kind; the slow one is the default."""

    def default(self, problem: Problem) -> Choice:
        return config(Kind.SLOW)

    def defaults(self) -> Sequence[Choice]:
        return (config(Kind.SLOW),)

    def candidates(self, problem: Problem) -> Sequence[Choice]:
        return [config(kind) for kind in Kind]

    def kernels(self, dtype: str, choice: Choice) -> Sequence[Kernel]:
        return ()

    def primitives(self, problem: Problem, choice: Choice) -> Primitives:
        assert choice is not None
        primitives = Faulty(autotune_cache.lookup(problem))
        primitives.kind = Kind(choice.group)
        return primitives


class Hanging(StandIn):
    """The same with a default that hangs."""

    def defaults(self) -> Sequence[Choice]:
        return (config(Kind.HANGS),)
