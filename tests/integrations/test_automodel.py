"""Automodel's own path to a loss, with ours as `_target_`, against its chunked one."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("nemo_automodel")
pytest.importorskip("transformers")

import transformers
from nemo_automodel.components.loss import build_loss_module
from nemo_automodel.components.loss.chunked_ce import ChunkedCrossEntropy
from nemo_automodel.components.loss.utils import calculate_loss, prepare_lm_weight
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from bench.harness.tiny_models import VOCAB, build, tiny_config
from cutefce.integrations import automodel
from cutefce.integrations.report import Calls, integration_report
from tests.support import deferral
from tests.support.deferral import gradients
from tests.support.fused_calls import fused_calls
from tests.support.ranks import Ranks, group


@pytest.fixture(autouse=True)
def calls() -> Iterator[list[dict[str, Any]]]:
    """Yield the options of the fused calls."""
    with fused_calls(automodel) as found:
        yield found


def tiny(name: str, **options: Any) -> Any:
    return build(tiny_config(name, **options)).train()


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCAB, (2, 12), generator=generator)
    labels = torch.randint(VOCAB, (2, 12), generator=generator)
    labels[0, :5] = -100
    return ids, labels


def loss_of(loss_fn: Any, model: Any, **options: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss and gradients by the path of Automodel's recipe."""
    ids, labels = batch()
    out = model(ids, logits_to_keep=1, output_hidden_states=True)
    loss = calculate_loss(
        loss_fn,
        logits=out.logits,
        labels=labels,
        model=model,
        hidden_states=out.hidden_states,
        **options,
    )
    if loss.ndim:
        loss.square().sum().backward()
    else:
        loss.backward()
    return loss.detach(), gradients(model)


def assert_same(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-5, atol=1e-7)
    deferral.assert_same(ours[1], theirs[1])


class HiddenModel(torch.nn.Module):
    """A model whose output has the final hidden states alone, as Automodel's recipe takes them."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.inner, self.config = model, model.config

    def get_output_embeddings(self) -> Any:
        return self.inner.get_output_embeddings()

    def forward(self, ids: Tensor, **_: Any) -> Any:
        hidden = self.inner.model(ids).last_hidden_state
        logits = self.inner.lm_head(hidden[:, -1:])
        return transformers.modeling_outputs.CausalLMOutput(logits=logits, hidden_states=hidden)


@pytest.mark.parametrize("reduction", ["sum", "mean", "none"])
def test_reductions(calls: list[Any], reduction: str) -> None:
    chunked = ChunkedCrossEntropy(compile=False, chunk_len=7, reduction=reduction)
    ours = build_loss_module(automodel.CutefceLoss, reduction=reduction)
    assert isinstance(ours, automodel.CutefceLoss)
    expected = loss_of(chunked, HiddenModel(tiny("llama")))
    before = integration_report().get(automodel.PATH, Calls())
    assert_same(loss_of(ours, HiddenModel(tiny("llama"))), expected)
    assert len(calls) == 1
    assert integration_report()[automodel.PATH] == (before.fused + 1, 0)


@pytest.mark.parametrize("tokens", [19, 50, 0, None])
@pytest.mark.parametrize("weighted", [False, True])
def test_token_counts_and_weights(calls: list[Any], tokens: int | None, weighted: bool) -> None:
    options: dict[str, Any] = {"num_label_tokens": tokens}
    if weighted:
        options["loss_weights"] = torch.linspace(0, 2, 24, dtype=torch.float64).view(2, 12)
    chunked = ChunkedCrossEntropy(compile=False, chunk_len=7)
    expected = loss_of(chunked, HiddenModel(tiny("llama")), **options)
    ours = build_loss_module(automodel.CutefceLoss)
    assert_same(loss_of(ours, HiddenModel(tiny("llama")), **options), expected)
    assert len(calls) == 1


def test_another_ignore_index(calls: list[Any]) -> None:
    """Automodel maps -100 to it, so class 3 is ignored too."""
    chunked = ChunkedCrossEntropy(compile=False, chunk_len=7, ignore_index=3)
    expected = loss_of(chunked, HiddenModel(tiny("llama")))
    ours = build_loss_module(automodel.CutefceLoss, ignore_index=3)
    assert_same(loss_of(ours, HiddenModel(tiny("llama"))), expected)
    assert calls[0]["ignore_index"] == 3


def test_mask_and_packed_hidden_states(calls: list[Any]) -> None:
    torch.manual_seed(3)
    hidden, weight = torch.randn(1, 12, 32), torch.randn(VOCAB, 32)
    labels, mask = torch.randint(VOCAB, (12,)), torch.arange(12) % 3
    chunked = ChunkedCrossEntropy(compile=False)(hidden, labels, weight, mask=mask)
    ours = automodel.CutefceLoss()(hidden, labels, weight, mask=mask)
    torch.testing.assert_close(ours, chunked, rtol=1e-5, atol=0)
    assert len(calls) == 1


def test_the_softcap_of_the_configuration(calls: list[Any]) -> None:
    """Automodel's chunked loss refuses such models: compare with the model's own logits."""
    model = tiny("gemma2", final_logit_softcapping=2.0)
    ids, labels = batch()
    loss = torch.nn.functional.cross_entropy(model(ids).logits.flatten(0, 1), labels.flatten())
    loss.backward()
    expected = loss.detach(), {f"inner.{name}": x for name, x in gradients(model).items()}
    model = tiny("gemma2", final_logit_softcapping=2.0)
    loss_fn = build_loss_module(automodel.CutefceLoss)
    assert_same(loss_of(loss_fn, HiddenModel(model), num_label_tokens=19), expected)
    assert calls[0]["softcap"] == 2.0


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [("cohere", "logit_scale", 0.0625), ("granite", "logits_scaling", 8.0)],
)
def test_scaled_logits_are_refused(name: str, key: str, value: float) -> None:
    model = HiddenModel(tiny(name, **{key: value}))
    with pytest.raises(NotImplementedError, match=rf"^{key}: got {value} in the model's config"):
        loss_of(automodel.CutefceLoss(), model)


def test_a_head_with_bias_is_refused() -> None:
    model = tiny("llama")
    model.lm_head = torch.nn.Linear(32, VOCAB)
    with pytest.raises(NotImplementedError, match=r"^lm_head: got Linear.*without bias"):
        loss_of(automodel.CutefceLoss(), HiddenModel(model))


def test_another_reduction_is_named() -> None:
    with pytest.raises(ValueError, match=r"^reduction: got 'avg', expected one of \('mean'"):
        automodel.CutefceLoss(reduction="avg")


def test_a_count_beside_mean_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^reduction: got 'mean', expected 'sum' beside"):
        loss_of(
            automodel.CutefceLoss(reduction="mean"), HiddenModel(tiny("llama")), num_label_tokens=3
        )


def sharded() -> list[Any]:
    """Return loss and gradients of both losses, on a head that FSDP2 has sharded, on a rank."""
    results = []
    for loss_fn in (ChunkedCrossEntropy(compile=False), automodel.CutefceLoss()):
        model = HiddenModel(tiny("llama"))
        mesh = init_device_mesh("cpu", (2,))
        fully_shard(model.inner.lm_head, mesh=mesh)
        fully_shard(model, mesh=mesh)
        ranks = group(2)
        ids, labels = batch()
        half = torch.distributed.get_rank(ranks)
        out = model(ids[half : half + 1])
        weight = prepare_lm_weight(loss_fn, model, grad_reduce_group=ranks)
        with fused_calls(automodel) as calls:
            loss = calculate_loss(
                loss_fn,
                labels=labels[half : half + 1],
                model=model,
                hidden_states=out.hidden_states,
                lm_weight=weight,
                num_label_tokens=19,
                grad_reduce_group=ranks,
            )
        assert len(calls) == (type(loss_fn) is automodel.CutefceLoss)
        (loss * 2).backward()
        found: dict[str, Any] = gradients(model)
        named = {name: x.full_tensor() for name, x in found.items()}
        results.append((loss.detach(), named))
    return results


@pytest.mark.slow
def test_a_head_sharded_by_fsdp2(two: Ranks) -> None:
    for theirs, ours in two.run(2, sharded):
        assert_same(ours, theirs)


def test_gradients_are_sampled_if_asked_for(calls: list[Any]) -> None:
    found = []
    for more in ({"gradient": "sampled", "samples": 32}, {}):
        loss_fn = build_loss_module(automodel.CutefceLoss, **more)
        found.append(loss_of(loss_fn, HiddenModel(tiny("llama"))))
    assert [call["gradient"] for call in calls] == ["sampled", "exact"]
    assert calls[0]["samples"] == 32
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-6, atol=0)
