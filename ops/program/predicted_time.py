"""The predicted time of a program: a sum over its steps, with a few numbers of a device.

It serves to choose among the programs of one call, so what these have in common may be left out.
"""

from collections.abc import Iterable, Sequence

from cutefce.ops.costs.device import Device
from cutefce.ops.program.problem import LossProblem
from cutefce.ops.program.steps import Kind, Program, Step


def seconds(program: Program, device: Device, unfused: Sequence[Kind] = ()) -> float:
    """Return the predicted time of forward and backward.

    Products of `unfused` kinds that are rounded or kept are written as sums before.
    """
    p, total = program.problem, 0.0
    for step in program.steps():
        written = _product_bytes(p, step) if step.kind in unfused else 0
        total += step.times * (written / device.bytes + _seconds(p, step, device, program))
    return total


def _product_bytes(p: LossProblem, step: Step) -> int:
    """Return the bytes of a product's sums that are written, and read again to be rounded."""
    if p.item == p.sums or step.repairs:
        return 0
    is_hidden = step.kind is Kind.GEMM_HIDDEN
    if is_hidden and len(step.writes) == 1:
        return 0
    first, last = step.rows if is_hidden else step.columns
    return 2 * (last - first) * p.hidden * p.sums


def _seconds(p: LossProblem, step: Step, device: Device, program: Program) -> float:
    rows, columns = step.rows[1] - step.rows[0], step.columns[1] - step.columns[0]
    if step.repairs:  # no row is far, but for rare ones
        return device.launch
    match step.kind:
        case Kind.PROJECT | Kind.GEMM_HIDDEN | Kind.GEMM_WEIGHT:
            longer = device.kept_sums * (step.kind is Kind.GEMM_HIDDEN and len(step.writes) > 1)
            product = product_seconds(device, rows, columns, p.hidden, p.item, 1 + longer)
            return product + _sums(program, step, device)
        case Kind.GATHER | Kind.RESCALE | Kind.KEEP_HIDDEN | Kind.FINISH_HIDDEN:
            return device.launch + 2 * rows * p.hidden * p.item / device.bytes
        case Kind.FINISH_WEIGHT:
            return device.launch + _bytes(program, (*step.reads, *step.writes)) / device.bytes
    return device.launch


def product_seconds(
    device: Device, rows: int, columns: int, hidden: int, item: int, times: float = 1.0
) -> float:
    """Return the time of a product of so many tokens, classes and features of `item` bytes.

    Its multiplications take some `times` what they take at best.  Reading the weight may take
    longer than few rows' products.
    """
    product = times * 2 * rows * columns * hidden / device.flops
    return max(product, columns * hidden * item / device.bytes) + device.edge


def _sums(program: Program, step: Step, device: Device) -> float:
    """Return the time in which sums are read and written."""
    if step.kind is Kind.PROJECT or not step.adds:
        return 0.0
    rows = step.rows if step.kind is Kind.GEMM_HIDDEN else step.columns
    item = sum(program.buffers[name].size for name in step.writes)
    held = max(program.buffers[step.writes[0]].rows, 1)
    return 2 * (rows[1] - rows[0]) * item / held / device.bytes


def _bytes(program: Program, names: Iterable[str]) -> int:
    return sum(program.buffers[name].size for name in {*names})
