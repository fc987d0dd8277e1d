"""Compiles several kernels at once, each in a process of its own."""

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from cutefce.cute_kernels.jit import cache
from cutefce.cute_kernels.jit.compiler import compile_clean, compile_kernel
from cutefce.cute_kernels.jit.notices import compiling
from cutefce.cute_kernels.jit.subprocess_worker import SubprocessWorker
from cutefce.cute_kernels.spec.kernel import KernelSpec

BUILD_SECONDS = 300
"""Time limit of compiling a kernel."""
MAX_BUILDERS = 16
"""Processes that compile, each with memory of its own, on hosts of many cores."""


def missing(kernels: Iterable[KernelSpec]) -> list[KernelSpec]:
    """Return the kernels that are not compiled yet, each once."""
    return [kernel for kernel in dict.fromkeys(kernels) if not cache.is_stored(kernel)]


def store_if_possible(kernel: KernelSpec) -> None:
    """Compile `kernel` into the cache folder; nothing without one: who launches it compiles it."""
    with contextlib.suppress(OSError):
        cache.store(kernel, compile_kernel)


store_clean = functools.partial(cache.store, compile_one=compile_clean)
"""Compiles a kernel into the cache folder; raises ValueError if it is not clean."""


def build(
    kernels: Sequence[KernelSpec],
    store: Callable[[KernelSpec], Any] = store_if_possible,
) -> dict[KernelSpec, str]:
    """Compile kernels in subprocesses; return those that failed, with the reasons.

    Args:
        kernels: What to compile.
        store: Compiles a kernel in the subprocess, which has no torch.
    """
    failed: dict[KernelSpec, str] = {}
    waiting, processes = iter(kernels), list[SubprocessWorker]()  # of all threads

    def compile_waiting(_: int) -> None:
        with SubprocessWorker(has_torch=False) as process:
            processes.append(process)
            for kernel in waiting:
                try:
                    process.ask(functools.partial(store, kernel), BUILD_SECONDS)
                except RuntimeError as error:
                    failed[kernel] = f"compiling {type(kernel).__name__}: {error}"
                count()

    builders = max(1, min(os.cpu_count() or 1, MAX_BUILDERS, len(kernels)))
    arch = kernels[0].arch if kernels else ""
    with compiling(len(kernels), arch) as count, ThreadPoolExecutor(builders) as pool:
        try:
            list(pool.map(compile_waiting, range(builders)))
        except BaseException:  # an interrupt waits for no kernel
            list(waiting)
            for process in processes:
                process.kill()
            raise
    return failed
