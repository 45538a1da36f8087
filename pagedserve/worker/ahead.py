"""What a start can do while torch is still being imported; nothing here imports it."""

from __future__ import annotations

from pagedserve import envs, model_files, packed_file
from pagedserve.config import ModelConfig
from pagedserve.kernels import ABI_VERSION
from pagedserve.log import get_logger
from pagedserve.model_files import ModelFiles

logger = get_logger(__name__)


def begin(config: ModelConfig) -> ModelFiles:
    """Finds the model, and has its packed weights read where an earlier start on a CPU has left some.

    Raises ModelNotFoundError or ModelLoadError.
    """
    files = model_files.resolve_model(config, log=logger.info)
    serves_files = config.load_format != "dummy" and bool(files.weight_files)
    if serves_files and config.device != "cuda" and envs.packed_cache_bytes() and not envs.native_disabled():
        key = packed_file.key_of(files.weight_files, packed_file.method_key(config.weights_dtype), ABI_VERSION)
        packed_file.begin(packed_file.folder() / key)
    return files
