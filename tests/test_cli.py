"""The `cutefce` command, without a GPU."""

import dataclasses
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from cutefce.__main__ import main
from cutefce.autotune_cache import lookup, tables, verdicts
from cutefce.autotune_cache.tables import file_name
from cutefce.autotune_cache.tuning import runner, tuner, verify
from cutefce.autotune_cache.verdicts import PARTS
from cutefce.commands import compile as compile_command
from cutefce.commands import info, tune, warmup
from cutefce.commands import verify as verify_command
from cutefce.cute_kernels import cache_files
from cutefce.cute_kernels.arch import arch_named
from cutefce.cute_kernels.arch.sm90 import FEW_ROWS
from cutefce.cute_kernels.jit import build, compiler
from cutefce.cute_kernels.jit import cache as jit_cache
from cutefce.cute_kernels.jit.subprocess_worker import WorkerError
from cutefce.cute_kernels.spec.gemm import ProjectExpSpec
from cutefce.cute_kernels.variant import LogitTransform
from cutefce.version import __version__
from tests.support.fake_tuner import RUNNER, InlineWorker, InProcess, job
from tests.support.faulty_candidates import Kind
from tests.support.stand_in_gpu import served_by_kernels
from tests.support.tables import GPU, OLD, TABLE, write

KINDS = Kind.SLOW, Kind.FAST


@pytest.fixture
def command(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Return a function that runs a command on a GPU whose candidates are fake ones."""
    for module in (tune, verify_command):
        monkeypatch.setattr(module, "this_gpu", lambda: (GPU, "cpu"))
    monkeypatch.setattr(tuner, "jobs_of", lambda _, shapes, dtype: [job(KINDS, x) for x in shapes])
    monkeypatch.setattr(runner, "Runner", lambda *_: RUNNER)
    monkeypatch.setattr(tune, "SubprocessWorker", InlineWorker)
    monkeypatch.setattr(verify, "verify_once", lambda *_: verdicts.Verdict(True))
    return lambda *arguments: CliRunner().invoke(main, arguments)


def test_tune(command: Any, folder: Path) -> None:
    path = folder / "tuning" / file_name(GPU)
    one, two = "24x16x300", "24x16x700"
    dry = command("tune", "--shapes", one, "--dry-run")
    assert dry.exit_code == 0
    assert "1 of 1 problems to tune" in dry.output
    assert not path.exists()
    assert command("tune", "--shapes", one, "--budget-minutes", "0").output.count("are left") == 1
    first = command("tune", "--shapes", one)
    assert first.exit_code == 0, first.output
    assert "24x16x300" in first.output
    assert "100.0%" in first.output, "the gain"
    second = command("tune", "--shapes", one, "--shapes", two, "--resume")
    assert "1 of 2 problems to tune" in second.output
    assert second.output.count("100.0%") == 2, "the table has both"
    assert len(tables.read(path).entries) == 2
    assert lookup.tables(GPU) == (tables.read(path),)
    assert "not one of 'bfloat16', 'float16'" in command("tune", "--dtype", "float64").output
    assert "expected one of few-tokens" in command("tune", "--shapes", "gpt").output
    assert command("tune", "--shapes", one, "--budget-minutes", "-1").exit_code == 2
    no_number = command("tune", "--shapes", one, "--budget-minutes", "nan")
    assert "got nan, expected at least 0" in no_number.output


def test_tune_does_not_resume_with_a_table_of_other_kernels(command: Any, folder: Path) -> None:
    path = folder / "tuned" / file_name(GPU)
    arguments = "tune", "--shapes", "24x16x300", "--resume", "--output-dir", str(path.parent)
    assert "1 of 1 problems" in command(*arguments).output
    assert "0 of 1 problems" in command(*arguments).output
    tuned = tables.read(path)
    write(path, dataclasses.replace(tuned, versions=OLD))
    with pytest.warns(UserWarning, match="moved a tuned table"):
        assert "1 of 1 problems" in command(*arguments).output
    assert tables.read(path) == tuned


def test_tune_tells_which_problems_failed(command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuner, "jobs_of", lambda *_: [job((Kind.SLOW, Kind.HANGS))])
    result = command("tune")
    assert result.exit_code == 0, result.output
    assert "left out: 24x16x300 project_exp: it hung" in result.output


def test_kernels_that_fail_verification_are_not_tuned(
    command: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = verdicts.Verdict(False, "dW is off by 0.03")
    monkeypatch.setattr(verify, "verify_once", lambda *_: wrong)
    result = command("tune", "--shapes", "24x16x300")
    assert result.exit_code == 1 and wrong.reason in result.output
    assert not list(folder.iterdir())


def test_no_gpu_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("tune", "verify"):
        result = CliRunner().invoke(main, [name])
        assert result.exit_code == 1
        assert "GPU: got no CUDA device, expected compute capability 9.0" in result.output


@pytest.mark.parametrize("hip", [None, "6.4"])
def test_a_gpu_without_kernels_is_an_error(
    hip: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of AMD reports a capability that NVIDIA's have."""
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    capability = (9, 0) if hip else (8, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "MI300X")
    result = CliRunner().invoke(main, ["verify"])
    assert result.exit_code == 1
    assert "GPU: got MI300X, expected compute capability 9.0" in result.output


def test_cache_commands(folder: Path, tmp_path: Path) -> None:
    file = lookup.user_folder() / file_name(GPU)
    write(file, TABLE)
    run = CliRunner().invoke
    shown = run(main, ["cache", "show"]).output
    assert "8192x4096x131072" in shown
    validated = run(main, ["cache", "validate", str(file)]).output
    assert "1 entries for NVIDIA Test 9000, of these kernels" in validated
    write(file, dataclasses.replace(TABLE, versions=OLD))
    validated = run(main, ["cache", "validate", str(file)]).output
    assert "1 entries for NVIDIA Test 9000, of other kernels" in validated
    file.write_text(re.sub(r'"tile_n": \d+', '"tile_n": 176', file.read_text()))
    validated = run(main, ["cache", "validate", str(file)]).output
    assert "0 entries" in validated and "left out 1, whose configuration" in validated
    write(file, TABLE)
    into = tmp_path / "joined.json"
    assert run(main, ["cache", "merge", str(file), str(file), "--into", str(into)]).exit_code == 0
    assert tables.read(into) == TABLE
    assert run(main, ["cache", "clear"]).exit_code == 0
    assert not file.exists()
    assert run(main, ["cache", "show"]).output == f"no tables in {lookup.user_folder()}\n"
    into.write_text("{}")
    result = run(main, ["cache", "validate", str(into)])
    assert result.exit_code == 1
    assert "schema: got None, expected 4" in result.output


BRACKETS = "out of range [cuda:0] in [rank0], no [/usr/lib/libcuda.so]"


def test_reasons_and_names_are_printed_as_they_are(
    command: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Brackets are no markup, and control characters do not reach the terminal."""
    gpu = dataclasses.replace(GPU, name="GPU [/x] \x1b]0;title\x07")
    write(lookup.user_folder() / "odd.json", dataclasses.replace(TABLE, gpu=gpu))
    shown = CliRunner().invoke(main, ["cache", "show"], env={"COLUMNS": "400"})
    assert shown.exit_code == 0, shown.output
    assert "[/x] \\x1b]0;title\\x07" in shown.output

    class Failing(InlineWorker):
        def ask(self, call: Any, seconds: float) -> Any:
            raise WorkerError(f"{BRACKETS}\x1b[31m")

    monkeypatch.setattr(tune, "SubprocessWorker", Failing)
    tuned = command("tune", "--shapes", "24x16x300")
    assert BRACKETS in " ".join(tuned.output.split())
    assert "\x1b" not in shown.output + tuned.output


def test_show_goes_on_after_files_that_it_cannot_read(folder: Path) -> None:
    write(lookup.user_folder() / file_name(GPU), TABLE)
    (lookup.user_folder() / "a.json").write_text("{}")
    (lookup.user_folder() / "b.json").mkdir()
    os.mkfifo(lookup.user_folder() / "c.json")
    others = lookup.user_folder() / "d.json"
    write(others, TABLE)
    others.chmod(0o666)
    result = CliRunner().invoke(main, ["cache", "show"])
    assert result.exit_code == 1
    assert result.output.count("8192x4096x131072") == 1, "one winner"
    for said in ("a.json: schema", "b.json", "c.json", "chmod go-w"):
        assert said in result.output
    assert "Traceback" not in result.output


def test_clear_leaves_what_is_not_a_trusted_file(folder: Path) -> None:
    file, strange = lookup.user_folder() / file_name(GPU), lookup.user_folder() / "a.json"
    write(file, TABLE)
    strange.mkdir()
    others = lookup.user_folder() / "b.json"
    write(others, TABLE)
    others.chmod(0o666)
    result = CliRunner().invoke(main, ["cache", "clear"])
    assert result.exit_code == 1
    assert "a.json" in result.output and "chmod go-w" in result.output
    assert not file.exists() and others.exists() and strange.is_dir()


def run_in_shell(
    *arguments: str, cwd: Path | None = None, **environment: str
) -> "subprocess.CompletedProcess[str]":
    """Run the command in a process whose output is a pipe."""
    return subprocess.run(
        [sys.executable, "-m", "cutefce", *arguments],
        env=os.environ | environment,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_output_that_is_ascii(folder: Path) -> None:
    gpu = dataclasses.replace(GPU, name="§ 1 × 2 …")
    write(lookup.user_folder() / file_name(GPU), dataclasses.replace(TABLE, gpu=gpu))
    shown = CliRunner(charset="ascii").invoke(main, ["cache", "show"])
    assert shown.exit_code == 0, shown.output
    assert "8192x4096x131072" in shown.output
    assert "1 \\xd7 2" in shown.output


def test_info_prints_whole_paths_into_a_pipe(folder: Path) -> None:
    cache_folder = folder / "a[b]c" / "[/x]" / ("long" * 40)
    environment = {cache_files.CACHE_VARIABLE: str(cache_folder)}
    shown = CliRunner().invoke(main, ["info"], env=environment)
    assert shown.exit_code == 0, shown.output
    assert f"{cache_folder}{os.sep}" in shown.output


def test_info_tells_why_the_cache_folder_cannot_be_used(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shown(value: Path | str) -> str:
        result = CliRunner().invoke(main, ["info"], env={cache_files.CACHE_VARIABLE: str(value)})
        assert result.exit_code == 0, result.output
        return next(line for line in result.output.splitlines() if line.startswith("cache "))

    assert ":" not in shown(folder / "new")
    (folder / "file").write_text("")
    assert "[Errno 20] Not a directory" in shown(folder / "file")
    assert "no cache folder: got 'relative', expected an absolute path" in shown("relative")
    folder.chmod(0o777)
    assert f"ignored {folder}: got mode 777" in shown(folder)
    folder.chmod(0o700)
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert f"{folder} cannot be written" in shown(folder)


def test_commands_without_a_cache_folder_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cache_files.CACHE_VARIABLE, "~nobody-of-this-name/cache")
    for arguments in (["cache", "show"], ["cache", "clear"], ["compile"], ["tune"]):
        result = CliRunner().invoke(main, arguments)
        assert result.exit_code == 1
        assert "Error: no cache folder" in result.output


def test_warmup_runs_a_step_of_each_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warmup, "this_gpu", lambda: (GPU, "cpu"))
    given = "warmup", "--shapes", "300x16x1000", "--shapes", "40x16x700"
    with served_by_kernels("cpu"):
        result = CliRunner().invoke(main, given)
    assert result.exit_code == 0, result.output
    first, second, folder = result.output.splitlines()
    assert re.fullmatch(r"300x16x1000: \d+\.\d s", first)
    assert second.startswith("40x16x700: ")
    assert folder.startswith(f"kernels for {GPU.name}: ")


def test_warmup_says_why_no_kernels_serve_a_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warmup, "this_gpu", lambda: (GPU, "cpu"))
    result = CliRunner().invoke(main, ["warmup", "--shapes", "300x16x1000"])
    assert result.exit_code == 1
    assert "300x16x1000: the kernels do not serve it: input: got device cpu" in result.output


@pytest.mark.slow
def test_compile_without_the_compiler_says_what_to_install(folder: Path) -> None:
    blocked = folder / "blocked"
    (blocked / "cutlass").mkdir(parents=True)
    (blocked / "cutlass" / "__init__.py").write_text("raise ImportError('no compiler here')")
    # the working directory comes before whatever an installed package puts first
    result = run_in_shell("compile", "--arch", "sm_100a", cwd=blocked)
    assert result.returncode == 1
    assert "Error: no compiler here" in result.stderr
    assert "pip install 'nvidia-cutlass-dsl[cu13]'" in result.stderr
    assert "Traceback" not in result.stderr


def test_dry_run_without_a_gpu_lists_candidates_of_a_shipped_table(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(main, ["tune", "--dry-run", "--shapes", "8192x4096x131072"])
    assert result.exit_code == 0, result.output
    assert "NVIDIA H200: 3 of 3 problems to tune" in result.output
    for name in ("project_exp", "grad_hidden", "grad_weight"):
        assert f"8192x4096x131072 {name}: " in result.output
    assert not list(folder.iterdir())


def test_info_tells_a_current_table_from_a_stale_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookup, "SHIPPED_FOLDER", folder)
    path = folder / file_name(GPU)
    write(path, TABLE)
    renewal = f"to renew it: cutefce verify --table {path}"
    assert f"{path.name}: 1 entries for bfloat16, of these kernels" in _shown_info()
    write(path, dataclasses.replace(TABLE, versions=OLD))
    shown = _shown_info()
    assert "1 entries for bfloat16, of other kernels: calls verify their groups of kernels" in shown
    assert renewal not in shown, "that is done on a GPU of the table's model"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: GPU.name)
    monkeypatch.setattr(info, "device_unsupported_reason", lambda *_: None)
    shown = _shown_info()
    assert renewal in shown
    for dtype in ("bfloat16", "float16", "float32", "float64"):
        assert f"{dtype} " in shown


def _shown_info() -> str:
    result = CliRunner().invoke(main, ["info"], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


def test_verify_renews_a_table_whose_kernels_pass(
    command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, stale = (
        tmp_path / "table.json",
        dataclasses.replace(TABLE, versions={"torch": "2", **OLD}),
    )
    write(path, stale)
    faults = iter(["", "it hung", "", ""])
    monkeypatch.setattr(verify, "first_fault", lambda *_: next(faults))
    failed = command("verify", "--table", str(path))
    assert failed.exit_code == 1
    assert "the float16 kernels failed" in failed.output and "it hung" in failed.output
    assert tables.read(path) == stale
    renewed = command("verify", "--table", str(path))
    assert renewed.exit_code == 0, renewed.output
    versions = {"torch": "2", **lookup.current_build()}
    assert tables.read(path) == dataclasses.replace(stale, versions=versions)
    blackwell = dataclasses.replace(GPU, arch=arch_named("sm_100a"))
    write(path, dataclasses.replace(TABLE, gpu=blackwell, entries={}))
    refused = command("verify", "--table", str(path))
    assert "arch: got 'sm_100a', expected 'sm_90a'" in refused.output


@pytest.mark.parametrize(
    ("transform", "spilled", "warning", "passes"),
    [
        (LogitTransform(), 0, "", True),
        (LogitTransform(), 8, "", False),
        (LogitTransform(row_scale=True, softcap=True), 24, "", True),
        (LogitTransform(row_scale=True, softcap=True), 80, "", False),
        (LogitTransform(row_scale=True, softcap=True), 24, "C7510", False),
    ],
)
def test_compile_fails_for_kernels_that_spill(
    transform: LogitTransform,
    spilled: int,
    warning: str,
    passes: bool,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A variant may spill the scalars that it reloads once a tile."""
    pytest.importorskip("cutlass")
    kernel = ProjectExpSpec(
        "sm_90a", "bfloat16", FEW_ROWS, sums=True, store=True, transform=transform
    )

    def compile_kernel(_: ProjectExpSpec, options: str) -> None:
        text = f"{warning} 0 bytes spill stores,\n {spilled} bytes spill loads"
        Path(options.split()[-1]).write_text(text)

    monkeypatch.setattr(compiler, "compile_kernel", compile_kernel)
    monkeypatch.setattr(jit_cache, "_write", lambda *_: None)
    monkeypatch.setattr(build, "SubprocessWorker", lambda **_: InProcess())
    monkeypatch.setattr(compile_command, "built_ahead", lambda arch: [kernel])
    result = CliRunner().invoke(compile_command.compile_kernels, ["--arch", "sm_90a"])
    assert (result.exit_code == 0) == passes, result.output
    assert passes or f"ValueError: {spilled} bytes spilled" in result.output


def test_verify_records_a_verdict_for_each_dtype(
    command: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookup, "SHIPPED_FOLDER", folder / "shipped")
    monkeypatch.setattr(verify, "first_fault", lambda *_: "")
    result = command("verify")
    assert result.exit_code == 0, result.output
    for dtype in GPU.arch.dtypes:
        assert f"the {dtype} kernels passed on {GPU.name}" in result.output
        assert verdicts.known(GPU, dtype, *PARTS) == verdicts.Verdict(True)


def test_version() -> None:
    assert CliRunner().invoke(main, ["--version"]).output == f"cutefce, version {__version__}\n"
