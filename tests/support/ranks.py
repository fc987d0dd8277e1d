"""Processes that run functions together as ranks, on the CPU or on one GPU each."""

import functools
import itertools
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from cutefce.autotune_cache import defaults
from tests.support.layouts import SMALL_TILES
from tests.support.tiers import Values, rest_slow

TIMEOUT_S = 300
"""How long a group waits for a rank, and a test for a result."""
PRELOADED = "torch._dynamo", "torch._functorch.aot_autograd", "bench.harness.accuracy"
"""What takes long to import, and tests of ranks use."""


def each_value(**axes: Values) -> pytest.MarkDecorator:
    """Parametrize by the product of axes; what it takes to see each value is not slow.

    How values work together is seen on one device: here it is seen that each works on ranks.
    """
    named = [rest_slow(values, len(values)) for values in axes.values()]
    sizes, params = [len(values) for values in named], []
    default = {tuple(number % size for size in sizes) for number in range(max(sizes))}
    for places in itertools.product(*map(range, sizes)):
        chosen = [values[place] for values, place in zip(named, places, strict=True)]
        marks = [] if places in default else [pytest.mark.slow]
        name = "-".join(str(param.id) for param in chosen)
        params.append(pytest.param(*(param.values[0] for param in chosen), id=name, marks=marks))
    return pytest.mark.parametrize(list(axes), params)


def group(ranks: int) -> dist.ProcessGroup:
    """Return the group of the first `ranks` ranks, in one of them."""
    found = _groups[ranks]
    assert found is not None
    return found


@functools.cache
def mesh() -> DeviceMesh:
    """Return four ranks as two replicas, "dp", of two parts, "tp"."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


_groups: dict[int, dist.ProcessGroup | None] = {}


class Ranks:
    """The processes; each stays until the end."""

    def __init__(self, pipes: Sequence[Any]) -> None:
        self.pipes = pipes

    def run(self, count: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Return what `function` returns on the first `count` ranks; raise if it does on any."""
        outcomes = self.outcomes(count, function, *arguments)
        failures = [text for failed, text in outcomes if failed]
        assert not failures, failures[0]
        return [result for _, result in outcomes]

    def outcomes(
        self, count: int, function: Callable[..., Any], *arguments: Any
    ) -> list[tuple[bool, Any]]:
        """Return for every rank whether `function` raised, and its result or the traceback."""
        for pipe in self.pipes[:count]:
            pipe.send((function, arguments))
        for rank, pipe in enumerate(self.pipes[:count]):
            assert pipe.poll(TIMEOUT_S), f"rank {rank} does not answer"
        return [pipe.recv() for pipe in self.pipes[:count]]


@contextmanager
def started(count: int, timeout_s: float = TIMEOUT_S, backend: str = "gloo") -> Iterator[Ranks]:
    """Start `count` ranks, which wait for each other for `timeout_s`; with "nccl", on GPUs."""
    context, pipes, processes = _context(backend), [], []
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{Path(folder) / 'store'}"
        for rank in range(count):
            ours, theirs = context.Pipe()
            arguments = rank, count, backend, store, timeout_s, theirs, dict(os.environ)
            processes.append(context.Process(target=_serve, args=arguments, daemon=True))
            processes[-1].start()
            theirs.close()  # so that a rank's death ends its pipe
            pipes.append(ours)
        try:
            yield Ranks(pipes)
        finally:
            for process in processes:
                process.terminate()
                process.join()


def _context(backend: str) -> SpawnContext | ForkServerContext:
    """Return how ranks start: on the CPU as forks of a process that has imported all, once."""
    if backend != "gloo":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, *PRELOADED])
    return context


def _serve(
    rank: int,
    count: int,
    backend: str,
    store: str,
    timeout_s: float,
    pipe: "Connection[Any, Any]",
    environment: dict[str, str],
) -> None:
    os.environ |= environment
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if backend == "nccl":
        torch.cuda.set_device(rank)
    for name in {*defaults.PORTABLE_TILES} - {"triton"}:
        defaults.PORTABLE_TILES[name] = SMALL_TILES
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group(
        backend, init_method=store, rank=rank, world_size=count, timeout=timeout
    )
    for ranks in range(1, count + 1):
        made = dist.new_group(list(range(ranks)), timeout=timeout)
        _groups[ranks] = made if rank < ranks else None
    while True:
        function, arguments = pipe.recv()
        try:
            pipe.send((False, function(*arguments)))
        except Exception:
            pipe.send((True, traceback.format_exc()))
