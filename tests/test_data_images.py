"""Decoding and cropping of one image."""

import io

import numpy as np
import pytest
from PIL import Image
from test_data_collection import stream_of
from test_data_shards import jpeg

from contrastile.data.base import Skipped
from contrastile.data.images import crop_box, decode


def test_a_bomb_is_refused_by_its_header(tmp_path):
    huge = io.BytesIO()
    Image.new("1", (10_000, 10_000)).save(huge, "PNG")
    assert len(huge.getvalue()) < 100_000
    stream = stream_of(tmp_path, [jpeg(number) for number in range(5)] + [huge.getvalue()], most_bad=1.0)
    stream.read(range(len(stream)), range(len(stream)), None)
    assert set(stream.skipped) <= {"picture over 64 megapixels"}
    assert decodes(huge.getvalue()) == "picture over 64 megapixels"


def test_formats_that_may_call_programs_are_refused():
    postscript = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n%%EOF\n"
    assert decodes(postscript) == "broken picture"


@pytest.mark.parametrize(("mode", "value"), [("I", 70_000), ("I", -5), ("F", 1e6), ("F", -0.5)])
def test_a_picture_of_one_value_beyond_the_usual_ranges_is_black(mode, value):
    plain = io.BytesIO()
    Image.new(mode, (8, 8), value).save(plain, "TIFF")
    assert not decode(plain.getvalue(), (1, 8, 8)).any()


def decodes(content):
    try:
        decode(content, (1, 8, 8))
    except Skipped as reason:
        return str(reason)
    return None


def test_boxes_have_the_paper_s_areas_and_ratios():
    boxes = [crop_box(0, place, 400, 300) for place in range(2000)]
    wide = np.array([right - left for left, _, right, _ in boxes])
    high = np.array([bottom - top for _, top, _, bottom in boxes])
    shares, ratios = wide * high / (400 * 300), wide / high
    assert all(left >= 0 and top >= 0 and right <= 400 and bottom <= 300 for left, top, right, bottom in boxes)
    assert 0.078 < shares.min() < 0.1
    assert 0.9 < shares.max() <= 1.0
    assert 0.74 < ratios.min() < 0.77
    assert 1.30 < ratios.max() < 1.35
    # uniform areas, but for the largest, which seldom fit
    assert 0.4 < shares.mean() < 0.54


def test_a_box_depends_on_seed_and_place_alone():
    assert crop_box(3, 5, 99, 77) == crop_box(3, 5, 99, 77)
    assert crop_box(3, 5, 99, 77) != crop_box(3, 6, 99, 77)
    assert crop_box(3, 5, 99, 77) != crop_box(4, 5, 99, 77)


def test_a_picture_too_long_for_any_box_gives_its_middle():
    left, top, right, bottom = crop_box(0, 0, 1000, 10)
    assert (top, bottom) == (0, 10)
    assert right - left == 13
    assert left == (1000 - 13) // 2


def test_the_part_within_the_box_is_decoded(tmp_path):
    left = Image.new("RGB", (400, 200), "black")
    left.paste("white", (0, 0, 200, 200))
    file = io.BytesIO()
    left.save(file, "JPEG", quality=95)

    def part(*box):
        return decode(file.getvalue(), (3, 16, 16), lambda width, height: box)

    assert part(0, 0, 150, 150).min() > 240
    assert part(250, 0, 400, 150).max() < 15
    half = part(100, 0, 300, 200)
    assert half[:, :, :7].min() > 230
    assert half[:, :, 9:].max() < 25


@pytest.mark.parametrize(("mode", "channels"), [("RGB", 3), ("L", 1), ("RGB", 1), ("L", 3)])
def test_the_part_is_resampled_as_pillow_does(mode, channels):
    picture = Image.effect_noise((300, 200), 60).resize((90, 70)).resize((300, 200)).convert(mode)
    file = io.BytesIO()
    picture.save(file, "PNG")
    found = decode(file.getvalue(), (channels, 33, 33), lambda width, height: (31, 17, 251, 190))
    plain = picture.convert("L" if channels == 1 else "RGB")
    wanted = plain.crop((31, 17, 251, 190)).resize((33, 33), Image.Resampling.BICUBIC)
    differences = found.astype(int) - np.asarray(wanted).reshape(33, 33, channels).transpose(2, 0, 1)
    assert np.abs(differences).max() <= 1


def test_a_turned_picture_is_cut_upright():
    """Orientation 6: the top of the scene is the left edge of the file."""
    scene = Image.new("L", (64, 32), 0)
    scene.paste(255, (0, 0, 32, 32))
    exif = scene.getexif()
    exif[0x0112] = 6
    file = io.BytesIO()
    scene.save(file, "PNG", exif=exif)
    upright = decode(file.getvalue(), (1, 16, 16), lambda width, height: (16, 0, 48, 32))[0]
    assert upright[:7].min() > 240
    assert upright[9:].max() < 15
