"""CUDA graphs of launches that recur: when they are captured, and that they compute the same."""

import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from cutefce.cute_kernels import process_cache
from cutefce.ops import launch_graphs
from cutefce.ops.launch_graphs import KEPT, MOST_CAPTURES, LaunchGraphs
from cutefce.ops.primitives import fused_step
from tests.support.reference import random_case

SIZES = 512, 256, 30000


class Recorder:
    """A host function that notes its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, *arguments: Any) -> None:
        self.calls.append(arguments)


class FakeGraph:
    """A graph that notes its launches."""

    made: list["FakeGraph"]

    def __init__(self, launch: Any, arguments: tuple[Any, ...]) -> None:
        self.arguments, self.launches = arguments, 0
        self.made.append(self)

    def launch(self) -> None:
        self.launches += 1


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[FakeGraph]:
    """Return the list of the graphs that are made, which need no GPU."""
    monkeypatch.setattr(launch_graphs, "can_capture", lambda x: True)
    monkeypatch.setattr(launch_graphs, "LaunchGraph", FakeGraph)
    FakeGraph.made = []
    return FakeGraph.made


def test_the_third_equal_call_is_a_replay(made: list[FakeGraph]) -> None:
    launch, x = Recorder(), torch.zeros(4, 4)
    function = LaunchGraphs(launch)
    for _ in range(5):
        function(x, x, (x, None), 7)
    assert len(launch.calls) == 2 and [graph.launches for graph in made] == [3]


@pytest.mark.parametrize(
    "other",
    [
        lambda x: (x.clone(), x, (x, None), 7),
        lambda x: (x, x.t(), (x, None), 7),
        lambda x: (x, x, (x.clone(), None), 7),
        lambda x: (x, x, (x, x), 7),
        lambda x: (x, x, (x, None), 8),
    ],
    ids=["address", "strides", "address in a tuple", "none", "number"],
)
def test_other_arguments_are_launched(made: list[FakeGraph], other: Any) -> None:
    launch, x = Recorder(), torch.zeros(4, 4)
    function, changed = LaunchGraphs(launch), other(x)
    for _ in range(3):
        function(x, x, (x, None), 7)
    function(*changed)
    assert len(made) == 1 and len(launch.calls) == 3
    assert all(one is other for one, other in zip(launch.calls[-1], changed, strict=True))


def test_addresses_that_do_not_recur_are_not_captured(made: list[FakeGraph]) -> None:
    launch, x = Recorder(), torch.zeros(4)
    function = LaunchGraphs(launch)
    for _ in range(2):
        for number in range(KEPT + 1):
            function(x, x, number)
    assert not made and len(launch.calls) == 2 * (KEPT + 1)


def test_few_graphs_are_kept_and_captures_end(made: list[FakeGraph]) -> None:
    launch, x = Recorder(), torch.zeros(4)
    function = LaunchGraphs(launch)
    for number in range(MOST_CAPTURES + 3):
        for _ in range(3):
            function(x, x, number)
    assert len(made) == MOST_CAPTURES and len(function._graphs) == KEPT
    assert [graph.launches for graph in made] == [1] * MOST_CAPTURES
    function(x, x, 0)  # dropped
    assert launch.calls[-1] == (x, x, 0)


def test_a_recently_replayed_graph_is_kept(made: list[FakeGraph]) -> None:
    function, x = LaunchGraphs(Recorder()), torch.zeros(4)
    for number in range(KEPT + 1):
        for _ in range(2):
            function(x, x, number)
        if number:
            function(x, x, 0)
    assert made[0].launches == KEPT


def test_a_cpu_has_no_graphs() -> None:
    launch, x = Recorder(), torch.zeros(4)
    function = LaunchGraphs(launch)
    for _ in range(4):
        function(x, x)
    assert len(launch.calls) == 4


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Recorder]:
    """Return what notes the calls that launch kernels, captures included, by host function."""
    noted: list[Recorder] = []

    class Noted(LaunchGraphs):
        def __init__(self, launch: Any) -> None:
            recorder = Recorder()
            noted.append(recorder)

            def call(*arguments: Any) -> None:
                recorder(*(x.data_ptr() for x in arguments[:2]))
                launch(*arguments)

            super().__init__(call)

    monkeypatch.setattr(fused_step, "LaunchGraphs", Noted)
    return noted


@pytest.fixture(autouse=True)
def own_steps() -> Iterator[None]:
    """Let tests share no step, which would know their addresses."""
    process_cache.reset()
    yield
    process_cache.reset()


def leaves() -> tuple[Tensor, Tensor, Tensor]:
    case = random_case(*SIZES, dtype=torch.bfloat16, device="cuda")
    return case.h.requires_grad_(), case.w.requires_grad_(), case.y


def step(h: Tensor, w: Tensor, y: Tensor, workspace: str = "max") -> list[Tensor]:
    """Return the loss, dX and dW."""
    h, w = h.detach().requires_grad_(), w.detach().requires_grad_()
    loss = torch.ops.cutefce.loss(h, w, y, workspace=workspace)
    return [loss.detach(), *torch.autograd.grad(loss, (h, w))]


def on_cpu(results: list[Tensor]) -> list[Tensor]:
    """Return copies that take no memory of the GPU, so that the next step finds what it had."""
    return [x.cpu() for x in results]


def are_equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(map(torch.equal, one, other))


def fewer_targets(y: Tensor, seed: int) -> Tensor:
    generator = torch.Generator(y.device).manual_seed(seed)
    return y.masked_fill(torch.rand(y.shape, generator=generator, device=y.device) < 0.5, -100)


def count(launches: list[Recorder]) -> list[int]:
    return [len(recorder.calls) for recorder in launches]


@pytest.mark.gpu
@pytest.mark.parametrize("workspace", ["min", "max"])
def test_replays_follow_their_operands(workspace: str, launches: list[Recorder]) -> None:
    h, w, y = leaves()
    targets = [fewer_targets(y, seed) for seed in range(6)]
    want = [on_cpu(step(h, w, each, workspace)) for each in targets]
    for _ in range(4):
        on_cpu(step(h, w, y, workspace))
    before = count(launches)
    for each, wanted in zip(targets, want, strict=True):
        y.copy_(each)
        assert are_equal(on_cpu(step(h, w, y, workspace)), wanted)
    assert count(launches) == before, "no replay"


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
        assert count(launches) == before, "no replay"
        assert are_equal(on_cpu(results), want)


@pytest.mark.gpu
def test_a_capture_of_the_caller_has_the_kernels(launches: list[Recorder]) -> None:
    h, w, y = leaves()
    other = fewer_targets(y, 1)
    want = on_cpu(step(h, w, other))
    for _ in range(4):
        on_cpu(step(h, w, y))
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
            while not done.is_set():
                torch.rand(1 << 16, device="cuda").add_(1)
        except RuntimeError as error:
            failures.append(error)

    other = threading.Thread(target=work)
    other.start()
    for _ in range(20):
        process_cache.reset()
        for _ in range(4):
            assert are_equal(on_cpu(step(h, w, y)), want)
    done.set()
    other.join()
    assert not failures


@pytest.mark.gpu
def test_a_graph_goes_with_its_object() -> None:
    x = torch.zeros(4, device="cuda")
    graph = launch_graphs.LaunchGraph(x.add_, (1,))
    for _ in range(3):
        graph.launch()
    assert x.tolist() == [3] * 4
    gone = weakref.finalize(graph, lambda: None)
    del graph
    assert not gone.alive
