"""The predicted time of a program: a sum over its steps, with a few numbers of a device.

It serves to choose among the programs of one call, so what these have in common may be left out.
"""

from dataclasses import dataclass

from cutefce.cute_kernels.integers import ceil_div
from cutefce.ops.primitives.block_sizes import finished_rows
from cutefce.ops.program.problem import LossProblem
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


CPU = Device(flops=1e11, bytes=2e10, edge=2e-5, launch=5e-6)
GPU = Device(flops=7e14, bytes=4e12, edge=4e-5, launch=3e-6)
"""An H200's: at its power limit, where 8192x4096x131072 keeps the tensor cores at 7e14 FLOP/s.
Chunks of 1024 to 8192 tokens of this head take 0.6 to 0.8 ms each beside their products, which is
the time of dW's sums, read and written once."""
PACKED_SUMS = 0.09
"""Part by which a product takes longer that rounds sums of dX to fewer bits: its tiles are
smaller."""
ADDED_BLOCK = 4
"""Launches that a block of rows of dX's product takes, where another step adds it to such sums: its
own, that of the step, and as long until each begins."""


def device_of(device_type: str) -> Device:
    """Return the numbers of a device by its type, as torch names it."""
    return CPU if device_type == "cpu" else GPU


def seconds(program: Program) -> float:
    """Return the predicted time of forward and backward."""
    device = device_of(program.problem.device)
    return sum(s.times * _seconds(program, s, device) for s in program.steps())


def _seconds(program: Program, step: Step, device: Device) -> float:
    p: LossProblem = program.problem
    rows, columns = step.rows[1] - step.rows[0], step.columns[1] - step.columns[0]
    if step.repairs:  # no row is far, but for rare ones
        return device.launch
    match step.kind:
        case Kind.PROJECT | Kind.GEMM_HIDDEN | Kind.GEMM_WEIGHT:
            is_packed = step.kind is Kind.GEMM_HIDDEN and len(step.writes) > 1
            longer = PACKED_SUMS * (is_packed and p.is_fused)
            moved = _sums(program, step) + _product_bytes(p, step)
            product = product_seconds(device, rows, columns, p.hidden, p.item_bytes, 1 + longer)
            return product + moved / device.bytes + _blocks(p, step) * device.launch
        case Kind.GATHER | Kind.RESCALE | Kind.KEEP_HIDDEN | Kind.FINISH_HIDDEN:
            return device.launch + 2 * rows * p.hidden * p.item_bytes / device.bytes
        case Kind.FINISH_WEIGHT:
            size = sum(program.buffers[name].size for name in {*step.reads, *step.writes})
            return device.launch + size / device.bytes
    return device.launch


def _product_bytes(p: LossProblem, step: Step) -> int:
    """Return the bytes of a product's sums that are written, and read again to be rounded.

    Kernels have none.  Triton's rows of dW are rounded at once, and take as long as the others if
    they are packed.
    """
    is_hidden, is_one = step.kind is Kind.GEMM_HIDDEN, len(step.writes) == 1
    is_fused = p.is_fused or (p.triton and step.kind is Kind.GEMM_WEIGHT and is_one)
    is_plain = step.kind is Kind.PROJECT or not p.accumulates_wider or (is_hidden and is_one)
    if is_fused or is_plain:
        return 0
    first, last = step.rows if is_hidden else step.columns
    return 2 * (last - first) * p.hidden * p.accumulator_bytes


def _blocks(p: LossProblem, step: Step) -> int:
    """Return the launches of a product that is computed a block of rows after the other."""
    if p.is_fused or step.kind is not Kind.GEMM_HIDDEN or len(step.writes) == 1:
        return 0
    block = finished_rows(p.hidden, p.accumulator_bytes, p.device)
    return ADDED_BLOCK * ceil_div(step.rows[1] - step.rows[0], block)


def product_seconds(
    device: Device, rows: int, columns: int, hidden: int, item: int, times: float = 1.0
) -> float:
    """Return the time of a product of so many tokens, classes and features of `item` bytes.

    Its multiplications take some `times` what they take at best.  Reading the weight may take
    longer than few rows' products.
    """
    product = times * 2 * rows * columns * hidden / device.flops
    return max(product, columns * hidden * item / device.bytes) + device.edge


def _sums(program: Program, step: Step) -> float:
    """Return the bytes of sums that are read and written."""
    if step.kind is Kind.PROJECT or not step.adds:
        return 0.0
    rows = step.rows if step.kind is Kind.GEMM_HIDDEN else step.columns
    item = sum(program.buffers[name].size for name in step.writes)
    held = max(program.buffers[step.writes[0]].rows, 1)
    return 2 * (rows[1] - rows[0]) * item / held
