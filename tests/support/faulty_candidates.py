"""Right, slow and faulty candidates: portable primitives on a CPU, kernels on a GPU."""

import ctypes
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from cutefce.autotune_cache import defaults
from cutefce.autotune_cache.table import Candidate
from cutefce.autotune_cache.tuning.outputs import step as outputs
from cutefce.autotune_cache.tuning.targets.base import CheckedOutput, TuningCase
from cutefce.autotune_cache.tuning.targets.project_exp import ProjectExpTarget
from cutefce.cute_kernels.config import GemmConfig
from cutefce.cute_kernels.problem import Problem
from cutefce.cute_kernels.spec import KernelSpec
from cutefce.ops.primitives.dispatch import portable_primitives
from cutefce.ops.primitives.interface import AnyPrimitives, Primitives


class Kind(IntEnum):
    """How a candidate behaves, encoded in its raster group."""

    SLOW = 1
    FAST = 2
    HANGS = 3
    CRASHES = 4
    WRONG_GRADIENTS = 5
    WRONG_SUMS = 6
    LEAKS = 7


def config(kind: Kind) -> GemmConfig:
    """Return the configuration that encodes `kind`."""
    return GemmConfig(128, 128, cluster=1, stages=6, pingpong=True, raster_group=kind)


class FaultyProjection:
    """A projection with a fault; on a GPU, the GPU hangs or crashes."""

    held: list[Tensor] = []  # noqa: RUF012 - leaks for good

    def __init__(self, own: Any, kind: Kind) -> None:
        self.own, self.kind = own, kind

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)

    def project_exp(
        self,
        h: Tensor,
        w: Tensor,
        window: tuple[int, int],
        reference: Tensor,
        target: Tensor,
        exps: Tensor | None = None,
    ) -> Any:
        if self.kind is Kind.SLOW:
            time.sleep(0.1)
        elif self.kind is Kind.HANGS:
            _hang(h.is_cuda)
        elif self.kind is Kind.CRASHES and exps is not None:
            exps = _out_of_bounds(exps)
        elif self.kind is Kind.LEAKS:
            _limit_memory(1 << 30)
            self.held.append(torch.empty(300 << 20, dtype=torch.uint8))
        return self.own.project_exp(h, w, window, reference, target, exps)

    def reduce_partials(self, *arguments: Any) -> Any:
        stats, loss = self.own.reduce_partials(*arguments)
        if self.kind is Kind.WRONG_SUMS:
            stats.sum_exp_others.mul_(1.0001)
        return stats, loss


class FaultyGradients:
    """Gradients of which one kind is wrong."""

    def __init__(self, own: Any, kind: Kind) -> None:
        self.own, self.kind = own, kind

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)

    def finish_dw(self, out: Tensor, *arguments: Any) -> None:
        self.own.finish_dw(out, *arguments)
        if self.kind is Kind.WRONG_GRADIENTS:
            out[len(out) // 2].mul_(1.03)


def faulty(own: AnyPrimitives, kind: Kind) -> AnyPrimitives:
    projection: Any = FaultyProjection(own.projection, kind)
    gradients: Any = FaultyGradients(own.gradients, kind)
    return Primitives(own.config, projection, gradients)


def _hang(on_gpu: bool) -> None:
    """Hang: forever on a CPU; for minutes on a GPU, where an endless kernel outlives the test."""
    if on_gpu:
        torch.cuda._sleep(1 << 40)
    else:
        time.sleep(3600)


def _out_of_bounds(x: Tensor) -> Tensor:
    """Return a matrix like x (N, C) of 16 bits at unmapped addresses."""
    if not x.is_cuda:
        ctypes.string_at(0)
    far, description = 1 << 44, {"data": (x.data_ptr(), False), "typestr": "<i2", "version": 2}
    memory = SimpleNamespace(__cuda_array_interface__={**description, "shape": (2 * far,)})
    beyond = torch.as_tensor(memory, device=x.device)[far : far + x.numel()]
    return beyond.view(x.dtype).view(x.shape)


def _limit_memory(more: int) -> None:
    """Limit this process to `more` bytes beyond its size at the first call."""
    if resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY:
        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[0])
        limit = pages * resource.getpagesize() + more
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


class FaultyTarget(ProjectExpTarget):
    """`project_exp` with one candidate of each kind; the slow one is the default."""

    def default(self, problem: Problem) -> Candidate:
        return config(Kind.SLOW)

    def defaults(self) -> Sequence[Candidate]:
        return (config(Kind.SLOW),)

    def candidates(self, problem: Problem) -> Sequence[Candidate]:
        return [config(kind) for kind in Kind]

    def kernels(self, problem: Problem, candidate: Candidate) -> Sequence[KernelSpec]:
        return ()

    def primitives(self, problem: Problem, candidate: Candidate) -> AnyPrimitives:
        assert isinstance(candidate, GemmConfig)
        portable = portable_primitives(defaults.widest_window(problem))
        return faulty(portable, Kind(candidate.raster_group))

    def compute(self, case: TuningCase, primitives: AnyPrimitives) -> dict[str, CheckedOutput]:
        """Return the outputs of a forward and of a step, in which every fault shows."""
        forward = outputs.step_outputs(replace(case, upstream=None), primitives)
        return forward | outputs.smallest_step_outputs(case, primitives)


@dataclass(frozen=True)
class KernelTarget(ProjectExpTarget):
    """The kernels with one configuration and an optional fault."""

    kind: Kind = Kind.FAST

    def defaults(self) -> Sequence[Candidate]:
        return self.arch.prebuilt_configs()[:1]

    def primitives(self, problem: Problem, candidate: Candidate) -> AnyPrimitives:
        return faulty(super().primitives(problem, candidate), self.kind)
