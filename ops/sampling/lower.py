"""From a problem with sampled gradients to its program."""

from collections.abc import Sequence

from cutefce.ops.primitives.block_sizes import added_rows
from cutefce.ops.program.layout import Window
from cutefce.ops.program.lower import Lowering
from cutefce.ops.program.steps import Range, Step
from cutefce.ops.sampling.cost import scratch
from cutefce.ops.sampling.sample_sizes import estimate_count, slots
from cutefce.ops.sampling.steps import SampleKind

WORD, INDEX = 4, 8
"""Bytes of a number of 32 bits, and of one of 64, in which kernels have an entry."""


class SampledLowering(Lowering):
    """A forward whose row sums choose entries, of all tokens and classes; it stores no others."""

    chosen: tuple[str, ...]
    """Names of what a backward is left."""

    def scratch(self, step: Step) -> int:
        """Return the bytes that a step takes while it runs, beside its buffers."""
        return scratch(self.p, self.x, step)

    def step(
        self,
        kind: SampleKind,
        reads: Sequence[str],
        writes: Sequence[str],
        columns: Range = (0, 0),
    ) -> None:
        """Append a step of all tokens."""
        self.emit(kind, (*self.order, *reads), writes, self.every, columns)

    def estimate(self, states: Sequence[str]) -> None:
        """Emit the estimates of log-sum-exps."""
        p, total = self.p, self.p.vocab * max(self.p.ranks, 1)
        count = estimate_count(total)
        out = [self.outside("estimate", p.tokens, 1, p.accumulator_bytes)]
        if count < total:
            out.append(self.buffer("rows of classes", count, p.hidden, p.item_bytes))
        share = (0, count // max(p.ranks, 1))
        self.step(SampleKind.ESTIMATE, (*states, "logits"), out, share)

    def statistics(self, rows: Range, states: Sequence[str], windows: Sequence[Window]) -> None:
        """Emit estimates, row sums with entries of all columns, and statistics."""
        p, kind = self.p, SampleKind
        entries = self.buffer("entries", p.tokens, slots(p.samples, p.vocab) * INDEX, 1)
        self.chosen = entries, self.buffer("drawn", 3, p.tokens, WORD)
        self.estimate(states)
        partial = self.sums_of(Window((0, p.vocab), False), rows)
        reads = (*states, "logits", "estimate")
        self.step(kind.SAMPLE, reads, (partial, *self.chosen), (0, p.vocab))
        self.reduce(rows, [partial])
        again = self.buffer("again", p.tokens, p.hidden, p.item_bytes)
        reads = (*states, self.stats(), *self.chosen)
        self.step(kind.FINISH_ENTRIES, reads, (again, *self.chosen))

    def gradients(self) -> None:
        """Emit the products of entries with rows of the weight and with hidden states."""
        p, kind, every = self.p, SampleKind, (0, self.p.vocab)
        (factors,) = self.factors(self.every, "factors")
        if p.grad_hidden:
            out = [self.dx()]
            if p.every_class:
                out.append(self.buffer("sums", p.tokens, p.hidden, p.accumulator_bytes))
            reads = (*self.chosen, factors, *self.class_row)
            self.step(kind.SPARSE_HIDDEN, reads, out, every)
        rows = [*self.rows_of_dw(0, p.vocab)]
        if p.grad_bias:
            rows.append(self.outside("dbias", 1, p.vocab, p.accumulator_bytes))
        if not rows:
            return
        if p.every_class or not p.grad_weight or (p.into and not p.adds_in_place):
            # sums are formed beside dW, some rows at a time
            room = min(added_rows(p.hidden, p.accumulator_bytes, p.device), p.vocab)
            rows.append(self.buffer("room", room, p.hidden, p.accumulator_bytes))
        listed = [*self.chosen, self.stats(), factors]
        if p.every_class and p.grad_weight:
            listed += self.gather("states of all", self.every)
        entries = p.tokens * (slots(p.samples, p.vocab) + 1)
        lists = (
            self.buffer("lists", 1, entries * INDEX, 1),
            self.buffer("ends", 1, (p.vocab + 1) * WORD, 1),
        )
        between = (
            self.buffer("places of entries", 1, entries * WORD, 1),
            self.buffer("counts of classes", 1, p.vocab * WORD, 1),
        )
        self.step(kind.LIST, listed, (*lists, *between), every)
        self.step(kind.SPARSE_WEIGHT, (*lists, factors), rows, every)
