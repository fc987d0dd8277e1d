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

The host passes the operands in the order of the declaration, each as an argument of its own.
"""

from collections import namedtuple
from collections.abc import Callable
from typing import Any

import cutlass.cute as cute

from cutefce.cute_kernels.common.dsl import USE_PDL, current_stream
from cutefce.cute_kernels.spec import TargetLogitSpec

WARPS = TargetLogitSpec.WARPS
"""Warps of a thread block, unless a kernel says otherwise."""

Signature = tuple[Any, tuple[Any, ...]]
"""The host function of a kernel and the arguments to compile it for."""


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
        operands: Fake tensors and numbers to compile for, in the order in which the host passes
            them; None for an operand that the kernel lacks.
    """
    launch = RowLaunch(kernel, namedtuple("Operands", operands), blocks, warps, launch_options)
    return launch, (*operands.values(), current_stream())


def blocks_of(operand: str, rows_per_block: int = 1) -> Callable[[Any], tuple[Any, ...]]:
    """Return the `blocks` of a kernel that has the rows of an operand."""
    return lambda x: ((getattr(x, operand).shape[0] + rows_per_block - 1) // rows_per_block,)


class RowLaunch:
    """The host function of a kernel; the launch begins while the previous kernel ends."""

    def __init__(
        self, kernel: Any, operands: Any, blocks: Any, warps: int, options: dict[str, Any] | None
    ) -> None:
        self.kernel, self.operands, self.blocks = kernel, operands, blocks
        self.threads, self.options = 32 * warps, {**USE_PDL, **(options or {})}

    @cute.jit
    def __call__(self, *arguments: Any) -> None:
        """Launch with the operands, and the stream."""
        operands = self.operands(*arguments[:-1])
        blocks, *more = self.blocks(operands)
        self.kernel(operands, *more).launch(
            grid=[blocks, 1, 1],
            block=[self.threads, 1, 1],
            stream=arguments[-1],
            **self.options,
        )
