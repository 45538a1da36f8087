"""The helpers' own promises, checked with transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.helpers.byte_tokenizer import BOS_ID, EOS_ID, VOCAB_SIZE, byte_ids
from tests.helpers.checkpoints import bigram_llama, scripted_llama, tiny_llama


@torch.inference_mode()
def logits_of(folder: Path, token_ids: list[int]) -> torch.Tensor:  # [num_tokens, vocab]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    return model(torch.tensor([token_ids])).logits[0]


def test_the_tiny_model_has_clear_winners(tmp_path: Path) -> None:
    logits = logits_of(tiny_llama(tmp_path), [BOS_ID, *byte_ids("Paging is to memory what")])
    best = logits.topk(2).values
    assert (best[:, 0] - best[:, 1]).median() > 0.1
    assert len(set(logits.argmax(-1).tolist())) > 10


def test_the_bigram_model_follows_its_table(tmp_path: Path) -> None:
    successors = [(7 * i + 3) % 50 for i in range(50)]
    logits = logits_of(bigram_llama(tmp_path, successors, tokenizer=False), [5, 38, 19, 2])
    assert logits.argmax(-1).tolist() == [successors[i] for i in (5, 38, 19, 2)]
    best = logits.topk(2).values
    assert (best[:, 0] - best[:, 1]).min() > 5


@pytest.mark.parametrize("num_positions", [1, 2, 17, 512])
def test_the_scripted_model_says_its_script(tmp_path: Path, num_positions: int) -> None:
    script = [byte_ids("Grüße, 世界! 🎉 ")[i % 20] for i in range(num_positions)]
    folder = scripted_llama(tmp_path, script)
    prompt = [BOS_ID, *byte_ids("any text ") * 60][:num_positions]
    logits = logits_of(folder, prompt)
    assert logits.argmax(-1).tolist() == script
    best = logits.topk(2).values
    assert (best[:, 0] - best[:, 1]).min() > 5


def test_the_tokenizer_round_trips_every_text(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama(tmp_path))
    text = "the other naïve 世界 🎉\n\t<tag> \x7f"
    ids = tokenizer(text).input_ids
    assert ids[0] == BOS_ID and max(ids) < VOCAB_SIZE
    assert tokenizer.decode(ids[1:]) == text
    assert len(ids) < 1 + len(text.encode())  # the merges do something
    assert tokenizer.eos_token_id == EOS_ID
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False
    )
    assert chat == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
