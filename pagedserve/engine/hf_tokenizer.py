"""Tokenizers of Hugging Face folders, with the rules that transformers' AutoTokenizer adds to tokenizer.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from pagedserve.errors import ModelLoadError
from pagedserve.model_files import ADDITIONAL_TEMPLATES, read_json_object

_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def load(files: Mapping[str, Path], config: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `Tokenizer` from tokenizer.json and its companions; `config` is the model's config.json.

    Whether BOS is added is tokenizer.json's business alone: like transformers, this ignores `add_bos_token` beside it.
    """
    path = files["tokenizer.json"]
    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise ModelLoadError(f"cannot read {path}: {error}") from error
    settings = read_json_object(files["tokenizer_config.json"]) if "tokenizer_config.json" in files else {}
    if "added_tokens_decoder" not in settings and "special_tokens_map.json" in files:
        settings = {**settings, **read_json_object(files["special_tokens_map.json"])}
    special_tokens = _special_tokens(settings)
    if _is_llama_class(settings, config) and _is_sentencepiece_bpe(backend):
        special_tokens = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", **special_tokens}
        _use_llama_spaces(backend, settings)
    _register_added_tokens(backend, settings, special_tokens)
    return {
        "backend": backend,
        "special_tokens": special_tokens,
        "chat_templates": _chat_templates(files, settings),
    }


def convert(folder: Path) -> dict[str, Any]:
    """Arguments of `Tokenizer` for a folder without tokenizer.json, by transformers' own conversion."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        backend = Backend.from_str(tokenizer.backend_tokenizer.to_str())
    except Exception as error:  # a slow tokenizer in Python, remote code, missing files: transformers raises them all
        raise ModelLoadError(f"the tokenizer files of {folder} cannot be converted: {error}") from error
    templates = tokenizer.chat_template or {}
    return {
        "backend": backend,
        "special_tokens": {k: str(v) for k, v in tokenizer.special_tokens_map.items() if isinstance(v, str)},
        "chat_templates": {"default": templates} if isinstance(templates, str) else dict(templates),
    }


def frame_with_bos_eos(backend: Backend, *, bos: str | None, eos: str | None) -> None:
    """Make `add_special_tokens` put exactly these tokens around a text."""
    parts = [token for token in (bos, "$A", eos) if token is not None]
    specials = [(token, backend.token_to_id(token)) for token in (bos, eos) if token is not None]
    missing = [token for token, token_id in specials if token_id is None]
    if missing:
        raise ModelLoadError(f"the tokenizer wants to add {missing[0]!r}, which is not in its vocabulary")
    backend.post_processor = processors.TemplateProcessing(single=parts, special_tokens=specials)


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Named tokens (`bos_token`, `image_token`, …) as text."""
    named = {key: _content(value) for key, value in settings.items() if key.endswith("_token")}
    return {key: text for key, text in named.items() if text is not None}


def _content(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _register_added_tokens(backend: Backend, settings: Mapping[str, Any], special_tokens: Mapping[str, str]) -> None:
    known = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    declared = settings.get("added_tokens_decoder") or {}
    for _, fields in sorted(declared.items(), key=lambda item: int(item[0])):
        token = _added_token(fields)
        if token.content not in known:
            known[token.content] = token
            backend.add_tokens([token])
    extra = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []
    extra = list(extra.values()) if isinstance(extra, dict) else extra
    wanted = [special_tokens[role] for role in _ROLES if role in special_tokens]
    wanted += [text for text in map(_content, extra) if text is not None]
    for content in dict.fromkeys(wanted):
        token = known.get(content)
        if token is None:
            backend.add_special_tokens([AddedToken(content, special=True, normalized=False)])
        elif not token.special:
            token.special = True
            backend.add_special_tokens([token])


def _added_token(fields: Mapping[str, Any]) -> AddedToken:
    names = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return AddedToken(fields["content"], **{name: fields[name] for name in names if name in fields})


def _is_llama_class(settings: Mapping[str, Any], config: Mapping[str, Any]) -> bool:
    name = settings.get("tokenizer_class") or ""
    return name.removesuffix("Fast") == "LlamaTokenizer" and config.get("model_type", "llama") == "llama"


def _is_sentencepiece_bpe(backend: Backend) -> bool:
    model = backend.model
    return type(model).__name__ == "BPE" and model.byte_fallback and not isinstance(backend.decoder, decoders.ByteLevel)


def _use_llama_spaces(backend: Backend, settings: Mapping[str, Any]) -> None:
    """Spaces as transformers' LlamaTokenizer sees them, whatever tokenizer.json says.

    Old files prepend a space to each piece between special tokens; SentencePiece does so only at the start of the text,
    which is `legacy: false` and the default.
    """
    prefix = settings.get("add_prefix_space")
    scheme = "never" if prefix is False else "always" if settings.get("legacy", False) else "first"
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix is not False:
        steps.append(decoders.Strip(content=" ", left=1))
    backend.decoder = decoders.Sequence(steps)


def _chat_templates(files: Mapping[str, Path], settings: Mapping[str, Any]) -> dict[str, str]:
    """Named templates; files win over tokenizer_config.json, as in transformers."""
    from_files: dict[str, str] = {}
    if "chat_template.jinja" in files:
        from_files["default"] = files["chat_template.jinja"].read_text(encoding="utf-8")
    for name, path in files.items():
        if name.startswith(f"{ADDITIONAL_TEMPLATES}/"):
            from_files[path.stem] = path.read_text(encoding="utf-8")
    if from_files:
        return from_files
    value = settings.get("chat_template")
    if value is None and "chat_template.json" in files:
        value = read_json_object(files["chat_template.json"]).get("chat_template")
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, dict) and all(isinstance(template, str) for template in value.values()):
        return dict(value)
    try:
        return {entry["name"]: entry["template"] for entry in value}
    except (TypeError, KeyError) as error:
        raise ModelLoadError(f"chat_template is neither text nor named templates: {json.dumps(value)[:200]}") from error
