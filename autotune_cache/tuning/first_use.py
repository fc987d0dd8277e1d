"""Tuning of a problem when it is first met, for users who ask for it."""

import warnings
from collections.abc import Sequence

from cutefce.autotune_cache import lookup
from cutefce.autotune_cache.table import Key, key_of
from cutefce.autotune_cache.table_io import file_name
from cutefce.autotune_cache.tuning.candidates import plan
from cutefce.autotune_cache.tuning.subprocess_worker import Child
from cutefce.autotune_cache.tuning.targets.base import Tunable
from cutefce.autotune_cache.tuning.tuner import Tuner, build, head_for, missing
from cutefce.cute_kernels.problem import Problem

_met: set[Key] = set()
"""What this process has tried to tune on first use."""


def tune_on_first_use(tunables: Sequence[Tunable], device: str, problem: Problem) -> None:
    """Tune `problem` for the user's table, unless a table has it; warn if that is impossible."""
    for tunable in tunables:
        key, head = key_of(tunable.name, problem), head_for(tunable, device)
        held = lookup.tables(tunable.arch, device, tunable.num_sms)
        if key in _met or any(key in table.entries for table in held):
            continue
        _met.add(key)
        sizes = problem.tokens, problem.hidden, problem.vocab
        job = plan(tunable, tunable.problem(sizes, problem.dtype))
        path = lookup.user_folder() / file_name(device)
        try:
            unusable = build(missing(job.kernels()), lambda: None)
            with Child() as child:
                outcome = Tuner(path, head, child, unusable).tune(job, lambda: None)
        except (OSError, RuntimeError) as error:
            warnings.warn(f"cutefce: {key} was not tuned: {error}", stacklevel=2)
            continue
        if outcome.entry is None:
            reason = outcome.failures.get(job.choices[0])
            warnings.warn(f"cutefce: {key} was not tuned: {reason}", stacklevel=2)
        lookup.forget()
