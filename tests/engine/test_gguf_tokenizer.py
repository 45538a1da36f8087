"""Tokenizers of GGUF files against the vocabularies that the files were made from (C091)."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sentencepiece import SentencePieceProcessor
from tokenizers import Tokenizer as Backend
from tokenizers import normalizers, pre_tokenizers

from pagedserve.engine.token_bytes import byte_alphabet
from pagedserve.errors import ModelLoadError
from tests.helpers.byte_tokenizer import BOS_ID, EOS_ID
from tests.helpers.demo_model import demo_model
from tests.helpers.gguf_files import byte_level_vocabulary, spm_vocabulary
from tests.helpers.tokenizer_files import TEXTS, load_tokenizer, sentencepiece_model, write_gguf_vocabulary
from tests.helpers.tokenizers import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    Piece,
    byte_backend_with_added_tokens,
    byte_level_backend,
    spm_backend,
    spm_pieces,
)

SPELLING = {byte: char for char, byte in byte_alphabet().items()}


def assert_same_vocabulary(ours, backend, texts=TEXTS):
    for text in texts:
        ids = backend.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special_tokens=False) == ids, text
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == backend.decode(ids, skip_special_tokens=skip)
    assert ours.vocab_size == backend.get_vocab_size()


def test_byte_level_gguf(tmp_path):
    backend = byte_backend_with_added_tokens()
    path = write_gguf_vocabulary(tmp_path, byte_level_vocabulary(backend, chat_template="T"))
    ours = load_tokenizer(path, tmp_path)
    assert_same_vocabulary(ours, backend, [*TEXTS, "a<SP1>b<note>c<SP2> "])
    assert ours.decode(ours.encode("<SP1>x<note>")) == "x<note>"
    assert ours.chat_templates == {"default": "T"}
    assert ours.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert (ours.bos_token_id, ours.eos_token_id) == (BOS_ID, EOS_ID)


@pytest.mark.parametrize("space_prefix", [None, True, False])
def test_sentencepiece_gguf(tmp_path, space_prefix):
    path = write_gguf_vocabulary(tmp_path, spm_vocabulary(spm_pieces(), space_prefix=space_prefix))
    ours = load_tokenizer(path, tmp_path)
    # llama.cpp's rule: a space before the text, and again after every special token.
    backend = spm_backend(add_prefix_space=space_prefix is not False)
    prefix = [normalizers.Prepend("▁")] if space_prefix is not False else []
    backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    content = json.loads(backend.to_str())
    content["pre_tokenizer"] = None
    assert_same_vocabulary(ours, Backend.from_str(json.dumps(content)))
    assert ours.encode("hello")[0] == 1, "SentencePiece vocabularies add BOS unless the file says otherwise"
    spaced = [ours.id_to_text(i) for i in ours.encode("he</s>he", add_special_tokens=False)]
    assert spaced == (["he", "</s>", "he"] if space_prefix is False else [" he", "</s>", " he"])


def test_gguf_of_a_sentencepiece_model(tmp_path):
    """The same vocabulary by way of GGUF metadata: pieces, scores and types, no merges."""
    oracle = SentencePieceProcessor(model_proto=sentencepiece_model())
    kinds = [(oracle.is_unknown, UNKNOWN), (oracle.is_control, CONTROL), (oracle.is_byte, BYTE)]
    pieces = [
        Piece(oracle.id_to_piece(i), oracle.get_score(i), next((kind for test, kind in kinds if test(i)), NORMAL))
        for i in range(oracle.vocab_size())
    ]
    ours = load_tokenizer(write_gguf_vocabulary(tmp_path, spm_vocabulary(pieces)), tmp_path)
    for text in ["the quick fox", "jumps over the lazy dogs", " the  lazy ", "é汉🦜", "a\nb", "  ", "brownbrown 199"]:
        assert ours.encode(text) == [1, *oracle.encode(text)], text
        assert ours.decode(ours.encode(text)) == oracle.decode(oracle.encode(text))


@pytest.mark.parametrize("add_bos", [True, False])
def test_gguf_flags_decide_on_bos(tmp_path, add_bos):  # C091
    spm = load_tokenizer(write_gguf_vocabulary(tmp_path, spm_vocabulary(spm_pieces(), add_bos=add_bos)), tmp_path)
    assert (spm.encode("hello")[0] == 1) is add_bos
    vocabulary = byte_level_vocabulary(byte_level_backend(), add_bos=add_bos)
    level = load_tokenizer(write_gguf_vocabulary(tmp_path, vocabulary, "b.gguf"), tmp_path)
    assert (level.encode("hello")[0] == BOS_ID) is add_bos
    assert level.encode("", add_special_tokens=True) == ([BOS_ID] if add_bos else [])


def test_gguf_pre_tokenizers_cut_as_their_models_do(tmp_path):
    """Merges reach over a cut only where the pre-tokenizer makes none."""
    backend = byte_level_backend()
    content = json.loads(backend.to_str())
    for left, right in (("1", "2"), ("12", "3"), ("123", "4"), ("'", "s"), ("!", "Ċ"), ("Ġ", "1"), ("'", "S")):
        content["model"]["vocab"][left + right] = len(content["model"]["vocab"])
        content["model"]["merges"].append([left, right])
    content["added_tokens"] = content["added_tokens"][:4]
    richer = Backend.from_str(json.dumps(content))

    def pieces(pre, text):
        vocabulary = byte_level_vocabulary(richer, pre=pre, add_bos=False)
        ours = load_tokenizer(write_gguf_vocabulary(tmp_path, vocabulary, f"{pre}.gguf"), tmp_path)
        return [ours.id_to_text(i) for i in ours.encode(text)]

    assert pieces("gpt-2", "1234") == ["1234"]
    assert pieces("smollm", "1234") == ["1", "2", "3", "4"]
    assert pieces("smollm", " 1") == [" ", "1"]
    assert pieces("llama-bpe", "1234") == ["123", "4"]
    assert pieces("qwen2", "1234") == ["1", "2", "3", "4"]
    assert pieces("deepseek-coder", "1234") == ["1", "2", "3", "4"] and pieces("deepseek-v3", "1234") == ["123", "4"]
    assert pieces("deepseek-llm", "1234") == ["1234"] and pieces("deepseek-llm", "!\n") == ["!", "\n"]
    assert pieces("gpt-2", " 1") == [" 1"]
    assert pieces("gpt-2", "x'S") == ["x", "'", "S"] and pieces("llama-bpe", "x'S") == ["x", "'S"]
    assert pieces("llama-bpe", "!\n") == ["!\n"] and pieces("gpt-2", "!\n") == ["!", "\n"]


def test_unknown_gguf_vocabularies_are_refused_by_name(tmp_path):
    vocabulary = byte_level_vocabulary(byte_level_backend(), pre="martian")
    with pytest.raises(ModelLoadError, match=r"tokenizer\.ggml\.pre 'martian' is not supported; known: gpt-2"):
        load_tokenizer(write_gguf_vocabulary(tmp_path, vocabulary, "a.gguf"), tmp_path)
    with pytest.raises(ModelLoadError, match=r"tokenizer\.ggml\.model 't5'"):
        load_tokenizer(write_gguf_vocabulary(tmp_path, lambda w: w.add_tokenizer_model("t5"), "b.gguf"), tmp_path)
    with pytest.raises(ModelLoadError, match=r"tokenizer\.ggml\.model None"):
        load_tokenizer(write_gguf_vocabulary(tmp_path, None, "c.gguf"), tmp_path)


def test_inconsistent_gguf_vocabularies_are_refused(tmp_path):
    def bad_merge(writer):
        byte_level_vocabulary(byte_level_backend())(writer)
        writer.kv_data[0]["tokenizer.ggml.merges"].value[0] = "nonexistent pair"

    with pytest.raises(ModelLoadError, match="inconsistent"):
        load_tokenizer(write_gguf_vocabulary(tmp_path, bad_merge, "a.gguf"), tmp_path)

    def bad_eos(writer):
        byte_level_vocabulary(byte_level_backend())(writer)
        writer.kv_data[0]["tokenizer.ggml.eos_token_id"].value = 70000

    with pytest.raises(ModelLoadError, match="eos_token_id 70000"):
        load_tokenizer(write_gguf_vocabulary(tmp_path, bad_eos, "b.gguf"), tmp_path)


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    return load_tokenizer(demo_model(), tmp_path_factory.mktemp("cache"))


def test_demo_vocabulary(demo):
    assert demo.vocab_size == 49152
    assert (demo.bos_token_id, demo.eos_token_id, demo.pad_token_id, demo.unk_token_id) == (1, 2, 2, 0)
    assert demo.special_ids == frozenset(range(17))
    assert demo.encode("Hello") == [19556], "no BOS is added"
    assert [demo.id_to_text(i) for i in demo.encode("Hello world 12345")] == ["Hello", " world", " ", *"12345"]
    assert demo.encode("<|im_start|>user<|im_end|>") == [1, demo.token_to_id("user"), 2]
    assert demo.decode([1, 19556, 2]) == "Hello"


@pytest.fixture(scope="module")
def published(demo):
    """SmolLM2's tokenizer.json cuts off every digit, then words as GPT-2 does."""
    backend = Backend.from_str(demo.backend.to_str())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return backend


@given(st.text() | st.text("a1 ９²'\n!é").map(lambda text: text * 3))
@settings(deadline=None)
def test_demo_vocabulary_encodes_as_the_published_tokenizer(demo, published, text):
    ids = demo.encode(text)
    assert ids == published.encode(text).ids
    # Some bytes that only rare scripts need are not in this vocabulary.
    known = {byte for byte in text.encode() if demo.token_to_id(SPELLING[byte]) is not None}
    assert demo.decode(ids, skip_special_tokens=False) == bytes(b for b in text.encode() if b in known).decode(
        "utf-8", "replace"
    )
