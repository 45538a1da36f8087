"""What a model's weights will take, from their shapes alone: the architecture is built over tensors without storage.

The classes that load a model also plan it, so a plan cannot differ from what is loaded: the tensors live on torch's
meta device, and a weight that a quantization method would make is only its size.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pagedserve.attention import AttentionBackend
from pagedserve.gguf_file import GGUFFile
from pagedserve.model_files import ModelFiles
from pagedserve.models import model_class
from pagedserve.models.loader import decoder_config, stored_dtype
from pagedserve.models.sources import FileSource, GGUFSource, SafetensorsSource, WeightSource
from pagedserve.models.weights import Weights
from pagedserve.quantization import gguf
from pagedserve.quantization.method import LinearWeight, QuantMethod, as_list

META = torch.device("meta")

# The first pattern that occurs in a tensor's name says what it is for.
_CLASSES = (
    ("experts", re.compile(r"\.experts\.")),
    ("norms", re.compile(r"norm|\bln_|\bln\d")),
    ("embeddings", re.compile(r"embed|\bwte\b|\bwpe\b")),
    ("attention", re.compile(r"attn|attention")),
    ("output head", re.compile(r"lm_head|embed_out|^output\.")),
    ("MLP", re.compile(r"mlp|\bfc\d|feed_forward|block_sparse_moe")),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedModel:
    """What loading would make.

    `sizes`: bytes of each kind of weight; `read_bytes`: what a token's forward reads of them; `multiplications`: of
    weights with its activations.
    """

    sizes: dict[str, int]
    read_bytes: int
    multiplications: int

    @property
    def weights_bytes(self) -> int:
        return sum(self.sizes.values())


@torch.inference_mode()
def plan_model(
    files: ModelFiles,
    config: Any,
    *,
    attention: AttentionBackend,
    quant: QuantMethod,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    impl: str = "auto",
    dummy: bool = False,
) -> PlannedModel:
    """What `load_model` with the same arguments would hold; `dummy`: with random weights, whatever files there are.

    Reads headers of weight files where there are some; else the shapes follow from `config`, and the weights' type from
    what config.json says of it. Raises ModelLoadError as loading would, for all that shows without the numbers.
    """
    chosen = model_class(decoder_config(files), impl)
    planned = PlannedMethod(quant)
    source = None if dummy else _files(files)
    if hasattr(chosen, "planned_bytes"):
        stored = torch.float32 if dummy else stored_dtype(files)
        if isinstance(source, SafetensorsSource):
            stored = source.common_dtype()
        num_bytes = chosen.planned_bytes(
            config, quant=planned, stored=stored, dtype=dtype, device=device, max_model_len=max_model_len
        )
        return PlannedModel(
            sizes={"all weights": num_bytes}, read_bytes=num_bytes, multiplications=num_bytes // dtype.itemsize
        )
    model, weights = _over_meta(files, source, chosen, config, attention, planned, dtype, device, max_model_len)
    sizes, products = _by_class(weights.sizes), _by_class(weights.products)
    if model.rotary_bytes:
        sizes["rotary tables"] = model.rotary_bytes
    return PlannedModel(
        sizes=sizes,
        read_bytes=weights.nbytes - weights.lookup_bytes - _idle(sizes.get("experts", 0), config),
        multiplications=sum(products.values()) - _idle(products.get("experts", 0), config),
    )


@torch.inference_mode()
def model_without_storage(
    files: ModelFiles,
    config: Any,
    *,
    attention: AttentionBackend,
    quant: QuantMethod,
    dtype: torch.dtype,
    max_model_len: int,
    impl: str = "auto",
    dummy: bool = False,
) -> Any:
    """The model of `config` over meta tensors: its forward computes nothing, and asks for every op that it needs.

    `attention` is a backend for the meta device. ValueError for a model that transformers computes.
    """
    chosen = model_class(decoder_config(files), impl)
    if hasattr(chosen, "planned_bytes"):
        raise ValueError("what transformers will ask for is not known ahead")
    source = None if dummy else _files(files)
    return _over_meta(files, source, chosen, config, attention, PlannedMethod(quant), dtype, META, max_model_len)[0]


def _over_meta(
    files: ModelFiles,
    source: FileSource | None,
    chosen: Any,
    config: Any,
    attention: AttentionBackend,
    quant: QuantMethod,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
) -> tuple[Any, _PlannedWeights]:
    weights = _PlannedWeights(_PlannedSource(source, stored_dtype(files)), quant=quant, dtype=dtype, device=device)
    with META:
        model = chosen(config, weights, attention=attention, max_model_len=max_model_len, device=META)
    weights.finish()
    return model, weights


class PlannedMethod(QuantMethod):
    """Makes sizes where `method` makes weights."""

    name = "planned"

    def __init__(self, method: QuantMethod):
        self._method = method
        self.changes_weights = method.changes_weights

    def exact(self) -> QuantMethod:
        return PlannedMethod(self._method.exact())

    def for_experts(self) -> QuantMethod:
        return PlannedMethod(self._method.for_experts())

    def for_head(self) -> QuantMethod:
        return PlannedMethod(self._method.for_head())

    def size_of(self, stored: Sequence[str], out_features: Sequence[int], in_features: int) -> int:
        return self._method.size_of(stored, out_features, in_features)

    def from_dense(self, weight: torch.Tensor | Sequence[torch.Tensor]) -> LinearWeight:
        parts = as_list(weight)
        kinds = [_KIND_OF_DTYPE[part.dtype] for part in parts]
        return _PlannedWeight(self, kinds, [part.shape[0] for part in parts], parts[0].shape[1])

    def from_gguf(
        self, quant_type: str | Sequence[str], rows: np.ndarray | Sequence[np.ndarray], in_features: int
    ) -> LinearWeight:
        parts, kinds = as_list(rows), as_list(quant_type)
        for kind, part in zip(kinds * (len(parts) // len(kinds)), parts, strict=True):
            gguf.check_rows(kind, part, in_features)
        kinds = kinds * (len(parts) // len(kinds))
        return _PlannedWeight(self, kinds, [part.shape[0] for part in parts], in_features)

    def stack_experts(self, experts: Sequence[Sequence[LinearWeight]]) -> torch.Tensor:
        rows = sum(part.out_features for part in experts[0])
        return torch.empty((len(experts), rows, experts[0][0].in_features), device=META)


class _PlannedWeight(LinearWeight):
    """The size of a matrix that nobody made."""

    nbytes = 0

    def __init__(self, method: QuantMethod, stored: Sequence[str], out_features: Sequence[int], in_features: int):
        self.nbytes = method.size_of(stored, out_features, in_features)
        self.out_features, self.in_features = sum(out_features), in_features

    def matmul(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return x.new_empty((x.shape[0], self.out_features))

    def rows(self, row_ids: torch.Tensor) -> torch.Tensor:
        return torch.empty((row_ids.shape[0], self.in_features), device=META)


class _PlannedSource(WeightSource):
    """Tensors without storage, of the shapes and types that `files` have; without files, of those asked for."""

    def __init__(self, files: FileSource | None, dtype: torch.dtype):
        self._files = files
        self._kind = _KIND_OF_DTYPE[dtype]
        self._shapes: dict[str, tuple[int, ...]] = {}

    def names(self) -> Sequence[str]:
        return list(self._shapes) if self._files is None else self._files.names()

    def has(self, name: str) -> bool:
        return name in self._shapes if self._files is None else self._files.has(name)

    def expect(self, name: str, shape: tuple[int, ...]) -> None:
        if self._files is not None:
            self._files.expect(name, shape)
        self._shapes[name] = shape

    def dense(self, name: str) -> torch.Tensor:
        dtype = gguf.FLOAT_TYPES.get(self._stored(name), torch.float32)
        return torch.empty(self._shapes[name], dtype=dtype, device=META)

    def equal(self, first: str, second: str) -> bool:
        """The one thing that only the numbers tell: whether a tied model's own head repeats the embedding."""
        if self._files is None or not self._files.has_data:
            return True
        with torch.device("cpu"):
            return self._files.equal(first, second)

    def is_packed(self, name: str) -> bool:
        return self._stored(name) not in gguf.FLOAT_TYPES

    def rows(self, name: str) -> tuple[str, np.ndarray]:
        kind, shape = self._stored(name), self._shapes[name]
        # One byte that stands for all of them.
        return kind, np.broadcast_to(np.uint8(0), (*shape[:-1], gguf.row_bytes(kind, shape[-1])))

    def _stored(self, name: str) -> str:
        return self._kind if self._files is None else self._files.kind(name)


class _PlannedWeights(Weights):
    """Makes layers on the meta device, as those on `device` would be."""

    def __init__(self, source: WeightSource, *, quant: QuantMethod, dtype: torch.dtype, device: torch.device):
        super().__init__(source, quant=quant, dtype=dtype, device=META)
        self._keeps_file_tables = device.type == "cpu"
        self.products: dict[str, int] = {}  # numbers of each matrix, by the name of its first tensor

    def _matrix(self, names: Sequence[str], out_features: int, in_features: int, *arguments: Any) -> LinearWeight:
        self.products[names[0]] = out_features * in_features
        return super()._matrix(names, out_features, in_features, *arguments)


def _files(files: ModelFiles) -> FileSource | None:
    """The headers of weight files; None where there are none."""
    if files.kind == "gguf":
        return GGUFSource(GGUFFile(files.path, header_only=True))
    if files.weight_files and all(path.is_file() for path in files.weight_files):
        return SafetensorsSource(files.weight_files)
    return None


def _by_class(sizes: dict[str, int]) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, num_bytes in sizes.items():
        kind = next((kind for kind, pattern in _CLASSES if pattern.search(name)), "other")
        found[kind] = found.get(kind, 0) + num_bytes
    return found


def _idle(num: int, config: Any) -> int:
    """Of the numbers (or bytes) of all experts, those that a token has no use for."""
    return num - num * config.num_experts_per_token // config.num_experts if num else 0


_KIND_OF_DTYPE = {dtype: kind for kind, dtype in gguf.FLOAT_TYPES.items()}
