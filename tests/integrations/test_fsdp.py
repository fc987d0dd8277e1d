"""defer: two ranks with FSDP2 or DDP have the gradients of one process, or a named error."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import cutefce
from cutefce.integrations.deferral.logits import DeferredLogits
from tests.support.ranks import Ranks, started

D, V = 16, 24


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with started(2) as ranks:
        yield ranks


class Model(nn.Module):
    """A model whose loss is in its forward, or in the loop."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inside = inside
        self.embedding = nn.Embedding(V, D)
        self.layers = nn.Sequential(nn.Linear(D, D), nn.Linear(D, D))
        self.norm = nn.LayerNorm(D)
        self.lm_head = nn.Linear(D, V, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Any:
        logits = self.lm_head(self.norm(self.layers(self.embedding(tokens)).tanh()))
        return loss_of(logits, targets) if self.inside else logits


def loss_of(logits: Any, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().view(-1, V), targets.view(-1))


def data() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(V, (4, 6), generator=torch.Generator().manual_seed(1))
    return tokens, tokens.roll(-1, 1)


def wrapped(model: Model, wrapping: str) -> nn.Module:
    """Return the model in one of the wrappings that trainers choose."""
    if wrapping.startswith("DDP"):
        return DistributedDataParallel(model, static_graph=wrapping == "DDP, static graph")
    mesh = init_device_mesh("cpu", (2,))
    if wrapping == "layers":
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
    if wrapping.startswith("norm and head"):
        reshard = wrapping == "norm and head, resharded"
        group: Any = [model.norm, model.lm_head]
        fully_shard(group, mesh=mesh, reshard_after_forward=reshard)
    if wrapping == "head":
        fully_shard(model.lm_head, mesh=mesh, reshard_after_forward=True)
    more: dict[str, Any] = {"reshard_after_forward": True} if wrapping == "root, resharded" else {}
    if wrapping == "mixed precision":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
        more = {"mp_policy": policy}
    fully_shard(model, mesh=mesh, **more)
    return model


def train(wrapping: str, inside: bool, rank_count: int = 2) -> dict[str, Any]:
    """Return the loss, the largest error of a gradient against one process, and the report."""
    rank = torch.distributed.get_rank()
    tokens, targets = data()
    plain, model = Model(inside), Model(inside)
    cutefce.defer(model.lm_head)
    whole = wrapped(model, wrapping)
    rows = slice(2 * rank, 2 * rank + 2)
    for _ in range(2):
        losses = []
        for each, x, y in ((plain, tokens, targets), (whole, tokens[rows], targets[rows])):
            each.zero_grad()
            result = each(x, y)
            loss = result if inside else loss_of(result, y)
            loss.backward()
            losses.append(loss.detach())
    torch.distributed.all_reduce(losses[1])
    errors, largest = [], []
    for expected, found in zip(plain.parameters(), model.parameters(), strict=True):
        assert expected.grad is not None and found.grad is not None
        grad: Any = found.grad
        grad = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
        errors.append((grad - expected.grad).abs().max().item())
        largest.append(expected.grad.abs().max().item())
    return {
        "loss": (losses[0].item(), losses[1].item() / rank_count),
        "error": max(error / size for error, size in zip(errors, largest, strict=True)),
        "report": cutefce.deferral_report(model),
    }


WRAPPINGS = (
    "root",
    "layers",
    "norm and head, whole",
    "norm and head, resharded",
    "head",
    "DDP",
    "DDP, static graph",
)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize("inside", [True, False], ids=["loss in the model", "loss in the loop"])
@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_gradients_are_those_of_one_process(two: Ranks, wrapping: str, inside: bool) -> None:
    for result in two.run(2, train, wrapping, inside):
        assert result["loss"][1] == pytest.approx(result["loss"][0], rel=1e-6)
        assert result["error"] <= 1e-5
        assert result["report"] == (2, {})


@pytest.mark.parametrize("inside", [True, False], ids=["loss in the model", "loss in the loop"])
def test_mixed_precision(two: Ranks, inside: bool) -> None:
    for result in two.run(2, train, "mixed precision", inside):
        assert result["loss"][1] == pytest.approx(result["loss"][0], rel=2e-2)
        assert result["error"] <= 0.1
        assert result["report"] == (2, {})


def test_a_root_that_is_sharded_before_the_loss(two: Ranks) -> None:
    for result in two.run(2, train, "root, resharded", True):
        assert result["error"] <= 1e-5 and result["report"] == (2, {})
    for failed, text in two.outcomes(2, train, "root, resharded", False):
        assert failed and "RuntimeError: logits: got a use of them where the head's weight" in text


def use_logits(wrapping: str) -> tuple[bool, float]:
    """Return whether logits were deferred, and their error against one process."""
    tokens, targets = data()
    expected = Model(inside=False)(tokens, targets)
    model = Model(inside=False)
    cutefce.defer(model.lm_head)
    logits = wrapped(model, wrapping)(tokens, targets)
    error = (logits.detach() - expected.detach()).abs().max().item()
    return isinstance(logits, DeferredLogits), error


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_logits_are_those_of_one_process(two: Ranks, wrapping: str) -> None:
    for deferred, error in two.run(2, use_logits, wrapping):
        assert deferred and error <= 1e-5
