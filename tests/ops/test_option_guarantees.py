"""What holds for plain calls holds with options: compiled, transformed, repeated, not finite."""

import functools
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import cutefce
from cutefce.cute_kernels.config import PortableTiles
from tests.support.non_finite import FEW, ROW, assert_no_healthier, assert_same_kind, broken_case
from tests.support.non_finite import names as broken_names
from tests.support.options import (
    OPTIONS,
    OptionsCase,
    losses_of_logits,
    model_logits,
    options_case,
)
from tests.support.reference import are_same
from tests.support.tiers import pairwise, pairwise_of, rest_slow

OUTPUTS = ("lse", "entropy", "sum_p_squared", "mean_logit", "is_top1", "argmax")
TOGETHER: dict[str, list[str]] = {name: [name] for name in OPTIONS} | {
    "smoothing and all factors": [
        "linear_bias",
        "weight",
        "label_smoothing",
        "token_weights",
        "z_loss",
        "logit_scale",
        "temperature (N,)",
    ],
    "softcap and all factors": [
        "linear_bias",
        "weight",
        "token_weights",
        "z_loss",
        "logit_scale",
        "softcap",
        "temperature (N,)",
    ],
}
MOST = {name: names for name, names in TOGETHER.items() if len(names) > 1}
each = pytest.mark.parametrize("names", TOGETHER.values(), ids=list(TOGETHER))
most = pytest.mark.parametrize("names", MOST.values(), ids=list(MOST))
# one of each schema is not slow: of a number of bytes, and of a name
BY_SCHEMA = {"smoothing and all factors": MOST["smoothing and all factors"]} | TOGETHER


def arguments_of(x: OptionsCase, leaves: tuple[Tensor, ...]) -> dict[str, Any]:
    """Return the options as `torch.ops.cutefce.loss` takes them."""
    options = x.with_leaves(leaves)
    if "temperature" in options:
        divisor = torch.as_tensor(options["temperature"], device=x.case.h.device)
        options["temperature"] = divisor
    return options


@pytest.mark.parametrize("names", rest_slow(BY_SCHEMA))
@pytest.mark.parametrize("workspace", rest_slow(["min", None, "max"], default=2))
def test_opcheck(names: list[str], workspace: str | None, device: str) -> None:
    x = options_case(names, 20, 8, 50, device=device)
    leaves = x.leaves
    overload = torch.ops.cutefce.loss.default
    if isinstance(workspace, str):
        overload = torch.ops.cutefce.loss.preset
    options = {"reduction": "mean", "workspace": workspace, **arguments_of(x, leaves)}
    torch.library.opcheck(overload, (leaves[0], leaves[1], x.case.y), options)


@pytest.mark.parametrize("outputs", rest_slow([",".join(OUTPUTS), "lse", "entropy"]))
def test_opcheck_of_outputs(outputs: str, device: str) -> None:
    x = options_case(["linear_bias", "logit_scale", "temperature (N,)"], 20, 8, 50, device=device)
    leaves = x.leaves
    options = {"outputs": outputs, **arguments_of(x, leaves)}
    torch.library.opcheck(
        torch.ops.cutefce.log_probs.default, (leaves[0], leaves[1], x.case.y), options
    )


def values_of(results: Any) -> list[Tensor]:
    return [x for x in results if isinstance(x, Tensor)]


@pytest.mark.parametrize("dynamic", rest_slow([True, False]))
@pytest.mark.parametrize("names", rest_slow(MOST))
def test_compiled_equals_eager(
    names: list[str], dynamic: bool, small_tiles: PortableTiles, device: str
) -> None:
    def loss(h: Tensor, w: Tensor, y: Tensor, options: dict[str, Any]) -> list[Tensor]:
        return [cutefce.linear_cross_entropy(h * 2, w, y, **options) + 1]

    def outputs(h: Tensor, w: Tensor, y: Tensor, options: dict[str, Any]) -> list[Tensor]:
        served = "linear_bias", "logit_scale", "temperature"
        some = {name: value for name, value in options.items() if name in served}
        return values_of(cutefce.linear_log_probs(h * 2, w, y, outputs=OUTPUTS, **some))

    for step in (loss, outputs):
        torch.compiler.reset()
        backend = "aot_eager" if device == "cpu" else "inductor"
        compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend=backend)
        for tokens in (40, 70, 33):
            x = options_case(names, tokens, 16, 333, device=device)
            results = []
            for function in (compiled, step, compiled):
                leaves = x.leaves
                values = function(leaves[0], leaves[1], x.case.y, x.with_leaves(leaves))
                floats = [value for value in values if value.requires_grad]
                total = torch.stack([value.square().sum() for value in floats]).sum()
                results.append([*values, *torch.autograd.grad(total, leaves)])
            for eager, fast in zip(*results[1:], strict=True):
                torch.testing.assert_close(fast, eager)
                if device == "cpu":
                    assert torch.equal(fast, eager)


def test_compiled_entropy_with_softcap_is_detached(device: str) -> None:
    """A graph has gradients of all its outputs; that of this one is refused."""
    x = options_case(["softcap"], 30, 16, 100, device=device)

    def step(h: Tensor, w: Tensor, y: Tensor, detaches: bool) -> tuple[Tensor, Tensor]:
        values = cutefce.linear_log_probs(h * 2, w, y, outputs=("entropy",), softcap=2.5)
        entropy = values.entropy
        assert entropy is not None
        return values.log_probs, entropy.detach() if detaches else entropy

    torch.compiler.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    results = []
    for function in (compiled, step, compiled):
        h, w = x.leaves
        log_probs, entropy = function(h, w, x.case.y, True)
        results.append([log_probs, entropy, *torch.autograd.grad(log_probs.sum(), (h, w))])
    for fast, eager in zip(results[2], results[1], strict=True):
        assert are_same(fast, eager)
    with pytest.raises(Exception, match="softcap: got one with 'entropy' in outputs"):
        compiled(x.leaves[0], x.leaves[1], x.case.y, False)


def test_changing_numbers_share_graphs(device: str) -> None:
    """A temperature that is annealed, as a tensor, compiles once."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    x = options_case([], 30, 16, 100, device=device)

    def step(h: Tensor, w: Tensor, y: Tensor, divisor: Tensor) -> Tensor:
        return cutefce.linear_cross_entropy(h, w, y, temperature=divisor)

    compiled = torch.compile(step, fullgraph=True, backend=counter)
    for number in range(10):
        h, w = x.leaves
        divisor = torch.tensor(1 + number / 7, device=device)
        assert are_same(compiled(h, w, x.case.y, divisor), step(h, w, x.case.y, divisor))
    assert counter.frame_count == 1


@pairwise_of(
    {"names": MOST}, names=TOGETHER, given=[("mean", "min"), ("mean", "max"), ("none", None)]
)
def test_backward_twice_and_runs_are_bitwise_equal(
    names: list[str], given: tuple[str, str | None], small_tiles: PortableTiles, device: str
) -> None:
    reduction, workspace = given
    x = options_case(names, 150, 48, 333, dtype=torch.bfloat16, device=device)
    runs = []
    for _ in range(2):
        leaves = x.leaves
        options = x.with_leaves(leaves) | {"reduction": reduction, "workspace": workspace}
        loss = cutefce.linear_cross_entropy(leaves[0], leaves[1], x.case.y, **options)
        upstream = x.case.upstream if loss.ndim else None
        runs += [
            torch.autograd.grad(loss, leaves, upstream, retain_graph=True),
            torch.autograd.grad(loss, leaves, upstream),
        ]
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))


class Functions:
    """Ours and the unfused form as functions of hidden states, weight and bias, in float64."""

    def __init__(self, names: list[str], reduction: str, device: str) -> None:
        x = options_case(names, 8, 4, 20, dtype=torch.float64, device=device)
        self.x, self.leaves = x, x.leaves
        self.inputs = (*(leaf.detach() for leaf in self.leaves),)
        self.reduction = reduction

    def ours(self, *leaves: Tensor) -> Tensor:
        options = self.x.with_leaves(leaves) | {"reduction": self.reduction}
        loss: Tensor = cutefce.linear_cross_entropy(leaves[0], leaves[1], self.x.case.y, **options)
        return loss

    def unfused(self, *leaves: Tensor) -> Tensor:
        options = self.x.with_leaves(leaves) | {"reduction": self.reduction}
        t = leaves[0] @ leaves[1].t()
        return losses_of_logits(model_logits(t, **options), self.x.case.y, **options)


@pytest.mark.parametrize("names", rest_slow(MOST))
def test_gradcheck(names: list[str], device: str) -> None:
    x = Functions(names, "mean", device)
    assert torch.autograd.gradcheck(x.ours, x.leaves)


@pairwise_of(
    {"name": FEW},
    names=TOGETHER,
    name=sorted(broken_names(torch.float32)),
    workspace=["min", 200_000, "max"],
)
def test_non_finite_inputs_end_as_those_of_torch(
    names: list[str], name: str, workspace: int | str, small_tiles: PortableTiles
) -> None:
    """Losses have torch's kind, gradients are finite nowhere where torch's are not.

    Smoothed losses, of sums over all classes, are not finite where torch's are not, but may be NaN
    for inf; where logits are near the largest number, torch's sums overflow and ours need not.
    """
    case = broken_case(name, torch.float32)
    x = OptionsCase(case, options_case(names, 150, 48, 333).options)
    if "token_weights" in x.options:
        x.options["token_weights"][ROW] = 0.7
    leaves = x.leaves
    options = x.with_leaves(leaves)
    t = leaves[0] @ leaves[1].t()
    losses = losses_of_logits(model_logits(t, **options), case.y, **options)
    wanted = torch.autograd.grad(losses, leaves, case.upstream)
    want, counts = losses.detach(), options.get("token_weights", torch.ones(150)) != 0
    loss, *gradients = x.ours(workspace=workspace)
    if "label_smoothing" not in options:
        assert_same_kind(loss, want)
    else:
        assert torch.equal(loss.isfinite(), want.isfinite()) or "near the" in name
        torch.testing.assert_close(loss[want.isfinite()], want[want.isfinite()])
    for gradient, other in zip(gradients, wanted, strict=True):
        rows = counts if gradient is gradients[0] else slice(None)
        assert_no_healthier(gradient[rows], other[rows])
    # 0 times what is not finite, in torch
    assert not gradients[0][~counts].any()


@pytest.mark.gpu
@pytest.mark.parametrize("workspace", ["max", "min"])
@most
def test_graph_capture_replays_the_eager_result(names: list[str], workspace: str) -> None:
    """Capture forbids every wait for the GPU, so this also shows that there is none."""
    x = options_case(names, 300, 64, 5000, dtype=torch.bfloat16, device="cuda")
    leaves = x.leaves
    options = arguments_of(x, leaves)  # a number would be copied from the host

    def step() -> tuple[Tensor, ...]:
        loss = cutefce.linear_cross_entropy(
            leaves[0], leaves[1], x.case.y, **options, workspace=workspace
        )
        some = {name: options[name] for name in ("linear_bias", "logit_scale", "temperature")}
        values = values_of(
            cutefce.linear_log_probs(
                leaves[0], leaves[1], x.case.y, outputs=OUTPUTS, workspace=workspace, **some
            )
        )
        gradients = torch.autograd.grad(loss + values[0].sum() + values[2].sum(), leaves)
        return loss, *values, *gradients

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        eager = step()
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for result in captured:
        result.detach().fill_(0)
    graph.replay()
    for a, b in zip(eager, captured, strict=True):
        assert torch.equal(a, b)


@pairwise(classes=[None, 3], gradient=["exact", "sampled"], use_reentrant=[False, True])
def test_outputs_are_checkpointed(
    classes: int | None, gradient: str, use_reentrant: bool, device: str
) -> None:
    case = options_case([], 20, 8, 50, device=device)
    outputs = ("lse",) if gradient == "sampled" else ("lse", "entropy")
    given: dict[str, Any] = {"target": case.case.y}
    if classes is not None:
        given = {"target_indices": torch.randint(50, (20, classes), device=device)}

    def total(h: Tensor, w: Tensor) -> Tensor:
        found = cutefce.linear_log_probs(h, w, outputs=outputs, gradient=gradient, **given)
        return torch.stack([value.sum() for value in values_of(found)]).sum()

    results = []
    for evaluate in (total, functools.partial(checkpoint, total, use_reentrant=use_reentrant)):
        h, w = case.leaves
        torch.manual_seed(1)
        evaluate(h, w).backward()
        assert h.grad is not None and w.grad is not None
        results.append((h.grad, w.grad))
    for a, b in zip(*results, strict=True):
        assert are_same(a, b)


def test_hooks_unpack_what_is_saved_once(device: str) -> None:
    case, unpacked = options_case([], 20, 8, 50, device=device), list[int]()
    h, w = case.leaves

    def unpack(saved: tuple[int, Tensor]) -> Tensor:
        unpacked.append(saved[0])
        return saved[1]

    numbers = itertools.count()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (next(numbers), x), unpack):
        found = cutefce.linear_log_probs(h, w, case.case.y, outputs=("entropy",))
    torch.autograd.grad(found.log_probs.sum(), (h, w))
    assert unpacked and len(set(unpacked)) == len(unpacked)
