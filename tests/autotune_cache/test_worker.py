"""Calls of the subprocess of verification and tuner, without a GPU: comparisons and trials."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cutefce.autotune_cache.tuning import runner, timing, tuner
from cutefce.autotune_cache.tuning.cases import SMALL_PROBLEMS, MismatchError, small_case
from cutefce.autotune_cache.tuning.runner import Runner
from cutefce.autotune_cache.tuning.tuner import Job
from cutefce.autotune_cache.verdicts import (
    DIVERGENCES,
    FORWARD,
    OPTIONS,
    PARTS,
    SAMPLES,
    SOFT_TARGETS,
    STEP,
    parts_of,
)
from cutefce.cute_kernels import process_cache
from cutefce.cute_kernels.arch import ARCHS
from cutefce.cute_kernels.arch.base import Arch
from cutefce.cute_kernels.jit import cache as jit_cache
from cutefce.cute_kernels.spec.kernel import KernelSpec
from cutefce.cute_kernels.spec.rowwise import SelectRowsSpec
from tests.support.fake_tuner import RUNNER, job
from tests.support.faulty_candidates import Kind, config
from tests.support.kernel_models import model_of, use_models
from tests.support.tables import GPU
from tests.support.tiers import rest_slow


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Kind.WRONG_SUMS, "sum of the other exponentials is off by 0.0001"),
        (Kind.WRONG_GRADIENTS, "dW is off by"),
    ],
)
@pytest.mark.parametrize("dtype", rest_slow(["bfloat16", "float16"]))
def test_slightly_wrong_results_are_found(kind: Kind, said: str, dtype: str) -> None:
    RUNNER.check(dtype, job().configs(config(Kind.FAST)), PARTS)
    with pytest.raises(MismatchError, match=said):
        RUNNER.check(dtype, job().configs(config(kind)), PARTS)


@pytest.mark.parametrize(("ms", "rounds"), [(0.1, 50), (20, 17), (200, 4)])
def test_trials_take_about_as_long_as_they_may(
    ms: float, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few rounds of a long call, and several calls in a row in each."""
    now, candidates = [0.0], (config(Kind.FAST), config(Kind.SLOW))

    def call() -> None:
        now[0] += ms

    monkeypatch.setattr(timing, "_now", lambda device: now[0] / 1e3)
    monkeypatch.setattr(Job, "calls", lambda _: dict.fromkeys(candidates, call))
    taken = job().trial()
    assert {name: len(times) for name, times in taken.items()} == dict.fromkeys(candidates, rounds)
    assert all(times == pytest.approx((ms,) * rounds) for times in taken.values())
    assert now[0] == pytest.approx(2 * ms * (2 + tuner.CALLS * rounds))


@pytest.fixture
def no_results(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compute no expected outputs, which take most of the time and which no launch depends on."""
    monkeypatch.setattr(Runner, "expected", lambda *_: {})
    process_cache.reset()
    yield
    process_cache.reset()


@pytest.fixture
def launched(no_results: None, monkeypatch: pytest.MonkeyPatch) -> set[KernelSpec]:
    """Return the kernels that would be launched; only what addresses memory depends on runs."""
    kernels: set[KernelSpec] = set()

    def note(kernel: KernelSpec) -> Callable[..., None]:
        if jit_cache._thread.recorded is not None:
            record: Callable[..., None] = jit_cache.compiled(kernel)
            return record

        def launch(*arguments: Any) -> None:
            kernels.add(kernel)
            if isinstance(kernel, SelectRowsSpec):
                model_of(kernel)(*arguments)

        return launch

    use_models(monkeypatch, note)
    return kernels


def test_checks_have_every_configuration() -> None:
    configs, listed = Runner(GPU).listed_configs(), GPU.arch.listed
    for kernel, every in listed.items():
        others = [None] * ("grad_hidden" in kernel)  # cuBLAS for dX
        assert {getattr(each, kernel) for each in configs} == {*every, *others}


@pytest.fixture
def new_process() -> Iterator[None]:
    process_cache.reset()
    yield
    process_cache.reset()


IGNORED = "rows far above their targets"
"""The small problem of which some tokens are ignored."""


@pytest.mark.parametrize(
    ("index", "parts", "name", "dtype"),
    [
        pytest.param(0, parts_of(STEP), IGNORED, "bfloat16", id="a step"),
        *(
            pytest.param(index, PARTS, name, dtype, marks=pytest.mark.slow)
            for index in range(3)
            for name in SMALL_PROBLEMS
            for dtype in ("bfloat16", "float16")
        ),
    ],
)
def test_models_of_the_kernels_pass(
    index: int,
    parts: tuple[str, ...],
    name: str,
    dtype: str,
    new_process: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Right kernels pass: what is compared is the same value twice."""
    use_models(monkeypatch)
    monkeypatch.setattr(runner, "SMALL_PROBLEMS", {name: SMALL_PROBLEMS[name]})
    own = Runner(GPU, "cpu")
    own.check(dtype, own.listed_configs()[index], parts)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", rest_slow(["bfloat16", "float16"]))
@pytest.mark.parametrize("arch", rest_slow({arch.name: arch for arch in ARCHS}))
def test_trials_launch_nothing_that_was_not_compiled_ahead(
    arch: Arch, dtype: str, launched: set[KernelSpec]
) -> None:
    """Compiling takes longer than a trial may."""
    runner = Runner(dataclasses.replace(GPU, arch=arch), "cpu")
    compiled = set(runner.all_kernels(dtype, parts_of(STEP)))
    for one in tuner.jobs_of(runner, [(130, 64, 1500)], dtype):
        for call in one.calls().values():
            call()
        assert launched and launched <= compiled
        launched.clear()


COUNTS = {FORWARD: 5, STEP: 29, OPTIONS: 45, SOFT_TARGETS: 4, SAMPLES: 16, DIVERGENCES: 21}
"""Kernels of each part of calls of many tokens on Hopper."""


@pytest.mark.parametrize("part", PARTS)
def test_a_part_compiles_what_it_launches(part: str, launched: set[KernelSpec]) -> None:
    """A call waits for no kernels but its own, and none is compiled within a time limit."""
    runner, parts, known = Runner(GPU, "cpu"), parts_of(part), set[KernelSpec]()
    base = runner.base()
    for configs in (base, dataclasses.replace(base, grad_hidden_short=base.grad_hidden)):
        known |= set(runner.kernels("bfloat16", configs, parts))
        for name in SMALL_PROBLEMS:
            case = small_case(name, runner.problem(SMALL_PROBLEMS[name], "bfloat16"))
            runner.outputs(case, configs, parts)
    assert launched == known and len(known) == COUNTS[part]
