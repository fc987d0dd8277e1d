"""`python -m examples.trainer`: transformers' Trainer with a fused loss, by one added line.

Trains a small random Llama twice on random token ids, with and without `cutefce.defer(model)`, and
prints both losses.  Needs transformers and accelerate, and no network.
"""

import tempfile
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

import cutefce

VOCAB, LENGTH, STEPS = 32000, 128, 20


class Repetitions(Dataset[dict[str, list[int]]]):
    """Sequences that repeat eight random ids, so that there is something to learn."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(VOCAB, (8,), generator=generator).tolist() * (LENGTH // 8)
        return {"input_ids": ids, "labels": ids}


def train(is_fused: bool) -> Any:
    """Return the trainer's log of a training."""
    set_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
    )
    model = LlamaForCausalLM(config)
    if is_fused:
        cutefce.defer(model)  # the added line
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=STEPS,
            per_device_train_batch_size=4,
            learning_rate=3e-3,
            logging_steps=STEPS // 4,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = Trainer(model=model, args=arguments, train_dataset=Repetitions())
        trainer.train()
    if is_fused:
        print(cutefce.deferral_report(model))
    return trainer.state.log_history


def main() -> None:
    """Print the losses of both trainings, step by step."""
    logs = zip(train(is_fused=False), train(is_fused=True), strict=True)
    for plain, fused in logs:
        if "loss" in plain:
            print(f"step {plain['step']}: {plain['loss']} with logits, {fused['loss']} fused")


if __name__ == "__main__":
    main()
