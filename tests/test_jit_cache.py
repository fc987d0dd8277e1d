"""The cache of compiled kernels: once per key, whatever happens to processes and files."""

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cutlass")

from cutefce.cute_kernels import jit_cache, kernels
from cutefce.cute_kernels.compiler import compile_kernel

KERNEL = kernels.Combine("sm_90a", "bfloat16", "bfloat16", None, scaled=True, weighted=False)
"""The one that compiles fastest."""

COMPILE = f"""
from cutefce.cute_kernels import jit_cache, kernels
function = jit_cache.compiled(kernels.{KERNEL!r})
print(jit_cache.compile_count, callable(function))
"""
DIE = """
import os, time
from cutefce.cute_kernels import jit_cache

def stop(kernel):
    print("compiling", flush=True)
    time.sleep(60)

jit_cache.compile_kernel = stop
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty cache folder, which this process has loaded nothing from."""
    monkeypatch.setenv(jit_cache.CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(jit_cache, "_loaded", {})
    monkeypatch.setattr(jit_cache, "compile_count", 0)
    return tmp_path


def start(code: str) -> "subprocess.Popen[str]":
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


def output(process: "subprocess.Popen[str]") -> list[str]:
    text, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    return text.split()


def works(function: Any) -> bool:
    """Whether this is the kernel: it checks its arguments, also where there is no GPU."""
    with pytest.raises(TypeError, match="out: Tensor"):
        function()
    return True


def test_eight_processes_compile_once(folder: Path) -> None:
    processes = [start(COMPILE) for _ in range(8)]
    results = [output(process) for process in processes]
    assert sum(int(count) for count, _ in results) == 1
    assert all(is_callable == "True" for _, is_callable in results)
    assert output(start(COMPILE))[0] == "0", "a later process compiles nothing"


def test_a_process_that_dies_leaves_nothing_in_the_way(folder: Path) -> None:
    process = start(DIE + COMPILE)
    assert process.stdout is not None
    assert process.stdout.readline() == "compiling\n"
    path = jit_cache.library_path(KERNEL)
    path.with_suffix(".tmp").write_bytes(b"half of it")
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    begin = time.monotonic()
    assert works(jit_cache.compiled(KERNEL))
    assert time.monotonic() - begin < 30
    assert jit_cache.compile_count == 1
    assert [p.suffix for p in path.parent.iterdir() if p.suffix != ".lock"] == [".so"]


@pytest.mark.parametrize("damage", ["truncated", "empty", "foreign", "a bit"])
def test_a_damaged_library_is_compiled_again(damage: str, folder: Path) -> None:
    path = jit_cache.store(KERNEL, lambda: compile_kernel(KERNEL))
    content = path.read_bytes()
    flipped = bytes([content[1000] ^ 1])
    path.write_bytes(
        {
            "truncated": content[: len(content) // 2],
            "empty": b"",
            "foreign": b"\x7fELF of something else",
            "a bit": content[:1000] + flipped + content[1001:],
        }[damage]
    )
    assert works(jit_cache.compiled(KERNEL))
    assert jit_cache.compile_count == 1
    assert path.read_bytes()[:4] == b"\x7fELF"
    assert len(path.read_bytes()) > len(content) // 2


def test_a_folder_that_cannot_be_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = folder / "file"
    file.write_text("")
    monkeypatch.setenv(jit_cache.CACHE_VARIABLE, str(file))
    assert callable(jit_cache.compiled(KERNEL))
    assert jit_cache.compile_count == 1


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_full_or_read_only_disk(code: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(Path, "write_bytes", refuse)
    assert callable(jit_cache.compiled(KERNEL))
    assert not list(folder.rglob("*.so"))


def test_no_linker(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(folder))
    assert callable(jit_cache.compiled(KERNEL))
    assert not list(folder.rglob("*.so"))


def test_loading_does_not_need_the_compiler(folder: Path) -> None:
    jit_cache.store(KERNEL, lambda: compile_kernel(KERNEL))
    code = COMPILE + "import sys; assert 'cutlass' not in sys.modules"
    assert output(start(code)) == ["0", "True"]


def test_keys_tell_kernels_apart(folder: Path) -> None:
    from cutefce.cute_kernels.arch import ARCHS

    every = [kernel for arch in ARCHS for kernel in kernels.all_kernels(arch)]
    assert len({jit_cache.library_path(kernel) for kernel in every}) == len(every)
