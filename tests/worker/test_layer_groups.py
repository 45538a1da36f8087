from __future__ import annotations

import pytest

from pagedserve.worker.layer_groups import layer_groups, layer_places

GEMMA3_270M = [None if i % 6 == 5 else 512 for i in range(18)]
GEMMA3_1B = [None if i % 6 == 5 else 512 for i in range(26)]
GEMMA2_2B = [None if i % 2 else 4096 for i in range(26)]


@pytest.mark.parametrize(
    ("windows", "sizes"),
    [
        ([None] * 4, {None: [4]}),
        ([7] * 4, {7: [4]}),
        (GEMMA3_270M, {None: [3], 512: [3] * 5}),
        (GEMMA3_1B, {None: [4], 512: [4, 4, 4, 4, 3, 3]}),
        (GEMMA2_2B, {None: [13], 4096: [13]}),
        ([9, 9, 9, 9, None, None, None, None, None], {None: [5], 9: [4]}),
    ],
    ids=["all", "one window", "gemma3 270m", "gemma3 1b", "gemma2 2b", "nearly half"],
)
def test_layers_of_one_window_form_groups_of_about_equal_size(
    windows: list[int | None], sizes: dict[int | None, list[int]]
) -> None:
    groups = layer_groups(windows, 8192)
    found: dict[int | None, list[int]] = {}
    for group in groups:
        found.setdefault(group.window, []).append(len(group.layers))
        assert all(windows[layer] == group.window for layer in group.layers)
    assert found == sizes
    assert sorted(layer for group in groups for layer in group.layers) == list(range(len(windows)))
    assert groups[0].window is None or len(set(windows)) == 1, "those that see furthest come first"


def test_a_window_that_no_sequence_outgrows_is_none() -> None:
    assert [group.window for group in layer_groups([4, None, 4], 4)] == [None]
    assert [group.window for group in layer_groups([4, None, 4], 5)] == [None, 4, 4]


def test_each_layer_has_a_place_of_its_own() -> None:
    groups = layer_groups(GEMMA3_1B, 8192)
    places = layer_places(groups)
    assert len(set(places)) == 26
    assert all(groups[group].layers[place] == layer for layer, (group, place) in enumerate(places))
    assert layer_places(layer_groups([None] * 3, 100)) == ()
