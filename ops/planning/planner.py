"""From a problem and a memory budget to a plan, with the memory and time it is predicted to take.

Pure Python.  The plans of a problem come in families, each of which trades time for memory;
`memory_model` and `time_model` predict both.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil

from cutefce.cute_kernels.arch import arch_named
from cutefce.cute_kernels.config import WindowConfig
from cutefce.cute_kernels.integers import ceil_div, round_up
from cutefce.cute_kernels.problem import LOW_BITS, Problem, can_keep
from cutefce.ops.planning.call_problem import forms_gradients, is_sampled
from cutefce.ops.planning.dw_aliasing import DwMemory
from cutefce.ops.planning.memory_model import chunked_bytes, windows_bytes
from cutefce.ops.planning.sampled_memory import sampled_bytes
from cutefce.ops.planning.step_memory import kept_low_bits
from cutefce.ops.planning.time_model import chunked_seconds, sampled_seconds, windows_seconds

MINIMUM = -1
"""The budget "min", which is no number of bytes: a small plan that is worth its time."""
MAXIMUM = 1 << 62
"""The budget "max": the fastest plan."""
DEFAULT = 5 << 29
"""2.5 GiB: all exponentials of 8192 tokens and 128k classes in bfloat16, about what a compiled
unfused loss takes for the same; larger problems keep a part and recompute the rest."""

FLOOR = Fraction(3, 2)
"""Memory that "min" may take, relative to the least that any plan takes."""
WORTH_TIME, WORTH_MEMORY = Fraction(4, 3), Fraction(9, 10)
""""min" takes no plan that needs more than 4/3 of the time of one that needs less than 10/9 of its
memory: a third more time is no price for a tenth of the memory."""

MIN_CHUNK = 512
"""Tokens of a chunk below which reading the weight and dW's sums, and launches, take too long."""
MIN_CHUNK_WINDOW = 8192
"""Columns of a window inside a chunk below which launches and dX's sums take too much time."""
CHUNK_ALIGNMENT = 256
"""Chunks are multiples of this many tokens, a row block of the kernels."""


@dataclass(frozen=True)
class Plan:
    """How one call runs."""

    strategy: str
    """"windows", "gradients_in_forward" or "sampled"."""
    window: int
    """Vocabulary columns of a window; windows that use dW's memory have half as many or more."""
    aliased: int
    """Columns whose exponentials use dW's memory until the backward: the first ones, whole
    reference blocks."""
    kept: int
    """Columns after these whose exponentials have memory until the backward, or while a chunk is
    processed: whole reference blocks."""
    chunk: int
    """Tokens of a chunk; all of them with "windows"."""
    grad_hidden: bool
    """Whether dX is computed."""
    grad_weight: bool
    """Whether dW is computed."""
    grad_bias: bool = False
    """Whether the gradient of the bias is computed."""
    vocab: int = 0
    """Vocabulary columns of this rank."""
    workspace_bytes: int = 0
    """Predicted peak memory beyond the inputs and the gradients."""
    seconds: float = 0.0
    """Predicted time of forward and backward; for comparing plans of one problem."""
    tokens: int = 0
    """Tokens that are computed."""
    low_bits: int = LOW_BITS[-1]
    """Bits of each of dW's sums over chunks beside the 16 in its memory."""

    @property
    def gradients(self) -> tuple[bool, bool, bool]:
        """Which of dX, dW and the bias' gradient are computed."""
        return self.grad_hidden, self.grad_weight, self.grad_bias

    @property
    def is_sampled(self) -> bool:
        """Whether gradients are formed of sampled exponentials."""
        return self.strategy == "sampled"

    @property
    def in_forward(self) -> bool:
        """Whether gradients are formed in the forward."""
        return self.strategy == "gradients_in_forward"

    @property
    def stores_windows(self) -> bool:
        """Whether dX and dW are formed over windows, and the exponentials of some are stored."""
        if self.strategy != "windows" or self.grad_bias:
            return False
        return self.grad_hidden and self.grad_weight and self.aliased + self.kept > 0

    @property
    def has_windows(self) -> bool:
        """Whether fewer than all columns have memory of their own for exponentials."""
        return self.kept < self.vocab

    def __str__(self) -> str:
        name = self.strategy.replace("_", " ")
        cost = f"{self.workspace_bytes / 2**20:.1f} MiB, {self.seconds * 1e3:.1f} ms predicted"
        if self.is_sampled:
            return f"{name} gradients: {cost}"
        vocab = max(self.vocab, 1)
        kept, aliased = min(self.kept / vocab, 1), self.aliased / vocab
        size = f"{kept:.0%} kept" + f", {aliased:.0%} in the memory of dW" * (aliased > 0)
        columns = self.window
        if self.in_forward:
            size, columns = f"chunks of {self.chunk} tokens", min(self.kept, vocab)
        return f"{name}, {size}, {columns} columns at a time: {cost}"


@dataclass(frozen=True)
class _Family:
    """Plans of a problem, each one slower and smaller than the one before."""

    count: int
    plan: Callable[[int], Plan]

    def fastest(self, budget: int) -> Plan:
        """Return the fastest plan within `budget` bytes, or else the smallest one."""
        last = self.count - 1
        return self.plan(
            bisect_left(range(last), True, key=lambda i: self.plan(i).workspace_bytes <= budget)
        )


def make_plan(
    problem: Problem,
    configs: Sequence[WindowConfig],
    budget: int,
    scalar_upstream: bool,
    scales_rows: bool = False,
    scales_exps: bool = False,
) -> Plan:
    """Return the fastest plan within `budget` bytes, or the smallest one if all take more.

    More bytes never give a slower plan, nor one that takes less memory.  `configs` are for windows
    of several widths, the widest first.  `scalar_upstream` says that every token's loss
    gets the same upstream gradient, `scales_rows` that the loss itself has factors of tokens, and
    `scales_exps` that each exponential may have a factor that the backward alone knows.
    """
    if is_sampled(problem):
        return _sampled_plan(problem, configs[0])
    families = _windows(problem, configs, scalar_upstream and not scales_rows)
    # factors of tokens are those of dX's rows, which the backward applies; others sum over tokens
    later = not (problem.grad_weight or problem.grad_bias or scales_exps)
    if (scalar_upstream or later) and forms_gradients(problem) and can_keep(problem.dtype):
        families += _gradients_in_forward(problem, configs[0])
    return _choose(families, budget)


def replan_for_shard(
    plan: Plan,
    p: Problem,
    configs: Sequence[WindowConfig],
    budget: int,
    scalar_upstream: bool,
    scales_rows: bool = False,
    scales_exps: bool = False,
) -> Plan:
    """Return `plan`, which was made for all ranks, for one rank's `p`, with the same chunks."""
    if plan.is_sampled:
        return _sampled_plan(p, configs[0])
    if plan.in_forward:
        return _chunked_plan(p, configs[0], plan.chunk, plan.kept if plan.has_windows else None)
    return _choose(_windows(p, configs, scalar_upstream and not scales_rows), budget)


def _sampled_plan(p: Problem, config: WindowConfig) -> Plan:
    """Return the plan of sampled gradients, which no budget changes."""
    gradients, sizes = (p.grad_hidden, p.grad_weight, p.grad_bias), (config.window, 0, 0, p.tokens)
    predicted, seconds = sampled_bytes(p, config), sampled_seconds(p, config.window)
    return Plan("sampled", *sizes, *gradients, p.vocab, predicted, seconds, p.tokens)


def _choose(families: Sequence[_Family], budget: int) -> Plan:
    """Return the plan of "min", or the fastest within `budget` bytes, or else the smallest one.

    The families do not depend on the budget: a larger one only adds plans to choose from.
    """
    least = min(family.fastest(0).workspace_bytes for family in families)
    if budget == MINIMUM:
        return _small(families, least)
    return _fastest(families, max(budget, least))


def _small(families: Sequence[_Family], least: int) -> Plan:
    """Return the plan of "min": the fastest within `FLOOR`, or what is worth more memory."""
    plan = _fastest(families, int(least * FLOOR))
    while True:
        # the most that another plan takes of which this one takes more than WORTH_MEMORY
        limit = ceil(plan.workspace_bytes / WORTH_MEMORY) - 1
        other = _fastest(families, max(limit, plan.workspace_bytes))
        if plan.seconds <= WORTH_TIME * other.seconds:
            return plan
        plan = other


def _fastest(families: Sequence[_Family], budget: int) -> Plan:
    """Return the fastest plan within `budget` bytes, which some family has."""
    plans = [family.fastest(budget) for family in families]
    within = [plan for plan in plans if plan.workspace_bytes <= budget]
    return min(within, key=lambda plan: (plan.seconds, plan.workspace_bytes))


def _windows(p: Problem, configs: Sequence[WindowConfig], scalar_upstream: bool) -> list[_Family]:
    """Return the plans of windows, without those that another one beats in time and memory.

    Columns neither aliased nor kept are recomputed.  Aliased columns cost s_i h_i, however many
    they are: a plan that recomputes columns aliases as many as it can, or none; narrow first
    windows allow for more.
    """
    return [family for config in configs for family in _windows_of(p, config, scalar_upstream)]


def _windows_of(p: Problem, config: WindowConfig, scalar_upstream: bool) -> Iterator[_Family]:
    def plan(aliased: int, kept: int | None = None) -> Plan:
        if kept is None:
            kept = round_up(p.vocab - aliased, config.reference_block)
        predicted = windows_bytes(p, config, aliased, kept, scalar_upstream)
        seconds = windows_seconds(p, config.window, aliased, kept)
        gradients = p.grad_hidden, p.grad_weight, p.grad_bias
        sizes = config.window, aliased, kept, p.tokens
        return Plan("windows", *sizes, *gradients, p.vocab, predicted, seconds, p.tokens)

    def recompute_some(aliased: int) -> _Family:
        kept = (p.vocab - aliased - 1) // config.window
        return _Family(kept + 1, lambda i: plan(aliased, (kept - i) * config.window))

    def alias_some(most: int) -> _Family:
        steps = ceil_div(most, config.window)
        return _Family(steps, lambda i: plan(min((i + 1) * config.window, most)))

    if not (forms_gradients(p) and can_keep(p.dtype)):
        yield _Family(1, lambda _: plan(0, 0))
        return
    yield _Family(1, lambda _: plan(0))
    yield recompute_some(0)
    if not p.grad_weight or p.wide_grad_weight:
        return
    memory = DwMemory(p.tokens, p.hidden, p.vocab, config.reference_block)
    for least in (config.window, config.half(config.window)):
        most = memory.most_aliased(least)
        if most:
            yield alias_some(most)
            last = memory.aliased_widths(most)[-1]
            if last < least:  # its launches may take more time than its memory is worth
                yield _Family(1, [plan(most - last)].__getitem__)
            yield recompute_some(most)


def _gradients_in_forward(p: Problem, config: WindowConfig) -> Iterator[_Family]:
    """Yield plans of chunks of about equal size, each one alone: a short chunk may have wide tiles.

    Beyond eight chunks, some numbers of chunks are left out.
    """
    count, most = 1, ceil_div(p.tokens, MIN_CHUNK)
    while count <= max(most, 1):
        even = round_up(ceil_div(p.tokens, count), CHUNK_ALIGNMENT)
        chunk = max(1, min(even, p.tokens))
        yield _Family(1, [_chunked_plan(p, config, chunk)].__getitem__)
        if forms_dx_alone(p) and p.vocab >= 2 * MIN_CHUNK_WINDOW:
            yield _windows_in_chunks(p, config, chunk)
        count = min(count + ceil_div(count, 8), max(most, count + 1))


def forms_dx_alone(p: Problem) -> bool:
    """Whether kernels form dX alone and may skip rows, as windows inside chunks need."""
    alone = p.grad_hidden and not (p.grad_weight or p.grad_bias)
    return alone and p.selects_rows and arch_named(p.arch or "").forms_weight_gradient


def _windows_in_chunks(p: Problem, config: WindowConfig, chunk: int) -> _Family:
    """Return plans of 2 windows of about equal width and more in each chunk."""

    def plan(i: int) -> Plan:
        even = ceil_div(p.vocab, 2 + i)
        return _chunked_plan(p, config, chunk, round_up(even, config.reference_block))

    return _Family(p.vocab // MIN_CHUNK_WINDOW - 1, plan)


def _chunked_plan(p: Problem, config: WindowConfig, chunk: int, columns: int | None = None) -> Plan:
    """Return the plan of chunks with windows of `columns`, or of all columns at once."""
    every = round_up(p.vocab, config.reference_block)
    stored = every if columns is None else min(columns, every)
    sizes = config.window if columns is None else stored, 0, stored, chunk
    seconds = chunked_seconds(p, chunk, stored)
    predicted, strategy = chunked_bytes(p, config, stored, chunk), "gradients_in_forward"
    gradients, low_bits = (p.grad_hidden, p.grad_weight, p.grad_bias), kept_low_bits(p, chunk)
    return Plan(strategy, *sizes, *gradients, p.vocab, predicted, seconds, p.tokens, low_bits)
