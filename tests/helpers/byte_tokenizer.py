"""A byte-level BPE tokenizer of 320 ids with a ChatML template, written to a folder as Hugging Face files.

Ids 0..3 are BOS, EOS and the two ChatML marks; 4..259 the 256 bytes in order; 260..319 merges of frequent English
letter pairs. A token can therefore be half a character, which is what streaming has to get right.
"""

from __future__ import annotations

import json
from pathlib import Path

BOS_ID, EOS_ID, IM_START_ID, IM_END_ID = 0, 1, 2, 3
FIRST_BYTE_ID = 4
VOCAB_SIZE = 320

_SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
_FREQUENT_PAIRS = (
    "th he in er an re on at en nd ti es or te of ed is it al ar st to nt ng se ha as ou io le "
    "ve co me de hi ri ro ic ne ea ra ce li ch ll be ma si om ur lo wo ld so fo ly no us ho tr"
)
_PAIRS = tuple(_FREQUENT_PAIRS.split())
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_ids(text: str) -> list[int]:
    """The ids of the text's UTF-8 bytes, without merges: what a scripted model may say."""
    return [FIRST_BYTE_ID + byte for byte in text.encode()]


def write_tokenizer(folder: Path, *, add_bos: bool = True) -> None:
    """Writes tokenizer.json and tokenizer_config.json; `add_bos` puts BOS before every prompt."""
    letters = _byte_letters()
    vocab = {token: i for i, token in enumerate(_SPECIAL)}
    vocab.update({letters[byte]: FIRST_BYTE_ID + byte for byte in range(256)})
    vocab.update({pair: FIRST_BYTE_ID + 256 + i for i, pair in enumerate(_PAIRS)})
    if len(vocab) != VOCAB_SIZE:
        raise AssertionError(f"the vocabulary has {len(vocab)} ids")
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    bos = [{"SpecialToken": {"id": _SPECIAL[BOS_ID], "type_id": 0}}] if add_bos else []
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": token, **special} for i, token in enumerate(_SPECIAL)],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [*bos, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [*bos, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {
                token: {"id": token, "ids": [i], "tokens": [token]} for i, token in enumerate(_SPECIAL[:1])
            },
        },
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": [list(pair) for pair in _PAIRS],
        },
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": _SPECIAL[BOS_ID],
        "eos_token": _SPECIAL[EOS_ID],
        "pad_token": _SPECIAL[EOS_ID],
        "chat_template": CHATML,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 512,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def _byte_letters() -> list[str]:
    """The printable letter that stands for each byte in byte-level BPE (GPT-2's table)."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    letters, extra = [], 0
    for byte in range(256):
        if byte in printable:
            letters.append(chr(byte))
        else:
            letters.append(chr(256 + extra))
            extra += 1
    return letters
