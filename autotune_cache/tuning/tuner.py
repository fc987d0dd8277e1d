"""The tuner: times the candidates of the GEMMs of `project_exp`, dX and dW in a subprocess.

They passed verification, and are timed in turns, in one trial under a time limit.  One wins over
the architecture's default if it saves 1 %, less being noise.
"""

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cutefce.autotune_cache import tables
from cutefce.autotune_cache.lookup import current_build
from cutefce.autotune_cache.tables import TUNED, Candidate, Entry, Key, Table, candidates, key_of
from cutefce.autotune_cache.tuning import timing
from cutefce.autotune_cache.tuning.cases import Case, full_case
from cutefce.autotune_cache.tuning.outputs.steps import Way, make_targets, prepared
from cutefce.autotune_cache.tuning.runner import Runner
from cutefce.autotune_cache.tuning.shapes import Sizes
from cutefce.autotune_cache.tuning.timing import Call
from cutefce.cute_kernels.arch.base import Gpu
from cutefce.cute_kernels.config import KernelConfigs
from cutefce.cute_kernels.integers import round_up
from cutefce.cute_kernels.jit.subprocess_worker import SubprocessWorker
from cutefce.cute_kernels.problem import Problem
from cutefce.ops.primitives.portable_projection import Logits
from cutefce.ops.primitives.primitives import Primitives
from cutefce.ops.rows.packed_sums import Sums
from cutefce.version import __version__

TRIAL_SECONDS = 60
"""Time limit of a trial."""
MIN_GAIN = 0.01
"""Smallest relative saving that counts as one; less is noise."""
CALLS = 3
"""Calls in a row of a candidate: the GEMMs of a training step.  A candidate with fewer cycles but
higher power wins short timings and loses once the GPU lowers its clock."""
SECONDS = 2.0
"""Duration of a trial, of at least MIN_ROUNDS rounds."""
MIN_ROUNDS, MAX_ROUNDS = 4, 50


@dataclass(frozen=True)
class Job:
    """One GEMM of one problem on one GPU; picklable."""

    runner: Runner
    kernel: str
    """Name in tables: a field of KernelConfigs."""
    problem: Problem

    def __str__(self) -> str:
        p = self.problem
        return f"{p.tokens}x{p.hidden}x{p.vocab} {self.kernel}"

    @property
    def key(self) -> Key:
        """The key of the problem in a table."""
        return key_of(self.kernel, self.problem)

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """What may win: the default first, then the others that the architecture lists."""
        p = self.problem
        default = getattr(self.runner.gpu.default_configs(p.tokens, p.hidden), self.kernel)
        return tuple(dict.fromkeys((default, *candidates(self.runner.gpu.arch, self.kernel))))

    def configs(self, candidate: Candidate) -> KernelConfigs:
        """Return the configurations of all kernels with `candidate` for this one.

        That of dX is also the one for few columns, which small vocabularies have.
        """
        changed: dict[str, Any] = {self.kernel: candidate}
        if self.kernel == "grad_hidden":
            changed["grad_hidden_short"] = candidate
        return dataclasses.replace(self.runner.base(), **changed)

    def calls(self) -> dict[Candidate, Call]:
        """Return the calls whose times decide: on the same random inputs, into the same memory."""
        p, case = self.problem, full_case(self.problem, self.runner.device)
        every = {x: self.runner.primitives(p, self.configs(x)) for x in self.candidates}
        columns, shape, dtype = round_up(p.vocab, 8), (p.tokens, p.hidden), torch.float32
        if self.kernel == "project_exp":  # what the default workspace holds
            _, plan, _ = prepared(case, every[self.candidates[0]], Way(stored=1))
            columns, shape = plan.layout.kept, (0, 0)
        elif self.kernel == "grad_weight":
            shape, dtype = (p.vocab, p.hidden), case.w.dtype
        exps = case.h.new_empty(p.tokens, columns).uniform_()
        out = Sums(case.h.new_empty(shape, dtype=dtype))
        return {x: self._call(case, exps, out, own) for x, own in every.items()}

    def trial(self) -> dict[Candidate, tuple[float, ...]]:
        """Return the times of the candidates in ms, of interleaved rounds; for a subprocess."""
        self.runner.use()
        calls, device = self.calls(), self.problem.device
        for _ in range(2):  # the first round loads kernels
            once = timing.interleaved(calls, device, 1)
        rounds = round(SECONDS * 1e3 / (CALLS * sum(ms for (ms,) in once.values())))
        return timing.interleaved(calls, device, min(max(rounds, MIN_ROUNDS), MAX_ROUNDS), CALLS)

    def _call(self, case: Case, exps: Tensor, out: Sums, own: Primitives) -> Call:
        """Return the GEMM of sums of dX, or of the final dW, from `exps` (N, V), or of the forward.

        That stores `exps` of the first columns.
        """
        vocab, targets = case.problem.vocab, make_targets(case)
        if self.kernel == "project_exp":
            h, w = own.prepare(case.h, case.w)
            logit = own.target_logit(h, w, targets)
            stored = exps if exps.shape[1] else None
            return partial(own.project_exp, Logits(h, w, (0, vocab), logit, targets), stored)
        exps = exps[:, :vocab]
        if self.kernel == "grad_hidden":
            return partial(own.add_hidden, out, exps, case.w, accumulate=False)
        grad = own.target_grad(case.h, case.upstream, targets)
        scale = case.upstream[0]
        return partial(own.add_weight, out, exps, case.h, grad, 0, grad_scale=scale)


def jobs_of(runner: Runner, shapes: Sequence[Sizes], dtype: str) -> list[Job]:
    """Return the jobs of the problems of these shapes: of each kernel that the GPU has."""
    kernels = [kernel for kernel in TUNED if candidates(runner.gpu.arch, kernel)]
    return [Job(runner, x, runner.problem(sizes, dtype)) for sizes in shapes for x in kernels]


def tune(job: Job, process: SubprocessWorker, path: Path, header: Table) -> Entry:
    """Return the winner of one problem, and add it to a file.

    Args:
        job: The problem.
        process: Runs the trial.
        path: The file.
        header: A table without entries that names the GPU and the kernels.

    Raises:
        WorkerError: if the trial fails; the file has no entry of it then.
        RuntimeError: if no subprocess can be started.
    """
    times = process.ask(job.trial, TRIAL_SECONDS)
    ms = {x: float(f"{statistics.median(times[x]):.4g}") for x in times}
    default, best = job.candidates[0], min(ms, key=ms.__getitem__)
    if ms[best] >= (1 - MIN_GAIN) * ms[default]:
        best = default
    entry = Entry(best, ms[best], ms[default])
    tables.update(path, dataclasses.replace(header, entries={job.key: entry}))
    return entry


def header_for(gpu: Gpu) -> Table:
    """Return a table without entries for `gpu`, with the versions of this installation."""
    return Table(gpu, {"torch": version("torch"), "cutefce": __version__, **current_build()})
