"""CUDA graphs of launches that recur, which these tests go with.

That steps that replay have the results of other steps is in `test_captured_steps.py`.  Here is that
they replay, and what a machine without a GPU can know: which calls share a graph, and that each
call is done.
"""

import gc
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import cutefce
from cutefce.ops import launch_graphs, torch_compat
from cutefce.ops.launch_graphs import KEPT, MOST_CAPTURES, LaunchGraphs
from cutefce.ops.primitives.fused import step as fused_step
from tests.support.reference import random_case
from tests.support.stand_in_gpu import forget


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


@pytest.mark.parametrize(
    "other",
    [lambda x: ((x.clone(), x), (7,)), lambda x: ((x, x[1:]), (7,)), lambda x: ((x, x), (8,))],
    ids=["first address", "second address", "number"],
)
def test_equal_calls_replay_from_the_third_on_and_no_others(
    made: list[FakeGraph], other: Any
) -> None:
    launch, x, graphs = Recorder(), torch.zeros(4, 4), LaunchGraphs()
    for _ in range(5):
        graphs((x, x), (7,), launch)
    assert launch.calls == 2 and [graph.launches for graph in made] == [3]
    tensors, numbers = other(x)
    graphs(tensors, numbers, launch)
    assert launch.calls == 3 and [graph.launches for graph in made] == [3]
    LaunchGraphs()((x, x), (7,), launch)
    assert launch.calls == 4, "another owner has graphs of its own"


def test_graphs_are_few(made: list[FakeGraph]) -> None:
    """Captures of an owner end, and the process keeps few graphs, none of an owner that is gone."""
    launch, x, graphs = Recorder(), torch.zeros(4), LaunchGraphs()
    for number in range(MOST_CAPTURES + 3):
        for _ in range(3):
            graphs((x,), (number,), launch)
    assert [graph.launches for graph in made] == [1] * MOST_CAPTURES
    assert launch.calls == 2 * MOST_CAPTURES + 3 * 3
    assert len(launch_graphs._graphs) == KEPT
    del graphs
    assert not launch_graphs._graphs


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


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Recorder]]:
    """Return what counts the calls that launch kernels, captures included, by their graphs.

    Nothing but the steps themselves changes where they find their operands.
    """
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
    forget()
    gc.collect()
    gc.disable()
    torch.cuda.empty_cache()
    yield noted
    gc.enable()
    forget()


@pytest.mark.gpu
@pytest.mark.parametrize("workspace", [8 << 20, "max"])
def test_steps_of_a_loop_replay(workspace: int | str, launches: list[Recorder]) -> None:
    """So that tests of loops see replays."""
    case = random_case(512, 256, 30000, dtype=torch.bfloat16, device="cuda")
    h, w = case.h.requires_grad_(), case.w.requires_grad_()

    def step() -> None:
        loss = cutefce.linear_cross_entropy(h, w, case.y, workspace=workspace)
        torch.autograd.grad(loss, (h, w), torch.ones_like(loss))

    for _ in range(20):  # until memory is found where it was the steps before
        step()
    before = [recorder.calls for recorder in launches]
    for _ in range(6):
        step()
    assert sum(before) and [recorder.calls for recorder in launches] == before


@pytest.mark.gpu
def test_a_graph_launches_again_and_again() -> None:
    x = torch.zeros(4, device="cuda")
    graph = launch_graphs.LaunchGraph(lambda: x.add_(1))
    assert not x.any(), "a capture executes nothing"
    for _ in range(3):
        graph.launch()
    assert x.tolist() == [3] * 4
