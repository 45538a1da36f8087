"""What crosses between the control plane and the data plane, and nothing else.

Down goes one `SchedulerOutput` a step, as columns and differences: the worker keeps a row of state for each live
sequence. Up comes one `ModelRunnerOutput`. The worker knows sequences and blocks; it knows neither groups nor policy.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pagedserve.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    """Layers that keep their keys and values in the same blocks: those of one sliding window, or part of them."""

    layers: tuple[int, ...]
    window: int | None = None  # a token sees itself and the window - 1 tokens before it; None: all


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheSpec:
    """The shape of one KV block, as the model and the attention backend need it.

    A block holds `block_size` tokens of one layer group, and has room for as many layers as the largest group. Without
    `groups` all layers form one that sees everything. Lists of block ids hold the blocks of the first group, then those
    of the second, and so on, equally many of each.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    bytes_per_block: int
    groups: tuple[LayerGroup, ...] = ()

    @property
    def layer_groups(self) -> tuple[LayerGroup, ...]:
        return self.groups or (LayerGroup(layers=tuple(range(self.num_layers))),)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Of each layer group."""
        return tuple(group.window for group in self.layer_groups)

    @property
    def num_layers_per_block(self) -> int:
        return max(len(group.layers) for group in self.layer_groups)

    @property
    def bytes_per_token(self) -> int:
        """Of all layers, while all of them see the token."""
        return len(self.layer_groups) * self.bytes_per_block // self.block_size


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """What the worker found: shown to the operator before serving, and the size of both pools."""

    weights_bytes: int
    kv_bytes: int
    num_device_blocks: int
    num_host_blocks: int
    spec: KVCacheSpec
    # Device blocks that keep their memory while nobody needs so many; None: all of them do.
    num_resident_blocks: int | None = None
    # What a GPU's pool leaves free, as measured: for the largest step, and for captured steps.
    step_bytes: int = 0
    graph_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """What a worker would find, known before anything is loaded."""

    memory: MemoryPlan
    max_model_len: int
    device: str
    dtype: str  # of activations
    attention_backend: str
    weights: dict[str, int]  # bytes of each kind of weight
    read_bytes: int  # weights that computing one token reads
    multiplications: int  # of weights with one token's activations
    activation_bytes: int  # most that a step takes besides weights and pools
    free_bytes: int  # for both of them


@dataclass(slots=True, kw_only=True)
class NewSequence:
    """Everything a worker must know of a sequence that arrives, or returns after it was released."""

    seq_id: int
    token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: list[int]  # group after group (see KVCacheSpec); any number where a window has left the block behind
    sampling_params: SamplingParams
    seed: int
    choice_index: int
    eos_token_ids: tuple[int, ...] = ()


@dataclass(slots=True, kw_only=True)
class BlockOps:
    """What happens to whole blocks, in this order before the forward: swap_out, swap_in, copy, discard.

    A group that returns may write into a block that its sequences share, so a copy's source may come from the host.
    """

    swap_out: list[tuple[int, int]] = field(default_factory=list)  # (device block, host block)
    swap_in: list[tuple[int, int]] = field(default_factory=list)  # (host block, device block)
    copy: list[tuple[int, int]] = field(default_factory=list)  # (source, destination) on the device
    discard: list[int] = field(default_factory=list)  # device blocks whose memory may go back to the system

    def __bool__(self) -> bool:
        return bool(self.swap_out or self.swap_in or self.copy or self.discard)


@dataclass(slots=True, kw_only=True)
class SchedulerOutput:
    """The decision for one step.

    The worker applies, in order: `block_ops`; `forks` (the child's row becomes a copy of the parent's: tokens, block
    table, computed count); `released`; `appended` (tokens that the control plane chose, as in beam search); `new`;
    then the block-table columns of the scheduled sequences, the forward, and sampling.

    Scheduled sequences are columns in batch order. A row is sampled when it will have computed all tokens it has:
    `num_computed[i] + num_scheduled[i] == len(token_ids of the row)`. The token that the step before draws counts among
    them, even where that step is still under way and nobody outside the device knows the token. `shared_logits` names
    children, forked in this step from a parent that is scheduled in this step, that draw their first token from the
    parent's logits.
    """

    step_id: int
    new: list[NewSequence] = field(default_factory=list)
    seq_ids: list[int] = field(default_factory=list)
    num_scheduled: list[int] = field(default_factory=list)
    num_computed: list[int] = field(default_factory=list)
    # Per scheduled sequence: blocks appended to its table, group after group; and entries that copy-on-write replaced.
    new_block_ids: list[list[int]] = field(default_factory=list)
    # (seq_id, logical index, block id, layer group)
    replaced_blocks: list[tuple[int, int, int, int]] = field(default_factory=list)
    forks: list[tuple[int, int, int]] = field(default_factory=list)  # (parent seq_id, child seq_id, choice_index)
    shared_logits: list[tuple[int, int]] = field(default_factory=list)  # (child seq_id, parent seq_id)
    appended: list[tuple[int, int]] = field(default_factory=list)  # (seq_id, token_id)
    released: list[int] = field(default_factory=list)
    block_ops: BlockOps = field(default_factory=BlockOps)

    @property
    def num_tokens(self) -> int:
        return sum(self.num_scheduled)

    @property
    def is_empty(self) -> bool:
        return not (self.seq_ids or self.released or self.block_ops)


@dataclass(slots=True, kw_only=True)
class SamplingInput:
    """What a step needs only when it draws: the forward begins without it.

    `masked_seq_ids` are sampled sequences whose tokens are limited; `token_masks` has a row of 32-bit words (little
    endian) for each of them: bit i is token i.
    """

    step_id: int
    masked_seq_ids: list[int] = field(default_factory=list)
    token_masks: bytes | bytearray = b""


@dataclass(slots=True, kw_only=True)
class TokenLogprobs:
    """Log-probabilities at one position, from the model's raw logits.

    `token_ids[0]` is the token that was drawn (or, in a prompt, the token that stands there); the rest are the most
    likely ones, best first. `rank` is the drawn token's rank in the vocabulary, 1 being the most likely.
    """

    token_ids: list[int]
    logprobs: list[float]
    rank: int


@dataclass(slots=True, kw_only=True)
class ModelRunnerOutput:
    """What a step produced, as columns over the sequences that were sampled.

    For a sequence in beam search `sampled_token_ids[i]` is empty, and `candidates[seq_id]` holds its best 2 x width
    next tokens as (token_id, logprob), best first: the control plane decides. `errors` names sequences whose logits
    were not usable (all NaN): they end with `finish_reason` "error" and touch no neighbour.
    """

    step_id: int
    seq_ids: list[int] = field(default_factory=list)
    sampled_token_ids: list[list[int]] = field(default_factory=list)
    sampled_logprobs: list[float] = field(default_factory=list)  # of the last sampled token: drives best_of and beams
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)  # seq_id -> one entry a sampled token
    # seq_id -> entries for the prompt positions that this step computed, in order; position 0 has none.
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    candidates: dict[int, list[tuple[int, float]]] = field(default_factory=dict)
    # seq_id -> the vector of a prompt that is computed now and wants no tokens, little-endian fp32.
    pooled: dict[int, bytes] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    # Seconds of the step on the device, for the cost model of preemption and for metrics.
    forward_seconds: float = 0.0
    swap_seconds: float = 0.0
