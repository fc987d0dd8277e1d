"""Megatron-Core's GPTModel with a deferred head, against its own loss and gradients."""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("megatron.core.models.gpt.gpt_model")

from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from cutefce.integrations import megatron
from tests.support.fused_calls import fused_calls
from tests.support.ranks import Ranks, started

VOCAB, SEQUENCE, BATCH = 192, 16, 2


@dataclass
class Step:
    """What a step gives on a rank."""

    losses: Tensor
    gradients: dict[str, Tensor]
    fused: int


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with started(2) as found:
        yield found


class NoTracker:
    """Stands for the tracker of random states, which needs a GPU."""

    def fork(self, *_: Any) -> Any:
        return nullcontext()


def on_the_cpu() -> None:
    """Let Megatron-Core run without a GPU."""
    torch.cuda.current_device = lambda: torch.device("cpu")
    for module in (tensor_parallel, tensor_parallel.random):
        module.get_cuda_rng_tracker = NoTracker


def parallel(tp: int) -> None:
    on_the_cpu()
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)


class Norm(torch.nn.LayerNorm):
    """A norm that Megatron-Core takes with sequence parallelism, without Apex."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps)


def config_of(**options: Any) -> TransformerConfig:
    return TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=torch.float32,
        **options,
    )


def model_of(tied: bool, **options: Any) -> Any:
    config = config_of(**options)
    layer = get_gpt_layer_local_spec()
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    layers = [layer] * config.num_layers
    spec = TransformerBlockSubmodules(layer_specs=layers, layer_norm=Norm)
    mtp = None
    if config.mtp_num_layers:
        mtp = get_gpt_mtp_block_spec(config, layer, use_transformer_engine=False)
    model = GPTModel(
        config,
        spec,
        VOCAB,
        max_sequence_length=SEQUENCE,
        share_embeddings_and_output_weights=tied,
        mtp_block_spec=mtp,
    )
    torch.manual_seed(parallel_state.get_tensor_model_parallel_rank())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if getattr(parameter, "tensor_model_parallel", False):
                parameter.normal_(std=0.08)
            elif "norm" not in name:  # the same on every rank
                generator = torch.Generator().manual_seed(len(name))
                parameter.normal_(std=0.08, generator=generator)
    return model.train()


def batch() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens, labels = torch.randint(VOCAB, (2, BATCH, SEQUENCE), generator=generator)
    positions = torch.arange(SEQUENCE).expand(BATCH, -1)
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE).triu(1).bool()
    return tokens, positions, mask, labels


def step(fused: bool, tp: int, tied: bool, options: dict[str, Any]) -> Step:
    """Return what two microbatches give on this rank."""
    parallel(tp)
    model = model_of(tied, **options)
    tokens, positions, mask, labels = batch()
    if fused:
        megatron.enable(model)
    loss_mask = torch.arange(BATCH * SEQUENCE).view(BATCH, SEQUENCE) % 5 != 0
    with fused_calls(megatron) as calls:
        for _ in range(2):
            losses = model(tokens, positions, mask, labels=labels)
            (losses * loss_mask).sum().div(25).backward()
    gradients = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
    return Step(losses.detach(), gradients, len(calls) // 2)


def assert_same(ours: Step, theirs: Step, calls: int = 1) -> None:
    assert (ours.fused, theirs.fused) == (calls, 0)
    torch.testing.assert_close(ours.losses, theirs.losses, rtol=1e-5, atol=0)
    assert ours.gradients.keys() == theirs.gradients.keys()
    for name, expected in theirs.gradients.items():
        error = (ours.gradients[name] - expected).abs().max()
        assert error <= 1e-5 * expected.abs().max() + 1e-8, name


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("tp", "sequence_parallel"), [(1, False), (2, False), (2, True)])
def test_gpt(ranks: Ranks, tp: int, sequence_parallel: bool, tied: bool) -> None:
    options = {"tensor_model_parallel_size": tp, "sequence_parallel": sequence_parallel}
    theirs = ranks.run(2, step, False, tp, tied, options)
    ours = ranks.run(2, step, True, tp, tied, options)
    for pair in zip(ours, theirs, strict=True):
        assert_same(*pair)


@pytest.mark.parametrize("tp", [1, 2])
def test_multi_token_prediction(ranks: Ranks, tp: int) -> None:
    options = {"tensor_model_parallel_size": tp, "mtp_num_layers": 2}
    theirs = ranks.run(2, step, False, tp, False, options)
    ours = ranks.run(2, step, True, tp, False, options)
    for pair in zip(ours, theirs, strict=True):
        assert_same(*pair, calls=3)
