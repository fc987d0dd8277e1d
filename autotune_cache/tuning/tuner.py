"""The tuner: tries what may be fast, in child processes, and writes down what was.

For each problem the cost model leaves a few candidates.  Each is compiled ahead, then tried in a
child process under a time limit.  Those that are right are raced against each other and the
architecture's default; the best of them are raced longer, against the best so far.  What hangs,
crashes, differs from the portable path or lacks memory is rejected with the reason.  Every result
is written at once.
"""

import dataclasses
import functools
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar

from cutefce.autotune_cache import table_io
from cutefce.autotune_cache.table import LEAST_GAIN, Choice, Entry, Key, Rejection, Table
from cutefce.autotune_cache.tuning import worker
from cutefce.autotune_cache.tuning.candidates import Job
from cutefce.autotune_cache.tuning.subprocess_worker import Child, ChildError
from cutefce.autotune_cache.tuning.targets.base import Tunable
from cutefce.autotune_cache.tuning.worker import Contestant, Timing
from cutefce.cute_kernels.jit import cache as jit_cache
from cutefce.cute_kernels.spec import KernelSpec
from cutefce.version import __version__

T = TypeVar("T")
FINALISTS = 3
"""Candidates that are raced for longer, if they were faster than the default."""
FIRST_SECONDS, FINAL_SECONDS = 0.3, 0.6
"""Of the first race, in which all take part, and of the last one; they have at least
`trials.LEAST_ROUNDS` rounds."""
STEP_CALLS = 3
"""Calls in a row of a contestant in the last race: the products that a step has.  What needs fewer
cycles but more power wins a short race, and loses when the GPU slows down for it."""
BUILD_SECONDS, PREPARE_SECONDS, TRIAL_SECONDS = 300, 120, 30
"""Time limits of a kernel's compilation, of making inputs and expected results, of a race."""
MOST_BUILDERS = 16


@dataclass(frozen=True)
class Outcome:
    """What tuning one problem brought."""

    job: Job
    entry: Entry | None
    failures: dict[Choice, str]
    """Choices that were rejected, and why."""


def missing(kernels: Iterable[KernelSpec]) -> list[KernelSpec]:
    """Return the kernels that have to be compiled, each once."""
    return [k for k in dict.fromkeys(kernels) if not jit_cache.is_stored(k)]


def build(kernels: Sequence[KernelSpec], done: Callable[[], None]) -> dict[KernelSpec, str]:
    """Compile kernels in child processes; return those that cannot be used, and why."""
    failed: dict[KernelSpec, str] = {}

    def compile_all(some: Sequence[KernelSpec]) -> None:
        with Child() as child:
            for kernel in some:
                try:
                    child.ask(functools.partial(worker.build, kernel), BUILD_SECONDS)
                except ChildError as error:
                    failed[kernel] = f"compiling {type(kernel).__name__}: {error}"
                done()

    builders = max(1, min(os.cpu_count() or 1, MOST_BUILDERS, len(kernels)))
    with ThreadPoolExecutor(builders) as pool:
        list(pool.map(compile_all, [kernels[i::builders] for i in range(builders)]))
    return failed


class Tuner:
    """Tunes problems one after another and adds what it finds to a file."""

    def __init__(
        self, path: Path, head: Table, child: Child, unusable: dict[KernelSpec, str]
    ) -> None:
        """`head` says what GPU this is; `unusable` are kernels that could not be compiled."""
        self.path, self.head, self.child, self.unusable = path, head, child, unusable
        self.rejected: dict[tuple[Key, Choice], Rejection] = {}
        self.failures: dict[Choice, str] = {}

    def tune(self, job: Job, done: Callable[[], None]) -> Outcome:
        """Tune one problem; call `done` after each choice."""
        self.rejected, self.failures = dict(read_like(self.path, self.head).rejected), {}
        try:
            entry = self._tune(job, done)
        except _UnpreparedError as error:
            return Outcome(job, None, {**self.failures, job.choices[0]: str(error)})
        if entry is not None:
            table_io.update(self.path, dataclasses.replace(self.head, entries={job.key: entry}))
        return Outcome(job, entry, self.failures)

    def _tune(self, job: Job, done: Callable[[], None]) -> Entry | None:
        default, *others = job.choices
        if not self._qualifies(job, default, done):
            return None
        right = [choice for choice in others if self._qualifies(job, choice, done)]
        first = self._race(job, right, default, FIRST_SECONDS, 1) if right else {}
        faster = [choice for choice in right if choice in first and first[choice].ratio < 1]
        finalists = sorted(faster, key=lambda choice: first[choice].ratio)[:FINALISTS]
        last = self._race(job, ["product", *finalists], default, FINAL_SECONDS, STEP_CALLS)
        if "product" not in last:
            return None
        best = min((x for x in (default, *finalists) if x in last), key=lambda x: last[x].ratio)
        baseline, won = last[default].milliseconds, last[best].milliseconds
        if won >= baseline or last[best].ratio >= 1 - LEAST_GAIN:  # luck, until now
            best, won = default, baseline
        kernels = self.head.versions["kernels"]
        return Entry(best, won, baseline, last["product"].milliseconds, True, kernels)

    def _qualifies(self, job: Job, choice: Choice, done: Callable[[], None]) -> bool:
        """Whether a choice is right; it is rejected if not."""
        call = functools.partial(worker.qualify, job.tunable, job.problem, choice)
        passed = self._ask(job, choice, call)
        done()
        return bool(passed)

    def _race(
        self,
        job: Job,
        contestants: Sequence[Contestant],
        default: Choice,
        seconds: float,
        calls: int,
    ) -> dict[Contestant, Timing]:
        """Race all and the default, or one by one against it if one of them ends the race."""

        def race(some: Sequence[Contestant]) -> Callable[[], Sequence[Timing]]:
            tunable, problem = job.tunable, job.problem
            return functools.partial(worker.race, tunable, problem, some, seconds, calls)

        every = (*contestants, default)
        self._prepare(job)
        try:
            return dict(zip(every, self.child.ask(race(every), TRIAL_SECONDS), strict=True))
        except ChildError:
            timings: dict[Contestant, Timing] = {}
            for contestant in contestants:
                pair, choice = (contestant, default), contestant
                if choice == "product":
                    choice = default
                raced = self._ask(job, choice, race(pair))
                timings |= zip(pair, raced, strict=True) if raced else ()
            return timings

    def _ask(self, job: Job, choice: Choice, trial: Callable[[], T]) -> T | None:
        """Return what a trial of `choice` returns in the child, None if it is rejected."""
        if self._is_rejected(job, choice):
            return None
        self._prepare(job)
        try:
            return self.child.ask(trial, TRIAL_SECONDS)
        except ChildError as error:
            self._reject(job, choice, Rejection(str(error), not error.is_out_of_memory))
            return None

    def _prepare(self, job: Job) -> None:
        """Make the inputs, which are there already unless the child is a new one."""
        try:
            prepare = functools.partial(worker.prepare_full, job.tunable, job.problem)
            self.child.ask(prepare, PREPARE_SECONDS)
        except ChildError as error:
            raise _UnpreparedError(f"before any kernel: {error}") from error

    def _is_rejected(self, job: Job, choice: Choice) -> bool:
        """Whether it is known not to work."""
        for (key, config), rejection in self.rejected.items():
            same = (key.kernel, key.dtype, config) == (job.key.kernel, job.key.dtype, choice)
            if same and (rejection.everywhere or key == job.key):
                self.failures[choice] = rejection.reason
                return True
        for kernel in job.tunable.kernels(job.problem, choice):
            if kernel in self.unusable:
                self._reject(job, choice, Rejection(self.unusable[kernel], everywhere=True))
                return True
        return False

    def _reject(self, job: Job, choice: Choice, rejection: Rejection) -> None:
        self.failures[choice] = rejection.reason
        self.rejected[job.key, choice] = rejection
        found = {(job.key, choice): rejection}
        table_io.update(self.path, dataclasses.replace(self.head, rejected=found))


class _UnpreparedError(Exception):
    """Inputs and expected results could not be had, for which no choice is to blame."""


def read_like(path: Path, head: Table) -> Table:
    """Return the file's table if it is of the GPU and the kernels of `head`, else `head`."""
    try:
        held = table_io.read(path)
        held.serves(head.device, head.num_sms, head.arch)
    except (OSError, ValueError):
        return head
    return held if held.versions.get("kernels") == head.versions["kernels"] else head


def is_done(job: Job, path: Path, head: Table) -> bool:
    """Whether the file has an entry for `job` of the kernels as they are."""
    entry = read_like(path, head).entries.get(job.key)
    return entry is not None and entry.verified and entry.kernels == head.versions["kernels"]


def head_for(tunable: Tunable, device: str) -> Table:
    """Return a table without entries for the GPU of `tunable`, which is called `device`."""
    versions = {name: version(name) for name in ("torch", "nvidia-cutlass-dsl")}
    versions |= {"cutefce": __version__, "kernels": jit_cache.fingerprint()}
    return Table(device, tunable.num_sms, tunable.arch.name, versions)
