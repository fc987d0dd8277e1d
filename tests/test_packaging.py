"""What is installed is whole, and importable under one name."""

import importlib
import os
import shutil
import subprocess
import sys
import tarfile
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest

import cutefce
from cutefce.cute_kernels.cache_files import CACHE_VARIABLE

ROOT = Path(__file__).resolve().parents[1]
TOPS = ("integrations", "ops", "autotune_cache", "cute_kernels")


def packages() -> dict[str, Path]:
    """Return every package of the tree, by import name."""
    found = {"cutefce": ROOT / "cutefce", "cutefce.commands": ROOT / "cutefce" / "commands"}
    for top in ("integrations", "ops", "autotune_cache", "cute_kernels"):
        for path in (ROOT / top).rglob("__init__.py"):
            found[".".join(("cutefce", *path.parent.relative_to(ROOT).parts))] = path.parent
    return found


@pytest.mark.skipif(not (ROOT / "pyproject.toml").exists(), reason="needs a checkout")
def test_every_package_is_listed() -> None:
    tomllib = pytest.importorskip("tomllib")  # of Python 3.11
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert sorted(listed) == sorted(packages())


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / "pyproject.toml").exists(), reason="needs a checkout")
def test_a_source_distribution_has_the_tests_with_their_helpers(tmp_path: Path) -> None:
    build = pytest.importorskip("setuptools.build_meta")
    left_out = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "demo-output", "*.so")
    shutil.copytree(ROOT, tmp_path / "tree", symlinks=True, ignore=left_out)
    code = f"from {build.__name__} import build_sdist; print(build_sdist('.'))"
    subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path / "tree", check=True, capture_output=True
    )
    (archive,) = (tmp_path / "tree").glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        found = {name.partition("/")[2] for name in tar.getnames()}
    for folder in ("tests", "bench", "examples", *TOPS):
        for path in (ROOT / folder).rglob("*.py"):
            assert path.relative_to(ROOT).as_posix() in found
    assert {"CHANGELOG.md", "Makefile", "constraints.txt", "pyproject.toml"} <= found


def test_every_folder_with_code_is_a_package() -> None:
    folders = {path.parent for folder in packages().values() for path in folder.glob("*.py")}
    nested = {path.parent for top in TOPS for path in (ROOT / top).rglob("*.py")}
    assert nested <= folders | {ROOT / "cutefce"}


FRAMEWORKS = "cutefce.integrations"
"""The package whose modules import frameworks, which takes long where these are installed."""


@pytest.mark.parametrize(
    "name",
    [*sorted(packages().keys() - {FRAMEWORKS}), pytest.param(FRAMEWORKS, marks=pytest.mark.slow)],
)
def test_modules_are_installed(name: str) -> None:
    for path in packages()[name].glob("*.py"):
        if path.stem == "__main__" or is_device_code(path):
            continue
        try:
            importlib.import_module(name if path.stem == "__init__" else f"{name}.{path.stem}")
        except ImportError as error:
            if name != FRAMEWORKS or "cutefce" in str(error):
                raise  # not that of a framework, which need not be installed


def is_device_code(path: Path) -> bool:
    """Whether a module needs the DSL, which only Linux has."""
    return "import cutlass" in path.read_text() and find_spec("cutlass") is None


def test_types_are_announced() -> None:
    assert (Path(cutefce.__file__).parent / "py.typed").exists()


def test_version_is_that_of_the_distribution() -> None:
    assert cutefce.__version__ == metadata.version("cutefce")


def test_import_touches_no_gpu_and_no_compiler() -> None:
    code = (
        "import sys, cutefce, torch\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert 'cutlass' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_wheel_for_a_platform_compiles_nothing(tmp_path: Path) -> None:
    wheel = metadata.distribution("cutefce").read_text("WHEEL")
    if wheel is None or "py3-none-any" in wheel:
        pytest.skip("has no kernels: `make wheel` builds and checks the wheel that has")
    code = (
        "import sys\n"
        "from cutefce.autotune_cache import ahead\n"
        "from cutefce.cute_kernels import arch\n"
        "from cutefce.cute_kernels.jit import cache\n"
        "for a in arch.ARCHS:\n"
        "    assert all(map(cache.compiled, ahead.shipped_kernels(a)))\n"
        "assert cache.compile_count == 0\n"
        "assert 'cutlass' not in sys.modules"
    )
    file = tmp_path / "file"
    file.write_text("no folder, nor can one be made here")
    environment = os.environ | {CACHE_VARIABLE: str(file)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
