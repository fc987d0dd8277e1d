"""defer: losses are torch's, and everything else sees real logits."""

import copy
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree
from torch.utils.checkpoint import checkpoint

import cutefce
from cutefce.integrations.deferral.logits import DeferredLogits
from tests.support.deferral import assert_same, count_fused, gradients
from tests.support.float64 import assert_no_float64

D, V = 16, 23
Use = Callable[[Any, Tensor], Tensor]
"""Maps logits (2, 6, V) and targets (2, 6) to a loss ()."""


class Model(nn.Module):
    """Hidden states of tokens, and a head."""

    def __init__(self, bias: bool = False, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(V, D, dtype=dtype)
        self.layer = nn.Linear(D, D, dtype=dtype)
        self.head = nn.Linear(D, V, bias=bias, dtype=dtype)

    def forward(self, tokens: Tensor) -> Any:
        return self.head(self.layer(self.embedding(tokens)).tanh())

    def get_output_embeddings(self) -> nn.Module:
        return self.head


TOKENS = torch.randint(V, (2, 6), generator=torch.Generator().manual_seed(1))
TARGETS = TOKENS.roll(-1, 1).masked_fill(torch.arange(6) == 2, -100)


def step(model: nn.Module, use: Use, targets: Tensor = TARGETS) -> tuple[Tensor, dict[str, Tensor]]:
    loss = use(model(TOKENS), targets)
    loss.backward()
    return loss.detach(), gradients(model)


def ce(logits: Any, targets: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), **options)


def shifted(logits: Any, targets: Tensor) -> Tensor:
    flat = logits[..., :-1, :].contiguous().view(-1, logits.size(-1))
    return F.cross_entropy(flat, targets[..., 1:].reshape(-1))


def first_classes(logits: Any, targets: Tensor) -> Tensor:
    cut = targets.clamp(max=19)
    return F.cross_entropy(
        logits[..., 2:20][:, 1:].reshape(-1, 18), (cut - 2).clamp(0)[:, 1:].flatten()
    )


def capped(logits: Any, targets: Tensor) -> Tensor:
    return ce(torch.tanh(logits * 3 / 5) * 5, targets)


def capped_twice_scaled(logits: Any, targets: Tensor) -> Tensor:
    return ce(2 * (7.0 * (logits / 7).tanh()) / 0.5, targets)


def added_and_scaled(logits: Any, targets: Tensor) -> Tensor:
    return ce(((logits * 0.5 + torch.arange(V) / 9) / 3 + torch.arange(V).flip(0) / 5) * 2, targets)


def in_chunks(logits: Any, targets: Tensor) -> Tensor:
    chunks = zip(logits.split(4, dim=1), targets.split(4, dim=1), strict=True)
    return torch.stack([ce(x, y, reduction="sum") for x, y in chunks]).sum() / 5


FUSED: dict[str, Use] = {
    "flat": ce,
    "float": lambda x, y: ce(x.float(), y),
    "to": lambda x, y: ce(x.to(torch.float32).to(x.device, torch.float32), y),
    "shifted": shifted,
    "sum": lambda x, y: ce(x, y, reduction="sum") / 7,
    "none": lambda x, y: ce(x, y, reduction="none").square().sum(),
    "ignore_index": lambda x, y: ce(x, y.masked_fill(y == -100, 3), ignore_index=3),
    "class weights": lambda x, y: ce(x, y, weight=torch.arange(V) / 7 + 0.1),
    "label smoothing": lambda x, y: ce(x, y, label_smoothing=0.1),
    "module": lambda x, y: nn.CrossEntropyLoss()(x.view(-1, V), y.view(-1)),
    "classes second": lambda x, y: F.cross_entropy(x.transpose(1, 2), y),
    "permuted": lambda x, y: F.cross_entropy(x.permute(0, 2, 1), y, reduction="none").sum(),
    "torch.permute": lambda x, y: F.cross_entropy(torch.permute(x, (1, 2, 0)), y.t()),
    "scale": lambda x, y: ce(x * 0.3, y),
    "reflected scale": lambda x, y: ce(2 * x, y),
    "negative scale": lambda x, y: ce(x.mul(-1), y),
    "division": lambda x, y: ce(torch.div(x, 3), y),
    "softcap": lambda x, y: ce(4 * torch.tanh(x / 4), y),
    "scale and softcap": capped,
    "softcap and scale": capped_twice_scaled,
    "tensor scale": lambda x, y: ce(x * torch.tensor(0.5), y),
    "tensor from the left": lambda x, y: ce(torch.tensor(3) * x, y),
    "tensor as temperature": lambda x, y: ce(x / torch.tensor(0.7), y),
    "added": lambda x, y: ce(x + torch.arange(V) / 9, y),
    "added from the left": lambda x, y: ce(torch.arange(V)[None] / 9 + x, y),
    "torch.add": lambda x, y: ce(torch.add(x, torch.arange(V)[None, None] / 9), y),
    "added and scaled": added_and_scaled,
    "added and capped": lambda x, y: ce(4 * ((x + torch.arange(V) / 9) / 4).tanh(), y),
    "added, first classes": lambda x, y: first_classes(x + torch.arange(V) / 9, y),
    "first classes": first_classes,
    "mask": lambda x, y: F.cross_entropy(x[y >= 0], y[y >= 0]),
    "one row": lambda x, y: F.cross_entropy(x[1, -2], y[1, -2]),
    "last": lambda x, y: F.cross_entropy(x[:, -1], y[:, -1]),
    "new dimension": lambda x, y: F.cross_entropy(x[None].squeeze(0)[0].unsqueeze(0)[0], y[0]),
    "chunks": in_chunks,
    "nothing counts": lambda x, y: ce(x, torch.full_like(y, -100)),
}


def written(logits: Any, targets: Tensor) -> Tensor:
    logits[..., 3] = -5.0
    return ce(logits, targets)


def noted(logits: Any, targets: Tensor) -> Tensor:
    with torch.no_grad():
        assert logits.argmax(-1).shape == targets.shape
    return ce(logits, targets)


def gathered(logits: Any, targets: Tensor) -> Tensor:
    chosen = targets.clamp(0)[..., None]
    loss: Tensor = -logits.log_softmax(-1).gather(-1, chosen).mean() + logits.logsumexp(-1).mean()
    return loss


FALLS_BACK: dict[str, tuple[Use, str]] = {
    "log_softmax": (gathered, "log_softmax"),
    "+": (lambda x, y: ce(x + 1.5, y), "__add__"),
    "-": (lambda x, y: ce(1 - x, y), "__rsub__"),
    "scale with a gradient": (lambda x, y: ce(x * torch.ones((), requires_grad=True), y), "mul"),
    "one for each token": (lambda x, y: ce(torch.ones(2, 6, 1) * x, y), "mul"),
    "added for each token": (lambda x, y: ce(x + torch.ones(2, 6, 1), y), "__add__"),
    "added after a softcap": (
        lambda x, y: ce(x.tanh() + torch.arange(V) / 9, y),
        "cross_entropy: steps before it",
    ),
    "written": (written, "__setitem__"),
    "scaled in place": (lambda x, y: ce(x.mul_(2), y), "mul_"),
    "used before": (noted, "argmax"),
    "no scale": (lambda x, y: ce(x * 0, y), "mul"),
    "two softcaps": (lambda x, y: ce(x.tanh().tanh(), y), "cross_entropy: steps before it"),
    "negative softcap": (lambda x, y: ce(x.tanh() * -2, y), "cross_entropy: steps before it"),
    "softcap and smoothing": (
        lambda x, y: ce(x.tanh(), y, label_smoothing=0.1),
        "cross_entropy: label_smoothing with softcap",
    ),
    "probabilities": (
        lambda x, y: F.cross_entropy(x.flatten(0, 1), torch.ones(12, V) / V),
        "cross_entropy: targets that are not int64 class indices",
    ),
    "float64": (lambda x, y: ce(x.double(), y).float(), "cross_entropy: logits cast to float64"),
    "all one": (lambda x, y: x.view(-1).square().mean(), "view"),
    "every other class": (lambda x, y: x[..., ::2].square().mean(), "__getitem__"),
    "python's sum": (lambda x, y: sum(row.square().sum() for row in x), "__iter__"),
    "list of logits": (lambda x, y: torch.stack([x, x]).mean(), "stack"),
    "matrix product": (lambda x, y: (x @ torch.ones(V)).square().mean(), "__matmul__"),
    "size_average": (
        lambda x, y: ce(x, y, size_average=False),
        "cross_entropy: size_average, reduce or another reduction",
    ),
}


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("name", FUSED)
def test_a_loss_is_fused(name: str, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(bias)
    loss, theirs = step(model, FUSED[name])
    cutefce.defer(model)
    calls = count_fused(monkeypatch)
    ours, mine = step(model, FUSED[name])
    torch.testing.assert_close(ours, loss, rtol=1e-5, atol=1e-8, equal_nan=True)
    assert torch.isnan(loss) == (name == "nothing counts")
    assert_same(mine, theirs)
    assert len(calls) == (2 if name == "chunks" else 1)
    assert cutefce.deferral_report(model) == (len(calls), {})


@pytest.mark.parametrize("name", FUSED)
def test_a_fused_loss_makes_no_float64(name: str) -> None:
    """Some devices have none."""
    model = Model(True)
    cutefce.defer(model)
    assert_no_float64(lambda: step(model, FUSED[name]))
    assert cutefce.deferral_report(model).fused


@pytest.mark.filterwarnings("ignore:size_average")
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("name", FALLS_BACK)
def test_anything_else_makes_the_logits(name: str, bias: bool) -> None:
    model, (use, reason) = Model(bias), FALLS_BACK[name]
    loss, theirs = step(model, use)
    cutefce.defer(model)
    ours, mine = step(model, use)
    torch.testing.assert_close(ours, loss, rtol=1e-6, atol=1e-8)
    assert_same(mine, theirs)
    assert cutefce.deferral_report(model) == (0, {reason: 1})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("cast", [False, True], ids=["own dtype", "float"])
def test_the_loss_has_the_dtype_of_torchs(dtype: torch.dtype, autocast: bool, cast: bool) -> None:
    def use(logits: Any, targets: Tensor) -> Tensor:
        return ce(logits.float() if cast else logits, targets)

    model = Model(dtype=torch.float32 if autocast else dtype)
    with torch.autocast("cpu", dtype, enabled=autocast):
        loss, theirs = step(model, use)
        cutefce.defer(model)
        ours, mine = step(model, use)
        logits = model(TOKENS)
    assert ours.dtype == loss.dtype == (torch.float32 if autocast or cast else dtype)
    assert isinstance(logits, DeferredLogits) and logits.dtype == dtype
    torch.testing.assert_close(ours, loss, rtol=2e-2, atol=0)
    assert_same(mine, theirs, rtol=5e-2)
    assert cutefce.deferral_report(model) == (1, {})
    # a loss outside of the region, as trainers have it
    torch.testing.assert_close(ce(logits.float(), TARGETS), loss.float(), rtol=2e-2, atol=0)
    assert logits.tensor("test").dtype == dtype


def test_logits_behave_like_a_tensor() -> None:
    model = Model()
    expected = model(TOKENS)
    cutefce.defer(model)
    logits: Any = model(TOKENS)
    assert isinstance(logits, DeferredLogits)
    assert repr(logits) == "DeferredLogits(shape=(2, 6, 23), dtype=torch.float32)"
    assert logits.shape == expected.shape and logits.size(-1) == V and len(logits) == 2
    assert (logits.ndim, logits.dim(), logits.numel()) == (3, 3, 2 * 6 * V)
    assert logits.requires_grad and logits.is_floating_point() and not logits.is_cuda
    assert logits.device == expected.device and logits.dtype == expected.dtype
    assert not hasattr(logits, "no_such_name")
    assert cutefce.deferral_report(model) == (0, {})
    assert torch.equal(logits.detach(), expected)
    assert logits.grad_fn is not None and torch.equal(logits.float(), expected)
    assert torch.equal(logits[0] + logits[1], expected[0] + expected[1])
    made: Any = logits
    assert torch.equal(made > 0, expected > 0) and torch.equal(-made, -expected)
    assert torch.equal(pickle.loads(pickle.dumps(model(TOKENS).detach())), expected)
    assert cutefce.deferral_report(model) == (0, {"detach": 2})


def test_logits_made_without_gradients_keep_theirs() -> None:
    model = Model()
    cutefce.defer(model)
    logits: Any = model(TOKENS)
    with torch.no_grad():
        seen = logits[:, :-1].argmax(-1)
        assert not seen.requires_grad
    logits.logsumexp(-1).mean().backward()
    assert model.head.weight.grad is not None and model.embedding.weight.grad is not None


def test_logits_after_a_change_are_refused() -> None:
    model = Model()
    cutefce.defer(model)
    logits: Any = model(TOKENS)
    early: Any = model(TOKENS)
    part = early[:, :-1]
    ce(logits, TARGETS).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    with pytest.raises(
        RuntimeError, match="logits: the head's weight, bias or input, or what was added, chan"
    ):
        logits.argmax(-1)
    with pytest.raises(
        RuntimeError, match="logits: the head's weight, bias or input, or what was added, chan"
    ):
        ce(part, TARGETS[:, :-1])
    later: Any = model(TOKENS)
    part = later[:, :-1]
    later[..., 0] = 0.0
    assert later[0, 0, 0] == 0
    with pytest.raises(RuntimeError, match="logits: others that may share their memory changed in"):
        ce(part, TARGETS[:, :-1])


def test_a_change_of_what_was_added_is_refused() -> None:
    model, more = Model(), torch.zeros(V)
    cutefce.defer(model)
    logits: Any = model(TOKENS) + more
    more.add_(1)
    with pytest.raises(
        RuntimeError, match="logits: the head's weight, bias or input, or what was added, chan"
    ):
        ce(logits, TARGETS)


def test_a_change_of_the_bias_or_of_a_view_is_refused() -> None:
    model = Model(bias=True)
    cutefce.defer(model)
    logits: Any = model(TOKENS)
    with torch.no_grad():
        model.head.bias.add_(1)
    with pytest.raises(
        RuntimeError, match="logits: the head's weight, bias or input, or what was added, chan"
    ):
        ce(logits, TARGETS)
    logits = model(TOKENS)
    flat = logits.view(-1, V)
    logits.argmax()
    flat.argmax()
    flat[:, 0] = -5.0
    with pytest.raises(RuntimeError, match="logits: others that may share their memory changed in"):
        ce(logits, TARGETS)
    part = model(TOKENS)[:, :-1]
    copy = part.contiguous()
    copy[..., 0] = -9.0
    with pytest.raises(RuntimeError, match="logits: others that may share their memory changed in"):
        ce(part, TARGETS[:, :-1])


COPIES = [lambda x: x.clone(), lambda x: x.double(), lambda x: x / 2, lambda x: torch.tanh(x)]


@pytest.mark.parametrize("copy", COPIES)
def test_a_copy_of_the_logits_may_be_changed(copy: Any) -> None:
    """The logits keep their loss, as do copies that were taken before these are changed."""
    model = Model()
    wanted = ce(model(TOKENS), TARGETS)
    cutefce.defer(model)
    logits: Any = model(TOKENS)
    changed, other = copy(logits), logits.clone()
    flat = changed.view(-1, V)
    changed.mul_(2)
    torch.testing.assert_close(ce(logits, TARGETS), wanted)
    logits.sub_(1)
    torch.testing.assert_close(ce(other, TARGETS), wanted)
    with pytest.raises(RuntimeError, match="logits: others that may share their memory changed in"):
        F.cross_entropy(flat, TARGETS.flatten())


@pytest.mark.parametrize("copy", COPIES)
def test_a_copy_of_changed_logits_is_refused(copy: Any) -> None:
    model = Model()
    cutefce.defer(model)
    logits: Any = model(TOKENS)
    part = logits[:, :-1]
    logits.mul_(2)
    with pytest.raises(RuntimeError, match="others that may share their memory changed in"):
        copy(part)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_loss_that_is_checkpointed(use_reentrant: bool) -> None:
    model = Model()

    def loss(hidden: Tensor) -> Tensor:
        return ce(model.head(hidden), TARGETS)

    found: list[Any] = []
    for _ in range(2):
        hidden = torch.ones(2, 6, D, requires_grad=True)
        checkpoint(loss, hidden, use_reentrant=use_reentrant).backward()
        found.append(hidden.grad)
        if len(found) == 1:
            cutefce.defer(model)
    torch.testing.assert_close(found[1], found[0])
    assert cutefce.deferral_report(model) == (1, {})


@pytest.mark.parametrize("evaluation", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_head_that_is_checkpointed_has_a_gradient(evaluation: bool, reentrant: bool) -> None:
    model, hidden = Model(), torch.ones(2, 6, D, requires_grad=True)
    ce(model.head(hidden), TARGETS).backward()
    wanted, theirs = hidden.grad, gradients(model)
    cutefce.defer(model, evaluation=evaluation)
    for function in (model.head, lambda x: model.head(x)[:, :-1], lambda x: model.head(x) * 2):
        hidden.grad = None
        logits: Any = checkpoint(function, hidden, use_reentrant=reentrant)
        loss_of = F.cross_entropy(logits.flatten(0, 1), TARGETS[:, : logits.shape[1]].flatten())
        loss_of.backward()
        mine = gradients(model)
        if function is model.head:
            torch.testing.assert_close(hidden.grad, wanted)
            assert_same(mine, theirs)
        assert hidden.grad is not None and len(mine) == 1


def test_views_have_the_shapes_of_the_logits() -> None:
    model = Model()
    cutefce.defer(model)
    logits: Any = model(TOKENS)
    assert logits.view([-1, V]).shape == logits.reshape((12, -1)).shape == (12, V)
    assert cutefce.deferral_report(model) == (0, {})
    for sizes, message in (((5, V), r"'\[5, 23\]'"), ((5, -1, V), r"'\[5, -1, 23\]'")):
        with pytest.raises(RuntimeError, match=f"{message} is invalid for input of size 276"):
            logits.view(*sizes)


def test_the_parameters_are_those_of_the_heads_call() -> None:
    model = Model(bias=True)
    own = {name: (x.detach() * 1.5).requires_grad_() for name, x in model.named_parameters()}
    results = []
    for _ in range(2):
        loss = ce(torch.func.functional_call(model, own, (TOKENS,)), TARGETS)
        results.append((loss.detach(), *torch.autograd.grad(loss, [*own.values()])))
        if len(results) == 1:
            cutefce.defer(model)
    for ours, wanted in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(ours, wanted)
    assert cutefce.deferral_report(model) == (1, {})


def test_a_metric_in_inference_mode_leaves_the_gradient() -> None:
    def with_metric(logits: Any, targets: Tensor) -> Tensor:
        with torch.inference_mode():
            logits.argmax(-1)
        return ce(logits, targets)

    _, wanted = step(Model(), with_metric)
    model = Model()
    cutefce.defer(model)
    _, found = step(model, with_metric)
    assert_same(found, wanted)


class Sum(torch.autograd.Function):
    """A function that sees logits without their gradient."""

    @staticmethod
    def forward(ctx: Any, logits: Any) -> Tensor:
        result: Tensor = logits.sum()
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def test_an_autograd_function_is_refused() -> None:
    model = Model()
    cutefce.defer(model)
    with pytest.raises(RuntimeError, match=r"deferred ones in torch\.autograd\.Function\.apply"):
        Sum.apply(model(TOKENS))  # type: ignore[no-untyped-call]


def test_a_compiled_loss_of_a_model_that_is_not() -> None:
    wanted, _ = step(Model(), ce)
    model = Model()
    cutefce.defer(model)
    torch.compiler.reset()
    loss, _ = step(model, torch.compile(ce, backend="aot_eager"))
    torch.testing.assert_close(loss, wanted)


def test_a_function_mapped_over_outputs_does_not_see_the_hidden_states() -> None:
    model = Model()
    cutefce.defer(model)
    outputs = {"logits": model(TOKENS)}
    for change in (torch.detach, lambda x: x[..., :3], lambda x: x.numpy(force=True)):
        with pytest.raises(TypeError, match="logits: got a function that was mapped over"):
            _pytree.tree_map(change, outputs)
    same = _pytree.tree_map(lambda x: x.clone(), outputs)["logits"]
    wanted, _ = step(Model(), ce)
    torch.testing.assert_close(ce(same, TARGETS).detach(), wanted)


def test_keywords_and_tuples_of_torch() -> None:
    class Pair(NamedTuple):
        first: Any
        second: Any

    def many(logits: Any) -> Tensor:
        flat = logits.view(size=(-1, V)).reshape(shape=(2, 6, V)).permute(dims=(1, 0, 2))
        copy = flat.clone(memory_format=torch.contiguous_format).unsqueeze(0).squeeze(dim=0)
        return torch.stack(Pair(copy, torch.mul(copy, 2, out=torch.empty(6, 2, V))))

    with torch.no_grad():
        wanted = many(Model()(TOKENS))
        model = Model()
        cutefce.defer(model, evaluation=True)
        torch.testing.assert_close(many(model(TOKENS)), wanted)


def test_evaluation_sees_tensors_unless_asked() -> None:
    model = Model().eval()
    cutefce.defer(model)
    with torch.no_grad():
        assert type(model(TOKENS)) is type(model.train()(TOKENS)) is Tensor
    cutefce.undefer(model)
    expected = ce(model(TOKENS), TARGETS)
    cutefce.defer(model, evaluation=True)
    with torch.inference_mode():
        logits: Any = model.eval()(TOKENS)
        assert isinstance(logits, DeferredLogits) and not logits.requires_grad
        torch.testing.assert_close(ce(logits, TARGETS), expected.detach())
    with torch.no_grad():
        logits = model(TOKENS)
    loss = ce(logits, TARGETS)  # the logits have no gradient, so neither has the loss
    assert not loss.requires_grad
    torch.testing.assert_close(loss, expected.detach())


def test_training_in_evaluation_mode_is_fused() -> None:
    model = Model().eval()  # as from_pretrained returns it, and Lightning leaves it
    loss, theirs = step(model, ce)
    cutefce.defer(model)
    ours, mine = step(model, ce)
    torch.testing.assert_close(ours, loss, rtol=1e-6, atol=0)
    assert_same(mine, theirs)
    assert cutefce.deferral_report(model) == (1, {})
    assert type(model.requires_grad_(False)(TOKENS)) is Tensor  # nothing is trained


@pytest.mark.parametrize("method", ["retain_grad", "register_hook"])
def test_gradients_of_logits_are_watched_before_the_loss_alone(method: str) -> None:
    def watched(model: Model, before: bool) -> list[Tensor]:
        seen: list[Tensor] = []
        logits = model(TOKENS)
        loss = None if before else ce(logits, TARGETS)
        given = (seen.append,) if method == "register_hook" else ()
        getattr(logits, method)(*given)
        (ce(logits, TARGETS) if loss is None else loss).backward()
        return seen or [logits.grad]

    model = Model()
    (wanted,) = watched(model, before=False)
    cutefce.defer(model)
    (found,) = watched(model, before=True)
    torch.testing.assert_close(found, wanted)
    with pytest.raises(RuntimeError, match=f"^logits: got {method} after a loss that was"):
        watched(model, before=False)
    uses: list[Callable[[Tensor], Tensor]] = [
        lambda view: ce(view, TARGETS.flatten()),
        lambda view: view.log_softmax(-1),
    ]
    for use in uses:
        logits = model(TOKENS)
        view = logits.view(-1, V)
        if method == "register_hook":
            torch.Tensor.register_hook(logits, print)  # type: ignore[no-untyped-call]
        else:
            logits.retain_grad()
        with pytest.raises(RuntimeError, match=r"^logits: got a use of a view that was taken"):
            use(view)


def test_tied_weights() -> None:
    def tied() -> Model:
        model = Model()
        model.head.weight = model.embedding.weight
        return model

    loss, theirs = step(tied(), ce)
    model = tied()
    cutefce.defer(model)
    ours, mine = step(model, ce)
    torch.testing.assert_close(ours, loss)
    assert_same(mine, theirs)


def test_a_copy_has_its_own_head() -> None:
    model = Model()
    cutefce.defer(model.head)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        nn.init.zeros_(other.head.weight)
        loss, theirs = step(other, ce)
        torch.testing.assert_close(loss, torch.tensor(float(V)).log())
        assert theirs["head.weight"].any() and model.head.weight.grad is None
        assert cutefce.deferral_report(other).fused == 1
    assert cutefce.deferral_report(model).fused == 0


def test_undefer_restores_the_head() -> None:
    model = Model()
    before = dict(model.head.__dict__)
    cutefce.defer(model)
    assert list(model.state_dict()) == list(Model().state_dict())
    cutefce.undefer(model)
    assert type(model.head) is nn.Linear and model.head.__dict__ == before
    assert type(model(TOKENS)) is Tensor
    cutefce.defer(model)


def test_hooks_of_the_head_see_what_they_did() -> None:
    model, seen = Model(), []
    model.head.register_full_backward_hook(lambda *args: seen.append(args[2][0].shape))
    cutefce.defer(model)
    step(model, ce)
    assert seen == [(2, 6, V)]
    assert cutefce.deferral_report(model) == (0, {"backward hooks of the head": 1})


def test_a_weight_that_is_gathered_for_the_heads_call() -> None:
    model = Model()
    model.head.weight.requires_grad_(False)
    loss, theirs = step(model, ce)
    whole, placeholder = model.head.weight.data, torch.empty(0)
    hooks = [
        model.head.register_forward_pre_hook(lambda head, _: setattr(head.weight, "data", whole)),
        model.head.register_forward_hook(
            lambda *_: setattr(model.head.weight, "data", placeholder)
        ),
    ]
    model.head.weight.data = placeholder
    cutefce.defer(model)
    logits: Any = model(TOKENS)
    assert model.head.weight.numel() == 0 and isinstance(logits, DeferredLogits)
    ours = ce(logits, TARGETS)
    torch.testing.assert_close(ours, loss)
    assert logits.mean().isfinite()
    assert cutefce.deferral_report(model) == (1, {"mean": 1})
    for hook in hooks:
        hook.remove()
    model.head.weight.data = whole  # nothing gathers it any more
    logits = model(TOKENS)
    model.head.weight.data = placeholder
    with pytest.raises(
        RuntimeError, match="logits: got a use of them where the head's weight is s"
    ):
        ce(logits, TARGETS)
    assert set(theirs) == {"embedding.weight", "layer.weight", "layer.bias"}


def test_replicas_of_data_parallel_return_tensors() -> None:
    model = Model()
    cutefce.defer(model)
    replica = model.head._replicate_for_data_parallel()
    replica.weight, replica.bias = model.head.weight * 2, None
    logits = replica(torch.ones(2, D))
    assert torch.equal(logits, F.linear(torch.ones(2, D), replica.weight))
    assert cutefce.deferral_report(model) == (0, {"nn.DataParallel": 1})


def test_a_weight_of_fewer_rows_tells_the_classes() -> None:
    """As vocabularies are pruned: out_features stays."""
    model = Model()
    model.head.weight = nn.Parameter(model.head.weight[:19].detach().clone())
    targets = TARGETS.clamp(max=18)
    loss, theirs = step(model, ce, targets)
    cutefce.defer(model)
    ours, mine = step(model, ce, targets)
    torch.testing.assert_close(ours, loss, rtol=1e-6, atol=0)
    assert_same(mine, theirs)
    assert cutefce.deferral_report(model) == (1, {})


def test_a_change_of_requires_grad_is_refused() -> None:
    """As `set_adapter` of peft changes it: torch has the gradients of the forward."""
    model = Model()
    cutefce.defer(model)
    logits: Any = model(TOKENS)
    model.head.requires_grad_(False)
    with pytest.raises(RuntimeError, match="logits: the head's weight, bias or input, or what was"):
        ce(logits, TARGETS)
    model.head.requires_grad_(True)
    assert ce(logits, TARGETS).requires_grad


class OwnLoss(torch.autograd.Function):
    """A loss that computes its gradient in its forward."""

    @staticmethod
    def forward(ctx: Any, logits: Any, targets: Tensor) -> Tensor:
        with torch.enable_grad():
            loss = ce(logits, targets)
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, None


def test_a_function_that_enables_gradients_is_refused() -> None:
    model = Model()
    cutefce.defer(model)
    with pytest.raises(RuntimeError, match=r"logits: got deferred ones in torch.autograd.Function"):
        OwnLoss.apply(model(TOKENS), TARGETS)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("allow_unused", [False, True])
def test_a_gradient_by_logits_after_their_loss_is_refused(allow_unused: bool) -> None:
    model = Model()
    logits: Any = model(TOKENS)
    (wanted,) = torch.autograd.grad(ce(logits, TARGETS), logits)
    cutefce.defer(model)
    logits = model(TOKENS)
    loss = ce(logits, TARGETS)
    with pytest.raises(RuntimeError, match=r"logits: got torch.autograd.grad after a loss"):
        torch.autograd.grad(loss, [logits], allow_unused=allow_unused)
    logits = model(TOKENS) + 0
    torch.testing.assert_close(torch.autograd.grad(ce(logits, TARGETS), logits)[0], wanted)


@pytest.mark.parametrize("convert", [torch.as_tensor, torch.asarray, torch.tensor])
def test_a_conversion_that_loses_the_gradient_is_refused(convert: Any) -> None:
    model = Model()
    cutefce.defer(model, evaluation=True)
    with pytest.raises(RuntimeError, match=r"logits: got a conversion .* logits \+ 0"):
        convert(model(TOKENS))
    with torch.no_grad():
        assert convert(model(TOKENS)).shape == (2, 6, V)


def test_a_backward_hook_of_a_model_sees_logits() -> None:
    model, seen = Model(), list[Any]()

    def hook(module: nn.Module, into: Any, out: Any) -> None:
        seen.append(out[0].shape)

    cutefce.defer(model)
    model.register_full_backward_hook(hook)
    step(model, ce)
    assert seen == [(2, 6, V)]
    assert cutefce.deferral_report(model) == (0, {"backward hooks of the model": 1})


@pytest.mark.parametrize("cut", ["sliced", "transposed", "with a loss"])
def test_a_reentrant_checkpoint_may_return_any_rows(cut: str) -> None:
    def forward(hidden: Tensor) -> Any:
        logits = model.head(hidden)
        if cut == "with a loss":
            return ce(logits, TARGETS), logits[..., :9] * 1
        return hidden * 2, logits[..., :9] if cut == "sliced" else logits.transpose(1, 2)

    def train() -> dict[str, Tensor]:
        hidden = torch.linspace(-1, 1, 12 * D).view(2, 6, D).requires_grad_()
        first, second = checkpoint(forward, hidden, use_reentrant=True)
        (first.sum() + second.square().mean()).backward()
        return gradients(model)

    model = Model()
    theirs = train()
    cutefce.defer(model)
    assert_same(train(), theirs)


def test_a_scale_has_derivatives_by_transforms() -> None:
    def loss_of(scale: Tensor) -> Tensor:
        return ce(model(TOKENS) * scale, TARGETS)

    model, scale = Model(), torch.tensor(0.7)
    wanted = torch.func.jacfwd(loss_of)(scale)
    cutefce.defer(model)
    torch.testing.assert_close(torch.func.jacfwd(loss_of)(scale), wanted)


def test_a_bias_is_added_across_a_compiled_graph() -> None:
    model, more = Model(), torch.arange(V) / 9
    expected = ce(model(TOKENS) + more, TARGETS)
    cutefce.defer(model)
    torch._dynamo.reset()
    logits = torch.compile(model, backend="aot_eager")(TOKENS)
    torch.testing.assert_close(ce(logits + more, TARGETS), expected)


def test_a_bias_has_a_gradient_beside_logits_without() -> None:
    model, more = Model(), torch.zeros(V, requires_grad=True)
    cutefce.defer(model, evaluation=True)
    with torch.no_grad():
        logits: Any = model(TOKENS)
    ce(logits + more, TARGETS).backward()
    assert more.grad is not None and more.grad.abs().max() > 0


def test_hooks_of_accelerate_come_and_go() -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    model = Model()
    expected = model(TOKENS)
    for first in (True, False):
        if first:
            cutefce.defer(model)
        hooks.add_hook_to_module(model.head, hooks.ModelHook())
        if not first:
            cutefce.defer(model)
        assert isinstance(model(TOKENS), DeferredLogits)
        hooks.remove_hook_from_module(model.head)
        assert isinstance(model(TOKENS), DeferredLogits)
        cutefce.undefer(model)
        assert torch.equal(model(TOKENS), expected)


def test_casts_of_states_come_before_later_steps() -> None:
    model = Model()
    cutefce.defer(model)
    logits: Any = model(TOKENS)
    logits.hidden = logits.hidden.bfloat16()  # as Fabric casts the fields of outputs
    assert logits.dtype == torch.bfloat16
    assert logits.float().dtype == (logits * 2).float().dtype == torch.float32
    assert (logits + torch.zeros(V)).dtype == torch.float32
    assert (logits[:, 1:] * 2).dtype == torch.bfloat16


class Outputs(dict[str, Any]):
    """Outputs with attributes of their own."""


class WithOutputs(Model):
    """A model that returns the same object each time."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs = Outputs()

    def forward(self, tokens: Tensor) -> Any:
        self.outputs["logits"] = super().forward(tokens)
        return self.outputs


def test_outputs_are_those_that_the_model_returns() -> None:
    model = WithOutputs()
    cutefce.defer(model)
    assert model(TOKENS) is model.outputs and isinstance(model.outputs["logits"], DeferredLogits)


def test_a_traced_or_exported_model_has_tensors() -> None:
    model = Model()
    expected = model(TOKENS)
    cutefce.defer(model)
    graph = torch.fx.symbolic_trace(model)
    torch.testing.assert_close(graph(TOKENS), expected)
    for strict in (True, False):
        exported = torch.export.export(model, (TOKENS,), strict=strict)
        torch.testing.assert_close(exported.module()(TOKENS), expected)


def test_einops_rearranges_deferred_logits() -> None:
    einops = pytest.importorskip("einops")

    def rearranged(logits: Any, targets: Tensor) -> Tensor:
        return F.cross_entropy(einops.rearrange(logits, "b n c -> b c n"), targets)

    def flattened(logits: Any, targets: Tensor) -> Tensor:
        return F.cross_entropy(einops.rearrange(logits, "b n c -> (b n) c"), targets.flatten())

    def reduced(logits: Any, targets: Tensor) -> Tensor:
        mean: Tensor = einops.reduce(logits.square(), "b n c -> ()", "mean")
        return mean.sum()

    for use, fused in ((rearranged, 1), (flattened, 1), (reduced, 0)):
        model = Model()
        loss, theirs = step(model, use)
        cutefce.defer(model)
        ours, mine = step(model, use)
        torch.testing.assert_close(ours, loss, rtol=1e-6, atol=0)
        assert_same(mine, theirs)
        assert cutefce.deferral_report(model).fused == fused


@torch.jit.script
def scripted(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


def test_a_scripted_loss_takes_logits_plus_0() -> None:
    """The documented remedy for functions that take nothing but tensors keeps the gradient."""
    model = Model()
    loss, theirs = step(model, lambda x, y: scripted(x + 0, y))
    cutefce.defer(model)
    with pytest.raises(RuntimeError, match="DeferredLogits"):
        scripted(model(TOKENS), TARGETS)
    ours, mine = step(model, lambda x, y: scripted(x + 0, y))
    torch.testing.assert_close(ours, loss, rtol=1e-6, atol=0)
    assert_same(mine, theirs)


def test_logits_are_moved_where_a_model_moves_its_outputs() -> None:
    """As hooks of accelerate do after the loss, which need not make logits for it."""
    model = Model()
    cutefce.defer(model)
    logits: Any = model(TOKENS)
    loss = ce(logits, TARGETS)
    moved = logits.to("meta:0", non_blocking=True).float()
    assert (moved.device.type, moved.shape) == ("meta", logits.shape)
    assert cutefce.deferral_report(model) == (1, {}) and loss.isfinite()
    assert (moved + 0).device.type == "meta"


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_loop_is_one_graph(backend: str) -> None:
    def train(tokens: Tensor, targets: Tensor) -> Tensor:
        logits = model(tokens)[..., :20].float()
        return F.cross_entropy((15 * torch.tanh(logits / 15)).view(-1, 20), targets.view(-1))

    model, targets = Model(), TARGETS.clamp(max=19)
    loss = train(TOKENS, targets)
    loss.backward()
    theirs = gradients(model)
    cutefce.defer(model)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(train, backend=backend, fullgraph=True)
    for _ in range(3):
        ours = compiled(TOKENS, targets)
        ours.backward()
        assert_same(gradients(model), theirs)
        torch.testing.assert_close(ours, loss)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert cutefce.deferral_report(model) == (1, {})  # traced once


def test_a_compiled_fallback() -> None:
    model = Model()
    loss, theirs = step(model, gathered)
    cutefce.defer(model)
    torch._dynamo.reset()
    compiled = torch.compile(lambda: gathered(model(TOKENS), TARGETS), backend="aot_eager")
    ours = compiled()
    ours.backward()
    torch.testing.assert_close(ours, loss)
    assert_same(gradients(model), theirs)


class Quantized(nn.Linear):
    """A head that does not use its weight as it is."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight.round())


def headless(head: Any) -> Model:
    model = Model()
    model.head = head
    return model


class Named(nn.Linear):
    """Another name, no other forward."""


def replaced() -> nn.Linear:
    head = nn.Linear(D, V)
    head.forward = lambda input: input  # type: ignore[method-assign]
    return head


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.ReLU(), "model: got ReLU, expected one with get_output_embeddings"),
        (Model, "model: got the class Model, expected an nn.Module"),
        (None, "model: got NoneType, expected an nn.Module"),
        (headless(Quantized(D, V)), r"head: got \S*Quantized with another forward, expected a pl"),
        (headless(nn.Conv1d(1, 1, 1)), r"head: got torch\S*Conv1d, expected a plain torch.nn.Lin"),
        (headless(nn.Linear(D, V).to(torch.float8_e4m3fn)), "head: got a weight of torch.float8"),
        (headless(replaced()), "head: got .*Linear with another forward, expected a plain"),
        (headless(Named(D, V)), r"head: got \S*Named, a subclass of nn.Linear, expected a plain"),
        (
            headless(nn.ModuleList([nn.Linear(D, V)] * 4)),
            "model: got Model with 4 heads, expected ",
        ),
        (headless(None), "model: got Model without output embeddings, expected a causal"),
    ],
)
def test_other_heads_are_refused(model: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        cutefce.defer(model)
    if "expected an nn.Module" in message:
        for call in (cutefce.undefer, cutefce.deferral_report):
            with pytest.raises(TypeError, match=message):
                call(model)


def test_transforms_of_the_model_see_tensors() -> None:
    model = Model()

    def loss_of(parameters: dict[str, Tensor]) -> Tensor:
        loss: Tensor = ce(torch.func.functional_call(model, parameters, (TOKENS,)), TARGETS)
        return loss

    parameters = {name: x.detach() for name, x in model.named_parameters()}
    wanted = torch.func.grad(loss_of)(parameters)
    cutefce.defer(model)
    assert_same(torch.func.grad(loss_of)(parameters), wanted)
    tangent = torch.func.jvp(loss_of, (parameters,), (parameters,))[1]
    assert tangent.isfinite()
    assert cutefce.deferral_report(model).fallbacks == {"torch.func": 2}


def test_a_head_that_was_replaced_is_named() -> None:
    model = Model()
    cutefce.defer(model)
    model.head = nn.Linear(D, V)
    with pytest.raises(RuntimeError, match="again after its head was replaced"):
        cutefce.deferral_report(model)


def test_wrong_order_is_named() -> None:
    model = Model()
    for call in (cutefce.undefer, cutefce.deferral_report):
        with pytest.raises(RuntimeError, match="model: got no deferred head, expected a call of"):
            call(model)
    cutefce.defer(model)
    with pytest.raises(RuntimeError, match="model: got a head that is deferred already"):
        cutefce.defer(model)


def test_gradients_are_sampled_if_asked_for() -> None:
    torch.manual_seed(0)
    head, h, y = nn.Linear(8, 600, bias=False), torch.randn(50, 8), torch.randint(600, (50,))
    found: list[Any] = []
    for loss in ("sampled", "call", "exact"):
        head.weight.grad = None
        torch.manual_seed(1)
        if loss == "call":
            more: dict[str, Any] = {"gradient": "sampled", "samples": 32}
            cutefce.linear_cross_entropy(h, head.weight, y, **more).backward()
        else:
            cutefce.defer(head, gradient=loss, samples=32)
            F.cross_entropy(head(h), y).backward()
            cutefce.undefer(head)
        found.append(head.weight.grad)
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    with pytest.raises(ValueError, match="samples: got 2"):
        cutefce.defer(head, gradient="sampled", samples=2)
    with pytest.raises(ValueError, match=r"accum_dtype: got torch\.float16"):
        cutefce.defer(head, accum_dtype=torch.float16)


def test_sums_are_bfloat16_if_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []
    fused = cutefce.linear_cross_entropy

    def noted(*arguments: Any, **options: Any) -> Any:
        found.append(options["accum_dtype"])
        return fused(*arguments, **options)

    monkeypatch.setattr("cutefce.integrations.deferral.loss.linear_cross_entropy", noted)
    head = nn.Linear(8, 600, bias=False, dtype=torch.bfloat16)
    cutefce.defer(head, accum_dtype=torch.bfloat16)
    h, y = torch.randn(50, 8, dtype=torch.bfloat16), torch.randint(600, (50,))
    F.cross_entropy(head(h), y).backward()
    assert found == [torch.bfloat16] and cutefce.deferral_report(head).fused == 1


def test_sums_are_not_bfloat16_of_a_float32_weight() -> None:
    head = nn.Linear(8, 600, bias=False)
    h, y = torch.randn(50, 8), torch.randint(600, (50,))
    found: list[Any] = []
    for accum_dtype in (None, torch.bfloat16):
        cutefce.defer(head, accum_dtype=accum_dtype)
        for autocast in (False, True):
            head.weight.grad = None
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                F.cross_entropy(head(h), y).backward()
            found.append(head.weight.grad)
        assert cutefce.deferral_report(head).fused == 2
        cutefce.undefer(head)
    assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[3])
