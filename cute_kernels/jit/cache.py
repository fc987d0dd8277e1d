"""Compiled kernels: in this process, the user's cache folder, the package, or from the compiler.

A library lies at <folder>/<fingerprint>/<key>.so.  The fingerprint covers the kernels' sources and
the versions of the compiler, the key a kernel's description.  Loading one takes a millisecond and
needs only the compiler's small runtime library, not the compiler.  A file ends with the digest of
what comes before it, which loaders do not look at: whatever is damaged or foreign is compiled
again.  Processes that need the same kernel wait for the first one's; a process that dies leaves
nothing that others would wait for or take.  Where the folder cannot be written, or no linker (cc)
is there, the kernel serves this process alone.

The package's folder, which `make wheel` fills, obeys the same rules but is never written to: what
cannot be used there is compiled into the user's.
"""

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import filelock
import platformdirs

from cutefce.cute_kernels.jit.compiler import OPTIONS, SYMBOL, Report, compile_kernel, report
from cutefce.cute_kernels.spec import KernelSpec

CACHE_VARIABLE = "CUTEFCE_CACHE_DIR"
"""Environment variable that names another cache folder."""
SOURCES = Path(__file__).parent.parent
"""The package of all kernels."""
PREBUILT_FOLDER = SOURCES / "prebuilt"
"""The package's folder of libraries; only a wheel of `make wheel` has it."""
LOCK_SECONDS = 120
"""How long to wait for another process that compiles the same kernel."""

compile_count = 0
"""Kernels that this process has compiled."""

_lock = threading.Lock()
_loaded: dict[KernelSpec, Any] = {}


def compiled(kernel: KernelSpec) -> Any:
    """Return the function that launches `kernel` on torch's current stream."""
    function = _loaded.get(kernel)
    if function is None:
        with _lock:  # the compiler is not made for threads
            function = _loaded.get(kernel) or _load_or_compile(kernel)
            _loaded[kernel] = function
    return function


def compile_ahead(kernel: KernelSpec) -> Report:
    """Compile `kernel` into the cache folder and return what the assembler said of it."""
    result, function = report(kernel)
    store(kernel, lambda: function)
    return result


def base_folder() -> Path:
    """Return the user's folder of everything that cutefce keeps; it need not exist."""
    given = os.environ.get(CACHE_VARIABLE)
    return Path(given) if given else platformdirs.user_cache_path("cutefce")


def cache_folder() -> Path:
    """Return the folder of this version's libraries; it need not exist."""
    return base_folder() / fingerprint()


def prebuilt_folder() -> Path:
    """Return the folder of this version's libraries in the package; it need not exist."""
    return PREBUILT_FOLDER / fingerprint()


@functools.cache
def fingerprint() -> str:
    """Return what libraries depend on besides their description, as 16 hexadecimal digits."""
    digest = hashlib.sha256()
    for source in sorted(SOURCES.rglob("*.py")):
        digest.update(
            source.relative_to(SOURCES).as_posix().encode() + b"\0" + source.read_bytes() + b"\0"
        )
    versions = [_version(name) for name in ("nvidia-cutlass-dsl", "apache-tvm-ffi")]
    digest.update(repr((versions, platform.machine(), OPTIONS)).encode())
    return digest.hexdigest()[:16]


@functools.cache
def source_fingerprint() -> str:
    """Return a digest of the kernels' sources alone, as 16 hexadecimal digits."""
    digest = hashlib.sha256()
    for source in sorted(SOURCES.rglob("*.py")):
        name = source.relative_to(SOURCES).as_posix()
        digest.update(name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def library_path(kernel: KernelSpec) -> Path:
    """Return where the library of `kernel` lies in the cache folder, or would lie."""
    key = hashlib.sha256(repr(kernel).encode()).hexdigest()[:16]
    return cache_folder() / f"{type(kernel).__name__}-{key}.so"


def is_stored(kernel: KernelSpec) -> bool:
    """Whether a library of `kernel` lies in the cache folder or in the package."""
    return any(_stored(kernel))


def _stored(kernel: KernelSpec) -> Iterator[Path]:
    path = library_path(kernel)
    return filter(_is_whole, (path, prebuilt_folder() / path.name))


def store(kernel: KernelSpec, compile_: Callable[[], Any]) -> Path:
    """Put the library of `kernel` into the cache folder, if it is not there; return its path.

    Raises:
        OSError, filelock.Timeout: if the folder cannot be written or its lock be had.
    """
    path = library_path(kernel)
    if not _is_whole(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(f"{path}.lock", timeout=LOCK_SECONDS):
            if not _is_whole(path):
                _write(path, compile_())
    return path


def _load_or_compile(kernel: KernelSpec) -> Any:
    for path in _stored(kernel):
        with contextlib.suppress(OSError):
            return _load(path)
    try:
        return _load(store(kernel, lambda: _compile(kernel)))
    except (OSError, filelock.Timeout):
        return _compile(kernel)


def _compile(kernel: KernelSpec) -> Any:
    global compile_count
    compile_count += 1
    return compile_kernel(kernel)


def _write(path: Path, function: Any) -> None:
    """Export and link `function`; the file appears whole or not at all."""
    linker = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if linker is None:
        raise FileNotFoundError("no linker: cc, gcc and clang are not in PATH")
    part, temporary = path.with_suffix(".o"), path.with_suffix(".tmp")
    function.export_to_c(str(part), SYMBOL)
    command = [linker, "-shared", "-o", str(temporary), str(part)]
    result = subprocess.run(command, capture_output=True, text=True)
    part.unlink()
    if result.returncode:
        raise OSError(f"{' '.join(command)}: {result.stderr}")
    content = temporary.read_bytes()
    temporary.write_bytes(content + hashlib.sha256(content).digest())
    os.replace(temporary, path)


def _is_whole(path: Path) -> bool:
    try:
        content = path.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(content[:-32]).digest() == content[-32:]


def _load(path: Path) -> Any:
    import tvm_ffi

    _load_runtime()
    try:
        return tvm_ffi.load_module(str(path))[SYMBOL]
    except (AttributeError, RuntimeError) as error:
        raise OSError(f"{path} does not load: {error}") from error


@functools.cache
def _load_runtime() -> ctypes.CDLL:
    """Load what the libraries call, of the newest CUDA that the compiler was installed for."""
    package = find_spec("nvidia_cutlass_dsl")
    places = package.submodule_search_locations if package else None
    found = [
        library
        for place in places or ()
        for library in Path(place).glob("cu*/lib/libcute_dsl_runtime.so")
    ]
    if not found:
        raise FileNotFoundError("libcute_dsl_runtime.so of nvidia-cutlass-dsl was not found")
    return ctypes.CDLL(str(max(found)), ctypes.RTLD_GLOBAL)
