"""Candidates of a tuning job: the default, and what the cost model predicts to be fast."""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from cutefce.autotune_cache.table import Candidate, Key, key_of
from cutefce.autotune_cache.tuning.targets.base import TuningTarget
from cutefce.cute_kernels.config import GemmConfig
from cutefce.cute_kernels.problem import Problem
from cutefce.cute_kernels.spec import KernelSpec

MAX_CANDIDATES = 10
"""Candidates beside the default that pruning keeps."""
MAX_RASTER_GROUPS = 2
"""Candidates kept among those that differ only in the raster group."""


@dataclass(frozen=True)
class Job:
    """One problem with its candidates."""

    target: TuningTarget
    problem: Problem
    candidates: tuple[Candidate, ...]
    """The default first."""
    pruned: int
    """Number of candidates that the cost model excluded."""

    @property
    def key(self) -> Key:
        """The key of the problem in a table."""
        return key_of(self.target.name, self.problem)

    def kernels(self) -> list[KernelSpec]:
        """Return the kernels to compile."""
        return [k for c in self.candidates for k in self.target.kernels(self.problem, c)]


def make_job(target: TuningTarget, problem: Problem, exhaustive: bool = False) -> Job:
    """Return the job for `problem` with pruned or, if `exhaustive`, with all candidates."""
    found = (target.default(problem), *target.candidates(problem))
    candidates = tuple(dict.fromkeys(found))
    kept = candidates if exhaustive else prune(target, problem, candidates)
    return Job(target, problem, kept, len(candidates) - len(kept))


def prune(
    target: TuningTarget, problem: Problem, candidates: Sequence[Candidate]
) -> tuple[Candidate, ...]:
    """Return the first candidate and those with the lowest predicted cost, few of each tile.

    Among candidates that differ only in the number of stages, the one with the most is kept.
    """

    def order(candidate: Candidate) -> tuple[float, int]:
        return target.cost(problem, candidate), -getattr(candidate, "stages", 0)

    first, *others = candidates
    kept: dict[Candidate, Candidate] = {}
    of_tile: Counter[Candidate] = Counter()
    for candidate in (first, *sorted(others, key=order)):
        without_stages = tile = candidate
        if isinstance(candidate, GemmConfig):
            without_stages = dataclasses.replace(candidate, stages=0)
            tile = dataclasses.replace(candidate, stages=0, raster_group=0)
        is_new = without_stages not in kept and of_tile[tile] < MAX_RASTER_GROUPS
        if len(kept) <= MAX_CANDIDATES and is_new:
            kept[without_stages] = candidate
            of_tile[tile] += 1
    return tuple(kept.values())
