"""What the tuner's child processes do, without a GPU: what is compared, and how races are run."""

import time
from collections.abc import Callable

import pytest

from cutefce.autotune_cache.tuning import targets, worker
from cutefce.autotune_cache.tuning.targets.window import Window
from cutefce.cute_kernels import spec
from cutefce.cute_kernels.arch import ARCHS
from cutefce.cute_kernels.arch.base import Arch
from cutefce.ops.primitives import cute
from tests.support.fake_tuner import SIZE, SIZES, STAND_IN
from tests.support.faulty_candidates import Kind, config
from tests.support.kernel_models import model_of


@pytest.mark.parametrize(
    ("kind", "said"),
    [(Kind.WRONG_SUMS, "others' share is off by 0.0001"), (Kind.WRONG_GRADIENTS, "dW is off by")],
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_slightly_wrong_results_are_found(kind: Kind, said: str, dtype: str) -> None:
    worker.check(STAND_IN, dtype, config(Kind.FAST))
    with pytest.raises(worker.MismatchError, match=said):
        worker.check(STAND_IN, dtype, config(kind))


def test_rounds_of_a_race_have_orders_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []

    def sample(call: object, in_a_row: int) -> Callable[[], float]:
        calls.append(call)
        return lambda: 2.0 if call is calls[0] else 3.0

    monkeypatch.setattr(worker, "_cpu_sample", sample)
    problem = STAND_IN.problem(SIZES, "bfloat16")
    timings = worker.race(STAND_IN, problem, (config(Kind.FAST), "product"), 0.0, 1)
    assert timings == (worker.Timing(2.0, 2 / 3), worker.Timing(3.0, 1.0))
    first, second, *_ = calls
    rounds = [tuple(calls[i : i + 2]) for i in range(2, len(calls), 2)]
    assert len(rounds) == worker.LEAST_ROUNDS
    assert set(rounds) == {(first, second), (second, first)}


@pytest.mark.parametrize(
    ("milliseconds", "calls"), [(5, 3), (25, 3), (38, 2), (200, 1)], ids=lambda x: str(x)
)
def test_calls_in_a_row_of_a_race(
    milliseconds: int, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as a step has, unless fewer last as long as a GPU's clock needs."""
    now, taken = [0.0], []

    def sample(call: object, in_a_row: int) -> Callable[[], float]:
        now[0] += in_a_row * milliseconds / 1e3
        taken.append(in_a_row)
        return lambda: float(milliseconds)

    monkeypatch.setattr(worker, "_cpu_sample", sample)
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    problem = STAND_IN.problem(SIZES, "bfloat16")
    worker.race(STAND_IN, problem, (config(Kind.FAST), "product"), 0.5, 3)
    assert set(taken[:-2]) <= {1, calls} and taken[-2:] == [calls, calls]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("arch", ARCHS, ids=lambda arch: arch.name)
def test_all_kernels_are_checked(arch: Arch, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: set[spec.KernelSpec] = set()

    def note(kernel: spec.KernelSpec) -> Callable[..., None]:
        return lambda *arguments: launched.add(kernel)

    monkeypatch.setattr(cute, "compiled", note)
    known: list[spec.KernelSpec] = []
    for tunable in targets.all_tunables(arch, SIZE, "cpu"):
        for choice in tunable.defaults():
            known += tunable.kernels(tunable.typical(dtype), choice)
            for name in worker.SMALL:
                tunable.results(worker._small(tunable, name, dtype)[0], choice)
    assert set(known) <= launched


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("arch", ARCHS, ids=lambda arch: arch.name)
def test_trials_launch_nothing_that_was_not_compiled_ahead(
    arch: Arch, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiling takes longer than a trial may."""
    launched: set[spec.KernelSpec] = set()

    def note(kernel: spec.KernelSpec) -> Callable[..., None]:
        return lambda *arguments: launched.add(kernel)

    monkeypatch.setattr(cute, "compiled", note)
    for tunable in targets.all_tunables(arch, SIZE, "cpu"):
        problem = tunable.problem((130, 64, 1500), dtype)
        case, _ = worker._full(tunable, problem)
        choice = tunable.default(problem)
        for some in (case, *(worker._small(tunable, x, dtype)[0] for x in worker.SMALL)):
            tunable.results(some, choice)
        tunable.call(case, choice)()
        assert launched and launched <= set(tunable.kernels(problem, choice))
        launched.clear()


@pytest.mark.parametrize("arch", ARCHS, ids=lambda arch: arch.name)
def test_steps_with_windows_of_any_width_are_right(
    arch: Arch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cute, "compiled", model_of)
    tunable, widths = Window(arch, SIZE, "cpu"), set()
    for name in worker.SMALL:
        case, expected = worker._small(tunable, name, "bfloat16")
        assert tunable.default(case.problem) in tunable.candidates(case.problem)
        for width in tunable.candidates(case.problem):
            worker._compare(tunable.results(case, width), expected, 1, name)
            widths.add(width)
    assert len(widths) > 2
