"""Runs a grid of thread blocks on numpy, slowly: warps, barriers and what happens asynchronously.

Asynchronous operations (loads, MMAs, commits and stores) complete later, in an order that a seed
chooses, as it chooses the next warp to run.  Raises `Stuck` on a deadlock, and AssertionError where
lanes diverge at a warp-wide instruction or memory is misused.

The instructions are functions of `instructions`, `hopper` and `blackwell`; only those that the
kernels use are emulated, as the PTX manual describes them.  This does not prove that the hardware
agrees.
"""

import functools
import itertools
import operator
import random
import re
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np

from cutefce.cute_kernels.integers import round_up
from tests.emulation.host import Launch
from tests.emulation.memory import OFFSET, SHARED, UNSIGNED, GlobalMemory, TensorMap

LANES = 32
ALL = np.ones(LANES, bool)
PARAMETERS = 1 << 40
"""Address of the first kernel parameter; the next ones follow at a distance of 1."""
RESIDENT_BLOCKS = 132
"""Blocks that run at the same time, as on an H200."""
PATIENCE = 10_000
"""Rounds in which warps do nothing but poll memory, after which they are stuck."""


class Stuck(Exception):
    """All warps wait for each other."""


class Pause(Enum):
    """Why a warp lets others run."""

    WAIT = 1
    """The instruction could not be executed yet."""
    POLL = 2
    """The instruction read what others write."""


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
class Meeting:
    """A barrier for warps of a block, or of a cluster."""

    arrived: int = 0
    rounds: int = 0

    def arrive(self, expected: int) -> int:
        """Return the number of the round that an arriving warp belongs to."""
        mine = self.rounds
        self.arrived += 1
        assert self.arrived <= expected, "more warps arrive than expected"
        if self.arrived == expected:
            self.arrived, self.rounds = 0, self.rounds + 1
        return mine


@dataclass
class Block:
    """A thread block: its memories and its pending operations."""

    cluster: "Cluster"
    rank: int
    shared: Any
    barriers: dict[int, Barrier] = field(default_factory=dict)
    meetings: dict[int, Meeting] = field(default_factory=lambda: defaultdict(Meeting))
    columns: int = 0
    """Allocated columns of tensor memory."""
    products: dict[tuple[int, int], Any] = field(default_factory=dict)
    """MMAs that some warps of a warpgroup have issued, by warpgroup and number."""

    @functools.cached_property
    def tensor(self) -> Any:
        """Tensor memory."""
        return np.full((128, 512), np.nan, np.float32)

    def words(self, size: int, at: Any) -> Any:
        """Return the shared memory as patterns of `size` bytes, which must have those at `at`."""
        words = self.shared.view(UNSIGNED[size])
        assert np.min(at) >= 0, "an address is before shared memory"
        assert np.max(at) < len(words), "an address is beyond shared memory"
        return words

    def barrier(self, address: int) -> Barrier:
        """Return the mbarrier at an address in a block of the cluster."""
        found = self.cluster.blocks[address >> 24].barriers.get(address & OFFSET)
        assert found is not None, f"no barrier is at {address:#x}"
        return found

    def queue(self, key: int = 0) -> deque[Callable[[], None]]:
        """Return one of the block's queues of pending operations."""
        return self.cluster.grid.queues[self.cluster.number, self.rank, key]


@dataclass
class Cluster:
    """The blocks that share memory."""

    grid: "Grid"
    number: int
    blocks: list[Block] = field(default_factory=list)
    meeting: Meeting = field(default_factory=Meeting)


@dataclass
class Warp:
    """A warp: its registers and what it waits for."""

    block: Block
    number: int
    registers: dict[str, Any] = field(default_factory=dict)
    group: list[Any] = field(default_factory=list)
    """TMA stores of the group that is not committed."""
    groups: list[list[Any]] = field(default_factory=list)
    """Committed groups that have not read shared memory."""
    unwritten: list[Any] = field(default_factory=list)
    """Stores that have read it, and may not have written."""
    copies: list[Callable[[], None]] = field(default_factory=list)
    """Copies to shared memory of the group that is not committed."""
    copy_groups: list[list[Callable[[], None]]] = field(default_factory=list)
    """Committed groups of copies that have not happened."""
    ticket: int | None = None
    """The round of a meeting that the warp waits for."""
    cluster_ticket: int = 0
    """That of the cluster's meeting at which it arrived last."""
    issued: int = 0
    """MMAs of the warpgroup."""
    committed: list[int] = field(default_factory=list)
    steps: int = 0
    polled: bool = False

    @property
    def grid(self) -> "Grid":
        """The grid that the warp belongs to."""
        return self.block.cluster.grid

    def value(self, operand: str) -> Any:
        """Return an operand of every lane: int32 or int64 by its size, bool for predicates."""
        found = self.registers.get(operand)
        if found is not None:
            return found
        base, _, offset = operand.partition("+")
        if offset:
            return self.value(base) + int(offset)
        special = SPECIAL.get(operand)
        if special is None:
            found = constant(operand)
        else:
            kind = np.int64 if operand[0] == "%" else np.int32
            found = same(np.asarray(special(self), kind))
        self.registers[operand] = found
        return found

    def values(self, operands: list[str]) -> list[Any]:
        """Return operands of every lane."""
        registers = self.registers
        try:
            return [registers[operand] for operand in operands]
        except KeyError:  # constants at their first use
            return [self.value(operand) for operand in operands]

    def put(self, register: str, value: Any, mask: Any) -> None:
        """Write a register of the active lanes."""
        if register.startswith("%r"):
            kind = np.int64 if register[2] == "d" else np.int32
            if value.dtype != kind:
                value = value.astype(kind)
        if mask is not ALL:
            before = self.registers.get(register)
            value = np.where(mask, value, np.zeros_like(value) if before is None else before)
        self.registers[register] = value

    def one(self, operand: str, mask: Any) -> int:
        """Return an operand that is equal in all active lanes."""
        values = self.value(operand)[mask]
        assert (values == values[0]).all(), f"{operand} differs between lanes"
        return int(values[0])

    def run(self) -> Iterator[None]:
        """Run; lanes that diverge at a branch run one part after the other, until they join."""
        code, branches = self.grid.program.code, self.grid.program.branches
        stack = [(0, ALL, self.grid.program.end)]
        while stack:
            at, mask, join = stack.pop()
            while at != join:
                self.steps += 1
                branch = branches[at]
                if branch is None:
                    while (pause := code[at](self, mask)) is Pause.WAIT:
                        yield
                    at += 1
                    if pause is Pause.POLL:
                        self.polled = True
                        yield
                    continue
                taken = mask & branch.condition(self)
                if not taken.any():
                    at += 1
                elif (taken == mask).all():
                    at = branch.target
                else:
                    stack.append((branch.join, mask, join))
                    stack.append((at + 1, mask & ~taken, branch.join))
                    at, mask, join = branch.target, taken, branch.join
        assert not self.group, "a warp ends before it commits its stores"
        assert not self.groups, "a warp ends before its stores have read shared memory"
        assert not self.copies and not self.copy_groups, "a warp ends before its copies"


SPECIAL: dict[str, Callable[[Warp], Any]] = {
    "%tid.x": lambda warp: LANES * warp.number + np.arange(LANES),
    "%laneid": lambda warp: np.arange(LANES),
    "%ctaid.x": lambda warp: warp.block.cluster.number * warp.grid.launch.cluster + warp.block.rank,
    "%nctaid.x": lambda warp: warp.grid.launch.blocks,
    "%cluster_ctarank": lambda warp: warp.block.rank,
    "__dynamic_shmem__0": lambda warp: (warp.block.rank << 24) + SHARED,
}
"""Special registers."""


@functools.cache
def constant(operand: str) -> Any:
    """Return a number that is written in the code, for every lane."""
    if operand.startswith("0f"):
        number = int(np.uint32(int(operand[2:], 16)).view(np.int32))
    elif "_param_" in operand:
        number = PARAMETERS + int(operand.rsplit("_", 1)[1])
    else:
        assert operand[0] != "%", f"{operand} is read before it is written"
        number = int(operand, 0)
    narrow = -(1 << 31) <= number < 1 << 31
    return same(np.asarray(number, np.int32 if narrow else np.int64))


def same(number: Any) -> Any:
    """Return a number of every lane."""
    return np.broadcast_to(number, LANES)


Code = Callable[[Warp, Any], Pause | None]
Handler = Callable[[Warp, Any, str, list[str]], Pause | None]
"""An instruction: of a warp, its active lanes, the line and its operands."""


@dataclass
class Branch:
    """A branch; a return branches to the end of the program."""

    target: int
    register: str | None
    """Predicate, None if all lanes branch."""
    negated: bool
    join: int = -1
    """Where both ways meet: the immediate postdominator."""

    def condition(self, warp: Warp) -> Any:
        """Return which lanes branch."""
        if self.register is None:
            return ALL
        predicate = warp.registers[self.register]
        return ~predicate if self.negated else predicate


class Program:
    """The instructions of a kernel."""

    def __init__(self, ptx: str, entry: str, compile_: Callable[[str], Code]) -> None:
        lines, labels = parse(ptx, entry)
        self.end = len(lines)
        self.branches = [self._branch(line, labels) for line in lines]
        self.code = [
            nothing if branch else compile_(line)
            for line, branch in zip(lines, self.branches, strict=True)
        ]
        joins = self._joins()
        for start, branch in enumerate(self.branches):
            if branch is not None:
                branch.join = joins.get(start, self.end)

    def _branch(self, line: str, labels: dict[str, int]) -> Branch | None:
        if line.startswith("ret"):
            return Branch(self.end, None, False)
        found = re.match(r"(?:@(!?)(%p\d+) )?bra\S* (\S+);", line)
        if not found:
            return None
        negated, register, label = found.groups()
        return Branch(labels[label], register, bool(negated))

    def _joins(self) -> dict[int, int]:
        """Return the immediate postdominator of each branch, on the graph of basic blocks."""
        found = [(i, branch) for i, branch in enumerate(self.branches) if branch]
        starts = sorted({0, self.end, *(i + 1 for i, _ in found), *(b.target for _, b in found)})
        following: dict[int, list[int]] = {}
        lasts: dict[int, int] = {}
        for start, stop in itertools.pairwise(starts):
            branch = self.branches[stop - 1]
            following[start] = [stop] if branch is None or branch.register else []
            following[start] += [] if branch is None else [branch.target]
            lasts[start] = stop - 1
        bits = {start: 1 << i for i, start in enumerate(starts)}
        # of each block, those on every way from it to the end, itself included
        behind = dict.fromkeys(starts, (1 << len(starts)) - 1) | {self.end: bits[self.end]}
        changed = True
        while changed:
            changed = False
            for start in reversed(following):
                common = functools.reduce(operator.and_, map(behind.__getitem__, following[start]))
                changed |= common | bits[start] != behind[start]
                behind[start] = common | bits[start]
        # behind the nearest one are all others
        nearest = {blocks: start for start, blocks in behind.items()}
        joins = {start: nearest.get(behind[start] & ~bits[start]) for start in following}
        return {lasts[start]: join for start, join in joins.items() if join is not None}


def nothing(warp: Warp, mask: Any) -> None:
    """Stand for a branch."""


def parse(ptx: str, entry: str) -> tuple[list[str], dict[str, int]]:
    """Return instructions and the positions of labels; a wait loop is one instruction."""
    body = ptx.split(f".entry {entry}(", 1)[1].split(".entry", 1)[0]
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
        elif line and not line.startswith(("//", ".", "{", "}")):
            program.append(line)
    return program, labels


class Grid:
    """One launch."""

    def __init__(self, launch: Launch, program: Program, memory: GlobalMemory, seed: int) -> None:
        self.launch: Launch = launch
        self.program, self.memory = program, memory
        self.random = random.Random(seed)
        self.flights: list[Callable[[], None]] = []
        """Pending operations that complete in any order."""
        self.queues: dict[Any, deque[Callable[[], None]]] = defaultdict(deque)
        """Pending operations that complete in order: MMAs and commits."""
        self.columns = 0
        """Allocated columns of tensor memory in all blocks."""
        self.maps = {
            PARAMETERS + i: TensorMap.decode(data)
            for i, data in enumerate(launch.parameters)
            if len(data) == 128
        }
        self.parameters: dict[str, Any] = {}
        """What instructions have loaded of the parameters."""

    def run(self) -> None:
        """Run all clusters to their end, in their order as far as not all are resident."""
        with np.errstate(all="ignore"):
            self._run()
        assert self.columns == 0, "tensor memory is given back"

    def _run(self) -> None:
        launch, number, idle = self.launch, 0, 0
        running: list[tuple[Warp, Iterator[None]]] = []
        while True:
            while number < launch.blocks // launch.cluster and (
                launch.is_cooperative
                or len(running) + launch.cluster * launch.warps <= RESIDENT_BLOCKS * launch.warps
            ):
                running += [(warp, warp.run()) for warp in self._start(number)]
                number += 1
            if not running and not self.flights and not self.queues:
                return
            moved, polled, alive = self._deliver(), False, []
            self.random.shuffle(running)
            for warp, code in running:
                steps, warp.polled = warp.steps, False
                lives = next(code, self) is None
                if lives:
                    alive.append((warp, code))
                polled |= warp.polled
                moved |= not lives or (warp.steps > steps and not warp.polled)
            running, idle = alive, 0 if moved else idle + 1
            if idle > (PATIENCE if polled else 0):
                raise Stuck(f"{len(running)} warps wait")

    def _start(self, number: int) -> list[Warp]:
        """Return the warps of a cluster."""
        cluster, size = Cluster(self, number), self.launch.shared_bytes
        for rank in range(self.launch.cluster):
            # uninitialized memory is NaN
            cluster.blocks.append(Block(cluster, rank, np.full(round_up(size, 16), 0xFF, np.uint8)))
        return [Warp(block, i) for block in cluster.blocks for i in range(self.launch.warps)]

    def _deliver(self) -> bool:
        """Complete some pending operations; return whether any were pending."""
        pending = bool(self.queues or self.flights)
        for flight in [each for each in self.flights if self.random.random() < 0.5]:
            self.flights.remove(flight)
            flight()
        for key, queue in list(self.queues.items()):
            if self.random.random() < 0.5:
                queue.popleft()()
            if not queue:
                del self.queues[key]
        return pending
