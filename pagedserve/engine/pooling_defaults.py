"""How a model wants its embeddings pooled: from the files that sentence-transformers writes beside it."""

from __future__ import annotations

from pathlib import Path

from pagedserve.errors import ModelLoadError
from pagedserve.model_files import ModelFiles, read_json_object, read_json_value
from pagedserve.pooling_params import PoolingParams

_MODES = {"pooling_mode_lasttoken": "last", "pooling_mode_mean_tokens": "mean"}
_NEW_MODES = {"lasttoken": "last", "last": "last", "mean": "mean"}


def default_pooling(files: ModelFiles, pooling_type: str = "auto") -> PoolingParams:
    """What a request without wishes of its own gets. `pooling_type` is `--pooling-type`.

    Without files of sentence-transformers: the last token, normalised. Raises ModelLoadError where they ask for
    something else than last-token or mean pooling, and perhaps normalisation.
    """
    folder = files.path if files.kind == "safetensors" else files.path.parent
    modules = folder / "modules.json"
    if files.kind != "safetensors" or not modules.is_file():
        return PoolingParams(pooling_type="last" if pooling_type == "auto" else pooling_type)
    found, normalize = None, False
    for module in _modules(modules):
        kind = str(module.get("type", "")).rpartition(".")[2]
        if kind == "Pooling":
            found = _pooling_mode(folder / str(module.get("path", "")) / "config.json", pooling_type)
        elif kind == "Normalize":
            normalize = True
        elif kind != "Transformer":
            raise ModelLoadError(
                f"{modules}: a module of type {kind!r} is not supported; remove the file to serve without"
            )
    return PoolingParams(pooling_type=found or "last", normalize=normalize)


def _modules(path: Path) -> list[dict[str, object]]:
    modules = read_json_value(path)
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise ModelLoadError(f"{path} does not hold a list of modules")
    return modules


def _pooling_mode(path: Path, pooling_type: str) -> str:
    if pooling_type != "auto":
        return pooling_type
    config = read_json_object(path)
    asked = [name for name, value in config.items() if name.startswith("pooling_mode_") and value is True]
    known = [_MODES[name] for name in asked if name in _MODES]
    if isinstance(mode := config.get("pooling_mode"), str):
        asked, known = [mode], [_NEW_MODES[mode]] if mode in _NEW_MODES else []
    if len(asked) == 1 and known:
        return known[0]
    raise ModelLoadError(
        f"{path} asks for {' and '.join(asked) or 'no pooling'}; last-token and mean pooling are supported "
        "(--pooling-type last or mean overrides it)"
    )
