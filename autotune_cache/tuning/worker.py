"""Calls that run in the tuner's subprocess: compile, compare with the portable path, time.

A candidate is compared on small problems with float64 results of the CPU, and on the problem that
it is tuned for with results of the portable path.  It is timed only after that.
"""

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from cutefce.autotune_cache.table import Candidate
from cutefce.autotune_cache.tuning import timing
from cutefce.autotune_cache.tuning.shapes import SMALL_PROBLEMS
from cutefce.autotune_cache.tuning.targets.base import CheckedOutput, TuningCase, TuningTarget
from cutefce.cute_kernels import process_cache
from cutefce.cute_kernels.jit import cache as jit_cache
from cutefce.cute_kernels.problem import Problem
from cutefce.cute_kernels.spec import KernelSpec

CUBLAS: Literal["cublas"] = "cublas"
"""Entrant that runs the same GEMMs on cuBLAS."""
Entrant = Candidate | Literal["cublas"]
"""What a benchmark times."""
MAX_SAMPLE_SECONDS = 0.075
"""Duration after which a GPU's clock has followed the power of the calls; more add nothing."""
MIN_ROUNDS, MAX_ROUNDS = 4, 50
SUM_ERROR = 2.0**-16
"""Relative error of float32 sums, which the kernels pass on as logarithms of up to 2**7."""
LOGIT_ERROR = 2.0**-13
"""Error of float32 logits of up to 2**8, hence the relative error of their exponentials."""
CHUNK_NUMEL = 1 << 24
"""Values compared at a time."""
MAX_CPU_THREADS = 8
"""Threads for the small problems; more only wait for each other."""

Expected = tuple[TuningCase, dict[str, CheckedOutput]]
"""Inputs with their expected outputs."""


class MismatchError(Exception):
    """An output differs from the expected one by more than rounding explains."""


@dataclass(frozen=True)
class Timing:
    """The result of one entrant."""

    ms: float
    """Median over the rounds."""
    ratio: float
    """Median over the rounds of its time divided by that of the last entrant."""


def load(kernel: KernelSpec) -> None:
    """Load `kernel`, or compile it if the cache folder does not have it."""
    jit_cache.compiled(kernel)


def prepare(target: TuningTarget, dtype: str) -> None:
    """Make inputs and expected outputs of the small problems, which no trial's time includes."""
    torch.set_num_threads(min(MAX_CPU_THREADS, torch.get_num_threads()))
    if target.device_type == "cuda":
        torch.cuda.set_device(target.device)
    for name in SMALL_PROBLEMS:
        _small_case(target, name, dtype)


def prepare_problem(target: TuningTarget, problem: Problem) -> None:
    """Make inputs and expected outputs of the small problems and of `problem`."""
    prepare(target, problem.dtype)
    _full_case(target, problem)


@process_cache.process_cache
def check_small(target: TuningTarget, dtype: str, candidate: Candidate) -> None:
    """Raise MismatchError if `candidate` is wrong on a small problem."""
    for name in SMALL_PROBLEMS:
        case, expected = _small_case(target, name, dtype)
        _compare(target.outputs(case, candidate), expected, 1, name)


@process_cache.process_cache
def check_problem(target: TuningTarget, problem: Problem, candidate: Candidate) -> None:
    """Raise MismatchError if `candidate` is wrong on `problem`."""
    case, expected = _full_case(target, problem)
    _compare(target.outputs(case, candidate), expected, 2, "the problem itself")


def verify(target: TuningTarget, problem: Problem, candidate: Candidate) -> bool:
    """Return True; raise MismatchError if `candidate` is wrong on any problem."""
    check_small(target, problem.dtype, candidate)
    check_problem(target, problem, candidate)
    return True


def benchmark_interleaved(
    target: TuningTarget,
    problem: Problem,
    entrants: Sequence[Entrant],
    seconds: float,
    calls_per_sample: int,
) -> tuple[Timing, ...]:
    """Verify the entrants, then time them in interleaved rounds for about `seconds`.

    Makes fewer calls in a row if those already take MAX_SAMPLE_SECONDS.
    """
    case, _ = _full_case(target, problem)
    calls: dict[Entrant, timing.Call] = {}
    for entrant in entrants:
        if entrant == CUBLAS:
            calls[entrant] = target.cublas(case)
        else:
            verify(target, problem, entrant)
            calls[entrant] = target.call(case, entrant)
    for _ in range(2):  # the first round loads kernels, the second one is measured
        begin = time.perf_counter()
        for call in calls.values():
            timing.sample(call, target.device_type)()
        round_seconds = time.perf_counter() - begin
        if round_seconds > seconds:
            break  # loading kernels takes less than that
    affordable = round(MAX_SAMPLE_SECONDS * len(calls) / round_seconds)
    calls_per_sample = max(1, min(calls_per_sample, affordable))
    rounds = round(seconds / (calls_per_sample * round_seconds))
    rounds = min(max(rounds, MIN_ROUNDS), MAX_ROUNDS)
    samples = timing.interleaved(calls, target.device_type, rounds, calls_per_sample)
    last = samples[entrants[-1]]
    return tuple(
        Timing(
            statistics.median(samples[entrant]),
            statistics.median(a / b for a, b in zip(samples[entrant], last, strict=True)),
        )
        for entrant in entrants
    )


def _compare(
    got: dict[str, CheckedOutput], expected: dict[str, CheckedOutput], roundings: int, where: str
) -> None:
    """Raise MismatchError where outputs differ by more than rounding explains.

    `roundings` is 1 if the expected outputs are exact, 2 if they are rounded as `got` is.
    """
    for name, output in got.items():
        dtype = output.values.dtype
        is_narrow = dtype.itemsize == 2
        unit = torch.finfo(dtype).eps / 2 if is_narrow else SUM_ERROR
        allowed = roundings * output.roundings * unit + (LOGIT_ERROR if is_narrow else 0)
        error = _max_relative_error(output, expected[name])
        if not error <= allowed:
            raise MismatchError(f"{where}: {name} is off by {error:.2g}, allowed {allowed:.2g}")


def _max_relative_error(got: CheckedOutput, expected: CheckedOutput) -> float:
    """Return the largest relative error; inf where only one of two values is finite."""
    worst = 0.0
    for a, b in zip(_chunks(got), _chunks(expected), strict=True):
        finite = b.isfinite()
        if not torch.equal(a.isfinite(), finite):
            return float("inf")
        size = b.abs().where(finite, 0)
        if got.relative_to_row:
            size = size.amax(1, keepdim=True)
        error = (a - b).abs() / (size + got.floor)
        worst = max(worst, float(error.where(finite, 0).max()))
    return worst


def _chunks(output: CheckedOutput) -> Iterator[Tensor]:
    values = output.values if output.values.ndim == 2 else output.values[:, None]
    rows = max(1, CHUNK_NUMEL // values.shape[1])
    for first in range(0, values.shape[0], rows):
        chunk = values[first : first + rows].double()
        if output.scale is not None:
            chunk = chunk / output.scale[first : first + rows, None].double()
        yield chunk


@process_cache.process_cache
def _small_case(target: TuningTarget, name: str, dtype: str) -> Expected:
    """Return inputs on the target's device, with float64 outputs of the CPU."""
    tokens, hidden, vocab = SMALL_PROBLEMS[name]
    problem = target.problem(SMALL_PROBLEMS[name], dtype)
    torch.manual_seed(0)
    h, w = torch.randn(tokens, hidden), torch.randn(vocab, hidden) / hidden**0.5
    y, upstream = torch.randint(vocab, (tokens,)), torch.randn(tokens)
    if name == "rows far above their targets":
        far = torch.tensor([3, 130, 700, tokens - 1])
        h[far] *= 60
        y[far] = (h[far] @ w.t()).argmin(1)
        y[5::7] = -100
    elif name == "a row of NaN":
        h[100, 5] = torch.nan
    elif name == "one target for all":
        y.fill_(vocab - 1)
    case = TuningCase(
        problem, h.to(getattr(torch, dtype)), w.to(getattr(torch, dtype)), y, upstream
    )
    exact = target.expected(case.exact())
    return case.to(target.device), {k: output.to(target.device) for k, output in exact.items()}


def _full_case(target: TuningTarget, problem: Problem) -> Expected:
    """Return random inputs of `problem`, with outputs of the portable path.

    Frees those of the previous problem first: they may take half of the memory.
    """
    if (target, problem) not in _held:
        _held.clear()
        _held[target, problem] = _make_full_case(target, problem)
    return _held[target, problem]


_held: dict[tuple[TuningTarget, Problem], Expected] = {}


def _make_full_case(target: TuningTarget, problem: Problem) -> Expected:
    torch.manual_seed(0)
    dtype, device = getattr(torch, problem.dtype), target.device
    h = torch.randn(problem.tokens, problem.hidden, device=device, dtype=dtype)
    # logits of standard deviation 1, as at the start of training
    w = torch.randn(problem.vocab, problem.hidden, device=device, dtype=dtype)
    w.mul_(problem.hidden**-0.5)
    y = torch.randint(problem.vocab, (problem.tokens,), device=device)
    case = TuningCase(problem, h, w, y, None)
    return case, target.expected(case)


process_cache.on_reset(_held.clear)
