"""`pagedserve bench`: serve (a running server), throughput and latency (this process, offline)."""

from __future__ import annotations

import argparse

from pagedserve import log
from pagedserve.bench import BENCHES
from importlib import import_module


def add_arguments(parser: argparse.ArgumentParser) -> None:
    subparsers = parser.add_subparsers(dest="bench", metavar="BENCH", required=True)
    for name, (target, help_line) in BENCHES.items():
        module = import_module(target)
        subparser = subparsers.add_parser(name, help=help_line, description=help_line)
        subparser.add_argument("--json", action="store_true", help="print one JSON line and nothing else")
        module.add_arguments(subparser)
        subparser.set_defaults(run_bench=module.run)


def run(args: argparse.Namespace) -> int:
    log.configure(process="bench", level="warning")
    return args.run_bench(args)
