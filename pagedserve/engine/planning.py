"""What serving a model would take, before anything is loaded: `pagedserve plan`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pagedserve import model_files
from pagedserve.cards import REACHED_BANDWIDTH, REACHED_RATE, Card
from pagedserve.config import EngineConfig
from pagedserve.errors import ConfigError
from pagedserve.kv_cache.geometry import Geometry
from pagedserve.log import get_logger
from pagedserve.registry import load
from pagedserve.step import KVCacheSpec, LoadPlan

log = get_logger(__name__)

# By name, so that the control plane imports without torch.
PLANNER = "pagedserve.worker.planning:plan_loading"
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 131072)


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthPlan:
    """Requests of one length, prompt and output together.

    Tokens a second are those of decoding at this context: what memory and arithmetic of the card allow, None where the
    card is not known.
    """

    num_tokens: int
    num_blocks: int  # most that such a request holds
    concurrent: float  # requests for which the pool has blocks
    running: int  # of them those that run at once (--max-num-seqs)
    tokens_per_second_alone: float | None
    tokens_per_second: float | None  # of all that run at once


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingPlan:
    """What a worker would find, and what that means for requests."""

    model: str
    architecture: str
    load: LoadPlan
    longest: int  # tokens of the longest request: the model's, or what the pool holds
    lengths: tuple[LengthPlan, ...]


def make_serving_plan(
    config: EngineConfig,
    *,
    card: Card | None = None,
    device_bytes: int | None = None,
    lengths: Sequence[int] = (),
    log_line: Callable[[str], None] = log.info,
) -> ServingPlan:
    """Plans for the device of this machine, for `card`, or for one with `device_bytes` of memory.

    `lengths` are those of the requests to count (default: a range up to the model's). Raises ConfigError,
    ModelNotFoundError or ModelLoadError with one clear line.
    """
    files = model_files.resolve(
        config.model.model,
        revision=config.model.revision,
        require_weights=False,
        header_only=True,
        log=log_line,
    )
    if not files.config:
        raise ConfigError(f"--model {config.model.model}: there is no config.json, which a plan is made from")
    if device_bytes is None and card is not None:
        device_bytes = card.memory_bytes
    plan: LoadPlan = load(PLANNER)(config.model, config.cache, config.scheduler, files, device_bytes)
    geometry = Geometry.of(plan.memory.spec, config.scheduler.max_num_batched_tokens)
    longest = min(plan.max_model_len, geometry.longest(plan.memory.num_device_blocks))
    for length in lengths:
        if length > plan.max_model_len:
            raise ConfigError(f"--lengths {length}: this model reaches {plan.max_model_len} tokens")
    counted = sorted(lengths) or [n for n in LENGTHS if n < plan.max_model_len] + [plan.max_model_len]
    architectures = files.config.get("architectures") or ["?"]
    return ServingPlan(
        model=files.name,
        architecture=str(architectures[0]),
        load=plan,
        longest=longest,
        lengths=tuple(_length_plan(n, plan, geometry, config.scheduler.max_num_seqs, card) for n in counted),
    )


def decode_seconds(plan: LoadPlan, card: Card, num_seqs: int, context: int) -> float:
    """The least time of a step that gives each of `num_seqs` sequences a token behind `context` tokens.

    Weights are read once or multiplied once a sequence, whichever takes longer; then every sequence's keys and values
    are read.
    """
    bandwidth, rate = card.bandwidth * REACHED_BANDWIDTH, card.rate * REACHED_RATE
    products = max(plan.read_bytes / bandwidth, 2 * plan.multiplications * num_seqs / rate)
    return products + num_seqs * context_bytes(plan.memory.spec, context) / bandwidth


def context_bytes(spec: KVCacheSpec, num_tokens: int) -> int:
    """Keys and values that a token behind `num_tokens` tokens reads; windows hide what lies before them."""
    layer_token_bytes = spec.bytes_per_block // spec.num_layers_per_block // spec.block_size
    seen = ((len(group.layers), min(num_tokens, group.window or num_tokens)) for group in spec.layer_groups)
    return sum(num_layers * tokens * layer_token_bytes for num_layers, tokens in seen)


def _length_plan(length: int, plan: LoadPlan, geometry: Geometry, max_num_seqs: int, card: Card | None) -> LengthPlan:
    num_blocks = geometry.num_blocks_of(length)
    concurrent = plan.memory.num_device_blocks / num_blocks
    running = min(int(concurrent), max_num_seqs)
    return LengthPlan(
        num_tokens=length,
        num_blocks=num_blocks,
        concurrent=round(concurrent, 2),
        running=running,
        tokens_per_second_alone=1 / decode_seconds(plan, card, 1, length) if card and running else None,
        tokens_per_second=running / decode_seconds(plan, card, running, length) if card and running else None,
    )
