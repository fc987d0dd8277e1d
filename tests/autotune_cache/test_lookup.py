"""Lookups: the configuration for a problem; bad or stale files never change a result."""

import dataclasses
import itertools
import json
from pathlib import Path

import pytest

from cutefce.autotune_cache import lookup, tables, verdicts
from cutefce.autotune_cache.tuning.runner import Runner
from cutefce.cute_kernels import cache_files, process_cache
from cutefce.cute_kernels.arch import ARCHS
from cutefce.cute_kernels.arch.base import Gpu
from cutefce.cute_kernels.arch.sm90 import Sm90
from cutefce.cute_kernels.config import GemmConfig, KernelConfigs
from cutefce.cute_kernels.problem import Problem
from tests.support.tables import ENTRY, GPU, KEY, OLD, OTHER, PROBLEM, TABLE, TUNED, write


@pytest.fixture
def file(folder: Path) -> Path:
    """Return the path of the user's table for the test's GPU."""
    return lookup.user_folder() / tables.file_name(GPU)


def look(problem: Problem = PROBLEM) -> GemmConfig:
    return lookup.kernel_configs(problem, GPU).project_exp


def test_the_entry_of_these_sizes_then_the_default(file: Path) -> None:
    write(file, TABLE)
    assert look() == TUNED
    assert look(dataclasses.replace(PROBLEM, tokens=7000)) == TUNED, "the same bucket"
    for other in ({"dtype": "float16"}, {"tokens": 9000}, {"vocab": 128256}, {"hidden": 4104}):
        problem = dataclasses.replace(PROBLEM, **other)
        assert look(problem) == Sm90().default(problem.tokens)


def named(configs: KernelConfigs) -> set[tuple[str, GemmConfig]]:
    """Return the configuration of each kernel that has one."""
    every = {field.name: getattr(configs, field.name) for field in dataclasses.fields(configs)}
    return {(name, config) for name, config in every.items() if config is not None}


def test_everything_that_lookups_choose_as_shipped_is_listed(file: Path) -> None:
    """What is listed is compiled ahead, and verified."""
    shipped = map(tables.read, lookup.SHIPPED_FOLDER.glob("*.json"))
    gpus = {table.gpu for table in shipped} | {Gpu(Sm90(), "NVIDIA H100", 132)}
    gpus |= {dataclasses.replace(GPU, arch=arch) for arch in ARCHS}
    tokens = 1, 64, 65, 100, 130, 300, 385, 1024, 8192, 32768
    hiddens, vocabs = (128, 1024, 1152, 2304, 4096, 7168, 16384), (32768, 131072, 256000)
    for gpu in gpus:
        arch = gpu.arch
        listed = set[tuple[str, GemmConfig]]().union(*map(named, Runner(gpu).listed_configs()))
        for n, hidden, vocab, dtype in itertools.product(tokens, hiddens, vocabs, arch.dtypes):
            problem = Problem(n, hidden, vocab, dtype, "cuda", arch=arch.name)
            configs = lookup.kernel_configs(problem, gpu)
            assert named(configs) <= listed


def edited(**changes: object) -> str:
    return json.dumps(json.loads(tables.to_json(TABLE)) | changes)


def broken_entry(**changes: object) -> str:
    data = json.loads(tables.to_json(TABLE))
    data["entries"][0] |= changes
    return json.dumps(data)


BAD = {
    "empty": ("", "ignored the tuned table .*: Expecting value"),
    "cut off": (tables.to_json(TABLE)[:200], "Unterminated string|Expecting"),
    "nested without end": ("[" * 100_000, "recursion depth"),
    "an older schema": (edited(schema=3), "schema: got 3, expected 4"),
    "another GPU": (edited(device="NVIDIA Other"), "device: got 'NVIDIA Other'"),
    "an unknown architecture": (edited(arch="sm_80"), "arch: got 'sm_80'"),
    "no entries": (edited(entries=None), "a field is missing"),
    "a size of 0": (broken_entry(tokens=0), "tokens: got 0, expected a number above 0"),
    "a size that is true": (broken_entry(vocab=True), "vocab: got True, expected a number"),
    "an infinite time": (broken_entry(default_ms=float("inf")), "default_ms: got inf, expected"),
    "a time beyond floats": (broken_entry(ms=10**400), "ms: got 1000.*expected"),
    "versions that are a list": (edited(versions=[1]), "a field is missing or has the wrong type"),
    "more digits than Python reads": ('{"schema": ' + "9" * 5000 + "}", "ignored the tuned table"),
    "an entry without a configuration": (
        edited(entries=[{"kernel": "project_exp"}]),
        "a field is missing or has the wrong type: 'config'",
    ),
}


@pytest.mark.parametrize(("text", "said"), BAD.values(), ids=BAD)
def test_a_bad_file_is_ignored_with_one_warning(text: str, said: str, file: Path) -> None:
    file.parent.mkdir(parents=True)
    file.write_text(text)
    with pytest.warns(UserWarning, match=said) as warned:
        assert look() == Sm90().default(8192)
        assert look(dataclasses.replace(PROBLEM, tokens=100)) == Sm90().default(100)
    assert len(warned) == 1


def test_without_a_cache_folder_the_defaults_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cache_files.CACHE_VARIABLE, "relative")
    process_cache.reset()
    with pytest.warns(UserWarning, match="no cache folder: got 'relative'") as warned:
        assert look() == Sm90().default(8192)
        assert look(dataclasses.replace(PROBLEM, tokens=100)) == Sm90().default(100)
        assert verdicts.known(GPU, "bfloat16") == verdicts.Verdict(True)
        verdicts.record(GPU, "bfloat16", verdicts.Verdict(True), ("forward",))
    assert len(warned) == 1
    process_cache.reset()


def test_tables_of_other_kernel_sources_or_compilers_are_used(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a warning; the user's come before the shipped ones."""
    monkeypatch.setattr(lookup, "SHIPPED_FOLDER", tmp_path)
    old = dataclasses.replace(TABLE, versions=OLD)
    shipped = {KEY: dataclasses.replace(ENTRY, config=OTHER)}
    write(tmp_path / file.name, dataclasses.replace(old, entries=shipped))
    assert look() == OTHER
    write(file, old)
    process_cache.reset()
    assert look() == TUNED
