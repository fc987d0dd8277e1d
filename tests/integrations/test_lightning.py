"""defer: Lightning and Fabric."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning")

import lightning
import torch
import transformers
from torch import Tensor
from torch.nn import functional as F

import cutefce
from bench.harness.tiny_models import batch
from tests.support.deferral import parameters, tiny_llama


def test_lightning_leaves_evaluation_mode(tmp_path: Path) -> None:
    """A model of from_pretrained is in evaluation mode, and Lightning trains it there."""
    model: Any = tiny_llama()
    model.save_pretrained(tmp_path)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)

        def training_step(self, rows: dict[str, Tensor], index: int) -> Tensor:
            loss: Tensor = self.model(**rows).loss
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    found = []
    for is_deferred in (False, True):
        module: Any = Module()
        if is_deferred:
            cutefce.defer(module.model)
        trainer = lightning.Trainer(
            max_steps=3,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        rows: Any = [batch() for _ in range(3)]
        trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=None))
        assert not module.model.training
        found.append(parameters(module))
    assert cutefce.deferral_report(module) == (3, {})
    for key, value in found[0].items():
        assert (found[1][key] - value).abs().max() <= 1e-6, key


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("inside", [True, False])
def test_fabric(inside: bool, precision: Any) -> None:
    """Fabric copies dataclasses among outputs, and casts and hooks the tensors in them."""
    fabric = lightning.Fabric(accelerator="cpu", precision=precision)
    found = []
    for is_deferred in (False, True):
        model = tiny_llama()
        if is_deferred:
            cutefce.defer(model)
        wrapped, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), 0.1))
        for _ in range(2):
            rows = batch()
            outputs = wrapped(**rows)
            logits = outputs.logits[:, :-1].flatten(0, 1)
            assert logits.dtype == torch.float32
            loss = (
                outputs.loss if inside else F.cross_entropy(logits, rows["labels"][:, 1:].flatten())
            )
            optimizer.zero_grad()
            fabric.backward(loss)
            optimizer.step()
        assert loss.dtype == torch.float32
        found.append(parameters(model))
    assert cutefce.deferral_report(model) == (2 if inside else 4, {})
    tolerance = 1e-6 if precision == "32-true" else 1e-3
    for key, value in found[0].items():
        assert (found[1][key] - value).abs().max() <= tolerance, key
