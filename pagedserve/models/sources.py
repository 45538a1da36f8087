"""Where weights come from: safetensors files, a GGUF file, or a random generator.

Tensors are views of memory-mapped files where the format allows it: nothing is read before it is used, and nothing is
held twice.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from pagedserve.errors import ModelLoadError
from pagedserve.gguf_file import GGUFFile
from pagedserve.quantization import gguf

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_BODY = "model."


class WeightSource(ABC):
    """Tensors under their Hugging Face names."""

    @abstractmethod
    def names(self) -> Sequence[str]:
        """Every tensor there is."""

    @abstractmethod
    def has(self, name: str) -> bool:
        """Whether the tensor is there."""

    @abstractmethod
    def expect(self, name: str, shape: tuple[int, ...]) -> None:
        """The model asks for this tensor; ModelLoadError where it is missing or has another shape."""

    @abstractmethod
    def dense(self, name: str) -> torch.Tensor:
        """The tensor as floats, in the type of the file where that is a float type. Not to be written to."""

    def equal(self, first: str, second: str) -> bool:
        """Whether two tensors hold the same numbers."""
        return torch.equal(self.dense(first), self.dense(second))

    def close(self) -> None:  # noqa: B027 (nothing to give back is the rule)
        """Gives back what reading took; tensors that were loaded stay."""

    def is_packed(self, name: str) -> bool:
        """Whether the tensor is a block-quantised matrix that `rows` gives as it is."""
        return False

    def rows(self, name: str) -> tuple[str, np.ndarray]:
        """GGML type and rows, uint8 [out_features, bytes_per_row], of a matrix in a GGUF file. Not to be written to."""
        raise ModelLoadError(f"tensor {name} is not in a GGUF file")


class FileSource(WeightSource):
    """Weights that are in files, with names and shapes of their own."""

    # False where the numbers are missing, in a file that ends behind its header.
    has_data = True

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor that is there, row-major."""

    @abstractmethod
    def kind(self, name: str) -> str:
        """How a tensor that is there is stored: its GGML type; F32, BF16 or F16 for one that `dense` gives as it is."""

    @abstractmethod
    def where(self, name: str) -> str:
        """The file that holds the tensor (or should), for error messages."""

    def expect(self, name: str, shape: tuple[int, ...]) -> None:
        if not self.has(name):
            raise ModelLoadError(f"tensor {name} {list(shape)} is missing in {self.where(name)}")
        if self.shape(name) != shape:
            found = list(self.shape(name))
            raise ModelLoadError(
                f"tensor {name} in {self.where(name)} has shape {found}, the config asks for {list(shape)}"
            )


class SafetensorsSource(FileSource):
    """One or several safetensors files.

    Raises ModelLoadError for a file that is cut short or broken, a tensor that is in two files, and integer tensors
    (codes of a quantisation scheme).
    """

    def __init__(self, files: Sequence[Path]):
        self._files: dict[str, Path] = {}
        self._handles: dict[Path, Any] = {}
        for path in files:
            try:
                self._handles[path] = safe_open(path, framework="pt", device="cpu")
            except (SafetensorError, OSError, ValueError) as error:
                raise ModelLoadError(f"{path} cannot be read ({error}); if it was cut short, fetch it again") from error
            for name in self._handles[path].keys():  # noqa: SIM118 (the handle is no dict)
                if name in self._files:
                    raise ModelLoadError(f"tensor {name} is in both {self._files[name].name} and {path.name}")
                self._files[name] = path
        # Saved from the body alone, as embedding models are: there the body's own prefix is missing.
        self._lacks_prefix = "embed_tokens.weight" in self._files
        if self._lacks_prefix:
            self._files = {_BODY + name: path for name, path in self._files.items()}

    def names(self) -> Sequence[str]:
        return list(self._files)

    def has(self, name: str) -> bool:
        return name in self._files

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._handles[self._files[name]].get_slice(self._stored(name)).get_shape())

    def common_dtype(self) -> torch.dtype:
        """The float type of all tensors (of doubles fp32), fp32 where they differ. ModelLoadError for integers, as in
        `dense`."""
        found = {gguf.FLOAT_TYPES[self.kind(name)] for name in self._files}
        return found.pop() if len(found) == 1 else torch.float32

    def kind(self, name: str) -> str:
        stored = self._handles[self._files[name]].get_slice(self._stored(name)).get_dtype()
        if stored == "F64":
            return "F32"
        if stored not in gguf.FLOAT_TYPES:
            raise ModelLoadError(f"{self.where(name)}: tensor {name} has type {stored}, which cannot be served")
        return stored

    def where(self, name: str) -> str:
        return str(self._files[name]) if name in self._files else ", ".join(path.name for path in self._handles)

    def dense(self, name: str) -> torch.Tensor:
        tensor = self._handles[self._files[name]].get_tensor(self._stored(name))
        if tensor.dtype is torch.float64:
            return tensor.float()
        if tensor.dtype not in _FLOATS:
            raise ModelLoadError(f"{self.where(name)}: tensor {name} has type {tensor.dtype}, which cannot be served")
        return tensor

    def _stored(self, name: str) -> str:
        return name.removeprefix(_BODY) if self._lacks_prefix else name


class GGUFSource(FileSource):
    """A GGUF file; block-quantised matrices stay packed."""

    def __init__(self, file: GGUFFile):
        self._file = file
        self._names = set(file.tensor_names())
        self.has_data = file.has_data

    def names(self) -> Sequence[str]:
        return self._file.tensor_names()

    def has(self, name: str) -> bool:
        return name in self._names

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file.shape(name)

    def kind(self, name: str) -> str:
        return self._file.quant_type(name).name

    def where(self, name: str) -> str:
        return str(self._file.path)

    def dense(self, name: str) -> torch.Tensor:
        quant_type, rows = self.rows(name)
        floats = gguf.as_dense(quant_type, rows)
        return (gguf.dequantize(quant_type, rows) if floats is None else floats).reshape(self.shape(name))

    def is_packed(self, name: str) -> bool:
        return self._file.quant_type(name).block_len > 1

    def rows(self, name: str) -> tuple[str, np.ndarray]:
        quant, rows = self._file.quantized(name)
        return quant.name, rows


class DummySource(WeightSource):
    """Random weights of whatever shape is asked for, in the type that files would have: benchmarks without files.

    On a GPU they are drawn there, and nothing of them is ever in host memory.
    """

    def __init__(self, seed: int, dtype: torch.dtype, device: torch.device | None = None):
        """Numbers are drawn on `device` (default: the CPU), each device having its own for a seed."""
        self._device = device or torch.device("cpu")
        self._generator = torch.Generator(self._device).manual_seed(seed)
        self._dtype = dtype
        self._shapes: dict[str, tuple[int, ...]] = {}

    def names(self) -> Sequence[str]:
        return list(self._shapes)

    def has(self, name: str) -> bool:
        return name in self._shapes

    def expect(self, name: str, shape: tuple[int, ...]) -> None:
        self._shapes[name] = shape

    def dense(self, name: str) -> torch.Tensor:
        shape = self._shapes[name]
        if len(shape) == 1:
            value = 1.0 if name.endswith(".weight") else 0.0
            return torch.full(shape, value, dtype=self._dtype, device=self._device)
        numbers = torch.randn(shape, generator=self._generator, dtype=self._dtype, device=self._device)
        return numbers.div_(math.sqrt(shape[-1]))
