"""Hostile images take at most 100 MB beside their own bytes; pixels of 16 and 32 bits keep their range."""

import io

import hostile_images
import numpy as np
import pytest
from hostile import sampled
from hostile_images import ATTACKS, QUICK
from PIL import Image
from refusals import refusal

from contrastile.data.images import decode, squared

# beside the bytes of the file, which its reader holds once more
LIMIT, COPIES = 100 << 20, 2


@pytest.mark.parametrize("name", sampled(ATTACKS, QUICK))
def test_an_image_takes_little_memory_and_is_read_or_skipped_with_a_reason(attacked, tmp_path, name):
    make, reason = ATTACKS[name]
    path = tmp_path / "image"
    path.write_bytes(make())
    for cut in (False, True):
        outcome = attacked.run(hostile_images.decoded, path, cut)
        assert (outcome.error, outcome.value) == ("", reason)
        assert outcome.memory <= LIMIT + COPIES * path.stat().st_size


def decoded(values, kind="TIFF", shape=(1, 8, 8)):
    """The first pixel of each column."""
    file = io.BytesIO()
    Image.fromarray(np.repeat(values[None], len(values), 0)).save(file, kind)
    return decode(file.getvalue(), (shape[0], len(values), len(values)))[0, 0].tolist()


@pytest.mark.parametrize(
    ("values", "grey"),
    [
        (np.array([0, 127, 255], np.int32), [0, 127, 255]),
        (np.array([0, 32_768, 65_535], np.int32), [0, 127, 255]),
        (np.array([0, 1 << 30, (1 << 31) - 1], np.int32), [0, 127, 255]),
        (np.array([-100, 0, 100], np.int32), [0, 127, 255]),
        (np.array([0, 0.5, 1], np.float32), [0, 127, 255]),
        (np.array([0, 0.1, 0.2], np.float32), [0, 25, 51]),
        (np.array([0, 51.0, 255.0], np.float32), [0, 51, 255]),
        (np.array([-3, 0, 3], np.float32), [0, 127, 255]),
        (np.array([0, 32_768, 65_535], np.uint16), [0, 128, 255]),
    ],
)
@pytest.mark.parametrize("channels", [1, 3])
def test_pixels_of_32_bits_are_read_by_their_range(values, grey, channels):
    assert decoded(values, shape=(channels, 3, 3)) == grey


def test_a_dark_image_of_16_bits_stays_dark():
    dark = b"P5\n3 3\n65535\n" + np.full(9, 200, ">u2").tobytes()
    assert not decode(dark, (1, 3, 3)).any()


def test_an_image_that_is_not_finite_is_refused():
    picture = Image.fromarray(np.array([[np.inf, 0]], np.float32))
    assert refusal(squared, picture, (1, 8, 8)) == (
        "`picture` must have finite pixels; got 0.0 to inf. Replace what is not a number."
    )


def test_a_large_image_is_converted_in_bands_as_at_once(monkeypatch):
    noise = np.random.default_rng(0).integers(0, 256, (60, 50, 4), dtype=np.uint8)
    picture = Image.fromarray(noise)
    file = io.BytesIO()
    picture.save(file, "PNG")
    results = []
    for band in (1 << 20, 170):
        monkeypatch.setattr("contrastile.data.images.BAND", band)
        boxes = (None, lambda width, height: (3, 5, 41, 58))
        cut = [decode(file.getvalue(), (3, 20, 20), box) for box in boxes]
        results.append([*cut, squared(picture, (3, 20, 20))])
    assert all(map(np.array_equal, *results))
