"""What all sources share: ids, lots, and the sentences for settings that make no sense."""

import numpy as np
import pytest

from contrastile.data.pairs import groups_by_lot, joined_ids, lot, open_pairs


def test_rows_that_agree_in_nothing_have_ids_of_their_own():
    assert joined_ids(["a", "b", "c"], [1, 2, 3]).tolist() == [0, 1, 2]


def test_ids_join_through_other_rows():
    names = ["A", "B", "B", "C", "D"]
    pictures = ["1", "1", "2", "2", "3"]
    assert joined_ids(names, pictures).tolist() == [0, 0, 0, 0, 1]


def test_equal_values_in_different_columns_do_not_join():
    assert joined_ids(["x", "y"], ["y", "z"]).tolist() == [0, 1]


def test_ids_are_the_connected_components():
    generator = np.random.default_rng(0)
    rows = generator.integers(0, 60, size=(50, 2)).tolist()
    ids = joined_ids([row[0] for row in rows], [row[1] for row in rows])
    linked = np.array([[a[0] == b[0] or a[1] == b[1] for b in rows] for a in rows])
    reached = np.linalg.matrix_power(linked.astype(float), 50) > 0
    assert np.array_equal(ids[:, None] == ids[None, :], reached)


def test_a_lot_never_changes():
    assert lot("LATIN SMALL LETTER A") == pytest.approx(0.72584, abs=1e-5)


def test_groups_come_in_the_order_of_their_lots():
    groups = groups_by_lot(["b", "a", "c", "a"], np.array([0, 1, 2, 1]))
    assert sorted(groups) == groups
    assert sorted(members for _, members in groups) == [[0], [1, 3], [2]]


def refusal(tmp_path, **settings):
    with pytest.raises(ValueError) as caught:
        open_pairs("glyphs", cache=tmp_path, **{"image_size": 32, **settings})
    return str(caught.value)


def test_pictures_of_a_few_pixels_are_refused(tmp_path):
    assert refusal(tmp_path, image_size=7) == (
        "`image_size` must be at least 8 pixels; got 7. Glyphs are legible from 32 on."
    )


def test_two_channels_are_refused(tmp_path):
    assert refusal(tmp_path, channels=2) == (
        "`channels` must be 1 (grey) or 3 (colour); got 2. Pictures are converted to either."
    )


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_holding_out_nothing_or_all_is_refused(tmp_path, share):
    assert refusal(tmp_path, held_out=share) == (
        f"`held_out` must be a share between 0 and 1; got {share}. 0.05 keeps a twentieth for evaluation."
    )
