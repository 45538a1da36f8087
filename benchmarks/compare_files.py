"""The demo model in the forms that other engines read: GGUF in other types, and a folder of fp32 safetensors."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import torch
from safetensors.torch import save_file

from pagedserve.engine.gguf_tokenizer import convert
from pagedserve.gguf_file import GGUFFile


def requantized(quantize: Path, source: Path, folder: Path, kind: str) -> Path:
    """`source` as GGUF of another type (Q4_0, BF16), made by llama.cpp's own tool once."""
    target = folder / f"{source.stem.rpartition('.')[0]}.{kind}.gguf"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = target.with_suffix(".part")
        command = [quantize, "--allow-requantize", source, unfinished, kind]
        subprocess.run(list(map(str, command)), check=True, capture_output=True, timeout=180)
        unfinished.rename(target)
    return target


def hf_folder(source: Path, folder: Path) -> Path:
    """`source` with its weights dequantised to fp32, as a folder that transformers and vLLM read."""
    target = folder / "hf-fp32"
    if (target / "config.json").exists():
        return target
    target.mkdir(parents=True, exist_ok=True)
    file, tokenizer = GGUFFile(source), convert(source)
    tensors = {name: torch.from_numpy(file.dequantize(name)).contiguous() for name in file.tensor_names()}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    tokenizer["backend"].save(str(target / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": tokenizer["chat_templates"].get("default")}
    about |= {role: str(token) for role, token in tokenizer["special_tokens"].items()}
    (target / "tokenizer_config.json").write_text(json.dumps(about))
    (target / "config.json").write_text(json.dumps(file.config()))  # last: it says that the folder is complete
    return target
