"""defer: the Trainer of transformers, and accelerate."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")

import accelerate
import torch
import transformers
from torch import Tensor, nn

import cutefce
from bench.harness.tiny_models import VOCAB, batch
from tests.support.deferral import assert_same, gradients, own_step, parameters, tiny_llama
from tests.support.tiers import rest_slow


class Rows(torch.utils.data.Dataset[dict[str, list[int]]]):
    """Sequences whose numbers of labels differ much."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        ids = [(7 * index + 3 * i) % (VOCAB - 5) + 5 for i in range(12)]
        kept = 1 + index % 8
        return {"input_ids": ids, "labels": [-100] * (12 - kept) + ids[12 - kept :]}


def train(model: nn.Module, folder: Path, **options: Any) -> tuple[Any, dict[str, Tensor]]:
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=2,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        gradient_accumulation_steps=2,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        **{"optim": "sgd", "learning_rate": 1e-2, **options},
    )
    trainer = transformers.Trainer(
        model=model, args=arguments, train_dataset=Rows(), eval_dataset=Rows()
    )
    trainer.train()
    return trainer, parameters(model)


TRAINER: dict[str, dict[str, Any]] = {
    "float32": {},
    "label smoothing": {"label_smoothing_factor": 0.1},
    "AdamW": {"optim": "adamw_torch", "learning_rate": 1e-3, "adam_epsilon": 1e-4},
    "gradient checkpointing": {"gradient_checkpointing": True},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 1},
    "compiled": {"torch_compile": True, "torch_compile_backend": "aot_eager"},
}


@pytest.mark.parametrize("name", rest_slow([*TRAINER], default=2))
def test_trainer(name: str, tmp_path: Path) -> None:
    options = TRAINER[name]
    theirs, expected = train(tiny_llama(), tmp_path, **options)
    model = tiny_llama()
    cutefce.defer(model)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    ours, found = train(model, tmp_path, **options)
    for key, value in expected.items():
        assert (found[key] - value).abs().max() <= 1e-6, key
    logged = [
        {key: entry[key] for key in ("loss", "grad_norm", "eval_loss") if key in entry}
        for entry in (theirs.state.log_history, ours.state.log_history)
        for entry in entry
    ]
    half = len(logged) // 2
    assert len(logged) % 2 == 0 and half >= 2
    for a, b in zip(logged[:half], logged[half:], strict=True):
        assert a.keys() == b.keys()
        assert a == pytest.approx(b, rel=1e-5)
    report = cutefce.deferral_report(model)
    if name == "label smoothing":
        assert report == (0, {"log_softmax": 4})
    elif name == "compiled":
        assert report == (1, {}) and not torch._dynamo.utils.counters["graph_break"]
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    else:
        assert report == (4, {})


@pytest.mark.slow
def test_trainer_in_bfloat16(tmp_path: Path) -> None:
    """The fused loss does not round logits: it is nearer to float32 than the model's own."""
    _, exact = train(tiny_llama(), tmp_path)
    _, theirs = train(tiny_llama(), tmp_path, bf16=True)
    model = tiny_llama()
    cutefce.defer(model)
    _, ours = train(model, tmp_path, bf16=True)
    assert cutefce.deferral_report(model) == (4, {})

    def error(found: dict[str, Tensor]) -> float:
        return max((found[key] - value).abs().max().item() for key, value in exact.items())

    assert error(ours) <= 1.5 * error(theirs)


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def test_evaluation_of_a_trainer(tmp_path: Path) -> None:
    model = tiny_llama()
    trainer, _ = train(model, tmp_path)
    expected = trainer.evaluate()["eval_loss"]
    trainer.compute_metrics = accuracy
    with_metrics = trainer.evaluate()
    cutefce.defer(model)
    again = trainer.evaluate()
    assert again["eval_accuracy"] == with_metrics["eval_accuracy"]
    assert cutefce.deferral_report(model) == (0, {})
    cutefce.undefer(model)
    cutefce.defer(model, evaluation=True)
    trainer.compute_metrics = None
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-6)
    assert cutefce.deferral_report(model) == (4, {})


def test_accelerate_converts_outputs() -> None:
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    model = tiny_llama()
    with torch.autocast("cpu", torch.bfloat16):
        loss, theirs = own_step(model)
    cutefce.defer(model)
    wrapped = accelerator.prepare(model)
    outputs = wrapped(**batch())
    accelerator.backward(outputs.loss)
    torch.testing.assert_close(outputs.loss, loss, rtol=1e-2, atol=0)
    assert_same(gradients(model), theirs, rtol=5e-2)
    assert outputs.logits.dtype == torch.float32 and cutefce.deferral_report(model) == (1, {})
    assert type(outputs.logits.detach()) is Tensor
