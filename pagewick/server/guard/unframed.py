"""Takes chunked encoding away from a response: uvicorn sends each stream in chunks, and HTTP/1.0 has none."""

from __future__ import annotations

from collections.abc import Callable

_HEADER = b"transfer-encoding: chunked\r\n"


def unframed(write: Callable[[bytes], None]) -> Callable[[bytes], None]:
    """Return a function that takes what uvicorn writes of one response, and writes it without frames.

    uvicorn writes the head at once, and after that whole chunks. A response without chunks stays as it is.
    """
    is_chunked: bool | None = None

    def write_unframed(data: bytes) -> None:
        nonlocal is_chunked
        if is_chunked is None:
            is_chunked = _HEADER in data
            data = data.replace(_HEADER, b"", 1)
        elif is_chunked:
            data = _joined_chunks(data)
        if data:
            write(data)

    return write_unframed


def _joined_chunks(data: bytes) -> bytes:
    bodies, position = [], 0
    while position < len(data):
        begin = data.index(b"\r\n", position) + 2
        end = begin + int(data[position : begin - 2], 16)
        bodies.append(data[begin:end])
        position = end + 2
    return b"".join(bodies)
