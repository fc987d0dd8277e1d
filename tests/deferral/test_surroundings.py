"""defer: what surrounds a model in training has the loss and gradients that it has without.

Each cell of the table "What surrounds a model" in docs/defer.md is a test, here or in
`tests/integrations`.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import (
    ModuleWrapPolicy,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
)
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import cutefce
from cutefce.integrations.deferral.logits import DeferredLogits
from tests.deferral.surroundings import (
    LR,
    Model,
    Run,
    V,
    assert_cell,
    cells,
    data,
    loss_of,
    steps,
    train_here,
    whole_parameters,
)
from tests.support.ranks import Ranks, started
from tests.support.tiers import rest_slow


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with started(2) as ranks:
        yield ranks


# what is wrapped around a model, on each of two ranks
def ddp(model: nn.Module, **options: Any) -> nn.Module:
    return DistributedDataParallel(model, **options)


def fsdp2(model: Model, unit: str = "", **options: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (2,))
    if unit == "layers":
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
    if unit.startswith("norm and head"):
        group: Any = [model.norm, model.lm_head]
        fully_shard(group, mesh=mesh, reshard_after_forward=unit == "norm and head, resharded")
    if unit == "head":
        fully_shard(model.lm_head, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, **options)
    return model


def fsdp1(model: nn.Module, policy: Any, strategy: str, use_orig_params: bool) -> nn.Module:
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=policy,
        sharding_strategy=ShardingStrategy[strategy],
        use_orig_params=use_orig_params,
        device_id=torch.device("cpu"),
    )


def is_head(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and module.weight.shape[0] == V


def is_leaf(module: nn.Module) -> bool:
    """Choose units as the policy of peft does: whatever has a weight and no children."""
    return hasattr(module, "weight") and not [*module.children()]


def tensor_parallel(model: nn.Module) -> nn.Module:
    plan: Any = {"lm_head": ColwiseParallel(output_layouts=Replicate())}
    return parallelize_module(model, init_device_mesh("cpu", (2,)), plan)


ROOT_POLICIES = {"one unit": None, "layers": ModuleWrapPolicy({nn.Sequential})}
HEAD_POLICIES = {
    "by a function": functools.partial(lambda_auto_wrap_policy, lambda_fn=is_head),
    "leaves": functools.partial(lambda_auto_wrap_policy, lambda_fn=is_leaf),
    "by size": functools.partial(size_based_auto_wrap_policy, min_num_params=300),
}
Wrap = Callable[[Any], nn.Module]


def of_fsdp1(policies: dict[str, Any]) -> dict[str, Wrap]:
    return {
        f"{name}, {strategy}, {'own' if own else 'flat'} parameters": functools.partial(
            fsdp1, policy=policy, strategy=strategy, use_orig_params=own
        )
        for name, policy in policies.items()
        for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
        for own in (True, False)
    }


WRAPPINGS: dict[str, dict[str, Wrap]] = {
    "DDP": {
        "plain": ddp,
        "static graph": functools.partial(ddp, static_graph=True),
        "unused parameters": functools.partial(ddp, find_unused_parameters=True),
        "buckets": functools.partial(ddp, gradient_as_bucket_view=True),
    },
    "FSDP2": {
        unit or "root": functools.partial(fsdp2, unit=unit)
        for unit in ("", "layers", "norm and head, whole", "norm and head, resharded", "head")
    },
    "FSDP2, the root resharded after its forward": {
        "root": functools.partial(fsdp2, reshard_after_forward=True)
    },
    "FSDP1, the head in the root's unit": of_fsdp1(ROOT_POLICIES),
    "FSDP1, the head in another unit": of_fsdp1(HEAD_POLICIES),
    "a tensor parallel plan for the head": {"columns": tensor_parallel},
}


def train_on_rank(row: str, name: str, inside: bool, deferred: bool) -> Run:
    """Return the run of this rank's half of the data, in one of the wrappings."""
    rank, model = torch.distributed.get_rank(), Model(inside)
    if deferred:
        cutefce.defer(model)
    wrapped = WRAPPINGS[row][name](model)
    is_shared = row.startswith("a tensor parallel")
    losses = steps(model, wrapped, slice(2 * rank, 2 * rank + 2), whole=is_shared)
    report = cutefce.deferral_report(model) if deferred else None
    return Run(losses, whole_parameters(model, wrapped), report)


class First(nn.Module):
    """The stage before the head."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.embedding, self.layers, self.norm = model.embedding, model.layers, model.norm

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.norm(self.layers(self.embedding(tokens)).tanh())
        return x


def train_in_stages(row: str, name: str, inside: bool, deferred: bool) -> Run:
    """Return the run of a pipeline whose last stage is the head."""
    rank, model = torch.distributed.get_rank(), Model(inside)
    if deferred and rank == 1:
        cutefce.defer(model.lm_head)
    part: nn.Module = (First(model), model.lm_head)[rank]
    stage = PipelineStage(part, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=2, loss_fn=loss_of)
    tokens, targets = data()
    optimizer, losses = torch.optim.SGD(part.parameters(), LR), []
    for _ in range(3):
        found: list[Tensor] = []
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(tokens)
        else:
            schedule.step(target=targets, losses=found)
        optimizer.step()
        losses += [x.item() for x in found]
    report = cutefce.deferral_report(part) if deferred and rank == 1 else None
    return Run(losses, {name: x.detach() for name, x in part.named_parameters()}, report)


def compiled(model: Model, deferred: bool) -> nn.Module:
    if deferred:
        cutefce.defer(model)
    torch._dynamo.reset()
    return torch.compile(model, backend="aot_eager")  # type: ignore[return-value]


def checkpointed(model: Model, deferred: bool, reentrant: bool) -> nn.Module:
    model.reentrant = reentrant
    if deferred:
        cutefce.defer(model)
    return model


HERE: dict[str, dict[str, Callable[[Model, bool], nn.Module]]] = {
    "torch.compile": {"aot_eager": compiled},
    "activation checkpointing of layers": {
        "reentrant": functools.partial(checkpointed, reentrant=True),
        "not reentrant": functools.partial(checkpointed, reentrant=False),
    },
}
"""What surrounds a model in one process."""
PIPELINE = "the last stage of torch.distributed.pipelining"
FORMS = {row: [*WRAPPINGS[row]] for row in WRAPPINGS} | {row: [*HERE[row]] for row in HERE}
FORMS[PIPELINE] = ["1F1B"]
ROWS = ["DDP", "FSDP2", "FSDP1, the head in the root's unit"]
"""Those whose losses and logits are compared with those of one process, too."""


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.filterwarnings("ignore:.*reentrant")
@cells(
    FORMS,
    frameworks=False,
    is_default=lambda row, name, inside: (
        name == FORMS[row][0 if inside else -1] and row != "torch.compile"
    ),
)
def test_a_cell_of_the_table(two: Ranks, row: str, name: str, inside: bool, outcome: str) -> None:
    def train(deferred: bool) -> list[Any]:
        if row in HERE:
            return [train_here(HERE[row][name], inside, deferred)]
        function = train_in_stages if row == PIPELINE else train_on_rank
        return two.outcomes(2, function, row, name, inside, deferred)

    assert_cell(train, inside, outcome)


def train_in_bfloat16(inside: bool) -> Run:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    rank, model = torch.distributed.get_rank(), Model(inside)
    cutefce.defer(model)
    losses = steps(model, fsdp2(model, mp_policy=policy), slice(2 * rank, 2 * rank + 2))
    return Run(losses, {}, cutefce.deferral_report(model))


@pytest.mark.parametrize("inside", [True, False], ids=["loss in the model", "loss in the loop"])
def test_mixed_precision(two: Ranks, inside: bool) -> None:
    model = Model(inside=True)
    losses = steps(model, model)
    found = two.run(2, train_in_bfloat16, inside)
    mean = [sum(pair) / 2 for pair in zip(*(each.losses for each in found), strict=True)]
    assert mean == pytest.approx(losses, rel=2e-2)
    assert all(each.report == (3, {}) for each in found)


def use_logits(row: str, name: str) -> tuple[bool, float]:
    """Return whether logits were deferred, and their error against one process."""
    tokens, targets = data()
    expected = Model(inside=False)(tokens, targets)
    model = Model(inside=False)
    cutefce.defer(model.lm_head)
    logits = WRAPPINGS[row][name](model)(tokens, targets)
    error = (logits.detach() - expected.detach()).abs().max().item()
    return isinstance(logits, DeferredLogits), error


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize("row", rest_slow(ROWS, default=2))
def test_logits_are_those_of_one_process(two: Ranks, row: str) -> None:
    for name in WRAPPINGS[row]:
        for deferred, error in two.run(2, use_logits, row, name):
            assert deferred and error <= 1e-5
