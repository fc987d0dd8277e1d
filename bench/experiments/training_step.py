"""Training steps of whole models, with the library's own loss and with fused ones.

transformers        model(input_ids, labels=input_ids), which computes all logits
cutefce             the same after cutefce.defer(model)
cutefce, sampled    the same with sampled gradients
Liger               the same after Liger's patch of the loss alone, where it is installed
torch.compile       the unfused loss of the last hidden states and the LM head's weight, compiled
CCE                 cut_cross_entropy.linear_cross_entropy of the last hidden states and the LM
                    head's weight, where it is installed; its gradients lack what is below a
                    threshold

The models are those of `transformers` with the sizes of Llama 3.2 1B and of Qwen 3 0.6B and random
weights, in bfloat16, with tied embeddings, activation checkpointing and SDPA attention.  A step is
forward, backward and an AdamW update, whose states have the parameters' dtype.  All losses train
the same model in interleaved steps; their values and gradients are compared before the first
update.
"""

import functools
import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, NamedTuple

import click
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cutefce
from bench.harness.cli import DEVICE, Output, repeats_option
from bench.harness.records import Measurement
from bench.harness.reference import IGNORED, unfused
from bench.harness.timing import Call, interleaved, peak_bytes

ModelLoss = Callable[[Any, Tensor], Tensor]
"""Maps a causal language model and tokens (batch, context) to the mean loss ()."""
LIBRARY = "transformers"
LEARNING_RATE = 1e-5
SAMPLED = "cutefce, sampled"
SAMPLES = 256
MAX_DIFFERENCE = 2.0**-8
"""Relative difference of the losses, or of the gradients' norms, that bfloat16 logits explain."""
SAMPLING_NOISE = SAMPLES**-0.5
"""Norm of the noise of sampled gradients over that of the gradients, at most about."""
LLAMA, QWEN = "Llama 3.2 1B", "Qwen 3 0.6B"


@dataclass(frozen=True)
class Training:
    """A model of transformers, its sizes and those of a batch."""

    family: str
    """As transformers names its classes."""
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    vocab: int
    batch: int
    context: int
    dtype: str


TRAININGS = {
    "cpu": {
        LLAMA: Training("Llama", 32, 2, 4, 2, 8, 64, 512, 2, 32, "float32"),
        QWEN: Training("Qwen3", 32, 2, 4, 2, 16, 64, 608, 2, 32, "float32"),
    },
    "cuda": {
        LLAMA: Training("Llama", 2048, 16, 32, 8, 64, 8192, 128256, 8, 4096, "bfloat16"),
        QWEN: Training("Qwen3", 1024, 28, 16, 8, 128, 3072, 151936, 8, 4096, "bfloat16"),
    },
}
MODELS = {"llama": LLAMA, "qwen3": QWEN}
"""Values of `--model`."""


@dataclass(frozen=True)
class Row:
    """One implementation; times are medians of interleaved steps."""

    implementation: str
    parameters: int
    batch: int
    context: int
    vocab: int
    median_ms: float
    quartiles_ms: tuple[float, float]
    ratio_to_library: float
    peak_mib: float
    """Peak of all that is allocated, with parameters and optimizer states."""
    loss: float
    """Of the first step, in nats per token."""
    gradient_norm: float
    """Of the first step, over all parameters."""


@click.command("training-step")
@click.option(
    "--model", "models", multiple=True, type=click.Choice(tuple(MODELS)), help="One model alone."
)
@repeats_option
@click.pass_obj
def command(output: Output, /, models: tuple[str, ...], repeats: int | None) -> None:
    """Training steps of whole models, with the library's own loss and with fused ones."""
    output.require_kernels()
    names = [MODELS[model] for model in models or MODELS]
    output.record(
        "training_step",
        [Measurement({"model": x}, functools.partial(run, x, DEVICE, repeats)) for x in names],
    )


def run(name: str, device: str, repeats: int | None) -> list[Row]:
    """Measure all losses on random tokens.

    Raises:
        ArithmeticError: if losses or gradients differ by more than `MAX_DIFFERENCE`.
    """
    training = TRAININGS[device][name]
    torch.manual_seed(0)
    model = build_model(training, device)
    tokens = torch.randint(training.vocab, (training.batch, training.context), device=device)
    losses = {
        label: functools.partial(_loss, each)
        for label, each in IMPLEMENTATIONS.items()
        if find_spec(each.package) and (device != "cpu" or not each.is_peer)
    }
    first = _first_steps(losses, model, tokens)
    check_agreement(first)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=device != "cpu")
    steps: dict[str, Call] = {
        label: functools.partial(_step, loss, model, optimizer, tokens)
        for label, loss in losses.items()
        if label in first
    }
    times = interleaved(steps, device, repeats)
    parameters = list(model.parameters())
    states = [x for state in optimizer.state.values() for x in state.values()]
    held_bytes = sum(x.nbytes for x in (*parameters, *states, tokens))
    return [
        Row(
            implementation=label,
            parameters=sum(x.numel() for x in parameters),
            batch=training.batch,
            context=training.context,
            vocab=training.vocab,
            median_ms=times[label].median_ms,
            quartiles_ms=times[label].quartiles_ms,
            ratio_to_library=times[label].median_ms / times[LIBRARY].median_ms,
            peak_mib=_total_peak_bytes(steps[label], device, held_bytes) / 2**20,
            loss=loss,
            gradient_norm=gradient_norm,
        )
        for label, (loss, gradient_norm) in first.items()
    ]


def build_model(training: Training, device: str) -> nn.Module:
    """Return the model with random weights.

    Raises:
        click.ClickException: if transformers is not installed.
    """
    try:
        library: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise click.ClickException(
            f"training-step needs transformers (pip install transformers): {error}"
        ) from error
    config = getattr(library, f"{training.family}Config")(
        hidden_size=training.hidden,
        num_hidden_layers=training.layers,
        num_attention_heads=training.heads,
        num_key_value_heads=training.kv_heads,
        head_dim=training.head_size,
        intermediate_size=training.intermediate,
        vocab_size=training.vocab,
        max_position_embeddings=training.context,
        tie_word_embeddings=True,
        use_cache=False,
        attn_implementation="sdpa",
    )
    default_dtype = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, training.dtype))
    try:
        with torch.device(device):
            model = getattr(library, f"{training.family}ForCausalLM")(config)
    finally:
        torch.set_default_dtype(default_dtype)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    trained: nn.Module = model.train()
    return trained


def library_loss(model: Any, tokens: Tensor) -> Tensor:
    """Return the library's own loss, which shifts the labels itself."""
    loss: Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


def cce_loss(model: Any, tokens: Tensor) -> Tensor:
    """Return CCE's loss."""
    function = importlib.import_module("cut_cross_entropy").linear_cross_entropy
    loss: Tensor = function(*head_inputs(model, tokens))
    return loss


def compiled_loss(model: Any, tokens: Tensor) -> Tensor:
    """Return the unfused loss, compiled."""
    hidden, weight, targets = head_inputs(model, tokens)
    loss: Tensor = compiled_unfused()(hidden.flatten(0, 1), weight, targets.flatten())
    return loss


@functools.cache
def compiled_unfused() -> Any:
    """Return the compiled loss, which all steps share."""
    return torch.compile(unfused, dynamic=False)


def head_inputs(model: Any, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states (batch, context, D), weight (V, D) and targets (batch, context).

    The last token of a sequence has no target.
    """
    hidden = model.model(input_ids=tokens).last_hidden_state
    return hidden, model.lm_head.weight, F.pad(tokens[:, 1:], (0, 1), value=IGNORED)


@contextmanager
def unchanged(_: nn.Module) -> Iterator[None]:
    """Use the model as it is."""
    yield


@contextmanager
def deferred(model: nn.Module, **options: Any) -> Iterator[None]:
    """Defer the model's logits."""
    cutefce.defer(model, **options)
    try:
        yield
    finally:
        cutefce.undefer(model)


@contextmanager
def liger(model: nn.Module) -> Iterator[None]:
    """Use Liger's loss in the model's forward, and none of its other kernels."""
    others = dict.fromkeys(("rope", "cross_entropy", "rms_norm", "swiglu"), False)
    patches = importlib.import_module("liger_kernel.transformers")
    family = model.config.model_type  # type: ignore[union-attr]
    getattr(patches, f"apply_liger_kernel_to_{family}")(
        fused_linear_cross_entropy=True, model=model, **others
    )
    try:
        yield
    finally:
        del model.forward


class Implementation(NamedTuple):
    """A loss of a model."""

    package: str
    prepared: Callable[[nn.Module], AbstractContextManager[None]]
    """The state of the model in which `loss` is called."""
    loss: ModelLoss
    is_peer: bool = False
    """Whether it is another project's, which needs a GPU."""


IMPLEMENTATIONS = {
    LIBRARY: Implementation("transformers", unchanged, library_loss),
    "cutefce": Implementation("cutefce", deferred, library_loss),
    SAMPLED: Implementation(
        "cutefce",
        functools.partial(deferred, gradient="sampled", samples=SAMPLES),
        library_loss,
    ),
    "Liger": Implementation("liger_kernel", liger, library_loss, is_peer=True),
    "torch.compile": Implementation("torch", unchanged, compiled_loss, is_peer=True),
    "CCE": Implementation("cut_cross_entropy", unchanged, cce_loss, is_peer=True),
}


def _loss(implementation: Implementation, model: nn.Module, tokens: Tensor) -> Tensor:
    with implementation.prepared(model):
        return implementation.loss(model, tokens)


def _step(
    loss_of: ModelLoss, model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor
) -> None:
    loss_of(model, tokens).backward()
    optimizer.step()
    optimizer.zero_grad()


def _first_steps(
    losses: Mapping[str, ModelLoss], model: nn.Module, tokens: Tensor
) -> dict[str, tuple[float, float]]:
    """Return losses and gradient norms of all but the peers that fail, which are reported."""
    first = {}
    for label, loss in losses.items():
        try:
            first[label] = _evaluate(loss, model, tokens)
        except Exception as error:  # a peer may raise anything, as with another transformers
            if not IMPLEMENTATIONS[label].is_peer:
                raise
            click.echo(f"{label} is left out: {type(error).__name__}: {error}")
            model.zero_grad()
    return first


def _evaluate(loss_of: ModelLoss, model: nn.Module, tokens: Tensor) -> tuple[float, float]:
    """Return loss and norm of the gradients, which are discarded."""
    loss = loss_of(model, tokens)
    loss.backward()
    gradients = [x.grad.float() for x in model.parameters() if x.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    model.zero_grad()
    return loss.item(), norm.item()


def check_agreement(results: dict[str, tuple[float, float]]) -> None:
    """Raise if losses or gradient norms are not those of the library, noise of samples apart."""
    for name, values in results.items():
        noise = SAMPLING_NOISE if name == SAMPLED else 0.0
        limits = MAX_DIFFERENCE, MAX_DIFFERENCE + noise
        for value, wanted, limit in zip(values, results[LIBRARY], limits, strict=True):
            if not abs(value - wanted) <= limit * wanted:
                raise ArithmeticError(
                    f"{name}: got loss and gradient norm {values}, expected {results[LIBRARY]}"
                )


def _total_peak_bytes(step: Call, device: str, held_bytes: int) -> int:
    """Return the peak of everything allocated in a step; `held_bytes` are allocated before it."""
    peak = peak_bytes(step, device)
    return held_bytes + peak if device == "cpu" else torch.cuda.max_memory_allocated()
