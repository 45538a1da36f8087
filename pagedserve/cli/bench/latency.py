"""Seconds that one batch takes offline, several times over."""

from __future__ import annotations

import argparse
import json
import time

from pagedserve.cli.bench.statistics import parse_percentiles, print_table, summarize
from pagedserve.cli.bench.workload import add_workload_arguments, make_workload
from pagedserve.cli.flags import add_engine_flags, llm_from_args
from pagedserve.errors import ConfigError
from pagedserve.sampling_params import SamplingParams


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--num-iters", type=int, default=5, help="batches measured (default: 5)")
    parser.add_argument("--num-iters-warmup", type=int, default=1, help="batches before them (default: 1)")
    parser.add_argument("--metric-percentiles", type=parse_percentiles, default=[90, 99], help="default: 90,99")
    # --num-prompts is the batch size here; one prompt is the usual question.
    add_workload_arguments(parser, num_prompts=1)
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    if args.num_iters < 1:
        raise ConfigError(f"--num-iters {args.num_iters}: use 1 or more")
    work = make_workload(args)
    params = [SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=item.output_len) for item in work]
    seconds = []
    # A prefix cache would answer the second batch from the first.
    args.enable_prefix_caching = False
    with llm_from_args(args) as llm:
        for iteration in range(args.num_iters_warmup + args.num_iters):
            started = time.perf_counter()
            llm.generate([item.prompt for item in work], params, use_tqdm=False)
            if iteration >= args.num_iters_warmup:
                seconds.append(time.perf_counter() - started)
    result = {
        "batch_size": len(work),
        "output_len": args.output_len,
        "num_iters": args.num_iters,
        **{f"{name}_ms": value for name, value in summarize(seconds, args.metric_percentiles).items()},
    }
    if args.json:
        print(json.dumps(result))
    else:
        print_table(" latency ", dict(result))
    return 0
