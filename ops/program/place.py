"""Where buffers lie: offsets in arenas, and the memory that a program takes.

Buffers that never live at the same time may share memory.  The largest ones are placed first, each
in the first gap that is wide enough.
"""

from itertools import groupby

from cutefce.cute_kernels.integers import round_up
from cutefce.cute_kernels.workspace import NUM_STATS
from cutefce.ops.program.problem import LossProblem
from cutefce.ops.program.step_memory import TARGET_BYTES
from cutefce.ops.program.steps import ARENAS, Buffer, Home, Program

ITEM = 8
"""Bytes of which arenas are multiples, so that they may be seen in every dtype."""
ALIGNMENT = 256
"""Bytes of which offsets are multiples, as those of allocations are: more than TMA asks for."""


def place(program: Program) -> Program:
    """Return the program with an arena and an offset for each buffer that has none."""
    middle, buffers = len(program.forward), program.buffers
    taken: dict[Home, list[tuple[int, int, int, int]]] = {home: [] for home in ARENAS}
    program.arenas = dict.fromkeys(ARENAS, 0)
    free = [(-b.size, name) for name, b in buffers.items() if b.home is None]
    for _, name in sorted(free):
        buffer, (first, last) = buffers[name], program.lives[name]
        home = Home.SAVED if first < middle <= last else Home.FORWARD
        if first >= middle:
            home = Home.BACKWARD
        offset = 0
        for begin, end, since, until in sorted(taken[home]):
            if until < first or last < since:
                continue
            if offset + buffer.size <= begin:
                break
            offset = max(offset, round_up(end, ALIGNMENT))
        placed = Buffer(buffer.rows, buffer.columns, buffer.item, home, offset)
        taken[home].append((offset, placed.end, first, last))
        buffers[name] = placed
        program.arenas[home] = max(program.arenas[home], round_up(placed.end, ITEM))
    return program


def saved_bytes(program: Program) -> int:
    """Return the bytes that a forward saves: a call holds them to the end of its backward."""
    return program.arenas[Home.SAVED] + program.token_bytes


def peak(program: Program) -> int:
    """Return the most bytes that a call holds beside its inputs and gradients.

    The gradients that the forward has not allocated yet leave room for its scratch.
    """
    begun = program.homes_of_forward
    later = sum(size for home, size in program.gradients.items() if home not in begun)
    forward, backward = _most_outside(program)
    forward += program.arenas[Home.FORWARD] - later
    backward += program.arenas[Home.BACKWARD]
    return saved_bytes(program) + max(forward, backward, 0)


def token_bytes(p: LossProblem) -> int:
    """Bytes of the statistics of tokens, and of their targets."""
    statistics = NUM_STATS * p.accumulator_bytes * (1 + p.selects)  # in either order
    return p.tokens * (statistics + TARGET_BYTES + p.soft * soft_target_bytes(p))


def soft_target_bytes(p: LossProblem) -> int:
    """Bytes of one of a token's soft targets."""
    found = 8 + 2 * p.accumulator_bytes
    if p.returns_classes:
        # 14 bytes less where exponentials have the dtype of sums: fitted to peaks on a CPU
        found += (18 if p.item_bytes < p.accumulator_bytes else 4) + 5 * p.accumulator_bytes
    return found


def _most_outside(program: Program) -> tuple[int, int]:
    """Return the most bytes that primitives hold in tensors of their own, in either part."""
    middle, events = len(program.forward), list[tuple[int, int]]()
    for name, buffer in program.buffers.items():
        if buffer.home is Home.OUTSIDE:
            first, last = program.lives[name]
            events += [(first, buffer.size), (last + 1, -buffer.size)]
    most, held = [0, 0], 0
    for at, sizes in groupby(sorted(events), lambda event: event[0]):
        held += sum(size for _, size in sizes)
        most[at >= middle] = max(most[at >= middle], held)
    return most[0], most[1]
