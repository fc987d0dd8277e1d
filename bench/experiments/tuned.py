"""Gain from the tuned table on a GPU: its configurations against the architecture's defaults.

Interleaved are the no-grad forward, the step that stores every exponential, the step with the
smallest workspace, and the plain GEMMs.  Shapes for which the table has the defaults are listed
without numbers.
"""

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import click
import torch

from bench.experiments import forward, paper_grid
from bench.harness.cli import Output, gpu_only, per_shape, repeats_option
from bench.harness.problems import MODELS, Shape, plain_gemms, random_inputs
from bench.harness.timing import Call, interleaved, preceding_gemms
from cutefce.autotune_cache import defaults, lookup
from cutefce.autotune_cache.tuning.cases import Case
from cutefce.autotune_cache.tuning.outputs import steps
from cutefce.cute_kernels.config import KernelConfigs, WindowConfig
from cutefce.cute_kernels.kernel_set import kernel_set
from cutefce.cute_kernels.problem import Problem, can_keep
from cutefce.ops.costs.budget import MINIMUM
from cutefce.ops.costs.device import device_of
from cutefce.ops.primitives.dispatch import gpu_of, kernel_primitives, problem_of
from cutefce.ops.primitives.primitives import Primitives
from cutefce.ops.program.cost_model import CostModel
from cutefce.ops.program.layout import Layout
from cutefce.ops.program.plan import Plan
from cutefce.ops.program.plan import plan as make_plan
from cutefce.ops.program.problem import LossProblem

SHAPES = tuple(dict.fromkeys((*forward.SHAPES, *MODELS, *paper_grid.SHAPES["cuda"])))


@dataclass(frozen=True)
class Row:
    """One shape; ratios are of medians of interleaved runs."""

    tokens: int
    hidden: int
    vocab: int
    kernels: str
    """Kernels for which the table has another configuration."""
    forward_to_default: float | None = None
    """Time with the table over time with the defaults; None where nothing differs."""
    step_to_default: float | None = None
    """The same of the step that stores every exponential."""
    min_step_to_default: float | None = None
    """The same of the step with the smallest workspace."""
    forward_to_gemm: float | None = None
    """Forward with the table over h wᵀ by cuBLAS."""
    step_to_gemms: float | None = None
    """Step with the table over the three plain GEMMs."""


@click.command("tuned")
@repeats_option(15)
@click.pass_obj
@gpu_only
def command(output: Output, /, repeats: int) -> None:
    """The tuned table's configurations on a GPU, against the defaults."""
    output.record("tuned", per_shape(SHAPES, functools.partial(run, repeats=repeats)))


def run(shape: Shape, repeats: int) -> list[Row]:
    """Measure on random inputs."""
    h, w, y = random_inputs(shape, "cuda")
    problem, gpu = problem_of(h, w, True, True), gpu_of(h.device)
    default = gpu.default_configs(shape.tokens, shape.hidden)
    tuned = lookup.kernel_configs(problem, gpu)
    names = [field.name for field in dataclasses.fields(KernelConfigs)]
    differ = [name for name in names if getattr(default, name) != getattr(tuned, name)]
    row = Row(shape.tokens, shape.hidden, shape.vocab, ", ".join(differ))
    if not differ:
        return [row]
    calls: dict[str, Call] = {
        "GEMM": lambda: torch.mm(h, w.t()),
        "GEMMs": plain_gemms(h, w, y),
    }
    case = Case(problem, h, w, y, torch.ones_like(y, dtype=torch.float32))
    width = _smallest_plan(problem, defaults.window_configs(problem)).layout.window
    tiles = defaults.with_window(defaults.widest_window(problem), width)
    for name, configs in (("default", default), ("tuned", tuned)):
        kernels = kernel_set(gpu.arch, shape.dtype, configs)
        primitives = kernel_primitives(tiles, kernels, gpu.num_sms)
        calls[f"{name} forward"] = functools.partial(_forward, case, primitives)
        calls[f"{name} step"] = functools.partial(_step, case, primitives)
        calls[f"{name} min step"] = functools.partial(_smallest_step, case, primitives)
    timings = interleaved(calls, "cuda", repeats, before=preceding_gemms("cuda"))
    ms = {name: timing.median_ms for name, timing in timings.items()}
    measured = dataclasses.replace(
        row,
        forward_to_default=ms["tuned forward"] / ms["default forward"],
        step_to_default=ms["tuned step"] / ms["default step"],
        min_step_to_default=ms["tuned min step"] / ms["default min step"],
        forward_to_gemm=ms["tuned forward"] / ms["GEMM"],
        step_to_gemms=ms["tuned step"] / ms["GEMMs"],
    )
    return [measured]


def _forward(case: Case, primitives: Primitives) -> None:
    way = steps.Way(reduction="mean", gradients=steps.NONE)
    steps.run(*steps.prepared(case, primitives, way), case.upstream)


def _step(case: Case, primitives: Primitives) -> None:
    inputs, plan, _ = steps.prepared(case, primitives, steps.Way(reduction="mean"))
    layout = dataclasses.replace(plan.layout, kept=plan.layout.window)
    steps.run(inputs, dataclasses.replace(plan, layout=layout), None, case.upstream)


def _smallest_step(case: Case, primitives: Primitives) -> None:
    inputs, _, _ = steps.prepared(case, primitives, steps.Way(reduction="mean"))
    plan = _smallest_plan(case.problem, (primitives.config,))
    steps.run(inputs, plan, None, case.upstream)


def _smallest_plan(kernel_problem: Problem, configs: Sequence[WindowConfig]) -> Plan:
    """Return the plan of a step in windows with the smallest workspace."""
    tokens, hidden, vocab = kernel_problem.tokens, kernel_problem.hidden, kernel_problem.vocab
    sizes = kernel_problem.item_bytes, kernel_problem.accumulator_bytes
    problem = LossProblem(tokens, hidden, vocab, *sizes, stores=can_keep(kernel_problem.dtype))
    widths = tuple(config.window for config in configs)
    cost_model = CostModel(kernel_problem, configs[0], widths)
    in_windows = Layout(tokens, widths[0])
    return make_plan(problem, cost_model, device_of(kernel_problem.device), MINIMUM, in_windows)
