"""Which tokenizer a model is served with: its own, another one that was named, none, or a stand-in for benchmarks."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from pagedserve import model_files
from pagedserve.config import ModelConfig
from pagedserve.engine.token_bytes import byte_alphabet
from pagedserve.engine.tokenizer import Tokenizer
from pagedserve.errors import ConfigError, RequestError
from pagedserve.log import get_logger
from pagedserve.model_files import ModelFiles

log = get_logger(__name__)

_PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def choose_tokenizer(config: ModelConfig, files: ModelFiles) -> Tokenizer:
    """The tokenizer for `files` under these settings.

    `--skip-tokenizer-init`: none. `--tokenizer`: that one. Random weights (`--load-format dummy`) in a folder without
    tokenizer files: the 256 bytes. Else the model's own. Raises ConfigError or ModelLoadError where that cannot be.
    """
    if config.skip_tokenizer_init:
        vocab_size = files.config.get("vocab_size")
        if not isinstance(vocab_size, int):
            raise ConfigError("--skip-tokenizer-init: config.json names no vocab_size, so prompts cannot be checked")
        return NoTokenizer(vocab_size)
    if config.tokenizer is not None:
        return Tokenizer.load(model_files.resolve(config.tokenizer, require_weights=False, log=log.info))
    if config.load_format == "dummy" and files.kind != "gguf" and not files.tokenizer_files:
        log.info("%s has no tokenizer files; with random weights, tokens are bytes", files.name)
        return byte_tokenizer()
    return Tokenizer.load(files)


class NoTokenizer(Tokenizer):
    """For engines that are given token ids and give token ids back: every id is known, and no text."""

    has_texts = False

    def __init__(self, vocab_size: int):
        backend = Backend(models.BPE())
        backend.decoder = decoders.ByteLevel()
        super().__init__(backend)
        self.vocab_size = vocab_size

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """RequestError: a text cannot be read."""
        raise RequestError("this engine runs without a tokenizer (--skip-tokenizer-init): give token ids")


def byte_tokenizer() -> Tokenizer:
    """Ids 0 to 255 are the bytes of UTF-8, and a chat is its messages behind one another."""
    vocab = {letter: byte for letter, byte in byte_alphabet().items()}
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend, chat_templates={"default": _PLAIN_TEMPLATE})
