from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import InvalidMedia, InvalidRequest, RequestTooLarge
from shared.multimodal.dataurl import parse_data_url


@given(data=st.binary(max_size=100))
def test_the_bytes_come_back(data: bytes) -> None:
    url = "DATA:Image/PNG;Base64," + base64.b64encode(data).decode()
    assert parse_data_url(url, max_bytes=100) == ("image/png", data)


@pytest.mark.parametrize(
    "url",
    [
        "http://example.org/a.png",
        "https://127.0.0.1/a.png",
        "file:///etc/passwd",
        "ftp://x/y",
        "gopher://x",
        "//host/x",
        "/etc/passwd",
        "",
        " data:image/png;base64,aaaa",
    ],
)
def test_any_other_url_is_not_allowed(url: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_data_url(url, max_bytes=100)
    assert caught.value.code == "url_not_allowed"


@pytest.mark.parametrize(
    "url",
    [
        "data:image/png;base64",
        "data:image/png,abc",
        "data:,abc",
        "data:;base64,aaaa",
        "data:image/png;charset=x;base64,aaaa",
        "data:image/png;base64;base64,aaaa",
        "data:text/html;base64,aaaa",
        "data:video/jpeg;base64,aaaa",
        "data:image/;base64,aaaa",
        "data:image/p ng;base64,aaaa",
        "data:" + "a" * 1000 + ",aaaa",
        "data:image/png;base64,a",
        "data:image/png;base64,a===",
        "data:image/png;base64,aa aa",
        "data:image/png;base64,aaaa\n",
        "data:image/png;base64,-_-_",
        "data:image/png;base64,aaa\u00e9",
        "data:image/png;base64,aaaa=aaaa",
        "data:image/png;base64,data:image/png;base64,aaaa",
    ],
)
def test_a_malformed_data_url_is_invalid(url: str) -> None:
    with pytest.raises(InvalidMedia):
        parse_data_url(url, max_bytes=100)


def test_the_size_is_judged_before_decoding() -> None:
    with pytest.raises(RequestTooLarge):
        parse_data_url("data:image/png;base64," + "!" * 1000, max_bytes=100)
