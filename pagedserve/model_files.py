"""Finding a model: from what the user typed to files on disk and a Hugging Face style config."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pagedserve import catalog
from pagedserve.config import ModelConfig
from pagedserve.errors import ModelLoadError, ModelNotFoundError
from pagedserve.gguf_file import GGUFFile

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "spiece.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
ADDITIONAL_TEMPLATES = "additional_chat_templates"
_HUB_PATTERNS = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """A model that was found: where its files are and what its config says.

    `kind` is "safetensors" or "gguf"; `path` the folder or the GGUF file, `gguf` the latter opened; `config` and
    `generation_config` the contents of the Hugging Face files of those names (made from metadata for GGUF);
    `weight_files` are in load order.
    """

    kind: str
    path: Path
    name: str
    config: dict[str, Any]
    generation_config: dict[str, Any]
    weight_files: tuple[Path, ...]
    tokenizer_files: Mapping[str, Path] = field(default_factory=dict)
    gguf: GGUFFile | None = field(default=None, compare=False, repr=False)

    @property
    def has_head(self) -> bool:
        """False for a checkpoint of hidden states only (architecture `Qwen3Model`): embeddings, but no next token."""
        names = self.config.get("architectures")
        name = names[0] if isinstance(names, list) and names else None
        return not (isinstance(name, str) and name.endswith("Model") and not name.endswith("LMHeadModel"))


def resolve(
    model: str,
    *,
    revision: str | None = None,
    cache_dir: Path | None = None,
    require_weights: bool = True,
    header_only: bool = False,
    log: Callable[[str], None] = catalog.to_stderr,
) -> ModelFiles:
    """Find `model`: a folder, a .gguf file, a catalog name or a hub id, tried in this order.

    With `require_weights=False` (dummy weights, a tokenizer from elsewhere) missing weights are no error, and a folder
    of tokenizer files will do; with `header_only` a GGUF file may end behind its header. Raises ModelNotFoundError
    (nothing there; the message says what was tried) or ModelLoadError (broken files).
    """
    path = Path(model).expanduser()
    if model and path.is_dir():
        return _from_folder(path, path.resolve().name, require_weights)
    if path.is_file():
        return _from_gguf(path, path.stem, header_only=header_only)
    if (name := model.lower()) in catalog.CATALOG:
        defaults = catalog.CATALOG[name].generation_config
        return _from_gguf(catalog.fetch(name, cache_dir=cache_dir, log=log), name, defaults)
    if model.startswith(("/", ".", "~")) or model.endswith(".gguf") or not _HUB_ID.fullmatch(model):
        raise ModelNotFoundError(
            f"--model {model}: no such file or folder; give a folder with config.json and safetensors, a .gguf file, "
            f"a name of the catalog ({', '.join(catalog.CATALOG)}) or a hub id"
        )
    return _from_folder(_from_hub(model, revision, require_weights, log), model, require_weights)


def resolve_model(config: ModelConfig, *, log: Callable[[str], None] = catalog.to_stderr) -> ModelFiles:
    """`resolve` for what the settings name; random weights (`--load-format dummy`) need no files of weights."""
    return resolve(config.model, revision=config.revision, require_weights=config.load_format != "dummy", log=log)


def _from_gguf(
    path: Path,
    name: str,
    generation_defaults: Mapping[str, Any] = MappingProxyType({}),
    *,
    header_only: bool = False,
) -> ModelFiles:
    file = GGUFFile(path, header_only=header_only)
    return ModelFiles(
        kind="gguf",
        path=path,
        name=name,
        config=file.config(),
        generation_config={**generation_defaults, **file.generation_config()},
        weight_files=(path,),
        gguf=file,
    )


def _from_folder(folder: Path, name: str, require_weights: bool) -> ModelFiles:
    config, generation_config = folder / "config.json", folder / "generation_config.json"
    # Repositories of GGUF files often keep the config.json of the model that was converted.
    if not config.is_file() or next(folder.glob("*.safetensors*"), None) is None:
        ggufs = sorted(folder.glob("*.gguf"))
        if len(ggufs) == 1:
            return _from_gguf(ggufs[0], name)
        if ggufs:
            raise ModelNotFoundError(
                f"{folder} holds several GGUF files; give one of them: {', '.join(g.name for g in ggufs)}"
            )
    tokenizer_files = _tokenizer_files(folder)
    if not config.is_file() and (require_weights or not tokenizer_files):
        raise ModelNotFoundError(f"{folder} is not a model: it has neither config.json nor a .gguf file")
    return ModelFiles(
        kind="safetensors",
        path=folder,
        name=name,
        config=read_json_object(config) if config.is_file() else {},
        generation_config=read_json_object(generation_config) if generation_config.is_file() else {},
        weight_files=_weight_files(folder, require_weights),
        tokenizer_files=tokenizer_files,
    )


def _weight_files(folder: Path, required: bool) -> tuple[Path, ...]:
    index = folder / INDEX_FILE
    if index.is_file():
        weight_map = read_json_object(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise ModelLoadError(f"{index} has no weight_map of tensor names to file names")
        names = sorted(set(weight_map.values()))
        if any("/" in name or "\\" in name for name in names):
            raise ModelLoadError(f"{index} names a file outside its folder")
        missing = [name for name in names if not (folder / name).is_file()]
        if missing and required:
            raise ModelLoadError(f"{folder} lacks weight files that {INDEX_FILE} names: {', '.join(missing)}")
        return tuple(folder / name for name in names)
    if (folder / SINGLE_FILE).is_file():
        return (folder / SINGLE_FILE,)
    # "consolidated" files repeat the weights in the vendor's own layout.
    files = sorted(f for f in folder.glob("*.safetensors") if not f.name.startswith(("consolidated", "adapter_")))
    if files or not required:
        return tuple(files)
    if any(next(folder.glob(pattern), None) for pattern in _PICKLES):
        raise ModelLoadError(
            f"{folder} has weights only as pickles, which can run code when they are read; "
            "save them as safetensors (save_pretrained) first"
        )
    raise ModelLoadError(f"{folder} has config.json but no *.safetensors files")


def _tokenizer_files(folder: Path) -> dict[str, Path]:
    files = {name: folder / name for name in TOKENIZER_FILES if (folder / name).is_file()}
    for template in sorted((folder / ADDITIONAL_TEMPLATES).glob("*.jinja")):
        files[f"{ADDITIONAL_TEMPLATES}/{template.name}"] = template
    return files


def _from_hub(model: str, revision: str | None, require_weights: bool, log: Callable[[str], None]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = _HUB_PATTERNS if require_weights else [p for p in _HUB_PATTERNS if p != "*.safetensors"]
    log(f"Fetching {model} from the Hugging Face hub")
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    except Exception as error:  # what the HTTP library raises without a network differs between its versions
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
    raise ModelNotFoundError(
        f"--model {model}: tried a local path, the catalog ({', '.join(catalog.CATALOG)}) and the Hugging Face hub "
        f"({reason}); without a network give the path of a folder with config.json and safetensors, or of a .gguf file"
    )


def read_json_value(path: Path) -> Any:
    """What the file holds as JSON; ModelLoadError where that cannot be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"cannot read {path}: {error}") from error


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in the file; ModelLoadError where it holds something else."""
    content = read_json_value(path)
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path} does not hold a JSON object")
    return content
