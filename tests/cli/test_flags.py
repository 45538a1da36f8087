"""Flags come from the config dataclasses; mistakes are one line and a non-zero exit."""

from __future__ import annotations

import argparse
import dataclasses

import pytest

from pagedserve.cli import COMMANDS, main
from pagedserve.cli.flags import (
    ENGINE_SLICES,
    RENAMED_FLAGS,
    add_config_flags,
    add_engine_flags,
    config_from_args,
    engine_config_from_args,
)
from pagedserve.config import EngineConfig, ServerConfig

# Growth of the command line needs an argument: whoever adds a flag adds it here, and says why in DECISIONS.md.
KNOWN_FLAGS = set(
    """
    ssl-certfile ssl-keyfile ssl-ca-certs
    host port served-model-name api-key allowed-origins strict shutdown-timeout max-body-size log-level log-format
    log-requests data-dir data-dir-quota batch-concurrency tool-call-parser reasoning-parser
    model tokenizer revision dtype weights-dtype max-model-len load-format attention-backend device num-threads seed
    model-impl enforce-eager
    model-impl skip-tokenizer-init
    block-size gpu-memory-utilization kv-cache-memory num-device-blocks kv-cache-dtype kv-cache-resident swap-space
    enable-prefix-caching
    max-num-batched-tokens max-num-seqs max-queue-len policy preemption-mode async-scheduling watermark request-timeout
    executor
    chat-template generation-config pooling-type max-logprobs health-timeout
    max-grammar-size grammar-timeout grammar-cache-size
    """.split()  # noqa: SIM905  (a list of forty strings is harder to read than the words)
)


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser()
    add_config_flags(result, ServerConfig)
    add_engine_flags(result)
    return result


def test_no_flag_appears_unnoticed() -> None:
    names = {field.name.replace("_", "-") for field in dataclasses.fields(ServerConfig)}
    for config in ENGINE_SLICES.values():
        names |= {field.name.replace("_", "-") for field in dataclasses.fields(config)}
    assert names == KNOWN_FLAGS


def test_defaults_are_those_of_the_dataclasses() -> None:
    args = parser().parse_args([])
    assert engine_config_from_args(args) == EngineConfig()
    assert config_from_args(ServerConfig, args) == ServerConfig()


def test_flags_reach_their_fields() -> None:
    arguments = ["--port", "9", "--api-key", "a", "--api-key", "b", "--max-num-seqs", "3", "-m", "x"]
    args = parser().parse_args([*arguments, "--no-enable-prefix-caching", "--block-size", "8"])
    config = engine_config_from_args(args)
    assert (config.scheduler.max_num_seqs, config.cache.enable_prefix_caching, config.cache.block_size) == (3, False, 8)
    assert config.model.model == "x"
    server = config_from_args(ServerConfig, args)
    assert (server.port, server.api_key) == (9, ("a", "b"))


@pytest.mark.parametrize("flag", sorted(RENAMED_FLAGS))
def test_a_flag_of_another_engine_names_ours(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main(["serve", flag, "1"])
    assert raised.value.code == 2
    error = capsys.readouterr().err
    assert RENAMED_FLAGS[flag] in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["serve", "--port", "99999"],
        ["serve", "--block-size", "12"],
        ["serve", "--kv-cache-memory", "lots"],
        ["serve", "--nonsense"],
        ["serve", "--dtype", "int3"],
        ["serve", "--max-num-seqs", "many"],
        ["nonsense"],
        [],
    ],
)
def test_an_operators_mistake_is_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(arguments)
    except SystemExit as exited:
        code = exited.code
    assert code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "Traceback" not in error


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main([command, "--help"])
    assert raised.value.code == 0
    assert command in capsys.readouterr().out
