# SPDX-License-Identifier: Apache-2.0
"""Which values of an observation are images, and which are not."""

import base64
import struct
import zlib
from typing import Any

import pytest

from openenvd.rollouts.images import image_of, image_of_file, image_of_numbers, take_images

# Headers are all that is looked at: what is behind them is the browser's business.
PNG = (
    b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sII", 13, b"IHDR", 3, 2) + b"\x08\x02\0\0\0" + b"\0" * 40
)
GIF = b"GIF89a" + struct.pack("<HH", 3, 2) + b"\0" * 40
JPEG = (
    b"\xff\xd8\xff\xe0"
    + struct.pack(">H", 16)
    + b"JFIF\0" + b"\0" * 9
    + b"\xff\xc0" + struct.pack(">HBHH", 17, 8, 2, 3) + b"\0" * 40
)  # fmt: skip
VP8 = b"RIFF\0\0\0\0WEBPVP8 " + b"\0" * 10 + struct.pack("<HH", 3, 2) + b"\0" * 9
VP8L = b"RIFF\0\0\0\0WEBPVP8L" + b"\0" * 5 + struct.pack("<I", 2 | 1 << 14) + b"\0" * 9
VP8X = b"RIFF\0\0\0\0WEBPVP8X" + b"\0" * 8 + b"\x02\0\0\x01\0\0" + b"\0" * 9
FILES = {"png": PNG, "gif": GIF, "jpeg": JPEG, "webp": VP8, "webp-lossless": VP8L, "webp-x": VP8X}


def text_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def unpacked(png: bytes) -> tuple[int, int, int, bytes]:
    """Width, height, color type and the pixels of a PNG of ours, its checksums compared."""
    chunks, at = {}, 8
    while at < len(png):
        (size,) = struct.unpack_from(">I", png, at)
        kind, content = png[at + 4 : at + 8], png[at + 8 : at + 8 + size]
        assert struct.unpack_from(">I", png, at + 8 + size) == (zlib.crc32(kind + content),)
        chunks[kind], at = content, at + 12 + size
    width, height, _, color, *_ = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
    rows = zlib.decompress(chunks[b"IDAT"])
    stride = len(rows) // height
    return (
        width,
        height,
        color,
        b"".join(rows[y * stride + 1 : (y + 1) * stride] for y in range(height)),
    )


@pytest.mark.parametrize("form", FILES)
def test_a_file_is_told_by_its_first_bytes_wherever_it_ends(form: str) -> None:
    found = image_of(text_of(FILES[form]))
    assert found is not None
    assert (found.media_type, found.width, found.height) == (f"image/{form.split('-')[0]}", 3, 2)
    assert found.data == FILES[form]
    cut = [image_of_file(FILES[form][:size]) for size in range(len(FILES[form]))]
    assert cut[:10] == [None] * 10
    assert {image.width for image in cut if image is not None} == {3}


def test_images_are_found_however_deep_and_their_data_url_is_not_believed() -> None:
    found = image_of("data:image/svg+xml;base64," + text_of(PNG))
    assert found is not None
    assert found.media_type == "image/png"
    content = [{"type": "text", "text": "hi"}, {"type": "image", "data": text_of(PNG)}]
    seen = {"result": {"content": content}, "done": False, "views": [text_of(GIF)]}
    rest, taken = take_images(seen)
    places = [place for place, _ in taken]
    assert places == [("result", "content", 1, "data"), ("views", 0)]
    assert rest["result"]["content"][0] == content[0]
    assert rest["views"] == ["image/gif, 3 x 2, 50 bytes"]
    assert seen["views"] == [text_of(GIF)]


@pytest.mark.parametrize(
    "text",
    [
        "a plain text",
        "data:image/svg+xml;base64," + text_of(b"<svg xmlns='http://www.w3.org/2000/svg'/>"),
        "data:image/png;base64," + text_of(b"<script>alert(1)</script>"),
        "data:text/html;base64," + text_of(PNG),
        "iVBORw0KGgo is how a PNG begins",
        text_of(PNG[:20]),
        text_of(b"RIFF\0\0\0\0WAVEfmt " + b"\0" * 40),
        text_of(PNG[:16] + struct.pack(">II", 100_000, 100_000) + PNG[24:]),
        text_of(PNG[:16] + struct.pack(">II", 0, 2) + PNG[24:]),
        "http://example.org/an.png",
    ],
)
def test_nothing_else_is_an_image(text: str) -> None:
    assert image_of(text) is None


@pytest.mark.parametrize(("channels", "color"), [(3, 2), (4, 6)])
def test_rows_of_pixels_become_a_png_of_the_same_pixels(channels: int, color: int) -> None:
    rows = [[[x, y, 200, 255][:channels] for x in range(9)] for y in range(8)]
    found = image_of(rows)
    assert found is not None
    pixels = bytes(value for row in rows for pixel in row for value in pixel)
    assert unpacked(found.data) == (9, 8, color, pixels)


@pytest.mark.parametrize(
    "rows",
    [
        [[0, 1, 2]] * 64,  # a matrix
        [[[0, 1, 2]] * 4] * 4,  # a board
        [[[0, 1]] * 9] * 9,
        [[[0, 1, 256]] * 9] * 9,
        [[[0, 1, 0.5]] * 9] * 9,
        [[[0, 1, 2]] * 9] * 8 + [[[0, 1, 2]] * 8],
        [[[0, 1, 2]] * 9] * 8 + ["text"],
        [[[0, 1, 2]] * 9] * 8 + [[7] * 9],
        [],
        [[]],
    ],
)
def test_other_numbers_are_no_image(rows: list[Any]) -> None:
    assert image_of(rows) is None


def test_numbers_have_the_shape_beside_them_or_are_no_image() -> None:
    """As in Atari's observations: `screen` and `screen_shape`."""
    seen = {"screen": [7] * 32 * 40, "screen_shape": [32, 40], "ram": [1] * 128, "ram_shape": [128]}
    rest, [(place, image)] = take_images(seen)
    assert place == ("screen",)
    assert unpacked(image.data) == (40, 32, 0, bytes([7]) * 32 * 40)
    assert rest == {**seen, "screen": str(image)}
    for shape in ([32, 41], [32, 40, 3], ["32", 40], [-32, -40], [1 << 40, 1]):
        assert image_of_numbers([7] * 32 * 40, shape) is None
