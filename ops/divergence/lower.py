"""From a problem and a layout to the program of a divergence.

    forward     log-sum-exps and divergences of tokens, and the factors of those that are kept: from
                tiles of all classes, or of some, which are computed twice
    backward    a window of classes after the other: its factors, copied or from tiles of logits,
                then what they add to dX, and their rows of dW

Factors are the derivatives of a token's divergence by its logits, up to a number: what gradients
multiply hidden states and weights with.  Kept ones that lie in the memory of dW, a window's where
the rows of dW of its classes will be, are copied before these rows are written.
"""

from collections.abc import Iterator, Sequence

from cutefce.ops.divergence.options import SIDES
from cutefce.ops.divergence.problem import DivergenceLayout, DivergenceProblem
from cutefce.ops.divergence.steps import DW, DX, STATS, TileKind, scratch_bytes
from cutefce.ops.program.builder import ProgramBuilder
from cutefce.ops.program.place import place
from cutefce.ops.program.steps import Home, Kind, Program, Range, Step

TOKEN_WORDS = 24
"""Numbers of a token beside buffers: statistics, losses, factors and upstream gradients."""
MIN_SCALED_NUMEL = 1 << 22
"""Elements of a weight whose gradient has enough tiles for all SMs."""


def rounds_scaled(device: str, dtype: str, weight_numel: int) -> bool:
    """Whether dW may be a product of factors and scaled hidden states, rounded once.

    That takes no window in the dtype of sums.  A CPU's GEMM sums in 16 bits, and so may one of few
    tiles on a GPU, which splits its sums.
    """
    return device == "cuda" and dtype == "bfloat16" and weight_numel >= MIN_SCALED_NUMEL


def lower(p: DivergenceProblem, x: DivergenceLayout, *, brief: bool = False) -> Program:
    """Return the program of a divergence, with a place for every buffer.

    A `brief` one has one of many equal tiles and windows, with the memory of all.
    """
    lowering = _Lowering(p, x, brief=brief)
    if lowering.tokens:
        lowering.forward()
    if p.trained:
        lowering.backward()
    return place(lowering.finished())


class _Lowering(ProgramBuilder):
    """The steps of a divergence and of its gradients."""

    def __init__(self, p: DivergenceProblem, x: DivergenceLayout, *, brief: bool) -> None:
        program = Program(p, token_bytes=p.tokens * TOKEN_WORDS * p.sums)
        for i in p.trained:
            side, item = p.sides[i], p.sides[i].item_bytes
            program.gradients[DX[i]] = p.tokens * side.hidden * item * side.grad_hidden
            program.gradients[DW[i]] = side.vocab * side.hidden * item * side.grad_weight
        super().__init__(program, brief=brief)
        self.p, self.x = p, x
        self.tokens, self.vocab = p.student.tokens, p.student.vocab
        self.every, self.width = (0, self.tokens), min(x.window, self.vocab)
        self.is_whole = x.kept == self.tokens > 0 == x.aliased
        """Whether the kept factors are a matrix of all tokens and classes."""

    def scratch(self, step: Step) -> int:
        return scratch_bytes(self.p, step)

    def is_output(self, name: str) -> bool:
        return name == "stats" or name.split()[1] in ("dx", "dw")

    def cut(self, first: int, last: int, size: int) -> Iterator[Range]:
        """Yield ranges of `size`, the last one shorter; of many in a brief program, three."""
        return self.some((start, min(start + size, last)) for start in range(first, last, size))

    # -- the forward ------------------------------------------------------------------------------

    def forward(self) -> None:
        x = self.x
        self.buffer("stats", STATS, self.tokens, self.p.sums, Home.STATS)
        if x.passes == 2:
            self.two_passes()
            return
        size = self.forward_rows()
        for first, last in ((x.kept, self.tokens), (x.aliased, x.kept), (0, x.aliased)):
            for rows in self.cut(first, last, size):
                self.tile(TileKind.ROWS, rows, (0, self.vocab), ("stats", *self.kept(rows)))

    def forward_rows(self) -> int:
        """Return the tokens of a tile: in the room that the backward and gradients take, too."""
        dw = {DW[i] for i in self.p.trained} if self.x.aliased else set()
        later = sum(size for home, size in self.program.gradients.items() if home not in dw)
        for i in self.p.trained:
            side, classes = self.p.sides[i], 0 if self.is_whole else self.width
            later += self.tokens * classes * side.item_bytes
            if side.grad_hidden and not self.sums_in_dx(i):
                later += self.tokens * side.hidden * self.p.sums
        return self.x.rows(self.tokens, self.vocab, later // (2 * self.p.sums))

    def tile(
        self, kind: TileKind, rows: Range, columns: Range, out: Sequence[str], *reads: str
    ) -> None:
        """Emit what is made of a tile of logits."""
        count = (rows[1] - rows[0]) * (columns[1] - columns[0])
        name = "logits again" if kind is TileKind.FACTORS else "logits"
        logits = [self.buffer(f"{side} {name}", 1, count, self.p.sums) for side in SIDES]
        self.emit(kind, reads, (*logits, *out), rows, columns)

    def kept(self, rows: Range, columns: Range | None = None) -> list[str]:
        """Name the memory of kept factors of some tokens: in dW that of each window, or of one."""
        names, x = list[str](), self.x
        for i in self.p.trained:
            windows = [columns] if columns else [*self.cut(0, self.vocab, self.width)]
            for first, last in windows if rows[0] < x.aliased else ():
                at = self.rows_of_dw(i, first)
                names.append(self.of_side(i, f"in dW {first}", x.aliased, last - first, *at))
            if x.aliased < rows[1] and rows[0] < x.kept:
                names.append(self.of_side(i, "kept", x.kept - x.aliased, self.vocab))
        return names

    def of_side(
        self, i: int, name: str, rows: int, columns: int, home: Home | None = None, at: int = 0
    ) -> str:
        """Name a buffer of a side, in its dtype."""
        item = self.p.sides[i].item_bytes
        return self.buffer(f"{SIDES[i]} {name}", rows, columns, item, home, at)

    def rows_of_dw(self, i: int, first: int) -> tuple[Home, int]:
        """Return the memory of a side's rows of dW from `first` on."""
        return DW[i], first * self.p.sides[i].hidden * self.p.sides[i].item_bytes

    def two_passes(self) -> None:
        for kind in (TileKind.ADD_EXPS, TileKind.ADD_TERMS):
            for rows in self.cut(0, self.tokens, self.x.rows(self.tokens, self.width)):
                for columns in self.cut(0, self.vocab, self.width):
                    self.tile(kind, rows, columns, ("stats",))
            if kind is TileKind.ADD_EXPS:
                self.emit(TileKind.FINISH_LSES, (), ("stats",), self.every)
        if self.p.sharded:
            self.emit(Kind.ALL_REDUCE, (), ("stats",), self.every)

    # -- the backward -----------------------------------------------------------------------------

    def backward(self) -> None:
        self.steps = self.program.backward
        for i in self.p.trained:
            if self.scaled(i):
                self.emit(Kind.GATHER, (), self.scaled(i), self.every)
        for columns in self.cut(0, self.vocab, self.width):
            factors = self.kept(self.every) if self.is_whole else self.window(columns)
            for i, name in zip(self.p.trained, factors, strict=True):
                self.products(i, name, columns)
        for i in self.p.trained:
            if self.p.sides[i].grad_hidden:
                self.emit(Kind.FINISH_HIDDEN, (self.hidden_sums(i),), (self.dx(i),), self.every)

    def scaled(self, i: int) -> tuple[str, ...]:
        """Name the scaled hidden states, in the memory of dX before that is written; or none."""
        side = self.p.sides[i]
        if not side.grad_weight:
            return ()
        if not rounds_scaled(side.device, side.dtype, side.vocab * side.hidden):
            return ()
        home = DX[i] if side.grad_hidden and not self.sums_in_dx(i) else None
        return (self.of_side(i, "scaled", self.tokens, side.hidden, home),)

    def window(self, columns: Range) -> list[str]:
        """Emit the factors of all tokens of a window."""
        p, kept, names = self.p, self.x.kept, list[str]()
        for i in p.trained:
            count = self.tokens * (columns[1] - columns[0])
            names.append(self.of_side(i, "window", 1, count))
        if kept:
            self.emit(TileKind.COPY, self.kept((0, kept), columns), names, (0, kept), columns)
        size = self.x.rows(self.tokens - kept, self.width)
        for rows in self.cut(kept, self.tokens, size):
            self.tile(TileKind.FACTORS, rows, columns, names, "stats")
        return names

    def products(self, i: int, factors: str, columns: Range) -> None:
        """Emit what a window of factors adds to the gradients of a side."""
        side, (first, last) = self.p.sides[i], columns
        if side.grad_hidden:
            sums = (self.hidden_sums(i),)
            self.emit(Kind.GEMM_HIDDEN, (factors,), sums, self.every, columns, adds=first > 0)
        if side.grad_weight:
            shape, scaled = (last - first, side.hidden), self.scaled(i)
            out = [self.of_side(i, f"dw {first}", *shape, *self.rows_of_dw(i, first))]
            if not scaled and side.item_bytes < self.p.sums:
                out.append(self.buffer(f"{SIDES[i]} window sums", *shape, self.p.sums))
            self.emit(Kind.GEMM_WEIGHT, (factors, *scaled), out, self.every, columns)
        if side.grad_bias:
            self.emit(Kind.BIAS, (factors,), (), self.every, columns)

    def sums_in_dx(self, i: int) -> bool:
        """Whether the sums of dX lie in its memory."""
        p = self.p
        return p.sides[i].item_bytes == p.sums and not (p.selects or p.sharded)

    def hidden_sums(self, i: int) -> str:
        shape = self.tokens, self.p.sides[i].hidden, self.p.sums
        return self.dx(i) if self.sums_in_dx(i) else self.buffer(f"{SIDES[i]} sums", *shape)

    def dx(self, i: int) -> str:
        return self.of_side(i, "dx", self.p.tokens, self.p.sides[i].hidden, DX[i])
