"""From a problem and a budget to the plan of a call: the fastest program that fits."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from cutefce.cute_kernels.integers import ceil_div, round_up
from cutefce.cute_kernels.problem import LOW_BITS
from cutefce.cute_kernels.process_cache import process_cache
from cutefce.ops.program import predicted_time
from cutefce.ops.program.fastest import Costed, fastest_within
from cutefce.ops.program.layout import Layout, most_again, most_aliased, windows_of
from cutefce.ops.program.lower import Lowering
from cutefce.ops.program.place import peak, saved_bytes
from cutefce.ops.program.predicted_memory import workspace
from cutefce.ops.program.problem import LossProblem
from cutefce.ops.program.steps import Program
from cutefce.ops.sampling import cost as sampling
from cutefce.ops.sampling.lower import SampledLowering

LEAST_CHUNK = 512
"""Tokens below which a chunk's products wait for the weight to be read."""
CHUNK_WINDOWS = 16384, 65536
"""Widths of windows inside chunks of a frozen weight."""
ROWS = 256
"""Tokens of which chunks are multiples: those of a row of tiles."""
LAYOUT_BITS = 6
"""Leading binary digits of a number of tokens, rounded up, by which a layout is chosen."""
STEPS, LEAST_STEP = 64, 4 << 20
"""Into how many parts the columns are cut, of which plans keep some, and their least bytes."""
SHORT_SUMS = 32
"""Additions up to which sums are packed in 20 bits, not 24: their roundings err together by less
than 6 % of the last rounding."""


@dataclass(frozen=True)
class Plan(Costed):
    """How a call runs: its program is that of a problem and a layout."""

    problem: LossProblem
    layout: Layout
    device: torch.device | None = field(default=None, compare=False)
    """The GPU whose kernels serve it, if some do."""

    @cached_property
    def program(self) -> Program:
        """What runs."""
        return lower(self.problem, self.layout)

    @cached_property
    def without_entropy(self) -> "Plan":
        """The same, but that exponentials have no factors of their own in the backward."""
        return replace(self, problem=replace(self.problem, scales_exps=False))

    @property
    def strategy(self) -> str:
        """One of "windows", "gradients_in_forward", "sampled" and "no_gradients"."""
        if self.problem.samples:
            return "sampled"
        if not self.problem.needs_gradients:
            return "no_gradients"
        return "gradients_in_forward" if self.layout.in_chunks else "windows"

    @property
    def adds_in_forward(self) -> bool:
        """Whether gradients in forward add dW to the caller's buffer."""
        return self.layout.in_chunks and self.problem.adds_in_forward

    @property
    def tokens(self) -> int:
        """Tokens that are computed."""
        return self.problem.tokens

    @property
    def chunk(self) -> int:
        """Tokens at a time."""
        return min(self.layout.chunk, max(self.tokens, 1))

    def __str__(self) -> str:
        name, x, is_sampled = self.strategy.replace("_", " "), self.layout, self.problem.samples > 0
        cost = self.predicted(None if is_sampled else self.budget)
        if is_sampled:
            more = "; fewer samples take less, another workspace does not"
            return f"{name} gradients: {cost}" + more * (self.budget is not None)
        vocab = max(self.problem.vocab, 1)
        size = f"chunks of {self.chunk} tokens" if self.chunk < self.tokens else "one chunk"
        if x.in_chunks or not self.problem.needs_gradients:
            size += ", dW in the caller's buffer" * self.adds_in_forward
            at_a_time = x.window if x.in_chunks else vocab
        else:
            windows = windows_of(self.problem, x)
            again = [window.width for window in windows if not window.is_stored]
            size = f"{min(x.kept / vocab, 1):.0%} kept"
            size += f", {x.aliased / vocab:.0%} in the memory of dW" * (x.aliased > 0)
            size += f", {min(sum(again) / vocab, 1):.0%} computed again" * bool(again)
            at_a_time = max(again, default=vocab)
        size += f", {at_a_time} columns at a time" * (at_a_time < vocab)
        return f"{name}, {size}: {cost}"


def lower(p: LossProblem, x: Layout, *, brief: bool = False) -> Program:
    """Return the program of a call, with a place for every buffer; see `Lowering`."""
    return (SampledLowering if p.samples else Lowering)(p, x, brief=brief).lowered()


def planned(p: LossProblem, x: Layout) -> Plan:
    """Return the plan of a layout."""
    program = lower(p, x, brief=True)
    size = workspace(p, peak(program), saved_bytes(program))
    seconds = (sampling if p.samples else predicted_time).seconds(program)
    return Plan(p, x, workspace_bytes=size, seconds=seconds)


def plan(p: LossProblem, budget: int, like: Layout | None = None) -> Plan:
    """Return the fastest plan within `budget` bytes; if none fits, the smallest.

    The smallest budget allows a little more than the smallest plan, see `fastest`.  More bytes give
    no slower plan, nor one that takes less memory; of a few tokens, within 2 %.  `like` fixes the
    strategy and, if gradients are formed in the forward, the tokens of a chunk.
    """
    if like is not None and like.in_chunks:
        every = round_up(p.vocab, p.block)
        window = like.window if like.window < p.vocab else every
        low = _low_bits(p, ceil_div(p.tokens, like.chunk), p.into > 0 and not p.adds_in_forward)
        x = replace(like, window=window, low_bits=low)
        return planned(p, x).within(budget)
    x = _layout(replace(p, tokens=rounded_tokens(p.tokens)), budget, like is None)
    own = replace(x, chunk=min(x.chunk, p.tokens) if x.in_chunks else p.tokens)
    return planned(p, own).within(budget)


def rounded_tokens(tokens: int) -> int:
    """Return the number of tokens, at most 1/32 more, for which a layout is chosen.

    Batches have any number of tokens, and comparing layouts takes a CPU as long as a small step
    takes a GPU.
    """
    return round_up(tokens, 1 << max(tokens.bit_length() - LAYOUT_BITS, 0))


@process_cache
def _layout(p: LossProblem, budget: int, may_chunk: bool) -> Layout:
    """Return the layout of the fastest plan; see `plan`."""
    families = [*_families(p, may_chunk=may_chunk)]
    return fastest_within(families, lambda x: planned(p, x), budget).layout


def _families(p: LossProblem, *, may_chunk: bool) -> Iterator[Sequence[Layout]]:
    """Yield layouts of which each takes more memory, and less time, than the one before.

    The second and the last may not: one stores the first exponentials, so that other factors are
    needed, and one computes nothing again.
    """
    block, tokens = p.block, max(p.tokens, 1)
    every = round_up(p.vocab, block)
    widths = [x.window for x in p.windows if x.window < p.vocab] or [every]
    if not p.needs_gradients and not p.ranks:
        counts = _counts(tokens, max(LEAST_CHUNK, p.outputs.least_chunk))
        sizes = sorted({round_up(ceil_div(tokens, count), ROWS) for count in counts})
        chunks = [Layout(size, every, in_chunks=True) for size in sizes if size < tokens]
        yield [*chunks, Layout(tokens, widths[0])]
        return
    if not (p.needs_gradients and p.stores):
        yield [Layout(tokens, widths[0])]
        return
    if may_chunk and p.can_chunk:  # the first, so that others are compared with few plans of them
        yield from _chunks(p, every)
    for window in widths:
        # float32 sums are worth their memory where few windows add to them, or no kernel rounds
        bits = [_low_bits(p, ceil_div(p.vocab, window))] * (p.grad_hidden and p.rounds_hidden)
        for low in (*bits, *[0] * (window == widths[0] or not p.is_fused)) or (0,):
            for aliased in {0, most_aliased(p, window)}:
                rest = p.vocab - aliased
                step = max(ceil_div(rest, STEPS), LEAST_STEP // (tokens * p.item_bytes))
                step = round_up(step, block)
                # fewer columns take as much memory as windows that are computed again
                least = max(round_up(most_again(p, window), block), step)
                kept = 0, *range(least, rest, step), round_up(rest, block)
                yield [Layout(tokens, window, x, aliased, low) for x in kept]


def _low_bits(p: LossProblem, additions: int, is_exact: bool = False) -> int:
    """Return the bits beside 16 of sums of so many additions; the most if they are to be exact."""
    if not p.accumulates_wider:
        return 0
    return LOW_BITS[is_exact or additions > SHORT_SUMS or p.hidden % 2]


def _counts(tokens: int, least: int = LEAST_CHUNK) -> list[int]:
    """Return numbers of chunks, from one to those of the fewest tokens, which are `least`."""
    counts = [1]
    while counts[-1] < ceil_div(tokens, least):
        counts.append(counts[-1] + ceil_div(counts[-1], 6))
    return counts


def _chunks(p: LossProblem, every: int) -> Iterator[Sequence[Layout]]:
    """Yield chunks from small to large; with windows where dX alone is formed.

    Such windows are computed again where references move: steps that skip all rows must be cheap.
    """
    tokens, windows = max(p.tokens, 1), [every]
    if p.is_fused and p.selects and not (p.grad_weight or p.grad_bias):
        windows += [x for x in CHUNK_WINDOWS if x < p.vocab]
    families: dict[tuple[int, int], list[Layout]] = {}
    for count in reversed(_counts(tokens)):
        size = min(round_up(ceil_div(tokens, count), ROWS), tokens)
        low = _low_bits(p, count, p.into > 0 and not p.adds_in_forward)
        if size >= min(LEAST_CHUNK, tokens):
            for window in windows:
                chunks = Layout(size, window, low_bits=low, in_chunks=True)
                families.setdefault((low, window), []).append(chunks)
    yield from families.values()
