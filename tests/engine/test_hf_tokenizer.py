"""Tokenizers of Hugging Face folders against transformers' AutoTokenizer."""

from __future__ import annotations

import json

import pytest
from sentencepiece import SentencePieceProcessor
from tokenizers import Tokenizer as Backend
from tokenizers import normalizers
from transformers import AutoTokenizer

from pagedserve.engine import hf_tokenizer
from pagedserve.errors import ModelLoadError
from tests.helpers.byte_tokenizer import BOS_ID, EOS_ID, write_tokenizer
from tests.helpers.checkpoints import llama_config
from tests.helpers.tokenizer_files import TEXTS, load_tokenizer, sentencepiece_model
from tests.helpers.tokenizers import (
    byte_level_backend,
    write_spm_tokenizer,
)


def write_model_config(folder, model_type="llama"):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**llama_config(), "model_type": model_type}))
    return folder


def assert_like_transformers(folder, tmp_path, extra_texts=()):
    oracle = AutoTokenizer.from_pretrained(folder)
    ours = load_tokenizer(folder, tmp_path / "cache")
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
    first = load_tokenizer(folder, tmp_path / "cache")
    monkeypatch.setattr(hf_tokenizer, "convert", lambda _: pytest.fail("converted again"))
    second = load_tokenizer(folder, tmp_path / "cache")
    for text in TEXTS:
        assert first.encode(text) == second.encode(text) == oracle(text)["input_ids"]
    assert second.special_tokens == first.special_tokens


def test_folder_with_nothing_but_a_sentencepiece_model(tmp_path):
    folder = write_model_config(tmp_path / "m")
    (folder / "tokenizer.model").write_bytes(sentencepiece_model())
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer", "add_bos_token": true}')
    ours, oracle = load_tokenizer(folder, tmp_path), SentencePieceProcessor(model_proto=sentencepiece_model())
    # Not for a text that begins with a space: there transformers, and so this, adds no second one.
    for text in ["the quick fox", "the  lazy ", "é汉🦜", "a\nb", "12 foxes over", ""]:
        ids = oracle.encode(text)
        assert ours.encode(text) == [1, *ids], text
        assert ours.decode(ids) == oracle.decode(ids)
    assert (ours.bos_token_id, ours.eos_token_id, ours.unk_token_id) == (1, 2, 0)


def test_truncation_and_padding_of_the_file_do_not_apply(tmp_path):
    write_tokenizer(tmp_path)
    backend = Backend.from_file(str(tmp_path / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=10)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert len(load_tokenizer(tmp_path, tmp_path).encode("abcdxyz", add_special_tokens=False)) == 7


def test_missing_and_broken_files_are_named(tmp_path):
    folder = write_model_config(tmp_path / "m")
    with pytest.raises(ModelLoadError, match="has no tokenizer files"):
        load_tokenizer(folder, tmp_path)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json"):
        load_tokenizer(folder, tmp_path)
