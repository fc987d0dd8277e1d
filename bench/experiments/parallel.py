"""A training step of the head that ranks share, against the same step on one of them.

one           forward and backward with the whole weight, on every rank by itself
tp            vocabulary parallel: every rank has a part of the weight
sp            the same, and every rank has a part of the hidden states
X, in step    the same with one number exchanged in the place of each tensor, and what the
              collectives returned before used again: ranks wait for each other, and move nothing
X, silent     the same without the waiting

Run by torchrun, on GPUs with NCCL or on a CPU with gloo.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

import cutefce
from bench.harness.problems import Shape, random_head
from bench.harness.timing import Timing, interleaved, peak_bytes
from cutefce.ops.parallel import shard

FORMS = ("tp", "sp")


@dataclass(frozen=True)
class Row:
    """One form's result; times are medians of interleaved runs, each that of its slowest rank."""

    form: str
    ranks: int
    median_ms: float
    quartiles_ms: tuple[float, float]
    ratio_to_one: float
    communication_share: float
    """Share of the time that exchanging tensors takes, more than "in step"; 0 for "one"."""
    waiting_share: float
    """Share of the time that "in step" takes more than "silent"; 0 for "one"."""
    peak_mib: float
    """Peak memory in MiB beyond the inputs and the gradients."""
    loss_difference: float
    """Difference from "one" as a share of it, in the Euclidean norm; so are the next two."""
    dx_difference: float
    dw_difference: float


@contextmanager
def joined(device: str) -> Iterator[tuple[int, int]]:
    """Join the ranks that torchrun started; give this one's number and how many there are."""
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    try:
        yield dist.get_rank(), dist.get_world_size()
    finally:
        dist.destroy_process_group()


def run(shape: Shape, device: str, repeats: int, workspace: int | str | None) -> list[Row]:
    """Measure every form on fresh random data, the same on every rank."""
    steps = _steps(shape, device, workspace)
    results = {name: step() for name, step in steps.items() if "," not in name}
    differences = {
        name: _differences(name, result, results["one"]) for name, result in results.items()
    }
    gradient_bytes = {name: sum(x.nbytes for x in result[1:]) for name, result in results.items()}
    results.clear()
    times = interleaved(dict(steps), device, repeats, before=lambda: _wait(device))
    peaks = {n: peak_bytes(steps[n], device) - gradient_bytes[n] for n in gradient_bytes}
    mine = times, peaks, differences
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)

    def slowest(name: str) -> Timing:
        samples = (times[name].samples_ms for times, _, _ in everyone)
        return Timing(tuple(map(max, zip(*samples, strict=True))))

    one = slowest("one").median_ms
    rows = []
    for name in gradient_bytes:
        time = slowest(name)
        in_step, silent = (
            slowest(f"{name}, {less}").median_ms if name in FORMS else time.median_ms
            for less in ("in step", "silent")
        )
        loss, dx, dw = (max(found[name][i] for _, _, found in everyone) for i in range(3))
        rows.append(
            Row(
                form=name,
                ranks=len(everyone) if name in FORMS else 1,
                median_ms=time.median_ms,
                quartiles_ms=time.quartiles_ms,
                ratio_to_one=time.median_ms / one,
                communication_share=1 - in_step / time.median_ms,
                waiting_share=(in_step - silent) / time.median_ms,
                peak_mib=max(peaks[name] for _, peaks, _ in everyone) / 2**20,
                loss_difference=loss,
                dx_difference=dx,
                dw_difference=dw,
            )
        )
    return rows


class Silent(shard.VocabShard):
    """A shard that hears at every step what was said at the first."""

    said: ClassVar[list[Tensor]]
    heard: ClassVar[int]
    in_step: ClassVar[bool]
    """Whether ranks wait for each other nevertheless."""

    def all_gather(self, x: Tensor) -> Tensor:
        """Return every rank's x (...) as (R, ...)."""
        return self._hear(super().all_gather, x)

    def all_reduce_(self, x: Tensor) -> Tensor:
        """Return the sum over the ranks."""
        return self._hear(super().all_reduce_, x)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Return this rank's rows of the sum."""
        return self._hear(super().reduce_scatter, x)

    def _hear(self, collective: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        cls = type(self)
        if cls.heard == len(cls.said):
            cls.said.append(collective(x).clone())
        elif cls.in_step:
            super().all_reduce_(x.new_zeros(1))
        cls.heard += 1
        return cls.said[cls.heard - 1]


def _steps(
    shape: Shape, device: str, workspace: int | str | None
) -> dict[str, Callable[[], tuple[Tensor, ...]]]:
    """Return the forms; each returns loss, dX and dW of what its rank has."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if shape.vocab % ranks or shape.tokens % ranks:
        raise ValueError(f"got {shape}, expected tokens and vocab in multiples of {ranks}")
    torch.manual_seed(0)
    h, w, y = random_head(shape, device)
    own_h, own_w = (x.chunk(ranks)[rank].clone() for x in (h, w))
    for x in (h, w, own_h, own_w):
        x.requires_grad_()

    def form(h: Tensor, w: Tensor, **sharing: Any) -> Callable[[], tuple[Tensor, ...]]:
        def step() -> tuple[Tensor, ...]:
            loss = cutefce.linear_cross_entropy(h, w, y, workspace=workspace, **sharing)
            return loss.detach(), *torch.autograd.grad(loss, (h, w))

        return step

    def silent(
        step: Callable[[], tuple[Tensor, ...]], in_step: bool
    ) -> Callable[[], tuple[Tensor, ...]]:
        shard: Any = type("Silent", (Silent,), {"said": [], "in_step": in_step})

        def quietly() -> tuple[Tensor, ...]:
            shard.heard = 0
            with mock.patch.object(shard, "Shard", shard):
                return step()

        return quietly

    group = dist.group.WORLD
    steps = {
        "one": form(h, w),
        "tp": form(h, own_w, group=group),
        "sp": form(own_h, own_w, group=group, sequence_parallel=True),
    }
    less = {"in step": True, "silent": False}
    return steps | {
        f"{name}, {how}": silent(steps[name], in_step)
        for name in FORMS
        for how, in_step in less.items()
    }


def _differences(
    name: str, result: tuple[Tensor, ...], one: tuple[Tensor, ...]
) -> tuple[float, ...]:
    """Return how far loss, dX and dW are from the parts of "one" that they should equal."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    loss, dx, dw = one
    if name in FORMS:
        dw = dw.chunk(ranks)[rank]
    if name == "sp":
        dx = dx.chunk(ranks)[rank]
    pairs = zip(result, (loss, dx, dw), strict=True)
    return tuple(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in pairs)


def _wait(device: str) -> None:
    """Let the ranks begin together: a GPU goes on when all have come here."""
    dist.all_reduce(torch.zeros(1, device=device))
