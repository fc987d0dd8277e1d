"""The model of the Blackwell kernel's synchronization has no faults; injected faults are found."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.blackwell.protocol import Protocol, Step, explore
from tests.support.tiers import rest_slow

TWO_CTA: dict[str, Any] = {"blocks": 2}
SINGLE_CTA: dict[str, Any] = {"blocks": 1}

STUCK = "all wait for each other"
STAGE = "a stage does not hold what is multiplied"
OVERWRITTEN = "an accumulator is overwritten before it is read"
LOGITS = "logits are not those of the tile"
ARRIVALS = "a barrier gets more arrivals than it expects"
ENDED = "something lands in a block that has ended"

Change = Callable[[str, Step], Step | list[Step]]


SIZES: list[dict[str, Any]] = [
    {**SINGLE_CTA, "tiles": 3, "k_tiles": 3, "stages": 2},
    {**TWO_CTA, "tiles": 3, "k_tiles": 1, "stages": 1, "epilogue_warps": 2},
    {**SINGLE_CTA, "tiles": 5, "k_tiles": 2, "stages": 3, "epilogue_warps": 2},
    {**TWO_CTA, "tiles": 3, "k_tiles": 1, "stages": 2},
    {**TWO_CTA, "tiles": 2, "k_tiles": 2, "stages": 2},
]


@pytest.mark.parametrize("sizes", rest_slow(SIZES))
def test_no_interleaving_has_a_fault(sizes: dict[str, Any]) -> None:
    states, faults = explore(Protocol(**sizes))
    assert not faults
    assert states > 500


def waits(kind: str, step: Step) -> bool:
    return step.wait is not None and step.wait[0][1] == kind


def does(name: str, step: Step) -> bool:
    return any(action[0] == name for action in step.actions)


def edit(name: str, change: Callable[..., tuple[Any, ...]]) -> Change:
    """Replace actions called `name` by `change(role, *operands)`."""

    def apply(role: str, step: Step) -> Step:
        edited = (change(role, *a[1:]) if a[0] == name else (a,) for a in step.actions)
        return step._replace(actions=tuple(action for each in edited for action in each))

    return apply


def never_wait(kind: str) -> Change:
    return lambda role, step: step._replace(wait=None) if waits(kind, step) else step


def one_phase(kind: str) -> Change:
    """Always wait for the phase of a barrier's first use."""

    def apply(role: str, step: Step) -> Step:
        if step.wait is None or not waits(kind, step):
            return step
        return step._replace(wait=(step.wait[0], 0 if kind in ("filled", "computed") else 1))

    return apply


def skip(role: str, number: int) -> Change:
    """Omit step `number` of a role."""
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


# sizes, changes, and the expected fault
FAULTS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "stages are filled without waiting": (
        SINGLE_CTA, {"change": never_wait("drained")}, STAGE),
    "MMAs do not wait for loads": (
        SINGLE_CTA, {"change": never_wait("filled")}, STAGE),
    "MMAs do not wait for the epilogue": (
        SINGLE_CTA, {"change": never_wait("read")}, OVERWRITTEN),
    "the epilogue does not wait for MMAs": (
        TWO_CTA, {"change": never_wait("computed")}, LOGITS),
    "a load warp ignores the phase": (
        SINGLE_CTA, {"change": one_phase("drained")}, STAGE),
    "an MMA warp ignores the stages' phase": (
        SINGLE_CTA, {"change": one_phase("filled")}, STAGE),
    "an MMA warp ignores the accumulators' phase": (
        SINGLE_CTA, {"change": one_phase("read")}, OVERWRITTEN),
    "an epilogue warp ignores the phase": (
        SINGLE_CTA, {"change": one_phase("computed")}, LOGITS),
    "a commit precedes its MMAs": (
        SINGLE_CTA, {"change": lambda role, step: reorder(role, step) if does("product", step)
                 else step}, LOGITS),
    "an accumulator is released before it is read": (
        SINGLE_CTA, {"change": release_first}, OVERWRITTEN),
    "an epilogue warp never releases": (
        SINGLE_CTA, {"change": edit("arrive", lambda role, barrier: ())}, STUCK),
    "a stage is released without waiting for its MMAs": (
        SINGLE_CTA, {"change": edit("commit", lambda role, block, reached, number: tuple(
            ("arrive", barrier) for barrier in reached))}, STAGE),
    "a commit reaches one block of a pair": (
        TWO_CTA, {"change": edit("commit", lambda role, block, reached, number: (
            ("commit", block, reached[:1], number),))}, STUCK),
    "both blocks of a pair expect bytes": (
        TWO_CTA, {"change": lambda role, step: step._replace(actions=(
            ("expect", (0, "filled", step.wait[0][2]), 4), *step.actions))
            if role == "1 load" and does("load", step) and step.wait else step}, ARRIVALS),
    "the bytes of one block are expected": (
        TWO_CTA, {"change": edit("expect", lambda role, barrier, loads: (
            ("expect", barrier, 2),))}, STAGE),
    "too many bytes are expected": (
        TWO_CTA, {"change": edit("expect", lambda role, barrier, loads: (
            ("expect", barrier, loads + 1),))}, STUCK),
    "a pair's second block counts for itself": (
        TWO_CTA, {"change": edit("load", lambda role, block, stage, part, use, filled: (
            ("load", block, stage, part, use, (block, *filled[1:])),))}, STUCK),
    "the epilogue warps of one block release for both": (
        TWO_CTA, {"counts": {"read": 1}}, OVERWRITTEN),
    "an epilogue warp too many is expected": (TWO_CTA, {"counts": {"read": 3}}, STUCK),
    "every lane of an epilogue warp arrives": (
        SINGLE_CTA, {"change": edit("arrive", lambda role, barrier: (("arrive", barrier),) * 2)},
        STUCK),
    "a pair's second block releases its own accumulator": (
        TWO_CTA, {"change": edit("arrive", lambda role, barrier: (
            ("arrive", (int(role[0]), *barrier[1:])),))}, STUCK),
    "an epilogue warp skips a tile": (
        TWO_CTA, {"change": skip("1 epilogue 0", 1)}, ENDED),
    "a load warp skips a stage": (
        TWO_CTA, {"change": skip("1 load", 1)}, STAGE),
    "an MMA warp skips a tile": (
        SINGLE_CTA, {"change": skip("0 mma", 3)}, STUCK),
    "a pair's block ends before its last commits": (
        TWO_CTA, {"change": omit("tail")}, ENDED),
    "a pair's first block ends before the other's epilogue": (
        TWO_CTA, {"change": omit("meet")}, ENDED),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_detected(fault: str) -> None:
    shape, changes, expected = FAULTS[fault]
    sizes: dict[str, Any] = {"tiles": 3, "k_tiles": 1, "stages": 2 if shape is SINGLE_CTA else 1}
    _, faults = explore(Protocol(**shape, **sizes, **changes), expected)
    assert expected in faults
