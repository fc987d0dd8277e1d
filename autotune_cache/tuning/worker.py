"""Calls that run in a subprocess: load kernels, compare with the portable path, time."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cutefce.autotune_cache.table import Candidate
from cutefce.autotune_cache.tuning import timing
from cutefce.autotune_cache.tuning.cases import SMALL_PROBLEMS, Case, Outputs, compare, full_case
from cutefce.autotune_cache.tuning.runner import Runner
from cutefce.autotune_cache.tuning.targets import TuningTarget
from cutefce.cute_kernels import process_cache
from cutefce.cute_kernels.config import KernelConfigs
from cutefce.cute_kernels.jit import cache as jit_cache
from cutefce.cute_kernels.parts import PARTS
from cutefce.cute_kernels.problem import Problem
from cutefce.cute_kernels.spec.kernel import KernelSpec

CALLS = 3
"""Calls in a row of a candidate: the GEMMs of a training step.  A candidate with fewer cycles but
higher power wins short timings and loses once the GPU lowers its clock."""
SECONDS = 0.6
"""Duration of a trial, of at least MIN_ROUNDS rounds."""
MIN_ROUNDS, MAX_ROUNDS = 4, 50
MAX_CPU_THREADS = 8
"""Threads for the small problems; more only wait for each other."""


@dataclass(frozen=True)
class Timing:
    """The result of one candidate."""

    ms: float
    """Median over the rounds."""
    ratio: float
    """Median over the rounds of its time divided by that of the last candidate."""


def load(kernel: KernelSpec) -> None:
    """Load `kernel`, or compile it if the cache folder does not have it."""
    jit_cache.compiled(kernel)


def prepare(runner: Runner, dtype: str, parts: tuple[str, ...]) -> None:
    """Make inputs and expected outputs of the small problems, which no check's time includes."""
    torch.set_num_threads(min(MAX_CPU_THREADS, torch.get_num_threads()))
    if runner.device_type == "cuda":
        torch.cuda.set_device(runner.device)
    for name in SMALL_PROBLEMS:
        _small_case(runner, name, dtype, parts)


@process_cache.process_cache
def check_small(
    runner: Runner, dtype: str, configs: KernelConfigs, parts: tuple[str, ...] = PARTS
) -> None:
    """Raise MismatchError if kernels of `configs` are wrong on a small problem."""
    for name in SMALL_PROBLEMS:
        case, expected = _small_case(runner, name, dtype, parts)
        compare(runner.outputs(case, configs, parts), expected, name)


@process_cache.process_cache
def _small_case(
    runner: Runner, name: str, dtype: str, parts: tuple[str, ...]
) -> tuple[Case, Outputs]:
    case = runner.small_case(name, dtype)
    return case, runner.expected(case, parts)


def prepare_problem(target: TuningTarget, problem: Problem) -> None:
    """Make inputs and expected outputs of the small problems, and inputs of `problem`."""
    prepare(target.runner, problem.dtype, PARTS)
    _full_case(target.runner, problem)


def trial(
    target: TuningTarget, problem: Problem, candidates: Sequence[Candidate]
) -> dict[Candidate, Timing]:
    """Verify candidates, then time them in interleaved rounds; raise MismatchError if one is wrong.

    The last one is what the others are compared with.
    """
    case = _full_case(target.runner, problem)
    calls: dict[Candidate, timing.Call] = {}
    for candidate in candidates:
        check_small(target.runner, problem.dtype, target.configs(candidate))
        primitives = target.runner.primitives(problem, target.configs(candidate))
        calls[candidate] = target.call(case, primitives)
    for _ in range(2):  # the first round loads kernels
        once = timing.interleaved(calls, target.runner.device_type, 1)
    rounds = round(SECONDS * 1e3 / (CALLS * sum(ms for (ms,) in once.values())))
    rounds = min(max(rounds, MIN_ROUNDS), MAX_ROUNDS)
    times = timing.interleaved(calls, target.runner.device_type, rounds, CALLS)
    last = times[candidates[-1]]
    return {
        candidate: Timing(
            statistics.median(own),
            statistics.median(a / b for a, b in zip(own, last, strict=True)),
        )
        for candidate, own in times.items()
    }


def _full_case(runner: Runner, problem: Problem) -> Case:
    """Return random inputs of `problem`.

    Frees those of the previous problem first: they may take half of the memory.
    """
    if problem not in _held:
        _held.clear()
        _held[problem] = full_case(problem, runner.device)
    return _held[problem]


_held: dict[Problem, Case] = {}
process_cache.on_reset(_held.clear)
