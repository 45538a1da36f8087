"""Finding a model: folders, GGUF files, catalog names, hub ids, and what is missing (C088)."""

from __future__ import annotations

import json

import pytest

from pagedserve import catalog
from pagedserve.errors import ModelLoadError, ModelNotFoundError
from pagedserve.model_files import INDEX_FILE, resolve
from tests.helpers.byte_tokenizer import EOS_ID, IM_END_ID
from tests.helpers.checkpoints import llama_config, random_tensors, write_checkpoint
from tests.helpers.demo_model import demo_model
from tests.helpers.gguf_files import write_llama_gguf


@pytest.fixture(scope="module")
def config():
    return llama_config()


@pytest.fixture(scope="module")
def tensors(config):
    return random_tensors(config)


def test_folder(tmp_path, config, tensors):
    folder = write_checkpoint(tmp_path / "tiny", config, tensors)
    files = resolve(str(folder))
    assert (files.kind, files.name, files.path) == ("safetensors", "tiny", folder)
    assert files.config["hidden_size"] == config["hidden_size"]
    assert files.generation_config["eos_token_id"] == [EOS_ID, IM_END_ID]
    assert files.weight_files == (folder / "model.safetensors",)
    assert set(files.tokenizer_files) == {"tokenizer.json", "tokenizer_config.json"}


def test_sharded_folder(tmp_path, config, tensors):
    folder = write_checkpoint(tmp_path / "tiny", config, tensors, num_shards=3)
    assert [f.name for f in resolve(str(folder)).weight_files] == [
        f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)
    ]
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"model-00002-of-00003\.safetensors") as caught:
        resolve(str(folder))
    assert "00001" not in str(caught.value)
    assert resolve(str(folder), require_weights=False).config["hidden_size"] == config["hidden_size"]


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "a\\b"])
def test_an_index_cannot_point_outside_its_folder(tmp_path, config, tensors, name):
    folder = write_checkpoint(tmp_path / "tiny", config, tensors, num_shards=2)
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": {"x": name}}))
    with pytest.raises(ModelLoadError, match="outside its folder"):
        resolve(str(folder))


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": []}', '{"weight_map": {"a": 1}}', "\xff"])
def test_a_broken_index_is_named(tmp_path, config, tensors, content):
    folder = write_checkpoint(tmp_path / "tiny", config, tensors, num_shards=2)
    (folder / INDEX_FILE).write_text(content, encoding="latin-1")
    with pytest.raises(ModelLoadError, match=INDEX_FILE):
        resolve(str(folder))


def test_other_safetensors_names(tmp_path, config, tensors):
    folder = write_checkpoint(tmp_path / "tiny", config, tensors)
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    (folder / "consolidated.safetensors").write_bytes(b"")
    assert [f.name for f in resolve(str(folder)).weight_files] == ["weights.safetensors"]


def test_pickles_are_refused(tmp_path, config, tensors):  # C110
    folder = write_checkpoint(tmp_path / "tiny", config, tensors)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match="pickles"):
        resolve(str(folder))
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(ModelLoadError, match=r"no \*\.safetensors"):
        resolve(str(folder))
    assert resolve(str(folder), require_weights=False).weight_files == ()


@pytest.mark.parametrize("content", ["", "{", "[1]", '"x"', "[" * 100_000])
def test_a_broken_config_is_named(tmp_path, config, tensors, content):
    folder = write_checkpoint(tmp_path / "tiny", config, tensors)
    (folder / "config.json").write_text(content)
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        resolve(str(folder))


def test_gguf_file_and_folder_with_one(tmp_path, config, tensors):
    path = write_llama_gguf(tmp_path / "Tiny.Q8.gguf", config, tensors, quant="Q8_0")
    for name in (path, tmp_path):
        files = resolve(str(name))
        assert files.kind == "gguf"
        assert files.path == path and files.weight_files == (path,)
        assert files.config["num_hidden_layers"] == 2
    assert resolve(str(path)).name == "Tiny.Q8"
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert resolve(str(tmp_path)).kind == "gguf", "a config.json without safetensors beside it changes nothing"
    (tmp_path / "config.json").unlink()
    write_llama_gguf(tmp_path / "other.gguf", config, tensors)
    with pytest.raises(ModelNotFoundError, match=r"Tiny\.Q8\.gguf, other\.gguf"):
        resolve(str(tmp_path))


def test_a_folder_with_a_tokenizer_alone_serves_as_one(tmp_path, config, tensors):
    folder = write_checkpoint(tmp_path / "tiny", config, tensors)
    (folder / "config.json").unlink()
    assert resolve(str(folder), require_weights=False).config == {}
    with pytest.raises(ModelNotFoundError, match=r"neither config\.json nor a \.gguf"):
        resolve(str(folder))


@pytest.mark.parametrize("name", ["tiny-model", "Tiny-Model"])
def test_catalog_name(tmp_path, config, tensors, monkeypatch, name):
    path = write_llama_gguf(tmp_path / "from-catalog.gguf", config, tensors)
    monkeypatch.setitem(catalog.CATALOG, "tiny-model", catalog.CATALOG["smollm2-135m-instruct"])
    monkeypatch.setattr(catalog, "fetch", lambda name, **_: path if name == "tiny-model" else None)
    files = resolve(name)
    assert (files.name, files.path, files.kind) == ("tiny-model", path, "gguf")
    monkeypatch.chdir(tmp_path)
    folder = write_checkpoint(tmp_path / name, config, tensors)
    assert resolve(name).path.resolve() == folder, "a folder of that name comes first"


@pytest.mark.parametrize(
    "name", ["./nowhere", "/nowhere/model", "~/nowhere-at-all", "missing.gguf", "a b", "a/b/c", "", " "]
)
def test_what_cannot_be_a_hub_id_is_not_looked_up(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *a, **k: pytest.fail("asked the hub"))
    with pytest.raises(ModelNotFoundError, match="no such file or folder"):
        resolve(name)


def test_hub_without_a_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise ConnectionError("Name or service not known\nsecond line")

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    messages = []
    with pytest.raises(ModelNotFoundError) as caught:
        resolve("some-org/some-model", log=messages.append)
    text = str(caught.value)
    assert "\n" not in text
    assert all(
        word in text for word in ("some-org/some-model", "hub", "Name or service", "smollm2-135m-instruct", ".gguf")
    )
    assert messages == ["Fetching some-org/some-model from the Hugging Face hub"]


def test_hub_download_is_used(tmp_path, config, tensors, monkeypatch):
    folder = write_checkpoint(tmp_path / "snapshots" / "abc123", config, tensors)
    asked = {}

    def download(repo, **options):
        asked.update(options, repo=repo)
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    files = resolve("some-org/tiny", revision="v1", log=lambda _: None)
    assert files.name == "some-org/tiny" and files.weight_files == (folder / "model.safetensors",)
    assert asked["repo"] == "some-org/tiny" and asked["revision"] == "v1"
    # Weights as pickles or repository code are not even fetched.
    assert not any(pattern.endswith((".bin", ".py")) for pattern in asked["allow_patterns"])


def test_a_catalog_model_brings_its_authors_sampling_defaults() -> None:
    defaults = catalog.CATALOG["smollm2-135m-instruct"].generation_config
    demo_model()
    found = resolve("smollm2-135m-instruct").generation_config
    assert defaults.items() <= found.items()
    assert {"eos_token_id"} <= set(found)
