"""Train a tiny random model with TRL's GRPO, its log-probabilities being those of cutefce.

Run as `python -m examples.grpo`, on a CPU or a GPU, without network.  It needs TRL, which
`pip install ".[integrations]"` installs.  Words are digits, and a completion is rewarded for the
share of even ones: random at first, and above 0.9 at the end.
"""

import argparse
import os
import tempfile
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    ProgressCallback,
    TrainerCallback,
    set_seed,
)
from trl import GRPOConfig, GRPOTrainer

import cutefce.integrations.trl

SPECIAL = "<pad>", "<s>", "</s>"
PROMPTS = [f"{i} {j}" for i in range(10) for j in range(10)]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer whose words are digits."""
    vocab = {word: number for number, word in enumerate((*SPECIAL, *map(str, range(10))))}
    words = Tokenizer(models.WordLevel(vocab, unk_token=SPECIAL[0]))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    pad, begin, end = SPECIAL
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token=pad,
        bos_token=begin,
        eos_token=end,
        unk_token=pad,
        padding_side="left",
    )


def reward_even(completions: list[str], **_: object) -> list[float]:
    """Return the share of even digits in each completion, 0 if it has none."""
    digits = [[int(word) for word in text.split() if word.isdigit()] for text in completions]
    return [sum(x % 2 == 0 for x in found) / max(1, len(found)) for found in digits]


class PrintReward(TrainerCallback):  # type: ignore[misc]
    """Prints the mean reward of each step."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Print it."""
        if "reward" in logs:
            print(f"step {state.global_step:2}: reward {logs['reward']:.2f}")


def train(steps: int, folder: str) -> list[float]:
    """Return the mean reward of every step."""
    set_seed(0)
    config = LlamaConfig(
        vocab_size=len(SPECIAL) + 10,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    trainer = GRPOTrainer(
        model=LlamaForCausalLM(config),
        args=GRPOConfig(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=32,
            num_generations=8,
            max_completion_length=8,
            learning_rate=3e-3,
            lr_scheduler_type="constant",
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=not torch.cuda.is_available(),
            bf16=torch.cuda.is_available(),
        ),
        reward_funcs=reward_even,
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        processing_class=make_tokenizer(),
    )
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(PrintReward)
    trainer.train()
    return [row["reward"] for row in trainer.state.log_history if "reward" in row]


def main() -> None:
    """Train, and print the rewards of the first and the last steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    steps = parser.parse_args().steps
    cutefce.integrations.trl.enable()
    with tempfile.TemporaryDirectory() as folder:
        rewards = train(steps, folder)
    first, last = rewards[:3], rewards[-3:]
    print(
        f"mean reward: {sum(first) / len(first):.2f} at first, {sum(last) / len(last):.2f} at last"
    )


if __name__ == "__main__":
    main()
