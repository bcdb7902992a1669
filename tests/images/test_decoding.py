"""Files of all formats become the pixels that transformers computes; damaged, huge and lying files are refused."""

from __future__ import annotations

import io
import struct
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps

from pagewick.errors import InvalidRequestError, UnsupportedError
from pagewick.images import headers
from pagewick.images.decoding import pictures_of
from pagewick.images.headers import MAX_FILE_PIXELS, MAX_JPEG_SCANS, Format, measured
from pagewick.images.qwen_settings import QwenSettings
from pagewick.images.settings import ImageSettings
from pagewick.images.sources import load
from tests.images.pictures import file_of, noise, prepare

QWEN_2 = QwenSettings(14, 2, 2, 3136, 12845056, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5), 1 / 255)
SMALL = QwenSettings(3, 2, 2, 100, 3000, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5), 1 / 255)


def reference(image: Image.Image, settings: ImageSettings) -> Any:
    """Return the pixels before rescaling and patches, as transformers' processor with Pillow computes them."""
    pil = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl", reason="the reference")
    size = {"shortest_edge": settings.min_pixels, "longest_edge": settings.max_pixels}
    processor = pil.Qwen2VLImageProcessorPil(
        size=size, patch_size=settings.patch_size, merge_size=settings.merge_size, temporal_patch_size=1
    )
    result = processor(images=[image], do_rescale=False, do_normalize=False, return_tensors="np")
    (_, rows, columns), merge, patch = result["image_grid_thw"][0], settings.merge_size, settings.patch_size
    # Back from patches, which are in the order (row, column of a token, row, column in it), each [channel, y, x].
    patches = result["pixel_values"].reshape(rows // merge, columns // merge, merge, merge, 3, patch, patch)
    pixels = patches.transpose(0, 2, 5, 1, 3, 6, 4).reshape(rows * patch, columns * patch, 3)
    assert (pixels == pixels.round()).all()
    return pixels.astype(np.uint8)


def check(data: bytes, settings: ImageSettings = QWEN_2) -> None:
    found, tokens, *_ = prepare(data, settings)
    with Image.open(io.BytesIO(data)) as image:
        expected = reference(ImageOps.exif_transpose(image), settings)
    assert found.dtype == np.uint8 and found.shape == expected.shape
    assert (found == expected).all()
    height, width, _ = found.shape
    assert tokens == height * width // settings.token_side**2
    header = measured(data)
    assert settings.num_tokens(header.height, header.width) == tokens


@pytest.mark.parametrize(
    "size", [(1, 1), (2, 3), (28, 28), (56, 84), (63, 101), (1, 200), (200, 1), (997, 131), (14, 2000), (300, 777)]
)
@pytest.mark.parametrize("settings", [QWEN_2, SMALL, QWEN_2.limited(9000)])
def test_pixels_are_those_of_transformers(size: tuple[int, int], settings: ImageSettings) -> None:
    check(file_of(noise(*size)), settings)


@given(st.integers(1, 90), st.integers(1, 90))
def test_pixels_of_small_images(height: int, width: int) -> None:
    check(file_of(noise(height, width, seed=height)), SMALL)


def with_alpha(mode: str) -> Image.Image:
    image = noise(37, 61).convert(mode)
    image.putalpha(noise(37, 61, seed=2).convert("L"))
    return image


def with_transparent_colour(mode: str) -> bytes:
    image = noise(31, 43).quantize(16) if mode == "P" else noise(31, 43).convert(mode)
    if mode == "RGB":
        image.paste((1, 2, 3), (0, 0, 9, 9))
    return file_of(image, transparency=(1, 2, 3) if mode == "RGB" else 7)


def in_16_bits() -> bytes:
    values = np.random.default_rng(3).integers(0, 600, (33, 47), dtype=np.uint16)
    return file_of(Image.fromarray(values))


def in_16_bits_of_colour() -> bytes:
    values = np.random.default_rng(3).integers(0, 65536, (9, 11, 3), dtype=np.uint16).astype(">u2")
    rows = b"".join(b"\0" + row.tobytes() for row in values)
    return png(11, 9, 16, 2, zlib.compress(rows))


def png(width: int, height: int, depth: int, colour: int, compressed: bytes, more: bytes = b"") -> bytes:
    head = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + more + chunk(b"IDAT", compressed) + chunk(b"IEND", b"")


def chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


FILES = {
    "PNG": file_of(noise(37, 61)),
    "PNG with alpha": file_of(with_alpha("RGB")),
    "PNG, grey with alpha": file_of(with_alpha("L")),
    "PNG, grey": file_of(noise(37, 61).convert("L")),
    "PNG, black and white": file_of(noise(37, 61).convert("1")),
    "PNG with a palette": file_of(noise(37, 61).quantize(16)),
    "PNG with a transparent entry of the palette": with_transparent_colour("P"),
    "PNG with a transparent grey": with_transparent_colour("L"),
    "PNG with a transparent colour": with_transparent_colour("RGB"),
    "PNG, grey in 16 bits": in_16_bits(),
    "PNG in 16 bits": in_16_bits_of_colour(),
    "JPEG": file_of(noise(37, 61), "JPEG"),
    "JPEG, progressive": file_of(noise(37, 61), "JPEG", progressive=True),
    "JPEG, grey": file_of(noise(37, 61).convert("L"), "JPEG"),
    "JPEG in CMYK": file_of(noise(37, 61).convert("CMYK"), "JPEG"),
    "WebP": file_of(noise(37, 61), "WEBP"),
    "WebP without loss": file_of(noise(37, 61), "WEBP", lossless=True),
    "WebP with alpha": file_of(with_alpha("RGB"), "WEBP"),
    "WebP with EXIF": file_of(noise(37, 61), "WEBP", exif=Image.Exif()),
    "GIF": file_of(noise(37, 61).quantize(16), "GIF"),
    "GIF with a transparent entry": file_of(noise(37, 61).quantize(16), "GIF", transparency=3),
    "BMP": file_of(noise(37, 61), "BMP"),
    "BMP with a palette": file_of(noise(37, 61).quantize(16), "BMP"),
}


@pytest.mark.parametrize("name", FILES)
def test_every_kind_of_file(name: str) -> None:
    check(FILES[name])


def test_transparency_in_a_tall_image() -> None:
    image = noise(601, 13)
    image.putalpha(noise(601, 13, seed=2).convert("L"))
    check(file_of(image))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_images_are_turned_upright(orientation: int, kind: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = file_of(noise(40, 90), kind, exif=exif)
    check(data)
    found = prepare(data, QWEN_2).pixels.shape
    plain = prepare(file_of(noise(40, 90), kind), QWEN_2).pixels.shape
    assert found == (plain if orientation < 5 else (plain[1], plain[0], 3))


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_a_wrong_orientation_is_ignored() -> None:
    exif = Image.Exif()
    exif[0x0112] = 77
    data = file_of(noise(40, 90), "JPEG")
    damaged = data[:2] + b"\xff\xe1" + struct.pack(">H", 16) + b"Exif\0\0II*\0\xff\xff\xff\xff" + data[2:]
    for one in (file_of(noise(40, 90), "JPEG", exif=exif), damaged):
        assert (prepare(one, QWEN_2).pixels == prepare(data, QWEN_2).pixels).all()


def test_photos_that_hold_a_preview_are_read() -> None:
    """Cameras write JPEG files with several pictures, of which the first is the photo."""
    data = file_of(noise(40, 90), "MPO", save_all=True, append_images=[noise(10, 10)])
    assert Image.open(io.BytesIO(data)).format == "MPO"
    assert prepare(data, QWEN_2).pixels.shape == prepare(file_of(noise(40, 90), "JPEG"), QWEN_2).pixels.shape


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP"])
def test_animations_are_refused(kind: str) -> None:
    data = file_of(noise(20, 30), kind, save_all=True, append_images=[noise(20, 30, seed=2)])
    with pytest.raises(UnsupportedError, match="is animated; send one frame"):
        prepare(data, QWEN_2)


@pytest.mark.parametrize("name", FILES)
def test_truncated_files_are_refused(name: str) -> None:
    data = FILES[name]
    for length in (0, 1, 7, 12, 25, len(data) // 3, len(data) // 2, len(data) * 9 // 10):
        with pytest.raises(InvalidRequestError):
            prepare(data[:length], QWEN_2)


@given(st.sampled_from(sorted(FILES)), st.data())
def test_damaged_files_never_raise_anything_else(name: str, data: st.DataObject) -> None:
    damaged = bytearray(FILES[name])
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, min(len(damaged) - 1, 400)))] = data.draw(st.integers(0, 255))
    try:
        pixels = prepare(bytes(damaged), SMALL).pixels
    except InvalidRequestError as error:
        assert str(error)
        return
    assert pixels.dtype == np.uint8 and pixels.ndim == 3


@given(st.binary(max_size=80), st.sampled_from([b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF89a", b"BM", b""]))
def test_noise_is_refused(noise: bytes, start: bytes) -> None:
    with pytest.raises(InvalidRequestError):
        prepare(start + noise, SMALL)


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (b"II*\0" + bytes(40), "TIFF"),
        (b"\0\0\0\x20ftypavif" + bytes(40), "AVIF"),
        (b"\0\0\0\x20ftypheic" + bytes(40), "HEIC"),
        (b"\0\0\0\x20ftypisom" + bytes(40), "MP4"),
        (b"%PDF-1.7", "PDF"),
        (b"<svg/>", "SVG"),
    ],
)
def test_other_formats_are_named(data: bytes, name: str) -> None:
    with pytest.raises(UnsupportedError, match=f"has the format {name}; send one of PNG, JPEG, WebP, GIF, BMP"):
        prepare(data, SMALL)
    with pytest.raises(UnsupportedError, match="an unknown format"):
        prepare(b"hello", SMALL)


def huge(kind: str) -> bytes:
    """Return a small file whose header names more pixels than any limit allows."""
    side = 60000
    if kind == "PNG":
        return png(side, side, 8, 2, zlib.compress(bytes(1000)))
    if kind == "GIF":
        return b"GIF89a" + struct.pack("<HH", side, side) + FILES["GIF"][10:]
    if kind == "BMP":
        return FILES["BMP"][:18] + struct.pack("<ii", side, -side) + FILES["BMP"][26:]
    if kind == "JPEG":
        frame = FILES["JPEG"].index(b"\xff\xc0")
        return FILES["JPEG"][: frame + 5] + struct.pack(">HH", side, side) + FILES["JPEG"][frame + 9 :]
    data = FILES["WebP with EXIF"]
    assert data[12:16] == b"VP8X"
    return data[:24] + (2**24 - 1).to_bytes(3, "little") * 2 + data[30:]


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "BMP", "WEBP"])
def test_huge_images_are_refused_before_anything_is_decompressed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> None:
        raise AssertionError("the file was opened")

    monkeypatch.setattr("pagewick.images.decoding._decoded", fail)
    tracemalloc.start()
    try:
        for read in (lambda: prepare(huge(kind), SMALL), lambda: load(huge(kind))):
            with pytest.raises(InvalidRequestError, match=f"the limit is {MAX_FILE_PIXELS}"):
                read()
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_a_header_that_lies_does_not_matter() -> None:
    """The size that was checked is the one that is decoded."""
    gif = FILES["GIF"]
    place = gif.index(b"\x2c\0\0\0\0") + 5
    liars = [
        gif[:place] + struct.pack("<HH", 60000, 60000) + gif[place + 4 :],  # the frame exceeds the screen
        # The second header, in front of the pixels, is the one that Pillow uses.
        png(8, 8, 8, 2, zlib.compress(bytes(200)), chunk(b"IHDR", struct.pack(">IIBBBBB", 9000, 9000, 8, 2, 0, 0, 0))),
        FILES["WebP with EXIF"][:24] + bytes([1, 0, 0, 1, 0, 0]) + FILES["WebP with EXIF"][30:],
    ]
    for data in liars:
        header = measured(data)
        assert header.height * header.width < MAX_FILE_PIXELS
        with pytest.raises(InvalidRequestError):
            prepare(data, SMALL)


def test_a_bomb_of_pixels_is_refused() -> None:
    """A black image compresses to a thousandth; one pixel row more than allowed is too many."""
    rows = MAX_FILE_PIXELS // 8192 + 1
    data = png(8192, rows, 1, 0, zlib.compress(bytes(1025 * rows)))
    assert len(data) < 20_000
    with pytest.raises(InvalidRequestError, match=f"it has 8192 x {rows} pixels"):
        prepare(data, SMALL)


def test_jpeg_files_with_very_many_scans_are_refused() -> None:
    data = FILES["JPEG, progressive"]
    scan = data[data.rindex(b"\xff\xda") : -2]
    measured(data[:-2] + scan * 50 + data[-2:])
    with pytest.raises(InvalidRequestError, match=f"more than {MAX_JPEG_SCANS} scans"):
        prepare(data[:-2] + scan * MAX_JPEG_SCANS + data[-2:], SMALL)


def test_jpeg_headers() -> None:
    data = FILES["JPEG"]
    comment = b"\xff\xfe\x00\x02"
    padded = data[:2] + b"\xff" * 9 + comment * 1000 + data[2:]
    assert measured(padded) == (Format.JPEG, 37, 61)
    for wrong in (
        data[:2] + comment * headers.MAX_JPEG_SEGMENTS + data[2:],
        data[:2] + comment + b"\0" + data[2:],
        data[:2] + data[data.index(b"\xff\xda") :],
        data[:2] + b"\xff\xd9",
    ):
        with pytest.raises(InvalidRequestError, match="JPEG file is damaged"):
            measured(wrong)


def test_too_narrow_images_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="at most 200 times"):
        prepare(file_of(noise(1, 201)), SMALL)


def test_images_of_other_libraries(tmp_path: Path) -> None:
    image = noise(40, 90)
    array = np.asarray(image)
    path = tmp_path / "image.png"
    path.write_bytes(file_of(image))
    expected = prepare(path.read_bytes(), QWEN_2)
    for source in (image, array, path, path.read_bytes()):
        loaded = load(source)
        assert (loaded.height, loaded.width) == (40, 90)
        assert (loaded.pictures(QWEN_2)[0].pixels == expected.pixels).all()
    assert (load(with_alpha("RGB")).pictures(QWEN_2)[0].pixels == reference(with_alpha("RGB"), QWEN_2)).all()
    for wrong in (array.astype(np.float32), array[..., 0], np.zeros((3, 40, 90), np.uint8), array[:0]):
        with pytest.raises(InvalidRequestError, match="must be uint8"):
            load(wrong)
    with pytest.raises(InvalidRequestError, match=r"cannot be read: .*No such file"):
        load(tmp_path / "none.png")
    path.write_bytes(path.read_bytes()[:3000])
    with Image.open(path) as unread, pytest.raises(InvalidRequestError, match=r"it cannot be read \(.*truncated"):
        pictures_of(unread, QWEN_2)
