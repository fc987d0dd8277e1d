"""Megatron-Core's GPTModel with a deferred head, against its own loss and gradients."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

pytest.importorskip("megatron.core.models.gpt.gpt_model")

from megatron import core
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import layers as parallel_layers
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from cutefce.integrations import megatron
from cutefce.integrations.report import Calls, integration_report
from tests.support import deferral
from tests.support.deferral import gradients
from tests.support.fused_calls import fused_calls, sampled_calls
from tests.support.ranks import Ranks
from tests.support.tiers import rest_slow

VOCAB, SEQUENCE, BATCH = 192, 16, 2
LAYOUTS = [
    (2, True),
    pytest.param(1, False, marks=pytest.mark.slow),
    pytest.param(2, False, marks=pytest.mark.slow),
]
"""Ranks of tensor parallelism, and whether sequences are parallel, too."""


@dataclass
class Step:
    """What a step gives on a rank."""

    losses: Tensor
    gradients: dict[str, Tensor]
    fused: int
    metrics: dict[str, Tensor] = field(default_factory=dict)
    """What multi-token prediction logs: losses and, from 0.19, acceptance counts."""


class NoTracker:
    """Stands for the tracker of random states, which needs a GPU."""

    def fork(self, *_: Any) -> Any:
        return nullcontext()


def on_the_cpu(replace: Callable[[Any, str, Any], None] = setattr) -> None:
    """Let Megatron-Core run without a GPU."""
    replace(torch.cuda, "current_device", lambda: torch.device("cpu"))
    for module in (tensor_parallel, tensor_parallel.random):
        replace(module, "get_cuda_rng_tracker", NoTracker)


def parallel(tp: int) -> None:
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


class WeightGradientExtension:
    """Stands for the extension of Megatron-Core that adds dW to `main_grad`, which needs a GPU."""

    def wgrad_gemm_accum_fp32(self, x: Tensor, gradient: Tensor, main_grad: Tensor) -> None:
        main_grad.addmm_(gradient.t(), x)


def step(
    fused: bool, tp: int, tied: bool, options: dict[str, Any], into_main_grad: bool = False
) -> Step:
    """Return what two microbatches give on this rank; gradients are those of `main_grad` if so."""
    on_the_cpu()
    parallel(tp)
    if options.get("gradient_accumulation_fusion"):
        vars(parallel_layers)["fused_weight_gradient_mlp_cuda"] = WeightGradientExtension()
        vars(parallel_layers)["_grad_accum_fusion_available"] = True
    model = model_of(tied, **options)
    if into_main_grad:
        add_main_grads(model)
    tokens, positions, mask, labels = batch()
    if fused:
        megatron.enable(model)
    counted = torch.ones(BATCH, SEQUENCE)
    for label, columns in ((-1, slice(3)), (-100, slice(6, 9))):
        labels[0, columns], counted[0, columns] = label, 0
    with fused_calls(megatron) as calls:
        for _ in range(2):
            losses = counted * model(tokens, positions, mask, labels=labels, loss_mask=counted)
            losses.sum().div(26).backward()
            if into_main_grad:
                after_backward(model)
    logged = {k: x for k, x in MTPLossLoggingHelper.tracker.items() if isinstance(x, Tensor)}
    MTPLossLoggingHelper.tracker.clear()
    assert bool(logged) == bool(options.get("mtp_num_layers"))
    found = gradients(model)
    if into_main_grad:
        assert not found
        found = {name: vars(x)["main_grad"] for name, x in model.named_parameters()}
    return Step(losses.detach(), found, len(calls) // 2, logged)


def add_main_grads(model: Any) -> None:
    """Give every parameter what Megatron's DistributedDataParallel gives it."""
    for parameter in model.parameters():
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
        parameter.grad_added_to_main_grad = False


def after_backward(model: Any) -> None:
    """Do what its hooks do after each backward."""
    for parameter in model.parameters():
        added = parameter.grad_added_to_main_grad
        assert parameter.grad is not None, "hooks run where there is a gradient"
        if not added or getattr(parameter, "zero_out_wgrad", False):
            parameter.main_grad.add_(parameter.grad)
        parameter.grad, parameter.grad_added_to_main_grad = None, False


def assert_same(ours: Step, theirs: Step, calls: int = 1) -> None:
    assert (ours.fused, theirs.fused) == (calls, 0)
    torch.testing.assert_close(ours.losses, theirs.losses, rtol=1e-5, atol=0)
    torch.testing.assert_close(ours.metrics, theirs.metrics, rtol=1e-5, atol=0)
    deferral.assert_same(ours.gradients, theirs.gradients)


@pytest.mark.parametrize("tied", rest_slow([False, True]))
@pytest.mark.parametrize(("tp", "sequence_parallel"), LAYOUTS)
def test_gpt(two: Ranks, tp: int, sequence_parallel: bool, tied: bool) -> None:
    options = {"tensor_model_parallel_size": tp, "sequence_parallel": sequence_parallel}
    theirs = two.run(2, step, False, tp, tied, options)
    ours = two.run(2, step, True, tp, tied, options)
    for pair in zip(ours, theirs, strict=True):
        assert_same(*pair)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("tp", "sequence_parallel"), LAYOUTS)
def test_main_grad(two: Ranks, tp: int, sequence_parallel: bool, tied: bool) -> None:
    """Megatron-Core's own fused accumulation, and its plain one, give the same sums."""
    options = {"tensor_model_parallel_size": tp, "sequence_parallel": sequence_parallel}
    plain = two.run(2, step, False, tp, tied, options, True)
    options["gradient_accumulation_fusion"] = True
    theirs = two.run(2, step, False, tp, tied, options, True)
    ours = two.run(2, step, True, tp, tied, options, True)
    for own, fused, unfused in zip(ours, theirs, plain, strict=True):
        assert_same(own, fused)
        assert_same(own, unfused)


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2])
def test_multi_token_prediction(two: Ranks, tp: int) -> None:
    options = {"tensor_model_parallel_size": tp, "mtp_num_layers": 2}
    theirs = two.run(2, step, False, tp, False, options)
    ours = two.run(2, step, True, tp, False, options)
    for pair in zip(ours, theirs, strict=True):
        assert_same(*pair, calls=3)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Let this process be the only rank."""
    on_the_cpu(monkeypatch.setattr)
    store = f"file://{tmp_path}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    parallel(1)
    yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def single(model: Any, **options: Any) -> Step:
    tokens, positions, mask, labels = batch()
    with fused_calls(megatron) as calls:
        losses = model(tokens, positions, mask, labels=labels, **options)
    losses.square().sum().backward()
    return Step(losses.detach(), gradients(model), len(calls))


@pytest.mark.usefixtures("alone")
def test_megatrons_own_fused_loss() -> None:
    """It rounds gradients to bfloat16: compare those with its unfused loss."""
    options = {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "native"}
    with torch.compiler.set_stance("force_eager"):  # its steps are compiled for 20 seconds
        theirs = single(model_of(False, **options))
    ours = model_of(False, **options)
    megatron.enable(ours)
    found = single(ours)
    torch.testing.assert_close(found.losses, theirs.losses, rtol=1e-5, atol=0)
    assert_same(found, single(model_of(False)))


@pytest.mark.usefixtures("alone")
def test_without_labels_there_are_logits() -> None:
    theirs, ours = model_of(False), model_of(False)
    megatron.enable(ours)
    tokens, positions, mask, _ = batch()
    found = []
    for model in (ours, theirs):
        logits = model(tokens, positions, mask)
        logits.square().mean().backward()
        found.append((logits, gradients(model)))
    torch.testing.assert_close(*found, rtol=0, atol=0)
    assert found[0][0].shape == (BATCH, SEQUENCE, VOCAB)


@pytest.mark.usefixtures("alone")
def test_gathered_logits_are_made() -> None:
    model = model_of(False)
    megatron.enable(model)
    tokens, positions, mask, _ = batch()
    with torch.no_grad(), fused_calls(megatron) as calls:
        logits = model.eval()(tokens, positions, mask, runtime_gather_output=True)
    assert isinstance(logits, Tensor) and not calls


@pytest.mark.usefixtures("alone")
def test_scaled_logits() -> None:
    """MuP multiplies what the head returns; 0.16 does not, so do it around the head."""
    found: dict[bool, Step] = {}
    for fused in (True, False):
        model = model_of(False)
        if fused:
            megatron.enable(model)
        loss_of = model.compute_language_model_loss
        model.compute_language_model_loss = lambda y, z, own=loss_of: own(y, z * 0.5)
        found[fused] = single(model)
    assert_same(found[True], found[False])


@pytest.mark.usefixtures("alone")
def test_a_function_of_the_logits_makes_them_once() -> None:
    """As the acceptance counts of multi-token prediction do, after the loss."""
    model = model_of(False)
    megatron.enable(model)
    hidden = torch.randn(SEQUENCE, BATCH, 32)
    deferred, bias = model.output_layer(hidden)
    expected = hidden @ model.output_layer.weight.T * 2
    deferred = deferred * 2
    logits: Any = deferred  # it stands for a tensor
    assert bias is None and isinstance(deferred, megatron.DeferredLogits)
    with torch.no_grad():
        torch.testing.assert_close(torch.argmax(logits, dim=-1), expected.argmax(-1))
        torch.testing.assert_close(torch.argmax(input=logits, dim=-1), expected.argmax(-1))
        torch.testing.assert_close(torch.cat([logits, expected]), torch.cat([expected] * 2))
        assert deferred.size(-1) == VOCAB
        assert deferred.logits() is deferred.logits()
        assert not deferred.logits().requires_grad
    torch.testing.assert_close(deferred.logits(), expected)
    torch.testing.assert_close(deferred * torch.tensor(3.0), 3 * expected)
    assert deferred.logits().requires_grad


@pytest.mark.usefixtures("alone")
def test_a_wrapped_model() -> None:
    theirs, ours = model_of(False), model_of(False)
    megatron.enable(SimpleNamespace(module=SimpleNamespace(module=ours)))
    assert_same(single(ours), single(theirs))


@pytest.mark.usefixtures("alone")
def test_losses_are_counted() -> None:
    path = f"{LanguageModule.__module__}:LanguageModule.compute_language_model_loss"
    before = integration_report().get(path, Calls())
    model = model_of(False)
    megatron.enable(model)
    single(model)
    model.compute_language_model_loss(batch()[-1], torch.randn(SEQUENCE, BATCH, VOCAB))
    after = integration_report()[path]
    assert after.fused > before.fused and after.own == before.own + 1


@pytest.mark.usefixtures("alone")
def test_a_stage_without_head_stays_as_it_is() -> None:
    layer = get_gpt_layer_local_spec()
    model = GPTModel(config_of(), layer, VOCAB, SEQUENCE, post_process=False)
    megatron.enable(model)
    assert "compute_language_model_loss" not in vars(model)


@pytest.mark.usefixtures("alone")
def test_wrong_uses() -> None:
    model = model_of(False)
    megatron.enable(model)
    with pytest.raises(RuntimeError, match=r"^model: its head or loss is replaced already"):
        megatron.enable(model)
    with pytest.raises(TypeError, match=r"^model: got Linear, expected a LanguageModule"):
        megatron.enable(torch.nn.Linear(2, 2))
    model = model_of(False)
    model.output_layer = torch.nn.Linear(32, VOCAB)
    with pytest.raises(TypeError, match=r"^output_layer: got Linear, expected a ColumnParallel"):
        megatron.enable(model)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("name", "change"),
    [
        (
            "defer_embedding_wgrad_compute",
            lambda x: setattr(x.config, "defer_embedding_wgrad_compute", True),
        ),
        ("disable_grad_reduce", lambda x: setattr(x, "disable_grad_reduce", True)),
        ("add_bias_linear", lambda x: setattr(x, "bias", torch.nn.Parameter(torch.ones(VOCAB)))),
        ("gtp_remat_size", lambda x: setattr(x, "gtp_remat_size", 2)),
    ],
)
def test_unserved_options(name: str, change: Callable[[Any], None]) -> None:
    model = model_of(False)
    change(model.output_layer)
    with pytest.raises(NotImplementedError, match=rf"^{name}: on in the output layer, expected"):
        megatron.enable(model)


@pytest.mark.usefixtures("alone")
def test_weights_that_fsdp_shards_are_refused() -> None:
    model = model_of(False)
    megatron.enable(model)
    model.output_layer.weight.__fsdp_param__ = True
    with pytest.raises(NotImplementedError, match=r"^output_layer: got a weight that Column"):
        single(model)
    model = model_of(False)
    megatron.enable(model)
    fully_shard(model.output_layer, mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(NotImplementedError, match=r"^output_layer: got a weight that FSDPColumn"):
        single(model)


@pytest.mark.usefixtures("alone")
def test_an_untested_version_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "__version__", "0.99.0")
    with pytest.warns(UserWarning, match=r"megatron-core: got version 0\.99\.0; .* 0\.16\.1"):
        megatron.enable(model_of(False))


@pytest.mark.usefixtures("alone")
def test_a_changed_signature_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def loss_of(self: Any, labels: Tensor, logits: Tensor, weights: Tensor) -> None:
        pass

    model = model_of(False)
    monkeypatch.setattr(LanguageModule, "compute_language_model_loss", loss_of)
    with pytest.raises(RuntimeError, match=r"got parameters \(self, labels, logits, weights\)"):
        megatron.enable(model)


@pytest.mark.usefixtures("alone")
def test_the_linear_implementation_is_refused() -> None:
    model = model_of(False)
    model.config.cross_entropy_loss_fusion = True
    model.config.cross_entropy_fusion_impl = "linear"
    with pytest.raises(ValueError, match=r"^cross_entropy_fusion_impl: got 'linear', expected"):
        megatron.enable(model)


def test_gradients_are_sampled_if_the_setting_says_so() -> None:
    group = SimpleNamespace(size=lambda: 1)
    head = SimpleNamespace(
        gradient_accumulation_fusion=False, tp_group=group, sequence_parallel=False
    )
    with sampled_calls(megatron):
        megatron.losses(head, torch.randn(5, 2, 8), torch.randn(99, 8), torch.ones(2, 5).long(), 1)
