"""A model of how the warps of the Blackwell kernel wait for each other, and all that can happen.

Every role is a list of steps, unrolled over tiles and stages as in `mainloop_sm100` and
`project_exp_sm100`.  A step waits for a phase of a barrier and then acts at once.  What the
hardware does later is in flight: loads and arrivals land in any order, products and commits of one
multiplier in the order of their issue.  `explore` follows every interleaving and returns what can
go wrong: something overwritten, read too early, stuck, or landing in a block that has ended.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

Barrier = tuple[int, str, int]
"""Block, kind and number."""


class Fault(Exception):
    """Something that must not happen."""


@dataclass(frozen=True)
class Protocol:
    """What is modelled; the fields with defaults are what faults are made of."""

    pair: int
    sharing: int
    tiles: int
    steps: int
    stages: int
    readers: int = 1
    """Warps that read, of each block."""
    accumulators: int = 2
    counts: dict[str, int] = field(default_factory=dict)
    """Arrivals that barriers expect, where they are others than those of the kernel."""
    change: Callable[[str, "Step"], "Step | list[Step]"] = lambda role, step: step
    """What becomes of a step of a role: itself, or others, or none."""

    @property
    def blocks(self) -> int:
        """Return the blocks of a cluster."""
        return self.pair * self.sharing

    def leader(self, block: int) -> int:
        """Return the block that multiplies for `block`."""
        return block // self.pair * self.pair

    def count(self, kind: str) -> int:
        """Return the arrivals that complete a phase."""
        kernel = {"drained": self.sharing, "read": self.readers * self.pair}
        return self.counts.get(kind, kernel.get(kind, 1))


class Step(NamedTuple):
    """Wait until the phase of this parity is over, then do these, each a name and its operands."""

    wait: tuple[Barrier, int] | None
    actions: tuple[Any, ...]


def loader(p: Protocol, block: int) -> Iterator[Step]:
    """Fill stages; of w a block loads its share, for itself or for all that share the tile."""
    leader, uses = p.leader(block), p.tiles * p.steps
    everyone = range(p.blocks) if p.sharing > 1 else (block,)
    for use in range(uses):
        stage, turn = use % p.stages, use // p.stages
        actions: list[Any] = []
        if block == leader:
            # h of every block of the pair; of w, parts from all who share or halve it
            parts = p.pair + (p.sharing if p.sharing > 1 else p.pair)
            actions.append(("expect", (block, "filled", stage), parts))
        filled = (leader, "filled", stage)
        actions.append(("load", block, stage, "h", use, filled))
        for other in everyone:
            actions.append(("load", other, stage, f"w{block}", use, (p.leader(other), *filled[1:])))
        yield Step(((block, "drained", stage), 1 - turn % 2), tuple(actions))
    for use in range(uses, uses + p.stages):
        stage, turn = use % p.stages, use // p.stages
        yield Step(((block, "drained", stage), 1 - turn % 2), (("tail",),))


def multiplier(p: Protocol, block: int) -> Iterator[Step]:
    """Multiply for a pair; commits tell all blocks that share stages, and all that read tiles."""
    own = range(block, block + p.pair)
    for tile in range(p.tiles):
        number, turn = tile % p.accumulators, tile // p.accumulators
        yield Step(((block, "read", number), 1 - turn % 2), ())
        for step in range(p.steps):
            use = tile * p.steps + step
            stage = use % p.stages
            drained = tuple((other, "drained", stage) for other in range(p.blocks))
            product = ("product", block, stage, number, tile, step)
            actions = [product, ("commit", block, drained, use)]
            if step == p.steps - 1:
                computed = tuple((other, "computed", number) for other in own)
                actions.append(("commit", block, computed, tile))
            yield Step(((block, "filled", stage), use // p.stages % 2), tuple(actions))


def reader(p: Protocol, block: int, warp: int) -> Iterator[Step]:
    """Read tiles, and give their accumulators back to the block that multiplies."""
    for tile in range(p.tiles):
        number, turn = tile % p.accumulators, tile // p.accumulators
        release = ("arrive", (p.leader(block), "read", number))
        wait = (block, "computed", number), turn % 2
        yield Step(wait, (("use", block, warp, number, tile), release))


def roles(p: Protocol) -> dict[tuple[int, str], tuple[Step, ...]]:
    """Return every role's steps, as the protocol changes them; all meet at the end."""
    programs: dict[tuple[int, str], Iterator[Step]] = {}
    for block in range(p.blocks):
        programs[block, "loader"] = loader(p, block)
        if block == p.leader(block):
            programs[block, "multiplier"] = multiplier(p, block)
        for warp in range(p.readers):
            programs[block, f"reader {warp}"] = reader(p, block, warp)
    result = {}
    for key, steps in programs.items():
        meeting = Step(None, (("meet",),))
        changed = [p.change(f"{key[0]} {key[1]}", step) for step in [*steps, meeting]]
        parts = [[step] if isinstance(step, Step) else step for step in changed]
        result[key] = tuple(step for part in parts for step in part)
    return result


class State(NamedTuple):
    """All there is at one moment; immutable, so that states can be compared."""

    places: tuple[int, ...]
    """Of the roles, in their programs."""
    barriers: frozenset[tuple[Barrier, tuple[int, int, int]]]
    """Parity, arrivals and loads that are missing, of those that are not as they were set up."""
    queues: tuple[tuple[Any, ...], ...]
    """Products and commits of each block."""
    flights: frozenset[Any]
    memory: frozenset[tuple[Any, Any]]
    """What stages and accumulators hold."""


class Machine:
    """The moves from a state to the next ones."""

    def __init__(self, p: Protocol) -> None:
        self.p, self.roles = p, roles(p)
        self.programs, self.blocks = tuple(self.roles.values()), [key[0] for key in self.roles]

    def start(self) -> State:
        """Return the state before anything has happened."""
        return State(
            (0,) * len(self.programs), frozenset(), ((),) * self.p.blocks, frozenset(), frozenset()
        )

    def moves(self, state: State) -> list[Callable[[], State]]:
        """Return what can happen next."""
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
        """Whether a role's next step can be taken."""
        if step.actions == (("meet",),):
            # the last to come opens the way for all
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
                if content is None or content[:2] != (tile, self.p.steps):
                    raise Fault("logits are not those of the tile")
                memory[block, "accumulator", number] = (*content[:2], content[2] - {warp})
        places = list(state.places)
        places[role] += 1
        return self.state(places, barriers, queues, flights, memory)

    def execute(
        self, state: State, barriers: Any, memory: Any, block: int, queue: tuple[Any, ...]
    ) -> State:
        """Let a block's oldest product happen."""
        memory, queues = dict(memory), list(state.queues)
        (_, *operands), queues[block] = queue[0], queue[1:]
        self.multiply(memory, block, *operands)
        return self.state(state.places, barriers, queues, set(state.flights), memory)

    def multiply(
        self, memory: Any, block: int, stage: int, number: int, tile: int, step: int
    ) -> None:
        """Read a stage and add to an accumulator, in all blocks of a pair."""
        p, use = self.p, tile * self.p.steps + step
        for other in range(block, block + p.pair):
            halves = range(p.blocks) if p.sharing > 1 else (other,)
            for part in ("h", *(f"w{half}" for half in halves)):
                if memory.get((other, "stage", stage, part)) != use:
                    raise Fault("a stage does not hold what is multiplied")
            place = other, "accumulator", number
            content = memory.get(place, (None, 0, frozenset()))
            if step == 0 and content[2]:
                raise Fault("an accumulator is overwritten before it is read")
            if step > 0 and content[:2] != (tile, step):
                raise Fault("an accumulator holds another tile")
            memory[place] = (tile, step + 1, frozenset(range(p.readers)))

    def land(self, state: State, barriers: Any, memory: Any, flight: Any) -> State:
        """Let a load or an arrival come to its end."""
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
        """Arrive at a barrier, or change the loads that it waits for."""
        parity, arrived, missing = barriers.get(barrier, (0, 0, 0))
        arrived, missing = arrived + arrivals, missing + loads
        count = self.p.count(barrier[1])
        if arrived > count:
            raise Fault("a barrier gets more arrivals than it expects")
        if arrived == count and missing == 0:
            parity, arrived = 1 - parity, 0
        barriers[barrier] = (parity, arrived, missing)

    def state(self, places: Any, barriers: Any, queues: Any, flights: Any, memory: Any) -> State:
        """Return a state; commits take off as soon as no product is before them."""
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
    """Follow everything that can happen; return the number of states, and what went wrong.

    Ends early where the fault that is `sought` was found.
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
