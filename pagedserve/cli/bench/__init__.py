"""`pagedserve bench`: serve (a running server), throughput, latency and step (this process, offline)."""

from __future__ import annotations

import argparse
from importlib import import_module

from pagedserve import log

# name -> (module with `add_arguments(parser)` and `run(args) -> int`, one line of help)
BENCHES = {
    "serve": ("pagedserve.cli.bench.serve", "load a running server: TTFT, TPOT, ITL, E2EL and goodput"),
    "throughput": ("pagedserve.cli.bench.throughput", "tokens per second of offline generation"),
    "step": ("pagedserve.cli.bench.step", "where a decode step's time goes, op by op with --profile"),
    "latency": ("pagedserve.cli.bench.latency", "seconds that one offline batch takes"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    subparsers = parser.add_subparsers(dest="bench", metavar="BENCH", required=True)
    for name, (module_name, help_line) in BENCHES.items():
        module = import_module(module_name)
        subparser = subparsers.add_parser(name, help=help_line, description=help_line)
        subparser.add_argument("--json", action="store_true", help="print one JSON line and nothing else")
        module.add_arguments(subparser)
        subparser.set_defaults(run_bench=module.run)


def run(args: argparse.Namespace) -> int:
    log.configure(process="bench", level="warning")
    return args.run_bench(args)
