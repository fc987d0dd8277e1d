"""Calls of the tuner's subprocess, without a GPU: comparisons and benchmarks."""

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cutefce.autotune_cache.tuning import targets, timing, worker
from cutefce.autotune_cache.tuning.shapes import SMALL_PROBLEMS
from cutefce.autotune_cache.tuning.targets.base import TuningTarget
from cutefce.autotune_cache.tuning.targets.window import WindowTarget
from cutefce.cute_kernels import process_cache, spec
from cutefce.cute_kernels.arch import ARCHS
from cutefce.cute_kernels.arch.base import Arch
from cutefce.cute_kernels.parts import (
    DIVERGENCES,
    PARTS,
    SAMPLES,
    SOFT_TARGETS,
    STEP,
    parts_of,
)
from tests.support.fake_tuner import SIZES, TARGET
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
    worker.check_small(TARGET, dtype, config(Kind.FAST))
    with pytest.raises(worker.MismatchError, match=said):
        worker.check_small(TARGET, dtype, config(kind))


def test_rounds_have_random_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []

    def sample(call: object, repeats: int) -> Callable[[], float]:
        calls.append(call)
        return lambda: 2.0 if call is calls[0] else 3.0

    monkeypatch.setattr(timing, "_cpu_sample", sample)
    problem = TARGET.problem(SIZES, "bfloat16")
    timings = worker.benchmark_interleaved(
        TARGET, problem, (config(Kind.FAST), worker.CUBLAS), 0.0, 1
    )
    assert timings == (worker.Timing(2.0, 2 / 3), worker.Timing(3.0, 1.0))
    first, second, *_ = calls
    rounds = [tuple(calls[i : i + 2]) for i in range(2, len(calls), 2)]
    assert len(rounds) == worker.MIN_ROUNDS
    assert set(rounds) == {(first, second), (second, first)}


@pytest.mark.parametrize(
    ("ms", "calls"), [(5, 3), (25, 3), (38, 2), (200, 1)], ids=lambda x: str(x)
)
def test_calls_per_sample(ms: int, calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as a step has, unless fewer last long enough for a GPU's clock."""
    now, taken = [0.0], []

    def sample(call: object, repeats: int) -> Callable[[], float]:
        now[0] += repeats * ms / 1e3
        taken.append(repeats)
        return lambda: float(ms)

    monkeypatch.setattr(timing, "_cpu_sample", sample)
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    problem = TARGET.problem(SIZES, "bfloat16")
    worker.benchmark_interleaved(TARGET, problem, (config(Kind.FAST), worker.CUBLAS), 0.5, 3)
    assert set(taken[:-2]) <= {1, calls} and taken[-2:] == [calls, calls]


@pytest.fixture
def no_results(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compute no expected outputs, which take most of the time and which no launch depends on."""
    monkeypatch.setattr(TuningTarget, "expected", lambda *_: {})
    process_cache.reset()
    yield
    process_cache.reset()


@pytest.fixture
def launched(no_results: None, monkeypatch: pytest.MonkeyPatch) -> set[spec.KernelSpec]:
    """Return the kernels that would be launched; only what addresses memory depends on runs."""
    kernels: set[spec.KernelSpec] = set()

    def note(kernel: spec.KernelSpec) -> Callable[..., None]:
        def launch(*arguments: Any) -> None:
            kernels.add(kernel)
            if isinstance(kernel, spec.SelectRowsSpec | spec.SoftLeadsSpec | spec.PrepareSoftSpec):
                model_of(kernel)(*arguments)

        return launch

    use_models(monkeypatch, note)
    return kernels


@pytest.mark.slow
@pytest.mark.parametrize("dtype", rest_slow(["bfloat16", "float16"]))
@pytest.mark.parametrize("arch", rest_slow({arch.name: arch for arch in ARCHS}))
def test_all_kernels_are_checked(arch: Arch, dtype: str, launched: set[spec.KernelSpec]) -> None:
    checks = [
        (target, candidate)
        for target in targets.all_targets(dataclasses.replace(GPU, arch=arch), "cpu")
        for candidate in target.defaults()
    ]
    known: set[spec.KernelSpec] = set()
    for target, candidate in checks:
        known |= set(target.kernels(target.reference_problem(dtype), candidate))
    for name in ("rows far above their targets", "one row", *SMALL_PROBLEMS):
        for target, candidate in checks:
            target.outputs(worker._small_case(target, name, dtype)[0], candidate)
        if known <= launched:
            break
    assert known <= launched


@pytest.fixture
def new_process() -> Iterator[None]:
    process_cache.reset()
    yield
    process_cache.reset()


IGNORED = "rows far above their targets"
"""The small problem of which some tokens are ignored."""


KERNELS = "project_exp", "grad_hidden", "grad_weight"


@pytest.mark.parametrize(
    ("kernel", "parts", "name", "dtype"),
    [
        pytest.param("project_exp", parts_of(STEP), IGNORED, "bfloat16", id="a step"),
        *(
            pytest.param(kernel, PARTS, name, dtype, marks=pytest.mark.slow)
            for kernel in KERNELS
            for name in SMALL_PROBLEMS
            for dtype in ("bfloat16", "float16")
        ),
    ],
)
def test_models_of_the_kernels_pass(
    kernel: str,
    parts: tuple[str, ...],
    name: str,
    dtype: str,
    new_process: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Right kernels are not rejected: what is compared is the same value twice."""
    use_models(monkeypatch)
    monkeypatch.setattr(worker, "SMALL_PROBLEMS", {name: SMALL_PROBLEMS[name]})
    (target,) = (each for each in targets.all_targets(GPU, "cpu") if each.name == kernel)
    worker.check_small(dataclasses.replace(target, parts=parts), dtype, target.defaults()[0])


@pytest.mark.parametrize("dtype", rest_slow(["bfloat16", "float16"]))
@pytest.mark.parametrize("arch", rest_slow({arch.name: arch for arch in ARCHS}))
def test_trials_launch_nothing_that_was_not_compiled_ahead(
    arch: Arch, dtype: str, launched: set[spec.KernelSpec]
) -> None:
    """Compiling takes longer than a trial may."""
    for target in targets.all_targets(dataclasses.replace(GPU, arch=arch), "cpu"):
        problem = target.problem((130, 64, 1500), dtype)
        case, _ = worker._full_case(target, problem)
        candidate = target.default(problem)
        small = (worker._small_case(target, name, dtype)[0] for name in SMALL_PROBLEMS)
        for some in (case, *small):
            target.outputs(some, candidate)
        target.call(case, candidate)()
        assert launched and launched <= set(target.kernels(problem, candidate))
        launched.clear()


@pytest.mark.parametrize("arch", rest_slow({arch.name: arch for arch in ARCHS}))
def test_steps_with_windows_of_any_width_are_right(
    arch: Arch, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_models(monkeypatch)
    target, widths = WindowTarget(dataclasses.replace(GPU, arch=arch), "cpu"), set()
    for name in SMALL_PROBLEMS:
        case, expected = worker._small_case(target, name, "bfloat16")
        assert target.default(case.problem) in target.candidates(case.problem)
        for width in target.candidates(case.problem):
            worker._compare(target.outputs(case, width), expected, 1, name)
            widths.add(width)
    assert len(widths) > 2


@pytest.mark.parametrize("part", [part for part in PARTS if part != DIVERGENCES])
def test_a_part_compiles_what_it_launches(part: str, launched: set[spec.KernelSpec]) -> None:
    """A call waits for no kernels but its own, and none is compiled within a time limit."""
    parts, known = parts_of(part), set[spec.KernelSpec]()
    for target in targets.all_targets(GPU, "cpu")[:2]:
        of_part = dataclasses.replace(target, parts=parts)
        candidate = of_part.default(of_part.reference_problem("bfloat16"))
        known |= set(of_part.kernels(of_part.reference_problem("bfloat16"), candidate))
        for name in SMALL_PROBLEMS:
            case = worker._small_case(of_part, name, "bfloat16")[0]
            of_part.outputs(case, candidate)
    assert launched <= known
    more = {SAMPLES: 1, SOFT_TARGETS: 3}.get(part, 0)
    assert not sorted(map(str, known - launched))[more:], (
        "some are those of a step, which come first"
    )
