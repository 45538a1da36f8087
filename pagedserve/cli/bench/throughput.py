"""Tokens per second of offline generation, everything submitted at once."""

from __future__ import annotations

import argparse
import json
import time

from pagedserve.cli.bench.statistics import print_table
from pagedserve.cli.bench.workload import add_workload_arguments, make_workload
from pagedserve.cli.flags import add_engine_flags, llm_from_args
from pagedserve.sampling_params import SamplingParams


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-n", type=int, default=1, help="choices for each prompt (default: 1)")
    add_workload_arguments(parser, num_prompts=64)
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    work = make_workload(args)
    params = [
        SamplingParams(n=args.n, temperature=1.0, ignore_eos=True, max_tokens=item.output_len, seed=index)
        for index, item in enumerate(work)
    ]
    with llm_from_args(args) as llm:
        llm.generate(work[0].prompt, SamplingParams(max_tokens=2), use_tqdm=False)
        started = time.perf_counter()
        outputs = llm.generate([item.prompt for item in work], params, use_tqdm=not args.json)
        seconds = time.perf_counter() - started
    num_input = sum(len(output.prompt_token_ids) for output in outputs)
    num_output = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
    result = {
        "num_prompts": len(work),
        "duration_s": round(seconds, 3),
        "input_tokens": num_input,
        "output_tokens": num_output,
        "requests_per_second": round(len(work) / seconds, 3),
        "output_tokens_per_second": round(num_output / seconds, 2),
        "total_tokens_per_second": round((num_input + num_output) / seconds, 2),
    }
    if args.json:
        print(json.dumps(result))
    else:
        print_table(" throughput ", dict(result))
    return 0
