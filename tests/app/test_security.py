"""Whose address it is, and whose page."""

from __future__ import annotations

import hmac
import ipaddress
import re

import pytest
from starlette.requests import Request

from app.config import AppConfig
from app.errors import ForeignOrigin
from app.security import Secret, client_address, log_signer, refuse_foreign_origin

PROXIES = (ipaddress.ip_network("10.0.0.0/8"), ipaddress.ip_network("fd00::/8"))


def request(peer: str, *forwarded: str) -> Request:
    headers = [(b"x-forwarded-for", line.encode()) for line in forwarded]
    return Request({"type": "http", "headers": headers, "client": (peer, 5)})


@pytest.mark.parametrize(
    ("peer", "forwarded", "address"),
    [
        ("203.0.113.5", (), "203.0.113.5"),
        ("203.0.113.5", ("198.51.100.1",), "203.0.113.5"),
        ("10.0.0.1", ("198.51.100.1",), "198.51.100.1"),
        ("10.0.0.1", ("6.6.6.6, 198.51.100.1",), "198.51.100.1"),
        ("10.0.0.1", ("6.6.6.6, 198.51.100.1, 10.0.0.2",), "198.51.100.1"),
        ("10.0.0.1", ("6.6.6.6", "198.51.100.1"), "198.51.100.1"),
        ("fd00::1", ("2001:db8::7",), "2001:db8::7"),
        ("10.0.0.1", (), "10.0.0.1"),
        ("10.0.0.1", ("nonsense",), "nonsense"),
        ("10.0.0.1", ("198.51.100.1:5678",), "198.51.100.1"),
        ("10.0.0.1", ("6.6.6.6, 198.51.100.1:5678, 10.0.0.2:80",), "198.51.100.1"),
        ("10.0.0.1", ("[2001:db8::7]:5678",), "2001:db8::7"),
        ("10.0.0.1", ("[2001:db8::7]",), "2001:db8::7"),
    ],
)
def test_an_address_is_read_through_trusted_proxies_from_the_right(peer, forwarded, address):
    assert client_address(request(peer, *forwarded), PROXIES) == address


def test_addresses_are_kept_as_hashes_that_only_this_folder_can_make(tmp_path):
    secret = Secret(tmp_path / "a")
    hashed = secret.address_hash("203.0.113.5")
    assert hashed == Secret(tmp_path / "a").address_hash("203.0.113.5") and re.fullmatch("[0-9a-f]+", hashed)
    assert hashed != Secret(tmp_path / "b").address_hash("203.0.113.5")
    assert secret.address_hash("2001:db8::1") == secret.address_hash("2001:db8::2")
    assert secret.address_hash("2001:db8::1") != secret.address_hash("2001:db8:0:1::1")
    assert secret.address_hash("::ffff:203.0.113.5") == hashed
    assert secret.address_hash("nonsense")


@pytest.mark.parametrize(
    ("method", "headers", "foreign"),
    [
        ("GET", {"origin": "https://evil.example", "host": "arena"}, False),
        ("POST", {"origin": "https://evil.example", "host": "arena"}, True),
        ("POST", {"origin": "http://arena", "host": "arena"}, False),
        ("POST", {"origin": "http://arena:1", "host": "arena:2"}, True),
        ("POST", {"origin": "null", "host": "arena"}, True),
        ("POST", {"host": "arena"}, False),
        ("DELETE", {"sec-fetch-site": "cross-site", "host": "arena"}, True),
        ("PATCH", {"sec-fetch-site": "same-site", "origin": "http://arena", "host": "arena"}, True),
        ("PUT", {"sec-fetch-site": "same-origin", "host": "arena"}, False),
        ("POST", {"sec-fetch-site": "none", "host": "arena"}, False),
    ],
)
def test_a_change_is_taken_from_our_own_pages_only(method, headers, foreign):
    from starlette.datastructures import Headers

    if foreign:
        with pytest.raises(ForeignOrigin):
            refuse_foreign_origin(method, Headers(headers))
    else:
        refuse_foreign_origin(method, Headers(headers))


@pytest.mark.parametrize("configured", ["", "a key of our own"])
def test_head_of_the_vote_log_is_signed_as_docs_votes_says(configured, tmp_path):
    signed = log_signer(AppConfig(data_folder=tmp_path, vote_log_key=configured))("votes 3 5f2c 0")
    key = configured.encode() or (tmp_path / "secret.key").read_bytes()
    assert signed == hmac.new(key, b"vote log\0votes 3 5f2c 0", "sha256").hexdigest()
