"""`cutefce tune`: finds the fastest configurations on this machine's GPU."""

import functools
import time
from collections.abc import Callable
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from cutefce.autotune_cache import lookup, table_io
from cutefce.autotune_cache.tuning import jobs as tuned
from cutefce.autotune_cache.tuning import runner, tuner
from cutefce.autotune_cache.tuning import verify as verification
from cutefce.autotune_cache.tuning.jobs import Job
from cutefce.autotune_cache.tuning.shapes import NAMED, Sizes
from cutefce.commands.common import (
    describe,
    dtype_option,
    has_gpu,
    make_console,
    printable,
    require_passed,
    shapes_option,
    this_gpu,
    winners,
)
from cutefce.cute_kernels.jit.subprocess_worker import SubprocessWorker, WorkerError


@click.command(short_help="Find the fastest configurations on this GPU.")
@shapes_option("Problems", default=tuple(NAMED), show_default="all sets")
@dtype_option
@click.option(
    "--budget-minutes",
    type=click.FloatRange(min=0),
    default=10.0,
    show_default=True,
    help="Time after which no further problem is begun.",
)
@click.option(
    "--resume",
    is_flag=True,
    help="Skip what the table has, if it is of these kernels and this compiler.",
)
@click.option("--dry-run", is_flag=True, help="Show the candidates and exit; needs no GPU.")
@click.option(
    "--output-dir",
    type=click.Path(file_okay=False, path_type=Path),
    default=lookup.user_folder,
    help="Folder of the table to write.  [default: the user's]",
)
def tune(
    shapes: tuple[Sizes, ...],
    dtype: str,
    budget_minutes: float,
    resume: bool,
    dry_run: bool,
    output_dir: Path,
) -> None:
    """Find the fastest configurations on this GPU and write them to a table.

    With --dry-run and without a GPU that has kernels, shows the candidates of the GPU model that
    has a shipped table.
    """
    end = time.monotonic() + 60 * budget_minutes
    is_shown = dry_run and not has_gpu()
    gpu, device = (lookup.shipped_tables()[0].gpu, "cuda") if is_shown else this_gpu()
    header, path = tuner.header_for(gpu), output_dir / table_io.file_name(gpu)
    jobs = tuned.jobs_of(runner.Runner(gpu, device), shapes, dtype)
    done = tuner.read_done(path, header).entries if resume else {}
    todo = [job for job in jobs if job.key not in done]
    console = make_console()
    console.print(f"{gpu.name}: {len(todo)} of {len(jobs)} problems to tune")
    if dry_run:
        for job in todo:
            console.print(f"{job}: {'; '.join(map(describe, job.candidates))}")
        return
    failures: dict[Job, str] = {}
    try:
        with console.status("verifying the kernels"):
            require_passed(verification.verify_once(runner.Runner(gpu, device), dtype), gpu, dtype)
        with SubprocessWorker() as process:
            tune_one = functools.partial(tuner.tune, process=process, path=path, header=header)
            left = _run(console, todo, tune_one, failures, end)
    except RuntimeError as error:  # no subprocess
        raise click.ClickException(str(error)) from error
    entries = tuner.read_done(path, header).entries
    console.print(winners((gpu, job.key, entries[job.key]) for job in jobs if job.key in entries))
    for job, reason in failures.items():
        console.print(f"left out: {job}: {printable(reason)}")
    console.print(f"written: {path}")
    if left:
        console.print(f"{left} problems are left; to continue, run the same command with --resume")


def _run(
    console: Console,
    jobs: list[Job],
    tune_one: Callable[[Job], object],
    failures: dict[Job, str],
    end: float,
) -> int:
    """Compile, then tune one problem after another until the time is over; note why some fail.

    Return how many are left.
    """
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        tuning = progress.add_task("", total=len(jobs))
        verification.compile_all(
            (kernel for job in jobs for kernel in job.kernels()),
            lambda step: progress.update(tuning, description=step),
        )
        for done, job in enumerate(jobs):
            if not time.monotonic() <= end:
                return len(jobs) - done
            progress.update(tuning, description=str(job), completed=done)
            try:
                tune_one(job)
            except WorkerError as error:
                failures[job] = str(error)
    return 0
