"""What each token adds to a text, against the decoders of the library."""

from __future__ import annotations

import pytest
from tokenizers import decoders

from pagedserve.engine.tokenizer import Tokenizer
from pagedserve.errors import ModelLoadError
from tests.helpers.tokenizers import (
    byte_backend_with_added_tokens,
    byte_level_backend,
    spm_backend,
)


@pytest.fixture(scope="module")
def byte_level():
    return Tokenizer(byte_backend_with_added_tokens())


@pytest.fixture(scope="module")
def spm():
    return Tokenizer(spm_backend())


def test_a_decoder_that_cannot_be_streamed_is_refused():
    backend = byte_level_backend()
    backend.decoder = decoders.WordPiece()
    with pytest.raises(ModelLoadError, match=r"WordPiece.*known: ByteLevel"):
        Tokenizer(backend)


@pytest.mark.parametrize("prepend_scheme", ["always", "first", "never"])
def test_metaspace_decoder(prepend_scheme):
    backend = spm_backend()
    backend.decoder = decoders.Metaspace(replacement="▁", prepend_scheme=prepend_scheme)
    ours = Tokenizer(backend)
    for text in ("hello world", " hello", "the  and"):
        for ids in (ours.encode(text), ours.encode(text)[1:]):
            assert ours.decode(ids) == backend.decode(ids)


def test_single_tokens_for_logprobs(byte_level, spm):
    newline = byte_level.encode("\n", add_special_tokens=False)[0]
    assert (byte_level.id_to_bytes(newline), byte_level.id_to_text(newline)) == (b"\n", "\n")
    half = byte_level.encode("é", add_special_tokens=False)[0]
    assert (byte_level.id_to_bytes(half), byte_level.id_to_text(half)) == (b"\xc3", "\ufffd")
    word = spm.token_to_id("▁hello")
    assert (spm.id_to_text(word), spm.id_to_token(word)) == (" hello", "▁hello")
    assert spm.id_to_bytes(spm.token_to_id("<0xE6>")) == b"\xe6"
    assert spm.id_to_token(10**6) is None
    assert all(spm.id_to_bytes(nothing) == b"" for nothing in (10**6, -1, 2**40))
    assert spm.decode([-1, word, 2**63]) == "hello"
