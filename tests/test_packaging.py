"""What is installed is whole, and importable under one name."""

import importlib
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import cutefce


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
