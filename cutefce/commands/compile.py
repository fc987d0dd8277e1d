"""`cutefce compile`: compiles the kernels ahead of their first use."""

import contextlib
import dataclasses
import importlib
import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import click
from rich.table import Table

from cutefce.autotune_cache.tuning.runner import all_kernels
from cutefce.commands.common import make_console
from cutefce.cute_kernels import cache_files
from cutefce.cute_kernels.arch import ARCHS, arch_named
from cutefce.cute_kernels.jit import cache as jit_cache
from cutefce.cute_kernels.jit.compiler import Report
from cutefce.cute_kernels.spec.kernel import KernelSpec
from cutefce.cute_kernels.variant import IDENTITY, SUM_ONLY

MAX_VARIANT_SPILL_BYTES = 32
"""Stores and loads of spilled scalars that a logit transform may cost a tile: softcap with stored
exponentials takes 24, and no measurable time (`bench options`)."""


@click.command("compile", short_help="Compile all kernels into the cache folder.")
@click.option(
    "--arch",
    "names",
    default=",".join(arch.name for arch in ARCHS),
    show_default=True,
    help="Architectures, separated by commas.",
)
def compile_kernels(names: str) -> None:
    """Compile every kernel that a call may choose into the cache folder; needs no GPU.

    Fails if a kernel spills registers or its WGMMA instructions are serialized.
    """
    try:
        archs = [arch_named(name) for name in names.split(",")]
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--arch") from error
    clean, folder = True, jit_cache.cache_folder()
    cache_files.make_folder(folder)
    kernels = [kernel for arch in archs for kernel in all_kernels(arch)]
    table = Table("arch", "kernel", "", "registers", "spilled B", "seconds", "warnings")
    for report in _reports(kernels):
        table.add_row(*_cells(report))
        clean &= compiled_clean(report)
    make_console().print(table)
    click.echo(f"{len(kernels)} kernels in {folder}")
    if not clean:
        raise click.ClickException("a kernel spills registers or serializes WGMMA instructions")


def compiled_clean(report: Report) -> bool:
    """Whether MMAs overlap and nothing is spilled, but for a transform's scalars once a tile."""
    transform = getattr(report.kernel, "transform", IDENTITY)
    allowed = 0 if transform == IDENTITY else MAX_VARIANT_SPILL_BYTES
    return not report.warnings and report.spill_bytes <= allowed


def _reports(kernels: list[KernelSpec]) -> Iterator[Report]:
    """Compile kernels in several processes; the first error ends them.

    Raises:
        ClickException: without the compiler.
        OSError: if a kernel cannot be linked or stored.
    """
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(os.cpu_count(), context, _leave_out_source_locations)
    try:
        yield from pool.map(jit_cache.compile_ahead, kernels)
    except ImportError as error:
        needed = "pip install 'nvidia-cutlass-dsl[cu13]' apache-tvm-ffi"
        raise click.ClickException(f"{error}; the compiler is needed: {needed}") from error
    finally:
        pool.shutdown(cancel_futures=True)


def _leave_out_source_locations() -> None:
    """Keep the compiler from looking for the source line of every instruction.

    It does so where it is asked for the assembler's remarks, in a third of the time that compiling
    takes; these remarks do not name any.
    """
    with contextlib.suppress(ImportError):  # which compiling itself raises
        dsl = importlib.import_module("cutlass.base_dsl.dsl")
        vars(dsl)["_set_enable_frame_filtering"] = lambda enable: None


def _cells(report: Report) -> list[str]:
    kernel = report.kernel
    details = {f.name: getattr(kernel, f.name) for f in dataclasses.fields(kernel)}
    shown = (name for name, value in details.items() if value not in (IDENTITY, SUM_ONLY))
    details = {name: details[name] for name in shown if details[name] and name != "arch"}
    return [
        kernel.arch,
        type(kernel).__name__,
        ", ".join(name if value is True else str(value) for name, value in details.items()),
        str(report.registers),
        str(report.spill_bytes),
        f"{report.seconds:.1f}",
        " ".join(report.warnings),
    ]
