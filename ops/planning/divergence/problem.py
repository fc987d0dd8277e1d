"""What a plan of a divergence is made for, and the plan."""

from dataclasses import dataclass, field

from cutefce.cute_kernels.problem import Problem
from cutefce.ops.planning.budget import predicted


@dataclass(frozen=True)
class DivergencePlan:
    """How one divergence runs."""

    tokens: int
    """Tokens that are computed."""
    vocab: int
    """Classes, of one rank."""
    forward_rows: int
    forward_columns: int
    """The forward's tiles; all classes for one pass."""
    rows: int
    columns: int
    """The backward's blocks of tokens, and windows; 0 if there is none."""
    tile_columns: int
    """Classes of its tiles."""
    kept: int
    """Tokens whose factors are kept."""
    aliased: int = 0
    """Those of them whose factors lie in the memory of dW."""
    workspace_bytes: int = 0
    """Predicted peak memory beyond inputs and gradients."""
    cost: int = 0
    """Predicted time, in multiply-adds."""
    seconds: float = 0.0
    """The same of forward and backward; for comparing plans of one problem."""
    sharded: bool = False
    """Whether the classes are those of one rank of a group."""
    budget: int | None = field(default=None, compare=False)
    """Bytes that were asked for, if no plan takes as few."""

    @property
    def is_one_pass(self) -> bool:
        """Whether the forward computes each logit once."""
        return self.forward_columns >= self.vocab and not self.sharded

    def __str__(self) -> str:
        tokens, passes = max(self.tokens, 1), "one pass" if self.is_one_pass else "two passes"
        text = f"{passes} of {self.forward_rows} tokens x {self.forward_columns} classes"
        if self.columns:
            text += f", {self.kept / tokens:.0%} kept"
            if self.aliased:
                text += f", {self.aliased / tokens:.0%} in the memory of dW"
            text += f", backward of {self.rows} x {self.columns}"
        text += f": {predicted(self.workspace_bytes, self.seconds, self.budget)}"
        return text


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
    is_mixture: bool = False
    """Whether it is of both sides from their mixture."""

    @property
    def sides(self) -> tuple[Problem, Problem]:
        """Student and teacher."""
        return self.student, self.teacher

    @property
    def trained(self) -> list[Problem]:
        """The sides that have gradients."""
        return [p for p in self.sides if p.grad_hidden or p.grad_weight or p.grad_bias]

    @property
    def selects(self) -> bool:
        """Whether some tokens are left out."""
        return self.student.tokens < self.tokens

    @property
    def most_aliased(self) -> int:
        """Tokens whose factors fit into the memory of dW of every trained side; 0 if one has none.

        A window's factors must fit into the rows of dW of its classes.
        """
        trained = self.trained
        if not trained or not all(p.grad_weight for p in trained):
            return 0
        return min(self.student.tokens, *(p.hidden for p in trained))

    @property
    def dw_rows(self) -> int:
        """Tokens of a tile of all classes of both sides that fits into the memory of dW."""
        items = [p.hidden * p.item_bytes for p in self.trained if p.grad_weight]
        tiles = 2 // max(len(items), 1) * self.student.accumulator_bytes
        return min(items, default=0) // tiles

    @property
    def factor_bytes(self) -> int:
        """Bytes of the factors of one logit."""
        return sum(p.item_bytes for p in self.trained)
