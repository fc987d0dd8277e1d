"""The demo's model, a small decoder-only transformer, and trainings of it and of other examples."""

import gc
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Maps hidden (batch, context, hidden), weight (vocab, hidden), target (batch, context) to ()."""

Batch = tuple[Tensor, Tensor]
"""Tokens and targets, both (batch, context)."""


@dataclass(frozen=True)
class Sizes:
    """The model and its training; a step sees batch x context tokens."""

    hidden: int
    layers: int
    heads: int
    context: int
    batch: int
    steps: int
    learning_rate: float


SEED = 0
VALIDATION_BATCHES = 8
CPU = Sizes(hidden=128, layers=2, heads=4, context=128, batch=8, steps=50, learning_rate=3e-3)
GPU = Sizes(hidden=1024, layers=8, heads=16, context=1024, batch=16, steps=200, learning_rate=6e-4)


class Block(nn.Module):
    """Causal self-attention and an MLP, each after a norm and added to its input."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.up = nn.Linear(hidden, 4 * hidden, bias=False)
        self.down = nn.Linear(4 * hidden, hidden, bias=False)
        for last in (self.out, self.down):
            nn.init.zeros_(last.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Map x (batch, context, hidden) to the same shape."""
        qkv = self.qkv(norm(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (batch, heads, context, head size) each
        mixed = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        result: Tensor = x + self.down(F.gelu(self.up(norm(x))))
        return result


def norm(x: Tensor) -> Tensor:
    """Divide x (..., size) by its root mean square over the last dimension."""
    return F.rms_norm(x, x.shape[-1:])


def rotate(x: Tensor) -> Tensor:
    """Normalize x (..., context, head size) and apply rotary position embedding."""
    context, size = x.shape[-2:]
    rates = 10000 ** -torch.linspace(0, 1, size // 2, device=x.device)
    angles = torch.outer(torch.arange(context, device=x.device), rates)
    cos, sin = angles.cos(), angles.sin()
    first, second = norm(x).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


class Transformer(nn.Module):
    """Token ids to hidden states; `head.weight` (vocab, hidden) is tied to the embedding."""

    def __init__(self, vocab: int, sizes: Sizes) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, sizes.hidden)
        self.blocks = nn.Sequential(
            *(Block(sizes.hidden, sizes.heads) for _ in range(sizes.layers))
        )
        self.head = nn.Linear(sizes.hidden, vocab, bias=False)
        self.head.weight = self.embedding.weight
        nn.init.normal_(self.head.weight, std=0.5 * sizes.hidden**-0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens (batch, context) to the head's input (batch, context, hidden)."""
        return norm(self.blocks(self.embedding(tokens)))


class Training:
    """A model, its optimizer, and the loss (nats a token) and seconds of every step."""

    def __init__(self, name: str, loss: Loss, model: Transformer, sizes: Sizes) -> None:
        self.name, self.loss, self.model = name, loss, model
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=sizes.learning_rate, betas=(0.9, 0.95), fused=True
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min(1, (step + 1) / 10) * (1 - step / sizes.steps)
        )
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def evaluate(self, batch: Batch) -> Tensor:
        """Return the mean loss () of a batch; on a GPU, GEMMs run in bfloat16."""
        tokens, target = batch
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.is_cuda):
            return self.loss(self.model(tokens), self.model.head.weight, target)

    def step(self, batch: Batch) -> None:
        """Take one optimizer step, and record its loss and seconds."""
        begin = time.perf_counter()
        loss = self.evaluate(batch)
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())
        if batch[0].is_cuda:
            torch.cuda.synchronize()
        self.seconds.append(time.perf_counter() - begin)

    def measure_peak(self, batch: Batch) -> int:
        """Return `peak_bytes` of a forward and backward, after a warm-up; no optimizer step."""
        for _ in range(2):
            peak = peak_bytes(lambda: self.evaluate(batch).backward(), batch[0].device)
            self.optimizer.zero_grad()
        return peak


def fit(
    parameters: Iterable[Tensor],
    loss: Callable[[], Tensor],
    steps: int,
    group: dist.ProcessGroup | None = None,
) -> list[float]:
    """Take steps of Adam and return the loss before each, of which some are printed.

    Args:
        parameters: what is trained.
        loss: returns the loss () of the next batch.
        steps: how many.
        group: ranks whose gradients add up, in a loss of all their batches; the first one prints.
    """
    trained = [*parameters]
    optimizer = torch.optim.Adam(trained, lr=1e-2)
    is_first = group is None or dist.get_rank(group) == 0
    losses: list[float] = []
    for step in range(steps):
        optimizer.zero_grad()
        value = loss()
        value.backward()
        for x in trained if group is not None else ():
            dist.all_reduce(x.grad, group=group)
        optimizer.step()
        losses.append(value.item())
        if is_first and (step % 10 == 0 or step == steps - 1):
            print(f"step {step}: loss {losses[-1]:.4f}")
    return losses


def peak_bytes(call: Callable[[], None], device: torch.device) -> int:
    """Return the peak bytes that `call` holds beyond what is allocated before it.

    Counts bytes requested from torch's allocator of the device: activations, the loss's workspace
    and gradients, but not the parameters, the optimizer's state or the process itself.
    """
    gc.collect()  # garbage freed during the call would hide what it allocates
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        call()
        torch.cuda.synchronize()
        return int(torch.cuda.memory_stats()["requested_bytes.all.peak"] - before)
    with torch.autograd.profiler.profile(profile_memory=True) as profiler:
        call()
    assert profiler.kineto_results is not None
    events = [event for event in profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def logits_loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Return the mean loss () from all logits (tokens, vocab) in float32."""
    logits = F.linear(hidden, weight).float()
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def sample_batches(
    ids: Tensor, sizes: Sizes, count: int, device: torch.device, seed: int = SEED
) -> Iterator[Batch]:
    """Yield batches from random places of ids (tokens,); targets are the tokens one later."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        starts = torch.randint(len(ids) - sizes.context, (sizes.batch, 1), generator=generator)
        places = starts + torch.arange(sizes.context)
        yield ids[places].to(device), ids[places + 1].to(device)
