"""`cutefce info`: shows versions, the GPU, what serves each dtype, tables and compiled kernels."""

import os
from collections import Counter
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import click
import torch

from cutefce.autotune_cache import lookup, tables
from cutefce.commands.common import printable, whose_kernels
from cutefce.cute_kernels import cache_files
from cutefce.cute_kernels.jit import cache as jit_cache
from cutefce.cute_kernels.problem import ITEM_BYTES
from cutefce.ops.primitives.dispatch import device_unsupported_reason, has_triton

PACKAGES = ("cutefce", "torch", "nvidia-cutlass-dsl", "apache-tvm-ffi", "cuda-python")


@click.command(short_help="Show versions, GPU, backends and kernels.")
def info() -> None:
    """Show versions, the GPU, what serves each dtype and why, shipped tables, compiled kernels."""
    for name, text in _lines():
        click.echo(f"{name:20}  {printable(text)}")


def _lines() -> Iterator[tuple[str, str]]:
    """Yield subjects and what there is to say about them."""
    for name in PACKAGES:
        try:
            yield name, metadata.version(name)
        except metadata.PackageNotFoundError:
            yield name, "not installed"
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    yield "device", torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    for name in ITEM_BYTES:
        yield name, _served_by(device, getattr(torch, name))
    for path in sorted(lookup.SHIPPED_FOLDER.glob("*.json")):
        yield "tuned table", f"{path.name}: {_shipped_entries(path)}"
    try:
        folder = jit_cache.cache_folder()
        yield "cache", f"{_libraries(folder)}{_obstacle(folder)}"
    except OSError as error:  # a CacheError, or a folder that cannot be entered
        yield "cache", str(error)
    yield "prebuilt", _libraries(jit_cache.prebuilt_folder())
    for folder in sorted(jit_cache.PREBUILT_FOLDER.glob("*")):
        if folder != jit_cache.prebuilt_folder():
            yield "", f"{_libraries(folder)}: built for other versions, not used"


def _served_by(device: torch.device, dtype: torch.dtype) -> str:
    """Return what serves calls of a dtype, and why."""
    reason = device_unsupported_reason(device, dtype)
    if reason is None:
        return "kernels"
    uses_triton = device.type == "cuda" and dtype.itemsize == 2 and has_triton(device)
    return f"portable path{', on Triton' if uses_triton else ''}: {reason}"


def _shipped_entries(path: Path) -> str:
    """Return how many entries a table has of each dtype, and whether it proves the kernels."""
    table = tables.read(path)
    counts = Counter(key.dtype for key in table.entries)
    text = ", ".join(f"{counts[dtype]} entries for {dtype}" for dtype in table.dtypes)
    if table.build == lookup.current_build():
        return f"{text}, {whose_kernels(table)}"
    text += f", {whose_kernels(table)}: calls verify their groups of kernels"
    if torch.cuda.is_available() and torch.cuda.get_device_name() == table.gpu.name:
        text += f"; to renew it: cutefce verify --table {path}"
    return text


def _libraries(folder: Path) -> str:
    sizes = [path.stat().st_size for path in folder.glob("*.so")]
    return f"{folder} ({len(sizes)} kernels, {sum(sizes) / 2**20:.1f} MiB)"


def _obstacle(folder: Path) -> str:
    """Return why `folder` cannot be used, or written, after a colon; nothing if it can."""
    try:
        cache_files.check(folder)
    except FileNotFoundError:
        pass  # it is made when it is needed
    except OSError as error:
        return f": {error}"
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    return "" if os.access(existing, os.W_OK | os.X_OK) else f": {existing} cannot be written"
