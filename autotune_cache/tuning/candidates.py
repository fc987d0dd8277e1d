"""TODO."""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from cutefce.autotune_cache.table import Choice, Key, key_of
from cutefce.autotune_cache.tuning.targets.base import Tunable
from cutefce.cute_kernels.config import GemmConfig
from cutefce.cute_kernels.problem import Problem
from cutefce.cute_kernels.spec import KernelSpec

CANDIDATES = 10
"""Candidates of a problem that the cost model leaves, beside the default."""
VARIANTS = 2
"""Of these, how many may differ in the raster group alone."""


@dataclass(frozen=True)
class Job:
    """One problem, and what is tried for it."""

    tunable: Tunable
    problem: Problem
    choices: tuple[Choice, ...]
    """The default first."""
    pruned: int
    """Candidates that the cost model left out."""

    @property
    def key(self) -> Key:
        """What stands for it in a table."""
        return key_of(self.tunable.name, self.problem)

    def kernels(self) -> list[KernelSpec]:
        """Return what must be compiled."""
        return [k for c in self.choices for k in self.tunable.kernels(self.problem, c)]


def plan(tunable: Tunable, problem: Problem, everything: bool = False) -> Job:
    """Return what to try for `problem`: what the cost model favours, or everything."""
    default, candidates = tunable.default(problem), tunable.candidates(problem)
    every = tuple(dict.fromkeys((default, *candidates)))
    choices = every if everything else prune(tunable, problem, every)
    return Job(tunable, problem, choices, len(every) - len(choices))


def prune(tunable: Tunable, problem: Problem, choices: Sequence[Choice]) -> tuple[Choice, ...]:
    """Return the first choice and those that are predicted to be fastest, few of each tile.

    Those that differ in the number of stages alone count as one: the most stages win.
    """

    def order(choice: Choice) -> tuple[float, int]:
        return tunable.cost(problem, choice), -getattr(choice, "stages", 0)

    first, *others = choices
    left: dict[Choice, Choice] = {}
    of_tile: Counter[Choice] = Counter()
    for choice in (first, *sorted(others, key=order)):
        variant = tile = choice
        if isinstance(choice, GemmConfig):
            variant = dataclasses.replace(choice, stages=0)
            tile = dataclasses.replace(choice, stages=0, raster_group=0)
        if len(left) <= CANDIDATES and variant not in left and of_tile[tile] < VARIANTS:
            left[variant] = choice
            of_tile[tile] += 1
    return tuple(left.values())
