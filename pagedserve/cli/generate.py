"""`pagedserve generate`: continue prompts in this process and print the text."""

from __future__ import annotations

import argparse
import json
import sys

from pagedserve import log
from pagedserve.cli.flags import add_engine_flags, llm_from_args
from pagedserve.sampling_params import SamplingParams


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="*", help="prompts (default: one a line from stdin)")
    parser.add_argument("--max-tokens", type=int, default=64, help="tokens to generate for each (default: 64)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default: 0)")
    parser.add_argument("--top-p", type=float, default=1.0, help="share of probability to draw from (default: 1)")
    parser.add_argument("--sampling-seed", type=int, help="seed of the draws")
    parser.add_argument("--json", action="store_true", help="one JSON line a prompt")
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    log.configure(process="generate", level="warning")
    prompts = args.prompt or [line.rstrip("\n") for line in sys.stdin if line.strip()]
    params = SamplingParams(
        max_tokens=args.max_tokens, temperature=args.temperature, top_p=args.top_p, seed=args.sampling_seed
    )
    with llm_from_args(args) as llm:
        for output in llm.generate(prompts, params):
            choice = output.outputs[0]
            if args.json:
                record = {"prompt": output.prompt, "text": choice.text, "finish_reason": choice.finish_reason}
                print(json.dumps(record, ensure_ascii=False))
            else:
                print(f"{output.prompt}{choice.text}")
    return 0
