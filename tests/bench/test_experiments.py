"""Every command at tiny sizes on a CPU, and the parts of the experiments with known results."""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
import torch
from click.testing import CliRunner, Result
from torch import Tensor

pytest.importorskip("matplotlib")
pytest.importorskip("tokenizers")

import cutefce
from bench.__main__ import main
from bench.experiments import (
    accumulation,
    divergence,
    options,
    peers,
    sampled,
    sampled_curves,
    stability,
    step,
    suite,
    training_step,
)
from bench.harness import cli, problems, reference
from bench.harness.problems import Shape
from bench.harness.records import read
from bench.report import figures, sections
from examples.corpus import Corpus
from examples.training import Sizes

SIZES = Sizes(hidden=16, layers=1, heads=2, context=8, batch=4, steps=2, learning_rate=1e-2)
TINY = Shape(tokens=48, hidden=16, vocab=256, dtype="float32")


def run(output: Path, *arguments: str) -> Result:
    result = CliRunner().invoke(main, ["--output", str(output), *arguments])
    assert result.exit_code == 0, result.output
    return result


@pytest.mark.parametrize("name", ["forward", "cpu-overhead", "first-call"])
def test_commands_for_a_gpu_say_so_without_one(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(main, ["--output", str(tmp_path), name])
    assert result.exit_code == 1
    assert result.output == "Error: GPU: got no CUDA device, expected one\n"


@pytest.mark.parametrize("option", ["--tokens", "--hidden", "--vocab", "--repeats"])
def test_sizes_of_0_are_refused(option: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["--output", str(tmp_path), "peers", option, "0"])
    assert result.exit_code == 2
    assert f"Invalid value for '{option}'" in result.output


# peers


def crash(function: object) -> problems.Loss:
    import os

    os.abort()


def refuse(function: object) -> problems.Loss:
    def loss(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
        raise NotImplementedError("no such sizes")

    return loss


def half(function: object) -> problems.Loss:
    return lambda h, w, y: reference.unfused(h, w, y) / 2


def right(function: object) -> problems.Loss:
    return reference.unfused


FAKES = {
    "absent": peers.Peer("no_such_package", "loss", right),
    "older": peers.Peer("bench.harness.reference", "no_such_loss", right),
    "half": peers.Peer("bench.harness.reference", "unfused", half),
    "crash": peers.Peer("bench.harness.reference", "unfused", crash),
    "refuse": peers.Peer("bench.harness.reference", "unfused", refuse),
    "right": peers.Peer("bench.harness.reference", "unfused", right),
}
SAID = {
    "absent": "not available: No module named 'no_such_package'",
    "older": "not available: bench.harness.reference has no no_such_loss",
    "half": "relative errors of loss, dX and dW are 0.5, 0.5, 0.5",
    "crash": "SIGABRT",
    "refuse": "no such sizes",
}


@pytest.mark.slow
def test_a_peer_that_fails_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are available run in processes of their own."""
    monkeypatch.setattr(peers, "PEERS", FAKES)
    plain, ignoring = (TINY, step.PLAIN), (TINY, step.Task(ignored_percent=50))
    comparison = peers.Comparison(dict.fromkeys((plain, ignoring), tuple(FAKES)), ("max",))
    reasons = peers.refusals([comparison], "cpu")
    assert reasons.keys() == {(name, case) for name in FAKES for case in (plain, ignoring)}
    usable = {name: reasons[name, plain] or FAKES[name].load() for name in FAKES}
    rows = {row.implementation: row for row in step.run(TINY, "cpu", 2, ("max", "min"), usable)}
    for name, text in SAID.items():
        assert text in rows[name].note
        assert rows[name].median_ms is None
    assert rows["right"].note == "" and rows["right"].median_ms
    assert rows["right"].dx_error == rows["unfused"].dx_error


# every command


PEERS = {"peers", "peers_frozen_head", "peers_ignored_rows"}
"""Tables of `peers`."""


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (peers, sampled, accumulation):
        monkeypatch.setitem(module.SHAPES, "cpu", (replace(TINY, vocab=512),))
    for module in (options, divergence):
        monkeypatch.setattr(module, "CPU_SHAPE", replace(TINY, tokens=1100))
    monkeypatch.setattr(peers, "PEERS", {"absent": peers.Peer("no_such_package", "loss", right)})
    monkeypatch.setattr(peers, "README_PEERS", ("absent",))
    monkeypatch.setitem(peers.README_SHAPES, "cpu", (TINY,))
    monkeypatch.setitem(stability.VOCABS, "cpu", (512,))
    tokens = torch.randint(50, (400,))
    monkeypatch.setattr(
        "examples.corpus.load_corpus", lambda path, more=(): Corpus(tokens, tokens[:100], 50)
    )
    monkeypatch.setattr(sampled_curves, "CPU", SIZES)
    monkeypatch.setattr(sampled_curves, "SEEDS", (0,))
    sampled_curves.load.cache_clear()


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")
def test_a_command_records_once_and_its_data_makes_a_report(tmp_path: Path, tiny: None) -> None:
    run(tmp_path, "peers", "--repeats", "2")
    path = tmp_path / "cpu" / "peers.jsonl"
    run(tmp_path, "report")
    measured, _, missing = (path.parent / "report.md").read_text().partition("## Not measured")
    assert "`python -m bench peers`" in measured and "`python -m bench peers`" not in missing
    assert measured.count("All records are of one version: device cpu, cutefce") == 1
    before = path.read_text()
    output = run(tmp_path, "--resume", "peers", "--repeats", "2").output
    assert output.count(": already recorded") == 1 + 1 + len(peers.IGNORED_PERCENT)
    assert path.read_text() == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")
def test_a_command_stops_in_time_and_is_resumed(tmp_path: Path, tiny: None) -> None:
    arguments = ["--output", str(tmp_path), "--minutes", "0", "stability"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 1 and not any(tmp_path.iterdir())
    assert "stability 1/1 vocab 512: the time is over; --resume continues here" in result.output
    run(tmp_path, "--minutes", "9", "--resume", "stability")
    result = CliRunner().invoke(main, ["--resume", *arguments])
    assert result.exit_code == 0 and "stability 1/1 vocab 512: already recorded" in result.output


def test_an_experiment_that_fails_does_not_end_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @click.command("broken")
    def broken() -> None:
        raise ArithmeticError("losses differ")

    @click.command("next")
    def following() -> None:
        click.echo("the next one runs")

    modules = (SimpleNamespace(command=command) for command in (broken, following))
    monkeypatch.setattr(suite, "EXPERIMENTS", tuple(modules))
    monkeypatch.setattr(suite, "GPU_EXPERIMENTS", ())
    result = CliRunner().invoke(main, ["--output", str(tmp_path), "all"])
    assert result.exit_code == 1
    assert "ArithmeticError: losses differ" in result.output
    assert result.output.index("the next one runs") < result.output.index("Error: failed")
    assert "said above: broken" in result.output


@pytest.mark.parametrize("without_kernels", [False, True])
def test_a_portable_path_is_no_error_where_kernels_are_switched_off(
    without_kernels: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strict: list[bool] = []
    monkeypatch.setattr(cutefce, "set_strict", strict.append)
    monkeypatch.setattr(cli, "DEVICE", "cuda")
    output = cli.Output(tmp_path, False, math.inf, without_kernels)
    output.require_kernels()
    assert strict == [not without_kernels]
    assert output.folder.name.endswith("_without_kernels") == without_kernels


def test_all_runs_every_experiment_of_one_gpu() -> None:
    run = {module.command for module in (*suite.EXPERIMENTS, *suite.GPU_EXPERIMENTS)}
    apart = {"all", "quick", "parallel", "causal-lms", "report", "figures", "compare"}
    assert run == {command for name, command in main.commands.items() if name not in apart}
    assert {name.replace("_", "-") for name in sections.SECTIONS} == {
        *(command.name for command in run),
        "parallel",
        "causal-lms",
    }


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")
def test_the_table_of_the_readme_is_measured_alone(tmp_path: Path, tiny: None) -> None:
    run(tmp_path, "quick")
    assert [path.name for path in tmp_path.rglob("*.jsonl")] == ["peers_quick.jsonl"]
    rows = read(tmp_path / "cpu" / "peers_quick.jsonl")[1]
    names = [row["implementation"] for row in rows]
    assert names[:3] == ["GEMMs", "unfused", "cutefce max"] and names[-1] == "absent"
    table = figures.results(tmp_path / "cpu", (TINY, replace(TINY, tokens=47)))
    assert table[0] == "| tokens × hidden × classes | 48 × 16 × 256 | | 47 × 16 × 256 | |"
    assert "| Liger | – | – | – | – |" in table
    assert any(
        line.startswith("| cutefce max | ") and line.endswith(" | – | – |") for line in table
    )


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")
def test_everything_runs_on_a_cpu_and_its_data_makes_a_report(tmp_path: Path, tiny: None) -> None:
    pytest.importorskip("transformers")
    run(tmp_path, "all")
    folder = tmp_path / "cpu"
    files = sorted(folder.glob("*.jsonl"))
    names = {module.command.name.replace("-", "_") for module in suite.EXPERIMENTS}
    assert {path.stem for path in files} == names | PEERS
    for path in files:
        header, rows = read(path)
        assert rows and header["device"] == "cpu" and header["versions"]["torch"]
    for name in ("sampled", "accumulation"):
        for row in read(folder / f"{name}.jsonl")[1]:
            if row["implementation"] != "GEMMs":  # no kernels sample here
                assert row["dx_error"] < 1e-4
    run(tmp_path, "report")
    text = (folder / "report.md").read_text()
    assert "## Not measured" not in text and "All records are of one version" in text
    picture = folder / "sampled_curves.png"
    assert picture.stat().st_size and f"({picture.name})" in text
    _, frozen, ignored = (read(folder / f"{name}.jsonl")[1] for name in sorted(PEERS))
    assert {row["frozen"] for row in frozen} == {"weight"}
    of_us = [row for row in frozen if row["implementation"].startswith(("cutefce", "unfused"))]
    assert len(of_us) > 1
    assert all(row["dx_error"] is not None and row["dw_error"] is None for row in of_us)
    assert "### 48 × 16 × 512, frozen weight" in text
    assert {row["ignored_percent"] for row in ignored} == {50, 80, 95}
    assert "### 48 × 16 × 512, 80% of the targets ignored" in text
    exact, _, few = (row["losses"] for row in read(folder / "sampled_curves.jsonl")[1])
    assert exact == few, "the same parameters and batches; no kernels sample here"


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")
def test_a_training_step_has_the_loss_of_the_library(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    run(tmp_path, "training-step", "--repeats", "2")
    every = read(tmp_path / "cpu" / "training_step.jsonl")[1]
    for model in (training_step.LLAMA, training_step.QWEN):
        rows = {row["implementation"]: row for row in every if row["model"] == model}
        library, fused, sampled_row = (
            rows[name] for name in ("transformers", "cutefce", training_step.SAMPLED)
        )
        for name in ("loss", "gradient_norm"):
            assert fused[name] == pytest.approx(library[name], rel=1e-5)
        assert sampled_row["loss"] == pytest.approx(library["loss"], rel=1e-5)
        assert fused["peak_mib"] < library["peak_mib"]
    run(tmp_path, "report")
    text = (tmp_path / "cpu" / "report.md").read_text()
    assert text.count("| transformers |") == 2 and "| Qwen 3 0.6B | cutefce |" in text


def test_losses_that_differ_are_an_error() -> None:
    training_step.check_agreement({"transformers": (10.0, 1.0), "cutefce": (10.01, 1.001)})
    noisy = {"transformers": (10.0, 1.0), training_step.SAMPLED: (10.01, 1.05)}
    training_step.check_agreement(noisy)
    with pytest.raises(ArithmeticError):
        training_step.check_agreement(noisy | {training_step.SAMPLED: (10.1, 1.0)})
    for wrong in ((10.1, 1.0), (10.0, 1.05), (math.nan, 1.0)):
        with pytest.raises(ArithmeticError, match="cutefce: got loss and gradient norm"):
            training_step.check_agreement({"transformers": (10.0, 1.0), "cutefce": wrong})
