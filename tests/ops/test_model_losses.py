"""The losses of transformers' models: the options that their configurations ask for."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cutefce
from tests.support.tiers import rest_slow

SIZES: dict[str, Any] = {
    "vocab_size": 333,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

Options = Callable[[Any], dict[str, Any]]

MODELS: dict[str, tuple[str, dict[str, Any], Options]] = {
    "softcap": (
        "Gemma2",
        {"final_logit_softcapping": 30.0, "head_dim": 8},
        lambda config: {"softcap": config.final_logit_softcapping},
    ),
    "factor of the logits": (
        "Cohere",
        {"logit_scale": 0.0625},
        lambda config: {"logit_scale": config.logit_scale},
    ),
    "divisor of the logits": (
        "Granite",
        {"logits_scaling": 8.0},
        lambda config: {"logit_scale": 1 / config.logits_scaling},
    ),
    "factor of the head": (
        "FalconH1",
        {
            "lm_head_multiplier": 0.0195,
            "mamba_d_ssm": 32,
            "mamba_n_heads": 4,
            "mamba_d_head": 8,
            "mamba_d_state": 8,
            "mamba_chunk_size": 16,
        },
        lambda config: {"logit_scale": config.lm_head_multiplier},
    ),
    "bias of the head": ("Phi", {}, lambda config: {}),
    "none": ("Llama", {}, lambda config: {}),
}


def tiny_model(family: str, more: dict[str, Any]) -> Any:
    """Return a random model whose logits are large enough for a softcap to matter."""
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, f"{family}ForCausalLM"):
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES, **more)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    head = model.get_output_embeddings()
    with torch.no_grad():
        head.weight.normal_(std=3.0)
        if head.bias is not None:
            head.bias.normal_()
    return model


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}


@pytest.mark.parametrize("workspace", rest_slow(["min", "max"]))
@pytest.mark.parametrize(("family", "more", "options"), MODELS.values(), ids=MODELS)
def test_losses_of_models(
    family: str, more: dict[str, Any], options: Options, workspace: str
) -> None:
    """Loss and the gradients of all parameters are those of the model itself."""
    model = tiny_model(family, more)
    tokens = torch.randint(3, SIZES["vocab_size"], (2, 24))
    labels = tokens.clone()
    labels[:, :7] = -100
    head = model.get_output_embeddings()
    want = model(input_ids=tokens, labels=labels).loss
    wanted = gradients(model, want)

    states = model.base_model(input_ids=tokens).last_hidden_state
    given = options(model.config)
    arguments = states[:, :-1], head.weight, labels[:, 1:]
    loss = cutefce.linear_cross_entropy(
        *arguments, linear_bias=head.bias, workspace=workspace, **given
    )
    torch.testing.assert_close(loss, want)
    got = gradients(model, loss)
    assert got.keys() == wanted.keys()
    for name, gradient in got.items():
        error = float((gradient - wanted[name]).norm())
        assert error <= 1e-5 * float(wanted[name].norm()) + 1e-7, name

    if given or head.bias is not None:
        with torch.no_grad():  # the option matters
            plain = cutefce.linear_cross_entropy(*arguments)
        assert abs(float(plain - want.detach())) > 1e-3
