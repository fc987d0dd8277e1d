"""The `cutefce` command, without a GPU."""

import dataclasses
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from cutefce.__main__ import main
from cutefce.autotune_cache import lookup, table_io, verdicts
from cutefce.autotune_cache.table import DSL_PACKAGE, Key, Table
from cutefce.autotune_cache.table_io import file_name
from cutefce.autotune_cache.tuning import runner, targets, verify
from cutefce.autotune_cache.tuning.verify import Check
from cutefce.commands import compile as compile_command
from cutefce.commands import info, tune, warmup
from cutefce.commands import verify as verify_command
from cutefce.cute_kernels import cache_files
from cutefce.cute_kernels.arch import arch_named
from cutefce.cute_kernels.arch.sm90 import LOW
from cutefce.cute_kernels.jit.compiler import Report
from cutefce.cute_kernels.spec import ProjectExpSpec
from cutefce.cute_kernels.variant import LogitTransform
from cutefce.version import __version__
from tests.support.fake_tuner import RUNNER, TARGET, InlineWorker, InProcess
from tests.support.faulty_candidates import Kind, config
from tests.support.stand_in_gpu import served_by_kernels
from tests.support.tables import ENTRY, GPU, TABLE
from tests.support.tiers import rest_slow


@pytest.fixture
def command(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Return a function that runs a command on a GPU whose only target is the fake one."""
    for module in (tune, verify_command):
        monkeypatch.setattr(module, "this_gpu", lambda: (GPU, "cpu"))
    monkeypatch.setattr(targets, "all_targets", lambda *_: (TARGET,))
    monkeypatch.setattr(runner, "Runner", lambda *_: RUNNER)
    monkeypatch.setattr(tune, "SubprocessWorker", InlineWorker)
    monkeypatch.setattr(verify, "SubprocessWorker", InProcess)
    monkeypatch.setattr(verify, "verify_once", lambda *_: verdicts.Verdict(True))
    return lambda *arguments: CliRunner().invoke(main, arguments)


def test_tune(command: Any, folder: Path) -> None:
    path = folder / "tuning" / file_name(GPU)
    one, two = "24x16x300", "24x16x700"
    dry = command("tune", "--shapes", one, "--dry-run")
    assert dry.exit_code == 0
    assert "1 of 1 problems to tune, in 2 trials" in dry.output
    assert not path.exists()
    assert command("tune", "--shapes", one, "--budget-minutes", "0").output.count("are left") == 1
    first = command("tune", "--shapes", one)
    assert first.exit_code == 0, first.output
    assert "24x16x300" in first.output
    assert "100.0%" in first.output, "the gain"
    second = command("tune", "--shapes", one, "--shapes", two, "--resume")
    assert "1 of 2 problems to tune" in second.output
    assert second.output.count("100.0%") == 2, "the table has both"
    assert len(table_io.read(path).entries) == 2
    assert lookup.tables(GPU) == (table_io.read(path),)
    assert "not one of 'bfloat16', 'float16'" in command("tune", "--dtype", "float64").output
    assert "expected one of few-tokens" in command("tune", "--shapes", "gpt").output
    refused = command("tune", "--shapes", one, "--budget-minutes", "nan")
    assert refused.exit_code == 2
    assert "got nan, expected a number of minutes" in refused.output


@pytest.mark.parametrize("field", rest_slow(["kernels", "dsl"]))
def test_tune_resumes_with_entries_of_other_kernels_or_compilers(
    field: str, command: Any, folder: Path
) -> None:
    path = folder / "tuned" / file_name(GPU)
    arguments = "tune", "--shapes", "24x16x300", "--resume", "--output-dir", str(path.parent)
    assert "1 of 1 problems" in command(*arguments).output
    assert "0 of 1 problems" in command(*arguments).output
    tuned = table_io.read(path)
    changes: Any = {field: "0"}
    entries = {key: dataclasses.replace(e, **changes) for key, e in tuned.entries.items()}
    table_io.write(path, dataclasses.replace(tuned, entries=entries))
    assert "1 of 1 problems" in command(*arguments).output
    assert table_io.read(path) == tuned


def test_no_gpu_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("tune", "verify"):
        result = CliRunner().invoke(main, [name])
        assert result.exit_code == 1
        assert "GPU: got no CUDA device, expected compute capability 9.0" in result.output


def test_cache_commands(folder: Path, tmp_path: Path) -> None:
    file = lookup.user_folder() / file_name(GPU)
    table_io.write(file, TABLE)
    run = CliRunner().invoke
    shown = run(main, ["cache", "show"]).output
    assert "8192x4096x131072" in shown
    assert "no answer within 30 s" in shown
    assert "yes" in shown
    validated = run(main, ["cache", "validate", str(file)]).output
    assert "1 entries, 1 of these kernel sources" in validated
    into = tmp_path / "joined.json"
    assert run(main, ["cache", "merge", str(file), str(file), "--into", str(into)]).exit_code == 0
    assert table_io.read(into) == TABLE
    assert run(main, ["cache", "clear"]).exit_code == 0
    assert not file.exists()
    assert run(main, ["cache", "show"]).output == f"no tables in {lookup.user_folder()}\n"
    into.write_text("{}")
    result = run(main, ["cache", "validate", str(into)])
    assert result.exit_code == 1
    assert "schema: got None, expected 3" in result.output


BRACKETS = "out of range [cuda:0] in [rank0], no [/usr/lib/libcuda.so]"


def test_show_prints_reasons_and_names_as_they_are(folder: Path) -> None:
    """Brackets are no markup, and control characters do not reach the terminal."""
    (pair,) = TABLE.rejected
    rejection = f"{BRACKETS}\x1b[31m"
    gpu = dataclasses.replace(GPU, name="GPU [/x] \x1b]0;title\x07")
    table_io.write(
        lookup.user_folder() / "odd.json",
        dataclasses.replace(TABLE, gpu=gpu, rejected={pair: rejection}),
    )
    result = CliRunner().invoke(main, ["cache", "show"], env={"COLUMNS": "400"})
    assert result.exit_code == 0, result.output
    shown = "".join(c for c in result.output if c not in "│\n")
    assert "[/x] \\x1b]0;title\\x07" in " ".join(shown.split())
    assert "\x1b" not in result.output
    for word in BRACKETS.split():
        assert word in shown


def test_show_goes_on_after_files_that_it_cannot_read(folder: Path) -> None:
    table_io.write(lookup.user_folder() / file_name(GPU), TABLE)
    (lookup.user_folder() / "a.json").write_text("{}")
    (lookup.user_folder() / "b.json").mkdir()
    os.mkfifo(lookup.user_folder() / "c.json")
    others = lookup.user_folder() / "d.json"
    table_io.write(others, TABLE)
    others.chmod(0o666)
    result = CliRunner().invoke(main, ["cache", "show"])
    assert result.exit_code == 1
    assert result.output.count("8192x4096x131072") == 1, "one winner"
    assert result.output.count("no answer within 30 s") == 1, "one rejection"
    for said in ("a.json: schema", "b.json", "c.json", "chmod go-w"):
        assert said in result.output
    assert "Traceback" not in result.output


def test_clear_leaves_what_is_not_a_trusted_file(folder: Path) -> None:
    file, strange = lookup.user_folder() / file_name(GPU), lookup.user_folder() / "a.json"
    table_io.write(file, TABLE)
    strange.mkdir()
    others = lookup.user_folder() / "b.json"
    table_io.write(others, TABLE)
    others.chmod(0o666)
    result = CliRunner().invoke(main, ["cache", "clear"])
    assert result.exit_code == 1
    assert "a.json" in result.output and "chmod go-w" in result.output
    assert not file.exists() and others.exists() and strange.is_dir()


def test_verify_leaves_a_table_that_changed_meanwhile(
    command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "table.json"
    table_io.write(path, stale_table(bfloat16=[FAST]))

    def meanwhile(*_: Any) -> Iterator[tuple[Check, str | None]]:
        table_io.write(path, TABLE)
        return iter(())

    monkeypatch.setattr(verify, "run_checks", meanwhile)
    result = command("verify", "--table", str(path))
    assert result.exit_code == 1
    assert "another process rewrote it meanwhile" in result.output
    assert table_io.read(path) == TABLE


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
    (rejected,) = TABLE.rejected
    strange = {rejected: "§ 1 × 2 …"}
    path = lookup.user_folder() / file_name(GPU)
    table_io.write(path, dataclasses.replace(TABLE, rejected=strange))
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


def test_entries_of_other_kernels_are_marked(folder: Path) -> None:
    file = lookup.user_folder() / file_name(GPU)
    (key,) = TABLE.entries
    stale = dataclasses.replace(ENTRY, kernels="0123")
    unverified = dataclasses.replace(stale, verified=False)
    by_vocab = {131072: ENTRY, 32000: stale, 16384: unverified}
    entries = {dataclasses.replace(key, vocab=vocab): by_vocab[vocab] for vocab in by_vocab}
    table_io.write(file, dataclasses.replace(TABLE, entries=entries, rejected={}))
    run = CliRunner().invoke
    shown = run(main, ["cache", "show"]).output
    for vocab, said in {131072: "yes", 32000: "other kernels", 16384: "no"}.items():
        (row,) = (line for line in shown.splitlines() if f"8192x4096x{vocab} " in line)
        assert row.strip("│ ").endswith(f" {said}")
    validated = run(main, ["cache", "validate", str(file)]).output
    assert "3 entries, 1 of these kernel sources" in validated


def test_info_tells_current_entries_from_stale_ones(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookup, "SHIPPED_FOLDER", folder)
    (key,) = TABLE.entries
    stale = dataclasses.replace(ENTRY, kernels="0123")
    entries = {key: ENTRY, dataclasses.replace(key, vocab=32000): stale}
    table_io.write(folder / file_name(GPU), dataclasses.replace(TABLE, entries=entries))
    renewal = f"to renew them: cutefce verify --table {folder / file_name(GPU)}"
    shown = _shown_info()
    assert "bfloat16: 1 of 2 entries are of these kernel sources; the others are veri" in shown
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


STALE = {"kernels": "0123", DSL_PACKAGE: "0.1"}
FAST, WRONG = config(Kind.FAST), config(Kind.WRONG_SUMS)


def stale_table(**winners: Any) -> Table:
    """Return a table of other kernels with the winners of problems by dtype."""
    entries = {
        Key("project_exp", dtype, 16, 300 + i, 24): dataclasses.replace(
            ENTRY, config=winner, kernels="0123", dsl="0.1", verified=False
        )
        for dtype, some in winners.items()
        for i, winner in enumerate(some)
    }
    old = {next(iter(entries)).rejects(config(Kind.HANGS)): "it hung"}
    return Table(GPU, {"torch": "2.0", **STALE}, entries, old)


@pytest.mark.slow
def test_verify_renews_a_table(command: Any, tmp_path: Path) -> None:
    """Right configurations are stamped, wrong ones are rejected."""
    path = tmp_path / "table.json"
    stale = stale_table(bfloat16=[FAST, WRONG, FAST], float16=[FAST])
    table_io.write(path, stale)
    result = command("verify", "--table", str(path))
    assert result.exit_code == 0, result.output
    assert "3 entries passed, 1 were rejected" in result.output
    renewed = table_io.read(path)
    assert renewed.versions == {"torch": "2.0", **lookup.current_build()}
    assert renewed.entries == {
        key: dataclasses.replace(entry, verified=True, kernels=ENTRY.kernels, dsl=ENTRY.dsl)
        for key, entry in stale.entries.items()
        if entry.config == FAST
    }, "times are kept"
    (((_, *rejected), reason),) = renewed.rejected.items()
    assert rejected == ["bfloat16", WRONG], "what other kernels did is dropped"
    assert "is off by" in reason


class Faults:
    """Outcomes of checks by candidate; no check runs."""

    def __init__(self, **reasons: str) -> None:
        self.reasons = {config(Kind[name]): reason for name, reason in reasons.items()}
        self.checked: list[Check] = []

    def __call__(
        self, checks: list[Check], advance: Callable[[str], None]
    ) -> Iterator[tuple[Check, str | None]]:
        for check in checks:
            self.checked.append(check)
            yield check, self.reasons.get(check.candidate)  # type: ignore[arg-type]


def test_verify_leaves_the_table_if_a_default_fails(
    command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "table.json"
    table_io.write(path, stale_table(bfloat16=[FAST]))
    before = path.read_text()
    monkeypatch.setattr(verify, "run_checks", Faults(SLOW="it hung"))
    result = command("verify", "--table", str(path))
    assert result.exit_code == 1
    assert "was not changed: defaults with project_exp, bfloat16" in result.output
    assert path.read_text() == before
    blackwell = dataclasses.replace(GPU, arch=arch_named("sm_100a"))
    other = dataclasses.replace(TABLE, gpu=blackwell, entries={}, rejected={})
    table_io.write(path, other)
    assert (
        "arch: got 'sm_100a', expected 'sm_90a'" in command("verify", "--table", str(path)).output
    )
    assert table_io.read(path) == other


@pytest.mark.parametrize(
    ("transform", "spilled", "warnings", "passes"),
    [
        (LogitTransform(), 0, (), True),
        (LogitTransform(), 8, (), False),
        (LogitTransform(row_scale=True, softcap=True), 24, (), True),
        (LogitTransform(row_scale=True, softcap=True), 40, (), False),
        (LogitTransform(row_scale=True, softcap=True), 24, ("C7510",), False),
    ],
)
def test_compile_fails_for_kernels_that_spill(
    transform: LogitTransform,
    spilled: int,
    warnings: tuple[str, ...],
    passes: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """A variant may spill the scalars that it reloads once a tile."""
    kernel = ProjectExpSpec("sm_90a", "bfloat16", LOW, sums=True, store=True, transform=transform)
    report = Report(kernel, 40, spilled, warnings, 0.1)
    monkeypatch.setenv("CUTEFCE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compile_command, "_reports", lambda kernels: iter([report]))
    result = CliRunner().invoke(compile_command.compile_kernels, ["--arch", "sm_90a"])
    assert (result.exit_code == 0) == passes, result.output


def test_verify_records_a_verdict_for_each_dtype(
    command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "run_checks", Faults())
    result = command("verify")
    assert result.exit_code == 0, result.output
    for dtype in GPU.arch.dtypes:
        assert f"the {dtype} kernels passed on {GPU.name}" in result.output
        checks = verify.configurations(RUNNER, dtype, ())
        needed = {use for check in checks for use in check.uses()}
        assert verdicts.known(GPU, dtype, needed) == verdicts.Verdict(True)


def test_version() -> None:
    assert CliRunner().invoke(main, ["--version"]).output == f"cutefce, version {__version__}\n"
