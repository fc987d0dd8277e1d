"""Gain from the tuned table on a GPU: its configurations against the architecture's defaults.

Interleaved are the no-grad forward, the step that stores every exponential, the step with the
smallest workspace, and the plain GEMMs.  Shapes for which the table has the defaults are listed
without numbers.
"""

import dataclasses
import functools
from dataclasses import dataclass

import click
import torch

from bench.experiments import forward, paper_grid
from bench.harness.cli import Output, gpu_only, per_shape, repeats_option
from bench.harness.problems import MODELS, Shape, plain_gemms, random_inputs
from bench.harness.timing import Call, interleaved, preceding_gemms
from cutefce.autotune_cache import defaults, lookup
from cutefce.autotune_cache.tuning.outputs import step as outputs
from cutefce.autotune_cache.tuning.targets.base import TuningCase
from cutefce.cute_kernels.config import KernelConfigs
from cutefce.cute_kernels.integers import round_up
from cutefce.cute_kernels.kernel_set import kernel_set
from cutefce.ops.primitives.dispatch import gpu_of, kernel_primitives, problem_of
from cutefce.ops.primitives.interface import AnyPrimitives
from cutefce.ops.program import calls as programs

SHAPES = tuple(dict.fromkeys((*forward.SHAPES, *MODELS, *paper_grid.SHAPES["cuda"])))


@dataclass(frozen=True)
class Row:
    """One shape; ratios are of medians of interleaved runs."""

    tokens: int
    hidden: int
    vocab: int
    kernels: str
    """Kernels for which the table has another configuration; "window" for another width."""
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
    width, won = (
        outputs.smallest_plan(problem, configs).layout.window
        for configs in (
            defaults.window_configs(problem),
            lookup.window_configs(problem, gpu),
        )
    )
    differ += ["window"] * (width != won)
    row = Row(shape.tokens, shape.hidden, shape.vocab, ", ".join(differ))
    if not differ:
        return [row]
    calls: dict[str, Call] = {
        "GEMM": lambda: torch.mm(h, w.t()),
        "GEMMs": plain_gemms(h, w, y),
    }
    case = TuningCase(problem, h, w, y, None)
    for name, configs, window in (("default", default, width), ("tuned", tuned, won)):
        tiles = defaults.with_window(defaults.widest_window(problem), window)
        kernels = kernel_set(gpu.arch, shape.dtype, configs)
        primitives = kernel_primitives(tiles, kernels, gpu.num_sms)
        calls[f"{name} forward"] = functools.partial(_forward, case, primitives)
        calls[f"{name} step"] = functools.partial(_step, case, primitives)
        calls[f"{name} min step"] = functools.partial(outputs.smallest_step, case, primitives)
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


def _forward(case: TuningCase, primitives: AnyPrimitives) -> None:
    inputs = outputs.loss_inputs(case, primitives, "mean")
    programs.forward(inputs, outputs.layout(inputs, grad_hidden=False, grad_weight=False))


def _step(case: TuningCase, primitives: AnyPrimitives) -> None:
    inputs = outputs.loss_inputs(case, primitives, "mean")
    config = primitives.config
    kept = round_up(len(inputs.w), config.reference_block)
    one = inputs.h.new_ones((), dtype=torch.float32)
    outputs.step_of(inputs, outputs.layout(inputs, config.window, kept), one)
