"""What a program of a divergence is made for, and how it is laid out."""

from dataclasses import dataclass
from functools import cached_property

from cutefce.cute_kernels.problem import Problem


@dataclass(frozen=True)
class DivergenceProblem:
    """Two models' heads, with the same tokens and classes, and the gradients that are wanted."""

    student: Problem
    teacher: Problem
    """Their `tokens` are those that are computed."""
    tokens: int
    """Tokens of the call, computed or not."""
    copied_bytes: int = 0
    """Bytes of the copies of operands that the call makes."""
    scales_rows: bool = False
    """Whether tokens differ in the factors of their gradients."""
    sharded: bool = False
    """Whether the classes are those of one rank of a group."""
    divergence: str = "forward_kl"
    """Which one, with other element-wise steps."""

    @property
    def sides(self) -> tuple[Problem, Problem]:
        """Student and teacher."""
        return self.student, self.teacher

    @cached_property
    def trained(self) -> list[int]:
        """The sides that have gradients: 0 the student, 1 the teacher."""
        sides = enumerate(self.sides)
        return [i for i, p in sides if p.grad_hidden or p.grad_weight or p.grad_bias]

    @property
    def selects(self) -> bool:
        """Whether some tokens are left out."""
        return self.student.tokens < self.tokens

    @cached_property
    def sums(self) -> int:
        """Bytes of an element of logits and sums."""
        return self.student.accumulator_bytes

    @cached_property
    def factor_bytes(self) -> int:
        """Bytes of the factors of one logit."""
        return sum(self.sides[i].item_bytes for i in self.trained)

    @property
    def most_aliased(self) -> int:
        """Tokens whose factors fit into the memory of dW of every trained side; 0 if one has none.

        A window's factors must fit into the rows of dW of its classes.
        """
        trained = [self.sides[i] for i in self.trained]
        if not trained or not all(p.grad_weight for p in trained):
            return 0
        return min(self.student.tokens, *(p.hidden for p in trained))


@dataclass(frozen=True)
class DivergenceLayout:
    """How a divergence is laid out: what plans choose."""

    window: int
    """Classes at a time of the backward, and of a forward of two passes."""
    tile: int
    """Logits of a side at a time."""
    kept: int = 0
    """Tokens whose factors are kept: the first ones."""
    aliased: int = 0
    """Those of them whose factors lie in the memory of dW: the first ones."""
    passes: int = 1
    """1 where a tile has all classes of its tokens; 2 where log-sum-exps come first."""

    def rows(self, tokens: int, columns: int, room: int = 0) -> int:
        """Return how many of the tokens a tile of `columns` classes has, and `room` more logits."""
        rows = max((self.tile + room) // columns, 1)
        return rows if rows >= tokens else rows // ROWS * ROWS or rows


ROWS = 128
"""Tokens that tiles of more have a multiple of: those of a GEMM's tile."""
