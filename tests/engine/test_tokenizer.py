"""Tokenizers against transformers' AutoTokenizer and against the vocabularies that GGUF files were made from."""

from __future__ import annotations

import io
import json
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from tokenizers import AddedToken, decoders, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer

from pagedserve.engine import hf_tokenizer
from pagedserve.engine.token_bytes import byte_alphabet
from pagedserve.engine.tokenizer import Tokenizer, check_unicode
from pagedserve.errors import ModelLoadError, RequestError
from pagedserve.model_files import resolve
from tests.helpers.byte_tokenizer import BOS_ID, EOS_ID, write_tokenizer
from tests.helpers.checkpoints import llama_config, random_tensors
from tests.helpers.demo_model import demo_model
from tests.helpers.gguf_files import byte_level_vocabulary, spm_vocabulary, write_llama_gguf
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
    write_spm_tokenizer,
)

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


SPELLING = {byte: char for char, byte in byte_alphabet().items()}


def load(folder, cache):
    return Tokenizer.load(resolve(str(folder), require_weights=False), cache_dir=cache)


def write_model_config(folder, model_type="llama"):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**llama_config(), "model_type": model_type}))
    return folder


def assert_like_transformers(folder, tmp_path, extra_texts=()):
    oracle = AutoTokenizer.from_pretrained(folder)
    ours = load(folder, tmp_path / "cache")
    for text in [*TEXTS, *extra_texts]:
        for add_special_tokens in (True, False):
            ids = oracle(text, add_special_tokens=add_special_tokens)["input_ids"]
            assert ours.encode(text, add_special_tokens=add_special_tokens) == ids, text
            for skip in (True, False):
                assert ours.decode(ids, skip_special_tokens=skip) == oracle.decode(ids, skip_special_tokens=skip), text
    assert ours.bos_token_id == oracle.bos_token_id
    assert ours.eos_token_id == oracle.eos_token_id
    assert ours.pad_token_id == oracle.pad_token_id
    assert ours.vocab_size == len(oracle)
    assert (
        ours.special_tokens.items()
        >= {k: v for k, v in oracle.special_tokens_map.items() if isinstance(v, str)}.items()
    )
    return ours


# -- Hugging Face folders -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("add_bos", [True, False])
def test_byte_level_folder(tmp_path, add_bos):
    write_tokenizer(write_model_config(tmp_path / "m"), add_bos=add_bos)
    ours = assert_like_transformers(tmp_path / "m", tmp_path)
    assert ours.encode("x")[: 1 if add_bos else 0] == ([BOS_ID] if add_bos else [])
    assert ours.is_special(EOS_ID) and not ours.is_special(100)


@pytest.mark.parametrize("model_type", ["llama", "mistral"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"legacy": True},
        {"add_bos": False},
        {"add_bos_token": False, "add_eos_token": True},
        {"add_prefix_space": False},
    ],
)
def test_sentencepiece_folder(tmp_path, model_type, settings):
    write_spm_tokenizer(write_model_config(tmp_path / "m", model_type), **settings)
    assert_like_transformers(tmp_path / "m", tmp_path)


@pytest.mark.parametrize("model_type", ["llama", "mistral"])
def test_old_llama_folder_whose_file_prepends_spaces_everywhere(tmp_path, model_type):
    """Llama 2 files of 2023: the space comes from a normalizer, after every special token too."""
    folder = write_spm_tokenizer(write_model_config(tmp_path / "m", model_type))
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.pre_tokenizer = None
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.save(str(folder / "tokenizer.json"))
    content = json.loads((folder / "tokenizer.json").read_text())
    content["pre_tokenizer"] = None
    (folder / "tokenizer.json").write_text(json.dumps(content))
    assert_like_transformers(folder, tmp_path)


def test_added_tokens_of_every_kind(tmp_path):
    folder = write_model_config(tmp_path / "m")
    write_tokenizer(folder)
    settings_file = folder / "tokenizer_config.json"
    config = json.loads(settings_file.read_text())
    fields = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    config["added_tokens_decoder"] = {
        "320": {"content": "<SP1>", "special": True, **fields},
        "321": {"content": "<note>", "special": False, **fields},
        "322": {"content": "<strip>", "special": True, **fields, "lstrip": True, "rstrip": True},
    }
    config["extra_special_tokens"] = ["<SP2>", "th"]
    config["unk_token"] = {"content": "<unk>", "__type": "AddedToken", **fields}
    settings_file.write_text(json.dumps(config))
    texts = ["a<SP1>b<note>c", "x <strip> y", "<SP2>the", "<unk>", "the<SP1><SP1>th"]
    ours = assert_like_transformers(folder, tmp_path, texts)
    ids = ours.encode("<SP1>x<note>", add_special_tokens=False)
    assert ours.decode(ids) == "x<note>"


def test_special_tokens_map_of_old_folders(tmp_path):
    folder = write_model_config(tmp_path / "m")
    write_tokenizer(folder)
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    token = {"content": "<|im_end|>", "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    (folder / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": token}))
    ours = assert_like_transformers(folder, tmp_path)
    assert ours.special_tokens["eos_token"] == "<|im_end|>"


def test_folder_without_tokenizer_json_is_converted_once(tmp_path, monkeypatch):
    folder = write_model_config(tmp_path / "m", "gpt2")
    content = json.loads(byte_level_backend().to_str())
    (folder / "vocab.json").write_text(json.dumps(content["model"]["vocab"]))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(map(" ".join, content["model"]["merges"])))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer", "bos_token": "<s>"}')
    oracle = AutoTokenizer.from_pretrained(folder)
    first = load(folder, tmp_path / "cache")
    monkeypatch.setattr(hf_tokenizer, "convert", lambda _: pytest.fail("converted again"))
    second = load(folder, tmp_path / "cache")
    for text in TEXTS:
        assert first.encode(text) == second.encode(text) == oracle(text)["input_ids"]
    assert second.special_tokens == first.special_tokens


@pytest.fixture(scope="module")
def sentencepiece_model():
    """A SentencePiece BPE as Llama 2's: byte fallback, texts taken as they are."""
    sink = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter([f"the quick brown fox jumps over the lazy dog {i}" for i in range(200)]),
        model_writer=sink,
        **{"vocab_size": 360, "model_type": "bpe", "byte_fallback": True, "character_coverage": 1.0},
        **{"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "minloglevel": 2},
    )
    return sink.getvalue()


def test_folder_with_nothing_but_a_sentencepiece_model(tmp_path, sentencepiece_model):
    folder = write_model_config(tmp_path / "m")
    (folder / "tokenizer.model").write_bytes(sentencepiece_model)
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer", "add_bos_token": true}')
    ours, oracle = load(folder, tmp_path), SentencePieceProcessor(model_proto=sentencepiece_model)
    # Not for a text that begins with a space: there transformers, and so this, adds no second one.
    for text in ["the quick fox", "the  lazy ", "é汉🦜", "a\nb", "12 foxes over", ""]:
        ids = oracle.encode(text)
        assert ours.encode(text) == [1, *ids], text
        assert ours.decode(ids) == oracle.decode(ids)
    assert (ours.bos_token_id, ours.eos_token_id, ours.unk_token_id) == (1, 2, 0)


def test_gguf_of_a_sentencepiece_model(tmp_path, sentencepiece_model, tensors):
    """The same vocabulary by way of GGUF metadata: pieces, scores and types, no merges."""
    oracle = SentencePieceProcessor(model_proto=sentencepiece_model)
    kinds = [(oracle.is_unknown, UNKNOWN), (oracle.is_control, CONTROL), (oracle.is_byte, BYTE)]
    pieces = [
        Piece(oracle.id_to_piece(i), oracle.get_score(i), next((kind for test, kind in kinds if test(i)), NORMAL))
        for i in range(oracle.vocab_size())
    ]
    ours = load(write_gguf(tmp_path, tensors, spm_vocabulary(pieces)), tmp_path)
    for text in ["the quick fox", "jumps over the lazy dogs", "the  lazy ", "é汉🦜", "a\nb", "brownbrown 199"]:
        assert ours.encode(text) == [1, *oracle.encode(text)], text
        assert ours.decode(ours.encode(text)) == oracle.decode(oracle.encode(text))


def test_truncation_and_padding_of_the_file_do_not_apply(tmp_path):
    write_tokenizer(tmp_path)
    backend = Backend.from_file(str(tmp_path / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=10)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert len(load(tmp_path, tmp_path).encode("abcdxyz", add_special_tokens=False)) == 7


def test_missing_and_broken_files_are_named(tmp_path):
    folder = write_model_config(tmp_path / "m")
    with pytest.raises(ModelLoadError, match="has no tokenizer files"):
        load(folder, tmp_path)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json"):
        load(folder, tmp_path)


def test_a_decoder_that_cannot_be_streamed_is_refused():
    backend = byte_level_backend()
    backend.decoder = decoders.WordPiece()
    with pytest.raises(ModelLoadError, match=r"WordPiece.*known: ByteLevel"):
        Tokenizer(backend)


# -- GGUF -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tensors():
    return random_tensors(llama_config())


def write_gguf(tmp_path, tensors, vocabulary, name="v.gguf"):
    return write_llama_gguf(tmp_path / name, llama_config(), tensors, tokenizer=vocabulary)


def assert_same_vocabulary(ours, backend, texts=TEXTS):
    for text in texts:
        ids = backend.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special_tokens=False) == ids, text
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == backend.decode(ids, skip_special_tokens=skip)
    assert ours.vocab_size == backend.get_vocab_size()


def test_byte_level_gguf(tmp_path, tensors):
    backend = byte_backend_with_added_tokens()
    path = write_gguf(tmp_path, tensors, byte_level_vocabulary(backend, chat_template="T"))
    ours = load(path, tmp_path)
    assert_same_vocabulary(ours, backend, [*TEXTS, "a<SP1>b<note>c<SP2> "])
    assert ours.decode(ours.encode("<SP1>x<note>")) == "x<note>"
    assert ours.chat_templates == {"default": "T"}
    assert ours.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert (ours.bos_token_id, ours.eos_token_id) == (BOS_ID, EOS_ID)


@pytest.mark.parametrize("space_prefix", [None, True, False])
def test_sentencepiece_gguf(tmp_path, tensors, space_prefix):
    path = write_gguf(tmp_path, tensors, spm_vocabulary(spm_pieces(), space_prefix=space_prefix))
    ours = load(path, tmp_path)
    assert_same_vocabulary(ours, spm_backend(add_prefix_space=space_prefix is not False))
    assert ours.encode("hello")[0] == 1, "SentencePiece vocabularies add BOS unless the file says otherwise"


@pytest.mark.parametrize("add_bos", [True, False])
def test_gguf_flags_decide_on_bos(tmp_path, tensors, add_bos):
    spm = load(write_gguf(tmp_path, tensors, spm_vocabulary(spm_pieces(), add_bos=add_bos)), tmp_path)
    assert (spm.encode("hello")[0] == 1) is add_bos
    vocabulary = byte_level_vocabulary(byte_level_backend(), add_bos=add_bos)
    level = load(write_gguf(tmp_path, tensors, vocabulary, "b.gguf"), tmp_path)
    assert (level.encode("hello")[0] == BOS_ID) is add_bos
    assert level.encode("", add_special_tokens=True) == ([BOS_ID] if add_bos else [])


def test_gguf_pre_tokenizers_cut_as_their_models_do(tmp_path, tensors):
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
        ours = load(write_gguf(tmp_path, tensors, vocabulary, f"{pre}.gguf"), tmp_path)
        return [ours.id_to_text(i) for i in ours.encode(text)]

    assert pieces("gpt-2", "1234") == ["1234"]
    assert pieces("smollm", "1234") == ["1", "2", "3", "4"]
    assert pieces("smollm", " 1") == [" ", "1"]
    assert pieces("llama-bpe", "1234") == ["123", "4"]
    assert pieces("qwen2", "1234") == ["1", "2", "3", "4"]
    assert pieces("gpt-2", " 1") == [" 1"]
    assert pieces("gpt-2", "x'S") == ["x", "'", "S"] and pieces("llama-bpe", "x'S") == ["x", "'S"]
    assert pieces("llama-bpe", "!\n") == ["!\n"] and pieces("gpt-2", "!\n") == ["!", "\n"]


def test_unknown_gguf_vocabularies_are_refused_by_name(tmp_path, tensors):
    vocabulary = byte_level_vocabulary(byte_level_backend(), pre="martian")
    with pytest.raises(ModelLoadError, match=r"tokenizer\.ggml\.pre 'martian' is not supported; known: gpt-2"):
        load(write_gguf(tmp_path, tensors, vocabulary, "a.gguf"), tmp_path)
    with pytest.raises(ModelLoadError, match=r"tokenizer\.ggml\.model 't5'"):
        load(write_gguf(tmp_path, tensors, lambda w: w.add_tokenizer_model("t5"), "b.gguf"), tmp_path)
    with pytest.raises(ModelLoadError, match=r"tokenizer\.ggml\.model None"):
        load(write_gguf(tmp_path, tensors, None, "c.gguf"), tmp_path)


def test_inconsistent_gguf_vocabularies_are_refused(tmp_path, tensors):
    def bad_merge(writer):
        byte_level_vocabulary(byte_level_backend())(writer)
        writer.kv_data[0]["tokenizer.ggml.merges"].value[0] = "nonexistent pair"

    with pytest.raises(ModelLoadError, match="inconsistent"):
        load(write_gguf(tmp_path, tensors, bad_merge, "a.gguf"), tmp_path)

    def bad_eos(writer):
        byte_level_vocabulary(byte_level_backend())(writer)
        writer.kv_data[0]["tokenizer.ggml.eos_token_id"].value = 70000

    with pytest.raises(ModelLoadError, match="eos_token_id 70000"):
        load(write_gguf(tmp_path, tensors, bad_eos, "b.gguf"), tmp_path)


def test_conversion_is_kept_and_renewed(tmp_path, tensors):
    cache = tmp_path / "cache"
    path = write_gguf(tmp_path, tensors, byte_level_vocabulary(byte_level_backend()))
    first = load(path, cache)
    kept = list((cache / "tokenizers").glob("*.json"))
    assert len(kept) == 1
    assert load(path, cache).encode("hello") == first.encode("hello")
    kept[0].write_text("{ broken")
    assert load(path, cache).encode("hello") == first.encode("hello")
    assert json.loads(kept[0].read_text())["special_tokens"] == first.special_tokens
    time.sleep(0.01)
    write_gguf(tmp_path, tensors, byte_level_vocabulary(byte_backend_with_added_tokens()))
    assert load(path, cache).vocab_size == first.vocab_size + 3


def test_an_unwritable_cache_is_no_obstacle(tmp_path, tensors):
    path = write_gguf(tmp_path, tensors, byte_level_vocabulary(byte_level_backend()))
    (tmp_path / "cache").write_text("a file")
    assert load(path, tmp_path / "cache").encode("x") == [byte_level_backend().token_to_id("x")]


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    return load(demo_model(), tmp_path_factory.mktemp("cache"))


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


# -- the class ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def byte_level():
    return Tokenizer(byte_backend_with_added_tokens())


@pytest.fixture(scope="module")
def spm():
    return Tokenizer(spm_backend())


@given(st.text())
@settings(deadline=None)
def test_byte_level_round_trip(byte_level, text):
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
    assert spm.id_to_bytes(10**6) == b"" and spm.id_to_token(10**6) is None


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
