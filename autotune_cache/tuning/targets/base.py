"""What tunables have in common that run on the kernels.

A kernel that can be tuned, as an interface: its choices, and what is done with one.

A choice is a configuration, or None for the plain product where that can stand in.  `expected` and
what follows it run in the tuner's child processes, the rest touches no GPU.
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
from cutefce.autotune_cache.table import Choice
from cutefce.cute_kernels.arch.base import Arch
from cutefce.cute_kernels.config import KernelConfigs, PortableTiles
from cutefce.cute_kernels.problem import Problem
from cutefce.cute_kernels.spec import KernelSpec, kernel_set
from cutefce.ops.primitives.cute import CutePrimitives
from cutefce.ops.primitives.interface import Primitives
from cutefce.ops.primitives.portable import TorchPrimitives

PRODUCT_BYTES = 8 << 30
"""What the result of a plain product may take; larger ones are computed in parts."""


@dataclass(frozen=True)
class Case:
    """Inputs of one call."""

    problem: Problem
    h: Tensor
    w: Tensor
    y: Tensor
    upstream: Tensor | None
    """(N,) gradient of each row's loss; without it, gradients are not asked for."""

    def exact(self) -> "Case":
        """Return the same in float64 on the CPU."""
        problem = dataclasses.replace(self.problem, dtype="float64", device="cpu", arch=None)
        upstream = None if self.upstream is None else self.upstream.double()
        exact = Case(problem, self.h.double(), self.w.double(), self.y, upstream)
        return exact.to("cpu")

    def to(self, device: str) -> "Case":
        """Return the same on a device."""
        upstream = None if self.upstream is None else self.upstream.to(device)
        h, w, y = self.h.to(device), self.w.to(device), self.y.to(device)
        return Case(self.problem, h, w, y, upstream)

    def random(self, rows: int, columns: int) -> Tensor:
        """Return (rows, columns) random numbers in [0, 1), kept as long as the case."""
        if (rows, columns) not in self._random:
            numbers = self.h.new_empty(rows, -(-columns // 8) * 8)
            generator = torch.Generator(numbers.device).manual_seed(1)
            self._random[rows, columns] = numbers.uniform_(generator=generator)[:, :columns]
        return self._random[rows, columns]

    @functools.cached_property
    def _random(self) -> dict[tuple[int, int], Tensor]:
        return {}


@dataclass(frozen=True)
class Result:
    """Something that is compared with what the portable path finds for it."""

    values: Tensor
    """(N, C) or (N,)."""
    roundings: int
    """How often its parts are rounded to their dtype."""
    scale: Tensor | None = None
    """(N,) what each row is divided by before it is compared."""
    floor: float = 1e-30
    """What is as small as this is not told from 0."""
    of_row: bool = False
    """Whether errors are relative to the largest value of a row, not each to its own."""

    def to(self, device: str) -> "Result":
        """Return the same on a device."""
        scale = None if self.scale is None else self.scale.to(device)
        return dataclasses.replace(self, values=self.values.to(device), scale=scale)


@dataclass(frozen=True)
class Tunable(abc.ABC):
    """One kernel on one GPU; made to be pickled."""

    arch: Arch
    num_sms: int
    device: str = "cuda"
    """Where trials run, as torch names it."""

    name: ClassVar[str]
    """As in tables."""

    def problem(self, sizes: tuple[int, int, int], dtype: str) -> Problem:
        """Return the problem of (tokens, hidden, vocab) where trials run."""
        return Problem(*sizes, dtype, torch.device(self.device).type, arch=self.arch.name)

    def typical(self, dtype: str) -> Problem:
        """Return the problem whose defaults run what is not tried, whatever is: few kernels do."""
        return self.problem((8192, 4096, 131072), dtype)

    @abc.abstractmethod
    def default(self, problem: Problem) -> Choice:
        """Return what serves where nothing was tuned."""

    @abc.abstractmethod
    def defaults(self) -> Sequence[Choice]:
        """Return every choice that may be a default."""

    @abc.abstractmethod
    def candidates(self, problem: Problem) -> Sequence[Choice]:
        """Return what can be run and differs for `problem`."""

    @abc.abstractmethod
    def cost(self, problem: Problem, choice: Choice) -> float:
        """Return the predicted time; only ratios mean anything."""

    @abc.abstractmethod
    def kernels(self, problem: Problem, choice: Choice) -> Sequence[KernelSpec]:
        """Return what must be compiled to check a choice, and to time it on `problem`."""

    @abc.abstractmethod
    def expected(self, case: Case) -> dict[str, Result]:
        """Return what the portable path finds."""

    @abc.abstractmethod
    def results(self, case: Case, choice: Choice) -> dict[str, Result]:
        """Return what a choice finds for the same."""

    @abc.abstractmethod
    def call(self, case: Case, choice: Choice) -> Callable[[], object]:
        """Return what is timed."""

    @abc.abstractmethod
    def product(self, case: Case) -> Callable[[], object]:
        """Return the plain products of the same work."""


class OnKernels(Tunable):
    """Choices of one architecture; `found` says what is compared."""

    def choices(self, rows: int) -> Sequence[Choice]:
        """Return what differs for products of so many rows."""
        found: dict[object, Choice] = {}
        for config in self.arch.search_space():
            # a group of more row blocks than there are is one of all
            group = min(config.raster_group, -(-rows // config.rows))
            found.setdefault(dataclasses.replace(config, raster_group=group), config)
        return tuple(found.values())

    def default_configs(self, problem: Problem) -> KernelConfigs:
        """Return what serves where nothing was tuned."""
        sizes = problem.tokens, problem.hidden
        return self.arch.default_configs(*sizes, self.num_sms)

    def default(self, problem: Problem) -> Choice:
        choice: Choice = getattr(self.default_configs(problem), self.name)
        return choice

    def configs(self, problem: Problem, choice: Choice) -> KernelConfigs:
        """Return the defaults of the typical problem, with `choice` in its place."""
        changed: dict[str, Any] = {self.name: choice}
        return dataclasses.replace(self.default_configs(self.typical(problem.dtype)), **changed)

    def tiles(self, problem: Problem, choice: Choice) -> PortableTiles:
        """Return how the primitives that are tried walk the vocabulary."""
        return defaults.widest_window(problem)

    def primitives(self, problem: Problem, choice: Choice) -> Primitives:
        """Return the primitives that are tried."""
        tiles, configs = self.tiles(problem, choice), self.configs(problem, choice)
        return CutePrimitives(tiles, self.arch, problem.dtype, configs, self.num_sms)

    def kernels(self, problem: Problem, choice: Choice) -> Sequence[KernelSpec]:
        return kernel_set(self.arch, problem.dtype, self.configs(problem, choice)).all()

    def expected(self, case: Case) -> dict[str, Result]:
        return self.found(case, TorchPrimitives(defaults.widest_window(case.problem)))

    def results(self, case: Case, choice: Choice) -> dict[str, Result]:
        return self.found(case, self.primitives(case.problem, choice))

    @abc.abstractmethod
    def found(self, case: Case, primitives: Primitives) -> dict[str, Result]:
        """Return what `primitives` find."""
