"""Instructions of both architectures: arithmetic, memory, barriers, TMA."""

import operator
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.emulation.core import LANES, Barrier, Code, Handler, Pause, Warp, same
from tests.emulation.memory import OFFSET, SHARED, UNSIGNED, TensorMap

WAIT = re.compile(r"mbarrier\.try_wait\S* P1, \[(%r\d+)\], (%r\d+)")


def as_float(bits: Any) -> Any:
    """Return the floats of 32-bit patterns."""
    return bits.view(np.float32)


def unsigned(bits: Any) -> Any:
    """Return the lowest 32 bits as unsigned numbers."""
    return bits.astype(np.int64) & 0xFFFFFFFF


def wide(bits: Any) -> Any:
    """Return signed numbers of 64 bits."""
    return bits.astype(np.int64)


def floats_of(bits: Any) -> Any:
    """Return the numbers of bfloat16 patterns."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def halves_of(bits: Any) -> Any:
    """Return the numbers of float16 patterns."""
    return bits.astype(np.uint16, copy=False).view(np.float16).astype(np.float32)


def bfloat16(x: Any) -> Any:
    """Return bfloat16 patterns of floats, rounded to nearest even."""
    bits = x.view(np.uint32)
    rounded = (bits + (0x7FFF + (bits >> 16 & 1))) >> 16
    return np.where(np.isnan(x), 0x7FFF, rounded).astype(np.int64)


def float16(x: Any) -> Any:
    """Return float16 patterns."""
    return x.astype(np.float16).view(np.uint16).astype(np.int64)


def towards_zero(a: Any, b: Any) -> Any:
    """Return the quotient rounded towards zero, as in C."""
    return np.where(b == 0, 0, np.trunc(a / np.where(b == 0, 1, b))).astype(np.int64)


FLOATS: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "fma": lambda a, b, c: (a.astype(np.float64) * b + c).astype(np.float32),
    "max": np.fmax,
    "min": np.fmin,
    "max.NaN": np.maximum,
    "min.NaN": np.minimum,
    "abs": np.abs,
    "neg": operator.neg,
    "ex2": np.exp2,
    "lg2": np.log2,
    "rcp": lambda a: 1 / a,
    "mov": lambda a: a,
}
INTEGERS: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "mul.hi": lambda a, b: a.astype(np.int64) * b >> 32,
    "mad": lambda a, b, c: a * b + c,
    "div": towards_zero,
    "rem": lambda a, b: a - b * towards_zero(a, b),
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "shl": operator.lshift,
    "shr": operator.rshift,
    "min": np.minimum,
    "max": np.maximum,
    "abs": np.abs,
    "neg": operator.neg,
    "not": operator.invert,
    "popc": lambda a: np.bitwise_count(unsigned(a)).astype(np.int32),
    "mov": lambda a: a,
    "cvt": lambda a: a,
    "cvta": lambda a: a,
    "mapa": lambda a, rank: a & OFFSET | rank << 24,
    "selp": lambda a, b, p: np.where(p, a, b),
    "setp.eq": operator.eq,
    "setp.ne": operator.ne,
    "setp.neu": operator.ne,
    "setp.lt": operator.lt,
    "setp.le": operator.le,
    "setp.gt": operator.gt,
    "setp.ge": operator.ge,
    "setp.leu": lambda a, b: ~(a > b),
    "setp.geu": lambda a, b: ~(a < b),
    "setp.gtu": lambda a, b: ~(a <= b),
    "setp.ltu": lambda a, b: ~(a >= b),
}

HANDLERS: dict[str, Handler] = {}


def handles(*names: str) -> Callable[[Handler], Handler]:
    """Register the handler of instructions by prefix; the first match counts."""

    def register(handler: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(names, handler))
        return handler

    return register


def compile_line(line: str) -> Code:
    """Return the function of an instruction."""
    wait = WAIT.search(line)
    if wait:
        return lambda warp, mask: await_phase(warp, mask, wait[1], wait[2])
    operation, _, rest = line.rstrip(";").partition(" ")
    operands = [o.strip(" {}[]") for o in rest.split(",")] if rest else []
    for name, handler in HANDLERS.items():
        if operation.startswith(name):
            return lambda warp, mask: handler(warp, mask, line, operands)
    return arithmetic(operation, operands)


def arithmetic(operation: str, operands: list[str]) -> Code:
    """Return the function of an arithmetic instruction."""
    name, *kinds = operation.split(".")
    if name not in {known.split(".")[0] for known in (*FLOATS, *INTEGERS)}:
        raise NotImplementedError(f"the instruction {operation} is not emulated")
    kind = kinds[-1] if kinds else ""
    target, *sources = operands
    if kind == "f32" and name not in ("setp", "selp"):
        function = FLOATS[f"{name}.NaN" if "NaN" in kinds else name]

        def run_floats(warp: Warp, mask: Any) -> None:
            result = function(*[each.view(np.float32) for each in warp.values(sources)])
            warp.put(target, result.view(np.int32), mask)

        return run_floats
    qualified = ".".join([name, *kinds[:1]])
    function = INTEGERS[qualified if qualified in INTEGERS else name]
    convert: Callable[[Any], Any] | None = None
    if kind == "f32" and name == "setp":
        convert = as_float
    elif kind == "u32" or (name == "cvt" and kinds[0] == "u64"):
        convert = unsigned
    elif "wide" in kinds:
        convert = wide

    def run(warp: Warp, mask: Any) -> None:
        values = warp.values(sources)
        if convert is not None:
            values = [convert(value) for value in values]
        warp.put(target, function(*values), mask)

    return run


def await_phase(warp: Warp, mask: Any, address: str, parity: str) -> Pause | None:
    """Wait until the phase of a barrier is complete."""
    place = int(warp.value(address)[mask][0])
    assert place >> 24 == warp.block.rank, "a block waits at its own barriers"
    wanted = int(warp.value(parity)[mask][0]) & 1
    return Pause.WAIT if warp.block.barrier(place).parity == wanted else None


@handles("fence", "prefetch", "cp.async.bulk.prefetch", "griddepcontrol")
def nothing(warp: Warp, mask: Any, line: str, operands: list[str]) -> None:
    """Do nothing: memory operations complete in order here, and kernels one after the other."""


# Lanes of a warp


@handles("elect.sync")
def elect(warp: Warp, mask: Any, line: str, operands: list[str]) -> None:
    assert mask.all(), "all lanes elect one"
    warp.put(operands[0].split("|")[1], np.arange(LANES) == 0, mask)


@handles("bar.warp.sync")
def meet_warp(warp: Warp, mask: Any, line: str, operands: list[str]) -> None:
    assert mask.all(), "lanes meet"


@handles("shfl.sync.idx", "shfl.sync.bfly", "shfl.sync.up")
def shuffle(warp: Warp, mask: Any, line: str, operands: list[str]) -> None:
    assert mask.all(), "a whole warp shuffles"
    upwards, here = "shfl.sync.up" in line, np.arange(LANES)
    assert operands[3] == ("0" if upwards else "31"), "all lanes exchange"
    values, lanes = (warp.value(o) for o in operands[1:3])
    if "bfly" in line:
        lanes = here ^ lanes
    elif upwards:  # lanes without a source keep their own
        lanes = np.where(here >= lanes, here - lanes, here)
    warp.put(operands[0], values[lanes & 31], mask)


@handles("vote.sync.any.pred")
def vote(warp: Warp, mask: Any, line: str, operands: list[str]) -> None:
    assert mask.all(), "a whole warp votes"
    warp.put(operands[0], np.full(LANES, warp.value(operands[1]).any()), mask)


@handles("vote.sync.ballot.b32")
def ballot(warp: Warp, mask: Any, line: str, operands: list[str]) -> None:
    assert mask.all(), "a whole warp votes"
    bits = (warp.value(operands[1]) != 0).astype(np.int64) << np.arange(LANES)
    warp.put(operands[0], np.full(LANES, bits.sum()), mask)


# Registers


@handles("mov.b64", "mov.b32")
def move(warp: Warp, mask: Any, line: str, operands: list[str]) -> None:
    bits = 32 if line.startswith("mov.b64") else 16
    if " {" in line and line.index("{") < line.index(","):
        whole = warp.value(operands[2])
        warp.put(operands[0], whole & (1 << bits) - 1, mask)
        warp.put(operands[1], whole >> bits & (1 << bits) - 1, mask)
    elif len(operands) == 3:
        low, high = (warp.value(o).astype(np.int64) for o in operands[1:])
        warp.put(operands[0], low & (1 << bits) - 1 | high << bits, mask)
    else:
        warp.put(operands[0], warp.value(operands[1]), mask)


@handles("mov.pred", "and.pred", "or.pred", "not.pred")
def predicate(warp: Warp, mask: Any, line: str, operands: list[str]) -> None:
    values = [warp.value(o).astype(bool) for o in operands[1:]]  # constants are numbers
    if line.startswith("and"):
        values = [values[0] & values[1]]
    elif line.startswith("or"):
        values = [values[0] | values[1]]
    elif line.startswith("not"):
        values = [~values[0]]
    warp.put(operands[0], values[0], mask)


@handles("prmt.b32")
def permute(warp: Warp, mask: Any, line: str, operands: list[str]) -> None:
    low, high, chosen = (unsigned(warp.value(o)) for o in operands[1:])
    both, result = high << 32 | low, np.zeros(LANES, np.int64)
    assert not (chosen & 0x8888).any(), "no sign is spread"
    for i in range(4):
        place = chosen >> 4 * i & 7
        result |= (both >> 8 * place & 0xFF) << 8 * i
    warp.put(operands[0], result, mask)


@handles("cvt.rn.bf16x2.f32", "cvt.rn.f16x2.f32")
def round_two(warp: Warp, mask: Any, line: str, operands: list[str]) -> None:
    rounded = bfloat16 if "bf16" in line else float16
    high, low = (rounded(as_float(warp.value(o))) for o in operands[1:])
    warp.put(operands[0], high << 16 | low, mask)


@handles("cvt.rn.bf16.f32", "cvt.rn.f16.f32")
def round_one(warp: Warp, mask: Any, line: str, operands: list[str]) -> None:
    rounded = bfloat16 if "bf16" in line else float16
    warp.put(operands[0], rounded(as_float(warp.value(operands[1]))), mask)


@handles("cvt.f32.bf16", "cvt.f32.f16")
def widen(warp: Warp, mask: Any, line: str, operands: list[str]) -> None:
    number = (floats_of if "bf16" in line else halves_of)(warp.value(operands[1]))
    warp.put(operands[0], number.view(np.int32), mask)


@handles("cvt.rn.f32.s32", "cvt.rn.f32.u32")
def convert_number(warp: Warp, mask: Any, line: str, operands: list[str]) -> None:
    number = warp.value(operands[1])
    number = (unsigned(number) if line.startswith("cvt.rn.f32.u32") else number).astype(np.float32)
    warp.put(operands[0], number.view(np.int32), mask)


# Memory


def width(line: str) -> int:
    """Return the bytes of each number that an instruction reads or writes."""
    return int(re.findall(r"\.[a-z](\d+)$", line.split(" ")[0])[0]) // 8


def to_register(words: Any) -> Any:
    """Return patterns as the numbers that registers hold."""
    return words.view(f"i{words.itemsize}") if words.itemsize > 2 else words.astype(np.int32)


def own_offsets(warp: Warp, addresses: Any) -> Any:
    """Return the offsets of addresses in the shared memory of a warp's block."""
    assert (addresses >> 24 == warp.block.rank).all(), "a block touches its own shared memory"
    return (addresses & OFFSET) - SHARED


@handles("ld.param")
def load_parameter(warp: Warp, mask: Any, line: str, operands: list[str]) -> None:
    *targets, place = operands
    found = warp.grid.parameters.get(line)
    if found is None:
        name, _, offset = place.partition("+")
        data = warp.grid.launch.parameters[int(name.rsplit("_", 1)[1])]
        words = np.frombuffer(data, UNSIGNED[width(line)], len(targets), int(offset or 0))
        found = warp.grid.parameters[line] = [same(word) for word in to_register(words)]
    for target, value in zip(targets, found, strict=True):
        warp.put(target, value, mask)


@handles("ld.global", "ld.relaxed.gpu.global", "ld.acquire.gpu.global")
def load_global(warp: Warp, mask: Any, line: str, operands: list[str]) -> Pause | None:
    *targets, place = operands
    size = width(line)
    words, at = warp.grid.memory.at(warp.value(place)[mask], size, len(targets))
    for i, target in enumerate(targets):
        values = np.zeros(LANES, UNSIGNED[size])
        values[mask] = words[at + i]
        warp.put(target, to_register(values), mask)
    return None if line.startswith("ld.global") else Pause.POLL


@handles("st.global")
def store_global(warp: Warp, mask: Any, line: str, operands: list[str]) -> None:
    place, *sources = operands
    size = width(line)
    words, at = warp.grid.memory.at(warp.value(place)[mask], size, len(sources))
    for i, source in enumerate(sources):
        words[at + i] = warp.value(source)[mask].astype(UNSIGNED[size])


@handles(
    "red.relaxed.gpu.global.add",
    "red.release.gpu.global.add",
    "atom.global.acq_rel.add",
    "atom.global.add.u32",
    "atom.shared.cta.add.u32",
    "red.shared.cta.add.u32",
)
def add_atomically(warp: Warp, mask: Any, line: str, operands: list[str]) -> None:
    place, addend = operands[-2:]
    addresses, before = warp.value(place)[mask], np.zeros(LANES, np.uint32)
    if ".shared" in line:
        at = own_offsets(warp, addresses) // 4
        words = warp.block.words(4, at)
    else:
        words, at = warp.grid.memory.at(addresses, 4)
    for lane, word in zip(np.flatnonzero(mask), at, strict=True):
        before[lane] = words[word]
        words[word] += np.uint32(int(warp.value(addend)[lane]) & 0xFFFFFFFF)
    if line.startswith("atom"):
        warp.put(operands[0], to_register(before), mask)


@handles("ld.shared", "st.shared")
def touch_shared(warp: Warp, mask: Any, line: str, operands: list[str]) -> None:
    is_store = line.startswith("st")
    place, *registers = operands if is_store else (operands[-1], *operands[:-1])
    size, offsets = width(line), own_offsets(warp, warp.value(place)[mask])
    at = offsets // size + np.arange(len(registers))[:, None]
    words = warp.block.words(size, at)
    assert not (offsets & size * len(registers) - 1).any(), "addresses are aligned"
    for i, register in enumerate(registers):
        if is_store:
            words[at[i]] = warp.value(register)[mask].astype(UNSIGNED[size])
            continue
        values = np.zeros(LANES, UNSIGNED[size])
        values[mask] = words[at[i]]
        warp.put(register, to_register(values), mask)


# Barriers


@handles("mbarrier.init")
def set_up(warp: Warp, mask: Any, line: str, operands: list[str]) -> None:
    place = warp.one(operands[0], mask) & OFFSET
    warp.block.barriers[place] = Barrier(warp.one(operands[1], mask))


@handles("mbarrier.arrive")
def arrive(warp: Warp, mask: Any, line: str, operands: list[str]) -> None:
    places = warp.value(operands[1])[mask]
    amount = warp.one(operands[2], mask) if len(operands) > 2 else 1
    for place in places.tolist():
        if "expect_tx" in line:
            warp.block.barrier(place).signal(1, amount)
        else:
            warp.block.barrier(place).signal(amount)


@handles("barrier.cluster.arrive", "bar.arrive")
def announce(warp: Warp, mask: Any, line: str, operands: list[str]) -> None:
    assert mask.all(), "whole warps meet"
    if line.startswith("bar."):
        number, threads = (warp.one(o, mask) for o in operands)
        warp.block.meetings[number].arrive(threads // LANES)
    else:
        cluster = warp.block.cluster
        everyone = warp.grid.launch.warps * len(cluster.blocks)
        warp.cluster_ticket = cluster.meeting.arrive(everyone)


@handles("barrier.cluster.wait")
def await_cluster(warp: Warp, mask: Any, line: str, operands: list[str]) -> Pause | None:
    assert mask.all(), "whole warps meet"
    rounds = warp.block.cluster.meeting.rounds
    return Pause.WAIT if rounds <= warp.cluster_ticket else None


@handles("bar.sync", "barrier.sync")
def meet(warp: Warp, mask: Any, line: str, operands: list[str]) -> Pause | None:
    assert mask.all(), "whole warps meet"
    number, *threads = (warp.one(o, mask) for o in operands)
    meeting = warp.block.meetings[number]
    if warp.ticket is None:
        expected = threads[0] // LANES if threads else warp.grid.launch.warps
        warp.ticket = meeting.arrive(expected)
    if meeting.rounds <= warp.ticket:
        return Pause.WAIT
    warp.ticket = None
    return None


# Copies to shared memory


@handles("cp.async.cg.shared.global")
def copy_later(warp: Warp, mask: Any, line: str, operands: list[str]) -> None:
    target, place = (warp.value(operand)[mask] for operand in operands[:2])
    assert operands[2:] == ["16", "16"], "16 bytes are copied"
    words, source = warp.grid.memory.at(place, 4, 4)
    at = own_offsets(warp, target) // 4
    assert not (target & 15).any(), "addresses are aligned"

    def happen() -> None:
        for i in range(4):
            warp.block.words(4, at + i)[at + i] = words[source + i]

    warp.copies.append(happen)


@handles("cp.async.commit_group")
def close_copies(warp: Warp, mask: Any, line: str, operands: list[str]) -> None:
    warp.copy_groups.append(warp.copies)
    warp.copies = []


@handles("cp.async.wait_group")
def wait_for_copies(warp: Warp, mask: Any, line: str, operands: list[str]) -> None:
    """Let copies happen as late as possible."""
    count = max(len(warp.copy_groups) - int(operands[0]), 0)
    for group in warp.copy_groups[:count]:
        for happen in group:
            happen()
    del warp.copy_groups[:count]


# TMA


@handles("cp.async.bulk.tensor.2d.shared")
def load(warp: Warp, mask: Any, line: str, operands: list[str]) -> None:
    assert mask.sum() == 1, "one lane loads"
    destination, map_, x, y, barrier = (warp.one(operand, mask) for operand in operands[:5])
    tensor_map, blocks = warp.grid.maps[map_], warp.block.cluster.blocks
    targets = {destination >> 24: barrier}
    if "multicast::cluster" in line:
        bits = warp.one(operands[5], mask)
        ranks = (rank for rank in range(len(blocks)) if bits >> rank & 1)
        targets = {rank: barrier & OFFSET | rank << 24 for rank in ranks}
    source, size = warp.grid.memory.matrix(tensor_map), tensor_map.item_size
    rows, columns = tensor_map.box
    box = np.zeros(tensor_map.box, UNSIGNED[size])
    part = source[y : y + rows, x : x + columns]
    box[: part.shape[0], : part.shape[1]] = part
    at = tensor_map.places(destination & OFFSET)

    def happen() -> None:
        for rank, where in targets.items():
            blocks[rank].words(size, at)[at] = box
            warp.block.barrier(where).signal(missing=-box.nbytes)

    warp.grid.flights.append(happen)


@handles("cp.async.bulk.tensor.2d.global", "cp.reduce.async.bulk.tensor.2d.global")
def store(warp: Warp, mask: Any, line: str, operands: list[str]) -> None:
    # the machine's instruction is executed once a warp, however many lanes are active
    map_, x, y, source = (warp.one(each, mask) for each in operands[:4])
    tensor_map, adds = warp.grid.maps[map_], line.startswith("cp.reduce")
    assert not adds or tensor_map.item_size == 4, "float32 is added"
    warp.group.append(Store(warp, tensor_map, (x, y), source & OFFSET, adds))


class Store:
    """A TMA store, or an addition; it reads shared memory before it writes global memory."""

    def __init__(
        self, warp: Warp, tensor_map: TensorMap, corner: tuple[int, int], source: int, adds: bool
    ) -> None:
        self.at = tensor_map.places(source)
        self.words = warp.block.words(tensor_map.item_size, self.at)
        rows, columns = tensor_map.box
        x, y = corner
        self.target = warp.grid.memory.matrix(tensor_map)[y : y + rows, x : x + columns]
        self.adds, self.is_written = adds, False

    def read(self) -> None:
        rows, columns = self.target.shape
        self.box = self.words[self.at][:rows, :columns]

    def write(self) -> None:
        if self.is_written:
            return
        self.is_written = True
        if self.adds:
            self.target.view(np.float32)[:] += self.box.view(np.float32)
        else:
            self.target[:] = self.box


@handles("cp.async.bulk.commit_group")
def close(warp: Warp, mask: Any, line: str, operands: list[str]) -> None:
    warp.groups.append(warp.group)
    warp.group = []


@handles("cp.async.bulk.wait_group")
def wait_for_stores(warp: Warp, mask: Any, line: str, operands: list[str]) -> None:
    """Let stores read as late as possible, and write now or, if that is not waited for, later."""
    count = max(len(warp.groups) - int(operands[0]), 0)
    for group in warp.groups[:count]:
        for each in group:
            each.read()
        warp.grid.flights += [each.write for each in group]
        warp.unwritten += group
    del warp.groups[:count]
    if ".read" not in line:
        assert int(operands[0]) == 0, "all stores are waited for"
        for each in warp.unwritten:
            each.write()
    warp.unwritten = [each for each in warp.unwritten if not each.is_written]
