"""defer: frameworks that surround a model in training; `tests/deferral` has what torch alone does.

Each cell of the table "What surrounds a model" in docs/defer.md is a test in one of both.
"""

import functools
import logging
import os
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cutefce
from tests.deferral.surroundings import (
    LR,
    Model,
    Run,
    assert_cell,
    cells,
    data,
    loss_of,
    train_here,
)
from tests.support.deferral import parameters
from tests.support.ranks import Ranks


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
        config=deepspeed_config(stage) | {"gradient_accumulation_steps": accumulated},
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
    report = cutefce.deferral_report(model) if deferred else None
    return Run(losses, gathered_parameters(model), report)


def start_deepspeed() -> Any:
    """Return DeepSpeed, on the process group of the ranks, without operators in C++."""
    rank = str(torch.distributed.get_rank())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "DS_ACCELERATOR": "cpu"}
    logging.disable(logging.WARNING)
    import deepspeed

    deepspeed.ops.__compatible_ops__.clear()
    deepspeed.init_distributed(dist_backend="gloo")
    return deepspeed


def deepspeed_config(stage: int) -> dict[str, Any]:
    """Return DeepSpeed's configuration for two rows a step, on the CPU."""
    return {
        "train_micro_batch_size_per_gpu": 2,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "steps_per_print": 10**9,
    }


def gathered_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of all parameters, also where ZeRO-3 has partitioned them."""
    import deepspeed

    with deepspeed.zero.GatheredParameters([*model.parameters()]):
        return parameters(model)


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
CORE = {
    ("DeepSpeed without ZeRO, ZeRO-1, ZeRO-2", "ZeRO-2, one step"),
    ("DeepSpeed ZeRO-3", "ZeRO-3, one step"),
}
FORMS = DEEPSPEED | {row: [*forms] for row, forms in HERE.items()}


@cells(
    FORMS,
    frameworks=True,
    is_default=lambda row, name, inside: row in HERE or (inside and (row, name) in CORE),
)
def test_a_cell_of_the_table(two: Ranks, row: str, name: str, inside: bool, outcome: str) -> None:
    def train(deferred: bool) -> list[Any]:
        if row in HERE:
            return [train_here(HERE[row][name], inside, deferred)]
        pytest.importorskip("deepspeed")
        return two.outcomes(2, train_with_deepspeed, row, name, inside, deferred)

    assert_cell(train, inside, outcome)


def backward_by_torch(deferred: bool) -> Run:
    return train_with_deepspeed("", "ZeRO-2, loss.backward()", inside=False, deferred=deferred)


def test_a_backward_that_deepspeed_does_not_see_is_refused(two: Ranks) -> None:
    pytest.importorskip("deepspeed")
    for failed, text in two.outcomes(2, backward_by_torch, True):
        assert failed and "RuntimeError: loss: got backward() of one that was computed" in text
