"""What the tuned table brings on a GPU: its configurations against the architecture's defaults.

Timed in turns are the forward without gradients, the step that keeps every exponential, the one
with the smallest workspace, and the plain products.  Where the table has no other choice, there is
nothing to measure.
"""

import dataclasses
import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.experiments import forward, paper_grid
from bench.experiments.step import products_of
from bench.harness.problems import HEADS, Shape, random_head
from bench.harness.timing import Call, interleaved
from cutefce.autotune_cache import defaults, lookup
from cutefce.autotune_cache.tuning import outputs
from cutefce.autotune_cache.tuning.targets.base import Case
from cutefce.cute_kernels.config import KernelConfigs
from cutefce.ops.primitives import rows
from cutefce.ops.primitives.cute import CutePrimitives
from cutefce.ops.primitives.dispatch import gpu_of, problem_of
from cutefce.ops.strategies import windows

SHAPES = tuple(dict.fromkeys((*forward.SHAPES, *HEADS, *paper_grid.SHAPES["cuda"])))


@dataclass(frozen=True)
class Row:
    """One shape; ratios are of medians of interleaved runs."""

    tokens: int
    hidden: int
    vocab: int
    kernels: str
    """Those for which the table has another configuration; "window" if another width won."""
    forward: float | None = None
    """With the table over with the defaults; None where nothing differs."""
    step: float | None = None
    """That keeps every exponential."""
    smallest: float | None = None
    """The step with the smallest workspace."""
    forward_to_product: float | None = None
    """With the table over h wᵀ by cuBLAS."""
    step_to_products: float | None = None


def run(shape: Shape, repeats: int) -> list[Row]:
    """Measure on fresh random data."""
    h, w, y = random_head(shape, "cuda")
    problem, gpu = problem_of(h, w, True, True), gpu_of(h.device)
    arch, _, num_sms = gpu
    default = arch.default_configs(shape.tokens, shape.hidden, num_sms)
    tuned = lookup.lookup_configs(problem, *gpu)
    names = [field.name for field in dataclasses.fields(KernelConfigs)]
    differ = [name for name in names if getattr(default, name) != getattr(tuned, name)]
    width, won = (
        outputs.smallest_plan(problem, configs).window
        for configs in (
            defaults.window_configs(problem),
            lookup.tuned_widths(problem, *gpu),
        )
    )
    differ += ["window"] * (width != won)
    row = Row(shape.tokens, shape.hidden, shape.vocab, ", ".join(differ))
    if not differ:
        return [row]
    forms: dict[str, Call] = {
        "product": lambda: torch.mm(h, w.t()),
        "products": products_of(h, w, y),
    }
    case = Case(problem, h, w, y, None)
    for name, configs, window in (("default", default, width), ("tuned", tuned, won)):
        tiles = defaults.with_window(defaults.widest_window(problem), window)
        steps = CutePrimitives(tiles, arch, shape.dtype, configs, num_sms)
        forms[f"{name} forward"] = functools.partial(_forward, steps, h, w, y)
        forms[f"{name} step"] = functools.partial(_step, steps, h, w, y)
        forms[f"{name} smallest"] = functools.partial(outputs.smallest_step, case, steps)
    ms = {name: timing.median_ms for name, timing in interleaved(forms, "cuda", repeats).items()}
    measured = dataclasses.replace(
        row,
        forward=ms["tuned forward"] / ms["default forward"],
        step=ms["tuned step"] / ms["default step"],
        smallest=ms["tuned smallest"] / ms["default smallest"],
        forward_to_product=ms["tuned forward"] / ms["product"],
        step_to_products=ms["tuned step"] / ms["products"],
    )
    return [measured]


def _forward(steps: CutePrimitives, h: Tensor, w: Tensor, y: Tensor) -> None:
    steps = steps.with_scratch()
    windows.forward(steps, h, w, rows.make_targets(y, w.shape[0], -100), "mean")


def _step(steps: CutePrimitives, h: Tensor, w: Tensor, y: Tensor) -> None:
    steps, targets = steps.with_scratch(), rows.make_targets(y, w.shape[0], -100)
    piece = steps.config.reference_block
    exps = h.new_empty(h.shape[0], -(-w.shape[0] // piece) * piece)
    stored = [(0, exps)]
    _, stats = windows.forward(steps, h, w, targets, "mean", stored)
    upstream = targets.loss_scale("mean", torch.float32)
    window, dw = steps.config.window, torch.empty_like(w)
    windows.backward(steps, h, w, targets, stats, stored, upstream, window, True, dw)
