"""What a client reads from a live server, number by number, against transformers on the same weights."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import LlamaForCausalLM

from tests.helpers.byte_tokenizer import BOS_ID, byte_ids
from tests.helpers.server import ServerProcess
from tests.helpers.streams import check_stream, strict_json

TEXT = "The number of the thing is"
# Two best logits nearer than this could be swapped by another order of additions, which is no fault of the engine.
MIN_MARGIN = 1e-3


class Reference:
    """transformers' numbers for a list of token ids, one whole forward each."""

    def __init__(self, folder: Path):
        self._model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()

    @torch.inference_mode()
    def logits(self, token_ids: list[int]) -> torch.Tensor:  # [len(token_ids), vocab_size]
        return self._model(torch.tensor([token_ids])).logits[0]

    def logprobs(self, token_ids: list[int]) -> torch.Tensor:  # [len(token_ids), vocab_size]
        return torch.log_softmax(self.logits(token_ids), dim=-1)


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> Reference:
    return Reference(tiny_model)


@pytest.fixture(scope="module")
def client(tiny: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=tiny.base_url, timeout=60) as client:
        yield client


def complete(client: httpx.Client, **body: Any) -> list[dict[str, Any]]:
    """The choices; tokens carry their ids so that numbers can be compared id by id."""
    fixed = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    response = client.post("/v1/completions", json={"prompt": TEXT, **fixed, **body})
    assert response.status_code == 200, response.text
    choices: list[dict[str, Any]] = strict_json(response.content)["choices"]
    return choices


def id_of(token: str) -> int:
    return int(token.removeprefix("token_id:"))


def check_scores(columns: dict[str, list[Any]], token_ids: list[int], logprobs: torch.Tensor, k: int) -> None:
    """Entry i of every column is about token i given the tokens before it; position 0 has nothing before it (C022)."""
    assert [id_of(token) for token in columns["tokens"]] == token_ids
    assert columns["token_logprobs"][0] is None
    assert columns["top_logprobs"][0] is None
    for i in range(1, len(token_ids)):
        row = logprobs[i - 1]
        assert columns["token_logprobs"][i] == pytest.approx(float(row[token_ids[i]]), abs=1e-3)
        check_table(columns["top_logprobs"][i], token_ids[i], row, k)


def check_table(table: dict[str, float], token_id: int, row: torch.Tensor, k: int) -> None:
    """k entries that are the true k best, and the token itself only where it is not among them (C021)."""
    best = row.topk(k)
    expected = {*best.indices.tolist(), token_id}
    assert {id_of(token) for token in table} == expected
    for token, value in table.items():
        assert value == pytest.approx(float(row[id_of(token)]), abs=1e-3)


PROMPTS: dict[str, Any] = {
    "text": TEXT,
    "ids with BOS": [BOS_ID, *byte_ids("some ids, some more")],
    "ids without BOS": byte_ids("no BOS here"),
    "several": ["a", TEXT * 3, "the third of them"],
}


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
def test_echoed_prompts_are_scored(client: httpx.Client, reference: Reference, prompt: Any, max_tokens: int) -> None:
    """C022, and C014 where nothing is generated."""
    for choice in complete(client, prompt=prompt, echo=True, logprobs=2, max_tokens=max_tokens, ignore_eos=True):
        token_ids = choice["prompt_token_ids"] + choice["token_ids"]
        assert len(choice["token_ids"]) == max_tokens
        check_scores(choice["logprobs"], token_ids, reference.logprobs(token_ids), 2)
        assert choice["finish_reason"] == "length"


@pytest.mark.parametrize("k", [0, 1, 5, 20])
def test_scores_of_drawn_tokens(client: httpx.Client, reference: Reference, k: int) -> None:
    """C019 (k = 0 is not "off"), C021: the model's own log-softmax, though the draw was at temperature 2."""
    [choice] = complete(client, logprobs=k, temperature=2, seed=3, max_tokens=8, ignore_eos=True)
    prompt, output = choice["prompt_token_ids"], choice["token_ids"]
    rows = reference.logprobs(prompt + output)[len(prompt) - 1 : -1]
    columns = choice["logprobs"]
    assert {len(column) for column in columns.values()} == {8}
    for i, (token_id, row) in enumerate(zip(output, rows, strict=True)):
        assert columns["token_logprobs"][i] == pytest.approx(float(row[token_id]), abs=1e-3)
        check_table(columns["top_logprobs"][i], token_id, row, k)


@pytest.mark.parametrize("k", [0, 1, 5, 20])
def test_scores_in_chat_are_exactly_the_k_best(client: httpx.Client, reference: Reference, k: int) -> None:
    """C020, C021: in order, and the drawn token's own number beside them."""
    body = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": k, "max_tokens": 6}
    fixed = {"temperature": 2, "seed": 5, "return_token_ids": True, "return_tokens_as_token_ids": True}
    answer = strict_json(client.post("/v1/chat/completions", json={**body, **fixed, "ignore_eos": True}).content)
    [choice] = answer["choices"]
    prompt, output = answer["prompt_token_ids"], choice["token_ids"]
    content = choice["logprobs"]["content"]
    assert [id_of(entry["token"]) for entry in content] == output
    for entry, row in zip(content, reference.logprobs(prompt + output)[len(prompt) - 1 : -1], strict=True):
        assert entry["logprob"] == pytest.approx(float(row[id_of(entry["token"])]), abs=1e-3)
        assert [id_of(top["token"]) for top in entry["top_logprobs"]] == row.topk(k).indices.tolist()
        assert [t["logprob"] for t in entry["top_logprobs"]] == pytest.approx(row.topk(k).values.tolist(), abs=1e-3)


def test_scores_do_not_depend_on_how_tokens_are_drawn(client: httpx.Client, reference: Reference) -> None:
    """C028: one meaning, log-softmax of the raw logits, under every temperature, filter and penalty."""
    ways: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.5},
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 1.0, "top_p": 0.1, "repetition_penalty": 1.5, "presence_penalty": 2},
    ]
    tables = []
    for way in ways:
        [choice] = complete(client, logprobs=5, max_tokens=1, ignore_eos=True, **way)
        row = reference.logprobs(choice["prompt_token_ids"])[-1]
        check_table(choice["logprobs"]["top_logprobs"][0], choice["token_ids"][0], row, 5)
        best = set(row.topk(5).indices.tolist())
        tables.append({t: v for t, v in choice["logprobs"]["top_logprobs"][0].items() if id_of(t) in best})
    assert all(table == pytest.approx(tables[0], abs=1e-4) for table in tables)
    assert sum(map(math.exp, tables[0].values())) <= 1 + 1e-5


def test_scores_of_a_prompt_that_is_cached(client: httpx.Client, reference: Reference) -> None:
    """C025: asked again, asked for a longer prompt, and asked after an ordinary request filled the cache."""
    first = [BOS_ID, *byte_ids("a prompt of thirty-three tokens, ok!")][:33]
    other = [BOS_ID, *byte_ids("first an ordinary request, then the scored one")]
    assert len(first) == 33
    complete(client, prompt=other, max_tokens=2)
    for prompt in (first, first, [*first, *byte_ids(" and some more of it")], other):
        [choice] = complete(client, prompt=prompt, echo=True, logprobs=2, max_tokens=1, temperature=0, ignore_eos=True)
        token_ids = prompt + choice["token_ids"]
        check_scores(choice["logprobs"], token_ids, reference.logprobs(token_ids), 2)
        [whole] = complete(client, prompt=prompt, prompt_logprobs=1, max_tokens=1, temperature=0)
        own = [entry and entry[str(t)]["logprob"] for t, entry in zip(prompt, whole["prompt_logprobs"], strict=True)]
        assert own[0] is None
        assert own[1:] == pytest.approx(choice["logprobs"]["token_logprobs"][1 : len(prompt)], abs=1e-4)


def test_which_tokens_the_penalties_count(client: httpx.Client, reference: Reference) -> None:
    """C035: repetition counts prompt and output, presence and frequency the output alone, from its second token on."""
    prompt = [BOS_ID, *byte_ids("one two one two")]
    settings: list[dict[str, float]] = [
        {"repetition_penalty": 1.3},
        {"presence_penalty": 2.0},
        {"frequency_penalty": 1.0},
        {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.7},
    ]
    answers = []
    for asked in settings:
        [choice] = complete(client, prompt=prompt, temperature=0, max_tokens=20, ignore_eos=True, **asked)
        expected: list[int] = []
        for _ in range(20):
            logits = reference.logits(prompt + expected)[-1].clone()
            seen = torch.tensor(sorted({*prompt, *expected}))
            penalty = asked.get("repetition_penalty", 1.0)
            logits[seen] = torch.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)
            counts = torch.bincount(torch.tensor(expected, dtype=torch.long), minlength=len(logits)).float()
            logits -= asked.get("presence_penalty", 0.0) * (counts > 0) + asked.get("frequency_penalty", 0.0) * counts
            best = logits.topk(2)
            assert best.values[0] - best.values[1] > MIN_MARGIN, "this prompt cannot tell; take another"
            expected.append(int(best.indices[0]))
        assert choice["token_ids"] == expected, asked
        answers.append(expected)
    [plain] = complete(client, prompt=prompt, temperature=0, max_tokens=20, ignore_eos=True)
    assert all(answer != plain["token_ids"] for answer in answers), "the penalties changed nothing"
    assert answers[1][0] == answers[2][0] == plain["token_ids"][0]


def test_the_last_position_is_as_good_as_any(client: httpx.Client, reference: Reference) -> None:
    """C015: 511 tokens of prompt and one more fill the context of 512."""
    prompt = [BOS_ID, *(4 + (37 * i * i + 11 * i) % 256 for i in range(510))]
    best = reference.logits(prompt)[-1].topk(2)
    assert best.values[0] - best.values[1] > MIN_MARGIN
    [choice] = complete(client, prompt=prompt, max_tokens=1, temperature=0, ignore_eos=True)
    assert choice["token_ids"] == [int(best.indices[0])]


@pytest.mark.parametrize("max_tokens", [{}, {"max_tokens": None}, {"max_completion_tokens": None}], ids=str)
def test_a_chat_without_a_limit_fills_the_context(client: httpx.Client, max_tokens: dict[str, None]) -> None:
    """C015: to the last of 512 tokens, streamed and not."""
    body = {"messages": [{"role": "user", "content": "x" * 440}], "ignore_eos": True, "seed": 1, **max_tokens}
    answer = strict_json(client.post("/v1/chat/completions", json=body).content)
    assert answer["usage"]["total_tokens"] == 512
    assert answer["choices"][0]["finish_reason"] == "length"
    options = {"stream": True, "stream_options": {"include_usage": True}}
    stream = check_stream(client.post("/v1/chat/completions", json={**body, **options}).content, chat=True)
    assert stream.choices[0].text == answer["choices"][0]["message"]["content"]
    assert stream.usage is not None
    assert stream.usage["total_tokens"] == 512
