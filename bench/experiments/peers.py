"""Other fused linear cross entropies, as their documentation says to call them.

Each runs with its defaults, and a second time where an option accumulates gradients in float32
instead of the inputs' dtype.  A peer that is not installed, fails, or is wrong gives a row with the
reason.  There are three tables:

peers                 both gradients
peers_frozen_head     dX alone: the weight has no gradient
peers_ignored_rows    both gradients, a part of the targets ignored at random

Before anything is timed, every peer runs in its own subprocess, most of them at once: a peer may
crash, or leave the GPU unusable for its process, and what it compiles is cached on disk.
"""

import functools
import importlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from typing import Any

import click
import torch
import torch.nn.functional as F

from bench.experiments import step
from bench.harness.cli import (
    DEVICE,
    Output,
    chosen_shapes,
    per_shape,
    repeats_option,
    shape_options,
)
from bench.harness.problems import CPU_SHAPE, MODELS, Loss, Shape, ignore_some, random_inputs
from bench.harness.records import Measurement
from bench.harness.reference import unfused
from cutefce.cute_kernels.jit.subprocess_worker import SubprocessWorker, WorkerError

MANY_TOKENS = Shape(16384, 7168, 129280, "bfloat16"), Shape(32768, 4096, 131072, "bfloat16")
SHAPES = {"cpu": (CPU_SHAPE,), "cuda": (*MODELS, *MANY_TOKENS)}
FROZEN_WORKSPACES = ("max", "default", "1 GiB", *step.SMALL_WORKSPACES, "min")
"""Budgets of a frozen head."""
IGNORED_PERCENT = 0, 50, 80, 95
"""Parts of the targets that are ignored, at the first shape."""
TABLES = "trained", "frozen-head", "ignored-rows"
FROZEN = step.Task(is_frozen=True)
SECONDS = 120
"""Time limit of a peer's first steps at a shape, including compilation and tuning."""
OUT_OF_MEMORY = "out of memory"


@dataclass(frozen=True)
class Peer:
    """One peer's entry point."""

    module: str
    name: str
    adapt: Callable[[Any], Loss]
    """Makes a loss of h, w and y from the imported object."""
    tunes: bool = False
    """Whether it keeps choices on disk that it made by timing, for which it must run alone."""

    def load(self) -> Loss:
        """Return the loss.

        Raises:
            ImportError: if it is not installed, or has another version.
        """
        module = importlib.import_module(self.module)
        if not hasattr(module, self.name):
            raise ImportError(f"{self.module} has no {self.name}")
        return self.adapt(getattr(module, self.name))


def _plain(function: Loss) -> Loss:
    return function


def _without_float(cross_entropy: Any) -> Loss:
    return lambda h, w, y: cross_entropy(F.linear(h, w), y)


def _compiled(compiler: Any) -> Loss:
    torch.compiler.reset()  # or recompilation limits leave later shapes uncompiled
    loss: Loss = compiler(unfused, dynamic=False)
    return loss


def _chunked(options: Any) -> Loss:
    loss: Loss = functools.partial(F.linear_cross_entropy, options=options())
    return loss


def _chunks_of_2048(function: Any) -> Loss:
    # the default of 4096 fails for a hidden size of 4096
    loss: Loss = functools.partial(function, chunk_size=2048)
    return loss


def _unfiltered(function: Any) -> Loss:
    loss: Loss = functools.partial(function, filter_eps=None)
    return loss


def _first_output(function: Any) -> Loss:
    return lambda h, w, y: function.apply(h, w, y)[0]


def _first_output_float32(function: Any) -> Loss:
    defaults = (
        None,
        None,
        -100,
        0.0,
        0.0,
        "mean",
        None,
        False,
    )  # of the arguments before accum_dtype
    return lambda h, w, y: function.apply(h, w, y, *defaults, torch.float32)[0]


QUACK = "quack.linear_cross_entropy", "chunked_linear_cross_entropy"
LIGER = "liger_kernel.ops.fused_linear_cross_entropy", "LigerFusedLinearCrossEntropyFunction"
LIGER_HOPPER = (
    "liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90",
    "liger_fused_linear_cross_entropy_sm90",
)
PEERS = {
    "torch without float()": Peer("torch.nn.functional", "cross_entropy", _without_float),
    "torch.compile": Peer("torch", "compile", _compiled),
    "torch linear_cross_entropy": Peer("torch.nn.functional", "linear_cross_entropy", _plain),
    "torch linear_cross_entropy, chunks": Peer("torch.nn", "LinearCrossEntropyOptions", _chunked),
    "quack": Peer(*QUACK, _plain, tunes=True),
    "quack, chunks of 2048": Peer(*QUACK, _chunks_of_2048, tunes=True),
    "Liger": Peer(*LIGER, _first_output),
    "Liger, float32 accumulation": Peer(*LIGER, _first_output_float32),
    "Liger CuTe DSL": Peer(*LIGER_HOPPER, _plain),
    "CCE": Peer("cut_cross_entropy", "linear_cross_entropy", _plain),
    "CCE, no filtering": Peer("cut_cross_entropy", "linear_cross_entropy", _unfiltered),
}
"""quack accumulates gradients in float32 in all of its pipelines; CCE drops gradients below a
threshold by default."""


@dataclass(frozen=True)
class FrozenRow(step.Row):
    """A row of a frozen head."""

    frozen: str = "weight"


@dataclass(frozen=True)
class IgnoredRow(step.Row):
    """A row of a batch with ignored targets."""

    ignored_percent: int = 0


@click.command("peers")
@click.option(
    "--table", "tables", multiple=True, type=click.Choice(TABLES), help="Some of the tables alone."
)
@click.option(
    "--ignored-percent",
    "percents",
    multiple=True,
    type=click.IntRange(0, 99),
    help="Other parts of the targets that are ignored.",
)
@click.option(
    "--peer", "names", multiple=True, type=click.Choice(tuple(PEERS)), help="Some peers alone."
)
@shape_options
@repeats_option(7)
@click.pass_obj
def command(
    output: Output,
    /,
    tables: tuple[str, ...],
    percents: tuple[int, ...],
    names: tuple[str, ...],
    repeats: int,
    **sizes: Any,
) -> None:
    """Forward and backward at models' shapes and every budget, interleaved with peers."""
    name, shapes = chosen_shapes("peers", SHAPES[DEVICE], sizes)
    ignored_tasks = tuple(step.Task(ignored_percent=p) for p in percents or IGNORED_PERCENT)
    losses_of = functools.cache(functools.partial(usable, names or tuple(PEERS)))

    def measure(tasks: tuple[step.Task, ...], task: step.Task, shape: Shape) -> list[step.Row]:
        workspaces = FROZEN_WORKSPACES if task.is_frozen else tuple(step.WORKSPACES)
        losses = losses_of(shape, DEVICE, tasks)
        return step.run(shape, DEVICE, repeats, workspaces, losses, task)

    def frozen(shape: Shape) -> list[FrozenRow]:
        rows = measure((FROZEN,), FROZEN, shape)
        return [FrozenRow(**asdict(row)) for row in rows]

    def ignoring(task: step.Task, shape: Shape) -> list[IgnoredRow]:
        rows = measure(ignored_tasks, task, shape)
        return [IgnoredRow(**asdict(row), ignored_percent=task.ignored_percent) for row in rows]

    def ignored(task: step.Task) -> Measurement:
        (plain,) = per_shape(shapes[:1], functools.partial(ignoring, task))
        return replace(plain, key={**plain.key, "ignored_percent": task.ignored_percent})

    plain = functools.partial(measure, (step.PLAIN,), step.PLAIN)
    measurements = {
        "trained": per_shape(shapes, plain),
        "frozen-head": per_shape(shapes, frozen),
        "ignored-rows": [ignored(task) for task in ignored_tasks],
    }
    for table in tables or TABLES:
        infix = "" if table == "trained" else "_" + table.replace("-", "_")
        output.record(name.replace("peers", f"peers{infix}"), measurements[table])


def usable(
    names: Sequence[str], shape: Shape, device: str, tasks: Sequence[step.Task]
) -> dict[str, Loss | str]:
    """Return the peers' losses, or why one is unavailable for one of the tasks at `shape`.

    What runs out of memory beside the others runs again alone.
    """
    attempt = functools.partial(refusal, shape=shape, device=device, tasks=tasks)
    shared = [name for name in names if not PEERS[name].tunes]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        reasons = dict(
            zip(shared, pool.map(attempt, [PEERS[name] for name in shared]), strict=True)
        )
    losses: dict[str, Loss | str] = {}
    for name in names:
        if reasons.get(name, OUT_OF_MEMORY) == OUT_OF_MEMORY:
            reasons[name] = attempt(PEERS[name])
        losses[name] = reasons[name] or PEERS[name].load()
    return losses


def refusal(peer: Peer, shape: Shape, device: str, tasks: Sequence[step.Task]) -> str | None:
    """Run `first_steps` in a subprocess; return why that fails, or None."""
    package = peer.module.partition(".")[0]
    if find_spec(package) is None:  # which needs no subprocess
        return f"not available: No module named {package!r}"
    with SubprocessWorker() as child:
        try:
            return child.ask(functools.partial(first_steps, peer, shape, device, tasks), SECONDS)
        except WorkerError as error:
            return OUT_OF_MEMORY if error.is_out_of_memory else str(error)


def first_steps(peer: Peer, shape: Shape, device: str, tasks: Sequence[step.Task]) -> str | None:
    """Run a step of each task on random inputs; return why `peer` has no loss, or None."""
    try:
        loss = peer.load()
    except ImportError as error:
        return f"not available: {error}"
    h, w, y = random_inputs(shape, device)
    for task in tasks:
        task.step(loss, h, w, ignore_some(y, task.ignored_percent))
    if device != "cpu":
        torch.cuda.synchronize()
    return None
