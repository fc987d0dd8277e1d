"""Interface of a tuning target, its inputs and its outputs.

`expected`, `outputs`, `call` and `cublas` run in the tuner's subprocess; the other methods do not
touch a GPU.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from cutefce.autotune_cache import defaults
from cutefce.autotune_cache.table import Candidate
from cutefce.autotune_cache.tuning.outputs import samples as sampled_outputs
from cutefce.cute_kernels.arch.base import Arch
from cutefce.cute_kernels.config import KernelConfigs, PortableTiles
from cutefce.cute_kernels.gpu import Gpu
from cutefce.cute_kernels.integers import ceil_div, round_up
from cutefce.cute_kernels.kernel_set import kernel_set
from cutefce.cute_kernels.parts import DIVERGENCES, PARTS, SAMPLES
from cutefce.cute_kernels.problem import Problem
from cutefce.cute_kernels.spec import KernelSpec
from cutefce.cute_kernels.spec.divergence import divergence_kernels
from cutefce.ops.primitives.dispatch import kernel_primitives, portable_primitives
from cutefce.ops.primitives.interface import AnyPrimitives

MAX_LOGITS_BYTES = 8 << 30
"""Size of the logits above which cuBLAS computes them in slices of the vocabulary."""


@dataclass(frozen=True)
class TuningCase:
    """Inputs of one call."""

    problem: Problem
    h: Tensor
    """(N, D) hidden states."""
    w: Tensor
    """(V, D) weight."""
    y: Tensor
    """(N,) targets."""
    upstream: Tensor | None
    """(N,) gradient of each row's loss; None for a forward alone."""

    def exact(self) -> "TuningCase":
        """Return the case in float64 on the CPU."""
        problem = dataclasses.replace(self.problem, dtype="float64", device="cpu", arch=None)
        upstream = None if self.upstream is None else self.upstream.double()
        exact = TuningCase(problem, self.h.double(), self.w.double(), self.y, upstream)
        return exact.to("cpu")

    def to(self, device: str) -> "TuningCase":
        """Return the case with its tensors on `device`."""
        upstream = None if self.upstream is None else self.upstream.to(device)
        h, w, y = self.h.to(device), self.w.to(device), self.y.to(device)
        return TuningCase(self.problem, h, w, y, upstream)

    def random(self, rows: int, columns: int) -> Tensor:
        """Return (rows, columns) random numbers in [0, 1), cached with the case."""
        if (rows, columns) not in self._random:
            numbers = self.h.new_empty(rows, round_up(columns, 8))
            generator = torch.Generator(numbers.device).manual_seed(1)
            self._random[rows, columns] = numbers.uniform_(generator=generator)[:, :columns]
        return self._random[rows, columns]

    @functools.cached_property
    def _random(self) -> dict[tuple[int, int], Tensor]:
        return {}


@dataclass(frozen=True)
class CheckedOutput:
    """An output, with how far it may be from the portable path's."""

    values: Tensor
    """(N, C) or (N,)."""
    roundings: int
    """How often its terms are rounded to their dtype."""
    scale: Tensor | None = None
    """(N,) divisor of each row before the comparison."""
    floor: float = 1e-30
    """Added to the denominator of relative errors."""
    relative_to_row: bool = False
    """Whether errors are relative to the largest value of a row instead of to each value."""

    def to(self, device: str) -> "CheckedOutput":
        """Return the output with its tensors on `device`."""
        scale = None if self.scale is None else self.scale.to(device)
        return dataclasses.replace(self, values=self.values.to(device), scale=scale)


@dataclass(frozen=True)
class TuningTarget(abc.ABC):
    """One kernel, or the width of windows, on one GPU; picklable."""

    gpu: Gpu
    device: str = "cuda"
    """Device of the trials, as torch names it."""
    base: KernelConfigs | None = None
    """Configurations of the kernels not under test; None for those of `reference_problem`."""
    parts: tuple[str, ...] = PARTS
    """What small problems check, of `cute_kernels.parts`."""

    name: ClassVar[str]
    """Name in tables: a field of KernelConfigs, or WINDOW."""

    @property
    def arch(self) -> Arch:
        """Architecture of the GPU."""
        return self.gpu.arch

    @property
    def device_type(self) -> str:
        """Type of the device: "cpu" or "cuda"."""
        return torch.device(self.device).type

    def problem(self, sizes: tuple[int, int, int], dtype: str) -> Problem:
        """Return the problem of (tokens, hidden, vocab) on the device of the trials."""
        return Problem(*sizes, dtype, self.device_type, arch=self.arch.name)

    def reference_problem(self, dtype: str) -> Problem:
        """Return the fixed problem whose default configurations serve all kernels not under test.

        It is the same for every problem that is tuned, so that few kernels need compiling.
        """
        return self.problem((8192, 4096, 131072), dtype)

    def default(self, problem: Problem) -> Candidate:
        """Return the candidate that serves `problem` if nothing was tuned."""
        default: Candidate = getattr(self.default_configs(problem), self.name)
        return default

    def default_configs(self, problem: Problem) -> KernelConfigs:
        """Return the configurations of all kernels if nothing was tuned."""
        return self.gpu.default_configs(problem.tokens, problem.hidden)

    @abc.abstractmethod
    def defaults(self) -> Sequence[Candidate]:
        """Return every prebuilt and verified configuration: the defaults and common winners."""

    @abc.abstractmethod
    def candidates(self, problem: Problem) -> Sequence[Candidate]:
        """Return the candidates that are legal and distinct for `problem`."""

    @abc.abstractmethod
    def cost(self, problem: Problem, candidate: Candidate) -> float:
        """Return the predicted cost, up to a factor."""

    def distinct_configs(self, rows: int) -> tuple[Candidate, ...]:
        """Return the configurations that differ for a GEMM with `rows` rows."""
        distinct: dict[object, Candidate] = {}
        for config in self.arch.search_space():
            # a raster group with more row blocks than the GEMM equals one of all
            group = min(config.raster_group, ceil_div(rows, config.rows))
            distinct.setdefault(dataclasses.replace(config, raster_group=group), config)
        return tuple(distinct.values())

    def configs(self, problem: Problem, candidate: Candidate) -> KernelConfigs:
        """Return the configurations of the kernels not under test with `candidate` in its place."""
        changed: dict[str, Any] = {self.name: candidate}
        base = self.base or self.default_configs(self.reference_problem(problem.dtype))
        return dataclasses.replace(base, **changed)

    def kernels(self, problem: Problem, candidate: Candidate) -> Sequence[KernelSpec]:
        """Return the kernels that checking `parts` and timing a candidate on `problem` launches."""
        every = kernel_set(self.arch, problem.dtype, self.configs(problem, candidate))
        found = [kernel for part in self.parts for kernel in every.of_part(part)]
        if SAMPLES in self.parts:
            found += sampled_outputs.kernels(every)
        if DIVERGENCES in self.parts:
            found += divergence_kernels(self.arch, problem.dtype)
        return list(dict.fromkeys(found))

    def tiles(self, problem: Problem, candidate: Candidate) -> PortableTiles:
        """Return the windows and tiles of the primitives under test."""
        return defaults.widest_window(problem)

    def primitives(self, problem: Problem, candidate: Candidate) -> AnyPrimitives:
        """Return the primitives under test."""
        tiles, configs = self.tiles(problem, candidate), self.configs(problem, candidate)
        kernels = kernel_set(self.arch, problem.dtype, configs)
        return kernel_primitives(tiles, kernels, self.gpu.num_sms, fixed_tiles=True)

    def expected(self, case: TuningCase) -> dict[str, CheckedOutput]:
        """Return the outputs of the portable path, by name."""
        return self.compute(case, portable_primitives(defaults.widest_window(case.problem)))

    def outputs(self, case: TuningCase, candidate: Candidate) -> dict[str, CheckedOutput]:
        """Return the outputs of a candidate under the same names."""
        return self.compute(case, self.primitives(case.problem, candidate))

    @abc.abstractmethod
    def compute(self, case: TuningCase, primitives: AnyPrimitives) -> dict[str, CheckedOutput]:
        """Return the outputs of `primitives` that are compared, by name."""

    @abc.abstractmethod
    def call(self, case: TuningCase, candidate: Candidate) -> Callable[[], object]:
        """Return the call whose time decides."""

    @abc.abstractmethod
    def cublas(self, case: TuningCase) -> Callable[[], object]:
        """Return the same GEMMs by cuBLAS."""
