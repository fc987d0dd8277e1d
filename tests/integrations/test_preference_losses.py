"""The example losses on log-probabilities equal those that TRL's trainers compute."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("trl")
import trl
from datasets import Dataset
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

from examples.losses.dpo import dpo_loss
from examples.losses.grpo import grpo_loss
from examples.losses.orpo import orpo_loss
from tests.integrations.test_trl import reward, small_model, text, tokenizer
from tests.support.tiers import rest_slow

PAIRS = [
    {"prompt": text(i, 3), "chosen": " " + text(3 * i, 4), "rejected": " " + text(5 * i, 3 + i)}
    for i in range(4)
]


def settings(folder: Path, **more: Any) -> dict[str, Any]:
    """Return the settings of all trainers."""
    both: dict[str, Any] = {"output_dir": str(folder / "out"), "per_device_train_batch_size": 4}
    return {**both, "report_to": [], "use_cpu": True, "bf16": False, "disable_tqdm": True, **more}


def trained_batch(trainer: Any) -> dict[str, Any]:
    """Return the first batch as a trainer's loss takes it."""
    batch: dict[str, Any] = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    return batch


def hidden_states(model: Any, tokens: Tensor, mask: Tensor) -> Tensor:
    """Return those that predict the tokens after the first one."""
    states: Tensor = model.model(input_ids=tokens, attention_mask=mask).last_hidden_state
    return states[:, :-1]


def assert_same(model: Any, ours: Tensor, theirs: Tensor) -> None:
    """Assert that both losses and their gradients are the same."""
    torch.testing.assert_close(ours, theirs.reshape(()), rtol=1e-5, atol=1e-6)
    parameters = [x for x in model.parameters() if x.requires_grad]
    found, wanted = (torch.autograd.grad(loss, parameters) for loss in (ours, theirs))
    for a, b in zip(found, wanted, strict=True):
        assert (a - b).norm() <= 1e-4 * b.norm() + 1e-8


def test_dpo(tmp_path: Path) -> None:
    model, reference = small_model("Llama", tmp_path), small_model("Llama", tmp_path)
    with torch.no_grad():
        for x in reference.parameters():
            x.mul_(0.9)
    trainer: Any = trl.DPOTrainer(
        model=model,
        ref_model=reference,
        args=trl.DPOConfig(beta=0.3, gradient_checkpointing=False, **settings(tmp_path)),
        train_dataset=Dataset.from_list(PAIRS),
        processing_class=tokenizer(),
    )
    model.eval()
    batch = trained_batch(trainer)
    tokens, mask = batch["input_ids"], batch["attention_mask"]
    labels = tokens.masked_fill(batch["completion_mask"] == 0, -100)[:, 1:]
    with torch.no_grad():
        logits = reference(input_ids=tokens, attention_mask=mask).logits[:, :-1]
        log_p = logits.log_softmax(-1).gather(-1, labels.clamp(0)[..., None])[..., 0]
        before = (log_p * (labels >= 0)).sum(1)
    own = hidden_states(model, tokens, mask)
    loss = dpo_loss(own, model.lm_head.weight, labels, before, beta=0.3)
    assert_same(model, loss, trainer.compute_loss(model, batch))


def test_orpo(tmp_path: Path) -> None:
    model = small_model("Llama", tmp_path)
    more = {"max_length": 64, "remove_unused_columns": False, "gradient_checkpointing": False}
    trainer: Any = ORPOTrainer(
        model=model,
        args=ORPOConfig(beta=0.3, **settings(tmp_path, **more)),
        train_dataset=Dataset.from_list(PAIRS),
        processing_class=tokenizer(),
    )
    model.eval()
    batch = trained_batch(trainer)
    theirs, _ = trainer.get_batch_loss_metrics(model, batch)
    given = trainer.concatenated_inputs(batch, padding_value=0)
    tokens, mask = given["concatenated_input_ids"], given["concatenated_attention_mask"]
    labels = torch.where(mask == 1, tokens, -100)[:, 1:]
    completions = given["concatenated_labels"][:, 1:] != -100
    own = hidden_states(model, tokens, mask)
    assert_same(model, orpo_loss(own, model.lm_head.weight, labels, completions, 0.3), theirs)


@pytest.mark.parametrize("entropy_coef", rest_slow([0.1, 0.0]))
def test_grpo(entropy_coef: float, tmp_path: Path) -> None:
    model = small_model("Llama", tmp_path)
    config: dict[str, Any] = {"num_generations": 4, "max_completion_length": 6, "temperature": 0.9}
    config |= {"loss_type": "grpo", "beta": 0.05, "entropy_coef": entropy_coef, "epsilon": 0.1}
    trainer: Any = trl.GRPOTrainer(
        model=model,
        args=trl.GRPOConfig(gradient_checkpointing=False, **config, **settings(tmp_path)),
        reward_funcs=reward,
        train_dataset=Dataset.from_list([{"prompt": text(i, 3)} for i in range(4)]),
        processing_class=tokenizer(),
    )
    torch.manual_seed(0)
    model.train()
    trainer.current_gradient_accumulation_steps = 1
    batch = trained_batch(trainer)
    prompts, completions = batch["prompt_ids"], batch["completion_ids"]
    counted, size = batch["completion_mask"], completions.shape
    mask = torch.cat([batch["prompt_mask"], counted], 1)
    own = hidden_states(model, torch.cat([prompts, completions], 1), mask)[:, -size[1] :]
    labels = completions.masked_fill(counted == 0, -100)
    # ratios on both sides of the clipping range, and advantages of both signs
    with torch.no_grad():
        logits = model.lm_head(own) / 0.9
        log_p = logits.log_softmax(-1).gather(-1, completions[..., None])[..., 0]
    batch["old_per_token_logps"] = log_p + 0.3 * torch.randn(size)
    batch["ref_per_token_logps"] = log_p + 0.3 * torch.randn(size)
    batch["advantages"] = torch.randn(size[0])
    given = batch["advantages"], batch["old_per_token_logps"], batch["ref_per_token_logps"]
    options: Any = {"epsilon": 0.1, "beta": 0.05, "entropy_coef": entropy_coef, "temperature": 0.9}
    counted[1], labels[1] = 0, -100  # as a completion that was cut off
    loss = grpo_loss(own, model.lm_head.weight, labels, *given, **options)
    assert_same(model, loss, trainer.compute_loss(model, batch))
