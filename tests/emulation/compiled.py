"""Compiles kernels for tests: their PTX and a host function without a device.

Results are kept in `build/`, for other test processes and later runs.  Their folder's name covers
the kernels' sources, the compiler and how they are compiled here.
"""

import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from cutefce.cute_kernels import cache_files
from cutefce.cute_kernels.jit import cache
from cutefce.cute_kernels.jit.compiler import SYMBOL, compile_kernel
from cutefce.cute_kernels.spec.kernel import KernelSpec

HERE = Path(__file__)
DRIVER = HERE.with_name("driver.c")
BUILD = HERE.parents[2] / "build" / "kernels-of-tests"
KEPT_SECONDS = 24 * 3600
"""Folders of other sources that were not used for longer are removed."""


@dataclass(frozen=True)
class Compiled:
    """The files of a compiled kernel."""

    folder: Path

    @property
    def library(self) -> Path:
        """The host function, linked with `driver.c` instead of the CUDA runtime."""
        return self.folder / "kernel.so"

    @functools.cached_property
    def ptx(self) -> str:
        """The code of the kernels that it launches."""
        return (self.folder / "kernel.ptx").read_text()


@functools.cache
def compiled(kernel: KernelSpec) -> Compiled:
    """Return the files of `kernel`; one process compiles while others wait."""
    key = hashlib.sha256(repr(kernel).encode()).hexdigest()[:16]
    folder = _folder() / f"{type(kernel).__name__}-{key}"
    with cache_files.lock(folder.with_suffix(".files")):
        if not folder.exists():
            with tempfile.TemporaryDirectory(dir=folder.parent) as name:
                made = Path(name, "made")
                made.mkdir()
                _compile(kernel, made)
                made.rename(folder)  # whole or not at all
    return Compiled(folder)


@functools.cache
def _folder() -> Path:
    """Return the folder of all that is compiled of these sources, and remove old ones."""
    how = hashlib.sha256(HERE.read_bytes() + DRIVER.read_bytes()).hexdigest()[:8]
    folder = BUILD / f"{cache.fingerprint()}-{how}"
    folder.mkdir(parents=True, exist_ok=True)
    os.utime(folder)
    for other in BUILD.iterdir():
        if other.stat().st_mtime < time.time() - KEPT_SECONDS:
            shutil.rmtree(other, ignore_errors=True)
    return folder


def _compile(kernel: KernelSpec, folder: Path) -> None:
    dumps = folder / "dumps"
    dumps.mkdir()
    function = compile_kernel(kernel, f"--keep-ptx --dump-dir {dumps}")
    (folder / "kernel.ptx").write_text(function.artifacts.PTX)
    shutil.rmtree(dumps)
    code = folder / "kernel.o"
    function.export_to_c(str(code), SYMBOL)
    linker = shutil.which("cc") or shutil.which("gcc") or "clang"
    # its own symbols come before those of a loaded runtime
    options = "-shared", "-fPIC", "-w", "-Wl,-Bsymbolic", "-o", folder / "kernel.so"
    subprocess.run([linker, *options, code, DRIVER], check=True)
    code.unlink()
