"""The tuned tables: what is found in them, and that a bad file never changes a result."""

import dataclasses
import itertools
import json
import timeit
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner

from cutefce.__main__ import main
from cutefce.autotune_cache import defaults, lookup, table, table_io
from cutefce.autotune_cache.table import Entry, Key, Rejection, Table
from cutefce.cute_kernels import spec
from cutefce.cute_kernels.arch import ARCHS, arch_named
from cutefce.cute_kernels.arch.sm90 import Sm90
from cutefce.cute_kernels.config import GemmConfig
from cutefce.cute_kernels.jit import cache as jit_cache
from cutefce.cute_kernels.problem import Problem
from cutefce.ops.interface import call
from cutefce.ops.planning import planner
from cutefce.ops.primitives import cute, dispatch

DEVICE, SIZE = "NVIDIA Test 9000", 132
_, _, _, TUNED, _, OTHER = Sm90().prebuilt_configs()
KEY = Key("project_exp", "bfloat16", 4096, 131072, 8192)
ENTRY = Entry(TUNED, 12.5, 13.0, 12.9, verified=True, kernels="0123")
REJECTED: table.Rejections = {(KEY, OTHER): Rejection("no answer within 30 s", everywhere=True)}
TABLE = Table(DEVICE, SIZE, "sm_90a", {"kernels": "0123"}, {KEY: ENTRY}, REJECTED)
PROBLEM = Problem(8192, 4096, 131072, "bfloat16", "cuda", arch="sm_90a")


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return where the user's table for the test's GPU lies."""
    monkeypatch.setenv(jit_cache.CACHE_VARIABLE, str(tmp_path))
    lookup.forget()
    yield lookup.user_folder() / table_io.file_name(DEVICE)
    lookup.forget()


def look(problem: Problem = PROBLEM, size: int = SIZE) -> GemmConfig:
    return lookup.lookup_configs(problem, Sm90(), DEVICE, size).project_exp


def test_round_trip(file: Path) -> None:
    table_io.write(file, TABLE)
    assert table_io.read(file) == TABLE
    assert not list(file.parent.glob("*.tmp"))


def test_the_plain_product_can_win_but_not_for_project_exp(file: Path) -> None:
    product = dataclasses.replace(ENTRY, config=None)
    key = dataclasses.replace(KEY, kernel="grad_hidden")
    table_io.write(file, dataclasses.replace(TABLE, entries={key: product}))
    assert table_io.read(file).entries == {key: product}
    assert lookup.tuned("grad_hidden", PROBLEM, Sm90(), DEVICE, SIZE) == product
    table_io.write(file, dataclasses.replace(TABLE, entries={KEY: product}))
    with pytest.raises(ValueError, match="a field is missing"):
        table_io.read(file)


def test_exact_then_nearest_then_default(file: Path) -> None:
    far = dataclasses.replace(KEY, tokens=512)
    entries = {KEY: ENTRY, far: dataclasses.replace(ENTRY, config=OTHER)}
    table_io.write(file, dataclasses.replace(TABLE, entries=entries, rejected={}))
    assert look() == TUNED
    assert look(dataclasses.replace(PROBLEM, tokens=7000)) == TUNED, "the same bucket"
    assert look(dataclasses.replace(PROBLEM, tokens=400, vocab=128256)) == OTHER
    for other in ({"dtype": "float16"}, {"tokens": 8}):
        problem = dataclasses.replace(PROBLEM, **other)
        assert look(problem) == Sm90().default(problem.tokens)


def test_where_the_default_won_other_problems_have_their_own(file: Path) -> None:
    same = dataclasses.replace(ENTRY, config=OTHER, milliseconds=13.0)
    table_io.write(file, dataclasses.replace(TABLE, entries={KEY: same}, rejected={}))
    assert look() == OTHER
    assert look(dataclasses.replace(PROBLEM, tokens=16384)) == Sm90().default(16384)


def test_what_won_for_more_tokens_has_no_rows_to_waste(file: Path) -> None:
    tall = dataclasses.replace(ENTRY, config=OTHER)
    entries = {dataclasses.replace(KEY, tokens=256): tall}
    table_io.write(file, dataclasses.replace(TABLE, entries=entries, rejected={}))
    for tokens in (256, 500):
        assert look(dataclasses.replace(PROBLEM, tokens=tokens)) == OTHER
    for tokens in (128, 192, 300):
        assert look(dataclasses.replace(PROBLEM, tokens=tokens)) == Sm90().default(tokens)


def test_unverified_entries_are_not_used(file: Path) -> None:
    unverified = dataclasses.replace(ENTRY, verified=False)
    table_io.write(file, dataclasses.replace(TABLE, entries={KEY: unverified}))
    assert look() == Sm90().default(8192)


def test_what_is_chosen_as_shipped_is_compiled_ahead(file: Path) -> None:
    shipped = map(table_io.read, lookup.SHIPPED_FOLDER.glob("*.json"))
    gpus = {(table.device, table.num_sms, table.arch) for table in shipped}
    gpus |= {(DEVICE, SIZE, arch.name) for arch in ARCHS}
    for device, size, name in gpus:
        arch = arch_named(name)
        ahead = set(lookup.shipped_kernels(arch))
        sizes = [1, 100, 1024, 8192, 32768], [1024, 2304, 4096, 7168], [32768, 131072, 256000]
        for tokens, hidden, vocab, dtype in itertools.product(*sizes, arch.dtypes):
            problem = Problem(tokens, hidden, vocab, dtype, "cuda", arch=name)
            configs = lookup.lookup_configs(problem, arch, device, size)
            assert ahead.issuperset(spec.kernel_set(arch, dtype, configs).all())


def test_an_edited_configuration_is_what_is_launched(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As two processes would, before and after the edit; launches are noted, not made."""
    gpu = SimpleNamespace(name=DEVICE, multi_processor_count=SIZE)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    launched: list[spec.KernelSpec] = []

    def note(kernel: spec.KernelSpec) -> Callable[..., None]:
        return lambda *arguments: launched.append(kernel)

    monkeypatch.setattr(cute, "compiled", note)
    table_io.write(file, TABLE)
    for change in ({}, {"raster_group": 3}, {"tile_n": 96}):
        data = json.loads(file.read_text())
        data["entries"][0]["config"].update(change)
        file.write_text(json.dumps(data))
        lookup.forget()
        dispatch.gpu_of.cache_clear()
        dispatch._cute_primitives.cache_clear()
        steps = dispatch._cute_primitives(torch.device("cuda", 7), PROBLEM)
        h, w, y = torch.zeros(4, 8), torch.zeros(32, 8), torch.zeros(4, dtype=torch.long)
        steps.project_exp(h, w, (0, 32), h[:, 0], y)
        (kernel,) = launched
        assert isinstance(kernel, spec.ProjectExpSpec)
        assert dataclasses.asdict(kernel.config) == data["entries"][0]["config"]
        launched.clear()
    dispatch.gpu_of.cache_clear()
    dispatch._cute_primitives.cache_clear()


def test_an_edited_window_is_what_is_planned(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 7)
    monkeypatch.setattr(dispatch, "gpu_of", lambda device: (Sm90(), DEVICE, SIZE))
    problem, key = dataclasses.replace(PROBLEM, tokens=2048), dataclasses.replace(KEY, tokens=2048)
    planned = call._new_plan(problem, device, planner.MINIMUM, True, problem.vocab).window
    every = [config.window for config in defaults.window_configs(problem)]
    for width in (*every, 12345):
        entry = dataclasses.replace(ENTRY, config=width)
        windows = {dataclasses.replace(key, kernel=table.WINDOW): entry}
        table_io.write(file, dataclasses.replace(TABLE, entries=windows))
        assert table_io.read(file).entries == windows
        lookup.forget()
        plan = call._new_plan(problem, device, planner.MINIMUM, True, problem.vocab)
        assert plan.window == (width if width in every else planned)
    assert len(every) > 1 and lookup.shipped_kernels(Sm90())


@pytest.mark.parametrize("columns", [0, -8448, 8448.0, "8448", True, None, {"window": 8448}])
def test_wrong_windows_are_refused(columns: object, file: Path) -> None:
    data = json.loads(text_of(TABLE))
    data["entries"][0] |= {"kernel": table.WINDOW, "config": columns}
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(data))
    with pytest.raises(ValueError, match="expected the columns of a window"):
        table_io.read(file)


def edited(**changes: object) -> str:
    return json.dumps(json.loads(text_of(TABLE)) | changes)


def text_of(table: Table) -> str:
    entries = [dataclasses.asdict(k) | dataclasses.asdict(e) for k, e in table.entries.items()]
    empty = dataclasses.asdict(dataclasses.replace(table, entries={}, rejected={}))
    return json.dumps({"schema": 2, **empty, "entries": entries, "rejected": []})


def broken_entry(**changes: object) -> str:
    data = json.loads(text_of(TABLE))
    data["entries"][0] |= changes
    return json.dumps(data)


BAD = {
    "empty": ("", "not JSON"),
    "cut off": (text_of(TABLE)[:200], "not JSON"),
    "a list": ("[]", "schema: got"),
    "nested without end": ("[" * 100_000, "not JSON"),
    "an older schema": (edited(schema=1), "schema: got 1, expected 2"),
    "a newer schema": (edited(schema=3), "schema: got 3, expected 2"),
    "another GPU": (edited(device="NVIDIA Other"), "device: got 'NVIDIA Other'"),
    "another size": (edited(num_sms=114), "num_sms: got 114"),
    "an unknown architecture": (edited(arch="sm_80"), "arch: got 'sm_80'"),
    "no entries": (edited(entries=None), "a field is missing"),
    "an illegal configuration": (
        broken_entry(config=dataclasses.asdict(dataclasses.replace(TUNED, stages=60))),
        "stages: got 60",
    ),
    "an unknown field": (broken_entry(config={"warps": 4}), "a field is missing"),
    "a size of 0": (broken_entry(tokens=0), "expected sizes and times above 0"),
    "a size beyond all": (broken_entry(vocab=10**400), "expected sizes and times above 0"),
    "a size that is text": (broken_entry(vocab="131072"), "expected sizes and times above 0"),
    "a time that is none": (broken_entry(milliseconds=float("nan")), "expected sizes and times"),
    "no configuration": (broken_entry(config=None), "a field is missing"),
    "no reason to reject": (edited(rejected=[{}]), "a field is missing"),
}


@pytest.mark.parametrize(("text", "said"), BAD.values(), ids=BAD)
def test_a_bad_file_is_said_once_and_ignored(text: str, said: str, file: Path) -> None:
    file.parent.mkdir(parents=True)
    file.write_text(text)
    with pytest.warns(UserWarning, match=said) as warned:
        assert look() == Sm90().default(8192)
        assert look(dataclasses.replace(PROBLEM, tokens=100)) == Sm90().default(100)
    assert len(warned) == 1


@pytest.mark.parametrize("kind", ["a folder", "not text"])
def test_a_file_that_cannot_be_read(kind: str, file: Path) -> None:
    file.parent.mkdir(parents=True)
    if kind == "a folder":
        file.mkdir()
    else:
        file.write_bytes(b"\xff\xfe{")
    with pytest.warns(UserWarning, match="ignored the tuned table"):
        assert look() == Sm90().default(8192)


def test_lookups_are_fast(file: Path) -> None:
    table_io.write(file, TABLE)
    look()
    # other processes can only make it slower
    assert min(timeit.repeat(look, number=200, repeat=20)) / 200 <= 5e-6


def test_merge_keeps_the_verified_and_the_faster(file: Path) -> None:
    slower = dataclasses.replace(ENTRY, config=OTHER, milliseconds=12.6)
    faster_unverified = dataclasses.replace(ENTRY, config=OTHER, milliseconds=1.0, verified=False)
    new = dataclasses.replace(KEY, vocab=50304)
    first = dataclasses.replace(TABLE, entries={KEY: slower}, rejected={})
    third = dataclasses.replace(first, entries={KEY: faster_unverified, new: ENTRY})
    assert table.merge([first, TABLE, third]).entries == {KEY: ENTRY, new: ENTRY}
    assert table.merge([first, TABLE]).rejected == REJECTED
    with pytest.raises(ValueError, match="num_sms: got 114"):
        table.merge([TABLE, dataclasses.replace(TABLE, num_sms=114)])


def test_what_is_rejected_everywhere_wins_nothing(file: Path) -> None:
    elsewhere = dataclasses.replace(KEY, vocab=32000)
    won = {elsewhere: dataclasses.replace(ENTRY, config=OTHER), KEY: ENTRY}
    table_io.update(file, dataclasses.replace(TABLE, entries=won, rejected={}))
    small: table.Rejections = {(KEY, TUNED): Rejection("out of memory", everywhere=False)}
    table_io.update(file, dataclasses.replace(TABLE, entries={}, rejected={**REJECTED, **small}))
    assert table_io.read(file).entries == {KEY: ENTRY}
    new = dataclasses.replace(TABLE, versions={"kernels": "new"}, entries=won, rejected={})
    table_io.update(file, new)
    assert table_io.read(file) == new, "rejections of other kernels are forgotten"


def test_a_file_that_cannot_be_used_is_moved_aside(file: Path) -> None:
    file.parent.mkdir(parents=True)
    file.write_text("precious, but no table")
    table_io.update(file, TABLE)
    assert table_io.read(file) == TABLE
    assert file.with_suffix(".unusable").read_text() == "precious, but no table"


def test_commands(file: Path, tmp_path: Path) -> None:
    table_io.write(file, TABLE)
    run = CliRunner().invoke
    shown = run(main, ["cache", "show"]).output
    assert "8192 × 4096 × 131072" in shown
    assert "no answer within 30 s" in shown
    assert "1 entries" in run(main, ["cache", "validate", str(file)]).output
    into = tmp_path / "joined.json"
    assert run(main, ["cache", "merge", str(file), str(file), "--into", str(into)]).exit_code == 0
    assert table_io.read(into) == TABLE
    assert run(main, ["cache", "clear"]).exit_code == 0
    assert not file.exists()
    into.write_text("{}")
    result = run(main, ["cache", "validate", str(into)])
    assert result.exit_code == 1
    assert "schema: got None, expected 2" in result.output


@pytest.mark.parametrize("tokens", [1, 2, 3, 64, 65, 8192, 8193])
def test_buckets(tokens: int) -> None:
    assert table.bucket(tokens) * 2 / 3 < tokens <= table.bucket(tokens)
