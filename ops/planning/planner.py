"""From a problem and a memory budget to a plan, with the memory and time it is predicted to take.

Pure Python.  The plans of a problem come in families, each of which trades time for memory;
`memory_model` and `time_model` predict both.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from math import ceil

from cutefce.cute_kernels.config import WindowConfig
from cutefce.cute_kernels.integers import ceil_div, round_up
from cutefce.cute_kernels.problem import Problem, can_keep
from cutefce.ops.planning.call_problem import forms_gradients, is_sampled, soft_targets
from cutefce.ops.planning.chunks.plans import chunked_plan, chunked_plans
from cutefce.ops.planning.dw_aliasing import DwMemory
from cutefce.ops.planning.memory_model import windows_bytes
from cutefce.ops.planning.plan import Family, Plan
from cutefce.ops.planning.sampled_memory import sampled_bytes
from cutefce.ops.planning.step_memory import can_keep_hidden, low_bits_of
from cutefce.ops.planning.time_model import sampled_seconds, windows_seconds

__all__ = ["DEFAULT", "MAXIMUM", "MINIMUM", "Plan", "make_plan", "replan_for_shard"]

MINIMUM = -1
"""The budget "min", which is no number of bytes: a small plan that is worth its time."""
MAXIMUM = 1 << 62
"""The budget "max": the fastest plan."""
DEFAULT = 5 << 29
"""2.5 GiB: all exponentials of 8192 tokens and 128k classes in bfloat16, about what a compiled
unfused loss takes for the same; larger problems keep a part and recompute the rest."""

FLOOR = Fraction(8, 5)
"""Memory that "min" may take, relative to the least that any plan takes."""
MEMORY_WEIGHT = 6
"""Per cent of memory that weigh as much as a per cent of time, for "min"."""
WORTH_TIME, WORTH_MEMORY = Fraction(4, 3), Fraction(9, 10)
""""min" takes no plan that needs more than 4/3 of the time of one that needs less than 10/9 of its
memory: a third more time is no price for a tenth of the memory."""

FLOAT32_WIDTHS = 3
"""Widths of windows, the widest ones, that are tried with float32 sums of dX: beside these,
narrower windows save little."""

MIN_HIDDEN_SUMS = 3 << 20
"""Bytes of dX below which kernels keep its sums in float32: fewer bits would save less than these,
and "min" would be a plan that stores no exponentials, of more launches."""


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
        return _of_budget(_sampled_plan(problem, configs[0]), budget)
    families = _windows(problem, configs, scalar_upstream and not scales_rows)
    # factors of tokens are those of dX's rows, which the backward applies; others sum over tokens
    later = not (problem.grad_weight or problem.grad_bias or scales_exps)
    if (scalar_upstream or later) and forms_gradients(problem) and can_keep(problem.dtype):
        families += chunked_plans(problem, configs[0])
    return _choose(families, budget)


def replan_for_shard(
    plan: Plan,
    p: Problem,
    configs: Sequence[WindowConfig],
    budget: int,
    scalar_upstream: bool,
    scales_rows: bool = False,
) -> Plan:
    """Return `plan`, which was made for all ranks, for one rank's `p`, with the same chunks."""
    if plan.is_sampled:
        return _sampled_plan(p, configs[0])
    if plan.in_forward:
        widths = (plan.window, plan.kept) if plan.has_windows else None
        return chunked_plan(p, configs[0], plan.chunk, widths)
    return _choose(_windows(p, configs, scalar_upstream and not scales_rows), budget)


def _sampled_plan(p: Problem, config: WindowConfig) -> Plan:
    """Return the plan of sampled gradients, which no budget changes."""
    gradients, sizes = (p.grad_hidden, p.grad_weight, p.grad_bias), (config.window, 0, 0, p.tokens)
    predicted, seconds = sampled_bytes(p, config), sampled_seconds(p, config.window)
    return Plan("sampled", *sizes, *gradients, p.vocab, predicted, seconds, p.tokens)


def _choose(families: Sequence[Family], budget: int) -> Plan:
    """Return the plan of "min", or the fastest within `budget` bytes, or else the smallest one.

    The families do not depend on the budget: a larger one only adds plans to choose from.
    """
    least = min(family.fastest(0).workspace_bytes for family in families)
    if budget == MINIMUM:
        return _small(families, least)
    return _of_budget(_fastest(families, max(budget, least)), budget)


def _of_budget(plan: Plan, budget: int) -> Plan:
    """Return a plan that says so if it takes more than `budget` bytes."""
    return replace(plan, budget=budget) if MINIMUM < budget < plan.workspace_bytes else plan


def _small(families: Sequence[Family], least: int) -> Plan:
    """Return the plan of "min": the best one within `FLOOR`, or what is worth more memory."""
    budget = int(least * FLOOR)
    plans = (plan for family in families for plan in family.within(budget))
    within = [plan for plan in plans if plan.workspace_bytes <= budget]
    plan = min(within, key=lambda x: x.seconds**MEMORY_WEIGHT * x.workspace_bytes)
    while True:
        # the most that another plan takes of which this one takes more than WORTH_MEMORY
        limit = ceil(plan.workspace_bytes / WORTH_MEMORY) - 1
        other = _fastest(families, max(limit, plan.workspace_bytes))
        if plan.seconds <= WORTH_TIME * other.seconds:
            return plan
        plan = other


def _fastest(families: Sequence[Family], budget: int) -> Plan:
    """Return the fastest plan within `budget` bytes, which some family has."""
    plans = [family.fastest(budget) for family in families]
    within = [plan for plan in plans if plan.workspace_bytes <= budget]
    return min(within, key=lambda plan: (plan.seconds, plan.workspace_bytes))


def _windows(p: Problem, configs: Sequence[WindowConfig], scalar_upstream: bool) -> list[Family]:
    """Return the plans of windows, without those that another one beats in time and memory.

    Columns neither aliased nor kept are recomputed.  Aliased columns cost s_i h_i, however many
    they are: a plan that recomputes columns aliases as many as it can, less a short last window, or
    none; narrow first windows allow for more.  dX's sums over windows are float32, or kept.
    """
    given: list[tuple[WindowConfig, int | None]]
    given = [(config, None) for config in configs[:FLOAT32_WIDTHS]]
    if forms_gradients(p) and keeps_hidden(p):
        given += [(config, kept_hidden_bits(p, config)) for config in configs]
    return [family for kind in given for family in _windows_of(p, *kind, scalar_upstream)]


def _windows_of(
    p: Problem, config: WindowConfig, hidden_bits: int | None, scalar_upstream: bool
) -> Iterator[Family]:
    """Yield the plans of one width of windows; with `hidden_bits`, dX's sums are kept."""

    def family(count: int, columns: Callable[[int], tuple[int, int]]) -> Family:
        """Return plans of (aliased, kept) columns."""
        given = p, config, scalar_upstream, hidden_bits
        return Family(count, _once(lambda i: _windows_plan(*given, *columns(i))))

    def recompute_some(aliased: int) -> Family:
        kept = (p.vocab - aliased - 1) // config.window
        return family(kept + 1, lambda i: (aliased, (kept - i) * config.window))

    def keep_rest(aliased: int) -> tuple[int, int]:
        return aliased, round_up(p.vocab - aliased, config.reference_block)

    def alias_some(most: int) -> Family:
        steps = ceil_div(most, config.window)
        return family(steps, lambda i: keep_rest(min((i + 1) * config.window, most)))

    if not (forms_gradients(p) and can_keep(p.dtype)):
        yield family(1, lambda _: (0, 0))
        return
    if hidden_bits is None:  # one product needs no sums
        yield family(1, lambda _: keep_rest(0))
    yield recompute_some(0)
    for least, most in _most_aliased(p, config):
        yield alias_some(most)
        yield recompute_some(most)
        last = _memory_of_dw(p, config).aliased_widths(most)[-1]
        if last < least:  # its launches may take more time than its memory is worth
            yield family(1, [keep_rest(most - last)].__getitem__)
            yield recompute_some(most - last)


def _windows_plan(
    p: Problem,
    config: WindowConfig,
    scalar_upstream: bool,
    hidden_bits: int | None,
    aliased: int,
    kept: int,
) -> Plan:
    return Plan(
        "windows",
        config.window,
        aliased,
        kept,
        chunk=p.tokens,
        grad_hidden=p.grad_hidden,
        grad_weight=p.grad_weight,
        grad_bias=p.grad_bias,
        vocab=p.vocab,
        workspace_bytes=windows_bytes(p, config, aliased, kept, scalar_upstream, hidden_bits),
        seconds=windows_seconds(p, config.window, aliased, kept, hidden_bits),
        tokens=p.tokens,
        hidden_bits=hidden_bits,
    )


def _memory_of_dw(p: Problem, config: WindowConfig) -> DwMemory:
    return DwMemory(p.tokens, p.hidden, p.vocab, config.reference_block)


def _most_aliased(p: Problem, config: WindowConfig) -> list[tuple[int, int]]:
    """Return the least width of windows, and how many columns can be aliased: wide and narrow."""
    if not p.grad_weight or p.wide_grad_weight:
        return []
    memory = _memory_of_dw(p, config)
    widths = config.window, config.half(config.window)
    found = ((least, memory.most_aliased(least)) for least in widths)
    return [(least, most) for least, most in found if most]


def keeps_hidden(p: Problem) -> bool:
    """Whether plans with kept sums of dX are worth a try."""
    is_small = p.arch is not None and p.tokens * p.hidden * p.item_bytes < MIN_HIDDEN_SUMS
    return can_keep_hidden(p) and not soft_targets(p) and not is_small


def kept_hidden_bits(p: Problem, config: WindowConfig) -> int:
    """Return the bits beside 16 of dX's sums over as many windows as any plan of `config` has."""
    windows = ceil_div(p.vocab, config.window)
    if p.grad_weight and not p.wide_grad_weight:
        memory = _memory_of_dw(p, config)
        counts = (
            len(memory.aliased_widths(most))
            + len(memory.recomputed_widths(most, config.half(config.window)))
            for most in (0, *(most for _, most in _most_aliased(p, config)))
        )
        # those that are kept are one more
        windows = 1 + max(counts)
    return low_bits_of(p.hidden, windows)


def _once(plan: Callable[[int], Plan]) -> Callable[[int], Plan]:
    """Return `plan`, which makes each plan once: searches of a family share them."""
    made: dict[int, Plan] = {}

    def of(i: int) -> Plan:
        if i not in made:
            made[i] = plan(i)
        return made[i]

    return of
