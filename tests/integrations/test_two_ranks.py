"""A Llama of transformers on two ranks: FSDP2, a tensor parallel plan, and sequence parallelism.

On the CPU the model is tiny and float32, on two GPUs it has half a billion parameters in bfloat16.
"""

import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("transformers")

import torch
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F

import cutefce
from tests.support.modes import Seen
from tests.support.ranks import Ranks, started
from tests.support.tiers import rest_slow

TINY = {
    "vocab_size": 202,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
}
LARGE = {
    "vocab_size": 128256,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
}


class Setting(NamedTuple):
    """Two ranks, and the folder of the model that both load."""

    ranks: Ranks
    folder: Path
    is_gpu: bool


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def setting(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Setting]:
    """Yield a setting; its model has random weights, of norms too."""
    device = str(request.param)
    is_gpu = device == "cuda"
    if is_gpu and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    folder = tmp_path_factory.mktemp("llama")
    config = transformers.LlamaConfig(
        **(LARGE if is_gpu else TINY), tie_word_embeddings=False, use_cache=False
    )
    config.dtype = torch.bfloat16 if is_gpu else torch.float32
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.LlamaForCausalLM(config).to(config.dtype)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            nn.init.normal_(parameter, 1.0, 0.2)
    model.save_pretrained(folder)
    del model
    patch = pytest.MonkeyPatch()
    if not is_gpu:  # transformers chooses a mesh of GPUs where it sees any
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
    with started(2, backend="nccl" if is_gpu else "gloo") as ranks:
        patch.undo()
        yield Setting(ranks, folder, is_gpu)


def load(folder: Path, dtype: torch.dtype | str = "auto", **options: Any) -> Any:
    """Return the model in training, on the rank's device."""
    model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=dtype, **options)
    return model.to(device()).train()


def device() -> str:
    return "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"


def data(vocab: int) -> tuple[Tensor, Tensor]:
    """Return tokens of two sequences and their targets, as many in each, at other positions."""
    length = 2048 if device() == "cuda" else 16
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(vocab, (2, length), generator=generator)
    targets = F.pad(tokens[:, 1:], (0, 1), value=-100)
    targets[0, :5] = -100
    targets[1, 7:12] = -100
    return tokens.to(device()), targets.to(device())


class Step(NamedTuple):
    """The loss and the gradients of a training step."""

    loss: float
    gradients: dict[str, Tensor]


def finish(model: nn.Module, loss: Tensor) -> Step:
    """Return the step of a loss, after its backward."""
    loss.backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        grad: Any = parameter.grad
        assert grad is not None, name
        gradients[name] = grad.full_tensor() if isinstance(grad, DTensor) else grad
    return Step(loss.item(), gradients)


@functools.cache
def one_process(folder: Path, dtype: torch.dtype | str = "auto") -> Step:
    """Return the step of one process, with all logits and their loss in float32."""
    model = load(folder, dtype)
    tokens, targets = data(model.config.vocab_size)
    hidden = model.model(tokens).last_hidden_state
    logits = F.linear(hidden.float(), model.lm_head.weight.float())
    return finish(model, F.cross_entropy(logits.flatten(0, 1), targets.flatten()))


def with_fsdp(folder: Path) -> Step:
    """`fully_shard` over layers and root: one sequence a rank, the loss in the model."""
    model = load(folder)
    cutefce.defer(model)
    mesh = init_device_mesh(device(), (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    tokens, targets = data(model.config.vocab_size)
    own = slice(torch.distributed.get_rank(), torch.distributed.get_rank() + 1)
    loss = model(tokens[own], labels=tokens[own], shift_labels=targets[own]).loss
    step = finish(model, loss)
    assert cutefce.deferral_report(model) == (1, {})
    mean = loss.detach()
    torch.distributed.all_reduce(mean)
    return step._replace(loss=float(mean) / 2)


def with_tensor_parallel_plan(folder: Path) -> Step:
    """The model's own plan in transformers, which leaves whole hidden states on each rank."""
    os.environ["LOCAL_RANK"] = str(torch.distributed.get_rank())
    parallel = transformers.distributed.DistributedConfig(tp_size=2)
    model = load(folder, distributed_config=parallel)
    tokens, targets = data(model.config.vocab_size)
    hidden = model.model(tokens).last_hidden_state
    mesh = model.lm_head.weight.device_mesh
    placed = DTensor.from_local(hidden, mesh, [Replicate()])
    return finish(model, fused_loss(placed, model.lm_head.weight, targets))


def with_sequence_parallel_plan(folder: Path) -> Step:
    """The layout of torchtitan's Llama, in torch's styles: norms see half of each sequence."""
    model = load(folder)
    parallelize_module(model, init_device_mesh(device(), (2,)), sequence_parallel_plan())
    tokens, targets = data(model.config.vocab_size)
    positions = torch.arange(tokens.shape[1], device=device())[None]
    hidden: Any = model.model(tokens, position_ids=positions).last_hidden_state
    assert hidden.placements == (Shard(1),)
    return finish(model, fused_loss(hidden, model.lm_head.weight, targets))


def sequence_parallel_plan() -> dict[str, Any]:
    """Return the style of each module; transformers' own plans have no sequence parallelism."""
    share, whole = Shard(1), Replicate()
    plan: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=whole, output_layouts=share),
        "model.norm": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=share),
        "model.layers.*.self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": share},
            desired_input_kwarg_layouts={"hidden_states": whole},
        ),
        "model.layers.*.mlp": PrepareModuleInput(
            input_layouts=(share,), desired_input_layouts=(whole,)
        ),
    }
    for name in ("input_layernorm", "post_attention_layernorm"):
        plan[f"model.layers.*.{name}"] = SequenceParallel()
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
        plan[f"model.layers.*.{name}"] = ColwiseParallel()
    for name in ("mlp.gate_proj", "mlp.up_proj"):
        plan[f"model.layers.*.{name}"] = ColwiseParallel()
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        plan[f"model.layers.*.{name}"] = RowwiseParallel(output_layouts=share)
    return plan


def fused_loss(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """Return the loss of a head whose classes are shared by the ranks; check how it is computed."""
    assert isinstance(head, DTensor) and head.placements == (Shard(0),)
    with Seen() as seen:
        loss = cutefce.linear_cross_entropy(hidden, head, targets)
    names = [str(operator) for operator in seen.operators]
    assert any(name.startswith("cutefce.") for name in names), names
    return loss


class Comparison(NamedTuple):
    """A gradient of two ranks and of one process: norms, and errors against float32."""

    norms: tuple[float, float]
    errors: tuple[float, float]


def compare(parallel: Callable[[Path], Step], folder: Path) -> tuple[Any, dict[str, Comparison]]:
    """Return the losses of two ranks and of one process, and a comparison for each gradient."""
    exact, one = one_process(folder, torch.float32), one_process(folder)
    two = parallel(folder)
    assert two.gradients.keys() == one.gradients.keys()
    found = {}
    for name, expected in exact.gradients.items():
        pair = two.gradients[name].float(), one.gradients[name].float()
        norms = pair[0].norm().item(), pair[1].norm().item()
        errors = (pair[0] - expected).norm().item(), (pair[1] - expected).norm().item()
        found[name] = Comparison(norms, errors)
    return (two.loss, one.loss), found


PLANS = {
    "tensor parallel": with_tensor_parallel_plan,
    "FSDP2": with_fsdp,
    "tensor and sequence parallel": with_sequence_parallel_plan,
}

LOSS_BOUND = {"float32": 1e-5, "bfloat16": 2e-4}
"""Largest relative difference of two losses.

A rounding to bfloat16 is at most 2^-9.  About 20 in each of 24 layers, of independent signs, change
hidden states by 2^-9 √480 = 0.043 of their size, and logits, whose standard deviation is 0.65, by
0.028.  The mean over 4084 tokens of two such changes is 0.028 √2 / √4084 = 6e-4, and that of
their halved squares 4e-4: together 8e-5 of a loss of 12.
"""

ROUNDING = {"float32": 1e-5, "bfloat16": 2**-8}
"""Relative errors of a gradient that a process may have more than another.

In float32 it is the whole bound, since one process is its own reference.  In bfloat16 it is the
rounding of sums, which are first rounded on each rank.
"""


@pytest.mark.parametrize("plan", rest_slow([*PLANS]))
def test_losses_and_gradients_are_those_of_one_process(
    setting: Setting, plan: str, record_property: Callable[[str, object], None]
) -> None:
    if plan == "tensor parallel":
        pytest.importorskip("accelerate")  # transformers distributes models with it
    dtype, sizes = ("bfloat16", LARGE) if setting.is_gpu else ("float32", TINY)
    for losses, gradients in setting.ranks.run(2, compare, PLANS[plan], setting.folder):
        differences = [abs(norms[0] - norms[1]) / norms[1] for norms, _ in gradients.values()]
        record_property("losses of two ranks and one process", losses)
        record_property("largest relative difference of a norm", max(differences))
        assert losses[0] == pytest.approx(losses[1], rel=LOSS_BOUND[dtype])
        assert len(gradients) == 3 + 9 * sizes["num_hidden_layers"]
        for name, (norms, errors) in gradients.items():
            more = ROUNDING[dtype] * norms[1]
            # norms differ by no more than what rounding does to the gradient of one process,
            assert abs(norms[0] - norms[1]) <= errors[1] + more, (name, norms, errors)
            # and the gradients, which norms do not tell apart, are about as accurate as its
            assert errors[0] <= 2 * errors[1] + more, (name, norms, errors)
