"""With the model's tokenizer, another one, none, or bytes where nothing but a shape is known."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from pagedserve import LLM, SamplingParams
from pagedserve.config import ModelConfig
from pagedserve.engine.tokenizer_choice import byte_tokenizer, choose_tokenizer
from pagedserve.errors import ConfigError, ModelLoadError, RequestError
from pagedserve.model_files import resolve
from pagedserve.sampling_params import StructuredOutput
from tests.helpers.checkpoints import llama_config, tiny_llama
from tests.helpers.server import server_process

PROMPT = [5, 300, 17, 42]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def shape(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with config.json and nothing else."""
    folder = tmp_path_factory.mktemp("shape")
    (folder / "config.json").write_text(json.dumps(llama_config()))
    return folder


def test_every_byte_is_a_token_and_texts_come_back() -> None:
    tokenizer = byte_tokenizer()
    text = "Zoë ate\n2 €-pies 🥧 <s>"
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert (tokenizer.vocab_size, tokenizer.special_ids) == (256, frozenset())


def test_the_settings_decide(shape: Path, tmp_path: Path) -> None:
    other = tiny_llama(tmp_path)

    def chosen(path: Path, **settings: object) -> int:
        config = ModelConfig(model=str(path), **settings)
        return choose_tokenizer(config, resolve(str(path), require_weights=False)).vocab_size

    assert chosen(shape, load_format="dummy") == 256
    assert chosen(other, load_format="dummy") == 320
    assert chosen(shape, load_format="dummy", tokenizer=str(other)) == 320
    assert chosen(shape, load_format="dummy", skip_tokenizer_init=True) == 320  # the model's own vocabulary
    with pytest.raises(ModelLoadError, match="has no tokenizer files"):
        chosen(shape)
    with pytest.raises(ConfigError, match="contradict each other"):
        ModelConfig(tokenizer=str(other), skip_tokenizer_init=True)
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="names no vocab_size"):
        chosen(tmp_path / "odd", skip_tokenizer_init=True)


def test_ids_without_a_tokenizer_are_those_with_it(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path)
    outputs = []
    for skip in (False, True):
        with LLM(str(folder), skip_tokenizer_init=skip, num_device_blocks=40, num_threads=1) as llm:
            outputs.append(llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].outputs[0])
    with_texts, without = outputs
    assert without.token_ids == with_texts.token_ids
    assert (without.text, with_texts.text != "") == ("", True)


def test_what_needs_texts_is_refused_without_a_tokenizer(shape: Path) -> None:
    with LLM(str(shape), skip_tokenizer_init=True, load_format="dummy", num_device_blocks=40, num_threads=1) as llm:
        for prompt, params in (
            ("hello", GREEDY),
            (PROMPT, SamplingParams(stop=["x"])),
            (PROMPT, SamplingParams(bad_words=["x"])),
        ):
            with pytest.raises(RequestError, match="--skip-tokenizer-init"):
                llm.generate(prompt, params, use_tqdm=False)
        with pytest.raises(RequestError, match="320"):
            llm.generate([320], GREEDY, use_tqdm=False)
        constrained = SamplingParams(structured_output=StructuredOutput(kind="regex", value="[0-9]"), max_tokens=4)
        refused = llm.generate(PROMPT, constrained, use_tqdm=False)[0]
        assert "needs a tokenizer" in refused.error
        assert len(llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 8


@pytest.mark.parametrize("flags", [(), ("--skip-tokenizer-init",)], ids=["bytes", "ids"])
def test_a_shape_is_served(shape: Path, tmp_path: Path, flags: tuple[str, ...]) -> None:
    settings = ("--load-format", "dummy", "--num-device-blocks", "60", "--num-threads", "1", *flags)
    with (
        server_process(shape, *settings, log=tmp_path / "log") as server,
        httpx.Client(base_url=server.base_url, timeout=60) as client,
    ):
        body = {"prompt": PROMPT, "max_tokens": 6, "ignore_eos": True, "logprobs": 1, "return_token_ids": True}
        answer = client.post("/v1/completions", json=body).raise_for_status().json()
        choice = answer["choices"][0]
        assert len(choice["token_ids"]) == answer["usage"]["completion_tokens"] == 6
        if flags:
            assert choice["text"] == ""
            assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in choice["token_ids"]]
        else:
            assert max(choice["token_ids"]) < 256
            assert choice["text"] == bytes(choice["token_ids"]).decode("utf-8", "replace")
        chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3, "ignore_eos": True}
        reply = client.post("/v1/chat/completions", json=chat)
        assert reply.status_code == (400 if flags else 200)
        if flags:
            assert "--skip-tokenizer-init" in reply.json()["error"]["message"] or "template" in reply.text
        else:
            assert reply.json()["usage"]["prompt_tokens"] == len(b"user: hello\nassistant:")
