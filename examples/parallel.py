"""Train the demo's transformer on several ranks, with the parallelism of torch alone.

    torchrun --nproc-per-node 2 -m examples.parallel tp

tp     every weight is sharded: attention by heads, MLPs by width, embedding and head by vocabulary
sp     the same, and between the layers every rank has a share of each sequence
fsdp   every rank has its own sequences; weights are gathered when they are needed (FSDP2)

Batches and losses are those of `examples/demo.py` for any number of ranks.  On CPUs the backend is
gloo and everything is float32; on GPUs it is NCCL, and matrix products run in bfloat16.
"""

import argparse
import dataclasses
import gc
import os
import statistics
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import cutefce
from examples.corpus import Corpus, load_corpus
from examples.training import (
    CPU,
    GPU,
    SEED,
    VALIDATION_BATCHES,
    Batch,
    Block,
    Loss,
    Sizes,
    Training,
    Transformer,
    sample_batches,
)

MODES = ("tp", "sp", "fsdp")
REPORTED_STEPS = 10


def shard_weights(model: Transformer, mesh: DeviceMesh, activations: Placement) -> None:
    """Shard every weight; `activations` is the placement of (batch, context, hidden) in between."""
    ranks = mesh.size()
    for block in model.blocks:
        assert isinstance(block, Block)
        if block.heads % ranks:
            raise ValueError(f"got {ranks} ranks, expected a divisor of the {block.heads} heads")
        # a rank's part is the q, k and v of its heads
        parts = block.qkv.weight.detach().unflatten(0, (3, ranks, -1)).transpose(0, 1)
        block.qkv.weight = nn.Parameter(parts.flatten(0, 2))
        block.heads //= ranks
    apart = ColwiseParallel(input_layouts=activations)
    together = RowwiseParallel(output_layouts=activations)
    plan = {f"blocks.*.{name}": apart for name in ("qkv", "up")}
    rows = {f"blocks.*.{name}": together for name in ("out", "down")}
    lookup = RowwiseParallel(input_layouts=Replicate(), output_layouts=activations)
    parallelize_module(model, mesh, {**plan, **rows, "embedding": lookup})
    model.head.weight = model.embedding.weight


def loss_of(mesh: DeviceMesh, activations: Placement) -> Loss:
    """Return the loss of hidden states with placement `activations`; the weight names the group."""

    def loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        placed = DTensor.from_local(hidden, mesh, [activations])
        return cutefce.linear_cross_entropy(placed, weight, target)

    return loss


def make_training(mode: str, vocab: int, sizes: Sizes, mesh: DeviceMesh) -> Training:
    """Return the demo's training, spread over the ranks of the mesh."""
    torch.manual_seed(SEED)
    model = Transformer(vocab, sizes).to(mesh.device_type)
    if mode == "fsdp":
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        # the root owns the embedding, which is also the head: it stays gathered for the backward
        fully_shard(model, mesh=mesh, reshard_after_forward=False)
        return Training(mode, cutefce.linear_cross_entropy, model, sizes)
    activations = Shard(1) if mode == "sp" else Replicate()
    shard_weights(model, mesh, activations)
    return Training(mode, loss_of(mesh, activations), model, sizes)


def own_part(mode: str, batch: Batch, mesh: DeviceMesh) -> Batch:
    """Return the sequences that this rank sees."""
    if mode != "fsdp":
        return batch
    tokens, target = (x.tensor_split(mesh.size())[mesh.get_local_rank()] for x in batch)
    return tokens, target


def mean_over_ranks(values: list[float], mesh: DeviceMesh) -> list[float]:
    """Return the mean over the ranks of each value."""
    total = torch.tensor(values, device=mesh.device_type)
    dist.all_reduce(total, group=mesh.get_group())
    return [value / mesh.size() for value in total.tolist()]


def train(mode: str, corpus: Corpus, sizes: Sizes, mesh: DeviceMesh) -> tuple[list[float], float]:
    """Return the loss of every step and the validation loss; rank 0 prints the progress."""
    training = make_training(mode, corpus.vocab, sizes, mesh)
    device = torch.device(mesh.device_type)
    for batch in sample_batches(corpus.train, sizes, sizes.steps, device):
        training.step(own_part(mode, batch, mesh))
        step = len(training.losses)
        if step % REPORTED_STEPS == 0 or step == sizes.steps:
            (loss,) = mean_over_ranks(training.losses[-1:], mesh)
            rate = batch[0].numel() / statistics.median(training.seconds)
            if mesh.get_local_rank() == 0:
                print(f"step {step:4}  loss {loss:.4f}  {rate:,.0f} tokens/s", flush=True)
    with torch.no_grad():
        batches = sample_batches(corpus.validation, sizes, VALIDATION_BATCHES, device)
        found = [training.evaluate(own_part(mode, batch, mesh)).item() for batch in batches]
    losses = mean_over_ranks(training.losses, mesh)
    return losses, statistics.fmean(mean_over_ranks(found, mesh))


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("mode", choices=MODES)
    steps = f"default: {CPU.steps} on CPUs, {GPU.steps} on GPUs"
    parser.add_argument("--steps", type=int, help=steps)
    parser.add_argument("--output", type=Path, default="demo-output", help="the tokenizer's folder")
    arguments = parser.parse_args()
    if "RANK" not in os.environ:
        start = f"torchrun --nproc-per-node 2 -m examples.parallel {arguments.mode}"
        parser.error(f"got no ranks; start it with {start}")
    return arguments


def run(mode: str, folder: Path, sizes: Sizes, device: str) -> None:
    """Train on all ranks; rank 0 makes the tokenizer and prints."""
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = folder / "tokenizer.json"
    if dist.get_rank() == 0 and not tokenizer.exists():
        load_corpus(tokenizer)
    dist.barrier()
    _, validation = train(mode, load_corpus(tokenizer), sizes, mesh)
    if dist.get_rank() == 0:
        print(f"{mode} over {mesh.size()} ranks: validation loss {validation:.4f}")


def main() -> None:
    """Train on the ranks that torchrun started."""
    arguments = parse_arguments()
    device, sizes = "cpu", CPU
    if torch.cuda.is_available():
        device, sizes = "cuda", GPU
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if arguments.steps:
        sizes = dataclasses.replace(sizes, steps=arguments.steps)
    dist.init_process_group()
    run(arguments.mode, arguments.output, sizes, device)
    dist.destroy_process_group()
    # FSDP2's cycles hold groups, whose gloo threads must not outlive the interpreter: it aborts
    gc.collect()


if __name__ == "__main__":
    main()
