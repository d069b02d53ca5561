"""The handwritten digits look like the glyphs."""

import numpy as np

from contrastile.data.glyphs import DIGIT_NAMES, Pen, font_files, handwritten_digits


def test_all_scans_with_their_digits():
    pictures, digits = handwritten_digits(image_size=32)
    assert pictures.shape == (1797, 1, 32, 32)
    assert pictures.dtype == np.uint8
    assert np.bincount(digits).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


def test_names_are_those_of_the_glyphs_and_ink_is_bright_on_dark():
    assert (DIGIT_NAMES[0], DIGIT_NAMES[9], len(DIGIT_NAMES)) == ("DIGIT ZERO", "DIGIT NINE", 10)
    pictures, _ = handwritten_digits(image_size=32)
    assert (pictures.max(axis=(1, 2, 3)) > 150).all()
    assert pictures[:, 0, 0].max() == 0


def test_digits_stand_where_printed_digits_stand():
    pictures, _ = handwritten_digits(image_size=32)
    pen = Pen(next(path for path in font_files() if path.name == "DejaVuSans.ttf"), 32)
    printed = np.mean([pen.draw(digit) for digit in "0123456789"], axis=0)
    written = pictures.mean(axis=(0, 1))
    for axis in (0, 1):
        weights = [picture.sum(axis=axis) for picture in (printed, written)]
        centres = [np.average(np.arange(32), weights=weight) for weight in weights]
        spreads = [
            np.average((np.arange(32) - c) ** 2, weights=w) ** 0.5 for c, w in zip(centres, weights, strict=True)
        ]
        assert abs(centres[0] - centres[1]) < 1.5
        assert abs(spreads[0] - spreads[1]) < 1.5


def test_channels_are_repeated():
    pictures, _ = handwritten_digits(image_size=24, channels=3)
    assert pictures.shape[1:] == (3, 24, 24)
    assert (pictures == pictures[:, :1]).all()
