"""Liger: its patched forwards and the options of its function, without one of its kernels."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

pytest.importorskip("liger_kernel")
import liger_kernel.transformers.functional as theirs
import transformers
from liger_kernel.chunked_loss.jsd_loss import LigerFusedLinearJSDFunction, LigerFusedLinearJSDLoss
from liger_kernel.transformers import apply_liger_kernel_to_gemma2, apply_liger_kernel_to_llama

from bench.harness.tiny_models import VOCAB, build, tiny_config
from cutefce.integrations import liger as integration
from tests.support.deferral import tiny_llama
from tests.support.divergence import token_divergences


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Keep Liger's function, and list the fused calls."""
    found: list[str] = []

    def counted(name: str) -> Any:
        function = getattr(integration, name)

        def run(*arguments: Any, **options: Any) -> Any:
            found.append(name)
            return function(*arguments, **options)

        return run

    for name in ("linear_cross_entropy", "linear_log_probs"):
        monkeypatch.setattr(integration, name, counted(name))
    name = "liger_fused_linear_cross_entropy"
    monkeypatch.setattr(theirs, name, getattr(theirs, name))
    monkeypatch.setattr(LigerFusedLinearJSDFunction, "apply", LigerFusedLinearJSDFunction.apply)
    return found


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("count", [None, 17])
def test_a_patched_forward_has_the_loss_of_the_model(
    family: str, count: int | None, calls: list[str]
) -> None:
    options = {} if family == "llama" else {"final_logit_softcapping": 2.0}
    model: Any = build(tiny_config(family, **options)).train()
    tokens = torch.randint(VOCAB, (2, 9))
    labels = tokens.where(torch.rand(2, 9) < 0.7, -100)
    given = {"input_ids": tokens, "labels": labels, "num_items_in_batch": count}

    def run() -> tuple[Any, list[Tensor]]:
        model.zero_grad()
        output = model(**given)
        output.loss.backward()
        return output, [x.grad.clone() for x in model.parameters()]

    expected, gradients = run()
    assert not calls
    integration.enable()
    patch = apply_liger_kernel_to_llama if family == "llama" else apply_liger_kernel_to_gemma2
    others = {"rope": False, "rms_norm": False, "cross_entropy": False}
    others |= {"swiglu": False} if family == "llama" else {"geglu": False}
    patch(**others, fused_linear_cross_entropy=True, model=model)
    output, found = run()
    assert calls == ["linear_cross_entropy"]
    assert output.logits is None
    torch.testing.assert_close(output.loss, expected.loss, rtol=1e-6, atol=0)
    for x, y in zip(found, gradients, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-5 * float(y.abs().max()) + 1e-8)


def trained(folder: Path, use_liger_kernel: bool) -> tuple[list[dict[str, Any]], list[Tensor]]:
    """Return what two steps of two batches log, and the parameters."""
    model = tiny_llama()
    rows = []
    for length in range(4, 12):
        tokens = torch.randint(VOCAB, (12,))
        rows.append({"input_ids": tokens, "labels": tokens.where(torch.arange(12) < length, -100)})
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=2,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=0.1,
        optim="sgd",
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        prediction_loss_only=True,
        use_liger_kernel=use_liger_kernel,
        liger_kernel_config={"rope": False, "rms_norm": False, "swiglu": False},
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=rows, eval_dataset=rows)
    trainer.train()
    trainer.evaluate()
    kept = "loss", "grad_norm", "eval_loss", "train_loss"
    logged = [{k: x for k, x in row.items() if k in kept} for row in trainer.state.log_history]
    return logged, [x.detach() for x in model.parameters()]


def test_trainer_logs_and_learns_the_same(tmp_path: Path, calls: list[str]) -> None:
    expected, parameters = trained(tmp_path, use_liger_kernel=False)
    integration.enable()
    logged, found = trained(tmp_path, use_liger_kernel=True)
    assert calls == ["linear_cross_entropy"] * 5  # one of them evaluates
    for ours, own in zip(logged, expected, strict=True):
        assert ours == pytest.approx(own, rel=1e-6, abs=1e-6)
    for x, y in zip(found, parameters, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-7)


def formula(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    ce_weight: Tensor | None = None,
    ignore_index: int = -100,
    lse_square_scale: float = 0.0,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return loss, z-loss, accuracy and predicted tokens of Liger's kernel, from all logits."""
    logits = F.linear(input, weight, bias)
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    options: dict[str, Any] = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
    loss = F.cross_entropy(logits, target, ce_weight, reduction=reduction, **options)
    is_active = target != ignore_index
    z_loss = (lse_square_scale * logits.logsumexp(1).square()).where(is_active, 0)
    accuracy = ((logits.argmax(1) == target) & is_active).to(logits.dtype)
    if reduction != "none":
        z_loss, accuracy = z_loss.sum(), accuracy.sum() / is_active.sum()
    if reduction == "mean":
        z_loss = z_loss / is_active.sum()
    return loss + z_loss, z_loss, accuracy, logits.argmax(1).where(is_active, -1)


CLASS_WEIGHTS = torch.rand(61, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
BIAS = torch.randn(61, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
OPTIONS: list[dict[str, Any]] = [
    {},
    {"bias": BIAS},
    {"ce_weight": CLASS_WEIGHTS},
    {"ignore_index": 3},
    {"lse_square_scale": 0.01, "return_z_loss": True},
    {"label_smoothing": 0.1},
    {"label_smoothing": 0.1, "ce_weight": CLASS_WEIGHTS},
    {"label_smoothing": 0.1, "lse_square_scale": 0.01, "return_z_loss": True},
    {"softcap": 2.0, "bias": BIAS, "lse_square_scale": 0.01},
    {"ce_weight": CLASS_WEIGHTS, "lse_square_scale": 0.01, "return_z_loss": True},
    {"return_token_accuracy": True},
    {"return_predicted_tokens": True, "softcap": 2.0},
    {
        "return_token_accuracy": True,
        "return_predicted_tokens": True,
        "return_z_loss": True,
        "lse_square_scale": 0.01,
        "ce_weight": CLASS_WEIGHTS,
        "bias": BIAS,
        "softcap": 2.0,
    },
    {"accum_dtype": torch.float32, "chunk_mem_const": 2},
]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("options", OPTIONS)
def test_an_option_is_that_of_liger(
    options: dict[str, Any], reduction: str, calls: list[str]
) -> None:
    generator = torch.Generator().manual_seed(0)
    input = torch.randn(23, 8, generator=generator, dtype=torch.float64)
    weight = torch.randn(61, 8, generator=generator, dtype=torch.float64)
    target = torch.randint(61, (23,), generator=generator)
    target[::5] = options.get("ignore_index", -100)
    target[1::4] = F.linear(input, weight, options.get("bias")).argmax(1)[1::4]
    integration.enable()

    def run(function: Any) -> tuple[Any, list[Tensor]]:
        given = options | {"reduction": reduction}
        leaves = [x.clone().requires_grad_() for x in (input, weight)]
        if "bias" in options:
            given["bias"] = options["bias"].clone().requires_grad_()
            leaves.append(given["bias"])
        result = function(*leaves[:2], target, **given)
        loss = getattr(result, "loss", result)
        loss = loss[0] if isinstance(loss, tuple) else loss
        factors = torch.linspace(-1, 1, loss.numel(), dtype=torch.float64).view_as(loss)
        return result, [*torch.autograd.grad((loss * factors).sum(), leaves)]

    result, found = run(theirs.liger_fused_linear_cross_entropy)
    (loss, z_loss, accuracy, predicted), gradients = run(formula)
    assert len(calls) == 1
    if not any(name.startswith("return_") for name in options):
        result = theirs.CrossEntropyOutput(loss=result)
    close: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(result.loss, loss, **close)
    for x, y in zip(found, gradients, strict=True):
        torch.testing.assert_close(x, y, **close)
    for name, x, y in (
        ("return_z_loss", result.z_loss, z_loss.detach()),
        ("return_token_accuracy", result.token_accuracy, accuracy.float()),
        ("return_predicted_tokens", result.predicted_tokens, predicted),
    ):
        assert (x is None) == (name not in options)
        if x is not None:
            assert not x.requires_grad
            torch.testing.assert_close(x, y, **close)


@pytest.mark.parametrize("options", [{}, {"return_token_accuracy": True, "lse_square_scale": 0.1}])
def test_ignored_tokens_alone_have_the_loss_0(options: dict[str, Any]) -> None:
    integration.enable()
    leaves = [torch.randn(n, 4).requires_grad_() for n in (5, 7)]
    target = torch.full((5,), -100)
    result = theirs.liger_fused_linear_cross_entropy(*leaves, target, **options)
    loss = getattr(result, "loss", result)
    assert loss.item() == 0
    assert all(not x.any() for x in torch.autograd.grad(loss, leaves))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_token_scaling": True}, "use_token_scaling: got True"),
        ({"label_smoothing": 0.1, "softcap": 2.0}, r"label_smoothing: got 0\.1 with softcap"),
        (
            {"label_smoothing": 0.1, "return_token_accuracy": True},
            r"label_smoothing: got 0\.1 with",
        ),
    ],
)
def test_what_is_not_served_is_named(options: dict[str, Any], message: str) -> None:
    integration.enable()
    arguments = torch.randn(5, 4), torch.randn(7, 4), torch.arange(5)
    with pytest.raises(NotImplementedError, match=message):
        theirs.liger_fused_linear_cross_entropy(*arguments, **options)


def test_an_unknown_reduction_is_named() -> None:
    arguments = torch.randn(5, 4), torch.randn(7, 4), torch.arange(5)
    with pytest.raises(ValueError, match="reduction: got 'batchmean'"):
        integration.fused_linear_cross_entropy(
            *arguments, reduction="batchmean", return_token_accuracy=True
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("options", "ignored"),
    [
        ({}, 0.3),
        ({"beta": 0.0, "temperature": 0.7, "weight_hard_loss": 0.0, "weight_soft_loss": 1.0}, 0.3),
        ({"beta": 1.0, "temperature": 2.0, "return_soft_hard_loss": True}, 0.3),
        ({"beta": 0.3, "ignore_index": 5, "return_soft_hard_loss": True}, 0.3),
        ({"beta": 0.3}, 1.0),
    ],
)
@pytest.mark.parametrize("bias", [False, True])
def test_the_jsd_is_as_accurate_as_that_of_liger(
    bias: bool,
    options: dict[str, Any],
    ignored: float,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Losses and gradients beside float64, also times an upstream gradient."""
    torch.manual_seed(0)
    given = [torch.randn(21, 16), torch.randn(83, 16), torch.randn(21, 24), torch.randn(83, 24)]
    biases = [torch.randn(83), torch.randn(83)]
    labels = torch.randint(6, 83, (21,))
    labels[torch.rand(21) < ignored] = options.get("ignore_index", -100)

    def run(function: Any, kind: torch.dtype = dtype) -> list[Tensor]:
        tensors = [x.to(dtype).to(kind) for x in given]
        own = [x.to(dtype).to(kind) if bias else None for x in biases]
        leaves = [x for x in (*tensors[:2], own[0]) if x is not None]
        for x in leaves:
            x.requires_grad_()
        found = function(*tensors, labels, *own)
        losses = found if isinstance(found, tuple) else (found,)
        gradients = torch.autograd.grad(3 * losses[0], leaves)
        return [*(x.detach() for x in losses), *gradients]

    def exact(h_s: Any, w_s: Any, h_t: Any, w_t: Any, y: Any, b_s: Any, b_t: Any) -> Any:
        u, t = F.linear(h_s, w_s, b_s), F.linear(h_t, w_t, b_t)
        ignore, heat = options.get("ignore_index", -100), options.get("temperature", 1.0)
        counts = y != ignore
        divisor = counts.sum().clamp(min=1)
        scaled = u / heat, t / heat
        form = {"divergence": "jsd", "beta": options.get("beta", 0.5)}
        soft = (token_divergences(*scaled, **form) * counts).sum() / divisor
        hard = F.cross_entropy(u, y, ignore_index=ignore, reduction="sum") / divisor
        factors = options.get("weight_hard_loss", 0.5), options.get("weight_soft_loss", 0.5)
        loss = factors[0] * hard + factors[1] * soft
        return (loss, soft, hard) if options.get("return_soft_hard_loss") else loss

    module = LigerFusedLinearJSDLoss(compiled=False, **options)
    best, own = run(exact, torch.float64), run(module)
    monkeypatch.setattr(LigerFusedLinearJSDFunction, "apply", lambda *_: pytest.fail("Liger's own"))
    integration.enable()
    ours = run(module)
    for z, x, y in zip(best, own, ours, strict=True):
        errors = [float((found.double() - z).abs().max()) for found in (x, y)]
        assert errors[1] <= 2 * errors[0] + 4 * torch.finfo(y.dtype).eps * float(z.abs().max())


def test_a_teacher_of_more_classes_is_left_to_liger() -> None:
    given = torch.randn(4, 16), torch.randn(83, 16), torch.randn(4, 24), torch.randn(90, 24)
    module = LigerFusedLinearJSDLoss(compiled=False)
    expected = module(*given, torch.arange(4))
    integration.enable()
    assert torch.equal(module(*given, torch.arange(4)), expected)
