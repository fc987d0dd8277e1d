"""The parts of a program: buffers, steps that read and write them, and the program itself."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any

Range = tuple[int, int]
"""First and last, which is excluded, of rows or columns."""


class Home(Enum):
    """The memory that a buffer lies in."""

    __hash__ = object.__hash__  # there is one object of each: that of names takes time

    SAVED = "what lives from the forward to the backward"
    FORWARD = "scratch of the forward"
    BACKWARD = "scratch of the backward"
    STATS = "the statistics of tokens, by which a backward finds what its forward saved"
    DX = "dX"
    DW = "dW"
    DBIAS = "the gradient of the bias"
    SECOND_DX = "dX of a second head"
    SECOND_DW = "dW of a second head"
    INTO = "the caller's buffer for dW"
    OUTSIDE = "tensors that primitives allocate"


ARENAS = Home.SAVED, Home.FORWARD, Home.BACKWARD
GRADIENTS = Home.DX, Home.DW, Home.DBIAS, Home.SECOND_DX, Home.SECOND_DW


class Kind(Enum):
    """What a step does; its rows are tokens, its columns are classes.

    `r` are logits of targets, `e` exponentials relative to a reference and 0 at targets, `s` the
    factors of tokens; see `ops.primitives.portable_projection` for the formulas.
    """

    __hash__ = object.__hash__

    SELECT = "find the rows that count, and how many they are"
    CLASS_ROW = "sum the rows of the weight, for losses of all classes"
    GATHER = "copy hidden states in the order of the rows that count, times s if that is read"
    TARGET_LOGIT = "r of each row"
    CLEAR = "zeros in the exponentials that dW's product reads even if no row of a chunk counts"
    PROJECT = "row sums of e over columns, and e where it is stored"
    REDUCE = "statistics of rows from their sums; references of far rows move"
    LOSS = "the loss from the statistics"
    COEFFICIENTS = "factors of rows, and of probabilities, from statistics and upstream gradient"
    ENTRIES = "factors of exponentials, and the terms of other target classes among them"
    SCALE_EXPS = "multiply exponentials that dW's product reads by s, and the terms in them"
    LIST_TARGETS = "the tokens of each class, for the terms of targets in dW"
    GEMM_HIDDEN = "e @ w, written or added to the sums of dX"
    GEMM_WEIGHT = "eᵀ @ hidden states, written or added; at last the terms of targets, rounded"
    BIAS = "column sums of e, written or added; at last the terms of targets"
    RESCALE = "divide sums of dX by those of exponentials, where probabilities follow"
    KEEP_HIDDEN = "round sums of dX of a chunk to what is kept of them"
    FINISH_HIDDEN = "factors and the terms of targets; dX, rounded"
    FINISH_WEIGHT = "sums over chunks times the upstream gradient: dW, rounded or added"
    FINISH_BIAS = "the gradient of the bias, rounded"
    ALL_REDUCE = "r of all ranks, of which one has each target; or divergences"
    ALL_GATHER = "row sums of all ranks"


@dataclass(frozen=True)
class Buffer:
    """A matrix of `rows` x `columns` elements of `item` bytes, `offset` bytes into its home."""

    rows: int
    columns: int
    item: int
    home: Home | None = None
    """None for an arena: `place` knows which one, and where."""
    offset: int = 0

    @property
    def size(self) -> int:
        """Bytes."""
        return self.rows * self.columns * self.item

    @property
    def end(self) -> int:
        """The first byte behind it."""
        return self.offset + self.size


@dataclass(frozen=True)
class Step:
    """One operation: the interpreter calls one function for it, which launches kernels or none."""

    kind: Enum
    """A `Kind`, or one that another lowering adds."""
    reads: tuple[str, ...]
    """Names of buffers; a call's inputs are read without being named."""
    writes: tuple[str, ...]
    rows: Range
    columns: Range = (0, 0)
    adds: bool = False
    """Whether it adds to what it writes."""
    repairs: bool = False
    """Whether it does the work of far rows again: those whose reference REDUCE has moved.

    Kernels repair the row blocks where one has; in a window of a chunk they compute all rows, if
    one has.  Otherwise a launch exits at once.
    """
    final: bool = False
    """Of dW and the bias: whether the terms of targets and all classes are added too.  Of factors:
    whether they are those of probabilities.  Of dX's sums: whether they are rounded."""
    times: int = 1
    """How many like it there are, in a program that is made to be compared with others."""

    @cached_property
    def exps(self) -> str | None:
        """The name of the exponentials that it reads or writes, if there are any."""
        return self._named("exps")

    @cached_property
    def states(self) -> str | None:
        """The name of the hidden states that it reads; None for those of the call."""
        return self._named("states", "scaled", "plain")

    @cached_property
    def low(self) -> str | None:
        """The name of the low bits of sums that it reads or writes, if there are any."""
        return self._named("low")

    def _named(self, *prefixes: str) -> str | None:
        names = (*self.reads, *self.writes)
        return next((name for name in names if name.startswith(prefixes)), None)


@dataclass
class Program:
    """The steps of a call, and the buffers between them."""

    problem: Any
    """What was lowered."""
    in_chunks: bool = False
    """Whether the forward has chunks of tokens; it forms their gradients, if any are wanted."""
    low_bits: int = 0
    """Bits of packed sums beside 16."""
    buffers: dict[str, Buffer] = field(default_factory=dict)
    forward: list[Step] = field(default_factory=list)
    backward: list[Step] = field(default_factory=list)
    lives: dict[str, Range] = field(default_factory=dict)
    """The first and the last step of each buffer, counted from the first of the forward."""
    arenas: dict[Home, int] = field(default_factory=dict)
    """Bytes of each arena."""
    gradients: dict[Home, int] = field(default_factory=dict)
    """Bytes of each gradient that is returned."""
    token_bytes: int = 0
    """Bytes of what a call holds of its tokens beside buffers."""

    def steps(self) -> Iterator[Step]:
        """Yield all steps."""
        yield from self.forward
        yield from self.backward

    @cached_property
    def homes(self) -> set[Home | None]:
        """Which memory has buffers."""
        return {buffer.home for buffer in self.buffers.values()}

    @cached_property
    def homes_of_forward(self) -> set[Home | None]:
        """Which memory has buffers that the forward writes."""
        middle, lives = len(self.forward), self.lives
        return {b.home for name, b in self.buffers.items() if lives[name][0] < middle}

    @cached_property
    def scales_exps(self) -> bool:
        """Whether exponentials get the factors of tokens, instead of hidden states."""
        return any(step.kind is Kind.SCALE_EXPS for step in self.steps())

    @cached_property
    def is_spent(self) -> bool:
        """Whether a backward overwrites what the forward has saved, or hands it out as a gradient.

        Another backward then has to run the forward's steps again; so it does where these add to
        the caller's buffer.
        """
        if any(self.buffers[n].home is Home.INTO for step in self.forward for n in step.writes):
            return True
        written = {name for step in self.backward for name in step.writes}
        middle = len(self.forward)
        return any(
            name in written or self.buffers[name].home in GRADIENTS
            for name, (first, last) in self.lives.items()
            if first < middle <= last and self.buffers[name].home is not Home.STATS
        )
