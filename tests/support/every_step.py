"""A step of every kind on a GPU, for a memory checker: `make sanitize`.

Tokens and classes are no multiples of tiles, so that every kernel has ragged edges, and there are
enough of them for several tiles of each block of the grid's last wave.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import cutefce
from tests.support.options import OPTIONS, options_case, soft_case

TOKENS, HIDDEN, VOCAB = 613, 264, 9001
FEW_TOKENS = 100
WORKSPACES: tuple[str | int | None, ...] = "min", 8 << 20, None, "max"


def main() -> None:
    """Take every step in both dtypes that kernels serve."""
    cutefce.set_strict(True)  # no step of torch takes a kernel's place
    for dtype in (torch.bfloat16, torch.float16):
        torch.manual_seed(0)
        for name in steps(dtype):
            torch.cuda.synchronize()
            print(f"{dtype}, {name}", flush=True)


def steps(dtype: torch.dtype) -> Iterator[str]:
    """Take each step, then yield its name."""
    h, w = operands(TOKENS, VOCAB, dtype)
    y = torch.randint(VOCAB, (TOKENS,), device="cuda")
    few = operands(FEW_TOKENS, VOCAB, dtype)[0], w, y[:FEW_TOKENS]
    ignored = torch.where(torch.rand(TOKENS, device="cuda") < 0.8, -100, y)
    buffer = torch.zeros(VOCAB, HIDDEN, device="cuda")
    for workspace in WORKSPACES:
        more: dict[str, Any] = {"workspace": workspace}
        for name, inputs in {
            "plain": (h, w, y),
            "ignored rows": (h, w, ignored),
            "no row": (h, w, torch.full_like(y, -100)),
            "few tokens": few,
            "frozen weight": (h, w.detach(), ignored),
            "frozen hidden states": (h.detach(), w, ignored),
        }.items():
            cutefce.linear_cross_entropy(*inputs, **more).backward()
            yield f"{name}, workspace {workspace}"
        cutefce.linear_cross_entropy(h, w, ignored, accumulate_into=buffer, **more).backward()
        yield f"float32 buffer, workspace {workspace}"
        if dtype == torch.bfloat16:
            own = torch.zeros_like(w)
            cutefce.linear_cross_entropy(h, w, y, accumulate_into=own, **more).backward()
            yield f"bfloat16 buffer, workspace {workspace}"
            options = more | {"gradient": "sampled", "samples": 64}
            cutefce.linear_cross_entropy(h, w, ignored, **options).backward()
            yield f"sampled gradients, workspace {workspace}"
        for option in OPTIONS:
            options_case([option], TOKENS, HIDDEN, VOCAB, dtype=dtype, device="cuda").ours(**more)
            yield f"{option}, workspace {workspace}"
        soft_case([], 16, TOKENS, HIDDEN, VOCAB, dtype=dtype, device="cuda").ours(**more)
        yield f"soft targets, workspace {workspace}"
        for outputs in ((), ("entropy", "argmax")):
            found = cutefce.linear_log_probs(h, w, y, outputs=outputs, **more)
            found.log_probs.sum().backward()
            yield f"log-probabilities and {outputs}, workspace {workspace}"
        for divergence in ("forward_kl", "reverse_kl", "jsd", "tv"):
            h_t, w_t = (x.detach() for x in operands(TOKENS, VOCAB - 1, dtype))
            heads = h, w[: VOCAB - 1], h_t, w_t
            cutefce.linear_divergence(*heads, divergence=divergence, **more).backward()
            yield f"{divergence}, workspace {workspace}"


def operands(tokens: int, vocab: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return hidden states and a weight, which require gradients."""
    h = torch.randn(tokens, HIDDEN, device="cuda").to(dtype)
    w = torch.randn(vocab, HIDDEN, device="cuda").mul(HIDDEN**-0.5).to(dtype)
    return h.requires_grad_(), w.requires_grad_()


if __name__ == "__main__":
    main()
