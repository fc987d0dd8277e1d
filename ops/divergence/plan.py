"""The plan of a divergence: its problem, and the fastest layout within a budget."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor

from cutefce.cute_kernels.integers import ceil_div
from cutefce.cute_kernels.problem import Problem
from cutefce.cute_kernels.process_cache import process_cache
from cutefce.ops.divergence.lower import lower
from cutefce.ops.divergence.options import Divergence
from cutefce.ops.divergence.problem import DivergenceLayout, DivergenceProblem
from cutefce.ops.divergence.steps import seconds
from cutefce.ops.dtypes import dtype_name
from cutefce.ops.interface.arguments import Sharding
from cutefce.ops.primitives.dispatch import planned_device
from cutefce.ops.primitives.products import is_dense
from cutefce.ops.program.fastest import Costed, fastest_within
from cutefce.ops.program.place import peak
from cutefce.ops.program.predicted_time import device_of
from cutefce.ops.program.steps import Program

WINDOWS = tuple(1 << bits for bits in range(10, 18))
"""Classes of windows: those below the problem's, and all of it."""
TILES, LEAST_TILE = 4, 1 << 20
"""Tiles of logits of a window, and logits of the smallest tile, if a window has as many."""
KEPT_PARTS = 16
"""Tokens are kept in multiples of this part of all."""
MAX_PITCH = (1 << 31) - 1
"""Elements of dW from one window to the next: the kernel of rows counts them in 32 bits."""


@dataclass(frozen=True)
class DivergencePlan(Costed):
    """How one divergence runs."""

    problem: DivergenceProblem
    layout: DivergenceLayout

    @cached_property
    def program(self) -> Program:
        """What runs."""
        return lower(self.problem, self.layout)

    @property
    def tokens(self) -> int:
        """Tokens that are computed."""
        return self.problem.student.tokens

    @property
    def vocab(self) -> int:
        """Classes, of one rank."""
        return self.problem.student.vocab

    @property
    def kept(self) -> int:
        """Tokens whose factors are kept."""
        return self.layout.kept

    @property
    def aliased(self) -> int:
        """Those of them whose factors lie in the memory of dW."""
        return self.layout.aliased

    @property
    def is_one_pass(self) -> bool:
        """Whether the forward computes each logit once."""
        return self.layout.passes == 1

    def __str__(self) -> str:
        text = "one pass" if self.is_one_pass else "two passes"
        for tile in self.program.forward[:1]:  # there is none of no tokens
            text += f" of {tile.rows[1] - tile.rows[0]} tokens x {tile.columns[1]} classes"
        if self.problem.trained:
            tokens = max(self.tokens, 1)
            text += f", {self.kept / tokens:.0%} kept"
            if self.aliased:
                text += f", {self.aliased / tokens:.0%} in the memory of dW"
            text += f", backward of {self.tokens} x {self.layout.window}"
        return f"{text}: {self.predicted(self.budget)}"


@process_cache
def make_plan(problem: DivergenceProblem, budget: int) -> DivergencePlan:
    """Return the fastest plan within `budget` bytes, or the one that takes the least."""
    return fastest_within([*_families(problem)], lambda x: planned(problem, x), budget)


def planned(problem: DivergenceProblem, layout: DivergenceLayout) -> DivergencePlan:
    """Return the plan of a layout."""
    program, device = lower(problem, layout, brief=True), device_of(problem.student.device)
    size, time = peak(program) + problem.copied_bytes, seconds(program, device)
    return DivergencePlan(problem, layout, workspace_bytes=size, seconds=time)


def _families(p: DivergenceProblem) -> Iterator[Sequence[DivergenceLayout]]:
    """Yield layouts of which each takes more memory, and less time, than the one before."""
    tokens, vocab = p.student.tokens, p.student.vocab
    can_keep = bool(p.trained) and not (p.scales_rows or p.sharded)
    most = p.most_aliased * can_keep
    widths = vocab, *(width for width in reversed(WINDOWS) if width < vocab)
    hidden = max((p.sides[i].hidden for i in p.trained), default=0)
    # tiles of all classes take what gradients of weights take later
    has_room = any(p.sides[i].grad_weight for i in p.trained)
    parts = {tokens * part // KEPT_PARTS for part in range(1 + KEPT_PARTS * can_keep)}
    if can_keep:  # windows of what is kept alone take no memory
        yield [DivergenceLayout(vocab, size * tokens // TILES, tokens) for size in sorted(widths)]
    for width in widths:
        rows = min(max(ceil_div(tokens, TILES), LEAST_TILE // width), tokens)
        own = DivergenceLayout(width, max(rows, 1) * width)
        if p.sharded or not has_room:
            yield [replace(own, passes=2)]
        if not p.sharded:
            yield [replace(own, kept=kept) for kept in sorted(parts)]
        if most and (width == vocab or width * hidden <= MAX_PITCH):
            kept = sorted({most, *(x for x in parts if x > most)})
            yield [replace(own, kept=x, aliased=most) for x in kept]


def problem_of(
    heads: Sequence[tuple[Tensor, Tensor]],
    counted: int,
    options: Divergence,
    sharding: Sharding,
) -> DivergenceProblem:
    """Return the problem of a call with h (N, D) and w (V, D) of both sides.

    `counted` of its tokens count.
    """
    problems, copied = [], 0
    for index, (h, w) in enumerate(heads):
        hidden, weight, bias = options.gradients(index)
        sizes = counted, h.shape[1], len(w), dtype_name(h.dtype), planned_device(h)
        problems.append(Problem(*sizes, hidden, weight, grad_bias=bias))
        copied += w.nbytes * (not is_dense(w))
        if counted < len(h) or not is_dense(h):
            copied += counted * h.shape[1] * h.itemsize
    student, teacher = problems
    return DivergenceProblem(
        student,
        teacher,
        len(heads[0][0]),
        copied,
        scales_rows=options.scales_rows,
        sharded=sharding.group is not None,
        divergence=options.divergence,
    )
