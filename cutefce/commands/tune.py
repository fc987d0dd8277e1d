"""`cutefce tune`: finds the fastest configurations on this machine's GPU."""

import contextlib
import math
import time
from pathlib import Path

import click
from rich.text import Text

from cutefce.autotune_cache import lookup, tables
from cutefce.autotune_cache.tables import Entry, Key
from cutefce.autotune_cache.tuning import runner, tuner
from cutefce.autotune_cache.tuning import verify as verification
from cutefce.autotune_cache.tuning.shapes import NAMED, Sizes
from cutefce.autotune_cache.tuning.tuner import Job
from cutefce.autotune_cache.verdicts import STEP, parts_of
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
    if math.isnan(budget_minutes):
        raise click.BadParameter("got nan, expected at least 0", param_hint="--budget-minutes")
    end = time.monotonic() + 60 * budget_minutes
    is_shown = dry_run and not has_gpu()
    gpu, device = (lookup.shipped_tables()[0].gpu, "cuda") if is_shown else this_gpu()
    header, path = tuner.header_for(gpu), output_dir / tables.file_name(gpu)
    own = runner.Runner(gpu, device)
    jobs, done = tuner.jobs_of(own, shapes, dtype), dict[Key, Entry]()
    if resume:
        with contextlib.suppress(OSError):
            done.update(tables.read_like(path, header).entries)
    todo = [job for job in jobs if job.key not in done]
    console = make_console()
    console.print(f"{gpu.name}: {len(todo)} of {len(jobs)} problems to tune")
    if dry_run:
        for job in todo:
            console.print(f"{job}: {'; '.join(map(describe, job.candidates))}")
        return
    waiting, failures = [*todo], dict[Job, str]()
    try:
        with console.status("verifying the kernels") as status, SubprocessWorker() as process:
            require_passed(verification.verify_once(own, dtype), gpu, dtype)
            verification.compile_all(own, dtype, parts_of(STEP))
            while waiting and time.monotonic() <= end:
                job = waiting.pop(0)
                status.update(Text(f"{job}; {len(waiting)} problems are left"))
                try:
                    done[job.key] = tuner.tune(job, process, path, header)
                except WorkerError as error:
                    failures[job] = str(error)
    except RuntimeError as error:  # no subprocess, or a kernel that does not compile
        raise click.ClickException(str(error)) from error
    console.print(winners((gpu, job.key, done[job.key]) for job in jobs if job.key in done))
    for job, reason in failures.items():
        console.print(f"left out: {job}: {printable(reason)}")
    console.print(f"written: {path}")
    if waiting:
        console.print(
            f"{len(waiting)} problems are left; to continue, run the same command with --resume"
        )
