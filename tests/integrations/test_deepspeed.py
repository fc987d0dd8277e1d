"""defer: the Trainer of transformers and GKD under DeepSpeed, on two ranks."""

import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("deepspeed")
pytest.importorskip("accelerate")

import torch
import transformers
from torch import Tensor
from torch.nn import functional as F

import cutefce
import cutefce.integrations.trl
from bench.harness.tiny_models import VOCAB, build, tiny_config
from tests.integrations.test_surroundings import (
    deepspeed_config,
    gathered_parameters,
    start_deepspeed,
)
from tests.support.ranks import Ranks


class Run(NamedTuple):
    """What a training ends in: logged losses, parameters, and the report of the model."""

    losses: list[float]
    parameters: dict[str, Tensor]
    report: Any


def shifted_loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    logits = outputs.logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())


TRAINERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "label smoothing": ({"label_smoothing_factor": 0.1}, {}),
    "compute_loss_func": ({}, {"compute_loss_func": shifted_loss}),
}
"""Arguments of the training and of the trainer."""


def train(name: str, stage: int, deferred: bool, folder: Path) -> Run:
    start_deepspeed()
    os.environ |= {"ACCELERATE_USE_DEEPSPEED": "true", "MASTER_ADDR": "127.0.0.1"}
    model: Any = build(tiny_config("llama")).train()
    if deferred:
        cutefce.defer(model)
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(VOCAB, (9,), generator=generator) for _ in range(16)]
    arguments, more = TRAINERS[name]
    trainer = transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(
            output_dir=str(folder),
            use_cpu=True,
            deepspeed=deepspeed_config(stage),
            max_steps=3,
            per_device_train_batch_size=2,
            report_to=[],
            disable_tqdm=True,
            save_strategy="no",
            logging_steps=1,
            optim="sgd",
            learning_rate=0.5,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            **arguments,
        ),
        train_dataset=[{"input_ids": x, "labels": x} for x in rows],
        **more,
    )
    trainer.train()
    transformers.integrations.deepspeed.unset_hf_deepspeed_config()  # of the next model
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    report = cutefce.deferral_report(model) if deferred else None
    return Run(losses, gathered_parameters(model), report)


def assert_equal(ours: Run, theirs: Run) -> None:
    assert len(ours.losses) == 3 and ours.losses == pytest.approx(theirs.losses, rel=1e-5)
    for name, x in theirs.parameters.items():
        assert (ours.parameters[name] - x).abs().max() <= 1e-6, name


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("name", TRAINERS)
def test_trainer(two: Ranks, name: str, stage: int, tmp_path: Path) -> None:
    runs = [two.run(2, train, name, stage, deferred, tmp_path) for deferred in (False, True)]
    for theirs, ours in zip(*runs, strict=True):
        assert_equal(ours, theirs)
        is_fused = name == "plain" or (stage == 2 and name != "label smoothing")
        assert ours.report.fused == (3 if is_fused else 0)
        assert sum(ours.report.fallbacks.values()) == (0 if is_fused else 3)


def distill(enabled: bool) -> Run:
    """Take the steps of `GKDTrainer.compute_loss` under ZeRO-3."""
    deepspeed = start_deepspeed()
    from trl.experimental.gkd import GKDTrainer

    student, teacher = (build(tiny_config("llama")) for _ in range(2))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for x in teacher.parameters():
            x.add_(0.05 * torch.randn(x.shape, generator=generator))
    if enabled:
        cutefce.integrations.trl.enable_gkd(student, teacher)
    optimizer = torch.optim.SGD(student.parameters(), 0.5)
    engine, *_ = deepspeed.initialize(
        model=student.train(), optimizer=optimizer, config=deepspeed_config(3)
    )
    other, *_ = deepspeed.initialize(model=teacher.eval(), config=deepspeed_config(3))
    losses, rank = [], torch.distributed.get_rank()
    for index in range(3):
        generator.manual_seed(10 * index + rank)
        ids = torch.randint(VOCAB, (2, 11), generator=generator)
        labels = ids.masked_fill(torch.arange(11) < 3, -100)
        logits = engine(input_ids=ids).logits
        with torch.no_grad():
            expected = other(input_ids=ids).logits
        loss = GKDTrainer.generalized_jsd_loss(
            student_logits=logits[:, 2:-1],
            teacher_logits=expected[:, 2:-1],
            labels=labels[:, 3:],
            beta=0.5,
        )
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return Run(losses, gathered_parameters(student), None)


@pytest.mark.slow
def test_gkd_under_zero_3(two: Ranks) -> None:
    pytest.importorskip("trl")
    runs = [two.run(2, distill, enabled) for enabled in (False, True)]
    for theirs, ours in zip(*runs, strict=True):
        assert_equal(ours, theirs)
