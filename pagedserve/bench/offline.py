"""What the offline benches share: an LLM from the engine's flags."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from pagedserve.cli.flags import ENGINE_SLICES, config_from_args

if TYPE_CHECKING:
    from pagedserve.engine.llm import LLM


def make_llm(args: argparse.Namespace) -> LLM:
    """The engine that the flags describe, in this process."""
    from pagedserve.engine.llm import LLM

    settings = {}
    for config in ENGINE_SLICES.values():
        slice_ = config_from_args(config, args)
        settings.update({name: getattr(slice_, name) for name in config.__dataclass_fields__})
    return LLM(**settings)
