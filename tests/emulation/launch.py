"""Runs a kernel's host function and emulates what it launches."""

import functools
from typing import Any

import numpy as np
import torch

from cutefce.cute_kernels.spec.kernel import KernelSpec
from tests.emulation.core import Grid, Program
from tests.emulation.host import host_function, tensors
from tests.emulation.instructions import compile_line
from tests.emulation.memory import GlobalMemory


def run(kernel: KernelSpec, *arguments: Any, seed: int = 0) -> None:
    """Run `kernel` with the arguments that the host passes by position.

    Tensors are on the CPU, or numpy arrays, whose 16-bit numbers are patterns; results are written
    to them.  `seed` chooses the order of events.

    Import it from the module of the architecture, which defines its instructions.

    Raises:
        Stuck: all warps wait.
        AssertionError: an instruction or an address is invalid.
    """
    host = host_function(kernel)
    given = tuple(_tensor(argument, kernel) for argument in arguments)
    memory = GlobalMemory(tensors(given))
    for launch in host.launches(given):
        Grid(launch, _program(host.ptx, launch.entry), memory, seed).run()


@functools.lru_cache(64)
def _program(ptx: str, entry: str) -> Program:
    return Program(ptx, entry, compile_line)


def _tensor(argument: Any, kernel: Any) -> Any:
    """Return an argument with tensors for numpy arrays."""
    if isinstance(argument, tuple):
        return tuple(_tensor(each, kernel) for each in argument)
    if not isinstance(argument, np.ndarray):
        return argument
    if argument.dtype == np.uint16:
        return torch.from_numpy(argument.view(np.int16)).view(getattr(torch, kernel.dtype))
    return torch.from_numpy(argument)
