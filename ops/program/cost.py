"""The time of a program: a sum over its steps, with a few numbers of a device.

It serves to choose among the programs of one call, so what these have in common may be left out.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from cutefce.ops.program.problem import Problem
from cutefce.ops.program.steps import Kind, Program, Step


@dataclass(frozen=True)
class Device:
    """What a device does in a second, and what it cannot share out."""

    flops: float
    """Of products of matrices."""
    bytes: float
    """Of memory read or written."""
    edge: float
    """Seconds of a product in which processors wait at its beginning and its end."""
    launch: float
    """Seconds of any other step beyond what it moves."""
    hidden: float = 0.0
    """Part of a product's time in which its sums are read and written for nothing."""


CPU = Device(flops=1e11, bytes=2e10, edge=0.0, launch=0.0)
GPU = Device(flops=7e14, bytes=4e12, edge=4e-5, launch=3e-6, hidden=0.25)
"""An H200's: at its power limit, where 8192x4096x131072 keeps the tensor cores at 7e14 FLOP/s."""


def seconds(program: Program, device: Device) -> float:
    """Return the predicted time of forward and backward."""
    steps, p = program.steps(), program.problem
    return sum(step.times * _seconds(p, step, device, program) for step in steps)


def _seconds(p: Problem, step: Step, device: Device, program: Program) -> float:
    rows, columns = step.rows[1] - step.rows[0], step.columns[1] - step.columns[0]
    if step.far:  # no row is, but for rare ones
        return device.launch
    match step.kind:
        case Kind.PROJECT | Kind.GEMM_HIDDEN | Kind.GEMM_WEIGHT:
            product = 2 * rows * columns * p.hidden / device.flops
            # reading the weight may take longer than few rows' products
            moved = columns * p.hidden * p.item / device.bytes
            return max(product, moved) + device.edge + _sums(program, step, device, product)
        case Kind.GATHER | Kind.RESCALE | Kind.KEEP_HIDDEN | Kind.FINISH_HIDDEN:
            return device.launch + 2 * rows * p.hidden * p.item / device.bytes
        case Kind.FINISH_WEIGHT:
            return device.launch + _bytes(program, (*step.reads, *step.writes)) / device.bytes
    return device.launch


def _sums(program: Program, step: Step, device: Device, product: float) -> float:
    """Return the time in which sums are read and written, as far as products do not hide it."""
    if step.kind is Kind.PROJECT or not step.adds:
        return 0.0
    p = program.problem
    rows = step.rows if step.kind is Kind.GEMM_HIDDEN else step.columns
    item = sum(program.buffers[name].size for name in step.writes)
    held = max(program.buffers[step.writes[0]].rows, 1)
    moved = 2 * (rows[1] - rows[0]) * item / held / device.bytes
    return max(moved - device.hidden * product, 0.0) if p.item < p.sums else moved


def _bytes(program: Program, names: Iterable[str]) -> int:
    return sum(program.buffers[name].size for name in {*names})
