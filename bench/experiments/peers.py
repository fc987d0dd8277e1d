"""Other fused linear cross entropies, as their documentation says to call them.

Each runs with its defaults.  Gradients that are summed in the inputs' dtype have errors to show
for it; where an option sums them in float32, the peer stands here a second time with it.  A peer
that is not installed, fails, or is wrong is a row of the results that says so.
"""

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from bench.harness.problems import Loss, Shape, gradients, random_head, two_stage
from cutefce.autotune_cache.tuning.subprocess_worker import Child, ChildError

SECONDS = 120
"""Time limit of a peer's first step at a shape, with all that it compiles and tunes."""


@dataclass(frozen=True)
class Peer:
    """Where a peer is imported from, and how its loss of h, w and y is called."""

    module: str
    name: str
    adapt: Callable[[Any], Loss]

    def load(self) -> Loss:
        """Return its loss.

        Raises:
            ImportError: if this machine does not have it.
        """
        module = importlib.import_module(self.module)
        if not hasattr(module, self.name):
            raise ImportError(f"{self.module} has no {self.name}")
        return self.adapt(getattr(module, self.name))


def _plain(function: Loss) -> Loss:
    return function


def _narrow(cross_entropy: Any) -> Loss:
    return lambda h, w, y: cross_entropy(F.linear(h, w), y)


def _compiled(compiler: Any) -> Loss:
    torch.compiler.reset()  # after some shapes it would run uncompiled
    loss: Loss = compiler(two_stage, dynamic=False)
    return loss


def _chunked(options: Any) -> Loss:
    loss: Loss = functools.partial(F.linear_cross_entropy, options=options())
    return loss


def _chunks_of_2048(function: Any) -> Loss:
    # its default, 4096, fails where the hidden size is the same
    loss: Loss = functools.partial(function, chunk_size=2048)
    return loss


def _unfiltered(function: Any) -> Loss:
    loss: Loss = functools.partial(function, filter_eps=None)
    return loss


def _first_output(function: Any) -> Loss:
    return lambda h, w, y: function.apply(h, w, y)[0]


def _first_output_float32(function: Any) -> Loss:
    defaults = None, None, -100, 0.0, 0.0, "mean", None, False  # of what comes before accum_dtype
    return lambda h, w, y: function.apply(h, w, y, *defaults, torch.float32)[0]


LIGER = "liger_kernel.ops.fused_linear_cross_entropy", "LigerFusedLinearCrossEntropyFunction"
LIGER_HOPPER = (
    "liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90",
    "liger_fused_linear_cross_entropy_sm90",
)
PEERS = {
    "torch without float()": Peer("torch.nn.functional", "cross_entropy", _narrow),
    "torch.compile": Peer("torch", "compile", _compiled),
    "torch linear_cross_entropy": Peer("torch.nn.functional", "linear_cross_entropy", _plain),
    "torch linear_cross_entropy, chunks": Peer("torch.nn", "LinearCrossEntropyOptions", _chunked),
    "quack": Peer("quack.linear_cross_entropy", "chunked_linear_cross_entropy", _plain),
    "quack, chunks of 2048": Peer(
        "quack.linear_cross_entropy", "chunked_linear_cross_entropy", _chunks_of_2048
    ),
    "Liger": Peer(*LIGER, _first_output),
    "Liger, float32 sums": Peer(*LIGER, _first_output_float32),
    "Liger CuTe DSL": Peer(*LIGER_HOPPER, _plain),
    "CCE": Peer("cut_cross_entropy", "linear_cross_entropy", _plain),
    "CCE, nothing filtered": Peer("cut_cross_entropy", "linear_cross_entropy", _unfiltered),
}
"""quack sums gradients in float32 in either of its pipelines and takes the one that it has for the
sizes; CCE leaves out gradients below a threshold by default."""


def usable(child: Child, shape: Shape, device: str) -> dict[str, Loss | str]:
    """Return every peer's loss, or why it is not used at `shape`.

    A peer may crash, or leave the GPU unusable for its process: each runs in the child first.
    """
    losses: dict[str, Loss | str] = {}
    for name, peer in PEERS.items():
        try:
            found = child.ask(functools.partial(attempt, peer, shape, device), SECONDS)
            losses[name] = peer.load() if found is None else found
        except ChildError as error:
            losses[name] = "out of memory" if error.is_out_of_memory else str(error)
    return losses


def attempt(peer: Peer, shape: Shape, device: str) -> str | None:
    """Run a step of `peer` on random data; return why it is not there, None if it is."""
    try:
        loss = peer.load()
    except ImportError as error:
        return f"not there: {error}"
    gradients(loss, *random_head(shape, device))
    if device != "cpu":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # what this process keeps, another one lacks
    return None
