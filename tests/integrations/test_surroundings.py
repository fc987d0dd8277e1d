"""defer: what surrounds a model in training has the loss and gradients that it has without.

Each cell of the table "What surrounds a model" in docs/integrations.md is a test.
"""

import functools
import logging
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

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
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import cutefce
from cutefce.integrations.deferral.logits import DeferredLogits
from tests.support.ranks import Ranks, started

D, V = 16, 24
LR = 0.5
DOCS = Path(__file__).parents[2] / "docs" / "integrations.md"


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with started(2) as ranks:
        yield ranks


class Model(nn.Module):
    """A model whose loss is in its forward, or in the loop."""

    def __init__(self, inside: bool, reentrant: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inside, self.reentrant = inside, reentrant
        self.embedding = nn.Embedding(V, D)
        self.layers = nn.Sequential(nn.Linear(D, D), nn.Linear(D, D))
        self.norm = nn.LayerNorm(D)
        self.lm_head = nn.Linear(D, V, bias=False)

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, tokens: Tensor, targets: Tensor) -> Any:
        x = self.embedding(tokens)
        if self.reentrant is None:
            x = self.layers(x)
        else:
            x = checkpoint(self.layers, x, use_reentrant=self.reentrant)
        logits = self.lm_head(self.norm(x.tanh()))
        return loss_of(logits, targets) if self.inside else logits


def loss_of(logits: Any, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().view(-1, V), targets.view(-1))


def data() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(V, (4, 6), generator=torch.Generator().manual_seed(1))
    return tokens, tokens.roll(-1, 1)


class Run(NamedTuple):
    """What a few steps of SGD end in."""

    losses: list[float]
    parameters: dict[str, Tensor]
    report: Any = None


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


def whole_parameters(model: nn.Module, wrapped: nn.Module) -> dict[str, Tensor]:
    """Return copies of all parameters, on every rank."""
    if isinstance(wrapped, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(wrapped):
            named = [(name, x.detach().clone()) for name, x in wrapped.named_parameters()]
        return {name.replace("_fsdp_wrapped_module.", ""): x for name, x in named}
    named = [(name, x.detach()) for name, x in model.named_parameters()]
    return {name: x.full_tensor() if isinstance(x, DTensor) else x.clone() for name, x in named}


def steps(model: Any, wrapped: Any, rows: slice = slice(None), whole: bool = False) -> list[float]:
    """Return the losses of three steps of SGD."""
    tokens, targets = (x if whole else x[rows] for x in data())
    optimizer, losses = torch.optim.SGD(wrapped.parameters(), LR), []
    for _ in range(3):
        result = wrapped(tokens, targets)
        loss = result if model.inside else loss_of(result, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


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


def train_with_deepspeed(row: str, name: str, inside: bool, deferred: bool) -> Run:
    """Return the run of this rank's half of the data in an engine of DeepSpeed."""
    deepspeed = start_deepspeed()
    model = Model(inside)
    if deferred and not name.endswith("defer of the engine"):
        cutefce.defer(model.lm_head if row.endswith("the head alone") else model)
    stage = int(re.findall(r"ZeRO-(\d)", name)[0]) if "ZeRO" in name else 0
    accumulated = 2 if "accumulation" in name else 1
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), LR),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": accumulated,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            "steps_per_print": 10**9,
        },
    )
    if deferred and name.endswith("defer of the engine"):
        cutefce.defer(engine)
    rank, losses = torch.distributed.get_rank(), []
    tokens, targets = (x[2 * rank : 2 * rank + 2] for x in data())
    for _ in range(3 * accumulated):
        result = engine(tokens, targets)
        loss = result if inside else loss_of(result, targets)
        loss.backward() if name.endswith("loss.backward()") else engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    with deepspeed.zero.GatheredParameters([*model.parameters()]):
        parameters = {name: x.detach().clone() for name, x in model.named_parameters()}
    return Run(losses, parameters, cutefce.deferral_report(model) if deferred else None)


def start_deepspeed() -> Any:
    """Return DeepSpeed, on the process group of the ranks, without operators in C++."""
    rank = str(torch.distributed.get_rank())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "DS_ACCELERATOR": "cpu"}
    logging.disable(logging.WARNING)
    import deepspeed

    deepspeed.ops.__compatible_ops__.clear()
    deepspeed.init_distributed(dist_backend="gloo")
    return deepspeed


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


def dispatched(model: Model, deferred: bool, first: bool) -> nn.Module:
    """Return a model with hooks of accelerate, as `device_map` over several GPUs leaves it."""
    accelerate = pytest.importorskip("accelerate")
    places = {name: "cpu" for name, _ in model.named_children()}
    if deferred and first:
        cutefce.defer(model)
    whole: nn.Module = accelerate.dispatch_model(model, places, force_hooks=True)
    if deferred and not first:
        cutefce.defer(model)
    return whole


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


def adapted(model: Model, deferred: bool, first: bool, **settings: Any) -> nn.Module:
    """Return a model with LoRA, deferred before it or after."""
    peft = pytest.importorskip("peft")
    if deferred and first:
        cutefce.defer(model)
    torch.manual_seed(2)
    config = peft.LoraConfig(r=4, init_lora_weights=False, **settings)
    whole: nn.Module = peft.get_peft_model(model, config)
    if deferred and not first:
        cutefce.defer(whole)
    return whole.train()


def in_both_orders(function: Callable[..., nn.Module], **options: Any) -> dict[str, Any]:
    return {
        name: functools.partial(function, first=first, **options)
        for name, first in (("defer first", True), ("defer afterwards", False))
    }


HERE: dict[str, dict[str, Callable[[Model, bool], nn.Module]]] = {
    "`device_map`, accelerate's hooks": in_both_orders(dispatched),
    "torch.compile": {"aot_eager": compiled},
    "activation checkpointing of layers": {
        "reentrant": functools.partial(checkpointed, reentrant=True),
        "not reentrant": functools.partial(checkpointed, reentrant=False),
    },
    "PEFT: adapters of other layers": in_both_orders(adapted, target_modules=["0", "1"]),
    "PEFT: a copy of the head, `modules_to_save`": in_both_orders(
        adapted, target_modules=["0"], modules_to_save=["lm_head"]
    ),
    "PEFT: an adapter of the head": in_both_orders(adapted, target_modules=["0", "lm_head"]),
}
"""What surrounds a model in one process."""
DEEPSPEED = {
    "DeepSpeed without ZeRO, ZeRO-1, ZeRO-2": [
        f"{name}, {more}"
        for name in ("no sharding", "ZeRO-1", "ZeRO-2")
        for more in ("one step", "accumulation")
    ],
    "DeepSpeed ZeRO-3": [
        f"ZeRO-3, {more}"
        for more in ("one step", "accumulation", "loss.backward()", "defer of the engine")
    ],
    "DeepSpeed ZeRO-3, `defer` of the head alone": ["ZeRO-3, one step"],
}
PIPELINE = "the last stage of torch.distributed.pipelining"


def table() -> list[tuple[str, str, str]]:
    """Return the rows of the table: what surrounds a model, and what losses do there."""
    text = DOCS.read_text().split("### What surrounds a model")[1].split("\n\n| ")[1]
    lines = text.split("\n\n")[0].splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines]
    return [(name, inside, outside) for name, inside, outside in rows]


def cells() -> list[Any]:
    """Return a test for each cell, and for each form of what surrounds the model there."""
    forms = {**WRAPPINGS, **HERE, **DEEPSPEED, PIPELINE: ["1F1B"]}
    rows = table()
    assert {name for name, *_ in rows} == forms.keys()
    return [
        pytest.param(row, name, where == "inside", outcome, id=f"{row}-{name}-{where}")
        for row, *outcomes in rows
        for where, outcome in zip(("inside", "outside"), outcomes, strict=True)
        for name in forms[row]
        if outcome != "-"
    ]


def runs(two: Ranks, row: str, name: str, inside: bool, deferred: bool) -> list[tuple[bool, Any]]:
    """Return for each rank whether it failed, and its run or the error."""
    if row in HERE:
        model = Model(inside)
        wrapped = HERE[row][name](model, deferred)
        losses = steps(model, wrapped)
        report = cutefce.deferral_report(model) if deferred else None
        return [(False, Run(losses, whole_parameters(model, wrapped), report))]
    function = train_on_rank
    if row in DEEPSPEED:
        pytest.importorskip("deepspeed")
        function = train_with_deepspeed
    if row == PIPELINE:
        function = train_in_stages
    return two.outcomes(2, function, row, name, inside, deferred)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.filterwarnings("ignore:.*reentrant")
@pytest.mark.parametrize(("row", "name", "inside", "outcome"), cells())
def test_a_cell_of_the_table(two: Ranks, row: str, name: str, inside: bool, outcome: str) -> None:
    results = runs(two, row, name, inside, deferred=True)
    if outcome == "refused":
        for failed, text in results:
            assert failed and "RuntimeError: logits: got a use of them" in text
        return
    for (failed, ours), (_, theirs) in zip(
        results, runs(two, row, name, inside, deferred=False), strict=True
    ):
        assert not failed, ours
        assert ours.losses == pytest.approx(theirs.losses, rel=1e-5)
        start = dict(Model(inside).named_parameters())
        assert ours.parameters.keys() == theirs.parameters.keys()
        for key, x in theirs.parameters.items():
            moved = (x - start.get(key, torch.zeros(()))).abs().max()
            assert (ours.parameters[key] - x).abs().max() <= 1e-5 * moved, key
        if ours.report is not None:
            assert bool(ours.report.fused) == (outcome == "fused"), ours.report
            assert bool(ours.report.fallbacks) == (outcome == "full logits"), ours.report


@pytest.mark.parametrize("row", ["DDP", "FSDP2", "FSDP1, the head in the root's unit"])
def test_two_ranks_train_as_one_process(two: Ranks, row: str) -> None:
    model = Model(inside=True)
    losses = steps(model, model)
    for name in WRAPPINGS[row]:
        found = two.run(2, train_on_rank, row, name, False, True)
        mean = [sum(pair) / 2 for pair in zip(*(each.losses for each in found), strict=True)]
        assert mean == pytest.approx(losses, rel=1e-5)
        for key, x in model.named_parameters():
            torch.testing.assert_close(found[0].parameters[key], x, rtol=1e-5, atol=1e-6)


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
@pytest.mark.parametrize("row", ["DDP", "FSDP2", "FSDP1, the head in the root's unit"])
def test_logits_are_those_of_one_process(two: Ranks, row: str) -> None:
    for name in WRAPPINGS[row]:
        for deferred, error in two.run(2, use_logits, row, name):
            assert deferred and error <= 1e-5


def backward_by_torch(deferred: bool) -> Run:
    return train_with_deepspeed("", "ZeRO-2, loss.backward()", inside=False, deferred=deferred)


def test_a_backward_that_deepspeed_does_not_see_is_refused(two: Ranks) -> None:
    pytest.importorskip("deepspeed")
    for failed, text in two.outcomes(2, backward_by_torch, True):
        assert failed and "RuntimeError: loss: got backward() of one that was computed" in text
