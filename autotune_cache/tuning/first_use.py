"""Verification and tuning at the first call: the functions that `cutefce.ops` calls."""

import warnings

from cutefce.autotune_cache import lookup
from cutefce.autotune_cache.table import Key, key_of
from cutefce.autotune_cache.table_io import file_name
from cutefce.autotune_cache.tuning import runner, targets, verify
from cutefce.autotune_cache.tuning.tuner import Tuner, header_for, make_job
from cutefce.autotune_cache.verdicts import Verdict
from cutefce.cute_kernels import process_cache
from cutefce.cute_kernels.config import KernelConfigs
from cutefce.cute_kernels.gpu import Gpu
from cutefce.cute_kernels.jit import build
from cutefce.cute_kernels.jit.subprocess_worker import SubprocessWorker
from cutefce.cute_kernels.problem import Problem

_attempted: set[tuple[Gpu, Key]] = set()
"""Keys that this process tried to tune."""


def verify_on_first_use(
    gpu: Gpu, device: str, dtype: str, configs: KernelConfigs, default: KernelConfigs, part: str
) -> Verdict | None:
    """Do what `verify.verify_call` does on `device`, a GPU as torch names it."""
    return verify.verify_call(runner.Runner(gpu, device), dtype, configs, default, part)


def tune_on_first_use(gpu: Gpu, device: str, problem: Problem) -> None:
    """Tune `problem` into the user's table, unless a table has it; warn if that fails.

    An entry of other kernel sources counts: it is a choice, and was verified before this call.

    Args:
        gpu: The GPU model.
        device: The GPU that runs the trials, as torch names it.
        problem: The problem of the call.
    """
    for target in targets.all_targets(gpu, device):
        key = key_of(target.name, problem)
        is_tuned = any(key in table.entries for table in lookup.tables(gpu))
        if (gpu, key) in _attempted or is_tuned:
            continue
        _attempted.add((gpu, key))
        sizes = problem.tokens, problem.hidden, problem.vocab
        job = make_job(target, target.runner.problem(sizes, problem.dtype))
        try:
            path = lookup.user_folder() / file_name(gpu)
            kernels = build.missing(job.all_kernels())
            unusable = build.build(kernels, lambda: None, build.compile_clean)
            with SubprocessWorker() as process:
                outcome = Tuner(path, header_for(gpu), process, unusable).tune(job, lambda: None)
        except (OSError, RuntimeError) as error:
            warnings.warn(f"cutefce: {key} was not tuned: {error}", stacklevel=2)
            continue
        if outcome.entry is None:
            reason = outcome.failures.get(job.candidates[0])
            warnings.warn(f"cutefce: {key} was not tuned: {reason}", stacklevel=2)
        process_cache.reset()
