"""From a problem and a layout to a program: loops that emit steps."""

from collections.abc import Iterator, Sequence

from cutefce.cute_kernels.integers import round_up
from cutefce.cute_kernels.workspace import NUM_STATS, low_bytes
from cutefce.ops.program.builder import ProgramBuilder
from cutefce.ops.program.layout import Layout, Window, alike, chunks_of, scales_exps, windows_of
from cutefce.ops.program.place import place, token_bytes
from cutefce.ops.program.predicted_memory import scratch
from cutefce.ops.program.problem import LossProblem
from cutefce.ops.program.step_memory import partial_sums, targets_bytes
from cutefce.ops.program.steps import Home, Kind, Program, Range, Step

ORDER_BYTES = 16
"""Bytes of a token's place and of its target, in the order of the rows that count."""
FACTORS = 4
"""Numbers of a token: of its exponentials, target and every class, and their reference."""


class Lowering(ProgramBuilder):
    """The steps of a loss and of its gradients.

    A `brief` program has one of many equal chunks and windows, with the memory of all: it serves to
    choose, not to run.
    """

    def __init__(self, p: LossProblem, x: Layout, *, brief: bool = False) -> None:
        program = Program(p, x.in_chunks, x.low_bits)
        program.gradients, program.token_bytes = p.gradient_bytes(), token_bytes(p)
        super().__init__(program, brief=brief)
        self.p, self.x = p, x
        self.every = (0, p.tokens)
        self.in_chunks = x.in_chunks
        packs = self.in_chunks and p.accumulates_wider and p.needs_gradients
        assert x.low_bits or not packs, "sums are packed"
        self.parts: list[str] = []
        """Partial sums, which tell until the loss which rows are far."""
        self.has_windows = self.in_chunks and x.window < p.vocab
        """Whether a chunk has its columns one window after the other, which a frozen weight can."""
        self.windows = list(windows_of(p, x))
        if brief:
            self.windows = list(alike(self.windows))
        self.scales_exps = scales_exps(p, x)
        self.order = ("order",) if p.selects else ()
        self.class_row = ("class_row",) if p.every_class else ()
        self.packs_hidden = p.grad_hidden and p.rounds_hidden and x.low_bits > 0
        """Whether dX's sums over windows are packed."""
        self.sums_in_dx = p.grad_hidden and not p.selects
        self.sums_in_dx &= self.packs_hidden or p.dx_item == p.accumulator_bytes
        """Whether they, or their upper halves, lie in the memory of dX."""

    def lowered(self) -> Program:
        """Return the program of the call, with a place for every buffer."""
        self.forward()
        if self.p.needs_gradients:
            self.backward()
        return place(self.finished())

    def outside(self, name: str, rows: int, columns: int, item: int) -> str:
        """Name a tensor that a step allocates: values of tokens, their lists, or the class row."""
        return self.buffer(name, rows, columns, item, Home.OUTSIDE)

    def scratch(self, step: Step) -> int:
        """Return the bytes that a step takes while it runs, beside its buffers."""
        return scratch(self.p, self.x, step)

    def is_output(self, name: str) -> bool:
        """Whether a buffer is no scratch in the memory of a gradient."""
        return not name.startswith(("exps", "scaled", "states", "plain"))

    def each(self, windows: Sequence[Window]) -> Iterator[Window]:
        """Yield windows; meanwhile `times` says how many like one a step is for."""
        times = self.times
        for n in windows:
            self.times = times * n.times
            yield n
        self.times = times

    # -- names of what several steps share --------------------------------------------------------

    def dx(self) -> str:
        """Name dX."""
        return self.buffer("dx", self.p.tokens, self.p.hidden, self.p.dx_item, Home.DX)

    def stats(self) -> str:
        """Name the statistics of tokens."""
        return self.buffer("stats", self.p.tokens, NUM_STATS, self.p.accumulator_bytes, Home.STATS)

    def exps(self, n: Window) -> str:
        """Name the exponentials of a window; those that are computed again share a buffer.

        It is that of the stored ones, whose products are formed by then.
        """
        name = f"exps of {n.columns[0]}"
        if n.home is None and not n.is_stored:
            name = next((self.exps(kept) for kept in self.stored if kept.home is None), "exps")
        columns = n.width if n.home is not None else round_up(n.width, self.p.block)
        tokens = self.x.chunk if self.in_chunks else self.p.tokens
        return self.buffer(name, tokens, columns, self.p.item_bytes, n.home, n.offset)

    def gather(
        self, name: str, rows: Range, factors: Sequence[str] = (), home: Home | None = None
    ) -> tuple[str, ...]:
        """Emit a copy of hidden states; without selection or factors the input itself is read."""
        if not (self.p.selects or factors):
            return ()
        tokens = self.x.chunk if self.in_chunks else self.p.tokens
        self.buffer(name, tokens, self.p.hidden, self.p.item_bytes, home)
        self.emit(Kind.GATHER, (*self.order, *factors), (name,), rows)
        return (name,)

    def factors(self, rows: Range, *names: str, final: bool = False) -> tuple[str, ...]:
        """Emit the factors of rows; those of probabilities too, or alone if `final`."""
        for name in names:
            self.outside(name, self.p.tokens, FACTORS, self.p.accumulator_bytes)
        self.emit(Kind.COEFFICIENTS, (*self.order, self.stats()), names, rows, final=final)
        return names

    def low(self, name: str, rows: int, bits: int | None = None) -> tuple[str, ...]:
        """Name the low bits of `rows` sums; none where sums have their own dtype."""
        if not (self.p.accumulates_wider and self.x.low_bits):
            return ()
        return (self.buffer(name, rows, low_bytes(self.p.hidden, bits or self.x.low_bits), 1),)

    # -- the forward ------------------------------------------------------------------------------

    def forward(self) -> None:
        """Emit the steps of the forward."""
        p = self.p
        if p.selects:
            self.outside("order", p.tokens + 1, 1, ORDER_BYTES)
            self.emit(Kind.SELECT, (), ("order",), self.every)
        if p.every_class:
            self.outside("class_row", 1, p.hidden + 1, p.accumulator_bytes)
            self.emit(Kind.CLASS_ROW, (), ("class_row",), self.every)
        if self.in_chunks:
            for rows in self.some(chunks_of(p, self.x)):
                self.chunk(rows)
        else:
            states = self.states(self.every)
            self.statistics(self.every, states, self.stored)
        self.emit(Kind.LOSS, (*self.order, self.stats(), *self.parts), (), self.every)

    def states(self, rows: Range) -> tuple[str, ...]:
        """Emit hidden states and their targets' logits.

        In this order, as kernels of row sums may read the former before the step before has ended.
        """
        p, states = self.p, self.gather("states", rows)
        self.outside("logits", p.tokens, 2 if p.every_class else 1, p.accumulator_bytes)
        self.emit(Kind.TARGET_LOGIT, (*self.order, *self.class_row), ("logits",), rows)
        if p.ranks:
            self.emit(Kind.ALL_REDUCE, ("logits",), ("logits",), rows)
        return states

    def sums_of(self, n: Window, rows: Range) -> str:
        """Name the partial sums of a window."""
        count = n.times * partial_sums(self.p, rows[1] - rows[0], n.width)
        return self.outside(
            f"partial of {n.columns[0]}", self.x.chunk, count, self.p.accumulator_bytes
        )

    def statistics(self, rows: Range, states: Sequence[str], windows: Sequence[Window]) -> None:
        """Emit the row sums of all columns, the exponentials of `windows`, and the statistics.

        Several windows of a chunk have one memory: their products are added at once, and again
        where references move.
        """
        done, parts = windows[-1].columns[1] if windows else 0, list[str]()
        rest = [Window((done, self.p.vocab), False)] if done < self.p.vocab or not windows else []
        for n in self.each([*windows, *rest]):
            parts.append(self.sums_of(n, rows))
            out = (parts[-1],) if n in rest else (parts[-1], self.exps(n))
            reads = (*states, "logits", *self.order)
            self.emit(Kind.PROJECT, reads, out, rows, n.columns)
            if self.has_windows:
                self.add_hidden(rows, n)
        self.reduce(rows, parts, states if self.p.outputs.searches else ())
        for n in self.each(windows):
            self.project_again(rows, n, states, self.stats(), repairs=True)
            if self.has_windows:
                self.add_hidden(rows, n, repairs=True)

    def reduce(self, rows: Range, parts: Sequence[str], states: Sequence[str] = ()) -> None:
        """Emit the statistics of rows from partial sums; largest classes need hidden states."""
        self.parts = [*dict.fromkeys((*self.parts, *parts))]
        if self.p.ranks:
            shares = self.outside("shares", self.x.chunk, self.p.ranks, self.p.accumulator_bytes)
            self.emit(Kind.ALL_GATHER, parts, (shares,), rows)
            parts = (shares,)
        self.emit(Kind.REDUCE, (*self.order, "logits", *parts, *states), (self.stats(),), rows)

    def project_again(
        self,
        rows: Range,
        n: Window,
        states: Sequence[str],
        reference: str,
        *,
        repairs: bool = False,
    ) -> None:
        """Emit the exponentials of a window relative to a reference that is known by now."""
        reads = (*states, reference, *self.order)
        self.emit(Kind.PROJECT, reads, (self.exps(n),), rows, n.columns, repairs=repairs)

    # -- gradients in the forward -----------------------------------------------------------------

    def chunk(self, rows: Range) -> None:
        """Emit a chunk: its statistics, and what it adds to the gradients."""
        p = self.p
        if p.selects and p.grad_weight and (rows[0] == 0 or rows[1] == p.tokens):
            self.emit(Kind.CLEAR, (), (self.exps(self.windows[0]),), rows)
        states = self.states(rows)
        self.statistics(rows, states, self.windows)
        if not p.needs_gradients:
            return
        n = self.windows[0]
        if p.soft and self.has_windows:
            sums = self.hidden_sums()
            self.emit(Kind.ENTRIES, (*self.order, self.stats(), *sums), sums, rows)
        factors: tuple[str, ...] = ()
        if p.grad_weight or p.grad_bias:
            factors = self.factors(rows, "factors")
        if p.soft and not self.has_windows:
            self.entries(rows, n)
        if p.grad_bias:
            self.add_bias(rows, n, *factors)
        if p.grad_hidden and not self.has_windows:
            self.add_hidden(rows, n)
        if p.grad_hidden:  # what is kept of a chunk's sums until the factors of tokens are known
            early = factors if p.adds_in_forward else ()
            reads = (*self.order, *self.hidden_sums(), *early)
            kept = self.kept_hidden()
            self.emit(Kind.KEEP_HIDDEN, reads, kept, rows, final=p.adds_in_forward)
        if p.grad_weight:
            scaled = states
            if self.scales_exps:
                self.scale_exps(rows, n, *factors)
            else:
                scaled = self.gather("scaled", rows, factors)
            if rows[1] == p.tokens:
                self.list_targets((), *factors)
            every = states if p.every_class else ()
            self.add_weight(rows, n, scaled, factors[0], every)

    def kept_hidden(self) -> tuple[str, ...]:
        """Name what is kept of dX: it, or sums with their upper halves in its memory."""
        rounded = self.p.adds_in_forward or self.p.dx_item == self.p.accumulator_bytes
        # a sum over all classes is rounded once
        few = self.p.few_low_bits
        return (self.dx(), *(() if rounded else self.low("low of dx", self.p.tokens, few)))

    # -- products ---------------------------------------------------------------------------------

    def hidden_sums(self) -> tuple[str, ...]:
        """Name the sums of dX: in the memory of dX, or in scratch."""
        p = self.p
        if self.in_chunks:
            return (self.buffer("sums", self.x.chunk, p.hidden, p.accumulator_bytes),)
        low = self.low("low of sums", p.tokens) if self.packs_hidden else ()
        item = p.item_bytes if self.packs_hidden else p.accumulator_bytes
        own = self.dx() if self.sums_in_dx else self.buffer("sums", p.tokens, p.hidden, item)
        return (own, *low)

    def add_hidden(self, rows: Range, n: Window, *, repairs: bool = False) -> None:
        """Emit a product of dX's sums, of which the first one is written."""
        reads, sums, adds = (*self.order, self.exps(n)), self.hidden_sums(), n.columns[0] > 0
        self.emit(Kind.GEMM_HIDDEN, reads, sums, rows, n.columns, adds=adds, repairs=repairs)

    @property
    def stored(self) -> list[Window]:
        """The windows whose exponentials the forward stores."""
        return [n for n in self.windows if n.is_stored]

    def entries(self, rows: Range, n: Window, *factors: str) -> None:
        """Emit the terms of other target classes among exponentials."""
        exps = self.exps(n)
        self.emit(
            Kind.ENTRIES, (*self.order, self.stats(), exps, *factors), (exps,), rows, n.columns
        )

    def scale_exps(self, rows: Range, n: Window, factors: str) -> None:
        """Emit the factors of tokens, to exponentials."""
        exps = self.exps(n)
        self.emit(Kind.SCALE_EXPS, (*self.order, exps, factors), (exps,), rows, n.columns)

    def add_bias(self, rows: Range, n: Window, factors: str) -> None:
        """Emit the sums of the bias' gradient."""
        sums = self.buffer("sums of bias", 1, self.p.vocab, self.p.accumulator_bytes)
        flags = {"adds": rows[0] > 0, "final": rows[1] == self.p.tokens}
        reads = (*self.order, self.exps(n), factors)
        self.emit(Kind.BIAS, reads, (sums,), rows, n.columns, **flags)

    def list_targets(self, states: Sequence[str], factors: str) -> None:
        """Emit the lists of the tokens of each class."""
        # plain torch adds the targets' part of each chunk
        is_late = self.p.is_fused or not self.in_chunks
        self.outside("listed", 1, is_late * targets_bytes(self.p, self.p.tokens), 1)
        self.emit(Kind.LIST_TARGETS, (*self.order, *states, factors), ("listed",), self.every)

    def add_weight(
        self,
        rows: Range,
        n: Window,
        states: Sequence[str],
        factors: str,
        every: Sequence[str] = (),
    ) -> None:
        """Emit the product of dW's rows, of which the last chunk adds the terms of targets.

        A chunk sums the hidden states `every`, too, for the terms of all classes.
        """
        p = self.p
        flags = {"adds": rows[0] > 0, "final": rows[1] == p.tokens}
        listed = ("listed",) if flags["final"] else ()
        reads = (*self.order, self.exps(n), *states, factors, *listed)
        reads += tuple(name for name in every if name not in reads)
        if self.in_chunks and not p.adds_in_forward:
            out = self.weight_sums()
        else:
            out, flags["adds"] = self.rows_of_dw(*n.columns), flags["adds"] or p.into > 0
        self.emit(Kind.GEMM_WEIGHT, reads, out, rows, n.columns, **flags)

    def rows_of_dw(self, first: int, last: int) -> tuple[str, ...]:
        """Name rows of dW, or the caller's buffer; none where dW is not computed."""
        p, at = self.p, first * self.p.hidden * self.p.dw_item
        if not p.grad_weight:
            return ()
        if p.into:
            return (self.buffer("into", p.vocab, p.hidden, p.into, Home.INTO),)
        return (self.buffer(f"dw of {first}", last - first, p.hidden, p.dw_item, Home.DW, at),)

    def weight_sums(self) -> tuple[str, ...]:
        """Name dW's sums over chunks: in its memory, or beside the caller's buffer."""
        p = self.p
        if p.into:
            own = self.buffer("sums of dw", p.vocab, p.hidden, p.item_bytes)
        else:
            own = self.buffer("dw", p.vocab, p.hidden, p.dw_item, Home.DW)
        return (
            (own, *self.low("low of dw", p.vocab))
            if p.into or p.dw_item < p.accumulator_bytes
            else (own,)
        )

    # -- the backward -----------------------------------------------------------------------------

    def backward(self) -> None:
        """Emit the steps of the backward."""
        self.steps = self.program.backward
        if self.in_chunks:
            self.finish_chunks()
        else:
            self.gradients()

    def gradients(self) -> None:
        """Emit all products: first of stored exponentials, then of probabilities."""
        p = self.p
        early = [n for n in self.windows if n.is_stored or not p.is_uniform]
        late = [n for n in self.windows if n not in early]
        is_relative = p.soft > 0 and p.accumulates_wider and not self.stored
        """Whether soft targets' factors are in the references of exponentials."""
        names = "factors", *["probability factors"] * bool(late)
        factors, *of_probabilities = self.factors(self.every, *names, final=is_relative)
        # nothing else is in the memory of dX until its sums are finished
        home = Home.DX if p.grad_hidden and not self.sums_in_dx else None
        if p.grad_weight:
            summed = self.gather("states of all", self.every) if p.every_class else ()
            self.list_targets(summed, factors)
        in_exps = self.scales_exps
        scaled: tuple[str, ...] = ()
        plain: tuple[str, ...] = ()
        if early and p.grad_weight and not in_exps:
            scaled = self.gather("scaled", self.every, (factors,), home)
        if not all(n.is_stored for n in early) or (p.grad_weight and early and in_exps):
            plain = self.gather("plain", self.every, home=home if in_exps else None)
        for n in self.each(early):
            if not n.is_stored:
                reference = factors if is_relative else self.stats()
                self.project_again(self.every, n, plain, reference)
            if p.soft or p.scales_exps:
                self.entries(self.every, n, factors)
            self.products(n, plain if in_exps else scaled, factors)
        if early and late and p.grad_hidden:
            sums = self.hidden_sums()
            self.emit(Kind.RESCALE, (*self.order, self.stats(), *sums), sums, self.every)
        if late:
            plain = self.gather("states of late", self.every, home=home)
        for n in self.each(late):
            self.project_again(self.every, n, plain, *of_probabilities)
            self.products(n, plain, *of_probabilities)
        if p.grad_hidden:
            last = of_probabilities[0] if of_probabilities else factors
            self.finish_hidden(last, self.hidden_sums())
        if p.grad_bias:
            self.finish_bias()

    def products(self, n: Window, states: Sequence[str], factors: str) -> None:
        """Emit what a window adds to the gradients."""
        if self.p.grad_bias:
            self.add_bias(self.every, n, factors)
        if self.p.grad_hidden:
            self.add_hidden(self.every, n)
        if self.p.grad_weight:
            if self.scales_exps and not self.p.scales_exps:
                self.scale_exps(self.every, n, factors)
            self.add_weight(self.every, n, states, factors)

    def finish_hidden(self, factors: str, sums: Sequence[str]) -> None:
        """Emit dX, from its sums."""
        reads = (*self.order, factors, *sums, *self.class_row)
        self.emit(Kind.FINISH_HIDDEN, reads, (self.dx(),), self.every)

    def finish_bias(self) -> None:
        """Emit the gradient of the bias, from its sums."""
        out = self.buffer("dbias", 1, self.p.vocab, self.p.item_bytes, Home.DBIAS)
        self.emit(Kind.FINISH_BIAS, ("sums of bias",), (out,), self.every)

    def finish_chunks(self) -> None:
        """Emit the factors that the upstream gradient gives to sums of the forward."""
        p = self.p
        (factors,) = self.factors(self.every, "last factors")
        if p.grad_hidden:
            self.finish_hidden(factors, self.kept_hidden())
        if p.grad_bias:
            self.finish_bias()
        if p.grad_weight and not p.adds_in_forward:
            sums = self.weight_sums()
            out = sums[:1]
            if p.into:
                into = self.buffer("into", p.vocab, p.hidden, p.into, Home.INTO)
                # sums in one piece are multiplied where they are
                out = (into,) if p.accumulates_wider else (into, *out)
            self.emit(Kind.FINISH_WEIGHT, sums, out, self.every, adds=p.into > 0)
