"""The example of an architecture outside the package, found by the entry point that its pyproject.toml declares."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest
import torch

from pagedserve import LLM, SamplingParams
from pagedserve.errors import ModelLoadError
from pagedserve.models import FALLBACK, model_class
from pagedserve.registry import load
from tests.helpers.hf_checkpoints import SIZES, write_random
from tests.helpers.paged_model import PagedModel

EXAMPLE = Path(__file__).parents[2] / "examples" / "add_an_architecture"
STABLELM = {"architectures": ["StableLmForCausalLM"], "model_type": "stablelm"}
PROMPT = [(37 * i * i + 11 * i + 5) % 320 for i in range(45)]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `pip install` of the example leaves: its module on the path, and what it declares beside it."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    info = tmp_path / "site" / f"pagedserve_stablelm-{project['version']}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(EXAMPLE), str(info.parent)])


@torch.inference_mode()
@pytest.mark.parametrize("bias", [False, True])
def test_it_computes_what_transformers_does(installed: None, tmp_path: Path, bias: bool) -> None:
    model = write_random(tmp_path / "model", "stablelm", tokenizer=True, **SIZES, use_qkv_bias=bias)
    expected = model(torch.tensor([PROMPT]), use_cache=False).logits[0]
    for chunk in (1, 7, 64):
        found = PagedModel(tmp_path / "model", impl="native").logits(PROMPT, chunk=chunk)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    with LLM(str(tmp_path / "model"), num_device_blocks=32, model_impl="native", kv_cache_dtype="float32") as llm:
        (output,) = llm.generate([PROMPT], SamplingParams(temperature=0.0, max_tokens=1), use_tqdm=False)
    assert output.outputs[0].token_ids == [int(expected[-1].argmax())]


def test_what_it_does_not_compute_goes_to_the_fallback(installed: None) -> None:
    config = {**STABLELM, "use_parallel_residual": True}
    assert model_class(STABLELM).__name__ == "StableLmForCausalLM"
    assert model_class(config) is load(FALLBACK)
    with pytest.raises(ModelLoadError, match="StableLM with use_parallel_residual is not native"):
        model_class(config, "native")


def test_without_it_nothing_is_known() -> None:
    assert model_class(STABLELM) is load(FALLBACK)


def test_the_guide_names_what_there_is() -> None:
    from pagedserve.models import blocks

    guide = (EXAMPLE / "README.md").read_text()
    for name in ("PreNormLayer", "SandwichNormLayer", "ParallelLayer", "NormedAttention", "UnrotatedAttention"):
        assert name in guide and hasattr(blocks, name)
