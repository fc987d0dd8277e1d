"""Right, slow and faulty candidates: portable primitives on a CPU, kernels on a GPU."""

import ctypes
import dataclasses
import resource
import time
from dataclasses import dataclass
from enum import IntEnum
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from cutefce.autotune_cache.tables import Candidate
from cutefce.autotune_cache.tuning.cases import Case, Outputs
from cutefce.autotune_cache.tuning.outputs import outputs_of, steps
from cutefce.autotune_cache.tuning.runner import Runner, portable
from cutefce.autotune_cache.tuning.tuner import Job
from cutefce.cute_kernels.arch.sm90 import Sm90
from cutefce.cute_kernels.config import GemmConfig, KernelConfigs
from cutefce.cute_kernels.problem import Problem
from cutefce.cute_kernels.spec.kernel import KernelSpec
from cutefce.cute_kernels.variant import KernelVariant
from cutefce.ops.primitives.portable_projection import Logits
from cutefce.ops.primitives.primitives import Primitives
from cutefce.ops.rows.packed_sums import Sums


class Kind(IntEnum):
    """How a candidate behaves: the place of its configuration among the stand-ins."""

    SLOW = 0
    FAST = 1
    HANGS = 2
    CRASHES = 3
    WRONG_GRADIENTS = 4
    WRONG_SUMS = 5
    LEAKS = 6


LISTED = Sm90().listed["project_exp"]
STAND_INS = *LISTED, *(dataclasses.replace(x, raster_group=4) for x in LISTED)
"""A configuration for each kind."""


def config(kind: Kind) -> GemmConfig:
    """Return the configuration that stands for `kind`."""
    return STAND_INS[kind]


def kind_of(configuration: GemmConfig) -> Kind:
    """Return what a configuration stands for."""
    return Kind(STAND_INS.index(configuration))


class FaultyPrimitives:
    """Primitives with a fault; on a GPU, the GPU hangs or crashes."""

    held: list[Tensor] = []  # noqa: RUF012 - leaks for good

    def __init__(self, own: Any, kind: Kind) -> None:
        self.own, self.kind = own, kind

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)

    def behind(self, _: int) -> Any:
        return self

    def project_exp(self, x: Logits, exps: Tensor | None = None) -> Any:
        if self.kind is Kind.SLOW:
            time.sleep(0.1)
        elif self.kind is Kind.HANGS:
            _hang(x.h.is_cuda)
        elif self.kind is Kind.CRASHES and exps is not None:
            exps = _out_of_bounds(exps)
        elif self.kind is Kind.LEAKS:
            _limit_memory(1 << 30)
            self.held.append(torch.empty(300 << 20, dtype=torch.uint8))
        return self.own.project_exp(x, exps)

    def reduce_partials(self, *arguments: Any) -> Any:
        stats, loss = self.own.reduce_partials(*arguments)
        if self.kind is Kind.WRONG_SUMS:
            stats.sum_exp_others.mul_(1.0001)
        return stats, loss

    def add_weight(self, out: Sums, *arguments: Any, **more: Any) -> None:
        self.own.add_weight(out, *arguments, **more)
        if self.kind is Kind.WRONG_GRADIENTS and "grad_scale" in more:
            out.upper[len(out.upper) // 2].mul_(1.03)


def faulty(own: Primitives, kind: Kind) -> Primitives:
    result: Any = FaultyPrimitives(own, kind)
    return cast(Primitives, result)


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


@dataclass(frozen=True)
class FaultyRunner(Runner):
    """The portable path on a CPU, with the fault of the `project_exp` that it is asked for.

    The only default is the slow one.
    """

    def base(self) -> KernelConfigs:
        return KernelConfigs(config(Kind.SLOW), None, None)

    def listed_configs(self) -> list[KernelConfigs]:
        return [self.base()]

    def kernels(self, *_: Any) -> tuple[KernelSpec, ...]:
        return ()

    def primitives(self, problem: Problem, configs: KernelConfigs, *_: Any) -> Primitives:
        return faulty(portable(problem), kind_of(configs.project_exp))

    def expected(self, case: Case, parts: Any) -> Outputs:
        """Return the outputs of two steps, in which every fault shows."""
        exact = case.exact()
        return steps.way_outputs(exact, portable(exact.problem), WAYS)

    def outputs(self, case: Case, configs: KernelConfigs, parts: Any) -> Outputs:
        return steps.way_outputs(case, self.primitives(case.problem, configs), WAYS)


WAYS = steps.Way(), steps.Way(stored=1)


@dataclass(frozen=True)
class FaultyJob(Job):
    """Candidates of these kinds, the default first."""

    kinds: tuple[Kind, ...] = (Kind.SLOW, Kind.FAST)

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        return tuple(map(config, self.kinds))


@dataclass(frozen=True)
class KernelRunner(Runner):
    """The kernels with one default and an optional fault."""

    kind: Kind = Kind.FAST

    def listed_configs(self) -> list[KernelConfigs]:
        return super().listed_configs()[:1]

    def kernels(self, *checked: Any) -> tuple[KernelSpec, ...]:
        """Return those of kernels without a fault, which hang where they are not launched, too."""
        return Runner(self.gpu, self.device).kernels(*checked)

    def outputs(self, case: Case, configs: KernelConfigs, parts: tuple[str, ...]) -> Outputs:
        """Return what faulty kernels compute."""

        def primitives_of(variant: KernelVariant) -> Primitives:
            return faulty(self.primitives(case.problem, configs, variant), self.kind)

        return outputs_of(case, primitives_of, parts)
