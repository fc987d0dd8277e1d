"""Peak memory of many calls on a CPU, measured in one run of the profiler, which starts slowly."""

from collections.abc import Callable, Sequence

from torch.profiler import ProfilerActivity, profile, record_function


def peaks(calls: Sequence[Callable[[], object]]) -> list[int]:
    """Return the peak bytes that each call holds beyond what is allocated before it.

    A call must return nothing and leave nothing allocated.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        for number, call in enumerate(calls):
            with record_function(f"call {number}"):
                call()
    results = profiler.profiler.kineto_results if profiler.profiler else None
    assert results is not None
    events = sorted(results.events(), key=lambda event: event.start_ns())
    starts = [event.start_ns() for event in events if event.name().startswith("call ")]
    assert len(starts) == len(calls)
    found, held = [0] * len(calls), 0
    for event in events:
        if event.name() == "[memory]" and event.device_type().name == "CPU":
            while len(starts) > 1 and event.start_ns() >= starts[1]:
                starts, held = starts[1:], 0
            number = len(calls) - len(starts)
            held += event.nbytes()
            found[number] = max(found[number], held)
    return found
