"""Verdicts: whether the kernels gave right results on an architecture.

GPU models of an architecture execute the same code.  So what proves kernels, of the sources and the
compiler as they are, is a check on any of them: one that a file of the user's folder records, or a
shipped table.  Before a table is written, all configurations that the architecture lists have
passed for its dtypes, and lookups choose no others.

What is recorded are parts of what calls launch, which passed with all of these configurations.
"""

import contextlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from cutefce.autotune_cache import lookup
from cutefce.cute_kernels import cache_files
from cutefce.cute_kernels.arch.base import Arch, Gpu
from cutefce.cute_kernels.cache_files import CacheError
from cutefce.cute_kernels.jit import cache as jit_cache
from cutefce.cute_kernels.process_cache import warn_once

FORWARD = "forward"
"""Losses without gradients."""
STEP = "step"
"""Exact gradients, by any plan; a plan that stores nothing has the forward of `FORWARD`."""
OPTIONS = "options"
"""Mapped logits, other factors of tokens, and reductions of rows beside their sums."""
SOFT_TARGETS = "soft targets"
SAMPLES = "samples"
"""Sampled gradients."""
DIVERGENCES = "divergences"
"""Rows of two models' logits, and logits, whatever the configurations."""
PARTS = FORWARD, STEP, OPTIONS, SOFT_TARGETS, SAMPLES, DIVERGENCES
ONCE = OPTIONS, DIVERGENCES
"""Those whose own code is the same in every configuration: they are checked in one."""


def parts_of(part: str) -> tuple[str, ...]:
    """Return the part with those that calls of it launch too."""
    return (FORWARD, STEP) if part == STEP else (part,)


@dataclass(frozen=True)
class Verdict:
    """The outcome of a verification."""

    passed: bool
    reason: str = ""
    """Why it failed."""
    parts: frozenset[str] = field(default=frozenset(), compare=False)
    """What passed, of a recorded one."""


Verifier = Callable[[Gpu, str, str, str], Verdict]
verify: Verifier
"""Verifies a part of calls on a GPU, of its device and a dtype; a function of a layer above, which
`cutefce` puts here."""


def known(gpu: Gpu, dtype: str, *parts: str) -> Verdict | None:
    """Return the verdict on parts of calls, None without one; of no parts, whether any failed.

    A recorded failure is one on all kernels of `dtype`, and outweighs what tables prove.
    """
    recorded = _recorded(gpu.arch, dtype)
    if not recorded.passed:
        return recorded
    is_proven = recorded.parts.issuperset(parts) or _has_table(gpu.arch, dtype)
    return Verdict(True) if is_proven else None


def record(gpu: Gpu, dtype: str, verdict: Verdict, parts: Iterable[str]) -> None:
    """Write a verdict into the user's folder, if that can be written to.

    Args:
        gpu: A GPU of the architecture.
        dtype: Dtype of hidden states and weight.
        verdict: The outcome.
        parts: What passed, which is added to what is recorded.
    """
    passed = _recorded(gpu.arch, dtype).parts.union(parts) if verdict.passed else ()
    data = {"passed": verdict.passed, "reason": verdict.reason, "parts": sorted(passed)}
    with contextlib.suppress(OSError):
        cache_files.write(record_path(gpu.arch, dtype), f"{json.dumps(data)}\n".encode())


def record_path(arch: Arch, dtype: str) -> Path:
    """Return the file of the verdicts on these kernels, compiler and dtype.

    Raises:
        CacheError: without a cache folder.
    """
    name = f"{arch.name}-{dtype}-{jit_cache.fingerprint()}.json"
    return cache_files.base_folder() / "verified" / name


def _recorded(arch: Arch, dtype: str) -> Verdict:
    """Return what is recorded if nobody else can have written it; else that nothing has passed."""
    try:
        data = json.loads(cache_files.read(record_path(arch, dtype)))
        return Verdict(data["passed"] is True, str(data["reason"]), frozenset(data["parts"]))
    except CacheError as error:
        warn_once(str(error))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass
    return Verdict(True)


def _has_table(arch: Arch, dtype: str) -> bool:
    """Whether a shipped table proves the kernels of `dtype` as they are."""
    return any(
        table.gpu.arch == arch and dtype in table.dtypes and table.build == lookup.current_build()
        for table in lookup.shipped_tables()
    )
