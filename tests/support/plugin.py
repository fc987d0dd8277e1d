"""Fixtures for devices, tile sizes and cache folders; skips GPU tests without a GPU.

Each process that runs tests has them, which `tests/conftest.py` sees to.
"""

import gc
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest
import torch
import torch._functorch.config

from cutefce.autotune_cache import defaults
from cutefce.cute_kernels import cache_files, process_cache
from cutefce.cute_kernels.config import PortableTiles
from cutefce.cute_kernels.jit import cache as jit_cache
from cutefce.cute_kernels.jit.notices import LOGGER
from cutefce.ops.primitives import dispatch, elementwise
from tests.support import backends, tiers
from tests.support.backends import Backend
from tests.support.layouts import SMALL_TILES
from tests.support.undefined import make_undefined

if TYPE_CHECKING:
    from tests.support.ranks import Ranks


# torch's cache of compiled graphs on the disk does not know that an operator's schema has changed
torch._functorch.config.enable_autograd_cache = False

# several test processes share the cores, and threads that wait for each other take them
torch.set_num_threads(1)

# a process runs the sources that it has imported: their digest, half a second, outlives resets
process_cache._clears[:] = [
    clear
    for clear in process_cache._clears
    if getattr(clear, "__self__", None) is not jit_cache.source_fingerprint
]

if not torch.cuda.is_available():
    # read when Triton is imported, which torch may do
    os.environ["TRITON_INTERPRET"] = "1"
    # torch notes a seed for each device that is not there, with a traceback: it takes longer than
    # to draw
    torch.manual_seed = torch.default_generator.manual_seed


def pytest_configure(config: pytest.Config) -> None:
    """Choose, before tests are collected, where they run and how many examples they draw."""
    if config.getoption("gpu"):
        backends.use_gpu()
    if config.getoption("without_kernels"):
        dispatch._missing_reason = lambda: "kernels are switched off"
    leaves_out = "not slow" in config.option.markexpr
    if leaves_out:
        tiers.leave_out_slow()
    checks = [hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.function_scoped_fixture]
    hypothesis.settings.register_profile(
        "tier",
        max_examples=10 if leaves_out else 100,
        derandomize=leaves_out,
        deadline=None,
        suppress_health_check=checks,
    )
    hypothesis.settings.load_profile("tier")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what `--gpu` does not ask for, and skip what needs a GPU without it.

    Tests of ranks come first, to one process: each that runs some has to start ranks of its own.
    """
    items.sort(key=lambda item: not _is_of_ranks(item))
    if config.getoption("gpu"):
        if not torch.cuda.is_available():
            raise pytest.UsageError("--gpu: torch finds no NVIDIA GPU here")
        runs_there = [_is_of_gpu(item) for item in items]
        config.hook.pytest_deselected(
            items=[x for x, runs in zip(items, runs_there, strict=True) if not runs]
        )
        items[:] = [x for x, runs in zip(items, runs_there, strict=True) if runs]
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU: make test-gpu"))


def _is_of_ranks(item: pytest.Item) -> bool:
    fixtures = getattr(item, "fixturenames", ())
    return item.path.parent.name == "parallel" or not {"ranks", "two"}.isdisjoint(fixtures)


def _is_of_gpu(item: pytest.Item) -> bool:
    given = item.callspec.params if hasattr(item, "callspec") else {}
    fixtures = getattr(item, "fixturenames", ())
    return (
        "gpu" in item.keywords or "device" in fixtures or isinstance(given.get("backend"), Backend)
    )


def pytest_collection_finish() -> None:
    """Leave what was imported and collected to no garbage collection: some tests ask for many."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture
def device(pytestconfig: pytest.Config) -> str:
    """Return where a test of any device runs: the CPU, or a GPU with `--gpu`."""
    return "cuda" if pytestconfig.getoption("gpu") else "cpu"


@pytest.fixture(autouse=True)
def few_compilations(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, have torch compile row-wise functions for tests of `compiled_rows` alone.

    It compiles each for each layout of its arguments, which takes seconds: more than most tests.
    """
    if request.config.getoption("gpu") and "compiled_rows" not in request.node.keywords:
        monkeypatch.setattr(elementwise, "_has_triton", lambda: False)


@pytest.fixture(autouse=True)
def undefined_memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, have what programs exchange be NaN before it is written, and after it was read."""
    if not request.config.getoption("gpu"):
        make_undefined(monkeypatch)


@pytest.fixture(autouse=True)
def nothing_happened_yet() -> None:
    """Let each test see what a process does once: warnings."""
    process_cache._warned.clear()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return an empty folder in place of the user's."""
    monkeypatch.setenv(cache_files.CACHE_VARIABLE, str(tmp_path))
    process_cache.reset()
    yield tmp_path
    process_cache.reset()


@pytest.fixture
def announced() -> Iterator[list[str]]:
    """Return the lines that the package announces, as they come."""
    lines = list[str]()

    def note(record: logging.LogRecord) -> bool:
        lines.append(record.getMessage())
        return True

    LOGGER.addFilter(note)
    yield lines
    LOGGER.removeFilter(note)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[PortableTiles]:
    for name in {*defaults.PORTABLE_TILES} - {"triton"}:  # whose kernel has one size of tiles
        monkeypatch.setitem(defaults.PORTABLE_TILES, name, SMALL_TILES)
    process_cache.reset()
    yield SMALL_TILES
    process_cache.reset()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test of any backend on each of them, unless it says on which."""
    marks = metafunc.definition.iter_markers("parametrize")
    says = any("backend" in mark.args[0] for mark in marks)
    if "backend" in metafunc.fixturenames and not says:
        named = backends.named()
        metafunc.parametrize("backend", named.values(), ids=named.keys(), indirect=True)


@pytest.fixture
def backend(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, small_tiles: PortableTiles
) -> Backend:
    """Route calls to torch on a CPU, to models of kernels, or with `--gpu` to a GPU."""
    chosen: Backend = request.param
    chosen.serve(monkeypatch, small_tiles)
    return chosen


@pytest.fixture(scope="session")
def gpu_ranks() -> Iterator["Ranks"]:
    from tests.support.ranks import started

    count = min(4, torch.cuda.device_count())
    if count < 2:
        pytest.skip("needs two GPUs")
    with started(count, backend="nccl") as processes:
        yield processes


@pytest.fixture(scope="session")
def ranks() -> Iterator["Ranks"]:
    from tests.support.ranks import started

    with started(4) as processes:
        yield processes
