"""From the tensors of a checkpoint to layers: each tensor is used once, with the right shape, or loading fails.

A model is built by asking for its layers here, so there is no moment at which a layer exists without its weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from pagedserve.errors import ModelLoadError
from pagedserve.kernels.native import PackedExperts
from pagedserve.layers.embedding import DenseEmbedding, Embedding, PackedEmbedding, SharedEmbedding
from pagedserve.layers.linear import Linear
from pagedserve.layers.norm import LayerNorm, RMSNorm
from pagedserve.models.sources import WeightSource
from pagedserve.quantization.method import LinearWeight, QuantMethod, RoundingError
from pagedserve.quantization.packed_cache import PackedCache

# Tensors that old exporters wrote although they follow from the config: rotary tables, causal masks.
_DERIVED = (
    *("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached"),
    *(".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias"),
)
_MAX_NAMED = 8


class Weights:
    """Makes layers out of a source, in the types and on the device of the run."""

    def __init__(
        self,
        source: WeightSource,
        *,
        quant: QuantMethod,
        dtype: torch.dtype,
        device: torch.device,
        cache: PackedCache | None = None,
    ):
        """`cache` holds matrices that an earlier start packed from the same files, and takes those of this one."""
        self._source = source
        self._quant = quant
        self._cache = cache
        self._dtype = dtype
        self._device = device
        self._keeps_file_tables = device.type == "cpu"
        self._taken: set[str] = set()
        self.sizes: dict[str, int] = {}  # bytes of what was made so far, by the name of its (first) tensor
        self.lookup_bytes = 0  # of them: tables of which a token reads one row
        self.rounding_error: RoundingError | None = None  # of what was quantised while loading

    @property
    def nbytes(self) -> int:
        """Of all layers made so far."""
        return sum(self.sizes.values())

    def vector(self, name: str, size: int, *, offset: float = 0.0) -> torch.Tensor:
        """A norm's weight or a bias, [size], plus `offset`, in the dtype of the activations."""
        self._take(name, (size,))
        vector = (self._source.dense(name).float() + offset).to(device=self._device, dtype=self._dtype)
        self._count(name, vector.nbytes)
        return vector

    def rms_norm(self, name: str, size: int, eps: float, *, offset: float = 0.0) -> RMSNorm:
        """`offset` is added to what the file holds."""
        return RMSNorm(self.vector(f"{name}.weight", size, offset=offset), eps)

    def layer_norm(self, name: str, size: int, eps: float, *, bias: bool = True) -> LayerNorm:
        return LayerNorm(self.vector(f"{name}.weight", size), self.vector(f"{name}.bias", size) if bias else None, eps)

    def linear(
        self,
        names: str | Sequence[str],
        out_features: int | Sequence[int],
        in_features: int,
        *,
        bias: bool,
        order: torch.Tensor | None = None,
        transposed: bool = False,
        exact: bool = False,
    ) -> Linear:
        """One projection, or several of the same input with their rows stacked in the order given.

        `order`, int64 [out_features], picks the rows (and biases) of a single matrix; `transposed`: the file holds
        [in_features, out_features]; `exact`: never quantised.
        """
        names = [names] if isinstance(names, str) else list(names)
        sizes = [out_features] if isinstance(out_features, int) else list(out_features)
        for name, size in zip(names, sizes, strict=True):
            self._take(f"{name}.weight", (in_features, size) if transposed else (size, in_features))
        full_names = [f"{name}.weight" for name in names]

        def arrange(matrix: torch.Tensor) -> torch.Tensor:
            matrix = matrix.T if transposed else matrix
            return matrix if order is None else matrix[order]

        rearranged = order is not None or transposed
        quant = self._quant.exact() if exact else self._quant
        weight = self._matrix(full_names, sum(sizes), in_features, quant, arrange if rearranged else None)
        biases = [self.vector(f"{name}.bias", size) for name, size in zip(names, sizes, strict=True)] if bias else []
        joined = torch.cat(biases) if biases else None
        return Linear(weight, joined if order is None or joined is None else joined[order.to(joined.device)])

    def experts(
        self, names: Sequence[Sequence[str]], out_features: int, in_features: int
    ) -> torch.Tensor | PackedExperts:
        """One projection of every expert; the matrices of one, each [out_features, in_features], count as stacked."""
        quant, made = self._quant.for_experts(), []
        for expert in names:
            for name in expert:
                self._take(f"{name}.weight", (out_features, in_features))
            made.append([self._matrix([f"{name}.weight"], out_features, in_features, quant) for name in expert])
        return quant.stack_experts(made)

    def embedding_and_head(
        self, embedding: str, head: str, *, vocab_size: int, hidden_size: int, tied: bool
    ) -> tuple[Embedding, Linear]:
        """The token embedding and the output head, which may be one matrix.

        A head of its own that is in the file is used even where the config says tied, as transformers does; an untied
        head that is missing is an error.
        """
        embedding, head = f"{embedding}.weight", f"{head}.weight"
        self._take(embedding, (vocab_size, hidden_size))
        has_head = self._source.has(head) or not tied
        if has_head:
            self._take(head, (vocab_size, hidden_size))
        shared = tied and (not has_head or self._source.equal(embedding, head))
        head_weight = self._matrix([embedding if shared else head], vocab_size, hidden_size, self._quant.for_head())
        if shared:
            return SharedEmbedding(head_weight, self._dtype), Linear(head_weight)
        lookup: Embedding
        if self._keeps_file_tables and self._source.is_packed(embedding):
            lookup = PackedEmbedding(*self._source.rows(embedding), self._dtype)
        else:
            lookup = DenseEmbedding(self._table(embedding), self._dtype)
        self._count(embedding, lookup.nbytes)
        self.lookup_bytes += lookup.nbytes
        return lookup, Linear(head_weight)

    def position_embedding(self, name: str, num_positions: int, hidden_size: int, *, offset: int = 0) -> Embedding:
        """Learned positions: rows of a table that begins `offset` rows before position 0."""
        name = f"{name}.weight"
        self._take(name, (num_positions + offset, hidden_size))
        table = DenseEmbedding(self._table(name)[offset:], self._dtype)
        self._count(name, table.nbytes)
        self.lookup_bytes += table.nbytes
        return table

    def prefix_of(self, name: str, prefixes: Sequence[str]) -> str:
        """The first prefix under which the file has the tensor; the last one where it has none."""
        return next((prefix for prefix in prefixes if self._source.has(prefix + name)), prefixes[-1])

    def leave_out(self, *prefixes: str) -> None:
        """Tensors whose names begin so belong to parts of the model that are not served."""
        self._taken.update(name for name in self._source.names() if name.startswith(prefixes))

    def finish(self) -> None:
        """ModelLoadError for tensors that nobody asked for: the model is not what the config says."""
        extra = [n for n in self._source.names() if n not in self._taken and not n.endswith(_DERIVED)]
        if extra:
            more = f" and {len(extra) - _MAX_NAMED} more" if len(extra) > _MAX_NAMED else ""
            named = ", ".join(extra[:_MAX_NAMED]) + more
            raise ModelLoadError(f"the checkpoint holds tensors that this architecture does not have: {named}")

    def _take(self, name: str, shape: tuple[int, ...]) -> None:
        if name in self._taken:
            raise ModelLoadError(f"tensor {name} is asked for twice")
        self._source.expect(name, shape)
        self._taken.add(name)

    def _count(self, name: str, num_bytes: int) -> None:
        self.sizes[name] = self.sizes.get(name, 0) + num_bytes

    def _table(self, name: str) -> torch.Tensor:
        """On CPUs as the file has it, mapped and not copied; elsewhere in the type of the activations."""
        table = self._source.dense(name)
        return table if self._keeps_file_tables else table.to(device=self._device, dtype=self._dtype)

    def _matrix(
        self,
        names: Sequence[str],
        out_features: int,
        in_features: int,
        quant: QuantMethod,
        arrange: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> LinearWeight:
        """`arrange` makes [out_features, in_features] of each dense tensor."""
        cache = None if quant.cache_key is None else self._cache
        key = f"{quant.cache_key} {' '.join(names)}"
        weight = None if cache is None else cache.get(key, (out_features, in_features))
        if weight is None:
            if arrange is None:
                weight = self._packed(names, in_features, quant)
            else:
                weight = quant.from_dense([arrange(self._source.dense(name)) for name in names])
            if cache is not None:
                cache.add(key, weight)
        self._count(names[0], weight.nbytes)
        lost = weight.rounding_error
        if lost is not None:
            self.rounding_error = lost if self.rounding_error is None else self.rounding_error + lost
        return weight

    def _packed(self, names: Sequence[str], in_features: int, quant: QuantMethod) -> LinearWeight:
        if any(self._source.is_packed(name) for name in names):
            kinds, rows = zip(*(self._source.rows(name) for name in names), strict=True)
            return quant.from_gguf(kinds, rows, in_features)
        return quant.from_dense([self._source.dense(name) for name in names])
