"""CUDA graphs of launches that recur: a host function that launches many kernels replays as one.

A step of a training loop finds its operands where the step before had them, as torch's allocator
gives out the same memory for the same requests.  Its launches are the same then, to the last
argument: they are captured after the second call and replayed from the third on, in the CPU time of
one launch.  Kernels, their order and their results are the same.
"""

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cutefce.cute_kernels.process_cache import process_cache
from cutefce.ops import torch_compat

KEPT = 8
"""Graphs of a host function that are kept, and calls that are remembered."""
MOST_CAPTURES = 64
"""Captures of a host function: where addresses change more often, they do not pay."""

_capturing = threading.Lock()
"""Held while the stream of captures is in use."""


class LaunchGraphs:
    """A host function that launches kernels on torch's current stream, and its graphs.

    What it launches follows from its arguments: numbers, and tensors of which all calls have the
    same shapes, dtypes and, but for the first two, strides.
    """

    def __init__(self, launch: Callable[..., Any]) -> None:
        self._launch = launch
        self._graphs = OrderedDict[tuple[Any, ...], LaunchGraph]()
        self._seen = OrderedDict[tuple[Any, ...], None]()
        self._captures = 0

    def __call__(self, *arguments: Any) -> None:
        """Launch the kernels for `arguments`, in which tuples may group others.

        The first two are tensors, on whose device they run.
        """
        if not can_capture(arguments[0]):
            self._launch(*arguments)
            return
        key = _identity(arguments)
        graph = self._graphs.get(key)
        if graph is not None:
            graph.launch()
            self._graphs.move_to_end(key)
            return
        self._launch(*arguments)
        if key in self._seen and self._captures < MOST_CAPTURES:
            self._captures += 1
            self._graphs[key] = LaunchGraph(self._launch, arguments)
            _trim(self._graphs)
        else:
            self._seen[key] = None
            _trim(self._seen)


class LaunchGraph:
    """The launches of a host function for given arguments, on the current device."""

    def __init__(self, launch: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        from cuda.bindings import driver  # type: ignore[import-untyped]

        self._device = torch.cuda.current_device()
        stream, mode = _capture_stream(self._device), driver.CUstreamCaptureMode
        raw = stream.cuda_stream
        with _capturing, torch.cuda.stream(stream):
            # relaxed: a garbage collection may free memory, or another graph, meanwhile
            _call(driver.cuStreamBeginCapture, raw, mode.CU_STREAM_CAPTURE_MODE_RELAXED)
            try:
                launch(*arguments)
            finally:
                graph = _call(driver.cuStreamEndCapture, raw)
        try:
            self._graph = _call(driver.cuGraphInstantiate, graph, 0)
        finally:
            _call(driver.cuGraphDestroy, graph)
        weakref.finalize(self, driver.cuGraphExecDestroy, self._graph).atexit = False
        self._launch = driver.cuGraphLaunch

    def launch(self) -> None:
        """Launch them on torch's current stream."""
        _call(self._launch, self._graph, torch_compat.current_raw_stream(self._device))


def can_capture(x: Tensor) -> bool:
    """Whether launches for x may be captured: on a GPU, unless a capture is under way."""
    return x.is_cuda and not torch.cuda.is_current_stream_capturing()


def _identity(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return what distinguishes the launches for `arguments`: addresses, strides and numbers."""
    flat = [*arguments[0].stride(), *arguments[1].stride()]
    for x in arguments:
        if type(x) is tuple:
            flat += x
        else:
            flat.append(x)
    return tuple([x.data_ptr() if isinstance(x, Tensor) else x for x in flat])


def _trim(entries: OrderedDict[tuple[Any, ...], Any]) -> None:
    """Drop the oldest entry beyond `KEPT`."""
    if len(entries) > KEPT:
        entries.popitem(last=False)


@process_cache
def _capture_stream(device: int) -> torch.cuda.Stream:
    """Return a stream that nothing else runs on: a capture would take up what others launch."""
    from cuda.bindings import driver

    flags = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
    return torch.cuda.ExternalStream(int(_call(driver.cuStreamCreate, flags)), device)


def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of a function of the driver, if it has one.

    Raises:
        RuntimeError: it returned an error.
    """
    status, *results = function(*arguments)
    if status:
        raise RuntimeError(f"{function.__name__}: {status}")
    return results[0] if results else None
