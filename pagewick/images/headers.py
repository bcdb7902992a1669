"""Reads the format and the size of an image from its first bytes, so that limits apply before anything is decompressed.

Sources: PNG (W3C, section 11.2.1), JPEG (ITU-T T.81, annex B), GIF89a (sections 18 and 20), WebP (RFC 9649), and the
headers of Windows bitmaps.
"""

from __future__ import annotations

import struct
from enum import Enum
from typing import NamedTuple

from pagewick.errors import InvalidRequestError, UnsupportedError
from pagewick.images.addresses import check_num_bytes

# 8192 x 8192. A decoded pixel takes 4 bytes, and up to three copies of an image exist at once.
MAX_FILE_PIXELS = 2**26
# Progressive files have about ten scans, each of which may cost as much time as the whole image.
MAX_JPEG_SCANS = 100
MAX_JPEG_SEGMENTS = 4096
# Start of frame: baseline, extended, progressive, lossless and so on; 0xC4, 0xC8 and 0xCC mean something else.
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_SCAN, _END_OF_IMAGE = 0xDA, 0xD9
_ALONE = frozenset({0x01, *range(0xD0, 0xD9)})  # markers without a length
# Formats that people send, and that are refused by name: (offset, bytes, name).
_OTHERS = (
    (0, b"II*\0", "TIFF"), (0, b"MM\0*", "TIFF"), (4, b"ftypavif", "AVIF"), (4, b"ftyphei", "HEIC"),
    (4, b"ftypmif1", "HEIC"), (4, b"ftyp", "MP4"), (0, b"%PDF", "PDF"), (0, b"<svg", "SVG"), (0, b"<?xml", "SVG"),
    (0, b"\x1a\x45\xdf\xa3", "WebM"), (0, b"\xff\x0a", "JPEG XL"), (0, b"\0\0\0\x0cJXL ", "JPEG XL"),
)  # fmt: skip


class Format(Enum):
    """The formats that are read, by their names in errors."""

    PNG = "PNG"
    JPEG = "JPEG"
    WEBP = "WebP"
    GIF = "GIF"
    BMP = "BMP"

    @property
    def media_type(self) -> str:
        return f"image/{self.value.lower()}"


# How their files begin: (offset, bytes) pairs, all of which a file has.
_BEGINNINGS: tuple[tuple[Format, tuple[tuple[int, bytes], ...]], ...] = (
    (Format.PNG, ((0, b"\x89PNG\r\n\x1a\n"),)),
    (Format.JPEG, ((0, b"\xff\xd8\xff"),)),
    (Format.WEBP, ((0, b"RIFF"), (8, b"WEBP"))),
    (Format.GIF, ((0, b"GIF87a"),)),
    (Format.GIF, ((0, b"GIF89a"),)),
    (Format.BMP, ((0, b"BM"),)),
)
_NAMES = [one.value for one in Format]
# The formats, as errors list them.
FORMAT_NAMES = f"{', '.join(_NAMES[:-1])} or {_NAMES[-1]}"
# The first bytes of a file that say which format it has.
NUM_BEGINNING_BYTES = 12


class Header(NamedTuple):
    """Sizes in pixels, as they are stored: the orientation in EXIF may exchange height and width."""

    format: Format
    height: int
    width: int


def measured(data: bytes) -> Header:
    """Return the size that a file claims to have, without decoding it.

    Raises InvalidRequestError for a damaged header and for more than MAX_FILE_PIXELS, UnsupportedError for a format
    that is not read.
    """
    check_num_bytes(len(data))
    header = read_header(data)
    check_num_pixels(header.height, header.width)
    return header


def check_num_pixels(height: int, width: int) -> None:
    """Raises InvalidRequestError for an image that is too large to decode."""
    if height * width > MAX_FILE_PIXELS:
        message = f"it has {width} x {height} pixels; the limit is {MAX_FILE_PIXELS}. Make it smaller"
        raise InvalidRequestError(message)


def read_header(data: bytes) -> Header:
    """Return what a file's first bytes say.

    Raises UnsupportedError for another format, and InvalidRequestError for a damaged header.
    """
    found = format_of(data)
    if found is None:
        name = next((name for start, mark, name in _OTHERS if data[start : start + len(mark)] == mark), None)
        kind = "an unknown format" if name is None else f"the format {name}"
        raise UnsupportedError(f"its file has {kind}; send one of {', '.join(_NAMES)}")
    try:
        height, width = _READERS[found](data)
    except (struct.error, IndexError):
        raise InvalidRequestError(f"its {found.value} file is truncated; send the whole file") from None
    if not (height and width):
        raise InvalidRequestError(f"its {found.value} file has {width} x {height} pixels; send another file")
    return Header(found, height, width)


def format_of(data: bytes) -> Format | None:
    """Return the format of a file with these first bytes, NUM_BEGINNING_BYTES or more; None if it is not read."""
    for kind, marks in _BEGINNINGS:
        if all(data[start : start + len(mark)] == mark for start, mark in marks):
            return kind
    return None


def _png(data: bytes) -> tuple[int, int]:
    if data[12:16] != b"IHDR":
        raise _damaged(Format.PNG)
    width, height = struct.unpack_from(">II", data, 16)
    return height, width


def _gif(data: bytes) -> tuple[int, int]:
    width, height = struct.unpack_from("<HH", data, 6)
    return height, width


def _bmp(data: bytes) -> tuple[int, int]:
    (header_bytes,) = struct.unpack_from("<I", data, 14)
    # A negative height means that the rows begin at the top.
    width, height = struct.unpack_from("<HH" if header_bytes == 12 else "<ii", data, 18)
    return abs(height), max(width, 0)


def _webp(data: bytes) -> tuple[int, int]:
    chunk = data[12:16]
    if chunk == b"VP8X":
        width = int.from_bytes(data[24:27], "little") + 1
        height = int.from_bytes(data[27:30], "little") + 1
    elif chunk == b"VP8L":
        (packed,) = struct.unpack_from("<I", data, 21)
        width, height = (packed & 0x3FFF) + 1, (packed >> 14 & 0x3FFF) + 1
    elif chunk == b"VP8 ":
        width, height = (side & 0x3FFF for side in struct.unpack_from("<HH", data, 26))
    else:
        raise _damaged(Format.WEBP)
    if len(data) < 30:
        raise IndexError
    return height, width


def _jpeg(data: bytes) -> tuple[int, int]:
    if data.count(b"\xff\xda") > MAX_JPEG_SCANS:
        raise InvalidRequestError(f"its JPEG file has more than {MAX_JPEG_SCANS} scans; save it without them")
    position, size = 2, None
    for _ in range(MAX_JPEG_SEGMENTS):
        if data[position] != 0xFF:
            raise _damaged(Format.JPEG)
        marker = data[position + 1]
        if marker in _ALONE or marker == 0xFF:
            position += 1 if marker == 0xFF else 2
            continue
        if marker in (_SCAN, _END_OF_IMAGE):
            break
        (length,) = struct.unpack_from(">H", data, position + 2)
        if marker in _FRAMES:
            height, width = struct.unpack_from(">HH", data, position + 5)
            if size is not None and size != (height, width):
                break
            size = height, width
        position += 2 + max(length, 2)
    else:
        raise _damaged(Format.JPEG)
    if size is None or marker != _SCAN:
        raise _damaged(Format.JPEG)
    return size


def _damaged(kind: Format) -> InvalidRequestError:
    return InvalidRequestError(f"its {kind.value} file is damaged; send another copy of it")


_READERS = {Format.PNG: _png, Format.JPEG: _jpeg, Format.WEBP: _webp, Format.GIF: _gif, Format.BMP: _bmp}
