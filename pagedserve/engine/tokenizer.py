"""Text to token ids and back, by the `tokenizers` library alone (importing transformers takes seconds).

A tokenizer comes from a folder's tokenizer.json, from GGUF metadata, or, where there are only older files, from
transformers; the last two are converted once and kept in the cache folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from pagedserve import envs
from pagedserve.engine import gguf_tokenizer, hf_tokenizer
from pagedserve.engine.token_bytes import TokenBytes
from pagedserve.errors import ModelLoadError, RequestError
from pagedserve.log import get_logger
from pagedserve.model_files import ModelFiles

logger = get_logger(__name__)

# Part of the cache key: raise it when a conversion changes.
_CONVERSION_VERSION = 2


class Tokenizer:
    """One model's vocabulary.

    `special_tokens` maps roles ("bos_token", "eos_token", …) to text, as chat templates see them; `chat_templates` maps
    names ("default", "tool_use", …) to Jinja sources. Thread-safe: encoding a long text may run off the event loop.
    """

    has_texts = True  # False: ids stand for nothing that could be read, searched or constrained

    def __init__(
        self,
        backend: Backend,
        *,
        special_tokens: Mapping[str, str] | None = None,
        chat_templates: Mapping[str, str] | None = None,
    ):
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.special_tokens = dict(special_tokens or {})
        self.chat_templates = dict(chat_templates or {})
        self.token_bytes = TokenBytes(backend)
        added = backend.get_added_tokens_decoder()
        self.added_ids = frozenset(added)
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        # Ids may have holes, so the count alone is not enough.
        self.vocab_size = max(backend.get_vocab_size(with_added_tokens=True), max(added, default=-1) + 1)
        self.bos_token_id = self._id_of("bos_token")
        self.eos_token_id = self._id_of("eos_token")
        self.pad_token_id = self._id_of("pad_token")
        self.unk_token_id = self._id_of("unk_token")

    @classmethod
    def load(cls, files: ModelFiles, *, cache_dir: Path | None = None) -> Tokenizer:
        """The tokenizer of a model that was found. Raises ModelLoadError where it is missing or of an unknown kind."""
        folder = (cache_dir or envs.cache_dir()) / "tokenizers"
        if files.kind == "gguf":
            return cls._converted(folder, (files.path,), lambda: gguf_tokenizer.convert(files.path))
        if "tokenizer.json" in files.tokenizer_files:
            return cls(**hf_tokenizer.load(files.tokenizer_files, files.config))
        sources = tuple(files.tokenizer_files.values())
        if not sources:
            raise ModelLoadError(
                f"{files.path} has no tokenizer files; give --tokenizer a folder that has tokenizer.json"
            )
        return cls._converted(folder, sources, lambda: hf_tokenizer.convert(files.path))

    # -- text to ids --------------------------------------------------------------------------------------------------

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; `add_special_tokens` puts BOS/EOS where the model wants them.

        Raises RequestError for a text that is not Unicode (a lone surrogate).
        """
        # Not `backend.encode`: that one holds the interpreter lock, a batch of one does not.
        return self.encode_batch([text], add_special_tokens=add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of several texts, computed in parallel and with the interpreter lock released."""
        try:
            encodings = self.backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        except (TypeError, UnicodeEncodeError) as error:
            for text in texts:
                check_unicode(text)
            raise RequestError(f"the text cannot be tokenized: {error}") from error
        return [encoding.ids for encoding in encodings]

    def token_to_id(self, token: str) -> int | None:
        """Id of a token spelled as in the vocabulary."""
        return self.backend.token_to_id(token)

    # -- ids to text --------------------------------------------------------------------------------------------------

    def decode(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        """Text of a whole sequence; bytes that are no UTF-8 become U+FFFD, ids without a token nothing.

        `spaces_between_special_tokens=False` removes the separator between two added tokens. Byte-level and
        SentencePiece decoders have no separator, so there both settings give the same text.
        """
        table = self.token_bytes
        if skip_special_tokens:
            token_ids = [i for i in token_ids if i not in self.special_ids]
        if table.separator and not spaces_between_special_tokens:
            raw = b"".join(self._pieces(token_ids))
        else:
            raw = table.join(token_ids)
        return table.strip(raw.decode("utf-8", "replace"))

    def _pieces(self, token_ids: Sequence[int]) -> list[bytes]:
        pieces, previous = [], None
        for i, token_id in enumerate(token_ids):
            pieces.append(self.token_bytes.of_first(token_id) if i == 0 else self.token_bytes.of(token_id))
            if i and not (token_id in self.added_ids and previous in self.added_ids):
                pieces.insert(-1, self.token_bytes.separator)
            previous = token_id
        return pieces

    def id_to_bytes(self, token_id: int) -> bytes:
        """What one token adds to a text (the `bytes` of a logprobs entry)."""
        return self.token_bytes.of(token_id)

    def id_to_text(self, token_id: int) -> str:
        """The token alone as text (the `token` of a logprobs entry); part of a character shows as U+FFFD."""
        return self.token_bytes.of(token_id).decode("utf-8", "replace")

    def id_to_token(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it."""
        return self.backend.id_to_token(token_id)

    def is_special(self, token_id: int) -> bool:
        """True for tokens that `skip_special_tokens` hides."""
        return token_id in self.special_ids

    # -- inside -------------------------------------------------------------------------------------------------------

    def _id_of(self, role: str) -> int | None:
        token = self.special_tokens.get(role)
        return None if token is None else self.backend.token_to_id(token)

    @classmethod
    def _converted(cls, folder: Path, sources: Sequence[Path], convert: Callable[[], dict[str, Any]]) -> Tokenizer:
        identity = [[str(p.resolve()), p.stat().st_size, p.stat().st_mtime_ns] for p in sources]
        key = hashlib.sha256(json.dumps([_CONVERSION_VERSION, identity]).encode()).hexdigest()[:32]
        kept = folder / f"{key}.json"
        try:
            content = json.loads(kept.read_text(encoding="utf-8"))
            return cls(
                Backend.from_str(content["tokenizer"]),
                special_tokens=content["special_tokens"],
                chat_templates=content["chat_templates"],
            )
        except FileNotFoundError:
            pass
        except Exception as error:  # `tokenizers` raises plain Exception for a file it cannot read
            logger.warning("converting the tokenizer again, %s is broken: %s", kept, error)
        converted = convert()
        content = {**converted, "tokenizer": converted["backend"].to_str()}
        del content["backend"]
        try:
            _write_atomically(kept, json.dumps(content, ensure_ascii=False))
        except OSError as error:
            logger.warning("the converted tokenizer cannot be kept in %s: %s", folder, error)
        return cls(**converted)


def check_unicode(text: str, *, param: str | None = None) -> None:
    """Raise RequestError for a text that UTF-8 cannot express: a lone surrogate, which JSON lets through."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the text has a lone surrogate ({text[error.start]!r}) at character {error.start}; this is no valid text",
            param=param,
        ) from error


def _write_atomically(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
    Path(temporary).replace(path)
