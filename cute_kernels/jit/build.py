"""Compiles several kernels at once, each in a process of its own."""

import functools
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from cutefce.cute_kernels.jit import cache
from cutefce.cute_kernels.jit.compiler import compile_kernel
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


def build(
    kernels: Sequence[KernelSpec],
    compile_one: Callable[[KernelSpec], Any] = compile_kernel,
) -> dict[KernelSpec, str]:
    """Compile kernels in subprocesses into the cache folder; return those that failed, and why.

    Args:
        kernels: What to compile.
        compile_one: Compiles a kernel in the subprocess, which has no torch.
    """
    failed: dict[KernelSpec, str] = {}
    waiting, processes = iter(kernels), list[SubprocessWorker]()  # of all threads

    def compile_waiting(_: int) -> None:
        with SubprocessWorker(has_torch=False) as process:
            processes.append(process)
            for kernel in waiting:
                try:
                    process.ask(functools.partial(cache.store, kernel, compile_one), BUILD_SECONDS)
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
