"""A model checker of the Blackwell kernel's synchronization.

Every role is a list of steps, unrolled over tiles and stages as in `sm100.mainloop` and
`sm100.project_exp`.  A step waits for a phase of a barrier and then acts atomically.  Asynchronous
operations are in flight: loads and arrivals land in any order, products (MMAs) and commits of one
MMA warp in issue order.  `explore` follows every interleaving and returns the possible faults: data
overwritten or read too early, deadlocks, and operations that land in a block that has ended.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

Barrier = tuple[int, str, int]
"""Block, kind and number."""


LEADER = 0
"""The block that issues MMAs."""


class Fault(Exception):
    """A violation of the protocol."""


@dataclass(frozen=True)
class Protocol:
    """Sizes of the model; the fields with defaults serve to inject faults."""

    blocks: int
    """Thread blocks of a cluster, and of one MMA."""
    tiles: int
    k_tiles: int
    stages: int
    epilogue_warps: int = 1
    """Epilogue warps of each block."""
    accumulators: int = 2
    counts: dict[str, int] = field(default_factory=dict)
    """Arrivals that barriers expect, where they differ from the kernel's."""
    change: Callable[[str, "Step"], "Step | list[Step]"] = lambda role, step: step
    """Replaces a step of a role by any number of steps."""

    def count(self, kind: str) -> int:
        """Return the arrivals that complete a phase."""
        own = self.epilogue_warps * self.blocks if kind == "read" else 1
        return self.counts.get(kind, own)


class Step(NamedTuple):
    """Wait until the phase of a parity completes, then do the actions: names with operands."""

    wait: tuple[Barrier, int] | None
    actions: tuple[Any, ...]


def load_warp(p: Protocol, block: int) -> Iterator[Step]:
    """Fill stages; a block loads its rows of h and its part of w."""
    uses = p.tiles * p.k_tiles
    for use in range(uses):
        stage, phase = use % p.stages, use // p.stages
        actions: list[Any] = []
        filled = (LEADER, "filled", stage)
        if block == LEADER:
            actions.append(("expect", filled, 2 * p.blocks))
        actions += [("load", block, stage, part, use, filled) for part in "hw"]
        yield Step(((block, "drained", stage), 1 - phase % 2), tuple(actions))
    for use in range(uses, uses + p.stages):
        stage, phase = use % p.stages, use // p.stages
        yield Step(((block, "drained", stage), 1 - phase % 2), (("tail",),))


def mma_warp(p: Protocol, block: int) -> Iterator[Step]:
    """Issue MMAs for all blocks, where commits arrive."""
    for tile in range(p.tiles):
        number, phase = tile % p.accumulators, tile // p.accumulators
        yield Step(((block, "read", number), 1 - phase % 2), ())
        for step in range(p.k_tiles):
            use = tile * p.k_tiles + step
            stage = use % p.stages
            drained = tuple((other, "drained", stage) for other in range(p.blocks))
            product = ("product", block, stage, number, tile, step)
            actions = [product, ("commit", block, drained, use)]
            if step == p.k_tiles - 1:
                computed = tuple((other, "computed", number) for other in range(p.blocks))
                actions.append(("commit", block, computed, tile))
            yield Step(((block, "filled", stage), use // p.stages % 2), tuple(actions))


def epilogue_warp(p: Protocol, block: int, warp: int) -> Iterator[Step]:
    """Read tiles, and release their accumulators to the block that issues MMAs."""
    for tile in range(p.tiles):
        number, phase = tile % p.accumulators, tile // p.accumulators
        release = ("arrive", (LEADER, "read", number))
        wait = (block, "computed", number), phase % 2
        yield Step(wait, (("use", block, warp, number, tile), release))


def roles(p: Protocol) -> dict[tuple[int, str], tuple[Step, ...]]:
    """Return every role's steps after `change`; all roles meet at the end."""
    programs: dict[tuple[int, str], Iterator[Step]] = {}
    for block in range(p.blocks):
        programs[block, "load"] = load_warp(p, block)
        if block == LEADER:
            programs[block, "mma"] = mma_warp(p, block)
        for warp in range(p.epilogue_warps):
            programs[block, f"epilogue {warp}"] = epilogue_warp(p, block, warp)
    result = {}
    for key, steps in programs.items():
        meeting = Step(None, (("meet",),))
        changed = [p.change(f"{key[0]} {key[1]}", step) for step in [*steps, meeting]]
        parts = [[step] if isinstance(step, Step) else step for step in changed]
        result[key] = tuple(step for part in parts for step in part)
    return result


class State(NamedTuple):
    """The state of the model; immutable, so that states can be compared."""

    places: tuple[int, ...]
    """The next step of each role."""
    barriers: frozenset[tuple[Barrier, tuple[int, int, int]]]
    """Parity, arrivals and missing loads of barriers that are not in their initial state."""
    queues: tuple[tuple[Any, ...], ...]
    """Pending products and commits of each block."""
    flights: frozenset[Any]
    memory: frozenset[tuple[Any, Any]]
    """Contents of stages and accumulators."""


class Machine:
    """The transitions of the model."""

    def __init__(self, p: Protocol) -> None:
        self.p, self.roles = p, roles(p)
        self.programs, self.blocks = tuple(self.roles.values()), [key[0] for key in self.roles]

    def start(self) -> State:
        """Return the initial state."""
        return State(
            (0,) * len(self.programs), frozenset(), ((),) * self.p.blocks, frozenset(), frozenset()
        )

    def moves(self, state: State) -> list[Callable[[], State]]:
        """Return the possible transitions."""
        barriers, memory = dict(state.barriers), dict(state.memory)
        lands = [partial(self.land, state, barriers, memory, flight) for flight in state.flights]
        executes = [
            partial(self.execute, state, barriers, memory, block, queue)
            for block, queue in enumerate(state.queues)
            if queue
        ]
        places = zip(self.programs, state.places, strict=True)
        steps = [(role, p[at]) for role, (p, at) in enumerate(places) if at < len(p)]
        acts = [
            partial(self.act, state, barriers, memory, role, step)
            for role, step in steps
            if self.may(state, barriers, step)
        ]
        return [*lands, *executes, *acts]

    def may(self, state: State, barriers: dict[Barrier, Any], step: Step) -> bool:
        """Return whether a role's next step can be taken."""
        if step.actions == (("meet",),):
            # all roles pass once the last one arrives
            lengths = [len(program) - 1 for program in self.programs]
            return all(map(int.__ge__, state.places, lengths))
        if step.wait is None:
            return True
        barrier, parity = step.wait
        return bool(barriers.get(barrier, (0, 0, 0))[0] != parity)

    def act(self, state: State, barriers: Any, memory: Any, role: int, step: Step) -> State:
        """Take a role's next step."""
        barriers, memory = dict(barriers), dict(memory)
        flights, queues = set(state.flights), list(state.queues)
        for name, *operands in step.actions:
            if name == "expect":
                self.signal(barriers, operands[0], arrivals=1, loads=operands[1])
            elif name == "arrive":
                self.ended(state, operands[0][0])
                self.signal(barriers, operands[0], arrivals=1)
            elif name == "load":
                flights.add(("load", *operands))
            elif name in ("product", "commit"):
                queues[operands[0]] = (*queues[operands[0]], (name, *operands[1:]))
            elif name == "use":
                block, warp, number, tile = operands
                content = memory.get((block, "accumulator", number))
                if content is None or content[:2] != (tile, self.p.k_tiles):
                    raise Fault("logits are not those of the tile")
                memory[block, "accumulator", number] = (*content[:2], content[2] - {warp})
        places = list(state.places)
        places[role] += 1
        return self.state(places, barriers, queues, flights, memory)

    def execute(
        self, state: State, barriers: Any, memory: Any, block: int, queue: tuple[Any, ...]
    ) -> State:
        """Execute a block's oldest product."""
        memory, queues = dict(memory), list(state.queues)
        (_, *operands), queues[block] = queue[0], queue[1:]
        self.multiply(memory, block, *operands)
        return self.state(state.places, barriers, queues, set(state.flights), memory)

    def multiply(
        self, memory: Any, block: int, stage: int, number: int, tile: int, step: int
    ) -> None:
        """Read a stage and add to an accumulator, in all blocks of a pair."""
        p, use = self.p, tile * self.p.k_tiles + step
        for other in range(p.blocks):
            for part in "hw":
                if memory.get((other, "stage", stage, part)) != use:
                    raise Fault("a stage does not hold what is multiplied")
            place = other, "accumulator", number
            content = memory.get(place, (None, 0, frozenset()))
            if step == 0 and content[2]:
                raise Fault("an accumulator is overwritten before it is read")
            if step > 0 and content[:2] != (tile, step):
                raise Fault("an accumulator holds another tile")
            memory[place] = (tile, step + 1, frozenset(range(p.epilogue_warps)))

    def land(self, state: State, barriers: Any, memory: Any, flight: Any) -> State:
        """Complete a load or an arrival."""
        barriers, memory = dict(barriers), dict(memory)
        if flight[0] == "load":
            _, block, stage, part, use, barrier = flight
            memory[block, "stage", stage, part] = use
            self.ended(state, block)
            self.ended(state, barrier[0])
            self.signal(barriers, barrier, loads=-1)
        else:
            self.ended(state, flight[1][0])
            self.signal(barriers, flight[1], arrivals=1)
        flights = set(state.flights - {flight})
        return self.state(state.places, barriers, list(state.queues), flights, memory)

    def ended(self, state: State, block: int) -> None:
        """Raise Fault if all roles of a block have ended."""
        pairs = zip(self.blocks, self.programs, state.places, strict=True)
        if all(place == len(program) for of, program, place in pairs if of == block):
            raise Fault("something lands in a block that has ended")

    def signal(self, barriers: Any, barrier: Barrier, arrivals: int = 0, loads: int = 0) -> None:
        """Arrive at a barrier, or change its number of missing loads."""
        parity, arrived, missing = barriers.get(barrier, (0, 0, 0))
        arrived, missing = arrived + arrivals, missing + loads
        count = self.p.count(barrier[1])
        if arrived > count:
            raise Fault("a barrier gets more arrivals than it expects")
        if arrived == count and missing == 0:
            parity, arrived = 1 - parity, 0
        barriers[barrier] = (parity, arrived, missing)

    def state(self, places: Any, barriers: Any, queues: Any, flights: Any, memory: Any) -> State:
        """Return a state; commits are in flight once no product precedes them."""
        for block, queue in enumerate(queues):
            while queue and queue[0][0] == "commit":
                (_, reached, number), queue = queue[0], queue[1:]
                flights |= {("arrive", barrier, block, number) for barrier in reached}
            queues[block] = queue
        return State(
            tuple(places),
            frozenset(barriers.items()),
            tuple(queues),
            frozenset(flights),
            frozenset(memory.items()),
        )


def explore(p: Protocol, sought: str = "") -> tuple[int, set[str]]:
    """Follow every interleaving; return the number of states and the faults.

    Stops once the fault `sought` is found.
    """
    machine = Machine(p)
    faults: set[str] = set()
    start = machine.start()
    seen, open_ = {start}, [start]
    while open_ and sought not in faults:
        state = open_.pop()
        moves = machine.moves(state)
        if not moves and [len(program) for program in machine.programs] != list(state.places):
            faults.add("all wait for each other")
        for move in moves:
            try:
                following = move()
            except Fault as fault:
                faults.add(str(fault))
                continue
            if following not in seen:
                seen.add(following)
                open_.append(following)
    return len(seen), faults
