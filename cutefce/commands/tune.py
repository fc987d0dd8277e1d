"""`python -m cutefce tune` and `verify`: what runs kernels on this machine's GPU to judge them."""

import itertools
import sys
import time
from pathlib import Path

import click
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from cutefce.autotune_cache import lookup, table, table_io, verdicts
from cutefce.autotune_cache.tuning import candidates, tuner
from cutefce.autotune_cache.tuning import verify as verification
from cutefce.autotune_cache.tuning.candidates import Job
from cutefce.autotune_cache.tuning.shapes import NAMED, Sizes, parse
from cutefce.autotune_cache.tuning.subprocess_worker import Child
from cutefce.autotune_cache.tuning.targets import all_tunables
from cutefce.autotune_cache.tuning.targets.base import Tunable
from cutefce.autotune_cache.tuning.tuner import Outcome
from cutefce.cute_kernels.arch import arch_for
from cutefce.ops.primitives.dispatch import gpu_of


def _sizes_of(
    context: click.Context, option: click.Parameter, given: tuple[str, ...]
) -> tuple[Sizes, ...]:
    """Return the problems of all sets that were given, each once."""
    try:
        return tuple(dict.fromkeys(sizes for text in given for sizes in parse(text)))
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


@click.command()
@click.option(
    "--shapes",
    multiple=True,
    default=tuple(NAMED),
    metavar="SET|NxDxV",
    callback=_sizes_of,
    help=f"Problems: {', '.join(NAMED)}, or tokens x hidden x vocabulary; may be given more than "
    "once.  [default: all sets]",
)
@click.option("--dtype", default="bfloat16", show_default=True, help="bfloat16 or float16.")
@click.option("--budget-minutes", type=float, default=10.0, show_default=True, help="Time to end.")
@click.option("--resume", is_flag=True, help="Leave out what the file has for these kernels.")
@click.option("--dry-run", is_flag=True, help="Say what would be tried.")
@click.option("--everything", is_flag=True, help="Try what the cost model leaves out, too.")
@click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    default=lookup.user_folder,
    help="Folder of the table that is written.  [default: the user's]",
)
def tune(
    shapes: tuple[Sizes, ...],
    dtype: str,
    budget_minutes: float,
    resume: bool,
    dry_run: bool,
    everything: bool,
    folder: Path,
) -> None:
    """Find the fastest configurations on this GPU, and write them to a table."""
    end = time.monotonic() + 60 * budget_minutes
    tunables, name = _this_gpu()
    if dtype not in tunables[0].arch.dtypes:
        raise click.BadParameter(f"dtype: got {dtype}, expected one of {tunables[0].arch.dtypes}")
    head, path = tuner.head_for(tunables[0], name), folder / table_io.file_name(name)
    jobs = [
        candidates.plan(tunable, tunable.problem(sizes, dtype), everything)
        for sizes, tunable in itertools.product(shapes, tunables)
    ]
    todo = [job for job in jobs if not (resume and tuner.is_done(job, path, head))]
    console = Console(width=None if sys.stdout.isatty() else 160)
    tried, pruned = sum(len(job.choices) for job in todo), sum(job.pruned for job in todo)
    console.print(f"{name}: {len(todo)} of {len(jobs)} problems to tune, in {tried} trials")
    console.print(f"the cost model leaves out {pruned} other candidates")
    if dry_run:
        for job in todo:
            console.print(f"{_sizes(job)} {job.tunable.name}: {'; '.join(map(str, job.choices))}")
        return
    try:
        with console.status("verifying the kernels"):
            _demand(verification.verify_once(tunables, name), name)
        outcomes = _run(console, todo, path, head, end)
    except (OSError, RuntimeError) as error:  # no child, or no file to write
        raise click.ClickException(str(error)) from error
    _report(console, jobs, tuner.read_like(path, head).entries, outcomes)
    console.print(f"written: {path}")
    if len(outcomes) < len(todo):
        console.print(f"{len(todo) - len(outcomes)} problems are left: go on with --resume")


@click.command()
def verify() -> None:
    """Check the kernels on this GPU against the portable path, and note the verdict."""
    tunables, name = _this_gpu()
    _demand(verification.verify(tunables, name), name)
    click.echo(f"the kernels are right on {name}")


def _demand(verdict: verdicts.Verdict, name: str) -> None:
    if not verdict.passed:
        raise click.ClickException(f"the kernels failed on {name}: {verdict.reason}")


def _this_gpu() -> tuple[tuple[Tunable, ...], str]:
    """Return what can be tuned on the current GPU, and the GPU's name."""
    if not torch.cuda.is_available() or arch_for(torch.cuda.get_device_capability()) is None:
        raise click.ClickException("there is no GPU here that has kernels")
    device = torch.device("cuda", torch.cuda.current_device())
    arch, name, num_sms = gpu_of(device)
    return all_tunables(arch, num_sms, str(device)), name


def _run(
    console: Console, jobs: list[Job], path: Path, head: table.Table, end: float
) -> list[Outcome]:
    """Compile, then tune one problem after another until the time is over."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        kernels = tuner.missing(kernel for job in jobs for kernel in job.kernels())
        compiling = progress.add_task("compiling", total=len(kernels))
        unusable = tuner.build(kernels, lambda: progress.advance(compiling))
        tuning = progress.add_task("tuning", total=sum(len(job.choices) for job in jobs))
        outcomes = []
        with Child() as child:
            work = tuner.Tuner(path, head, child, unusable)
            for job in jobs:
                if time.monotonic() > end:
                    break
                progress.update(tuning, description=f"{job.tunable.name} {_sizes(job)}")
                outcomes.append(work.tune(job, lambda: progress.advance(tuning)))
    return outcomes


def _report(
    console: Console, jobs: list[Job], entries: table.Entries, outcomes: list[Outcome]
) -> None:
    """Show the winners, old and new, and what was rejected."""
    table = Table(
        *("N × D × V", "kernel", "default ms", "winner ms", "gain", "of cuBLAS", "winner"),
    )
    for job in jobs:
        entry = entries.get(job.key)
        if entry is not None:
            table.add_row(
                _sizes(job),
                job.tunable.name,
                f"{entry.baseline_milliseconds:.3f}",
                f"{entry.milliseconds:.3f}",
                f"{entry.baseline_milliseconds / entry.milliseconds - 1:.1%}",
                f"{entry.milliseconds / entry.product_milliseconds:.3f}",
                _name(entry.config),
            )
    console.print(table)
    for outcome in outcomes:
        for choice, reason in outcome.failures.items():
            console.print(f"rejected: {_sizes(outcome.job)} {_name(choice)}: {reason}")


def _sizes(job: Job) -> str:
    problem = job.problem
    return f"{problem.tokens} × {problem.hidden} × {problem.vocab}"


def _name(choice: table.Choice) -> str:
    if isinstance(choice, int):
        return f"{choice} columns"
    return "cuBLAS" if choice is None else f"{choice}, groups of {choice.raster_group}"
