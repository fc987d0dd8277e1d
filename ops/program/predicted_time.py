"""The predicted time of a program: a sum over its steps, with a few numbers of a device.

It serves to choose among the programs of one call, so what these have in common may be left out.
"""

from collections.abc import Callable, Iterable

from cutefce.ops.costs.device import Device
from cutefce.ops.program.problem import LossProblem
from cutefce.ops.program.steps import Kind, Program, Step


def seconds(
    program: Program, device: Device, is_fused: Callable[[Step], bool] = lambda step: True
) -> float:
    """Return the predicted time of forward and backward.

    Products that are not `is_fused` are written as sums before they are rounded or kept.
    """
    return sum(s.times * _seconds(program, s, device, is_fused(s)) for s in program.steps())


def _seconds(program: Program, step: Step, device: Device, is_fused: bool) -> float:
    p: LossProblem = program.problem
    rows, columns = step.rows[1] - step.rows[0], step.columns[1] - step.columns[0]
    if step.repairs:  # no row is far, but for rare ones
        return device.launch
    match step.kind:
        case Kind.PROJECT | Kind.GEMM_HIDDEN | Kind.GEMM_WEIGHT:
            is_kept = step.kind is Kind.GEMM_HIDDEN and len(step.writes) > 1
            longer = device.kept_sums * (is_kept and is_fused)
            moved = _sums(program, step) + (0 if is_fused else _product_bytes(p, step))
            product = product_seconds(device, rows, columns, p.hidden, p.item, 1 + longer)
            return product + moved / device.bytes
        case Kind.GATHER | Kind.RESCALE | Kind.KEEP_HIDDEN | Kind.FINISH_HIDDEN:
            return device.launch + 2 * rows * p.hidden * p.item / device.bytes
        case Kind.FINISH_WEIGHT:
            return device.launch + _bytes(program, (*step.reads, *step.writes)) / device.bytes
    return device.launch


def _product_bytes(p: LossProblem, step: Step) -> int:
    """Return the bytes of a product's sums that are written, and read again to be rounded."""
    is_hidden = step.kind is Kind.GEMM_HIDDEN
    if step.kind is Kind.PROJECT or p.item == p.sums or (is_hidden and len(step.writes) == 1):
        return 0
    first, last = step.rows if is_hidden else step.columns
    return 2 * (last - first) * p.hidden * p.sums


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


def _bytes(program: Program, names: Iterable[str]) -> int:
    return sum(program.buffers[name].size for name in {*names})
