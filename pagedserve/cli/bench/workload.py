"""Prompts of known lengths, the same for the same seed, for every benchmark."""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import dataclass
from pathlib import Path

from pagedserve.errors import ConfigError

_TEXT = (
    "time year people way day man thing woman life child world school state family student group country "
    "problem hand part place case week company system program question work night point home water room "
    "mother area money story fact month lot right study book eye job word business issue side kind head "
    "house service friend father power "
)
_WORDS = _TEXT.split()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkItem:
    """One prompt and how many tokens to ask for."""

    prompt: str
    output_len: int


def add_workload_arguments(parser: argparse.ArgumentParser, *, num_prompts: int) -> None:
    group = parser.add_argument_group("workload")
    group.add_argument("--num-prompts", type=int, default=num_prompts, help=f"requests (default: {num_prompts})")
    group.add_argument("--input-len", type=int, default=128, help="words a prompt has (default: 128)")
    group.add_argument("--output-len", type=int, default=64, help="tokens to generate for each (default: 64)")
    group.add_argument("--range-ratio", type=float, default=0.0, help="lengths vary by this share around the given")
    group.add_argument("--prefix-len", type=int, default=0, help="words that all prompts share at their start")
    group.add_argument("--dataset-path", type=Path, help='prompts instead: JSON lines {"prompt": …, "output_len": …}')
    group.add_argument("--workload-seed", type=int, default=0, help="seed of the prompts (default: 0)")


def make_workload(args: argparse.Namespace) -> list[WorkItem]:
    """The work that the flags describe; ConfigError names a flag that makes none."""
    if args.num_prompts < 1:
        raise ConfigError(f"--num-prompts {args.num_prompts}: use 1 or more")
    if args.dataset_path is not None:
        return _read_dataset(args.dataset_path, args.num_prompts, args.output_len)
    if not 0.0 <= args.range_ratio < 1.0:
        raise ConfigError(f"--range-ratio {args.range_ratio}: use a share in [0, 1)")
    rng = random.Random(args.workload_seed)
    prefix = " ".join(rng.choices(_WORDS, k=args.prefix_len))

    def vary(length: int) -> int:
        spread = int(length * args.range_ratio)
        return max(1, length + rng.randint(-spread, spread))

    items = []
    for _ in range(args.num_prompts):
        words = " ".join(rng.choices(_WORDS, k=vary(args.input_len)))
        items.append(WorkItem(prompt=f"{prefix} {words}".strip(), output_len=vary(args.output_len)))
    return items


def _read_dataset(path: Path, count: int, output_len: int) -> list[WorkItem]:
    items: list[WorkItem] = []
    try:
        with path.open(encoding="utf-8") as file:
            for line in file:
                if len(items) == count:
                    break
                record = json.loads(line)
                items.append(WorkItem(prompt=record["prompt"], output_len=int(record.get("output_len", output_len))))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--dataset-path {path}: line {len(items) + 1} is not usable: {error!r}") from error
    if not items:
        raise ConfigError(f"--dataset-path {path}: no prompts in it")
    return items
