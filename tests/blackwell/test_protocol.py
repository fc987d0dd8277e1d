"""The waiting of the Blackwell kernel, modelled: nothing is stuck or overwritten; faults are."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.blackwell.protocol import Protocol, Step, explore

PAIRED: dict[str, Any] = {"pair": 2, "sharing": 1}
MULTICAST: dict[str, Any] = {"pair": 1, "sharing": 2}
SINGLE: dict[str, Any] = {"pair": 1, "sharing": 1}

STUCK = "all wait for each other"
STAGE = "a stage does not hold what is multiplied"
OVERWRITTEN = "an accumulator is overwritten before it is read"
LOGITS = "logits are not those of the tile"
ARRIVALS = "a barrier gets more arrivals than it expects"
ENDED = "something lands in a block that has ended"

Change = Callable[[str, Step], Step | list[Step]]


@pytest.mark.parametrize(
    "sizes",
    [
        {**SINGLE, "tiles": 5, "steps": 2, "stages": 3, "readers": 2},
        {**SINGLE, "tiles": 3, "steps": 3, "stages": 2},
        {**PAIRED, "tiles": 3, "steps": 1, "stages": 1, "readers": 2},
        {**PAIRED, "tiles": 3, "steps": 1, "stages": 2},
        {**PAIRED, "tiles": 2, "steps": 2, "stages": 2},
        {**MULTICAST, "tiles": 3, "steps": 1, "stages": 1},
    ],
    ids=str,
)
def test_all_ends_well_whatever_happens_first(sizes: dict[str, Any]) -> None:
    states, faults = explore(Protocol(**sizes))
    assert not faults
    assert states > 500


def waits(kind: str, step: Step) -> bool:
    return step.wait is not None and step.wait[0][1] == kind


def does(name: str, step: Step) -> bool:
    return any(action[0] == name for action in step.actions)


def edit(name: str, change: Callable[..., tuple[Any, ...]]) -> Change:
    """Change the actions of a name, whose operands `change` takes after the role."""

    def apply(role: str, step: Step) -> Step:
        edited = (change(role, *a[1:]) if a[0] == name else (a,) for a in step.actions)
        return step._replace(actions=tuple(action for each in edited for action in each))

    return apply


def never_wait(kind: str) -> Change:
    return lambda role, step: step._replace(wait=None) if waits(kind, step) else step


def one_phase(kind: str) -> Change:
    """Wait for a barrier's first use always."""

    def apply(role: str, step: Step) -> Step:
        if step.wait is None or not waits(kind, step):
            return step
        return step._replace(wait=(step.wait[0], 0 if kind in ("filled", "computed") else 1))

    return apply


def skip(role: str, number: int) -> Change:
    """Let a role leave its step `number` out."""
    seen: list[Step] = []

    def apply(of: str, step: Step) -> Step | list[Step]:
        if of == role:
            seen.append(step)
        return [] if of == role and len(seen) == number + 1 else step

    return apply


def reorder(role: str, step: Step) -> Step:
    return step._replace(actions=step.actions[::-1])


def release_first(role: str, step: Step) -> Step | list[Step]:
    if not does("use", step):
        return step
    use, release = step.actions
    return [Step(step.wait, (release,)), Step(None, (use,))]


def omit(name: str) -> Change:
    return lambda role, step: [] if does(name, step) else step


# the shape, what is changed, and what must come of it
FAULTS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "stages are filled without waiting": (
        SINGLE, {"change": never_wait("drained")}, STAGE),
    "products do not wait for loads": (
        SINGLE, {"change": never_wait("filled")}, STAGE),
    "products do not wait for readers": (
        SINGLE, {"change": never_wait("read")}, OVERWRITTEN),
    "readers do not wait for products": (
        PAIRED, {"change": never_wait("computed")}, LOGITS),
    "a loader forgets the phase": (
        SINGLE, {"change": one_phase("drained")}, STAGE),
    "a multiplier forgets the stages' phase": (
        SINGLE, {"change": one_phase("filled")}, STAGE),
    "a multiplier forgets the accumulators' phase": (
        SINGLE, {"change": one_phase("read")}, OVERWRITTEN),
    "a reader forgets the phase": (
        SINGLE, {"change": one_phase("computed")}, LOGITS),
    "a commit before the products": (
        SINGLE, {"change": lambda role, step: reorder(role, step) if does("product", step)
                 else step}, LOGITS),
    "a release before the logits are read": (
        SINGLE, {"change": release_first}, OVERWRITTEN),
    "a reader never releases": (
        SINGLE, {"change": edit("arrive", lambda role, barrier: ())}, STUCK),
    "a stage is given back at once": (
        SINGLE, {"change": edit("commit", lambda role, block, reached, number: tuple(
            ("arrive", barrier) for barrier in reached))}, STAGE),
    "a commit tells one block of a pair": (
        PAIRED, {"change": edit("commit", lambda role, block, reached, number: (
            ("commit", block, reached[:1], number),))}, STUCK),
    "a commit tells one of two that share": (
        MULTICAST, {"change": edit("commit", lambda role, block, reached, number: (
            ("commit", block, tuple(r for r in reached if r[0] == block), number),))}, STUCK),
    "one of two that share is enough": (
        MULTICAST, {"counts": {"drained": 1}}, STAGE),
    "both blocks of a pair count bytes": (
        PAIRED, {"change": lambda role, step: step._replace(actions=(
            ("expect", (0, "filled", step.wait[0][2]), 4), *step.actions))
            if role == "1 loader" and does("load", step) and step.wait else step}, ARRIVALS),
    "the bytes of one block are expected": (
        PAIRED, {"change": edit("expect", lambda role, barrier, loads: (
            ("expect", barrier, 2),))}, STAGE),
    "more bytes are expected than come": (
        PAIRED, {"change": edit("expect", lambda role, barrier, loads: (
            ("expect", barrier, loads + 1),))}, STUCK),
    "a pair's second block counts for itself": (
        PAIRED, {"change": edit("load", lambda role, block, stage, part, use, filled: (
            ("load", block, stage, part, use, (block, *filled[1:])),))}, STUCK),
    "w reaches one block alone": (
        MULTICAST, {"change": edit("load", lambda role, block, stage, part, use, filled: (
            ("load", block, stage, part, use, filled),) if role.startswith(str(block)) else ())},
        STUCK),
    "readers of one block are enough": (
        PAIRED, {"counts": {"read": 1}}, OVERWRITTEN),
    "a reader too many is expected": (PAIRED, {"counts": {"read": 3}}, STUCK),
    "every lane of a reader arrives": (
        SINGLE, {"change": edit("arrive", lambda role, barrier: (("arrive", barrier),) * 2)},
        STUCK),
    "a pair's second block releases its own": (
        PAIRED, {"change": edit("arrive", lambda role, barrier: (
            ("arrive", (int(role[0]), *barrier[1:])),))}, STUCK),
    "a reader leaves a tile out": (
        PAIRED, {"change": skip("1 reader 0", 1)}, ENDED),
    "a loader leaves a stage out": (
        PAIRED, {"change": skip("1 loader", 1)}, STAGE),
    "a multiplier leaves a tile out": (
        SINGLE, {"change": skip("0 multiplier", 3)}, STUCK),
    "a block ends before its last commits": (
        MULTICAST, {"change": omit("tail")}, ENDED),
    "a pair's block ends before its last commits": (
        PAIRED, {"change": omit("tail")}, ENDED),
    "a pair's first block ends before the other's readers": (
        PAIRED, {"change": omit("meet")}, ENDED),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault: str) -> None:
    shape, changes, expected = FAULTS[fault]
    sizes: dict[str, Any] = {"tiles": 3, "steps": 1, "stages": 2 if shape is SINGLE else 1}
    _, faults = explore(Protocol(**shape, **sizes, **changes), expected)
    assert expected in faults
