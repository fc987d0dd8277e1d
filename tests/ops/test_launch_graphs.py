"""CUDA graphs of launches that recur: when they are captured, and that they compute the same."""

import gc
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from cutefce.cute_kernels import process_cache
from cutefce.ops import launch_graphs, torch_compat
from cutefce.ops.launch_graphs import KEPT, MOST_CAPTURES, REMEMBERED, LaunchGraphs
from cutefce.ops.primitives.fused import step as fused_step
from tests.support.reference import random_case

SIZES = 512, 256, 30000
SOME = 8 << 20
"""A workspace in which some windows are stored and others computed again."""


class Recorder:
    """A function that launches kernels, and notes how often it is called."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> None:
        self.calls += 1


class FakeGraph:
    """A graph that notes its launches."""

    made: list["FakeGraph"]

    def __init__(self, launch: Any) -> None:
        self.launches = 0
        self.made.append(self)

    def launch(self) -> None:
        self.launches += 1


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[FakeGraph]:
    """Return the list of the graphs that are made, which need no GPU."""
    monkeypatch.setattr(launch_graphs, "can_capture", lambda x: True)
    monkeypatch.setattr(launch_graphs, "LaunchGraph", FakeGraph)
    monkeypatch.setattr(launch_graphs, "_graphs", OrderedDict())
    FakeGraph.made = []
    return FakeGraph.made


def test_the_third_equal_call_is_a_replay(made: list[FakeGraph]) -> None:
    launch, x, graphs = Recorder(), torch.zeros(4, 4), LaunchGraphs()
    for _ in range(5):
        graphs((x, x), (7,), launch)
    assert launch.calls == 2 and [graph.launches for graph in made] == [3]


@pytest.mark.parametrize(
    "other",
    [lambda x: ((x.clone(), x), (7,)), lambda x: ((x, x[1:]), (7,)), lambda x: ((x, x), (8,))],
    ids=["first address", "second address", "number"],
)
def test_other_launches_are_no_replay(made: list[FakeGraph], other: Any) -> None:
    launch, x, graphs = Recorder(), torch.zeros(4, 4), LaunchGraphs()
    for _ in range(3):
        graphs((x, x), (7,), launch)
    tensors, numbers = other(x)
    graphs(tensors, numbers, launch)
    assert len(made) == 1 and launch.calls == 3


def test_addresses_that_do_not_recur_are_not_captured(made: list[FakeGraph]) -> None:
    launch, x, graphs = Recorder(), torch.zeros(4), LaunchGraphs()
    for _ in range(2):
        for number in range(REMEMBERED + 1):
            graphs((x,), (number,), launch)
    assert not made and launch.calls == 2 * (REMEMBERED + 1)


def test_captures_of_an_owner_end(made: list[FakeGraph]) -> None:
    launch, x, graphs = Recorder(), torch.zeros(4), LaunchGraphs()
    for number in range(MOST_CAPTURES + 3):
        for _ in range(3):
            graphs((x,), (number,), launch)
    assert [graph.launches for graph in made] == [1] * MOST_CAPTURES
    assert launch.calls == 2 * MOST_CAPTURES + 3 * 3


def test_the_process_keeps_the_graphs_used_last(made: list[FakeGraph]) -> None:
    each, x = [LaunchGraphs() for _ in range(KEPT + 1)], torch.zeros(4)
    for graphs in each:
        for _ in range(2):
            graphs((x,), (), Recorder())
        each[0]((x,), (), Recorder())
    assert len(launch_graphs._graphs) == KEPT
    assert made[0].launches == KEPT + 1
    each[1]((x,), (), Recorder())
    assert made[1].launches == 0, "the least recently used one was dropped"


def test_graphs_go_with_their_owner(made: list[FakeGraph]) -> None:
    graphs, other, x = LaunchGraphs(), LaunchGraphs(), torch.zeros(4)
    for _ in range(2):
        graphs((x,), (), Recorder())
        other((x,), (), Recorder())
    assert len(launch_graphs._graphs) == 2
    del graphs
    assert len(launch_graphs._graphs) == 1
    other((x,), (), Recorder())
    assert made[1].launches == 1


def test_a_call_is_done_where_the_driver_refuses(
    made: list[FakeGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def refuse(launch: Any) -> None:
        tried.append(launch)
        raise RuntimeError("cuGraphInstantiate: out of memory")

    monkeypatch.setattr(launch_graphs, "LaunchGraph", refuse)
    launch, x, graphs = Recorder(), torch.zeros(4), LaunchGraphs()
    with pytest.warns(UserWarning, match="not captured: cuGraphInstantiate: out of memory"):
        for _ in range(5):
            graphs((x,), (), launch)
    assert launch.calls == 5 and len(tried) == 1


class FakeDriver:
    """The driver's functions, which note their calls; those in `failing` return an error."""

    CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED="relaxed")
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)

    def __init__(self, failing: str = "") -> None:
        self.failing, self.calls = failing, list[str]()

    def __getattr__(self, name: str) -> Any:
        def function(*arguments: Any) -> tuple[Any, ...]:
            given = ", ".join(str(x) for x in arguments)
            self.calls.append(f"{name.removeprefix('cu')}({given})")
            results = {"cuGraphInstantiate": "executable", "cuStreamEndCapture": "graph"}
            results["cuThreadExchangeStreamCaptureMode"] = "global"
            status = int(name == self.failing)
            return (status, results[name]) if name in results else (status,)

        function.__name__ = name
        return function


EXCHANGE, RESTORE = (f"ThreadExchangeStreamCaptureMode({x})" for x in ("relaxed", "global"))
BEGIN, END = "StreamBeginCapture(99, relaxed)", "StreamEndCapture(99)"
DESTROY = "GraphDestroy(graph)"


@pytest.mark.parametrize(
    ("failing", "calls"),
    [
        ("", [EXCHANGE, BEGIN, "launch", END, "GraphInstantiate(graph, 0)", DESTROY, RESTORE]),
        ("launch", [EXCHANGE, BEGIN, "launch", END, RESTORE]),
        ("cuStreamBeginCapture", [EXCHANGE, BEGIN, RESTORE]),
        ("cuStreamEndCapture", [EXCHANGE, BEGIN, "launch", END, RESTORE]),
        (
            "cuGraphInstantiate",
            [EXCHANGE, BEGIN, "launch", END, "GraphInstantiate(graph, 0)", DESTROY, RESTORE],
        ),
    ],
)
def test_captures_end_whatever_fails(
    failing: str, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cuda.bindings")
    driver = FakeDriver(failing)
    monkeypatch.setattr("cuda.bindings.driver", driver)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(launch_graphs, "_streams", {0: SimpleNamespace(cuda_stream=99)})
    monkeypatch.setattr(torch_compat, "current_raw_stream", lambda device: 7)

    def launch() -> None:
        driver.calls.append("launch")
        if failing == "launch":
            raise RuntimeError("no kernel")

    if failing:
        with pytest.raises(RuntimeError, match="no kernel" if failing == "launch" else failing):
            launch_graphs.LaunchGraph(launch)
        assert driver.calls == calls
        return
    graph = launch_graphs.LaunchGraph(launch)
    graph.launch()
    del graph
    assert driver.calls == [*calls, "GraphLaunch(executable, 7)", "GraphExecDestroy(executable)"]


def test_a_cpu_has_no_graphs() -> None:
    launch, x, graphs = Recorder(), torch.zeros(4), LaunchGraphs()
    for _ in range(4):
        graphs((x,), (), launch)
    assert launch.calls == 4


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Recorder]:
    """Return what counts the calls that launch kernels, captures included, by their graphs."""
    noted: list[Recorder] = []

    class Noted(LaunchGraphs):
        def __init__(self) -> None:
            self.recorder = Recorder()
            noted.append(self.recorder)
            super().__init__()

        def __call__(
            self, tensors: Sequence[Tensor], numbers: tuple[Any, ...], launch: Callable[[], Any]
        ) -> None:
            def call() -> None:
                self.recorder()
                launch()

            super().__call__(tensors, numbers, call)

    monkeypatch.setattr(fused_step, "LaunchGraphs", Noted)
    return noted


@pytest.fixture(autouse=True)
def own_steps() -> Iterator[None]:
    """Let tests share no step, which would know their addresses, and no cached memory.

    Memory of other tests, freed between two steps, would change what the second one finds.
    """
    process_cache.reset()
    gc.collect()
    gc.disable()
    torch.cuda.empty_cache()
    yield
    gc.enable()
    process_cache.reset()


def leaves() -> tuple[Tensor, Tensor, Tensor]:
    case = random_case(*SIZES, dtype=torch.bfloat16, device="cuda")
    return case.h.requires_grad_(), case.w.requires_grad_(), case.y


def step(
    h: Tensor, w: Tensor, y: Tensor, workspace: int | str = "max", **more: Any
) -> list[Tensor]:
    """Return the loss, dX and dW."""
    h, w = h.detach().requires_grad_(), w.detach().requires_grad_()
    loss = torch.ops.cutefce.loss(h, w, y, workspace=workspace, **more)
    upstream = torch.linspace(1, 2, loss.numel(), device=loss.device).view(loss.shape)
    return [loss.detach(), *torch.autograd.grad(loss, (h, w), upstream)]


def on_cpu(results: list[Tensor]) -> list[Tensor]:
    """Return copies that take no memory of the GPU, so that the next step finds what it had."""
    return [x.cpu() for x in results]


def are_equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(map(torch.equal, one, other))


def fewer_targets(y: Tensor, seed: int) -> Tensor:
    generator = torch.Generator(y.device).manual_seed(seed)
    return y.masked_fill(torch.rand(y.shape, generator=generator, device=y.device) < 0.5, -100)


def count(launches: list[Recorder]) -> list[int]:
    return [recorder.calls for recorder in launches]


@pytest.mark.gpu
@pytest.mark.parametrize("workspace", [SOME, "max"])
def test_replays_follow_their_operands(workspace: int | str, launches: list[Recorder]) -> None:
    h, w, y = leaves()
    targets = [fewer_targets(y, seed) for seed in range(6)]
    want = [on_cpu(step(h, w, each, workspace)) for each in targets]
    for _ in range(4):
        on_cpu(step(h, w, y, workspace))
    before = count(launches)
    for each, wanted in zip(targets, want, strict=True):
        y.copy_(each)
        assert are_equal(on_cpu(step(h, w, y, workspace)), wanted)
    assert sum(before) and count(launches) == before, "no replay"


@pytest.mark.gpu
def test_reductions_share_no_replay(launches: list[Recorder]) -> None:
    """A gradient of the loss and one of each token may begin at the same address."""
    h, w, y = leaves()
    h, y = h[:100], y[:100]
    for reduction in ("sum", "none", "sum", "none"):
        want = on_cpu(step(h.clone(), w.clone(), y, reduction=reduction))
        for _ in range(4):
            assert are_equal(on_cpu(step(h, w, y, reduction=reduction)), want)
    assert sum(count(launches)) > 0


@pytest.mark.gpu
def test_replays_run_on_the_current_stream(launches: list[Recorder]) -> None:
    h, w, y = leaves()
    want, stream = on_cpu(step(h, w, y)), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(4):
            assert are_equal(on_cpu(step(h, w, y)), want)
        before = count(launches)
        torch.cuda._sleep(1 << 28)
        results = step(h, w, y)
        assert not stream.query(), "the last step did not wait for the stream"
        assert sum(before) and count(launches) == before, "no replay"
        assert are_equal(on_cpu(results), want)


@pytest.mark.gpu
def test_a_capture_of_the_caller_has_the_kernels(launches: list[Recorder]) -> None:
    h, w, y = leaves()
    other = fewer_targets(y, 1)
    want = on_cpu(step(h, w, other))
    for _ in range(4):
        on_cpu(step(h, w, y))
    assert launch_graphs._graphs
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step(h, w, y)
    y.copy_(other)
    graph.replay()
    assert are_equal(on_cpu(results), want)


@pytest.mark.gpu
def test_other_threads_run_and_allocate_during_captures() -> None:
    h, w, y = leaves()
    want, done, failures = on_cpu(step(h, w, y)), threading.Event(), []

    def work() -> None:
        try:
            # its own stream: otherwise steps would find other addresses each time
            with torch.cuda.stream(torch.cuda.Stream()):
                while not done.is_set():
                    torch.rand(1 << 16, device="cuda").add_(1)
        except RuntimeError as error:
            failures.append(error)

    other, captured = threading.Thread(target=work), 0
    other.start()
    try:
        for _ in range(20):
            process_cache.reset()
            for _ in range(4):
                assert are_equal(on_cpu(step(h, w, y)), want)
            captured += len(launch_graphs._graphs)
    finally:
        done.set()
        other.join()
    assert captured and not failures


@pytest.mark.gpu
def test_a_graph_launches_again_and_again() -> None:
    x = torch.zeros(4, device="cuda")
    graph = launch_graphs.LaunchGraph(lambda: x.add_(1))
    assert not x.any(), "a capture executes nothing"
    for _ in range(3):
        graph.launch()
    assert x.tolist() == [3] * 4
