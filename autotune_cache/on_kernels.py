"""What tunables have in common that run on the kernels."""

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any

from cutefce import autotune_cache
from cutefce.autotune_cache.table import Choice
from cutefce.autotune_cache.tunable import Case, Result, Tunable
from cutefce.cute_kernels.config import Configs
from cutefce.cute_kernels.kernels import Kernel, kernel_set
from cutefce.cute_kernels.problem import Problem, TileConfig
from cutefce.ops.cute_primitives import CutePrimitives
from cutefce.ops.primitives import Primitives
from cutefce.ops.torch_primitives import TorchPrimitives

PRODUCT_BYTES = 8 << 30
"""What the result of a plain product may take; larger ones are computed in parts."""


class OnKernels(Tunable):
    """Choices of one architecture; `found` says what is compared."""

    def choices(self, rows: int) -> Sequence[Choice]:
        """Return what differs for products of so many rows."""
        found: dict[object, Choice] = {}
        for config in self.arch.candidates():
            # a group of more row blocks than there are is one of all
            group = min(config.group, -(-rows // config.rows))
            found.setdefault(dataclasses.replace(config, group=group), config)
        return tuple(found.values())

    def default_configs(self, problem: Problem) -> Configs:
        """Return what serves where nothing was tuned."""
        sizes = problem.tokens, problem.hidden
        return self.arch.default_configs(*sizes, self.multiprocessors)

    def default(self, problem: Problem) -> Choice:
        choice: Choice = getattr(self.default_configs(problem), self.name)
        return choice

    def configs(self, problem: Problem, choice: Choice) -> Configs:
        """Return the defaults of the typical problem, with `choice` in its place."""
        changed: dict[str, Any] = {self.name: choice}
        return dataclasses.replace(self.default_configs(self.typical(problem.dtype)), **changed)

    def tiles(self, problem: Problem, choice: Choice) -> TileConfig:
        """Return how the primitives that are tried walk the vocabulary."""
        return autotune_cache.lookup(problem)

    def primitives(self, problem: Problem, choice: Choice) -> Primitives:
        """Return the primitives that are tried."""
        tiles, configs = self.tiles(problem, choice), self.configs(problem, choice)
        return CutePrimitives(tiles, self.arch, problem.dtype, configs, self.multiprocessors)

    def kernels(self, problem: Problem, choice: Choice) -> Sequence[Kernel]:
        return kernel_set(self.arch, problem.dtype, self.configs(problem, choice)).all()

    def expected(self, case: Case) -> dict[str, Result]:
        return self.found(case, TorchPrimitives(autotune_cache.lookup(case.problem)))

    def results(self, case: Case, choice: Choice) -> dict[str, Result]:
        return self.found(case, self.primitives(case.problem, choice))

    @abc.abstractmethod
    def found(self, case: Case, primitives: Primitives) -> dict[str, Result]:
        """Return what `primitives` find."""
