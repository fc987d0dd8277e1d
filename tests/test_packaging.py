"""What is installed is whole, and importable under one name."""

import importlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import cutefce
from cutefce.cute_kernels.cache_files import CACHE_VARIABLE

ROOT = Path(__file__).resolve().parents[1]
TOPS = ("integrations", "ops", "autotune_cache", "cute_kernels")
MACHINES = {"x86_64": 62, "aarch64": 183}
"""The machines that have a wheel with kernels, and their numbers in the headers of libraries."""
TAG = "manylinux_2_28_"
"""What the platform tag of these wheels begins with: that of the wheels of nvidia-cutlass-dsl."""
needs_checkout = pytest.mark.skipif(
    not (ROOT / "pyproject.toml").exists(), reason="needs a checkout"
)


def packages() -> dict[str, Path]:
    """Return every package of the tree, by import name."""
    found = {"cutefce": ROOT / "cutefce", "cutefce.commands": ROOT / "cutefce" / "commands"}
    for top in ("integrations", "ops", "autotune_cache", "cute_kernels"):
        for path in (ROOT / top).rglob("__init__.py"):
            found[".".join(("cutefce", *path.parent.relative_to(ROOT).parts))] = path.parent
    return found


@needs_checkout
def test_every_package_is_listed() -> None:
    tomllib = pytest.importorskip("tomllib")  # of Python 3.11
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert sorted(listed) == sorted(packages())


@pytest.mark.slow
@needs_checkout
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


@pytest.mark.skipif(Path("pyproject.toml").exists(), reason="runs in a checkout")
def test_a_wheel_is_tested_and_not_the_checkout() -> None:
    assert Path(cutefce.__file__).is_relative_to(Path.cwd())


def test_version_is_that_of_the_distribution() -> None:
    assert cutefce.__version__ == metadata.version("cutefce")


def wheel_with_kernels() -> metadata.Distribution:
    """Return what was installed, if it has kernels, which other tests do not need."""
    found = metadata.distribution("cutefce")
    wheel = found.read_text("WHEEL")
    if wheel is None or "py3-none-any" in wheel:
        pytest.skip("has no kernels: `make wheel` builds and checks the wheel that has")
    return found


def test_a_wheel_for_a_platform_has_its_name_and_its_libraries() -> None:
    wheel = wheel_with_kernels()
    machine = platform.machine()
    assert f"Tag: py3-none-{TAG}{machine}\n" in (wheel.read_text("WHEEL") or "")
    files = [path for path in wheel.files or () if path.parts[0] == "cutefce"]
    names = {path.as_posix() for path in files}
    assert {"cutefce/py.typed", "cutefce/autotune_cache/nvidia_h200.json"} <= names
    assert {f"cutefce/{top}/__init__.py" for top in TOPS} <= names
    assert all(path.suffix in (".py", ".json", ".so", ".typed") for path in files)
    libraries = [path for path in files if path.suffix == ".so"]
    assert libraries
    for path in libraries:
        header = path.read_binary()[:20]
        assert header[:4] == b"\x7fELF", path
        assert int.from_bytes(header[18:], "little") == MACHINES[machine], path


def test_a_wheel_for_a_platform_compiles_nothing(tmp_path: Path) -> None:
    wheel_with_kernels()
    code = (
        "import sys\n"
        "from cutefce.autotune_cache.tuning.runner import built_ahead\n"
        "from cutefce.cute_kernels import arch\n"
        "from cutefce.cute_kernels.jit import cache\n"
        "for a in arch.ARCHS:\n"
        "    assert all(map(cache.compiled, built_ahead(a)))\n"
        "assert cache.compile_count == 0\n"
        "assert 'cutlass' not in sys.modules"
    )
    file = tmp_path / "file"
    file.write_text("no folder, nor can one be made here")
    environment = os.environ | {CACHE_VARIABLE: str(file)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def workflow(path: Path) -> Any:
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load(path.read_text())


@needs_checkout
def test_a_release_has_the_wheels_of_all_machines() -> None:
    jobs = workflow(ROOT / ".github" / "workflows" / "release.yml")["jobs"]
    builds = jobs["wheel"]["strategy"]["matrix"]["include"]
    assert {build["machine"] for build in builds} == MACHINES.keys()
    for build in builds:
        assert build["runner"].endswith("-arm") == (build["machine"] == "aarch64")
    runs = [step.get("run", "") for step in jobs["wheel"]["steps"]]
    assert "make wheel" in runs
    assert any(f"-py3-none-{TAG}${{{{ matrix.machine }}}}.whl" in run for run in runs)
    assert jobs["pypi"]["permissions"] == {"id-token": "write"}  # of trusted publishing
    published = jobs["pypi"]["steps"][-1]
    assert published["uses"].startswith("pypa/gh-action-pypi-publish@")
    assert "password" not in published["with"]


@needs_checkout
def test_the_version_is_dated_and_cited() -> None:
    cited = workflow(ROOT / "CITATION.cff")
    newest = re.search(r"^## (\S+) \((.*)\)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert newest is not None
    assert newest.groups() == (cited["version"], cited["date-released"].isoformat())
    assert cited["version"] == cutefce.__version__
