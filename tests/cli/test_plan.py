"""`pagedserve plan`: numbers for people and machines, and one line for a mistake."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pagedserve.cards import CARDS, card_named
from pagedserve.cli import main
from tests.helpers.checkpoints import llama_config, tiny_llama

LLAMA_3_8B = llama_config(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=131072,
    torch_dtype="bfloat16",
)


@pytest.fixture(scope="module")
def llama_3_8b(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("Llama-3-8B")
    (folder / "config.json").write_text(json.dumps(LLAMA_3_8B))
    return folder


def plan(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    code = main(["plan", *map(str, arguments)])
    captured = capsys.readouterr()
    assert (code, captured.err) == (0, "")
    return captured.out


def record(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> dict[str, Any]:
    return json.loads(plan(capsys, *arguments, "--json"))


def test_a_model_on_a_card_that_is_not_here(llama_3_8b: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = record(capsys, llama_3_8b, "--card", "h200", "--max-num-seqs", "256", "--lengths", "1024,8192")
    load, memory = found["load"], found["load"]["memory"]
    # 32 layers, keys and values of 8 heads of 128 numbers of 2 bytes.
    assert memory["spec"]["bytes_per_token"] == 32 * 2 * 8 * 128 * 2
    linears = 32 * 4096 * (4096 + 2 * 1024 + 4096 + 3 * 14336) + 128256 * 4096
    assert load["multiplications"] == linears
    norms = (2 * 32 + 1) * 4096
    assert load["read_bytes"] == 2 * (linears + norms)
    assert memory["weights_bytes"] == 2 * (linears + norms + 128256 * 4096) + 131072 * 128 * 4
    short, long = found["lengths"]
    assert (short["num_tokens"], short["num_blocks"], long["num_blocks"]) == (1024, 64, 512)
    assert short["concurrent"] == pytest.approx(memory["num_device_blocks"] / 64, abs=0.01)
    assert (short["running"], found["longest"]) == (256, 131072)
    # Alone: bytes over bandwidth. 256 sequences: the products take longer than reading the weights.
    bandwidth = 4.8e12 * 0.9
    assert short["tokens_per_second_alone"] == pytest.approx(
        bandwidth / (load["read_bytes"] + 1024 * memory["spec"]["bytes_per_token"]), rel=1e-9
    )
    seconds = 2 * 256 * linears / (989e12 * 0.8) + 256 * 1024 * memory["spec"]["bytes_per_token"] / bandwidth
    assert short["tokens_per_second"] == pytest.approx(256 / seconds, rel=1e-9)


def test_types_and_memory_change_the_plan(llama_3_8b: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = record(capsys, llama_3_8b, "--device-memory", "24GiB")
    wide = record(capsys, llama_3_8b, "--device-memory", "40GiB")
    half = record(capsys, llama_3_8b, "--device-memory", "24GiB", "--kv-cache-dtype", "int8")
    small = record(capsys, llama_3_8b, "--device-memory", "8GiB", "--weights-dtype", "int4")
    assert small["load"]["memory"]["weights_bytes"] < 0.5 * base["load"]["memory"]["weights_bytes"]
    assert base["card"] is None
    assert all(row["tokens_per_second"] is None for row in base["lengths"])
    difference = wide["load"]["free_bytes"] - base["load"]["free_bytes"]
    assert difference == 16 << 30
    assert wide["longest"] > half["longest"] > base["longest"]


def test_the_table_says_what_the_record_says(llama_3_8b: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = plan(capsys, llama_3_8b, "--card", "L4", "--lengths", "1024")
    found = record(capsys, llama_3_8b, "--card", "L4", "--lengths", "1024")
    assert "on L4, activations bfloat16, keys and values bfloat16" in text
    assert f"{found['load']['memory']['num_device_blocks']} blocks of 16 tokens" in text
    assert f"{found['longest']} tokens  the model's 131072 do not fit" in text
    row = next(line.split() for line in text.splitlines() if line.split()[:1] == ["1024"])
    assert row[1:3] == [f"{found['lengths'][0]['concurrent']:.1f}", str(found["lengths"][0]["running"])]


def test_windows_are_layer_groups(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {**LLAMA_3_8B, "architectures": ["MistralForCausalLM"], "sliding_window": 4096}
    (tmp_path / "config.json").write_text(json.dumps(config))
    sliding = record(capsys, tmp_path, "--card", "4090", "--lengths", "4096,65536")
    short, long = sliding["lengths"]
    # A window, a step of 2048 tokens and the cut blocks at both ends.
    assert long["num_blocks"] == (4096 + 2048 - 3) // 16 + 2
    assert short["tokens_per_second_alone"] == long["tokens_per_second_alone"]
    assert "32 layers that see 4096, in 1 layer groups" in plan(capsys, tmp_path, "--card", "4090")


def test_a_model_here_is_planned_for_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = plan(capsys, tiny_llama(tmp_path), "--device", "cpu")
    assert "on this machine's CPU, activations float32" in text


@pytest.mark.parametrize("name", ["NVIDIA H100", "a100 80gb", "GeForce RTX 4090", "rtx 6000 ada", "l40s"])
def test_cards_go_by_many_spellings(name: str) -> None:
    assert card_named(name) in CARDS


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--card", "H900"], "known are A100-40"),
        (["--device-memory", "lots"], "--device-memory 'lots'"),
        (["--device-memory", "8GiB"], "the weights take 15.02 GiB"),
        (["--card", "H100", "--lengths", "many"], "--lengths many"),
        (["--card", "H100", "--lengths", "200000"], "this model reaches 131072 tokens"),
        (["--card", "H100", "--device", "cpu"], "leave out --card"),
        (["--card", "H100", "--max-model-len", "200000"], "this model reaches 131072 tokens"),
        (["--card", "H100", "--kv-cache-memory", "900GiB"], "--kv-cache-memory 900GiB"),
        (["--card", "H100", "--dtype", "int3"], "--dtype"),
    ],
)
def test_a_mistake_is_one_line(
    llama_3_8b: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(["plan", str(llama_3_8b), *arguments])
    except SystemExit as exited:
        code = exited.code
    error = capsys.readouterr().err
    assert code == 2
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("{", "config.json"),
        ("[]", "config.json"),
        ("{}", "there is no config.json"),
        (json.dumps({**LLAMA_3_8B, "hidden_size": "wide"}), "hidden_size is 'wide'"),
        (json.dumps({**LLAMA_3_8B, "hidden_size": None}), "hidden_size is missing"),
    ],
)
def test_a_config_that_says_too_little(
    tmp_path: Path, config: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(config)
    assert main(["plan", str(tmp_path), "--card", "H100"]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
