"""data: addresses are decoded with a limit; nothing is ever fetched."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewick.errors import InvalidRequestError, UnsupportedError
from pagewick.images import addresses
from pagewick.images.addresses import bytes_of
from tests.images.pictures import address_of


@given(st.binary(min_size=1))
def test_files_come_back(data: bytes) -> None:
    assert bytes_of(address_of(data)) == data
    safe = base64.urlsafe_b64encode(data).decode()
    broken = "\n".join(safe[i : i + 5] for i in range(0, len(safe), 5)).rstrip("=")
    assert bytes_of(f"DATA:;charset=utf-8;BASE64,{broken}") == data


@pytest.mark.parametrize(
    "url",
    ["http://localhost/x.png", "https://example.com/" + "x" * 10**6, "file:///etc/passwd", "/etc/passwd", "ftp:x", ""],
)
def test_nothing_is_fetched(url: str) -> None:
    with pytest.raises(UnsupportedError, match="not fetched from addresses") as raised:
        bytes_of(url)
    assert len(str(raised.value)) < 200


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("data:", "in base64"),
        ("data:image/png,abc", "in base64"),
        ("data:image/png;base64", "in base64"),
        ("data:" + "x" * 10**6 + ";base64,AAAA", "in base64"),
        ("data:image/png;base64,A", "wrong base64"),
        ("data:image/png;base64,AA*A", "wrong base64"),
        ("data:image/png;base64,ÄAAA", "wrong base64"),
        ("data:image/png;base64,", "is empty"),
        ("data:image/png;base64, \n", "is empty"),
    ],
)
def test_wrong_addresses_are_refused(url: str, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason):
        bytes_of(url)


def test_files_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "MAX_IMAGE_BYTES", 1000)
    assert len(bytes_of(address_of(bytes(1000)))) == 1000
    for length in (1001, 1003, 5000):
        with pytest.raises(InvalidRequestError, match="larger than"):
            bytes_of(address_of(bytes(length)))
