"""What the files of sentence-transformers say of pooling."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pagedserve.engine.pooling_defaults import default_pooling
from pagedserve.errors import ModelLoadError
from pagedserve.model_files import resolve
from pagedserve.pooling_params import PoolingParams
from tests.helpers.checkpoints import tiny_llama

TRANSFORMER = {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}
POOLING = {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
NORMALIZE = {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}
MEAN = {"word_embedding_dimension": 64, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
LAST = {"word_embedding_dimension": 64, "pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model"))


def defaults(folder: Path, modules: Any, pooling: Any = None, asked: str = "auto") -> PoolingParams:
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling or {}))
    return default_pooling(resolve(str(folder)), asked)


def test_without_such_files_it_is_the_last_token(folder: Path) -> None:
    (folder / "modules.json").unlink(missing_ok=True)
    assert default_pooling(resolve(str(folder))) == PoolingParams(pooling_type="last", normalize=True)
    assert default_pooling(resolve(str(folder)), "mean") == PoolingParams(pooling_type="mean", normalize=True)


def test_mode_and_normalisation_are_taken_from_them(folder: Path) -> None:
    found = defaults(folder, [TRANSFORMER, POOLING, NORMALIZE], LAST)
    assert found == PoolingParams(pooling_type="last", normalize=True)
    assert defaults(folder, [TRANSFORMER, POOLING], MEAN) == PoolingParams(pooling_type="mean", normalize=False)
    found = defaults(folder, [TRANSFORMER, POOLING], {"pooling_mode": "lasttoken"})
    assert found == PoolingParams(pooling_type="last", normalize=False)


@pytest.mark.parametrize(
    ("modules", "pooling", "message"),
    [
        (
            [TRANSFORMER, POOLING],
            {"pooling_mode_cls_token": True},
            "asks for pooling_mode_cls_token; last-token and mean",
        ),
        ([TRANSFORMER, POOLING], {**MEAN, "pooling_mode_max_tokens": True}, "pooling_mode_mean_tokens and"),
        ([TRANSFORMER, POOLING], {"pooling_mode": "weightedmean"}, "asks for weightedmean"),
        ([TRANSFORMER, POOLING], {}, "asks for no pooling"),
        ([TRANSFORMER, {**POOLING, "type": "sentence_transformers.models.Dense"}], {}, "a module of type 'Dense'"),
        ({}, {}, "modules.json does not hold a list"),
    ],
)
def test_what_is_not_supported_is_named_and_can_be_overridden(
    folder: Path, modules: Any, pooling: Any, message: str
) -> None:
    with pytest.raises(ModelLoadError, match=message):
        defaults(folder, modules, pooling)
    if modules == [TRANSFORMER, POOLING]:
        assert defaults(folder, modules, pooling, "mean").pooling_type == "mean"
