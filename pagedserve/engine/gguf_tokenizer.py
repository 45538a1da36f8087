"""Tokenizers from GGUF metadata: byte-level BPE (`gpt2`) and SentencePiece BPE (`llama`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from pagedserve.engine.hf_tokenizer import frame_with_bos_eos
from pagedserve.errors import ModelLoadError
from pagedserve.gguf_file import GGUFFile, StringArray
from pagedserve.log import get_logger

logger = get_logger(__name__)

_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6

# How text is cut before merging, by `tokenizer.ggml.pre`. Patterns are those of the models' own tokenizer.json files.
_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN35 = _QWEN2.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]+", r"[^\s\p{L}\p{M}\p{N}]+")
_GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK_V3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DIGIT = r"\p{N}"
_LINE_BREAK = r"[\r\n]"
_EAST_ASIAN = r"[一-龥ࠀ-一가-퟿]+"
_CASED_WORD = r"\s?[\p{Lu}\p{Ll}\p{Lt}]+"
_WIDE_PUNCTUATION = r"\s?[!-/:-~！-／：-～‘-‟　-。]+"

# Each pattern cuts what the ones before it left; what no pattern matches is a piece too.
_SPLITS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("gpt-2", "olmo", "phi-2", "mpt", "jais", "exaone4", "gigachat", "mellum"), (_GPT2_WORDS,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), (_DIGIT, _GPT2_WORDS)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "dbrx", "smaug-bpe", "glm4"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez"), (_QWEN2,)),
    **dict.fromkeys(("gpt-4o", "llama4"), (_GPT4O,)),
    "qwen35": (_QWEN35,),
    "tekken": (_TEKKEN,),
    "deepseek-llm": (_LINE_BREAK, _CASED_WORD, _WIDE_PUNCTUATION, r"\s+$", _EAST_ASIAN, r"\p{N}+"),
    "deepseek-coder": (_LINE_BREAK, r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN, _DIGIT),
    "deepseek-v3": (r"\p{N}{1,3}", r"[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK_V3),
    "falcon": (r"[\p{P}$+<=>^~|`]+", _GPT2_WORDS, r"[0-9][0-9][0-9]"),
    "default": (r"[\p{P}$+<=>^~|]+", _GPT2_WORDS, r"\p{N}+", r"[0-9][0-9][0-9]"),
}
# A word that is in the vocabulary is taken whole, even where merges would not build it.
_ADD_BOS_BY_DEFAULT = frozenset(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "tekken"))
_IGNORE_MERGES = _ADD_BOS_BY_DEFAULT | {"glm4"}
_NFC = frozenset(("qwen2", "deepseek-r1-qwen"))

_ROLES = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "sep_token": "seperator",
    "pad_token": "padding",
}


def convert(path: Path) -> dict[str, Any]:
    """Arguments of `Tokenizer` for the vocabulary in a GGUF file. ModelLoadError names what it does not know."""
    metadata = GGUFFile(path).metadata
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise ModelLoadError(f"{path}: tokenizer.ggml.model {kind!r} is not supported; known: gpt2, llama")
    tokens, kinds = _vocabulary(metadata, path)
    try:
        if kind == "gpt2":
            backend, add_bos = _byte_level(metadata, tokens, path)
        else:
            backend, add_bos = _sentencepiece(metadata, tokens, kinds, path), True
    except ModelLoadError:
        raise
    except Exception as error:  # the library raises plain Exception, for example for a merge of unknown tokens
        raise ModelLoadError(f"{path}: the tokenizer's vocabulary is inconsistent: {error}") from error
    special_tokens = _special_tokens(metadata, tokens, path)
    _add_whole_tokens(backend, tokens, kinds)
    frame_with_bos_eos(
        backend,
        bos=special_tokens.get("bos_token") if metadata.get("tokenizer.ggml.add_bos_token", add_bos) else None,
        eos=special_tokens.get("eos_token") if metadata.get("tokenizer.ggml.add_eos_token", False) else None,
    )
    return {"backend": backend, "special_tokens": special_tokens, "chat_templates": _chat_templates(metadata)}


def _vocabulary(metadata: Mapping[str, Any], path: Path) -> tuple[list[str], list[int]]:
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, StringArray) or not tokens:
        raise ModelLoadError(f"{path}: tokenizer.ggml.tokens is missing")
    kinds = metadata.get("tokenizer.ggml.token_type", [1] * len(tokens))
    if len(kinds) != len(tokens):
        raise ModelLoadError(f"{path}: {len(tokens)} tokens but {len(kinds)} token types")
    seen: dict[str, int] = {}
    unique = []
    for i, token in enumerate(tokens):
        # Files padded to a round size may repeat a filler; ids must stay in place.
        name = f"[UNUSED_{i}]" if token in seen or not token else token
        seen[name] = i
        unique.append(name)
    return unique, kinds


def _byte_level(metadata: Mapping[str, Any], tokens: Sequence[str], path: Path) -> tuple[Backend, bool]:
    pre = metadata.get("tokenizer.ggml.pre")
    if pre is None:
        logger.warning(
            "%s does not say how to cut text (tokenizer.ggml.pre): ids may differ from the model's own", path
        )
        pre = "default"
    if pre not in _SPLITS:
        raise ModelLoadError(f"{path}: tokenizer.ggml.pre {pre!r} is not supported; known: {', '.join(_SPLITS)}")
    merges = metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list | StringArray):
        raise ModelLoadError(f"{path}: tokenizer.ggml.merges is missing")
    vocab = {token: i for i, token in enumerate(tokens)}
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    backend = Backend(BPE(vocab=vocab, merges=pairs, ignore_merges=pre in _IGNORE_MERGES))
    if pre in _NFC:
        backend.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in _SPLITS[pre]]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    return backend, pre in _ADD_BOS_BY_DEFAULT


def _sentencepiece(metadata: Mapping[str, Any], tokens: Sequence[str], kinds: Sequence[int], path: Path) -> Backend:
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise ModelLoadError(f"{path}: tokenizer.ggml.scores is missing or not as long as the vocabulary")
    if metadata.get("tokenizer.ggml.remove_extra_whitespaces", False):
        raise ModelLoadError(f"{path}: tokenizer.ggml.remove_extra_whitespaces is not supported")
    vocab = {token: i for i, token in enumerate(tokens)}
    unknown = next((token for token, kind in zip(tokens, kinds, strict=True) if kind == _UNKNOWN), None)
    backend = Backend(
        BPE(
            vocab=vocab,
            merges=_merges_from_scores(tokens, scores, kinds),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=_BYTE in kinds,
        )
    )
    # As SentencePiece and llama.cpp do: a space before the text, and before what follows a special token.
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    spaces = [normalizers.Prepend("▁")] if prefix else []
    backend.normalizer = normalizers.Sequence([*spaces, normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        steps.append(decoders.Strip(content=" ", left=1))
    backend.decoder = decoders.Sequence(steps)
    return backend


def _merges_from_scores(tokens: Sequence[str], scores: Sequence[float], kinds: Sequence[int]) -> list[tuple[str, str]]:
    """Merge list that does what SentencePiece does: of all neighbours that form a piece, join the best scored."""
    normal = {
        token: (-score, i)
        for i, (token, score, kind) in enumerate(zip(tokens, scores, kinds, strict=True))
        if kind not in (_UNKNOWN, _CONTROL, _BYTE)
    }
    ranked = []
    for token, rank in normal.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in normal and right in normal:
                ranked.append((rank, normal[left], normal[right], left, right))
    return [(left, right) for *_, left, right in sorted(ranked)]


def _add_whole_tokens(backend: Backend, tokens: Sequence[str], kinds: Sequence[int]) -> None:
    """Control tokens (hidden as special) and user-defined ones (visible) are never cut into pieces."""
    pairs = list(zip(tokens, kinds, strict=True))
    hidden = [AddedToken(t, special=True, normalized=False) for t, kind in pairs if kind in (_CONTROL, _UNKNOWN)]
    visible = [AddedToken(t, special=False, normalized=False) for t, kind in pairs if kind == _USER_DEFINED]
    backend.add_special_tokens(hidden)
    backend.add_tokens(visible)


def _special_tokens(metadata: Mapping[str, Any], tokens: Sequence[str], path: Path) -> dict[str, str]:
    found = {}
    for role, key in _ROLES.items():
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is None:
            continue
        if not isinstance(token_id, int) or not 0 <= token_id < len(tokens):
            raise ModelLoadError(f"{path}: tokenizer.ggml.{key}_token_id {token_id!r} is not in the vocabulary")
        found[role] = tokens[token_id]
    return found


def _chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    templates = {}
    if isinstance(default := metadata.get("tokenizer.chat_template"), str):
        templates["default"] = default
    for key, value in metadata.items():
        if key.startswith("tokenizer.chat_template.") and isinstance(value, str):
            templates[key.removeprefix("tokenizer.chat_template.")] = value
    return templates
