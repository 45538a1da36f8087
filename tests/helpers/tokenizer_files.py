"""Tokenizers on disk: loading them, GGUF files that hold little but a vocabulary, a real SentencePiece model."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
from gguf import GGUFWriter

from pagedserve.engine.tokenizer import Tokenizer
from pagedserve.model_files import resolve
from tests.helpers.checkpoints import llama_config, random_tensors
from tests.helpers.gguf_files import write_llama_gguf

TEXTS = [
    "",
    " ",
    "hello world",
    " hello  world ",
    "the\n\nand\tsay 12345 100%",
    "<s>hello</s> world",
    "</s>\n hello<s> the",
    "é汉字🦜👩‍👩‍👧‍👦🇺🇳",
    "\ufeff\u0000\u00a0x",
    "▁hello▁",
    "Hello, World! It's I'm we'll — “quoted”",
]


def load_tokenizer(path: Path, cache_dir: Path) -> Tokenizer:
    """The tokenizer of a folder or GGUF file; conversions are kept in `cache_dir`."""
    return Tokenizer.load(resolve(str(path), require_weights=False), cache_dir=cache_dir)


@cache
def _tensors() -> dict[str, np.ndarray]:
    return random_tensors(llama_config())


def write_gguf_vocabulary(
    folder: Path, vocabulary: Callable[[GGUFWriter], None] | None, name: str = "vocabulary.gguf"
) -> Path:
    """A tiny Llama with this vocabulary."""
    return write_llama_gguf(folder / name, llama_config(), _tensors(), tokenizer=vocabulary)


@cache
def sentencepiece_model() -> bytes:
    """A SentencePiece BPE as Llama 2's: 360 pieces, byte fallback, texts taken as they are."""
    from sentencepiece import SentencePieceTrainer

    sink = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter([f"the quick brown fox jumps over the lazy dog {i}" for i in range(200)]),
        model_writer=sink,
        **{"vocab_size": 360, "model_type": "bpe", "byte_fallback": True, "character_coverage": 1.0},
        **{"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "minloglevel": 2},
    )
    return sink.getvalue()
