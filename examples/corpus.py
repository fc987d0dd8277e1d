"""The demo's corpus: the sources of Python's standard library as token ids."""

import os
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

VOCAB = 32768
"""Entries that the vocabulary must have."""

END_OF_FILE = "<|endoffile|>"
"""The token after each file."""

HELD_OUT = 20
"""One of so many files is held out, by path."""

SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
"""Folders left out: other packages, and tests, which not every distribution installs."""


@dataclass(frozen=True)
class Corpus:
    """Token ids (tokens,), int64, of two disjoint sets of files, and the vocabulary's size."""

    train: Tensor
    validation: Tensor
    vocab: int


def load_corpus(tokenizer_path: Path, more: Iterable[str] = ()) -> Corpus:
    """Tokenize the standard library; the tokenizer is trained if its file does not exist.

    `more` are texts that are added to the tokens, and not to what trains the tokenizer.

    Raises:
        RuntimeError: if the file is no tokenizer, or that of another vocabulary; names it.
    """
    texts, held_out = split(read_sources())
    if not tokenizer_path.exists():
        # an interrupted run, or another rank, must not find half of the file
        temporary = tokenizer_path.with_suffix(f".{os.getpid()}.tmp")
        train_tokenizer(texts).save(str(temporary))
        os.replace(temporary, tokenizer_path)
    try:
        tokenizer = Tokenizer.from_file(str(tokenizer_path))
    except Exception as error:  # what the library raises
        raise RuntimeError(f"{tokenizer_path}: {error}; remove it to train it again") from error
    vocab = tokenizer.get_vocab_size()
    if vocab < VOCAB:
        raise RuntimeError(
            f"{tokenizer_path}: got {vocab} entries, expected {VOCAB} or more; "
            f"{len(texts)} sources for training were found below {sysconfig.get_path('stdlib')}"
        )
    more_texts, more_held_out = split([*more])
    train = encode(tokenizer, texts + more_texts)
    return Corpus(train, encode(tokenizer, held_out + more_held_out), vocab)


def read_sources(root: Path | None = None) -> list[str]:
    """Return the texts of the sources below `root` that are UTF-8, in order of path.

    Those of the standard library if `root` is not given.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    texts = []
    for path in sorted(root.rglob("*.py")):
        if SKIPPED_FOLDERS.isdisjoint(path.relative_to(root).parts):
            try:
                texts.append(path.read_text(encoding="utf-8"))
            except UnicodeDecodeError:
                continue
    return texts


def split(texts: list[str]) -> tuple[list[str], list[str]]:
    """Return the texts for training, and those that are held out."""
    training = [text for index, text in enumerate(texts) if index % HELD_OUT]
    return training, texts[::HELD_OUT]


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Return a byte-level BPE tokenizer of VOCAB entries, or fewer if the texts give no more."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[END_OF_FILE],
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> Tensor:
    """Return the token ids (tokens,) of all texts, each followed by END_OF_FILE."""
    encodings = tokenizer.encode_batch_fast([text + END_OF_FILE for text in texts])
    return torch.tensor([token for encoding in encodings for token in encoding.ids])
