"""The cache of compiled kernels: one compilation a key, despite crashes and damaged files.

Prebuilt libraries of the package serve where the user's cache has no valid library.  Fingerprints
change with the kernels' code, not with its text.
"""

import errno
import hashlib
import inspect
import io
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cutlass")

from cutefce.cute_kernels import cache_files, process_cache
from cutefce.cute_kernels.jit import build, notices
from cutefce.cute_kernels.jit import cache as jit_cache
from cutefce.cute_kernels.jit.compiler import compile_kernel
from cutefce.cute_kernels.spec.kernel import KernelSpec
from cutefce.cute_kernels.spec.rowwise import MoveRowsSpec, TargetLogitSpec
from tests.support.tiers import rest_slow

KERNEL = MoveRowsSpec("sm_90a")
"""The kernel that compiles fastest."""

COMPILE = f"""
from cutefce.cute_kernels.jit import cache as jit_cache
from cutefce.cute_kernels.spec.rowwise import MoveRowsSpec
made, compile_kernel = [], jit_cache.compile_kernel
jit_cache.compile_kernel = lambda kernel: made.append(kernel) or compile_kernel(kernel)
function = jit_cache.compiled({KERNEL!r})
print(len(made), callable(function))
"""
DIE = """
import os, time
from cutefce.cute_kernels.jit import cache as jit_cache

def stop(kernel):
    print("compiling", flush=True)
    time.sleep(60)

jit_cache.compile_kernel = stop
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty cache folder, with no kernels loaded in this process."""
    path = tmp_path / "cache"
    path.mkdir()
    monkeypatch.setenv(cache_files.CACHE_VARIABLE, str(path))
    monkeypatch.setattr(jit_cache, "PREBUILT_FOLDER", tmp_path / "prebuilt")
    monkeypatch.setattr(jit_cache, "_loaded", {})
    return path


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[KernelSpec]:
    """Return a list of the kernels that this process compiles from now on."""
    found: list[KernelSpec] = []

    def compile_here(kernel: KernelSpec) -> Any:
        found.append(kernel)
        return compile_kernel(kernel)

    monkeypatch.setattr(jit_cache, "compile_kernel", compile_here)
    return found


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a valid library of the kernel, outside of any cache."""
    path = tmp_path_factory.mktemp("compiled")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(cache_files.CACHE_VARIABLE, str(path))
        return jit_cache.store(KERNEL, compile_kernel)


@pytest.fixture
def prebuilt(folder: Path, library: Path) -> Path:
    """Return a prebuilt library of the package, beside an empty cache folder."""
    path = jit_cache.prebuilt_folder() / library.name
    path.parent.mkdir(parents=True)
    shutil.copy(library, path)
    return path


def start(code: str) -> "subprocess.Popen[str]":
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


def output(process: "subprocess.Popen[str]") -> list[str]:
    text, _ = process.communicate(timeout=600)
    assert process.returncode == 0
    return text.split()


def works(function: Any) -> bool:
    """Return whether this is the kernel: it checks its arguments, even without a GPU."""
    with pytest.raises(TypeError, match=": Tensor"):
        function()
    return True


@pytest.mark.slow
def test_four_processes_compile_once(folder: Path) -> None:
    processes = [start(COMPILE) for _ in range(4)]
    results = [output(process) for process in processes]
    assert sum(int(count) for count, _ in results) == 1
    assert all(is_callable == "True" for _, is_callable in results)
    assert output(start(COMPILE))[0] == "0", "a later process compiles nothing"


def test_long_compilations_are_announced_once_a_process(
    folder: Path, announced: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notices, "NOTICE_SECONDS", 0)
    monkeypatch.setattr(notices, "_was_given", False)
    monkeypatch.setattr(jit_cache, "compile_kernel", lambda kernel: time.sleep(0.3))
    monkeypatch.setattr(jit_cache, "_write", lambda path, function: None)
    monkeypatch.setattr(jit_cache, "_load", lambda path: None)
    for dtype in ("bfloat16", "float16"):
        jit_cache.compiled(TargetLogitSpec("sm_90a", dtype))
    (message,) = announced
    assert message.startswith("cutefce: compiles 1 kernel for sm_90a")


def test_a_compiler_that_fails_is_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(kernel: Any) -> None:
        raise ValueError("no such target")

    monkeypatch.setattr(jit_cache, "compile_kernel", fail)
    with pytest.raises(jit_cache.CompilerError, match="failed: ValueError: no such target"):
        jit_cache.compiled(KERNEL)


def test_a_terminal_sees_the_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(notices, "NOTICE_SECONDS", 0)
    with notices.compiling(2, "sm_90a") as count:
        time.sleep(0.2)
        count()
        time.sleep(0.3)
    assert "compiling 2 kernels for sm_90a" in terminal.getvalue()
    assert "1/2" in terminal.getvalue()


def test_a_call_that_misses_a_kernel_compiles_all_of_it_at_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[KernelSpec] = []
    monkeypatch.setattr(jit_cache, "_load", lambda path: path)
    monkeypatch.setattr(jit_cache, "_write", lambda path, function: path.write_bytes(b""))
    monkeypatch.setattr(jit_cache, "_is_whole", Path.exists)
    monkeypatch.setattr(jit_cache, "compile_kernel", None)

    def make(kernel: KernelSpec) -> None:
        made.append(kernel)
        jit_cache.store(kernel, lambda kernel: None)

    with jit_cache.made_by(make):
        assert jit_cache.compiled(KERNEL) == jit_cache.library_path(KERNEL)
    assert made == [KERNEL]


def test_without_other_processes_a_call_compiles_its_kernel_itself(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOMEM, "no memory")

    monkeypatch.setattr(jit_cache, "_load", lambda path: path)
    monkeypatch.setattr(jit_cache, "_write", lambda path, function: path.write_bytes(function))
    monkeypatch.setattr(jit_cache, "_is_whole", Path.exists)
    monkeypatch.setattr(jit_cache, "_compile", lambda kernel: b"compiled here")
    monkeypatch.setattr("subprocess.Popen", refuse)
    with jit_cache.made_by(lambda kernel: build.build([kernel])):
        assert jit_cache.compiled(KERNEL).read_bytes() == b"compiled here"


@pytest.mark.slow
def test_a_process_that_dies_blocks_no_other(folder: Path, made: list[KernelSpec]) -> None:
    process = start(DIE + COMPILE)
    assert process.stdout is not None
    assert process.stdout.readline() == "compiling\n"
    path = jit_cache.library_path(KERNEL)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    begin = time.monotonic()
    assert works(jit_cache.compiled(KERNEL))
    assert time.monotonic() - begin < 30
    assert made == [KERNEL]
    assert list(path.parent.iterdir()) == [path]


FOREIGN = b"\x7fELF of something else"
DAMAGES = ["a bit", "truncated", "empty", "foreign"]


def damaged(content: bytes, damage: str) -> bytes:
    flipped = bytes([content[1000] ^ 1])
    return {
        "truncated": content[: len(content) // 2],
        "empty": b"",
        "foreign": FOREIGN,
        "a bit": content[:1000] + flipped + content[1001:],
        "does not load": FOREIGN + hashlib.sha256(FOREIGN).digest(),
    }[damage]


@pytest.mark.parametrize("damage", rest_slow(["does not load", *DAMAGES]))
def test_a_damaged_library_is_compiled_again(
    damage: str, folder: Path, library: Path, made: list[KernelSpec]
) -> None:
    path, content = jit_cache.library_path(KERNEL), library.read_bytes()
    path.parent.mkdir()
    path.write_bytes(damaged(content, damage))
    is_whole = damage == "does not load"  # so that it stays, and one compiled here serves
    assert (callable if is_whole else works)(jit_cache.compiled(KERNEL))
    assert made == [KERNEL]
    assert len(path.read_bytes()) == len(damaged(content, damage) if is_whole else content)


@pytest.mark.parametrize("code", rest_slow([errno.ENOSPC, errno.EROFS, errno.EACCES]))
def test_a_full_or_read_only_disk(code: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(cache_files, "write", refuse)
    assert callable(jit_cache.compiled(KERNEL))
    assert not [path for path in folder.rglob("*") if path.is_file()]


@pytest.mark.parametrize("part", rest_slow(["the library", "its folder", "the cache folder"]))
def test_a_library_that_others_may_have_written_is_neither_loaded_nor_replaced(
    part: str, folder: Path, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = jit_cache.library_path(KERNEL)
    path.parent.mkdir(mode=0o700)
    shutil.copy(library, path)
    harmed = {"the library": path, "its folder": path.parent, "the cache folder": folder}[part]
    if os.geteuid() == 0:
        os.chown(harmed, 54321, 54321)
    harmed.chmod(harmed.stat().st_mode | 0o022)
    before = path.read_bytes()
    monkeypatch.setattr(jit_cache, "_load", None)
    with pytest.warns(UserWarning, match=f"ignored {harmed}: ") as warned:
        assert not jit_cache.is_stored(KERNEL)
        assert callable(jit_cache.compiled(KERNEL))
    assert len(warned) == 1
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("given", rest_slow(["relative", "~nobody-of-this-name/cache"]))
def test_without_a_cache_folder_kernels_serve_their_process(
    given: str, folder: Path, made: list[KernelSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv(cache_files.CACHE_VARIABLE, given)
    with pytest.warns(UserWarning, match="no cache folder: .*CUTEFCE_CACHE_DIR") as warned:
        assert callable(jit_cache.compiled(KERNEL))
    assert len(warned) == 1
    assert made == [KERNEL]
    assert not list(folder.iterdir())


@pytest.mark.parametrize("can_write", [True, False])
def test_a_prebuilt_library_serves(
    can_write: bool,
    folder: Path,
    prebuilt: Path,
    made: list[KernelSpec],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not can_write:
        file = folder / "file"
        file.write_text("")
        monkeypatch.setenv(cache_files.CACHE_VARIABLE, str(file))
    assert jit_cache.is_stored(KERNEL)
    assert works(jit_cache.compiled(KERNEL))
    assert not made
    assert not list(folder.rglob("*.so"))


def test_the_users_library_takes_precedence(
    folder: Path, prebuilt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = jit_cache.library_path(KERNEL)
    path.parent.mkdir(mode=0o700)
    shutil.copy(prebuilt, path)
    loaded: list[Path] = []
    monkeypatch.setattr(jit_cache, "_load", loaded.append)
    jit_cache.compiled(KERNEL)
    assert loaded == [path]
    path.write_bytes(b"")
    monkeypatch.setattr(jit_cache, "_loaded", {})
    jit_cache.compiled(KERNEL)
    assert loaded == [path, prebuilt]


@pytest.mark.parametrize("damage", rest_slow(["does not load", *DAMAGES]))
def test_a_damaged_prebuilt_library_is_left_alone(
    damage: str, folder: Path, prebuilt: Path, made: list[KernelSpec]
) -> None:
    content = damaged(prebuilt.read_bytes(), damage)
    prebuilt.write_bytes(content)
    assert works(jit_cache.compiled(KERNEL))
    assert made == [KERNEL]
    assert jit_cache.library_path(KERNEL).exists(), "later processes find it compiled"
    assert prebuilt.read_bytes() == content


@pytest.mark.skipif(shutil.which("objdump") is None, reason="needs objdump")
def test_a_library_needs_few_system_libraries(library: Path) -> None:
    """As the platform tag of wheels with kernels promises."""
    command = ["objdump", "--private-headers", "--dynamic-syms", str(library)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert set(re.findall(r"GLIBC\w*[\d.]*", text)) <= {"GLIBC_2.2.5", "GLIBC_2.17"}
    assert set(re.findall(r"NEEDED +(\S+)", text)) <= {"libc.so.6"}


SOURCE = """
'''A docstring.'''
from enum import IntEnum

class Barrier(IntEnum):
    TURN = 1
    'A field docstring.'

def scale(x: float, *rest: int, factor=-2.5) -> str:
    '''Another docstring.'''
    # a comment
    table = {**{}, "key": None, "ü": 0x10}
    return f"{x * factor:>{rest[0]}}" "%" f" of {table!r}"
"""
OTHER_TEXT = """
from enum import IntEnum  # of the standard library
class Barrier(IntEnum):
    TURN = 1
def scale(x: float, *rest: int, factor=-2.5) -> str:
    "Documented otherwise, 'quoted', # and so on."

    table = {**{}, "key": None, "ü": 0x10}  # "a comment"
    return f"{x * factor:>{rest[0]}}" "%" f" of {table!r}"
"""


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """Return a folder of one source file in a subfolder."""
    folder = tmp_path / "sources"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "scale.py").write_text(SOURCE)
    return folder


def source_fingerprint(folder: Path) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jit_cache, "SOURCES", folder)
        digest: str = inspect.unwrap(jit_cache.source_fingerprint)()
    return digest


def test_the_source_fingerprint_is_the_same_on_every_python_version(sources: Path) -> None:
    assert source_fingerprint(sources) == "0104090859489a92"


def test_text_does_not_change_the_source_fingerprint(sources: Path) -> None:
    before = source_fingerprint(sources)
    (sources / "sub" / "scale.py").write_text(OTHER_TEXT)
    (sources / "sub" / "notes.txt").write_text("not a source")
    assert source_fingerprint(sources) == before


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("TURN = 1", "TURN = 2"),
        ("-2.5", "2.5"),
        ("= 1", "= True"),
        ("None", "0"),
        ("rest[0]", "rest[1]"),
        ('" of', '" of #'),
        ("scale(", "scaled("),
        ("*rest", "rest"),
    ],
)
def test_code_changes_the_source_fingerprint(old: str, new: str, sources: Path) -> None:
    before = source_fingerprint(sources)
    assert old in SOURCE
    (sources / "sub" / "scale.py").write_text(SOURCE.replace(old, new))
    assert source_fingerprint(sources) != before


def test_files_change_the_source_fingerprint(sources: Path) -> None:
    before = source_fingerprint(sources)
    (sources / "sub" / "more.py").write_text("")
    added = source_fingerprint(sources)
    (sources / "sub" / "more.py").rename(sources / "more.py")
    assert len({before, added, source_fingerprint(sources)}) == 3


def test_the_fingerprint_covers_sources_versions_and_options(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fingerprint() -> str:
        process_cache.reset()
        return jit_cache.fingerprint()

    found = {fingerprint()}
    with monkeypatch.context() as patch:
        patch.setattr(jit_cache, "source_fingerprint", lambda: "0123456789abcdef")
        found.add(fingerprint())
    with monkeypatch.context() as patch:
        patch.setattr(jit_cache, "package_version", lambda package: "1.0")
        found.add(fingerprint())
    with monkeypatch.context() as patch:
        patch.setattr("platform.machine", lambda: "aarch64")
        found.add(fingerprint())
    with monkeypatch.context() as patch:
        patch.setattr(jit_cache, "OPTIONS", "")
        found.add(fingerprint())
    assert len(found) == 5
    assert all(re.fullmatch("[0-9a-f]{16}", each) for each in found)
    process_cache.reset()
