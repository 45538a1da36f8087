"""A model with a SentencePiece-style tokenizer, over HTTP: the space between prompt and answer is kept, once (C004)."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.helpers.checkpoints import bigram_llama
from tests.helpers.server import server_process
from tests.helpers.streams import check_stream, strict_json
from tests.helpers.tokenizers import spm_backend, spm_pieces, write_spm_tokenizer

BACKEND = spm_backend()
BOS_ID, EOS_ID = 1, 2
# The prompt's last character -> the pieces that answer it.
ANSWERS = {
    ":": ("▁hello", "▁▁", "wo", "rld", "▁!"),
    "?": ("hel", "lo"),
    ";": ("▁",),
    "=": ("<0xE6>", "<0xB1>", "<0x89>"),
}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder: Path = tmp_path_factory.mktemp("sentencepiece")
    successors = [EOS_ID] * len(spm_pieces())
    for start, pieces in ANSWERS.items():
        chain = [BACKEND.token_to_id(piece) for piece in (start, *pieces)]
        for token_id, following in itertools.pairwise(chain):
            successors[token_id] = following
    bigram_llama(folder, successors, tokenizer=False, bos_token_id=BOS_ID, eos_token_id=EOS_ID)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS_ID}))
    write_spm_tokenizer(folder)
    flags = ("--num-device-blocks", "64", "--num-threads", "1")
    log = tmp_path_factory.mktemp("log") / "sentencepiece.log"
    with server_process(folder, *flags, log=log) as server, httpx.Client(base_url=server.base_url) as client:
        yield client


@pytest.mark.parametrize("start", ANSWERS)
@pytest.mark.parametrize("text", ["Say", "", "the a"])
def test_text_goes_on_where_the_prompt_ended(client: httpx.Client, text: str, start: str) -> None:  # C004
    body = {"prompt": text + start, "max_tokens": 10, "temperature": 0, "return_token_ids": True}
    [choice] = strict_json(client.post("/v1/completions", json=body).content)["choices"]
    prompt, output = choice["prompt_token_ids"], [t for t in choice["token_ids"] if t != EOS_ID]
    assert [BACKEND.id_to_token(t) for t in output] == list(ANSWERS[start])
    assert choice["text"] == BACKEND.decode(prompt + output)[len(BACKEND.decode(prompt)) :]
    stream = check_stream(client.post("/v1/completions", json={**body, "stream": True}).content, chat=False)
    assert stream.choices[0].text == choice["text"]
    [echoed] = client.post("/v1/completions", json={**body, "echo": True}).json()["choices"]
    assert echoed["text"] == text + start + choice["text"]


def test_a_chat_begins_without_the_space_of_its_template(client: httpx.Client) -> None:
    """The template writes BOS itself, so the prompt has one; the tokenizer adds none (C063)."""
    body = {"messages": [{"role": "user", "content": "the"}], "max_tokens": 3, "return_token_ids": True}
    answer = client.post("/v1/chat/completions", json=body).json()
    assert answer["prompt_token_ids"].count(BOS_ID) == 1
    assert answer["prompt_token_ids"] == BACKEND.encode("<s>[INST] the [/INST]", add_special_tokens=False).ids
    assert client.post("/tokenize", json={"messages": body["messages"]}).json()["tokens"] == answer["prompt_token_ids"]
