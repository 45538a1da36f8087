"""The Tokenizer: encoding, decoding, its cache of conversions (C005, C069)."""

from __future__ import annotations

import json
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from pagedserve.engine.tokenizer import Tokenizer, check_unicode
from pagedserve.errors import RequestError
from tests.helpers.gguf_files import byte_level_vocabulary
from tests.helpers.tokenizer_files import TEXTS, load_tokenizer, write_gguf_vocabulary
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


def test_conversion_is_kept_and_renewed(tmp_path):
    cache = tmp_path / "cache"
    path = write_gguf_vocabulary(tmp_path, byte_level_vocabulary(byte_level_backend()))
    first = load_tokenizer(path, cache)
    kept = list((cache / "tokenizers").glob("*.json"))
    assert len(kept) == 1
    assert load_tokenizer(path, cache).encode("hello") == first.encode("hello")
    kept[0].write_text("{ broken")
    assert load_tokenizer(path, cache).encode("hello") == first.encode("hello")
    assert json.loads(kept[0].read_text())["special_tokens"] == first.special_tokens
    time.sleep(0.01)
    write_gguf_vocabulary(tmp_path, byte_level_vocabulary(byte_backend_with_added_tokens()))
    assert load_tokenizer(path, cache).vocab_size == first.vocab_size + 3


def test_an_unwritable_cache_is_no_obstacle(tmp_path):
    path = write_gguf_vocabulary(tmp_path, byte_level_vocabulary(byte_level_backend()))
    (tmp_path / "cache").write_text("a file")
    assert load_tokenizer(path, tmp_path / "cache").encode("x") == [byte_level_backend().token_to_id("x")]


@given(st.text())
@settings(deadline=None)
def test_byte_level_round_trip(byte_level, text):  # C067
    ids = byte_level.encode(text, add_special_tokens=False)
    assert byte_level.decode(ids, skip_special_tokens=False) == text


@given(st.lists(st.integers(0, 330), max_size=40), st.booleans())
@settings(deadline=None)
def test_decode_equals_the_library_but_for_the_number_of_replacements(byte_level, ids, skip):
    assert byte_level.decode(ids, skip_special_tokens=skip) == byte_level.backend.decode(ids, skip_special_tokens=skip)


@given(st.lists(st.integers(0, 500), max_size=40), st.booleans())
@settings(deadline=None)
def test_sentencepiece_decode_equals_the_library_where_bytes_are_valid(spm, ids, skip):
    expected = spm.backend.decode(ids, skip_special_tokens=skip)
    if "\ufffd" not in expected:
        assert spm.decode(ids, skip_special_tokens=skip) == expected


def test_batch_equals_single(byte_level):
    assert byte_level.encode_batch(TEXTS) == [byte_level.encode(text) for text in TEXTS]
    assert byte_level.encode_batch([]) == []


@pytest.mark.parametrize("text", ["\ud83d", "a\udc00b"])
def test_lone_surrogates_are_the_clients_mistake(byte_level, text):
    for encode in (byte_level.encode, lambda t: byte_level.encode_batch(["fine", t]), check_unicode):
        with pytest.raises(RequestError, match="lone surrogate"):
            encode(text)
    check_unicode("\u0000\ufeff🦜")


def test_spaces_between_special_tokens(byte_level):
    """Byte-level text has no separator; a tokenizer without decoder puts spaces, which the flag removes."""
    ids = [byte_level.token_to_id(t) for t in ("<SP1>", "<SP2>", "x", "<SP1>")]
    for spaces in (True, False):
        text = byte_level.decode(ids, skip_special_tokens=False, spaces_between_special_tokens=spaces)
        assert text == "<SP1><SP2>x<SP1>"
    backend = byte_backend_with_added_tokens()
    content = json.loads(backend.to_str())
    content["decoder"] = None
    bare = Tokenizer(Backend.from_str(json.dumps(content)))
    assert bare.decode(ids, skip_special_tokens=False) == bare.backend.decode(ids, skip_special_tokens=False)
    tight = bare.decode(ids, skip_special_tokens=False, spaces_between_special_tokens=False)
    assert tight == "<SP1><SP2> x <SP1>"


def test_ids_with_holes_count_in_the_vocabulary_size():
    content = json.loads(byte_level_backend().to_str())
    content["model"]["vocab"]["zz"] = 400
    backend = Backend.from_str(json.dumps(content))
    backend.add_tokens([AddedToken("zz", special=True)])
    assert Tokenizer(backend).vocab_size == 401


def test_encoding_a_long_text_lets_other_threads_run(byte_level):
    text = "the quick brown fox " * 100_000
    ticks = 0
    finished = threading.Event()

    def tick():
        nonlocal ticks
        while not finished.is_set():
            ticks += 1
            time.sleep(0.001)

    thread = threading.Thread(target=tick)
    thread.start()
    before = ticks
    byte_level.encode(text)
    during = ticks - before
    finished.set()
    thread.join()
    assert during > 5
