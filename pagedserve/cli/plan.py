"""`pagedserve plan`: what serving a model takes, before anything is loaded, here or on a card that is elsewhere."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any

from pagedserve import log
from pagedserve.cards import Card, card_named
from pagedserve.cli.flags import add_config_flags, config_from_args
from pagedserve.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, parse_bytes
from pagedserve.engine.planning import ServingPlan, make_serving_plan
from pagedserve.errors import ConfigError
from pagedserve.step import KVCacheSpec


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model_name", nargs="?", metavar="MODEL", help="the same as --model MODEL")
    parser.add_argument("--card", help="plan for this GPU, which need not be here: H100, A100-80, L4, 4090, ...")
    parser.add_argument("--device-memory", metavar="SIZE", help="plan for a GPU with this much memory, such as 80GiB")
    parser.add_argument("--lengths", metavar="N,N,...", help="lengths of requests to count, prompt and output together")
    parser.add_argument("--json", action="store_true", help="one JSON line")
    for config in (ModelConfig, CacheConfig, SchedulerConfig):
        add_config_flags(parser, config)


def run(args: argparse.Namespace) -> int:
    log.configure(process="plan", level="warning")
    if args.model_name is not None:
        args.model = args.model_name
    config = EngineConfig(
        model=config_from_args(ModelConfig, args),
        cache=config_from_args(CacheConfig, args),
        scheduler=config_from_args(SchedulerConfig, args),
    )
    card = None if args.card is None else card_named(args.card)
    device_bytes = None if args.device_memory is None else parse_bytes(args.device_memory, "--device-memory")
    if config.model.device == "cpu" and (card is not None or device_bytes is not None):
        raise ConfigError("--device cpu plans for this machine; leave out --card and --device-memory")
    plan = make_serving_plan(config, card=card, device_bytes=device_bytes, lengths=_lengths(args.lengths))
    print(json.dumps(_record(plan, card)) if args.json else describe(plan, card))
    return 0


def describe(plan: ServingPlan, card: Card | None) -> str:
    """The plan as people read it."""
    load, memory = plan.load, plan.load.memory
    spec = memory.spec
    where = card.name if card else {"cpu": "this machine's CPU", "cuda": "a GPU"}[load.device]
    size = f"{memory.num_device_blocks} blocks of {spec.block_size} tokens"
    lines = [
        f"{plan.model} ({plan.architecture}) on {where}, activations {load.dtype}, keys and values {spec.dtype}",
        "",
        _line("weights", _size(memory.weights_bytes)),
        *(_line(f"  {kind}", _size(num_bytes)) for kind, num_bytes in load.weights.items()),
        _line("a step, at most", _size(load.activation_bytes), "activations and logits, estimated"),
        _line("KV pool", _size(memory.kv_bytes), size),
        _line("  a token", _size(spec.bytes_per_token), _groups(spec)),
        _line("longest request", f"{plan.longest} tokens", _limit(plan)),
    ]
    if memory.num_host_blocks:
        lines.append(_line("host pool", _size(memory.num_host_blocks * spec.bytes_per_block), "of preempted requests"))
    return "\n".join([*lines, "", *_table(plan)])


def _line(name: str, value: str, note: str = "") -> str:
    return f"{name:<19}{value:>15}  {note}".rstrip()


def _limit(plan: ServingPlan) -> str:
    wanted = plan.load.max_model_len
    return "" if plan.longest >= wanted else f"the model's {wanted} do not fit into the pool"


def _table(plan: ServingPlan) -> list[str]:
    has_speed = any(row.tokens_per_second is not None for row in plan.lengths)
    lines = ["tokens a request  have room  run at once" + ("  tokens/s alone  tokens/s together" if has_speed else "")]
    for row in plan.lengths:
        line = f"{row.num_tokens:>16}{row.concurrent:>11.1f}{row.running:>13}"
        if has_speed:
            line += f"{_speed(row.tokens_per_second_alone):>16}{_speed(row.tokens_per_second):>19}"
        lines.append(line)
    if has_speed:
        lines.append("tokens/s: what bandwidth and arithmetic of the card allow while decoding; not measured")
    return lines


def _groups(spec: KVCacheSpec) -> str:
    groups = spec.layer_groups
    if len(groups) == 1 and groups[0].window is None:
        return f"{spec.num_layers} layers"
    counts: dict[int | None, int] = {}
    for group in groups:
        counts[group.window] = counts.get(group.window, 0) + len(group.layers)
    kinds = ", ".join(f"{count} layers that see {window or 'all'}" for window, count in counts.items())
    return f"{kinds}, in {len(groups)} layer groups"


def _record(plan: ServingPlan, card: Card | None) -> dict[str, Any]:
    record = dataclasses.asdict(plan)
    record["card"] = None if card is None else dataclasses.asdict(card)
    record["load"]["memory"]["spec"]["bytes_per_token"] = plan.load.memory.spec.bytes_per_token
    return record


def _lengths(text: str | None) -> list[int]:
    if text is None:
        return []
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ConfigError(f"--lengths {text}: use numbers of tokens with commas between them, such as 1024,8192")
    return [int(part) for part in parts]


def _size(num_bytes: int) -> str:
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if num_bytes >= 2**power:
            return f"{num_bytes / 2**power:.2f} {unit}"
    return f"{num_bytes} B"


def _speed(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"
