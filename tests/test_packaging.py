"""What is installed is whole, and importable under one name."""

import importlib
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import cutefce
from cutefce.cute_kernels.jit.cache import CACHE_VARIABLE


@pytest.mark.parametrize(
    "name",
    [
        "autotune_cache",
        "autotune_cache.tuner",
        "autotune_cache.verification",
        "cute_kernels.problem",
        "ops.agreement",
        "ops.checks",
        "ops.dispatch",
        "ops.dtensor",
        "ops.footprint",
        "ops.functional",
        "ops.fusion",
        "ops.library",
        "ops.parallel",
        "ops.paper",
        "ops.planner",
        "ops.primitives",
        "ops.rowwise",
        "ops.strategies",
        "ops.torch_primitives",
        "tuning",
    ],
)
def test_modules_are_installed(name: str) -> None:
    importlib.import_module(f"cutefce.{name}")


def test_types_are_announced() -> None:
    assert (Path(cutefce.__file__).parent / "py.typed").exists()


def test_version_is_that_of_the_distribution() -> None:
    assert cutefce.__version__ == metadata.version("cutefce")


def test_import_touches_no_gpu_and_no_compiler() -> None:
    code = (
        "import sys, cutefce, torch\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert not any(m.split('.')[0] in ('cutlass', 'triton') for m in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_wheel_for_a_platform_compiles_nothing(tmp_path: Path) -> None:
    wheel = metadata.distribution("cutefce").read_text("WHEEL")
    if wheel is None or "py3-none-any" in wheel:
        pytest.skip("has no kernels: `make wheel` builds and checks the wheel that has")
    code = (
        "import sys\n"
        "from cutefce import autotune_cache\n"
        "from cutefce.cute_kernels import arch, jit_cache\n"
        "for a in arch.ARCHS:\n"
        "    assert all(map(jit_cache.compiled, autotune_cache.shipped_kernels(a)))\n"
        "assert jit_cache.compile_count == 0\n"
        "assert 'cutlass' not in sys.modules"
    )
    file = tmp_path / "file"
    file.write_text("no folder, nor can one be made here")
    environment = os.environ | {CACHE_VARIABLE: str(file)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
