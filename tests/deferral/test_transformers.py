"""defer: named models of transformers, and their generation."""

from typing import Any

import pytest
import torch
from torch import nn

import cutefce
from bench.harness.tiny_models import VOCAB, batch, build, tiny_config
from cutefce.integrations.deferral.logits import DeferredLogits
from tests.support.deferral import assert_same, count_fused, gradients, own_step
from tests.support.tiers import rest_slow

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


@pytest.mark.parametrize("counted", rest_slow({"num_items_in_batch": True, "mean": False}))
@pytest.mark.parametrize("name", MODELS)
def test_named_models(name: str, counted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    more = {"num_items_in_batch": torch.tensor(29)} if counted and name != "Bart" else {}
    model = tiny(name)
    loss, theirs = own_step(model, **more)
    cutefce.defer(model)
    calls = count_fused(monkeypatch)
    ours, mine = own_step(model, **more)
    torch.testing.assert_close(ours, loss, rtol=1e-6, atol=1e-6)
    assert_same(mine, theirs)
    expected = {"logit_scale": 1.0, "softcap": None} | MODELS[name][2]
    assert [{key: call[key] for key in expected} for call in calls] == [expected]
    assert (calls[0]["linear_bias"] is not None) == (name == "Phi")
    assert cutefce.deferral_report(model) == (1, {})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Llama", "Qwen 3 MoE", "Cohere", "Gemma 2", "Phi"])
def test_compiled_models_are_one_graph(name: str) -> None:
    model = tiny(name)
    loss, theirs = own_step(model)
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
    import transformers

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
    loss, theirs = own_step(model)
    cutefce.defer(model)
    ours, mine = own_step(model)
    torch.testing.assert_close(ours, loss, rtol=1e-6, atol=1e-6)
    assert_same(mine, theirs)
    assert cutefce.deferral_report(model) == (1, {})


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
