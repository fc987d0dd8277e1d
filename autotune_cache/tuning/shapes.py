"""The problems that are tuned by name: tokens × hidden size × vocabulary."""

import re
from itertools import product

Sizes = tuple[int, int, int]
"""(tokens, hidden, vocab)."""

FEW_TOKENS = (1, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512)
HEAD_TOKENS = (2048, 8192)
"""Tokens that the head of a model is tuned for: others take the nearest."""


def _heads(hidden: tuple[int, ...], vocab: int) -> tuple[Sizes, ...]:
    return tuple((tokens, size, vocab) for size, tokens in product(hidden, HEAD_TOKENS))


NAMED: dict[str, tuple[Sizes, ...]] = {
    "few-tokens": tuple((tokens, 4096, 131072) for tokens in FEW_TOKENS),
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
"""Sets of problems: decoding, heads of models, the grid of the paper (arXiv 2511.17599)."""


def parse(text: str) -> tuple[Sizes, ...]:
    """Return the problems of a named set, or the one that `text` spells out as NxDxV.

    Raises:
        ValueError: saying what is expected.
    """
    if text in NAMED:
        return NAMED[text]
    found = re.fullmatch(r"([1-9]\d*)[x×]([1-9]\d*)[x×]([1-9]\d*)", text)
    if found is None or int(found[2]) % 8:
        names = ", ".join(NAMED)
        raise ValueError(
            f"shapes: got {text!r}, expected one of {names}, or tokens x hidden x vocabulary as in "
            "8192x4096x131072, with a hidden size that is a multiple of 8"
        )
    return ((int(found[1]), int(found[2]), int(found[3])),)
