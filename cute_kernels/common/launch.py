"""How a row-wise kernel is declared: its operands, its thread blocks, and what a block does.

    def compile_signature(kernel):
        rows, hidden = cute.sym_int(), cute.sym_int(divisibility=8)
        return row_launch(
            double_kernel,
            blocks_of("x"),
            out=matrix(Float32, rows, hidden),
            x=matrix(Float32, rows, hidden),
        )

    @cute.kernel
    def double_kernel(operands):
        out, x = operands
        pdl_wait()
        ...

`HostFunction` is for other kernels, too.
"""

from collections import namedtuple
from collections.abc import Callable
from typing import Any, cast

import cutlass.cute as cute

from cutefce.cute_kernels.common.dsl import USE_PDL, current_stream
from cutefce.cute_kernels.spec.rowwise import TargetLogitSpec

WARPS = TargetLogitSpec.WARPS
"""Warps of a thread block, unless a kernel says otherwise."""

Signature = tuple[Any, tuple[Any, ...]]
"""The host function of a kernel and the arguments to compile it for."""


class HostFunction:
    """A host function, which launches a kernel with operands that have names."""

    _operands: Any

    def signature(self, **operands: Any) -> Signature:
        """Return the function and the arguments to compile it for.

        Operands are fake tensors and numbers, in the order in which the host passes them, each as
        an argument; None for an operand that the kernel lacks.
        """
        self._operands = cast(Any, namedtuple)("Operands", [*operands])
        return self, (*operands.values(), current_stream())

    @cute.jit
    def __call__(self, *arguments: Any) -> None:
        """Launch with the operands, and the stream behind them."""
        self.launch(self._operands(*arguments[:-1]), arguments[-1])

    def launch(self, operands: Any, stream: Any) -> None:
        """Launch with a tuple of the operands, whose fields have their names."""
        raise NotImplementedError


def row_launch(
    kernel: Any,
    blocks: Callable[[Any], tuple[Any, ...]],
    /,
    *,
    warps: int = WARPS,
    launch_options: dict[str, Any] | None = None,
    **operands: Any,
) -> Signature:
    """Return the signature of a kernel.

    Args:
        kernel: Takes the operands as a tuple, whose fields have their names.
        blocks: Takes the same on the host; returns the number of thread blocks, and what else the
            kernel takes.
        warps: Warps of a thread block.
        launch_options: Others than grid, block and stream.
        operands: See `HostFunction.signature`.
    """
    return RowLaunch(kernel, blocks, warps, launch_options).signature(**operands)


def blocks_of(operand: str, rows_per_block: int = 1) -> Callable[[Any], tuple[Any, ...]]:
    """Return the `blocks` of a kernel that has the rows of an operand."""
    return lambda x: ((getattr(x, operand).shape[0] + rows_per_block - 1) // rows_per_block,)


class RowLaunch(HostFunction):
    """The host function of a row-wise kernel; it begins while the previous kernel ends."""

    def __init__(
        self, kernel: Any, blocks: Any, warps: int, options: dict[str, Any] | None
    ) -> None:
        self.kernel, self.blocks = kernel, blocks
        self.threads, self.options = 32 * warps, {**USE_PDL, **(options or {})}

    @cute.jit
    def launch(self, operands: Any, stream: Any) -> None:
        """Launch."""
        blocks, *more = self.blocks(operands)
        self.kernel(operands, *more).launch(
            grid=[blocks, 1, 1],
            block=[self.threads, 1, 1],
            stream=stream,
            **self.options,
        )
