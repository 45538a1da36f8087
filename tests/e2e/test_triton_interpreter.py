"""The engine on Triton kernels, run by their interpreter: greedy tokens of each kind of model are those of the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pagedserve import LLM, SamplingParams
from tests.helpers import cuda_emulation
from tests.helpers.hf_checkpoints import write_random
from tests.models.test_architectures import CASES

ROOT = Path(__file__).parents[2]
# Rotary with GQA; biases; gates of GELU, soft caps and windows; LayerNorm with learned positions, before and after; a
# rotary part of a head; normalised heads.
USUAL = ("llama", "gemma2", "opt")
PROMPTS = [[5, 9, 40, 7, 300, 12, 12, 80, 33], [17]]
SETTINGS = {
    "kv_cache_dtype": "float32",
    "num_device_blocks": 16,
    "num_threads": 1,
    "max_model_len": 64,
    "max_num_seqs": 2,
}


def generate(folder: Path, num_tokens: int) -> list[list[int]]:
    """The tokens of each prompt, and those that were likely beside each of them."""
    plain = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    # One of the two asks for all that is done to logits and told of them.
    wishes = replace(plain, logprobs=3, repetition_penalty=1.2, frequency_penalty=0.5, logit_bias={11: 3.0})
    backend = "cuda" if "PAGEDSERVE_CUDA_LIBRARY" in os.environ else None
    with LLM(str(folder), dtype="float32", attention_backend=backend, **SETTINGS) as llm:
        outputs = llm.generate(PROMPTS, [wishes, plain], use_tqdm=False)
    likely = [[entry.token_ids for entry in output.outputs[0].logprobs or ()] for output in outputs]
    return [output.outputs[0].token_ids for output in outputs] + likely


def interpreted(folders: list[Path], num_tokens: int, **environment: str) -> dict[str, list[list[int]]]:
    """The same by Triton's interpreter, which has to be chosen before a process starts. Keys: names of the folders."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.e2e.test_triton_interpreter", str(num_tokens), *map(str, folders)],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def write(folder: Path, name: str) -> Path:
    case = CASES[name]
    write_random(folder / name, case.model_type, tokenizer=True, **{**case.sizes, **case.changes})
    return folder / name


def check(folder: Path, names: list[str], num_tokens: int) -> None:
    folders = [write(folder, name) for name in names]
    found = interpreted(folders, num_tokens)
    assert found == {path.name: generate(path, num_tokens) for path in folders}


def test_tokens_are_those_of_the_cpu(tmp_path: Path) -> None:
    check(tmp_path, list(USUAL), num_tokens=3)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_tokens_of_emulated_cuda_kernels_are(tmp_path: Path) -> None:
    """Decode by csrc/cuda on the CPU, all else by Triton's interpreter: a batch, from prompts to the last token."""
    case = CASES["llama"]
    folder = tmp_path / "wide"
    write_random(folder, case.model_type, tokenizer=True, **{**case.sizes, **case.changes, "head_dim": 64})
    wanted = generate(folder, 4)
    library = str(cuda_emulation.build())
    assert interpreted([folder], 4, PAGEDSERVE_CUDA_LIBRARY=library) == {folder.name: wanted}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_tokens_of_every_architecture_are(tmp_path: Path) -> None:
    check(tmp_path, [name for name in CASES if name not in USUAL], num_tokens=4)


if __name__ == "__main__":
    print(json.dumps({Path(folder).name: generate(Path(folder), int(sys.argv[1])) for folder in sys.argv[2:]}))
