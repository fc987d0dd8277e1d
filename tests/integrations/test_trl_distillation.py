"""TRL's distillation and GKD: three steps learn the same without logits as with TRL's own loss."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("trl")
import transformers
import trl
from datasets import Dataset
from trl.experimental.gkd import GKDConfig, GKDTrainer
from trl.trainer import distillation_trainer

import cutefce
from cutefce.integrations import options as setting
from cutefce.integrations import trl as integration
from cutefce.integrations.deferral import divergence as deferred_divergence
from tests.integrations.test_trl import ending, small_model, text, tokenizer, trainer_arguments
from tests.support.deferral import parameters
from tests.support.divergence import token_divergences
from tests.support.tiers import pairwise

OWN = distillation_trainer._chunked_divergence_loss


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """Keep TRL's functions; list the options of calls of `linear_divergence`."""
    found: list[dict[str, Any]] = []
    fused = cutefce.linear_divergence

    def counted(*arguments: Any, **options: Any) -> Any:
        found.append(options)
        return fused(*arguments, **options)

    for module in (integration, deferred_divergence):
        monkeypatch.setattr(module, "linear_divergence", counted)
    monkeypatch.setattr(distillation_trainer, "_chunked_divergence_loss", OWN)
    own_gkd = vars(GKDTrainer)["generalized_jsd_loss"]
    apply = trl.kernels.ChunkedLogProbFunction.apply
    monkeypatch.setattr(trl.kernels.ChunkedLogProbFunction, "apply", apply)
    yield found
    GKDTrainer.generalized_jsd_loss = own_gkd


def teacher_of(name: str, folder: Path) -> Any:
    """Return a teacher whose weights are not those of the student."""
    model = small_model(name, folder)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for x in model.parameters():
            x.add_(0.2 * torch.randn(x.shape, generator=generator))
    return model


def distillation(student: Any, teacher: Any, settings: dict[str, Any]) -> Any:
    return trl.DistillationTrainer(
        model=student,
        teacher_model=teacher,
        args=trl.DistillationConfig(max_completion_length=6, **settings),
        train_dataset=Dataset.from_list([{"prompt": text(i, 3 + i % 2)} for i in range(12)]),
        processing_class=tokenizer(),
    )


def gkd(student: Any, teacher: Any, settings: dict[str, Any]) -> Any:
    words = tokenizer()
    words.chat_template = "{% for m in messages %}{{ m['content'] + ' ' }}{% endfor %}"
    rows = [
        {
            "messages": [
                {"role": "user", "content": text(i, 3)},
                {"role": "assistant", "content": text(5 * i, 4 + i % 3)},
            ]
        }
        for i in range(12)
    ]
    return GKDTrainer(
        model=student,
        teacher_model=teacher,
        args=GKDConfig(max_new_tokens=5, **settings),
        train_dataset=Dataset.from_list(rows),
        processing_class=words,
    )


def train(
    make: Callable[..., Any],
    names: tuple[str, str],
    folder: Path,
    settings: dict[str, Any],
    prepare: Callable[[Any, Any], None],
) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """Return what three steps log, and the student's parameters after them."""
    transformers.set_seed(3)
    both = trainer_arguments(folder, steps=3, learning_rate=1.0)
    student, teacher = small_model(names[0], folder), teacher_of(names[1], folder)
    prepare(student, teacher)
    trainer = make(student, teacher, both | settings)
    before = parameters(trainer.model)
    trainer.train()
    logged, found = ending(trainer)
    assert max(float((before[key] - x).abs().max()) for key, x in found.items()) > 1e-2
    return logged, found


def compare(one: tuple[Any, dict[str, Tensor]], other: tuple[Any, dict[str, Tensor]]) -> None:
    """Assert that logs are equal to 5 digits, and parameters to 1e-6."""
    for ours, theirs in zip(one[0], other[0], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-6)
    assert one[1].keys() == other[1].keys()
    for key, x in one[1].items():
        torch.testing.assert_close(x, other[1][key], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("names", "settings"),
    [
        (("Llama", "Llama"), {"beta": 1.0}),
        pytest.param(
            *(("Cohere", "Gemma2"), {"beta": 0.0, "temperature": 0.8}), marks=pytest.mark.slow
        ),
        pytest.param(
            *(("Gemma2", "Phi"), {"beta": 0.3, "gradient_accumulation_steps": 2}),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_distillation_learns_the_same(
    names: tuple[str, str], settings: dict[str, Any], tmp_path: Path, calls: list[dict[str, Any]]
) -> None:
    expected = train(distillation, names, tmp_path, settings, lambda *_: None)
    assert not calls
    integration.enable()
    found = train(distillation, names, tmp_path, settings, lambda *_: None)
    assert len(calls) == 3 * settings.get("gradient_accumulation_steps", 1)
    compare(found, expected)


@pytest.mark.parametrize(
    ("names", "settings"),
    [
        (("Llama", "Llama"), {"lmbda": 0.0, "beta": 0.5}),
        pytest.param(*(("Cohere", "Gemma2"), {"lmbda": 1.0, "beta": 0.0}), marks=pytest.mark.slow),
        pytest.param(
            *(("Phi", "Llama"), {"lmbda": 0.0, "beta": 1.0, "seq_kd": True}),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_gkd_learns_the_same(
    names: tuple[str, str], settings: dict[str, Any], tmp_path: Path, calls: list[dict[str, Any]]
) -> None:
    expected = train(gkd, names, tmp_path, settings, lambda *_: None)
    assert not calls
    found = train(gkd, names, tmp_path, settings, integration.enable_gkd)
    assert len(calls) == 3
    compare(found, expected)


def heads(teacher_hidden: int = 24) -> tuple[torch.nn.Linear, torch.nn.Linear]:
    torch.manual_seed(0)
    student, teacher = (torch.nn.Linear(size, 97) for size in (16, teacher_hidden))
    for head in (student, teacher):
        head.weight.data.mul_(8)
    return student, teacher


@pairwise(
    reduction=["batchmean", "sum", "mean", "none"],
    items={"None": None, "number": 7, "tensor": torch.tensor(9.0)},
    labelled=[True, False],
)
def test_gkds_loss_is_the_same(
    reduction: str, items: Any, labelled: bool, calls: list[dict[str, Any]]
) -> None:
    """With gradients, for every reduction, those that are left to TRL included."""
    hidden, others = torch.randn(2, 9, 16), torch.randn(2, 9, 24)
    labels = torch.randint(97, (2, 8)).masked_fill(torch.rand(2, 8) < 0.4, -100)
    options: dict[str, Any] = {
        "labels": labels if labelled else None,
        "beta": 0.4,
        "temperature": 0.7,
    }
    options |= {"reduction": reduction, "num_items_in_batch": items}

    def run(student: Any, teacher: Any) -> list[Tensor]:
        h = hidden.clone().requires_grad_()
        logits = student(h)
        with torch.no_grad():
            target = teacher(others)
        loss = GKDTrainer.generalized_jsd_loss(logits[:, :-1, :], target[:, :-1, :], **options)
        given = [h, *student.parameters()]
        return [loss.detach(), *torch.autograd.grad(loss.sum(), given, allow_unused=True)]

    student, teacher = heads()
    expected = run(student, teacher)
    integration.enable_gkd(student, teacher)
    found = run(student, teacher)
    served = items is not None or reduction == "sum" or (reduction == "batchmean" and labelled)
    assert len(calls) == served
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=2e-5, atol=1e-6)


def test_gkd_has_the_budget_of_all_integrations(
    calls: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setting, "_chosen", {})
    setting.set_options(gradient="sampled", workspace="min")
    student, teacher = heads()
    integration.enable_gkd(student, teacher)
    logits = student(torch.randn(2, 9, 16))
    with torch.no_grad():
        target = teacher(torch.randn(2, 9, 24))
    GKDTrainer.generalized_jsd_loss(logits, target, reduction="sum")
    assert [call["workspace"] for call in calls] == ["min"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda s, t: (s.exp(), t), None),
        (lambda s, t: (s.tanh().tanh(), t), "linear_divergence: steps before it"),
        (lambda s, t: (s.transpose(1, 2), t.transpose(1, 2)), "linear_divergence: classes not in"),
        (lambda s, t: (s + 0 * s[:, :1], t), None),
        (lambda s, t: (s, [t, t + 0][0]), "linear_divergence: after the logits were made"),
        (lambda s, t: (s[:, :3], t[:, 1:2]), "linear_divergence: logits of other shapes"),
    ],
)
def test_what_is_left_to_logits(change: Any, reason: str | None) -> None:
    student, teacher = heads()
    integration.enable_gkd(student, teacher)
    logits = student(torch.randn(2, 5, 16))
    with torch.no_grad():
        target = teacher(torch.randn(2, 5, 24))
    given = change(logits, target)
    found = deferred_divergence.divergence_of(given[0], given[1], None)
    assert found is None
    if reason is not None:
        assert any(name.startswith(reason) for name in cutefce.deferral_report(student).fallbacks)


def test_logits_without_gradients_are_recorded_where_gradients_are_on() -> None:
    """Their cross entropy has no gradient, as that of a tensor made there."""
    student, _ = heads()
    cutefce.defer(student, evaluation=True)
    with torch.no_grad():
        logits = student(torch.randn(2, 5, 16))
    half = logits[:, 1:].float() / 2
    assert half.made is None and cutefce.deferral_report(student).fallbacks == {}
    loss = torch.nn.functional.cross_entropy(half.reshape(-1, 97), torch.arange(8))
    assert not loss.requires_grad


def test_a_weight_of_zero_3_is_left_to_trl(calls: list[dict[str, Any]]) -> None:
    student, teacher = heads()
    given = torch.randn(1, 4, 16), torch.randn(1, 4, 24), student.weight, teacher.weight
    expected = OWN(*given, torch.ones(1, 4), 0.5)
    integration.enable()
    teacher.weight.ds_id = 1  # type: ignore[attr-defined]
    found = distillation_trainer._chunked_divergence_loss(*given, torch.ones(1, 4), 0.5)
    assert not calls and all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


@pairwise(
    counted=[0.0, 0.6],
    items={"None": None, "number": 5, "tensor": torch.tensor(11)},
    autocast=[False, True],
    dtype=[torch.float32, torch.bfloat16],
)
def test_the_loss_is_as_accurate_as_that_of_trl(
    counted: float, items: Any, autocast: bool, dtype: torch.dtype
) -> None:
    """In each dtype, and with no token that counts: errors to float64 of the loss and gradients."""
    student, teacher = heads()
    mask = (torch.rand(2, 11) < counted).long()
    given = [torch.randn(2, 11, 16), torch.randn(2, 11, 24), student.weight, teacher.weight]
    biases = student.bias.detach(), teacher.bias.detach()
    rounded = torch.bfloat16 if autocast or dtype == torch.bfloat16 else torch.float32

    def run(function: Any, exact: bool = False) -> list[Tensor]:
        kind = torch.float64 if exact else dtype
        tensors = [x.detach().to(dtype).to(rounded if exact else dtype).to(kind) for x in given]
        leaves = [tensors[0].requires_grad_(), tensors[1], tensors[2].requires_grad_(), tensors[3]]
        own = [x.to(kind) if exact else x for x in biases]
        rest = mask, 0.3, items, *own, 0.7, 1.2, 3.0, None, 0.9
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast and not exact):
            loss, entropy, count = function(*leaves, *rest)
        gradients = torch.autograd.grad(loss, [leaves[0], leaves[2]])
        return [loss.detach(), entropy.detach(), count, *gradients]

    exact, theirs = run(reference, exact=True), run(OWN)
    integration.enable()
    ours = run(distillation_trainer._chunked_divergence_loss)
    for z, x, y in zip(exact, theirs, ours, strict=True):
        errors = [float((found.double() - z).abs().max()) for found in (x, y)]
        assert errors[1] <= 4 * errors[0] + 2 * torch.finfo(torch.float32).eps * float(
            z.abs().max()
        )


def reference(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return TRL's loss from all logits."""
    h_s, h_t, w_s, w_t, mask, beta, items, b_s, b_t, scale_s, scale_t, cap_s, _, temperature = given
    u = cap_s * torch.tanh((h_s @ w_s.T + b_s) * scale_s / cap_s) / temperature
    t = (h_t @ w_t.T + b_t) * scale_t / temperature
    divergences = token_divergences(u, t, divergence="jsd", beta=beta)
    log_p = u.log_softmax(-1)
    count = mask.sum()
    entropy = -((log_p.exp() * log_p).sum(-1) * mask).sum()
    return (
        (divergences * mask).sum() / (count.clamp(min=1) if items is None else items),
        entropy,
        count,
    )
