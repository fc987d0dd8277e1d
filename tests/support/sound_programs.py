"""What every program must keep to: no buffer is overwritten while it lives."""

from itertools import combinations, pairwise

from cutefce.ops.program.steps import Home, Kind, Program


def check(program: Program) -> None:
    """Raise AssertionError if a buffer is overwritten while it lives, or read before it is there.

    A kernel of row sums may load hidden states while the step before it ends (programmatic
    dependent launch, where few rows count): that one must not write them.
    """
    assert program.buffers.keys() == program.lives.keys(), "a buffer that no step names"
    found = [(name, program.buffers[name], program.lives[name]) for name in program.lives]
    for (one, a, (a_first, a_last)), (other, b, (b_first, b_last)) in combinations(found, 2):
        if Home.OUTSIDE in (a.home, b.home):
            continue
        apart = a.home is not b.home or a.end <= b.offset or b.end <= a.offset
        never = a_last < b_first or b_last < a_first
        assert apart or never or not (a.size and b.size), f"{one} and {other} overlap"
    written: set[str] = set()
    for step in program.steps():
        unknown = [name for name in step.reads if name not in written]
        assert not unknown, f"{step.kind.name} reads {unknown} before it is written"
        assert (
            not step.adds
            or step.writes[0] in written
            or program.buffers[step.writes[0]].home is Home.INTO
        ), f"{step.kind.name} adds to nothing"
        written.update(step.writes)
    for before, step in pairwise(program.forward):
        is_early = step.kind is Kind.PROJECT and "logits" in step.reads
        is_late = before.kind is Kind.GATHER and before.writes[0] in step.reads
        assert not (is_early and is_late), "hidden states are gathered right before row sums"
