"""Cache of compiled kernels: this process, the user's folder, the package's, then the compiler.

A call that misses a kernel says which others it launches, so that all of them are compiled at once.

A library's path is <folder>/<fingerprint>/<key>.so: the fingerprint covers the kernels' sources and
the compiler's version, the key covers the kernel spec.  Loading a library needs only the compiler's
small runtime library.  Each file ends with a digest of its content, which loaders ignore: damaged
and foreign files are compiled again.  One process compiles while others wait for its result; a
process that dies neither blocks the others nor leaves a partial library.  If the folder cannot be
written or is not trusted (`cache_files`), or no linker (cc) is found, a kernel is compiled for this
process only.

The package's folder, which `make wheel` fills, is read in the same way but never written.  It is
trusted as the package's modules are.
"""

import contextlib
import ctypes
import hashlib
import platform
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from cutefce.cute_kernels import cache_files
from cutefce.cute_kernels.cache_files import CacheError
from cutefce.cute_kernels.jit.canonical import canonical_source
from cutefce.cute_kernels.jit.compiler import OPTIONS, SYMBOL, compile_kernel
from cutefce.cute_kernels.jit.notices import compiling
from cutefce.cute_kernels.process_cache import process_cache, warn_once
from cutefce.cute_kernels.spec.kernel import KernelSpec

SOURCES = Path(__file__).parent.parent
"""The package whose sources the fingerprint covers."""
PREBUILT_FOLDER = SOURCES / "prebuilt"
"""The package's folder of libraries, which only wheels of `make wheel` contain."""

_lock = threading.Lock()
_loaded: dict[KernelSpec, Any] = {}


class CompilerError(RuntimeError):
    """A kernel could not be compiled, or what was compiled could not be loaded."""

    def __init__(self, kernel: KernelSpec, cause: Exception) -> None:
        super().__init__(f"the kernels' compiler failed: {type(cause).__name__}: {cause}")
        self.arch = kernel.arch


class _Thread(threading.local):
    """What this thread's calls of `compiled` mean."""

    recorded: dict[KernelSpec, None] | None = None
    """Receives the kernels, which are not launched; None to launch them."""
    make: Callable[[KernelSpec], object] | None = None
    """Compiles a kernel that is missing, with others that the running call launches."""


_thread = _Thread()


@contextlib.contextmanager
def recording() -> Iterator[dict[KernelSpec, None]]:
    """Yield a dictionary of the kernels that this thread would launch here; it launches none."""
    before, _thread.recorded = _thread.recorded, {}
    try:
        yield _thread.recorded
    finally:
        _thread.recorded = before


@contextlib.contextmanager
def made_by(make: Callable[[KernelSpec], object]) -> Iterator[None]:
    """Let `make` compile the first kernel that is missing here, and others, into the folder."""
    before, _thread.make = _thread.make, make
    try:
        yield
    finally:
        _thread.make = before


def _launch_nothing(*_: Any) -> None:
    """Do nothing."""


def compiled(kernel: KernelSpec) -> Any:
    """Return the function that launches `kernel` on torch's current stream.

    Raises:
        CompilerError: if it is not stored and cannot be compiled.
    """
    if _thread.recorded is not None:
        _thread.recorded[kernel] = None
        return _launch_nothing
    function = _loaded.get(kernel)
    if function is None:
        with _lock:  # the compiler is not thread-safe
            function = _loaded.get(kernel) or _load_or_compile(kernel)
            _loaded[kernel] = function
    return function


def cache_folder() -> Path:
    """Return the user's folder for libraries of this fingerprint; it may not exist."""
    return cache_files.base_folder() / fingerprint()


def prebuilt_folder() -> Path:
    """Return the package's folder for libraries of this fingerprint; it may not exist."""
    return PREBUILT_FOLDER / fingerprint()


@process_cache
def fingerprint() -> str:
    """Return 16 hex digits for all that libraries depend on besides their spec.

    Covers the sources, the versions of the compiler and of its runtime, the machine's architecture
    and the compile options.
    """
    versions = [package_version(name) for name in ("nvidia-cutlass-dsl", "apache-tvm-ffi")]
    parts = source_fingerprint(), versions, platform.machine(), OPTIONS
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


@process_cache
def source_fingerprint() -> str:
    """Return 16 hex digits for the Python sources below `SOURCES`.

    Covers relative paths and lines of code, without docstrings, comments and blank lines, but not
    the folder of this module, which no kernel depends on; every Python version computes the same
    digits.
    """
    digest = hashlib.sha256()
    paths = {path.relative_to(SOURCES).as_posix(): path for path in SOURCES.rglob("*.py")}
    paths = {name: path for name, path in paths.items() if not name.startswith("jit/")}
    for name in sorted(paths):
        digest.update(f"{name}\n{canonical_source(paths[name].read_bytes())}\n".encode())
    return digest.hexdigest()[:16]


@process_cache
def package_version(package: str) -> str:
    """Return the version of an installed package, "none" if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def library_path(kernel: KernelSpec) -> Path:
    """Return the path of the library of `kernel` in the cache folder; it may not exist."""
    return cache_folder() / _library_name(kernel)


def _library_name(kernel: KernelSpec) -> str:
    key = hashlib.sha256(repr(kernel).encode()).hexdigest()[:16]
    return f"{type(kernel).__name__}-{key}.so"


def is_stored(kernel: KernelSpec) -> bool:
    """Return whether the cache folder or the package has a library of `kernel`."""
    return any(_stored(kernel))


def _stored(kernel: KernelSpec) -> Iterator[Path]:
    """Yield the libraries of `kernel`, the user's first; warn if that must not be used."""
    name = _library_name(kernel)
    try:
        user = cache_folder() / name
        if _is_whole(user):
            yield user
    except CacheError as error:
        warn_once(str(error))
    prebuilt = prebuilt_folder() / name
    if _is_whole(prebuilt):
        yield prebuilt


def store(kernel: KernelSpec, compile_one: Callable[[KernelSpec], Any]) -> Path:
    """Write the library of `kernel` to the cache folder if it is missing; return its path.

    Raises:
        CacheError: the folder or the library is not trusted, or there is no folder.
        OSError: the folder or its lock is not available.
    """
    path = library_path(kernel)
    if not _is_whole(path):
        with cache_files.lock(path):
            if not _is_whole(path):
                _linker()  # before seconds of compiling
                _write(path, compile_one(kernel))
    return path


def _load_or_compile(kernel: KernelSpec) -> Any:
    for path in _stored(kernel):
        with contextlib.suppress(OSError):
            return _load(path)
    make, _thread.make = _thread.make, None
    if make is not None:
        make(kernel)
        return _load_or_compile(kernel)
    try:
        with contextlib.suppress(OSError):
            return _load(store(kernel, _compile))
        return _compile(kernel)
    except Exception as error:  # a compiler may raise anything
        raise CompilerError(kernel, error) from error


def _compile(kernel: KernelSpec) -> Any:
    with compiling(1, kernel.arch):
        return compile_kernel(kernel)


def _linker() -> str:
    """Return the path of a linker; raise FileNotFoundError without one."""
    linker = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if linker is None:
        raise FileNotFoundError("no linker: PATH has neither cc nor gcc nor clang")
    return linker


def _write(path: Path, function: Any) -> None:
    """Export and link `function`; the file appears atomically."""
    with tempfile.TemporaryDirectory() as folder:
        part, library = Path(folder, "kernel.o"), Path(folder, "kernel.so")
        function.export_to_c(str(part), SYMBOL)
        command = [_linker(), "-shared", "-o", str(library), str(part)]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            raise OSError(f"{' '.join(command)}: {result.stderr}")
        content = library.read_bytes()
    cache_files.write(path, content + hashlib.sha256(content).digest())


def _is_whole(path: Path) -> bool:
    try:
        content = cache_files.read(path)
    except CacheError:
        raise
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


@process_cache
def _load_runtime() -> ctypes.CDLL:
    """Load the runtime library that kernels call, for the newest CUDA that it supports."""
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
