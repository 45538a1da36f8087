"""`pagedserve run-batch`: answer a file of requests without a server."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from pagedserve import log
from pagedserve.cli.flags import add_engine_flags, engine_config_from_args


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-i", "--input-file", required=True, help="JSON lines: custom_id, method, url, body")
    parser.add_argument("-o", "--output-file", required=True, help="JSON lines: custom_id, response, error")
    parser.add_argument(
        "--resume", action="store_true", help="keep the good answers of the output file and add the rest"
    )
    parser.add_argument("--concurrency", type=int, help="requests under way at once (default: --max-num-seqs)")
    parser.add_argument("--served-model-name", action="append", help="names that lines may use (default: the model's)")
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    log.configure(process="run-batch", level="warning")
    from pagedserve.api.batch.offline import run_file

    config = engine_config_from_args(args)
    counts = asyncio.run(
        run_file(
            config,
            Path(args.input_file),
            Path(args.output_file),
            names=tuple(args.served_model_name or (config.model.model,)),
            concurrency=max(args.concurrency or config.scheduler.max_num_seqs, 1),
            resume=args.resume,
        )
    )
    skipped = f", {counts.skipped} answered before" if counts.skipped else ""
    print(f"{counts.completed} answered, {counts.failed} failed{skipped}: {args.output_file}", file=sys.stderr)
    return 1 if counts.failed else 0
