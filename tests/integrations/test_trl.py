"""TRL: every trainer logs and learns the same with the fused function as with TRL's own."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("trl")
import peft
import transformers
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from trl.kernels import ChunkedLogProbFunction
from trl.trainer import distillation_trainer

import cutefce
from cutefce.integrations import trl as integration
from examples import grpo as example
from tests.support.deferral import parameters

WORDS = [f"w{i}" for i in range(120)]
SHAPE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Cohere": {"logit_scale": 0.3},
    "Gemma2": {"final_logit_softcapping": 2.0, "head_dim": 8, "sliding_window": 64},
    "Phi": {"hidden_act": "gelu"},  # its head has a bias
    "Qwen3Moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "head_dim": 8,
        "output_router_logits": True,
    },
}
CLOCKS = {"train_runtime", "train_samples_per_second", "train_steps_per_second", "total_flos"}


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    """Keep TRL's class; list the calls of both functions and their outputs."""
    found: dict[str, list[Any]] = {"ours": [], "own": []}
    fused, own = cutefce.linear_log_probs, ChunkedLogProbFunction.apply

    def counted(*arguments: Any, **options: Any) -> Any:
        found["ours"].append(tuple(options["outputs"]))
        return fused(*arguments, **options)

    def counted_own(*args: Any, **kwargs: Any) -> Any:
        found["own"].append(args[-1])
        return own(*args, **kwargs)

    monkeypatch.setattr(integration, "linear_log_probs", counted)
    monkeypatch.setattr(ChunkedLogProbFunction, "apply", counted_own)
    name = "_chunked_divergence_loss"
    monkeypatch.setattr(distillation_trainer, name, getattr(distillation_trainer, name))
    return found


def tokenizer() -> Any:
    special = ["<pad>", "<s>", "</s>", "<unk>"]
    vocab = {word: number for number, word in enumerate(special + WORDS)}
    words = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        padding_side="left",
    )


def text(start: int, count: int, step: int = 7) -> str:
    return " ".join(WORDS[(start + step * i) % len(WORDS)] for i in range(count))


def trainer_arguments(folder: Path, steps: int, learning_rate: float) -> dict[str, Any]:
    """Return what the configurations of all trainers have in common."""
    return {
        "output_dir": str(folder / "out"),
        "max_steps": steps,
        "per_device_train_batch_size": 4,
        "learning_rate": learning_rate,
        "optim": "sgd",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
    }


def small_model(name: str, folder: Path) -> Any:
    """Return a model with drawn weights, loaded from a folder: a reference model is loaded too."""
    path = folder / name
    if not path.exists():
        torch.manual_seed(0)
        config = getattr(transformers, f"{name}Config")(**SHAPE | MODELS[name])
        model = getattr(transformers, f"{name}ForCausalLM")(config)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for x in model.parameters():
                x.add_(0.1 * torch.randn(x.shape, generator=generator))
        model.save_pretrained(path)
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def sft(model: Any, settings: dict[str, Any]) -> Any:
    rows = [
        {"prompt": text(i, 3 + i % 3), "completion": " " + text(5 * i, 4 + i)} for i in range(8)
    ]
    return trl.SFTTrainer(
        model=model,
        peft_config=settings.pop("peft_config", None),
        args=trl.SFTConfig(**settings),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer(),
    )


def dpo(model: Any, settings: dict[str, Any]) -> Any:
    rows = [
        {"prompt": text(i, 3), "chosen": " " + text(3 * i, 4), "rejected": " " + text(5 * i, 3 + i)}
        for i in range(8)
    ]
    return trl.DPOTrainer(
        model=model,
        ref_model=small_model(settings.pop("reference"), settings.pop("folder")),
        args=trl.DPOConfig(**settings),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer(),
    )


def kto(model: Any, settings: dict[str, Any]) -> Any:
    rows = [
        {"prompt": text(i, 3), "completion": " " + text(3 * i, 3 + i), "label": i % 2 == 0}
        for i in range(8)
    ]
    return trl.KTOTrainer(
        model=model,
        ref_model=small_model(settings.pop("reference"), settings.pop("folder")),
        args=trl.KTOConfig(**settings),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer(),
    )


def reward(completions: list[str], **_: Any) -> list[float]:
    """Return the share of words with an even number in each completion."""
    numbers = [[int(word[1:]) for word in x.split() if word[0] == "w"] for x in completions]
    return [sum(number % 2 == 0 for number in x) / max(len(x), 1) for x in numbers]


def grpo(model: Any, settings: dict[str, Any]) -> Any:
    return trl.GRPOTrainer(
        model=model,
        args=trl.GRPOConfig(
            num_generations=4, max_completion_length=6, temperature=0.9, **settings
        ),
        reward_funcs=reward,
        train_dataset=Dataset.from_list([{"prompt": text(i, 3)} for i in range(8)]),
        processing_class=tokenizer(),
    )


def rloo(model: Any, settings: dict[str, Any]) -> Any:
    return trl.RLOOTrainer(
        model=model,
        args=trl.RLOOConfig(
            num_generations=4, max_completion_length=6, temperature=0.9, **settings
        ),
        reward_funcs=reward,
        train_dataset=Dataset.from_list([{"prompt": text(i, 3)} for i in range(8)]),
        processing_class=tokenizer(),
    )


def train(
    make: Callable[..., Any], name: str, folder: Path, settings: dict[str, Any]
) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """Return what two steps log, and the parameters after them."""
    transformers.set_seed(3)
    both = trainer_arguments(folder, steps=2, learning_rate=1e-2)
    if make in (dpo, kto):
        both |= {"reference": name, "folder": folder}
    trainer = make(small_model(name, folder), both | settings)
    trainer.train()
    return ending(trainer)


def ending(trainer: Any) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """Return what a training has logged, and its parameters."""
    logged = [
        {key: value for key, value in entry.items() if key not in CLOCKS and "step_time" not in key}
        for entry in trainer.state.log_history
    ]
    return logged, parameters(trainer.model)


RUNS = [
    (sft, "Llama", {}),
    (dpo, "Llama", {}),
    (kto, "Llama", {}),
    (grpo, "Llama", {"beta": 0.05, "entropy_coef": 0.1}),
]
MORE_RUNS = [
    (sft, "Cohere", {}),
    (sft, "Gemma2", {}),
    (sft, "Phi", {}),
    (sft, "Qwen3Moe", {}),
    (sft, "Llama", {"peft_config": peft.LoraConfig(r=4, target_modules=["q_proj"])}),
    (dpo, "Cohere", {"loss_type": "sigmoid_norm", "use_weighting": True}),
    (grpo, "Phi", {"cast_lm_head_to_fp32": True}),
    (grpo, "Gemma2", {}),
    # the first tokens of a prompt's completions have one distribution, at the threshold
    (grpo, "Llama", {"top_entropy_quantile": 0.8}),
    (grpo, "Llama", {"top_entropy_quantile": 0.9}),
    (rloo, "Llama", {}),
]


@pytest.mark.parametrize(
    ("make", "name", "settings"),
    [*RUNS, *(pytest.param(*run, marks=pytest.mark.slow) for run in MORE_RUNS)],
)
def test_a_trainer_logs_and_learns_the_same(
    make: Callable[..., Any],
    name: str,
    settings: dict[str, Any],
    tmp_path: Path,
    calls: dict[str, list[Any]],
) -> None:
    expected, parameters = train(make, name, tmp_path, settings)
    assert calls["own"] and not calls["ours"]
    calls["own"].clear()
    integration.enable()
    logged, found = train(make, name, tmp_path, settings)
    assert calls["ours"] and not calls["own"]
    compare(logged, expected)
    assert found.keys() == parameters.keys()
    for key, x in found.items():
        torch.testing.assert_close(x, parameters[key], rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    ("make", "settings", "left"),
    [
        (dpo, {}, ("mean_logits",)),
        pytest.param(kto, {}, ("mean_logits",), marks=pytest.mark.slow),
        pytest.param(grpo, {"entropy_coef": 0.1}, ("entropy",), marks=pytest.mark.slow),
    ],
)
def test_what_a_softcap_excludes_is_left_to_trl(
    make: Callable[..., Any],
    settings: dict[str, Any],
    left: tuple[str, ...],
    tmp_path: Path,
    calls: dict[str, list[Any]],
) -> None:
    expected, parameters = train(make, "Gemma2", tmp_path, settings)
    calls["own"].clear()
    integration.enable()
    logged, found = train(make, "Gemma2", tmp_path, settings)
    assert calls["ours"] and {*calls["own"]} == {left}
    compare(logged, expected)
    for key, x in found.items():
        torch.testing.assert_close(x, parameters[key], rtol=0, atol=1e-7)


def compare(logged: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Assert equality to 6 digits; KL and rewards are differences of sums of log-probabilities."""
    assert len(logged) == len(expected) == 3
    for ours, theirs in zip(logged, expected, strict=True):
        assert ours.keys() == theirs.keys()
        sums = [abs(x) for key, x in theirs.items() if key.startswith("logps/")]
        for key, x in theirs.items():
            is_difference = key == "kl" or key.startswith("rewards/")
            digits = 1e-6 * max([1.0, *sums] if is_difference else [1.0])
            assert ours[key] == pytest.approx(x, rel=1e-6, abs=digits), key


@dataclass
class Call:
    """The arguments of one call, `rest` being those behind the operands."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    rest: tuple[Any, ...]

    def run(self, function: Callable[..., Any]) -> list[Tensor | None]:
        """Return the values, and the gradients of the operands of a sum of those that have one."""
        given = self.hidden, self.weight, self.bias
        leaves = [None if x is None else x.detach().requires_grad_() for x in given]
        values = function(*leaves, *self.rest)
        factors = torch.linspace(-1, 1, len(self.hidden), dtype=torch.float64)
        total = sum((x * factors).sum() for x in values if x is not None and x.requires_grad)
        gradients = torch.autograd.grad(total, [x for x in leaves if x is not None])
        return [*(None if x is None else x.detach() for x in values), *gradients]

    def exact(self, dtype: torch.dtype | None) -> list[Tensor | None]:
        """Return them from all logits in float64, of operands rounded to `dtype`."""
        rounded = [x.to(dtype or x.dtype).double() for x in (self.hidden, self.weight)]
        bias = None if self.bias is None else self.bias.double()
        return Call(rounded[0], rounded[1], bias, self.rest).run(formulas)


def formulas(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, *rest: Any
) -> list[Tensor | None]:
    """Return TRL's values from all logits."""
    temperature, _, softcap, scale, outputs = rest
    logits = torch.nn.functional.linear(hidden, weight, bias) * scale
    logits = (logits if softcap is None else softcap * torch.tanh(logits / softcap)) / temperature
    log_p = logits.log_softmax(1)
    p = log_p.exp()
    values = {
        "log_probs": log_p.gather(1, targets[:, None])[:, 0],
        "entropy": -(p * log_p).sum(1),
        "log_sum_sq_probs": p.square().sum(1).log().detach(),
        "mean_logits": logits.mean(1).detach(),
        "is_top1": logits.argmax(1) == targets,
    }
    return [values[name] if name in outputs else None for name in values]


def random_call(
    outputs: tuple[str, ...] = ("log_probs", *integration.OUTPUTS),
    tokens: int = 37,
    bias: bool = False,
    temperature: float = 1.0,
    softcap: float | None = None,
    scale: float = 1.0,
    dtypes: tuple[torch.dtype, torch.dtype] = (torch.float32, torch.float32),
) -> Call:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, 16, generator=generator)
    weight = torch.randn(211, 16, generator=generator)
    targets = torch.randint(211, (tokens,), generator=generator)
    targets[::3] = (scale * hidden @ weight.T).argmax(1)[::3]
    rest = targets, temperature, 64, softcap, scale, outputs
    bias_ = torch.randn(211, generator=generator) if bias else None
    return Call(hidden.to(dtypes[0]), weight.to(dtypes[1]), bias_, rest)


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": True, "temperature": 0.7, "scale": 0.3},
        {"bias": True, "temperature": 0.7, "scale": -0.3, "softcap": 2.0},
        {"outputs": ("log_probs",)},
        {"outputs": ("log_probs", "is_top1"), "softcap": 5.0},
        {"dtypes": (torch.float32, torch.bfloat16)},
        {"dtypes": (torch.bfloat16, torch.float32)},
    ],
)
def test_the_function_is_as_accurate_as_that_of_trl(
    options: dict[str, Any], autocast: torch.dtype | None, calls: dict[str, list[Any]]
) -> None:
    call = random_call(**options)
    rounded = torch.bfloat16 if call.hidden.dtype == torch.bfloat16 else autocast
    exact, own = call.exact(rounded), ChunkedLogProbFunction.apply
    integration.enable()
    with torch.autocast("cpu", autocast, enabled=autocast is not None):
        theirs, ours = call.run(own), call.run(ChunkedLogProbFunction.apply)
    assert len(calls["ours"]) == 1
    for z, x, y in zip(exact, theirs, ours, strict=True):
        assert (x is None) == (y is None) == (z is None)
        if x is None or y is None or z is None:
            continue
        assert x.dtype == y.dtype
        if y.dtype == torch.bool:
            assert rounded is not None or torch.equal(y, z)
            continue
        errors = [float((found.double() - z).abs().max()) for found in (x, y)]
        assert errors[1] <= 4 * errors[0] + torch.finfo(y.dtype).eps * float(z.abs().max())


def test_no_token_has_gradients_of_zero() -> None:
    integration.enable()
    found = random_call(tokens=0).run(ChunkedLogProbFunction.apply)[5:]
    assert [float(x.abs().sum()) for x in found if x is not None] == [0, 0]


def test_a_weight_of_zero_3_is_left_to_trl(calls: dict[str, list[Any]]) -> None:
    call = random_call()
    call.weight.ds_id = 1  # type: ignore[attr-defined]
    integration.enable()
    ChunkedLogProbFunction.apply(call.hidden, call.weight, call.bias, *call.rest)
    assert len(calls["own"]) == 1 and not calls["ours"]


@pytest.mark.slow
def test_the_example_runs(
    calls: dict[str, list[Any]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["grpo", "--steps", "2"])
    example.main()
    assert calls["ours"] and not calls["own"]
    assert "mean reward" in capsys.readouterr().out
