"""Torchtitan's llama3_debugmodel with our override, against its own chunked loss."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

pytest.importorskip("torchtitan.components.loss")
pytest.importorskip("torchtitan.trainer")

import spmd_types as spmd
from torchtitan.components.loss import BaseLoss, ChunkedLossWrapper, MSELoss
from torchtitan.config.override import OverrideConfig, apply_overrides
from torchtitan.distributed import ParallelDims, parallel_dims
from torchtitan.distributed import utils as dist_utils
from torchtitan.distributed.spmd_types import annotate_input_spmd_types
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.common.linear import Linear
from torchtitan.models.llama3.config_registry import llama3_debugmodel

from cutefce.integrations import torchtitan
from cutefce.integrations.report import Calls, integration_report
from tests.support import deferral
from tests.support.fused_calls import fused_calls, sampled_calls
from tests.support.ranks import Ranks

NAME = "cutefce.integrations.torchtitan.fused_loss"


@dataclass
class Step:
    """What a step gives on a rank."""

    loss: Tensor
    gradients: dict[str, Tensor]
    fused: int


def config_of(fused: bool, **parallelism: Any) -> Any:
    """Return the configuration of the debug model: two layers, float32, attention of torch."""
    config = llama3_debugmodel()
    config.training.mixed_precision_param = "float32"
    config.training.seq_len = 32
    for name, value in parallelism.items():
        assert hasattr(config.parallelism, name)
        setattr(config.parallelism, name, value)
    model = config.model_spec.model
    model.layers = model.layers[:2]
    for layer in model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    dist_utils.set_spmd_backend(config.parallelism.spmd_backend)
    model.update_from_config(config=config)
    if fused:
        apply_overrides(OverrideConfig(imports=[NAME]), config)
    return config


def model_of(config: Any, head: Any = None) -> Any:
    """Return the model, with a head whose configuration may be another one."""
    if head is not None:
        config.model_spec.model.lm_head = head
    model = config.model_spec.model.build()
    model._skip_lm_head = True  # as the trainer does beside a ChunkedLossWrapper
    return model


def drawn(model: Any, rank: int = 0) -> Any:
    """Return the model with this rank's part of the weights drawn; those of norms are ones."""
    torch.manual_seed(rank)
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device("cpu"))
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                local_of(parameter).normal_(std=0.05)
    return model.train()


def local_of(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens, labels = torch.randint(2048, (2, 2, 32), generator=generator)
    labels[0, :9] = -100
    return tokens, labels


def gradients(model: Any) -> dict[str, Tensor]:
    return {name: local_of(parameter.grad) for name, parameter in model.named_parameters()}


def assert_same(ours: Step, theirs: Step) -> None:
    assert (ours.fused, theirs.fused) == (1, 0)
    torch.testing.assert_close(ours.loss, theirs.loss, rtol=1e-5, atol=0)
    deferral.assert_same(ours.gradients, theirs.gradients)


def single_step(fused: bool, head: Any = None, tokens_valid: int | None = 55) -> Step:
    config = config_of(fused)
    model, loss_fn = drawn(model_of(config, head)), config.loss.build(compile_config=config.compile)
    loss_fn.set_lm_head(model.lm_head)
    tokens, labels = batch()
    divisor = None if tokens_valid is None else torch.tensor(tokens_valid)
    with fused_calls(torchtitan) as calls:
        loss, metrics = loss_fn(model(tokens), labels, divisor)
    assert metrics == {}
    loss.backward()
    return Step(loss.detach(), gradients(model), len(calls))


@pytest.mark.parametrize("tokens_valid", [55, None])
def test_the_debug_model(tokens_valid: int | None) -> None:
    before = integration_report().get(torchtitan.PATH, Calls())
    ours = single_step(True, tokens_valid=tokens_valid)
    assert integration_report()[torchtitan.PATH] == (before.fused + 1, 0)
    assert_same(ours, single_step(False, tokens_valid=tokens_valid))


def test_validation() -> None:
    config = config_of(True)
    model, losses = drawn(model_of(config)), []
    tokens, labels = batch()
    for loss_fn in (config.loss.build(), config_of(False).loss.build()):
        loss_fn.set_lm_head(model.lm_head)
        with torch.no_grad():
            losses.append(loss_fn(model(tokens), labels, torch.tensor(55))[0])
    assert not losses[0].requires_grad
    torch.testing.assert_close(*losses, rtol=1e-5, atol=0)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_a_head_that_scales_and_caps(softcap: float | None) -> None:
    muse = pytest.importorskip("torchtitan.models.muse_glimmer.model")
    head = muse.SoftCappedLinear.Config(
        in_features=256,
        out_features=2048,
        output_multiplier=0.7,
        output_soft_cap_temp=softcap,
        param_init=config_of(False).model_spec.model.lm_head.param_init,
    )
    ours = single_step(True, head)
    assert_same(ours, single_step(False, head))
    assert not torch.allclose(ours.loss, single_step(True).loss)


def test_a_head_with_bias() -> None:
    init = config_of(False).model_spec.model.lm_head.param_init
    init = {**init, "bias": torch.nn.init.zeros_}
    head = Linear.Config(in_features=256, out_features=2048, bias=True, param_init=init)
    ours = single_step(True, head)
    assert "lm_head.bias" in ours.gradients
    assert_same(ours, single_step(False, head))


def test_another_head_is_refused() -> None:
    class Doubled(Linear):
        @dataclass(kw_only=True, slots=True)
        class Config(Linear.Config):
            pass

        def forward(self, x: Tensor) -> Any:
            return 2 * super().forward(x)

    init = config_of(False).model_spec.model.lm_head.param_init
    head = Doubled.Config(in_features=256, out_features=2048, param_init=init)
    with pytest.raises(NotImplementedError, match=r"^lm_head: got Doubled, expected a Linear or"):
        single_step(True, head)


def test_another_loss_in_the_chunks_is_refused() -> None:
    config = ChunkedLossWrapper.Config(loss_fn=MSELoss.Config())
    with pytest.raises(NotImplementedError, match=r"^loss\.loss_fn: got MSELoss, expected Cross"):
        torchtitan.fused_loss(config).build()


def test_a_subclass_of_the_loss_is_refused() -> None:
    config = torchtitan.fused_loss(ChunkedLossWrapper.Config())
    with pytest.raises(NotImplementedError, match=r"^loss: got FusedLoss\.Config, expected"):
        torchtitan.fused_loss(config)


def test_a_changed_signature_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ChunkedLossWrapper, "__call__", BaseLoss.__init__)
    with pytest.raises(RuntimeError, match=r"got parameters \(self, config, compile_config\)"):
        torchtitan.fused_loss(ChunkedLossWrapper.Config())


def test_full_dtensor_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist_utils, "_spmd_backend", "full_dtensor")
    loss_fn = torchtitan.fused_loss(ChunkedLossWrapper.Config()).build()
    with pytest.raises(NotImplementedError, match=r"^parallelism\.spmd_backend: got 'full_dtensor"):
        loss_fn(torch.zeros(1, 2, 256), torch.zeros(1, 2, dtype=torch.long))


def parallel_step(fused: bool, parallelism: dict[str, Any], typechecked: bool = False) -> Step:
    """Return what two microbatches give on this rank, parallelized as torchtitan does."""
    parallel_dims.device_type = "cpu"  # it takes "cuda" where no accelerator is found
    config = config_of(fused, **parallelism)
    dims = ParallelDims.from_config(config.parallelism, world_size=2)
    tokens, labels = batch()
    rank = torch.distributed.get_rank()
    with dist_utils.get_spmd_context(parallel_dims=dims)():
        model = drawn(parallelized(model_of(config), config, dims), rank)
    loss_fn = config.loss.build(compile_config=config.compile)
    loss_fn.set_lm_head(model.lm_head)
    if dims.tp == 1:  # data parallel
        tokens, labels = tokens[rank : rank + 1], labels[rank : rank + 1]
    if dims.spmd_backend == "spmd_types":
        tokens, labels, _ = annotate_input_spmd_types(dims, tokens, labels, {})
    context = dist_utils.get_spmd_context(parallel_dims=dims, spmd_typechecking=typechecked)
    with context(), fused_calls(torchtitan) as calls:
        for _ in range(2):
            loss, _ = loss_fn(model(tokens), labels, torch.tensor(55))
            with spmd.no_typecheck():
                loss.backward()
    return Step(local_of(loss.detach()), gradients(model), len(calls) // 2)


def parallelized(model: Any, config: Any, dims: ParallelDims) -> Any:
    if dims.spmd_backend == "spmd_types":  # beside FSDP2 it needs a later torch than 2.13
        model.parallelize(dims)
        return model
    config.model_spec.parallelize_fn(
        model,
        parallel_dims=dims,
        training=config.training,
        parallelism=config.parallelism,
        compile_config=config.compile,
        ac_config=None,
        dump_folder="",
    )
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # Gloo has no other
    return model


@pytest.mark.slow
@pytest.mark.parametrize("reshard", ["always", "default", "never"])
def test_fsdp2(two: Ranks, reshard: str) -> None:
    parallelism = {"spmd_backend": "partial_dtensor", "fsdp_reshard_after_forward": reshard}
    theirs = two.run(2, parallel_step, False, parallelism)
    ours = two.run(2, parallel_step, True, parallelism)
    for pair in zip(ours, theirs, strict=True):
        assert_same(*pair)


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize(
    ("backend", "typechecked"),
    [("spmd_types", False), ("spmd_types", True), ("partial_dtensor", False)],
)
def test_tensor_parallel(
    two: Ranks, backend: str, sequence_parallel: bool, typechecked: bool
) -> None:
    parallelism = {
        "spmd_backend": backend,
        "tensor_parallel_degree": 2,
        "enable_sequence_parallel": sequence_parallel,
    }
    theirs = two.run(2, parallel_step, False, parallelism, typechecked)
    ours = two.run(2, parallel_step, True, parallelism, typechecked)
    for pair in zip(ours, theirs, strict=True):
        assert_same(*pair)


def test_gradients_are_sampled_if_the_setting_says_so() -> None:
    with sampled_calls(torchtitan):
        single_step(True)
