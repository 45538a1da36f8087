"""The `pagedserve` command: one file a subcommand, found through the table below."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import NoReturn

from pagedserve import __version__
from pagedserve.errors import PagedServeError

# subcommand -> (module with `add_arguments(parser)` and `run(args) -> int`, one line of help)
COMMANDS = {
    "serve": ("pagedserve.cli.serve", "start the OpenAI-compatible HTTP server"),
    "generate": ("pagedserve.cli.generate", "continue prompts offline, without a server"),
    "run-batch": ("pagedserve.cli.run_batch", "answer a file of requests offline, without a server"),
    "chat": ("pagedserve.cli.chat", "talk with a served model in the terminal"),
    "bench": ("pagedserve.cli.bench", "measure: serve, throughput, latency"),
    "plan": ("pagedserve.cli.plan", "what a model takes and what a card can do with it, before loading"),
    "collect-env": ("pagedserve.cli.collect_env", "print what a bug report needs"),
}

EXIT_FAILURE = 1
EXIT_USAGE = 2


class _Parser(argparse.ArgumentParser):
    """argparse with an error of one line: a screenful of usage hides what is wrong."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"{self.prog}: {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code. An operator's mistake is one line on stderr."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = _Parser(prog="pagedserve", description="LLM serving on PagedAttention.")
    parser.add_argument("--version", action="version", version=f"pagedserve {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (module_name, help_line) in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=help_line, description=help_line)
        # Only the chosen command is imported: `pagedserve --help` stays instant.
        if name in arguments[:1]:
            module: ModuleType = import_module(module_name)
            module.add_arguments(subparser)
            subparser.set_defaults(run=module.run)
    args = parser.parse_args(arguments)
    try:
        return int(args.run(args))
    except PagedServeError as error:
        print(f"pagedserve {args.command}: {error}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        return 130
