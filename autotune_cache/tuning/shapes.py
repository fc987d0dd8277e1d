"""Named sets of problem sizes for `cutefce tune`, as tokens × hidden × vocab."""

import re
from itertools import product

Sizes = tuple[int, int, int]
"""(tokens, hidden, vocab)."""

DECODE_TOKENS = (1, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512)
HEAD_TOKENS = (2048, 8192)
"""Token counts at which the LM heads of models are tuned; others have the defaults."""


def _heads(hidden: tuple[int, ...], vocab: int) -> tuple[Sizes, ...]:
    return tuple((tokens, size, vocab) for size, tokens in product(hidden, HEAD_TOKENS))


NAMED: dict[str, tuple[Sizes, ...]] = {
    "few-tokens": tuple((tokens, 4096, 131072) for tokens in DECODE_TOKENS),
    "llama3": _heads((2048, 3072, 4096, 8192, 16384), 128256),
    "qwen3": _heads((1024, 2048, 2560, 4096, 5120), 151936),
    "gemma2": _heads((2304, 3584, 4608), 256000),
    "gemma3": _heads((1152, 2560, 3840, 5376), 262144),
    "deepseek-v3": _heads((7168,), 129280),
    "gpt-oss": _heads((2880,), 201088),
    "paper": tuple(
        (tokens, 4096, vocab)
        for vocab, tokens in product(
            (32768, 65536, 131072, 262144), (1024, 2048, 4096, 8192, 16384, 32768)
        )
    ),
}
"""Decoding, LM heads of model families, and the grid of the paper (arXiv 2511.17599)."""


def parse(text: str) -> tuple[Sizes, ...]:
    """Return the sizes of a named set, or those of `text` in the form NxDxV.

    Raises:
        ValueError: if `text` is neither.
    """
    if text in NAMED:
        return NAMED[text]
    size = r"([1-9]\d{0,17})"  # of 64 bits
    found = re.fullmatch(f"{size}[x×]{size}[x×]{size}", text)
    if found is None or int(found[2]) % 8:
        names = ", ".join(NAMED)
        raise ValueError(
            f"shapes: got {text!r:.40}, expected one of {names}, or tokens x hidden x vocab "
            "such as 8192x4096x131072, with a hidden size that is a multiple of 8"
        )
    return ((int(found[1]), int(found[2]), int(found[3])),)
