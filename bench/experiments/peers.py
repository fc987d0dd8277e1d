"""cutefce at its budgets, and other fused linear cross entropies, as their documentation says.

Each of the others runs with its defaults, and a second time where an option accumulates gradients
in float32 instead of the inputs' dtype.  A peer that is not installed, fails, or is wrong gives a
row with the reason.  There are three tables:

peers                 both gradients; the peers of the README at every head, all at the first
peers_frozen_head     dX alone, at the first head: the weight has no gradient
peers_ignored_rows    both gradients, at the first head, a part of the targets ignored at random

`quick` writes the README's part of the first to a table of its own, peers_quick.

Before anything is timed, every peer runs all of its steps in its own subprocess, most of them at
once: a peer may crash, or leave the GPU unusable for its process, and what it compiles is cached on
disk.  These processes end before the first timing.
"""

import functools
import importlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
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
    repeats_option,
    shape_options,
)
from bench.harness.problems import CPU_SHAPE, Loss, Shape, ignore_some, random_inputs, sizes_of
from bench.harness.records import Measurement, Row
from bench.harness.reference import unfused
from cutefce.cute_kernels.jit.subprocess_worker import SubprocessWorker, WorkerError

MAIN_HEAD = Shape(8192, 4096, 131072, "bfloat16")
"""The head of the README's plot, and of frozen heads and ignored targets."""
LARGE_HEAD = Shape(16384, 7168, 129280, "bfloat16")
SHAPES = {
    "cpu": (CPU_SHAPE,),
    "cuda": (
        MAIN_HEAD,
        LARGE_HEAD,
        Shape(32768, 4096, 131072, "bfloat16"),
        Shape(8192, 2304, 256000, "bfloat16"),
    ),
}
README_SHAPES = {"cpu": (CPU_SHAPE,), "cuda": (MAIN_HEAD, LARGE_HEAD)}
README_WORKSPACES = "max", "1 GiB", "min"
README_PEERS = "Liger CuTe DSL", "torch.compile", "Liger", "CCE"
"""Columns and rows of the README's table."""
FROZEN_WORKSPACES = "max", "default", "1 GiB", *step.SMALL_WORKSPACES, "min"
"""Budgets of a frozen head."""
IGNORED_PERCENT = 50, 80, 95
"""Parts of the targets that are ignored."""
TABLES = "trained", "frozen-head", "ignored-rows"
SECONDS = 120
"""Time limit of a peer's first step of a task, including compilation and tuning."""
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


Case = tuple[Shape, step.Task]


@dataclass(frozen=True)
class Comparison:
    """What one file of results compares."""

    peers: Mapping[Case, Sequence[str]]
    """Keys of `PEERS` by what they compute."""
    workspaces: tuple[str, ...]
    """Keys of `step.WORKSPACES` and `step.SMALL_WORKSPACES`."""


@click.command("peers")
@click.option(
    "--table", "tables", multiple=True, type=click.Choice(TABLES), help="Some of the tables alone."
)
@click.option(
    "--ignored-percent",
    "percents",
    multiple=True,
    type=click.IntRange(1, 99),
    help="Other parts of the targets that are ignored.",
)
@click.option(
    "--peer", "names", multiple=True, type=click.Choice(tuple(PEERS)), help="Some peers alone."
)
@shape_options
@repeats_option
@click.pass_obj
def command(
    output: Output,
    /,
    tables: tuple[str, ...],
    percents: tuple[int, ...],
    names: tuple[str, ...],
    repeats: int | None,
    **sizes: Any,
) -> None:
    """Forward and backward of heads at every budget, interleaved with peers."""
    name, shapes = chosen_shapes("peers", SHAPES[DEVICE], sizes)
    first, some = shapes[0], names or README_PEERS
    trained = {(shape, step.PLAIN): some for shape in shapes}
    trained[first, step.PLAIN] = names or tuple(PEERS)
    ignoring = [step.Task(ignored_percent=percent) for percent in percents or IGNORED_PERCENT]
    comparisons = {
        "trained": Comparison(trained, tuple(step.WORKSPACES)),
        "frozen-head": Comparison({(first, step.FROZEN): some}, FROZEN_WORKSPACES),
        "ignored-rows": Comparison({(first, task): some for task in ignoring}, README_WORKSPACES),
    }
    files = {
        name if table == "trained" else name.replace("peers", f"peers_{table.replace('-', '_')}"): (
            comparisons[table]
        )
        for table in tables or TABLES
    }
    record(output, files, repeats)


@click.command("quick")
@click.pass_obj
def quick(output: Output, /) -> None:
    """The README's table on this machine's GPU, in minutes; it replaces no rows of `peers`."""
    peers = {(shape, step.PLAIN): README_PEERS for shape in README_SHAPES[DEVICE]}
    record(output, {"peers_quick": Comparison(peers, README_WORKSPACES)}, None)


def record(output: Output, files: Mapping[str, Comparison], repeats: int | None) -> None:
    """Measure comparisons by the names of their files; all peers run once before the first."""
    reasons = functools.cache(functools.partial(refusals, files.values(), DEVICE))

    def measure(comparison: Comparison, case: Case) -> list[step.Row]:
        (shape, task), losses = case, {}
        for name in comparison.peers[case]:
            losses[name] = reasons()[name, case] or PEERS[name].load()
        return step.run(shape, DEVICE, repeats, comparison.workspaces, losses, task)

    def measurement(comparison: Comparison, case: Case) -> Measurement:
        shape, task = case
        key: Row = {**sizes_of(shape)}
        if task.is_frozen:
            key["frozen"] = "weight"
        if task.ignored_percent:
            key["ignored_percent"] = task.ignored_percent
        return Measurement(key, functools.partial(measure, comparison, case))

    for name, comparison in files.items():
        output.record(name, [measurement(comparison, case) for case in comparison.peers])


def refusals(comparisons: Iterable[Comparison], device: str) -> dict[tuple[str, Case], str | None]:
    """Return why each peer is unavailable for each case, or None; those that tune run alone.

    What runs out of memory beside the others runs again alone.
    """
    cases: dict[str, list[Case]] = {}
    for comparison in comparisons:
        for case, names in comparison.peers.items():
            for name in names:
                cases.setdefault(name, []).append(case)

    def attempt(name: str, some: Sequence[Case]) -> dict[tuple[str, Case], str | None]:
        return {(name, case): said for case, said in refusals_of(PEERS[name], some, device).items()}

    found: dict[tuple[str, Case], str | None] = {}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        shared = [name for name in cases if not PEERS[name].tunes]
        for some in pool.map(attempt, shared, [cases[name] for name in shared]):
            found |= some
    for name in cases:
        again = [x for x in cases[name] if found.get((name, x), OUT_OF_MEMORY) == OUT_OF_MEMORY]
        found |= attempt(name, again)
    return found


def refusals_of(peer: Peer, cases: Sequence[Case], device: str) -> dict[Case, str | None]:
    """Run `first_step` of each case in one subprocess; return why it fails, or None."""
    package = peer.module.partition(".")[0]
    if find_spec(package) is None:  # which needs no subprocess
        return dict.fromkeys(cases, f"not available: No module named {package!r}")
    found: dict[Case, str | None] = {}
    with SubprocessWorker() as child:
        for case in cases:
            try:
                found[case] = child.ask(functools.partial(first_step, peer, case, device), SECONDS)
            except WorkerError as error:
                found[case] = OUT_OF_MEMORY if error.is_out_of_memory else str(error)
    return found


def first_step(peer: Peer, case: Case, device: str) -> str | None:
    """Run a step on random inputs; return why `peer` has no loss, or None."""
    os.environ.pop("TORCHDYNAMO_DISABLE", None)  # what torch.compile compiles is cached, too
    try:
        loss = peer.load()
    except ImportError as error:
        return f"not available: {error}"
    shape, task = case
    h, w, y = random_inputs(shape, device)
    task.step(loss, h, w, ignore_some(y, task.ignored_percent))
    if device != "cpu":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # other peers run beside
    return None
