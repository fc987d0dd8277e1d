"""The interleaved timer, on a CPU."""

import time

import pytest

from cutefce.autotune_cache.tuning import timing


def test_rounds_are_random_and_before_is_untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    now, log = [0.0], []

    def work(name: str, seconds: float) -> timing.Call:
        def call() -> None:
            now[0] += seconds
            log.append(name)

        return call

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    calls = {"a": work("a", 0.25), "b": work("b", 0.5)}
    times = timing.interleaved(calls, "cpu", 8, repeats=2, before=work("before", 4.0))
    assert times == {"a": (250.0,) * 8, "b": (500.0,) * 8}
    samples = ["".join(log[i : i + 3]) for i in range(0, len(log), 3)]
    assert set(samples) == {"beforeaa", "beforebb"}
    rounds = [tuple(samples[i : i + 2]) for i in range(0, len(samples), 2)]
    assert len(rounds) == 8
    assert all(len(set(one)) == 2 for one in rounds), "each call once a round"
    assert len(set(rounds)) == 2, "in both orders"
