"""Command-line flags made from the config dataclasses, so that a default and its help are written once."""

from __future__ import annotations

import argparse
import dataclasses
import types
import typing
from typing import TYPE_CHECKING, Any, TypeVar

from pagedserve.config import (
    CacheConfig,
    EngineConfig,
    FrontConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    StructuredOutputConfig,
)

if TYPE_CHECKING:
    from pagedserve.engine.llm import LLM

Config = TypeVar("Config")

ENGINE_SLICES: dict[str, type] = {
    "model": ModelConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "parallel": ParallelConfig,
    "front": FrontConfig,
    "structured_output": StructuredOutputConfig,
}

# Flags of other engines that scripts still carry: name -> what to use here. They fail with that line.
RENAMED_FLAGS = {
    "--kv-cache-memory-bytes": "--kv-cache-memory",
    "--max-num-queued-reqs": "--max-queue-len",
    "--uvicorn-log-level": "--log-level",
    "--enable-log-requests": "--log-requests",
    "--disable-log-requests": "(requests are not logged unless --log-requests is given)",
    "--enable-chunked-prefill": "(prompts are always computed in chunks)",
    "--guided-decoding-backend": "(not needed)",
    "--enable-auto-tool-choice": "(not needed)",
    "--n-gpu-layers": "--device",
    "--ctx-size": "--max-model-len",
    "--mem-fraction-static": "--gpu-memory-utilization",
}


def add_config_flags(parser: argparse.ArgumentParser, config: type) -> None:
    """One flag a field of `config` that was declared with `config.flag()`."""
    hints = typing.get_type_hints(config)
    group = parser.add_argument_group((config.__doc__ or config.__name__).splitlines()[0].rstrip("."))
    for field in dataclasses.fields(config):
        if "help" not in field.metadata:
            continue
        names = [name for name in (field.metadata["alias"], "--" + field.name.replace("_", "-")) if name]
        options: dict[str, Any] = {"dest": field.name, "default": field.default, "help": _help(field)}
        kind, repeated = _value_type(hints[field.name])
        if kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        else:
            options["type"] = kind
            if repeated:
                options["action"] = "append"
                options["default"] = None
            if field.metadata["choices"]:
                options["choices"] = field.metadata["choices"]
            else:
                options["metavar"] = kind.__name__.upper()
        group.add_argument(*names, **options)


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of every slice of EngineConfig, and a line of advice for flags of other engines."""
    for config in ENGINE_SLICES.values():
        add_config_flags(parser, config)
    for name, advice in RENAMED_FLAGS.items():
        parser.add_argument(name, action=_Renamed, advice=advice, nargs="?", help=argparse.SUPPRESS)


def config_from_args(config: type[Config], args: argparse.Namespace) -> Config:
    """Build `config` from parsed flags; ConfigError names the flag whose value is out of range."""
    values = {}
    for field in dataclasses.fields(config):  # type: ignore[arg-type]
        if "help" in field.metadata:
            value = getattr(args, field.name)
            is_tuple = isinstance(field.default, tuple)
            values[field.name] = tuple(value or ()) if is_tuple else value
    return config(**values)


def engine_config_from_args(args: argparse.Namespace) -> EngineConfig:
    """The whole EngineConfig from parsed flags."""
    return EngineConfig(**{name: config_from_args(config, args) for name, config in ENGINE_SLICES.items()})


def llm_from_args(args: argparse.Namespace) -> LLM:
    """The offline engine that the flags describe, in this process."""
    from pagedserve.engine.llm import LLM

    settings: dict[str, Any] = {}
    for config in ENGINE_SLICES.values():
        slice_ = config_from_args(config, args)
        settings.update({field.name: getattr(slice_, field.name) for field in dataclasses.fields(config)})
    return LLM(**settings)


class _Renamed(argparse.Action):
    """Ends with one line that names this engine's own flag, rather than `unrecognized arguments`."""

    def __init__(self, *args: Any, advice: str, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.advice = advice

    def __call__(self, parser: argparse.ArgumentParser, namespace: object, values: object, option: Any = None) -> None:
        parser.error(f"{option} is another engine's flag; use {self.advice}")


def _help(field: dataclasses.Field[Any]) -> str:
    text = field.metadata["help"].replace("%", "%%")
    shown = field.default not in (None, False, ()) and "default" not in text
    return f"{text} (default: {field.default})" if shown else text


def _value_type(hint: Any) -> tuple[type, bool]:
    """The type of one value, and whether the flag may be repeated (`tuple[str, ...]`)."""
    if typing.get_origin(hint) is tuple:
        return typing.get_args(hint)[0], True
    if isinstance(hint, types.UnionType):
        return next(part for part in typing.get_args(hint) if part is not type(None)), False
    return hint, False
