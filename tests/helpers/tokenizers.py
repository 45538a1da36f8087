"""Tiny tokenizers: SentencePiece style (F-SPM of the fault cases), and byte level with all kinds of added tokens."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE

from tests.helpers.byte_tokenizer import write_tokenizer

UNKNOWN, NORMAL, CONTROL, USER_DEFINED, BYTE = 2, 1, 3, 4, 6
SPM_CHAT = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'user' %}[INST] {{ message['content'] }} [/INST]"
    "{% else %} {{ message['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
)
_SPM_TEXT = (
    "▁hello ▁world ▁the ▁a ▁an ▁and ▁say hel lo ell he wo rld or ld ▁w ▁t ▁▁ ▁▁▁▁ ▁! ▁S Say in ing ▁in st INST "
    "th er on re ▁to ▁I ▁is"
)
_SPM_WORDS = _SPM_TEXT.split()


@dataclass(frozen=True)
class Piece:
    """One entry of a SentencePiece vocabulary."""

    text: str
    score: float
    kind: int


def spm_pieces() -> list[Piece]:
    """Unknown, BOS, EOS, 256 bytes, words (best first), single characters."""
    chars = [chr(c) for c in range(0x21, 0x7F)] + list("▁éñ汉字\n")
    # Every prefix of a word is a piece, so that merges can build it.
    words = list(dict.fromkeys(word[:end] for word in _SPM_WORDS for end in range(2, len(word) + 1)))
    pieces = [Piece("<unk>", 0.0, UNKNOWN), Piece("<s>", 0.0, CONTROL), Piece("</s>", 0.0, CONTROL)]
    pieces += [Piece(f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)]
    pieces += [Piece(word, -float(i), NORMAL) for i, word in enumerate(words)]
    pieces += [Piece(char, -float(len(words) + i), NORMAL) for i, char in enumerate(chars) if char not in words]
    return pieces


def spm_backend(*, add_prefix_space: bool = True) -> Tokenizer:
    """F-SPM: BPE with byte fallback and the decoder Replace, ByteFallback, Fuse, Strip."""
    pieces = spm_pieces()
    rank = {piece.text: i for i, piece in enumerate(pieces) if piece.kind == NORMAL}
    merges = [
        (word[:cut], word[cut:])
        for word in rank
        for cut in range(1, len(word))
        if word[:cut] in rank and word[cut:] in rank
    ]
    merges.sort(key=lambda pair: (rank[pair[0] + pair[1]], rank[pair[0]]))
    vocab = {piece.text: i for i, piece in enumerate(pieces)}
    backend = Tokenizer(BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement="▁", prepend_scheme="first" if add_prefix_space else "never", split=False
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if add_prefix_space:
        steps.append(decoders.Strip(content=" ", left=1))
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<unk>", "<s>", "</s>")])
    return backend


def write_spm_tokenizer(folder: Path, *, add_bos: bool = True, **settings: object) -> Path:
    """tokenizer.json and tokenizer_config.json as Llama 2 models have them; `settings` are added to the config."""
    folder.mkdir(parents=True, exist_ok=True)
    backend = spm_backend()
    if add_bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "LlamaTokenizer",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "chat_template": SPM_CHAT,
        **settings,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def byte_backend_with_added_tokens() -> Tokenizer:
    """The byte-level tokenizer plus two special tokens, and one added token that is not special."""
    backend = byte_level_backend()
    backend.add_special_tokens(["<SP1>", "<SP2>"])
    backend.add_tokens([AddedToken("<note>", special=False, normalized=False)])
    return backend


def byte_level_backend() -> Tokenizer:
    """The tokenizer of `byte_tokenizer.write_tokenizer`, in memory."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder))
        return Tokenizer.from_file(f"{folder}/tokenizer.json")
