"""Calls that run in a subprocess: load kernels, compare with the portable path, time."""

import torch

from cutefce.autotune_cache.table import Candidate
from cutefce.autotune_cache.tuning import timing
from cutefce.autotune_cache.tuning.cases import SMALL_PROBLEMS, Case, Outputs, compare
from cutefce.autotune_cache.tuning.jobs import Job
from cutefce.autotune_cache.tuning.runner import Runner
from cutefce.cute_kernels.config import KernelConfigs
from cutefce.cute_kernels.jit import cache as jit_cache
from cutefce.cute_kernels.process_cache import process_cache
from cutefce.cute_kernels.spec.kernel import KernelSpec

CALLS = 3
"""Calls in a row of a candidate: the GEMMs of a training step.  A candidate with fewer cycles but
higher power wins short timings and loses once the GPU lowers its clock."""
SECONDS = 2.0
"""Duration of a trial, of at least MIN_ROUNDS rounds."""
MIN_ROUNDS, MAX_ROUNDS = 4, 50
MAX_CPU_THREADS = 8
"""Threads for the small problems; more only wait for each other."""


def load(kernel: KernelSpec) -> None:
    """Load `kernel`, or compile it if the cache folder does not have it."""
    jit_cache.compiled(kernel)


def prepare(runner: Runner, dtype: str, parts: tuple[str, ...]) -> None:
    """Make inputs and expected outputs of the small problems, which no check's time includes."""
    torch.set_num_threads(min(MAX_CPU_THREADS, torch.get_num_threads()))
    _use(runner)
    for name in SMALL_PROBLEMS:
        _small_case(runner, name, dtype, parts)


def check_small(runner: Runner, dtype: str, configs: KernelConfigs, parts: tuple[str, ...]) -> None:
    """Raise MismatchError if kernels of `configs` are wrong on a small problem."""
    for name in SMALL_PROBLEMS:
        case, expected = _small_case(runner, name, dtype, parts)
        compare(runner.outputs(case.to(runner.device), configs, parts), expected, name)


@process_cache
def _small_case(
    runner: Runner, name: str, dtype: str, parts: tuple[str, ...]
) -> tuple[Case, Outputs]:
    case = runner.small_case(name, dtype)
    return case, runner.expected(case, parts)


def trial(job: Job) -> dict[Candidate, tuple[float, ...]]:
    """Time the candidates in interleaved rounds; return the times of each in ms, round by round."""
    _use(job.runner)
    calls, device = job.calls(), job.problem.device
    for _ in range(2):  # the first round loads kernels
        once = timing.interleaved(calls, device, 1)
    rounds = round(SECONDS * 1e3 / (CALLS * sum(ms for (ms,) in once.values())))
    return timing.interleaved(calls, device, min(max(rounds, MIN_ROUNDS), MAX_ROUNDS), CALLS)


def _use(runner: Runner) -> None:
    """Make the GPU of `runner` the current one."""
    if runner.device != "cpu":
        torch.cuda.set_device(runner.device)
