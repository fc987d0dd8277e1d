"""slime, which no package index has: its functions' signatures, and values from all logits."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

pytest.importorskip("megatron.core.models.gpt.gpt_model")

from megatron.core import parallel_state, tensor_parallel
from megatron.core.tensor_parallel import layers as parallel_layers
from megatron.core.transformer.module import Float16Module

from cutefce.integrations import slime as integration
from cutefce.integrations.report import integration_report
from tests.integrations.test_megatron import (
    LAYOUTS,
    SEQUENCE,
    VOCAB,
    WeightGradientExtension,
    add_main_grads,
    after_backward,
    batch,
    model_of,
    on_the_cpu,
    parallel,
)
from tests.support import deferral
from tests.support.fused_calls import fused_calls
from tests.support.ranks import Ranks

T = 0.7


def calculate_log_probs_and_entropy(
    logits: Tensor,
    tokens: Tensor,
    tp_group: dist.ProcessGroup,
    with_entropy: bool = False,
    chunk_size: int = -1,
    log_prob_keep_mask: Tensor | None = None,
    with_entropy_grad: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Return values of all logits; more parameters than eight: they are those of slime 0.3.1."""
    assert isinstance(logits, Tensor) and logits.dtype == torch.float32
    every = tensor_parallel.gather_from_tensor_model_parallel_region(logits, group=tp_group)
    log_p = every.log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1) if with_entropy else None
    if entropy is not None and not with_entropy_grad:
        entropy = entropy.detach()
    if log_prob_keep_mask is not None:
        log_p = every.masked_fill(~log_prob_keep_mask, -1e9).log_softmax(-1)
    return log_p.gather(-1, tokens[:, None]), entropy


def get_model_provider_func(args: Any, role: str = "actor") -> Callable[..., Any]:
    """Return what makes a model, with the signature of slime 0.3.1."""

    def provider(pre_process: bool = True, post_process: bool = True) -> Any:
        model = model_of(args.tied, **args.options)
        if role == "critic":
            model.output_layer = torch.nn.Linear(32, 1)
        return model

    return provider


def modules() -> dict[str, ModuleType]:
    """Return stand-ins for slime's modules, by their names."""
    names = "slime", "slime.backends", "slime.backends.megatron_utils"
    found: dict[str, Any] = {name: ModuleType(name) for name in names}
    for path, function in (
        (integration.VALUES, calculate_log_probs_and_entropy),
        (integration.PROVIDER, get_model_provider_func),
    ):
        name, _, last = path.partition(":")
        found[name] = ModuleType(name)
        vars(found[name])[last] = function
    user: Any = ModuleType(f"{names[-1]}.model")
    user.get_model_provider_func = get_model_provider_func
    return found | {user.__name__: user}


class Slime:
    """slime's modules, which are in the place of installed ones."""

    def __init__(self, modules: dict[str, ModuleType]) -> None:
        self.modules = modules

    def function(self, path: str) -> Any:
        module, _, name = path.partition(":")
        return vars(self.modules[module])[name]

    def model(self, **args: Any) -> Any:
        """Return an actor, as slime makes one."""
        path = f"{integration.PROVIDER.partition(':')[0]}:get_model_provider_func"
        chosen = mock.Mock(**{"tied": False, "options": {}, **args})
        return self.function(path.replace("model_provider:", "model:"))(chosen)()

    def values(self, logits: Any, tokens: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and entropies of logits (1, T, V), as slime asks for them."""
        assert logits.dtype == torch.float32 and logits.size(0) == 1 and len(logits.shape) == 3
        rows = (logits.squeeze(0) / T).contiguous()
        assert rows.size(0) == len(tokens) and rows.device == tokens.device
        group = parallel_state.get_tensor_model_parallel_group()
        share = VOCAB // group.size()
        assert rows.size(-1) == share
        found = self.function(integration.VALUES)(
            rows, tokens, group, with_entropy=True, chunk_size=4, **options
        )
        return found[0].squeeze(-1), found[1]


@contextmanager
def installed(enabled: bool) -> Iterator[Slime]:
    """Yield slime's modules, with the integration enabled or not."""
    slime = Slime(modules())
    version = mock.patch("importlib.metadata.version", lambda _: "0.3.1")
    with mock.patch.dict(sys.modules, slime.modules), version:
        if enabled:
            integration.enable()
        yield slime


def step(
    enabled: bool, tp: int, options: dict[str, Any], tied: bool = False, accumulate: bool = False
) -> Any:
    """Return the values of one packed sequence, the gradients, and the number of fused calls."""
    on_the_cpu()
    parallel(tp)
    if accumulate:
        options = options | {"gradient_accumulation_fusion": True}
        vars(parallel_layers)["fused_weight_gradient_mlp_cuda"] = WeightGradientExtension()
        vars(parallel_layers)["_grad_accum_fusion_available"] = True
    tokens, positions, mask, labels = (x[:1] for x in batch())
    with installed(enabled) as slime, fused_calls(integration, "linear_log_probs") as calls:
        model = slime.model(options=options, tied=tied)
        if accumulate:
            add_main_grads(model)
        log_probs, entropy = slime.values(model(tokens, positions, mask), labels[0])
        factors = torch.linspace(-1, 1, SEQUENCE)
        (factors * (log_probs - 0.1 * entropy)).sum().backward()
        gradients = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
        if accumulate:
            after_backward(model)
            gradients = {name: vars(x)["main_grad"] for name, x in model.named_parameters()}
    assert integration.PROVIDER not in integration_report()
    return [log_probs.detach(), entropy.detach()], gradients, len(calls)


def assert_same(ours: Any, theirs: Any) -> None:
    assert (ours[2], theirs[2]) == (1, 0)
    for x, y in zip(ours[0], theirs[0], strict=True):
        assert x.dtype == y.dtype == torch.float32
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)
    deferral.assert_same(ours[1], theirs[1])


@pytest.mark.parametrize(("tp", "sequence_parallel"), LAYOUTS)
def test_an_actor_has_the_values_of_all_logits(
    two: Ranks, tp: int, sequence_parallel: bool
) -> None:
    options = {"tensor_model_parallel_size": tp, "sequence_parallel": sequence_parallel}
    theirs, ours = (two.run(2, step, enabled, tp, options) for enabled in (False, True))
    for pair in zip(ours, theirs, strict=True):
        assert_same(*pair)


@pytest.mark.slow
def test_main_grad_and_tied_heads(two: Ranks) -> None:
    for accumulate, tied in ((True, False), (False, True)):
        theirs, ours = (
            two.run(2, step, enabled, 1, {}, tied, accumulate) for enabled in (False, True)
        )
        for pair in zip(ours, theirs, strict=True):
            assert_same(*pair)


def other_uses() -> None:
    """Assert what is not fused, on one rank."""
    on_the_cpu()
    parallel(1)
    tokens, positions, mask, labels = (x[:1] for x in batch())
    keep = torch.rand(SEQUENCE, VOCAB) < 0.5
    with installed(False) as slime:
        own = slime.model()
        expected = own(tokens, positions, mask)
        masked = slime.values(expected, labels[0], log_prob_keep_mask=keep)
        critic = slime.function(integration.PROVIDER)(mock.Mock(tied=False, options={}), "critic")
    with installed(True) as slime, fused_calls(integration, "linear_log_probs") as calls:
        model = slime.model()
        found = slime.values(model(tokens, positions, mask), labels[0], log_prob_keep_mask=keep)
        torch.testing.assert_close(found, masked)
        logits = model(tokens, positions, mask)
        torch.testing.assert_close(logits.sum(), expected.sum())
        torch.testing.assert_close(logits[0, 1:3], expected[0, 1:3])
        torch.testing.assert_close(logits.squeeze(0)[1:3], expected[0, 1:3])
        torch.testing.assert_close(logits.transpose(1, 2), expected.transpose(1, 2))
        plain = slime.values(expected, labels[0])
        torch.testing.assert_close(slime.values(logits, labels[0]), plain)
        assert len(calls) == 1
        with torch.no_grad():
            values = slime.values(model(tokens, positions, mask), labels[0])
        assert not values[0].requires_grad
        metric = slime.values(model(tokens, positions, mask), labels[0], with_entropy_grad=False)
        assert metric[0].requires_grad and not metric[1].requires_grad
        losses = model(tokens, positions, mask, labels=labels)
        torch.testing.assert_close(losses, own(tokens, positions, mask, labels=labels))
        assert type(critic().output_layer) is torch.nn.Linear


def test_what_is_not_fused_is_that_of_logits(two: Ranks) -> None:
    two.run(2, other_uses)


def in_16_bits() -> None:
    """Assert that an actor in bfloat16 has values in float32, of logits in float32."""
    on_the_cpu()
    parallel(1)
    tokens, positions, mask, labels = (x[:1] for x in batch())
    found = []
    for enabled in (False, True):
        with installed(enabled) as slime:
            model = slime.model(options={"bf16": True})
            module = Float16Module(model.config, model)
            found.append(slime.values(module(tokens, positions, mask), labels[0]))
    assert all(x.dtype == torch.float32 for x in found[1])
    torch.testing.assert_close(found[1], found[0], rtol=1e-2, atol=1e-2)


def test_an_actor_in_bfloat16_has_values_in_float32(two: Ranks) -> None:
    two.run(2, in_16_bits)
