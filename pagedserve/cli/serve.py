"""`pagedserve serve`: the HTTP server."""

from __future__ import annotations

import argparse
import gc

from pagedserve import log
from pagedserve.cli.flags import add_config_flags, add_engine_flags, config_from_args, engine_config_from_args
from pagedserve.config import ServerConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model_name", nargs="?", metavar="MODEL", help="the same as --model MODEL")
    add_config_flags(parser, ServerConfig)
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    if args.model_name is not None:
        args.model = args.model_name
    server_config = config_from_args(ServerConfig, args)
    engine_config = engine_config_from_args(args)
    log.configure(process="api", level=server_config.log_level, fmt=server_config.log_format)
    # As in the core (`engine/core_main.py`): all that a start makes stays. The server switches it on.
    gc.disable()
    from pagedserve.engine.core_spawn import spawn_core

    # Its import of torch is the longest part of the start, so it begins before anything else is imported here.
    with spawn_core(log_level=server_config.log_level, log_format=server_config.log_format) as core:
        from pagedserve.api import server

        return server.run(engine_config, server_config, core)
