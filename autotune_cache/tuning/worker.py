"""What the tuner's child processes do: compile, compare with the portable path, time.

A choice is compared on small problems that once went wrong or easily do, in float64, and on the
problem that it is tuned for.  Only then is it timed, in turns with what it is to beat: clocks
drift, so that only ratios of times of one round mean anything.
"""

import functools
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from cutefce.autotune_cache.table import Choice
from cutefce.autotune_cache.tuning.targets.base import Case, Result, Tunable
from cutefce.cute_kernels.jit import cache as jit_cache
from cutefce.cute_kernels.jit import compiler
from cutefce.cute_kernels.problem import Problem
from cutefce.cute_kernels.spec import KernelSpec

Product = Literal["product"]
"""Stands for the plain products in a race."""
Contestant = Choice | Product
STRETCH_SECONDS = 0.075
"""How long calls in a row need to last: a GPU's clock has then followed the power they draw."""
LEAST_ROUNDS, MOST_ROUNDS = 4, 50
SUM_ERROR = 2.0**-16
"""Relative error of float32 sums: they leave the kernels as logarithms of up to 2**7."""
LOGIT_ERROR = 2.0**-13
"""Error of float32 logits of up to 2**8, which is the relative one of their exponentials."""
CHUNK = 1 << 24
"""Values that are compared at a time."""
MOST_CHECKED = 64
"""Choices of which is known that they are right on the problem."""
CPU_THREADS = 8
"""More of them wait for each other where problems are small."""


class MismatchError(Exception):
    """A result differs from that of the portable path."""


@dataclass(frozen=True)
class Timing:
    """Of one of a race."""

    milliseconds: float
    ratio: float
    """Median over the rounds of its time over that of the last one."""


def build(kernel: KernelSpec) -> None:
    """Compile `kernel` into the cache folder; raise if it spills registers or its products wait."""
    if jit_cache.is_stored(kernel):
        return
    report, function = compiler.report(kernel)
    if not report.is_clean:
        raise ValueError(f"{report.spill_bytes} bytes spilled, warnings {report.warnings}")
    try:
        jit_cache.store(kernel, lambda: function)
    except OSError:
        return  # it is compiled again by the process that needs it


def load(kernel: KernelSpec) -> None:
    """Have `kernel` ready, compiled here where the cache folder does not keep it."""
    jit_cache.compiled(kernel)


def prepare(tunable: Tunable, dtype: str) -> None:
    """Make the small problems' inputs and expected results, so that a trial's time is its own."""
    torch.set_num_threads(min(CPU_THREADS, torch.get_num_threads()))
    if torch.device(tunable.device).type == "cuda":
        torch.cuda.set_device(tunable.device)
    for name in SMALL:
        _small(tunable, name, dtype)


def prepare_full(tunable: Tunable, problem: Problem) -> None:
    """Make those of `problem` too."""
    prepare(tunable, problem.dtype)
    _full(tunable, problem)


@functools.cache
def check(tunable: Tunable, dtype: str, choice: Choice) -> None:
    """Raise MismatchError if `choice` is wrong on a small problem."""
    for name in SMALL:
        case, expected = _small(tunable, name, dtype)
        _compare(tunable.results(case, choice), expected, 1, name)


@functools.lru_cache(maxsize=MOST_CHECKED)
def check_full(tunable: Tunable, problem: Problem, choice: Choice) -> None:
    """Raise MismatchError if `choice` is wrong on `problem`."""
    case, expected = _full(tunable, problem)
    _compare(tunable.results(case, choice), expected, 2, "the problem itself")


def qualify(tunable: Tunable, problem: Problem, choice: Choice) -> bool:
    """Return True; raise MismatchError if `choice` is wrong on a small problem or on `problem`."""
    check(tunable, problem.dtype, choice)
    check_full(tunable, problem, choice)
    return True


def race(
    tunable: Tunable,
    problem: Problem,
    contestants: Sequence[Contestant],
    seconds: float,
    in_a_row: int,
) -> tuple[Timing, ...]:
    """Check the contestants, then time calls in a row of each, in turns, for about `seconds`.

    There are fewer in a row where STRETCH_SECONDS have room for fewer.
    """
    case, _ = _full(tunable, problem)
    calls = []
    for contestant in contestants:
        if contestant == "product":
            calls.append(tunable.product(case))
        else:
            qualify(tunable, problem, contestant)
            calls.append(tunable.call(case, contestant))
    on_cpu = torch.device(tunable.device).type == "cpu"
    sample = _cpu_sample if on_cpu else _gpu_sample
    for _ in range(2):  # the first round loads kernels, the second says how long one takes
        begin = time.perf_counter()
        _ = [sample(call, 1)() for call in calls]
        round_seconds = time.perf_counter() - begin
        if round_seconds > seconds:
            break  # to load kernels is nothing to that
    room = round(STRETCH_SECONDS * len(calls) / round_seconds)
    in_a_row = max(1, min(in_a_row, room))
    rounds = round(seconds / (in_a_row * round_seconds))
    rounds = min(max(rounds, LEAST_ROUNDS), MOST_ROUNDS)
    # a GPU's clock depends on what it did before: each round has an order of its own
    order = random.Random(0)
    taken = []
    for _ in range(rounds):
        turns = order.sample(range(len(calls)), len(calls))
        reads = {turn: sample(calls[turn], in_a_row) for turn in turns}
        taken.append([reads[i] for i in range(len(calls))])
    times = [[read() for read in row] for row in taken]
    return tuple(
        Timing(
            statistics.median(row[i] for row in times),
            statistics.median(row[i] / row[-1] for row in times),
        )
        for i in range(len(calls))
    )


def _cpu_sample(call: Callable[[], object], in_a_row: int) -> Callable[[], float]:
    begin = time.perf_counter()
    for _ in range(in_a_row):
        call()
    milliseconds = (time.perf_counter() - begin) * 1e3 / in_a_row
    return lambda: milliseconds


def _gpu_sample(call: Callable[[], object], in_a_row: int) -> Callable[[], float]:
    """Enqueue calls; what is returned waits for them, and returns the milliseconds of one."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(in_a_row):
        call()
    end.record()

    def read() -> float:
        end.synchronize()
        return float(start.elapsed_time(end)) / in_a_row

    return read


def _compare(got: dict[str, Result], expected: dict[str, Result], rounded: int, where: str) -> None:
    """Raise MismatchError where results differ by more than roundings explain.

    `rounded` is 1 if what is expected is exact, 2 if it is rounded as often as what was got.
    """
    for name, result in got.items():
        dtype = result.values.dtype
        is_narrow = dtype.itemsize == 2
        unit = torch.finfo(dtype).eps / 2 if is_narrow else SUM_ERROR
        allowed = rounded * result.roundings * unit + (LOGIT_ERROR if is_narrow else 0)
        error = _distance(result, expected[name])
        if not error <= allowed:
            raise MismatchError(f"{where}: {name} is off by {error:.2g}, allowed {allowed:.2g}")


def _distance(got: Result, want: Result) -> float:
    """Return the largest relative error; inf where one is finite and the other is not."""
    worst = 0.0
    for a, b in zip(_chunks(got), _chunks(want), strict=True):
        finite = b.isfinite()
        if not torch.equal(a.isfinite(), finite):
            return float("inf")
        size = b.abs().where(finite, 0)
        if got.of_row:
            size = size.amax(1, keepdim=True)
        error = (a - b).abs() / (size + got.floor)
        worst = max(worst, float(error.where(finite, 0).max()))
    return worst


def _chunks(result: Result) -> Iterator[Tensor]:
    values = result.values if result.values.ndim == 2 else result.values[:, None]
    rows = max(1, CHUNK // values.shape[1])
    for first in range(0, values.shape[0], rows):
        chunk = values[first : first + rows].double()
        if result.scale is not None:
            chunk = chunk / result.scale[first : first + rows, None].double()
        yield chunk


SMALL: dict[str, tuple[int, int, int]] = {
    "one row": (1, 64, 1000),
    "fewer columns than a tile": (70, 8, 17),
    "rows far above their targets": (1100, 72, 3001),
    "a row of NaN": (257, 64, 1500),
    "one target for all": (300, 136, 3001),
}


@functools.cache
def _small(tunable: Tunable, name: str, dtype: str) -> tuple[Case, dict[str, Result]]:
    """Return inputs on the tunable's device, and what float64 on the CPU finds for them."""
    tokens, hidden, vocab = SMALL[name]
    problem = tunable.problem(SMALL[name], dtype)
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
    wide = getattr(torch, dtype)
    case = Case(problem, h.to(wide), w.to(wide), y, upstream)
    expected = tunable.expected(case.exact())
    return case.to(tunable.device), {k: found.to(tunable.device) for k, found in expected.items()}


def _full(tunable: Tunable, problem: Problem) -> tuple[Case, dict[str, Result]]:
    """Return random inputs of `problem`, and what the portable path finds for them.

    Those of the problem before are let go first: they may take half of the memory.
    """
    if (tunable, problem) not in _held:
        _held.clear()
        _held[tunable, problem] = _make_full(tunable, problem)
    return _held[tunable, problem]


_held: dict[tuple[Tunable, Problem], tuple[Case, dict[str, Result]]] = {}


def _make_full(tunable: Tunable, problem: Problem) -> tuple[Case, dict[str, Result]]:
    torch.manual_seed(0)
    dtype, device = getattr(torch, problem.dtype), tunable.device
    h = torch.randn(problem.tokens, problem.hidden, device=device, dtype=dtype)
    # logits of standard deviation 1, as an untrained head gives
    w = torch.randn(problem.vocab, problem.hidden, device=device, dtype=dtype)
    w.mul_(problem.hidden**-0.5)
    y = torch.randint(problem.vocab, (problem.tokens,), device=device)
    case = Case(problem, h, w, y, None)
    return case, tunable.expected(case)
