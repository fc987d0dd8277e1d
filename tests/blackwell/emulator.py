"""Runs the PTX of a Blackwell kernel on numpy, slowly: one cluster at a time, all its warps.

Asynchronous operations (loads, MMAs, commits and stores) complete later, in an order that a seed
chooses, as it chooses the next warp to run.  Raises `Stuck` on a deadlock, and AssertionError where
lanes diverge at a warp-wide instruction or memory is misused.

Only the instructions that the kernels use are emulated, as the PTX manual describes them.  This
does not prove that the hardware agrees: boxes of tensor maps, for one, come from the configuration.
"""

import functools
import operator
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cutefce.cute_kernels.arch.base import TILE_K
from cutefce.cute_kernels.config import GemmConfig
from cutefce.cute_kernels.integers import round_up

LANES = 32
ALL = np.ones(LANES, bool)
SHARED = 1024
"""Start of shared memory; that of block i of a cluster is offset by i << 24."""
PARAMETERS, GLOBAL = 1 << 40, 1 << 41
WAIT = re.compile(r"mbarrier\.try_wait\S* P1, \[(%r\d+)\], (%r\d+)")


class Stuck(Exception):
    """All warps wait for each other."""


@dataclass
class Barrier:
    """One mbarrier."""

    count: int
    parity: int = 0
    arrived: int = 0
    missing: int = 0

    def signal(self, arrivals: int = 0, missing: int = 0) -> None:
        """Arrive, or change the number of missing bytes."""
        self.arrived += arrivals
        self.missing += missing
        assert self.arrived <= self.count, "more arrivals than expected"
        if self.arrived == self.count and self.missing == 0:
            self.parity, self.arrived = 1 - self.parity, 0


@dataclass
class Block:
    """A thread block: its memories and its pending operations."""

    rank: int
    shared: Any = field(default_factory=lambda: np.zeros(228 << 10, np.uint8))
    tensor: Any = field(default_factory=lambda: np.full((128, 512), np.nan, np.float32))
    barriers: dict[int, Barrier] = field(default_factory=dict)
    queue: list[Any] = field(default_factory=list)
    """Pending MMAs and commits."""
    columns: int = 0
    """Allocated columns of tensor memory."""
    met: int = 0
    """Arrivals of warps at the block's barrier."""


@dataclass
class Warp:
    """A warp: its registers and pending stores."""

    block: Block
    number: int
    registers: dict[str, Any] = field(default_factory=dict)
    stores: list[Any] = field(default_factory=list)
    waits: int = 0
    """Arrivals at a barrier of the block or cluster that the warp waits for."""
    steps: int = 0


@functools.cache
def places(begin: int, rows: int, columns: int) -> Any:
    """Return the indices of 16-bit numbers in swizzled rows of 128 bytes, as TMA writes them."""
    row, column = np.arange(rows)[:, None], np.arange(columns)
    address = begin + 128 * row + 2 * column
    return (address ^ (address >> 3 & 0x70)) // 2 - SHARED // 2


class Cluster:
    """The blocks of one cluster, and the program they run."""

    def __init__(self, ptx: str, config: GemmConfig, number: int, clusters: int, seed: int) -> None:
        self.config, self.number, self.clusters = config, number, clusters
        self.random = random.Random(seed)
        self.parameters: dict[tuple[int, int], int] = {}
        self.maps: dict[int, tuple[Any, int]] = {}
        self.arrays: dict[int, Any] = {}
        self.flights: list[Callable[[], None]] = []
        self.blocks = [Block(rank) for rank in range(config.cluster)]
        self.met = 0
        self.program, self.labels = parse(ptx)
        self.branches = [self.branch(line) for line in self.program]
        self.code = [self.compile(line) for line in self.program]

    # Pending operations

    def land(self, warp: Warp, line: str, operands: list[str], mask: Any) -> Callable[[], None]:
        """Return the completion of a TMA load."""
        destination, map_, x, y, barrier = (
            int(self.value(warp, operand)[mask][0]) for operand in operands[:5]
        )
        source, rows = self.maps[map_]
        members = [warp.block.rank]
        if "multicast::cluster" in line:
            bits = int(self.value(warp, operands[5])[mask][0])
            members = [rank for rank in range(len(self.blocks)) if bits >> rank & 1]
        box = np.zeros((rows, TILE_K), np.uint16)
        part = source[y : y + rows, x : x + TILE_K]
        box[: part.shape[0], : part.shape[1]] = part
        at = places(destination & 0xFFFFFF, rows, TILE_K)

        def happen() -> None:
            for rank in members:
                self.blocks[rank].shared.view(np.uint16)[at] = box
                of = rank if "multicast::cluster" in line else barrier >> 24
                self.blocks[of].barriers[barrier & 0xFFFFFF].signal(missing=-box.nbytes)

        return happen

    def matrix(self, block: Block, descriptor: int, rows: int) -> Any:
        """Return the (rows, 16) matrix of a descriptor, as 16-bit patterns."""
        assert descriptor >> 61 == 2, "rows are swizzled over 128 bytes"
        assert descriptor >> 32 & 0x3FFF == 1024 >> 4, "8 rows lie together"
        return block.shared.view(np.uint16)[places((descriptor & 0x3FFF) << 4, rows, 16)]

    def multiply(self, block: Block, pair: int, operands: tuple[int, ...]) -> None:
        """Execute one MMA."""
        target, a, b, kind, adds = operands
        rows, columns = (kind >> 24 & 0x1F) << 4, (kind >> 17 & 0x3F) << 3
        number = floats_of if kind >> 7 & 7 == 1 else halves_of
        members = self.blocks[block.rank : block.rank + pair]
        w = np.concatenate([number(self.matrix(m, b, columns // pair)) for m in members])
        column = target & 0xFFFF
        assert column + columns <= block.columns, "tensor memory is allocated"
        for member in members:
            product = number(self.matrix(member, a, rows // pair)) @ w.T
            place = member.tensor[:, column : column + columns]
            place[:] = product + (place if adds else 0)

    def store(self, warp: Warp, operands: list[str], mask: Any) -> Callable[[], None]:
        """Return the completion of a TMA store."""
        map_, x, y, source = (int(self.value(warp, each)[mask][0]) for each in operands[:4])
        target, rows = self.maps[map_]
        at = places(source & 0xFFFFFF, rows, TILE_K)

        def happen() -> None:
            place = target[y : y + rows, x : x + TILE_K]
            box = warp.block.shared.view(np.uint16)[at]
            place[:] = box[: place.shape[0], : place.shape[1]]

        return happen

    # Values

    def value(self, warp: Warp, operand: str) -> Any:
        """Return an operand of every lane."""
        found = warp.registers.get(operand)
        if found is not None:
            return found
        base, _, offset = operand.partition("+")
        if offset:
            return self.value(warp, base) + int(offset)
        rank, first = warp.block.rank, self.number * self.config.cluster
        special = {
            "%tid.x": 32 * warp.number + np.arange(LANES),
            "%laneid": np.arange(LANES),
            "%ctaid.x": first + rank,
            "%nctaid.x": self.clusters * self.config.cluster,
            "%cluster_ctarank": rank,
            "__dynamic_shmem__0": (rank << 24) + SHARED,
        }
        if operand in special:
            number = special[operand]
        elif operand.startswith("0f"):
            number = int(operand[2:], 16)
        elif "_param_" in operand:
            number = PARAMETERS + int(operand.rsplit("_", 1)[1])
        else:
            number = int(operand)
        narrow = operand[0] != "%" and -(1 << 31) <= number < 1 << 31  # type: ignore[operator]
        constant = np.broadcast_to(np.asarray(number, np.int32 if narrow else np.int64), LANES)
        warp.registers[operand] = constant
        return constant

    def put(self, warp: Warp, register: str, value: Any, mask: Any) -> None:
        """Write a register of the active lanes."""
        if value.shape != (LANES,):
            value = np.broadcast_to(value, LANES)
        if register.startswith("%r"):
            value = value.astype(np.int64 if register[2] == "d" else np.int32, copy=False)
        if mask is not ALL and not mask.all():
            value = np.where(mask, value, warp.registers.get(register, 0))
        warp.registers[register] = value

    # Instructions

    def compile(self, line: str) -> Callable[[Warp, Any], Any]:
        """Return the function of an instruction, which returns True while it must wait."""
        if self.branch(line):
            return lambda warp, mask: None
        wait = WAIT.search(line)
        if wait:
            return lambda warp, mask: self.must_wait(warp, mask, wait[1], wait[2])
        operation, _, rest = line.rstrip(";").partition(" ")
        operands = [o.strip(" {}[]") for o in rest.split(",")] if rest else []
        for name, handler in HANDLERS.items():
            if operation.startswith(name):
                return lambda warp, mask: handler(self, warp, mask, line, operands)
        return self.arithmetic(operation, operands)

    def must_wait(self, warp: Warp, mask: Any, address: str, parity: str) -> bool:
        """Return whether the phase of a barrier is incomplete."""
        place = int(self.value(warp, address)[mask][0])
        assert place >> 24 == warp.block.rank, "a block waits at its own barriers"
        wanted = int(self.value(warp, parity)[mask][0]) & 1
        return warp.block.barriers[place & 0xFFFFFF].parity == wanted

    def arithmetic(self, operation: str, operands: list[str]) -> Callable[[Warp, Any], Any]:
        """Return the function of an arithmetic instruction."""
        name, *kinds = operation.split(".")
        kind = kinds[-1] if kinds else ""
        if kind == "f32" and name != "setp":
            function = FLOATS[f"{name}.NaN" if "NaN" in kinds else name]

            def run_floats(warp: Warp, mask: Any) -> None:
                bits = [self.value(warp, o) for o in operands[1:]]
                if name == "selp":
                    self.put(warp, operands[0], np.where(bits[2], bits[0], bits[1]), mask)
                    return
                result = np.float32(function(*map(as_float, bits)))
                self.put(warp, operands[0], result.view(np.int32), mask)

            return run_floats
        function = INTEGERS[".".join([name, *kinds[:1]])] if name == "setp" else INTEGERS[name]

        is_unsigned = kinds[-1:] == ["u32"] or (name == "cvt" and kinds[0] == "u64")

        def run(warp: Warp, mask: Any) -> None:
            values = [self.value(warp, o) for o in operands[1:]]
            if kind == "f32":
                values = [as_float(v) for v in values]
            elif is_unsigned:
                values = [unsigned(v) for v in values]
            elif "wide" in kinds:
                values = [v.astype(np.int64) for v in values]
            self.put(warp, operands[0], np.asarray(function(*values)), mask)

        return run

    # Warps

    def run(self, warp: Warp) -> Iterator[None]:
        """Run a warp; of diverged lanes the least advanced run first, until all reconverge."""
        groups: dict[int, Any] = {0: ALL}
        while groups:
            at = min(groups)
            mask = groups.pop(at)
            mask = ALL if mask.all() else mask
            while at not in groups and self.branches[at] is None:
                while self.code[at](warp, mask):
                    yield
                warp.steps += 1
                at += 1
            after = [(at, mask)]
            if at not in groups and self.branches[at] is not None:
                target, condition = self.branches[at]
                taken = mask & condition(warp)
                after = [(at + 1, mask & ~taken), (target, taken)]
            for where, lanes in after:
                if lanes.any() and where < len(self.program):
                    groups[where] = groups.get(where, False) | lanes

    def branch(self, line: str) -> Any:
        """Return (target, mask function) of a branch; None for other instructions.

        A return branches to the end of the program.
        """
        if line.startswith("ret"):
            return len(self.program), lambda warp: ALL
        found = re.match(r"(?:@(!?)(%p\d+) )?bra\S* (\S+);", line)
        if not found:
            return None
        negated, register, label = found.groups()
        if register is None:
            return self.labels[label], lambda warp: ALL
        flip = bool(negated)
        return self.labels[label], lambda warp: warp.registers[register].astype(bool) ^ flip

    def launch(self) -> None:
        """Run all warps to their end."""
        with np.errstate(all="ignore"):
            self._launch()

    def _launch(self) -> None:
        warps = [Warp(block, number) for block in self.blocks for number in range(6)]
        running = [(warp, self.run(warp)) for warp in warps]
        while running or self.flights or any(block.queue for block in self.blocks):
            before = sum(warp.steps for warp in warps)
            happened = self.deliver()
            self.random.shuffle(running)
            running = [(warp, code) for warp, code in running if next(code, self) is None]
            if not happened and before == sum(warp.steps for warp in warps):
                raise Stuck(f"{len(running)} warps wait")
        assert not any(block.columns for block in self.blocks), "tensor memory is given back"

    def deliver(self) -> bool:
        """Complete some pending operations; return whether any were pending."""
        busy = [block for block in self.blocks if block.queue]
        landing = [flight for flight in self.flights if self.random.random() < 0.5]
        under_way = bool(busy or self.flights)
        for flight in landing:
            self.flights.remove(flight)
            flight()
        for block in busy:
            if self.random.random() < 0.5:
                block.queue.pop(0)()
        return under_way


@dataclass
class Launch:
    """The arguments of a launch, as numpy arrays; 16-bit numbers are patterns."""

    h: Any
    w: Any
    reference: Any
    target: Any
    sums: Any
    exps: Any
    semaphores: Any
    first: int
    vocab_splits: int
    transform: tuple[Any, Any, float | None] = (None, None, None)
    """Row scales, biases and slope of the logit transform; None for what the kernel lacks."""
    reductions: Any = None

    def run(self, ptx: str, config: GemmConfig, clusters: int, seed: int) -> None:
        """Run the kernel, one cluster after the other."""
        maps = [(self.h, config.tile_m), (self.w, config.tile_n // config.cluster)]
        maps += [] if self.exps is None else [(self.exps, 32)]
        row_scale, bias, slope = self.transform
        bits = None if slope is None else int(np.float32(slope).view(np.int32))
        vectors = self.reference, self.target, self.sums, self.semaphores
        transform = row_scale, bias, bits
        rest = *vectors, *transform, self.reductions, self.first, self.vocab_splits
        given = [operand for operand in rest if operand is not None]
        for number in range(clusters):
            cluster = Cluster(ptx, config, number, clusters, seed + number)
            for i, (array, rows) in enumerate(maps):
                cluster.maps[PARAMETERS + 2 * i] = array, rows
                sizes = {(2 * i + 1, 0): array.shape[0], (2 * i + 1, 4): array.shape[1]}
                cluster.parameters.update(sizes)
            for place, operand in enumerate(given, 2 * len(maps)):
                if isinstance(operand, int):
                    cluster.parameters[place, 0] = operand
                    continue
                cluster.arrays[place] = operand.reshape(-1).view(np.uint32)
                cluster.parameters[place, 0] = GLOBAL + (place << 32)
                cluster.parameters[place, 8] = len(operand)
                for mode, stride in enumerate(operand.strides):
                    cluster.parameters[place, 16 + 8 * mode] = stride // operand.itemsize
            cluster.launch()


def as_float(bits: Any) -> Any:
    """Return the lowest 32 bits as floats."""
    return bits.astype(np.int32, copy=False).view(np.float32)


def unsigned(bits: Any) -> Any:
    """Return the lowest 32 bits as unsigned numbers."""
    return bits.astype(np.int64) & 0xFFFFFFFF


def floats_of(bits: Any) -> Any:
    """Return the numbers of bfloat16 patterns."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def halves_of(bits: Any) -> Any:
    """Return the numbers of float16 patterns."""
    return bits.view(np.float16).astype(np.float32)


def bfloat16(x: Any) -> Any:
    """Return bfloat16 patterns, rounded to nearest even."""
    bits = np.asarray(x, np.float32).view(np.uint32).astype(np.uint64)
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 & 0xFFFF


def parse(ptx: str) -> tuple[list[str], dict[str, int]]:
    """Return instructions and the positions of labels; a wait loop is one instruction."""
    body = ptx[ptx.index(".reqntid") :]
    body = body[body.index("{") + 1 : body.rindex("}")]
    body = re.sub(
        r"\{\s*\.reg \.pred\s+P1;[\s\S]*?(mbarrier\.try_wait[^;]*;)[\s\S]*?\n\s*\}", r"\1", body
    )
    program: list[str] = []
    labels: dict[str, int] = {}
    for line in body.splitlines():
        line = re.sub(r"\s+", " ", line.strip())
        if line.startswith("$"):
            labels[line.rstrip(":")] = len(program)
        elif line and not line.startswith(("//", ".")):
            program.append(line)
    return program, labels


def towards_zero(a: Any, b: Any) -> Any:
    """Return the quotient rounded towards zero, as in C."""
    return np.where(b == 0, 0, np.trunc(a / np.where(b == 0, 1, b))).astype(np.int64)


FLOATS: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "fma": lambda a, b, c: np.float64(a) * np.float64(b) + np.float64(c),
    "max": np.fmax,
    "min": np.fmin,
    "max.NaN": np.maximum,
    "min.NaN": np.minimum,
    "ex2": np.exp2,
    "lg2": np.log2,
    "rcp": lambda a: 1 / a,
    "mov": lambda a: a,
    "selp": None,  # type: ignore[dict-item]
}
INTEGERS: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
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
    "mov": lambda a: a,
    "cvt": lambda a: a,
    "cvta": lambda a: a,
    "mapa": lambda a, rank: a & 0xFFFFFF | rank << 24,
    "not": lambda a: ~a.astype(bool),
    "selp": lambda a, b, p: np.where(p.astype(bool), a, b),
    "setp.eq": operator.eq,
    "setp.ne": operator.ne,
    "setp.lt": operator.lt,
    "setp.le": operator.le,
    "setp.gt": operator.gt,
    "setp.ge": operator.ge,
    "setp.leu": lambda a, b: ~(a > b),
}

Handler = Callable[[Cluster, Warp, Any, str, list[str]], Any]
HANDLERS: dict[str, Handler] = {}


def handles(*names: str) -> Callable[[Handler], Handler]:
    """Register the handler of instructions by prefix; the first match counts."""

    def register(handler: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(names, handler))
        return handler

    return register


def one(cluster: Cluster, warp: Warp, mask: Any, operand: str) -> int:
    """Return an operand that is equal in all active lanes."""
    values = cluster.value(warp, operand)[mask]
    assert (values == values[0]).all(), f"{operand} differs between lanes"
    return int(values[0])


@handles("fence", "tcgen05.fence", "tcgen05.wait", "tcgen05.relinquish", "prefetch")
def nothing(cluster: Cluster, warp: Warp, mask: Any, line: str, operands: list[str]) -> None:
    """Do nothing: memory operations complete in order here."""


@handles("elect.sync")
def elect(cluster: Cluster, warp: Warp, mask: Any, line: str, operands: list[str]) -> None:
    assert mask.all(), "all lanes elect one"
    cluster.put(warp, operands[0].split("|")[1], np.arange(LANES) == 0, mask)


@handles("bar.warp.sync")
def meet_warp(cluster: Cluster, warp: Warp, mask: Any, line: str, operands: list[str]) -> None:
    assert mask.all(), "lanes meet"


@handles("shfl.sync.idx")
def shuffle(cluster: Cluster, warp: Warp, mask: Any, line: str, operands: list[str]) -> None:
    assert mask.all(), "a whole warp shuffles"
    values, lanes = (cluster.value(warp, o) for o in operands[1:3])
    cluster.put(warp, operands[0], values[lanes & 31], mask)


@handles("mov.b64")
def move(cluster: Cluster, warp: Warp, mask: Any, line: str, operands: list[str]) -> None:
    if line.startswith("mov.b64 {"):
        whole = cluster.value(warp, operands[2])
        cluster.put(warp, operands[0], whole & 0xFFFFFFFF, mask)
        cluster.put(warp, operands[1], whole >> 32, mask)
    elif len(operands) == 3:
        low, high = (cluster.value(warp, o) for o in operands[1:])
        cluster.put(warp, operands[0], unsigned(low) | high.astype(np.int64) << 32, mask)
    else:
        cluster.put(warp, operands[0], cluster.value(warp, operands[1]), mask)


@handles("mov.pred", "and.pred", "or.pred")
def predicate(cluster: Cluster, warp: Warp, mask: Any, line: str, operands: list[str]) -> None:
    values = [cluster.value(warp, o).astype(bool) for o in operands[1:]]
    if line.startswith("and"):
        values = [values[0] & values[1]]
    elif line.startswith("or"):
        values = [values[0] | values[1]]
    cluster.put(warp, operands[0], values[0], mask)


@handles("cvt.rn.bf16x2.f32")
def round_two(cluster: Cluster, warp: Warp, mask: Any, line: str, operands: list[str]) -> None:
    high, low = (bfloat16(as_float(cluster.value(warp, o))) for o in operands[1:])
    cluster.put(warp, operands[0], (high << 16 | low).astype(np.int64), mask)


@handles("cvt.rn.f32.s32")
def convert(cluster: Cluster, warp: Warp, mask: Any, line: str, operands: list[str]) -> None:
    number = cluster.value(warp, operands[1]).astype(np.float32)
    cluster.put(warp, operands[0], number.view(np.int32), mask)


@handles("ld.param")
def load_parameter(cluster: Cluster, warp: Warp, mask: Any, line: str, operands: list[str]) -> None:
    name, _, offset = operands[1].strip("[]").partition("+")
    key = int(name.rsplit("_", 1)[1]), int(offset or 0)
    cluster.put(warp, operands[0], np.asarray(cluster.parameters[key]), mask)


@handles("ld.global", "st.global")
def touch_global(cluster: Cluster, warp: Warp, mask: Any, line: str, operands: list[str]) -> None:
    is_store = line.startswith("st")
    addresses = cluster.value(warp, operands[0 if is_store else 1])
    values = cluster.value(warp, operands[1]).copy() if is_store else np.zeros(LANES, np.int64)
    for lane in np.flatnonzero(mask):
        number, offset = divmod(int(addresses[lane]) - GLOBAL, 1 << 32)
        words = cluster.arrays[number]
        if is_store:
            words[offset // 4] = int(values[lane]) & 0xFFFFFFFF
        else:
            values[lane] = words[offset // 4]
    if not is_store:
        cluster.put(warp, operands[0], values, mask)


@handles("ld.shared", "st.shared")
def touch_shared(cluster: Cluster, warp: Warp, mask: Any, line: str, operands: list[str]) -> None:
    is_store = line.startswith("st")
    address = cluster.value(warp, operands[0 if is_store else 1]) & 0xFFFFFF
    words = warp.block.shared.view(np.uint32)
    if not is_store:
        cluster.put(warp, operands[0], words[(address - SHARED) // 4].astype(np.int64), mask)
        return
    for i, operand in enumerate(operands[1:]):
        values = unsigned(cluster.value(warp, operand)).astype(np.uint32)
        words[(address[mask] - SHARED) // 4 + i] = values[mask]


@handles("mbarrier.init")
def set_up(cluster: Cluster, warp: Warp, mask: Any, line: str, operands: list[str]) -> None:
    place = one(cluster, warp, mask, operands[0]) & 0xFFFFFF
    warp.block.barriers[place] = Barrier(one(cluster, warp, mask, operands[1]))


@handles("mbarrier.arrive")
def arrive(cluster: Cluster, warp: Warp, mask: Any, line: str, operands: list[str]) -> None:
    place = one(cluster, warp, mask, operands[1])
    amount = one(cluster, warp, mask, operands[2]) if len(operands) > 2 else 1
    barrier = cluster.blocks[place >> 24].barriers[place & 0xFFFFFF]
    for _ in range(int(mask.sum())):
        if "expect_tx" in line:
            barrier.signal(1, amount)
        else:
            barrier.signal(amount)


@handles("barrier.cluster.arrive", "barrier.cluster.wait", "bar.sync")
def meet(cluster: Cluster, warp: Warp, mask: Any, line: str, operands: list[str]) -> bool | None:
    assert mask.all(), "whole warps meet"
    where = cluster if line.startswith("barrier") else warp.block
    everyone = 6 * (len(cluster.blocks) if where is cluster else 1)
    if "wait" not in line and not warp.waits:
        where.met += 1
        warp.waits = round_up(where.met, everyone)
        if "arrive" in line:
            return None
    if where.met < warp.waits:
        return True
    warp.waits = 0
    return None


@handles("tcgen05.alloc", "tcgen05.dealloc")
def allocate(cluster: Cluster, warp: Warp, mask: Any, line: str, operands: list[str]) -> None:
    assert mask.all(), "a whole warp allocates"
    columns = one(cluster, warp, mask, operands[1])
    if "dealloc" in line:
        assert columns == warp.block.columns
        warp.block.columns = 0
        return
    place = one(cluster, warp, mask, operands[0]) & 0xFFFFFF
    warp.block.shared.view(np.uint32)[(place - SHARED) // 4] = 0
    warp.block.columns = columns


@handles("tcgen05.mma")
def issue(cluster: Cluster, warp: Warp, mask: Any, line: str, operands: list[str]) -> None:
    assert mask.sum() == 1, "one lane issues products"
    pair, block = 2 if "cta_group::2" in line else 1, warp.block
    values = tuple(
        one(cluster, warp, mask, o) & (1 << 64) - 1 for o in (*operands[:4], operands[-1])
    )
    block.queue.append(lambda: cluster.multiply(block, pair, values))


@handles("tcgen05.commit")
def commit(cluster: Cluster, warp: Warp, mask: Any, line: str, operands: list[str]) -> None:
    assert mask.sum() == 1, "one lane commits"
    place = one(cluster, warp, mask, operands[0])
    bits = one(cluster, warp, mask, operands[1]) if "multicast" in line else 1 << warp.block.rank
    reached = [block for block in cluster.blocks if bits >> block.rank & 1]

    def take_off() -> None:
        for block in reached:
            barrier = block.barriers[place & 0xFFFFFF]
            cluster.flights.append(lambda barrier=barrier: barrier.signal(1))  # type: ignore[misc]

    warp.block.queue.append(take_off)


@handles("tcgen05.ld")
def read(cluster: Cluster, warp: Warp, mask: Any, line: str, operands: list[str]) -> None:
    assert mask.all(), "a whole warp reads"
    place = one(cluster, warp, mask, operands[-1])
    lane, column = place >> 16, place & 0xFFFF
    assert lane == 32 * (warp.number % 4), "a warp reads its own lanes"
    assert column + 64 <= warp.block.columns, "tensor memory is allocated"
    values = warp.block.tensor[lane : lane + 32, column : column + 64].view(np.int32)
    for i, register in enumerate(operands[:-1]):
        cluster.put(warp, register, values[:, i].copy(), mask)


@handles("cp.async.bulk.tensor.2d.shared")
def fetch(cluster: Cluster, warp: Warp, mask: Any, line: str, operands: list[str]) -> None:
    assert mask.sum() == 1, "one lane loads"
    cluster.flights.append(cluster.land(warp, line, operands, mask))


@handles("cp.async.bulk.tensor.2d.global")
def send(cluster: Cluster, warp: Warp, mask: Any, line: str, operands: list[str]) -> None:
    warp.stores.append(cluster.store(warp, operands, mask))


@handles("cp.async.bulk.commit_group")
def close(cluster: Cluster, warp: Warp, mask: Any, line: str, operands: list[str]) -> None:
    """Do nothing: stores complete when their group is waited for."""


@handles("cp.async.bulk.wait_group")
def wait_for_stores(
    cluster: Cluster, warp: Warp, mask: Any, line: str, operands: list[str]
) -> None:
    while len(warp.stores) > int(operands[0]):
        warp.stores.pop(0)()
