"""Steps of sampled gradients in plain torch: exponentials of which few are not 0.

Entries are chosen where a backward computes exponentials again; products take all of these.  No
step waits for a GPU.
"""

import torch
from torch import Tensor

from cutefce.cute_kernels.config import PortableTiles
from cutefce.ops.program.run import Call
from cutefce.ops.program.steps import Step
from cutefce.ops.program.views import exps_of, states_of
from cutefce.ops.rows.blocks import blocks
from cutefce.ops.sampling.estimates import class_sums, sampling_of
from cutefce.ops.sampling.random_bits import random_bits, row_states
from cutefce.ops.sampling.sample_sizes import chosen_rows


def estimate(call: Call, s: Step) -> None:
    """Estimate log-sum-exps, +inf of ignored tokens."""
    (frequent, drawn, log_ratio), logit = class_sums(call), call.values["logits"]
    terms = [logit[:, None], drawn.sums.log() + (drawn.references + log_ratio)]
    if frequent is not None:
        terms.append(frequent.sums.log() + frequent.references)
    call.values["estimate"] = torch.cat(terms, 1).logsumexp(1)


def decide(call: Call, s: Step) -> None:
    """Keep what a backward chooses entries by."""
    stats, sampling = call.values["stats"], sampling_of(call)
    lse = stats.reference + stats.sum_exp.log()
    torch.maximum(call.values.pop("estimate"), lse, out=call.view("deciding")[0])
    _hashes(call).copy_(row_states(sampling.seed, sampling.rows))


def _hashes(call: Call) -> Tensor:
    """Return the states (N,) int32 of tokens' random bits."""
    return call.view("hashes")[0].view(torch.int32)


def project_samples(call: Call, s: Step) -> None:
    """Compute exponentials of some columns again, and clear those that are not kept."""
    x, states, out = call.inputs, states_of(call, s), exps_of(call, s)
    given = call.values["stats" if "stats" in s.reads else "scaling"].reference
    # e / q of small entries
    least = (call.view("deciding")[0] - given).exp_().div_(call.program.problem.samples)
    ids = torch.arange(*s.columns, device=out.device) + x.targets.first
    tiles, width = x.primitives.config, exps_of(call, s, whole=True).shape[1]
    assert isinstance(tiles, PortableTiles)
    tile = least.new_empty(min(len(out), tiles.tile_rows), width)
    for rows in blocks(len(out), tiles.tile_rows):
        exps = tile[: rows.stop - rows.start]
        operands = states[rows], x.w, s.columns, given[rows], x.targets.per_token(rows), exps
        x.primitives.projection.recompute_exp(*operands)
        exps = exps[:, : out.shape[1]]
        for part in blocks(len(exps), chosen_rows(len(ids), out.device.type)):
            own = slice(rows.start + part.start, rows.start + part.stop)
            _choose(exps[part], least[own, None], random_bits(_hashes(call)[own], ids))
        out[rows] = exps


def _choose(exps: Tensor, least: Tensor, bits: Tensor) -> None:
    """Let those of `exps` (R, C) that are below `least` (R, 1) be that or 0, as the bits say."""
    chance = (exps / least).mul_(2.0**32).to(torch.int64)
    kept = bits.to(torch.int64).bitwise_and_(0xFFFFFFFF) < chance
    del chance  # freed before the next ones are allocated
    exps.copy_(torch.where(exps < least, torch.where(kept, least, 0), exps))
