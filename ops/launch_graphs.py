"""CUDA graphs of launches that recur: a function that launches many kernels replays as one.

A step of a training loop finds its operands where the step before had them, as torch's allocator
gives out the same memory for the same requests.  Its launches are the same then, to the last
argument: they are captured after the second call and replayed from the third on, in the CPU time of
one launch.  Kernels, their order and their results are the same.
"""

import itertools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from cutefce.cute_kernels.process_cache import warn_once
from cutefce.ops import torch_compat

KEPT = 32
"""Graphs of the process that are kept: the driver has memory for each."""
REMEMBERED = 8
"""Calls of an owner of graphs that are remembered, until they recur."""
MOST_CAPTURES = 64
"""Captures of an owner of graphs: where addresses change more often, they do not pay."""

Key = tuple[Any, ...]

_graphs = OrderedDict[Key, "LaunchGraph"]()
"""The graphs of all owners, the least recently used one first."""
_lock = threading.Lock()
"""Held while entries change."""
_capturing = threading.Lock()
"""Held while a stream of captures is in use."""
_streams: dict[int, torch.cuda.Stream] = {}
"""The streams of captures, by device.  They are never destroyed."""
_numbers = itertools.count()
_address = Tensor.data_ptr


class LaunchGraphs:
    """The graphs of launches on torch's current stream that differ in addresses and numbers."""

    def __init__(self) -> None:
        self._seen = OrderedDict[Key, None]()
        self._captures = 0
        self._number = next(_numbers)
        weakref.finalize(self, _forget, self._number).atexit = False

    def __call__(self, tensors: Sequence[Tensor], numbers: Key, launch: Callable[[], Any]) -> None:
        """Do what `launch` does, which launches kernels on the device of the `tensors`.

        What it launches follows from the addresses of the tensors, and from the `numbers`, which
        tuples may group.
        """
        if not can_capture(tensors[0]):
            launch()
            return
        key = self._number, *numbers, *map(_address, tensors)
        graph = _found(key)
        if graph is not None:
            graph.launch()
            return
        launch()
        if self._recurs(key):
            self._captures += 1
            try:
                graph = LaunchGraph(launch)
            except (RuntimeError, ImportError) as error:
                # this call is done, and others need no graph
                warn_once(f"launches are not captured: {error}")
                self._captures = MOST_CAPTURES
                return
            with _lock:
                _graphs[key] = graph
                if len(_graphs) > KEPT:
                    _graphs.popitem(last=False)

    def _recurs(self, key: Key) -> bool:
        """Whether to capture what a call with this key launches; remember it if it is new."""
        if self._captures >= MOST_CAPTURES:
            return False
        with _lock:
            if key in self._seen:
                return True
            self._seen[key] = None
            if len(self._seen) > REMEMBERED:
                self._seen.popitem(last=False)
        return False


class LaunchGraph:
    """The launches of a function, on the current device.

    They have the default priority.
    """

    def __init__(self, launch: Callable[[], Any]) -> None:
        """Capture them.

        Raises:
            RuntimeError: the driver refused.
            ImportError: without the driver's bindings.
        """
        from cuda.bindings import driver  # type: ignore[import-untyped]

        self._launch, self._device = driver.cuGraphLaunch, torch.cuda.current_device()
        # relaxed: a garbage collection may free memory, or another graph, meanwhile, and another
        # thread may capture
        relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        before = _call(driver.cuThreadExchangeStreamCaptureMode, relaxed)
        try:
            with _capturing:
                graph = _captured(launch, _capture_stream(self._device), relaxed)
            try:
                self._graph = _call(driver.cuGraphInstantiate, graph, 0)
            finally:
                _call(driver.cuGraphDestroy, graph)
        finally:
            _call(driver.cuThreadExchangeStreamCaptureMode, before)
        weakref.finalize(self, driver.cuGraphExecDestroy, self._graph).atexit = False

    def launch(self) -> None:
        """Launch them on torch's current stream."""
        (status,) = self._launch(self._graph, torch_compat.current_raw_stream(self._device))
        if status:
            raise RuntimeError(f"cuGraphLaunch: {status}")


def can_capture(x: Tensor) -> bool:
    """Whether launches for x may be captured: on a GPU, unless a capture is under way."""
    return x.is_cuda and not torch.cuda.is_current_stream_capturing()


def _found(key: Key) -> LaunchGraph | None:
    """Return a graph, which is the most recently used one then; None if there is none."""
    with _lock:
        graph = _graphs.get(key)
        if graph is not None:
            _graphs.move_to_end(key)
    return graph


def _forget(number: int) -> None:
    """Drop the graphs of the owner with a number.

    A garbage collection calls it, also where the lock is held.
    """
    for key in [key for key in tuple(_graphs) if key[0] == number]:
        _graphs.pop(key, None)


def _captured(launch: Callable[[], Any], stream: torch.cuda.Stream, mode: Any) -> Any:
    """Return the graph of what `launch` launches on `stream`, which executes nothing."""
    from cuda.bindings import driver

    raw = stream.cuda_stream
    with torch.cuda.stream(stream):
        _call(driver.cuStreamBeginCapture, raw, mode)
        try:
            launch()
        except BaseException:
            driver.cuStreamEndCapture(raw)
            raise
        return _call(driver.cuStreamEndCapture, raw)


def _capture_stream(device: int) -> torch.cuda.Stream:
    """Return a stream that nothing else runs on: a capture would take up what others launch."""
    from cuda.bindings import driver

    stream = _streams.get(device)
    if stream is None:
        flags = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        address = int(_call(driver.cuStreamCreate, flags))
        stream = _streams[device] = torch.cuda.ExternalStream(address, device)
    return stream


def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of a function of the driver, if it has one.

    Raises:
        RuntimeError: it returned an error.
    """
    status, *results = function(*arguments)
    if status:
        raise RuntimeError(f"{function.__name__}: {status}")
    return results[0] if results else None
