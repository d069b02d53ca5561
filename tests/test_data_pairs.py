"""Common ground of all sources: ids, splits by hash, and the refusal of settings that make no sense."""

import numpy as np
import pytest
from refusals import refusal

from contrastile.data.base import groups_by_id, hash_fraction, joined_ids, sorted_by_hash
from contrastile.data.registry import open_pairs


@pytest.mark.parametrize(
    ("first", "second", "ids"),
    [
        (["a", "b", "c"], [1, 2, 3], [0, 1, 2]),
        # through other rows
        (["A", "B", "B", "C", "D"], ["1", "1", "2", "2", "3"], [0, 0, 0, 0, 1]),
        # equal values in different columns do not join
        (["x", "y"], ["y", "z"], [0, 1]),
    ],
)
def test_rows_that_agree_in_a_column_share_an_id(first, second, ids):
    assert joined_ids(first, second).tolist() == ids


def test_ids_are_the_connected_components():
    generator = np.random.default_rng(0)
    rows = generator.integers(0, 60, size=(50, 2)).tolist()
    ids = joined_ids([row[0] for row in rows], [row[1] for row in rows])
    linked = np.array([[a[0] == b[0] or a[1] == b[1] for b in rows] for a in rows])
    reached = np.linalg.matrix_power(linked.astype(float), 50) > 0
    assert np.array_equal(ids[:, None] == ids[None, :], reached)


def test_a_hash_fraction_never_changes():
    assert hash_fraction("LATIN SMALL LETTER A") == pytest.approx(0.72584, abs=1e-5)


def test_groups_come_in_the_order_of_their_hash():
    groups = sorted_by_hash(groups_by_id(["b", "a", "c", "a"], np.array([0, 1, 2, 1])))
    assert sorted(groups) == groups
    assert sorted(members for _, members in groups) == [[0], [1, 3], [2]]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"image_size": 7}, "`image_size` must be at least 8 pixels; got 7. Glyphs are legible from 32 on."),
        ({"channels": 2}, "`channels` must be 1 (grey) or 3 (colour); got 2. Images are converted to either."),
        *(
            (
                {"held_out": share},
                f"`held_out` must be a share between 0 and 1; got {share}. 0.05 keeps a twentieth for evaluation.",
            )
            for share in (0.0, 1.0)
        ),
    ],
)
def test_settings_that_make_no_sense_are_refused(tmp_path, settings, sentence):
    assert refusal(open_pairs, "glyphs", cache=tmp_path, **{"image_size": 32, **settings}) == sentence
