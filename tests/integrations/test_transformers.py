"""defer: named models of transformers, its Trainer, PEFT, and loops of one's own."""

import copy
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("peft")

import accelerate
import peft
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

import cutefce
from bench.harness.tiny_models import VOCAB, batch, build, tiny_config
from cutefce.integrations.deferral.logits import DeferredLogits
from tests.support.deferral import assert_same, count_fused, gradients, parameters

MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "Llama": ("llama", {}, {}),
    "Qwen 3": ("qwen3", {}, {}),
    "Qwen 3 MoE": ("qwen3_moe", {"output_router_logits": True}, {}),
    "Mixtral": ("mixtral", {"output_router_logits": True}, {}),
    "DeepSeek V3": ("deepseek_v3", {}, {}),
    "GPT-OSS": ("gpt_oss", {}, {}),
    "Gemma 2": ("gemma2", {"final_logit_softcapping": 3.0}, {"softcap": 3.0}),
    "Cohere": ("cohere", {"logit_scale": 0.0625}, {"logit_scale": 0.0625}),
    "Granite": ("granite", {"logits_scaling": 8.0}, {"logit_scale": 1 / 8}),
    "Falcon-H1": ("falcon_h1", {"lm_head_multiplier": 0.25}, {"logit_scale": 0.25}),
    "GPT-2": ("gpt2", {}, {}),
    "Phi": ("phi", {}, {}),
    "Mamba 2": ("mamba2", {}, {}),
    "Bart": ("bart", {}, {}),
}
"""Model type, fields of its configuration, and options that the fused loss must get."""


def tiny(name: str = "Llama") -> nn.Module:
    model_type, fields, _ = MODELS[name]
    return build(tiny_config(model_type, **fields)).train()


def step(model: Any, **more: Any) -> tuple[Tensor, dict[str, Tensor]]:
    loss = model(**batch(), **more).loss
    loss.backward()
    return loss.detach(), gradients(model)


@pytest.mark.parametrize("counted", [False, True], ids=["mean", "num_items_in_batch"])
@pytest.mark.parametrize("name", MODELS)
def test_named_models(name: str, counted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    more = {"num_items_in_batch": torch.tensor(29)} if counted and name != "Bart" else {}
    model = tiny(name)
    loss, theirs = step(model, **more)
    cutefce.defer(model)
    calls = count_fused(monkeypatch)
    ours, mine = step(model, **more)
    torch.testing.assert_close(ours, loss, rtol=1e-6, atol=1e-6)
    assert_same(mine, theirs)
    expected = {"logit_scale": 1.0, "softcap": None} | MODELS[name][2]
    assert [{key: call[key] for key in expected} for call in calls] == [expected]
    assert (calls[0]["linear_bias"] is not None) == (name == "Phi")
    assert cutefce.deferral_report(model) == (1, {})


@pytest.mark.parametrize("name", ["Llama", "Qwen 3 MoE", "Cohere", "Gemma 2", "Phi"])
def test_compiled_models_are_one_graph(name: str) -> None:
    model = tiny(name)
    loss, theirs = step(model)
    cutefce.defer(model)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        outputs: Any = compiled(**batch())
        outputs.loss.backward()
        torch.testing.assert_close(outputs.loss, loss, rtol=1e-6, atol=1e-6)
        assert_same(gradients(model), theirs)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]
    assert cutefce.deferral_report(model) == (1, {})
    assert isinstance(outputs.logits, DeferredLogits)
    cutefce.undefer(model)
    expected = model(**batch()).logits
    torch.testing.assert_close(outputs.logits.detach(), expected, rtol=1e-5, atol=1e-6)


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
    "AdamW": {"optim": "adamw_torch", "learning_rate": 1e-3, "adam_epsilon": 1e-4},
    "gradient checkpointing": {"gradient_checkpointing": True},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 1},
    "label smoothing": {"label_smoothing_factor": 0.1},
    "compiled": {"torch_compile": True, "torch_compile_backend": "aot_eager"},
}


@pytest.mark.parametrize("name", TRAINER)
def test_trainer(name: str, tmp_path: Path) -> None:
    options = TRAINER[name]
    theirs, expected = train(tiny(), tmp_path, **options)
    model = tiny()
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


def test_trainer_in_bfloat16(tmp_path: Path) -> None:
    """The fused loss does not round logits: it is nearer to float32 than the model's own."""
    _, exact = train(tiny(), tmp_path)
    _, theirs = train(tiny(), tmp_path, bf16=True)
    model = tiny()
    cutefce.defer(model)
    _, ours = train(model, tmp_path, bf16=True)
    assert cutefce.deferral_report(model) == (4, {})

    def error(found: dict[str, Tensor]) -> float:
        return max((found[key] - value).abs().max().item() for key, value in exact.items())

    assert error(ours) <= 1.5 * error(theirs)


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def test_evaluation_of_a_trainer(tmp_path: Path) -> None:
    model = tiny()
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


def test_generation_with_deferred_evaluation() -> None:
    model: Any = tiny().eval()
    ids = batch()["input_ids"]
    settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(ids, **settings)
    cutefce.defer(model)
    assert torch.equal(model.generate(ids, **settings), expected)
    cutefce.undefer(model)
    cutefce.defer(model, evaluation=True)
    assert torch.equal(model.generate(ids, **settings), expected)


def test_accelerate_converts_outputs() -> None:
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    model = tiny()
    with torch.autocast("cpu", torch.bfloat16):
        loss, theirs = step(model)
    cutefce.defer(model)
    wrapped = accelerator.prepare(model)
    outputs = wrapped(**batch())
    accelerator.backward(outputs.loss)
    torch.testing.assert_close(outputs.loss, loss, rtol=1e-2, atol=0)
    assert_same(gradients(model), theirs, rtol=5e-2)
    assert outputs.logits.dtype == torch.float32 and cutefce.deferral_report(model) == (1, {})
    assert type(outputs.logits.detach()) is Tensor


class Lightning(nn.Module):
    """A module as Lightning has it: training_step returns a loss of the model's logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, rows: dict[str, Tensor]) -> Tensor:
        logits = self.model(input_ids=rows["input_ids"]).logits[:, :-1]
        return F.cross_entropy(logits.reshape(-1, VOCAB).float(), rows["labels"][:, 1:].flatten())


@pytest.mark.parametrize("name", ["Llama", "Granite", "GPT-2"])
def test_a_loop_of_ones_own(name: str) -> None:
    module = Lightning(tiny(name))
    other = copy.deepcopy(module)
    cutefce.defer(other.model)
    for each in (module, other):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        for _ in range(3):
            each.training_step(batch()).backward()
            optimizer.step()
            optimizer.zero_grad()
    found = parameters(other)
    for key, value in parameters(module).items():
        assert (found[key] - value).abs().max() <= 1e-6, key
    assert cutefce.deferral_report(other) == (3, {})


def test_lightning_leaves_evaluation_mode(tmp_path: Path) -> None:
    """A model of from_pretrained is in evaluation mode, and Lightning trains it there."""
    lightning = pytest.importorskip("lightning")
    model: Any = tiny()
    model.save_pretrained(tmp_path)

    class Module(lightning.LightningModule):  # type: ignore[name-defined]
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
    fabric = pytest.importorskip("lightning").Fabric(accelerator="cpu", precision=precision)
    found = []
    for is_deferred in (False, True):
        model = tiny()
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


BIASES = {
    "Bart": ("BartForConditionalGeneration", "BartConfig", {}),
    "mBART": ("MBartForConditionalGeneration", "MBartConfig", {}),
    "Marian": ("MarianMTModel", "MarianConfig", {"decoder_vocab_size": VOCAB}),
    "Blenderbot": ("BlenderbotForConditionalGeneration", "BlenderbotConfig", {}),
    "Pegasus": ("PegasusForConditionalGeneration", "PegasusConfig", {}),
}
"""Models that add a `final_logits_bias` (1, V), and classes and fields of their configuration."""


@pytest.mark.parametrize("name", BIASES)
def test_final_logits_bias(name: str) -> None:
    kind, config, fields = BIASES[name]
    sizes = dict.fromkeys(("encoder_layers", "decoder_layers"), 1)
    sizes |= dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2)
    sizes |= {"encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "d_model": 16, "vocab_size": VOCAB}
    torch.manual_seed(0)
    model: Any = getattr(transformers, kind)(
        getattr(transformers, config)(
            **sizes,
            **fields,
            dropout=0.0,
            max_position_embeddings=32,
            pad_token_id=0,
            decoder_start_token_id=0,
        )
    ).train()
    nn.init.normal_(model.final_logits_bias)
    loss, theirs = step(model)
    cutefce.defer(model)
    ours, mine = step(model)
    torch.testing.assert_close(ours, loss, rtol=1e-6, atol=1e-6)
    assert_same(mine, theirs)
    assert cutefce.deferral_report(model) == (1, {})


ADAPTERS: dict[str, tuple[dict[str, Any], int]] = {
    "layers": ({"target_modules": ["q_proj", "v_proj"]}, 1),
    "head": ({"target_modules": ["q_proj", "lm_head"]}, 0),
    "DoRA on the head": ({"target_modules": ["lm_head"], "use_dora": True}, 0),
    "copy of the head": ({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, 1),
}
"""Settings of LoRA, and how many losses are fused."""
# here peft makes a head with in_features and out_features swapped
ADAPTERS |= {
    f"tied copies of {' and '.join(saved)}": (
        {"target_modules": ["q_proj"], "modules_to_save": saved, "ensure_weight_tying": True},
        1,
    )
    for saved in (["embed_tokens"], ["lm_head"], ["embed_tokens", "lm_head"])
}


@pytest.mark.parametrize("deferred_first", [True, False])
@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters(name: str, deferred_first: bool) -> None:
    settings, fused = ADAPTERS[name]
    fields = {"tie_word_embeddings": "ensure_weight_tying" in settings}

    def adapted(defer: bool) -> Any:
        model = build(tiny_config("llama", **fields))
        if defer and deferred_first:
            cutefce.defer(model)
        torch.manual_seed(0)
        own = copy.deepcopy(settings)  # peft adds to its lists
        config = peft.LoraConfig(r=4, lora_dropout=0.0, init_lora_weights=False, **own)
        wrapped = peft.get_peft_model(model, config)
        if defer and not deferred_first:
            cutefce.defer(wrapped)
        return wrapped.train()

    loss, theirs = step(adapted(defer=False))
    model = adapted(defer=True)
    ours, mine = step(model)
    torch.testing.assert_close(ours, loss, rtol=1e-6, atol=1e-6)
    assert_same(mine, theirs)
    report = cutefce.deferral_report(model)
    assert report.fused == fused and bool(report.fallbacks) == (not fused)
    merged = model.merge_and_unload()(**batch()).loss
    expected = adapted(defer=False).merge_and_unload()(**batch()).loss
    torch.testing.assert_close(merged, expected, rtol=1e-6, atol=1e-6)
