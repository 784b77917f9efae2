"""Who sends a request: its address, its site, and the secrets that only this data folder holds.

Knows no visitor and no admin session; those are `visitors` and `admin`.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import ipaddress
import os
import secrets
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import HTTPConnection

from app.config import AppConfig
from app.errors import ForeignOrigin

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


def client_address(connection: HTTPConnection, trusted: Sequence[Network]) -> str:
    """The address of who asked. X-Forwarded-For is read from its right end, through trusted proxies only."""
    address = connection.client.host if connection.client else ""
    forwarded = [part.strip() for line in connection.headers.getlist("x-forwarded-for") for part in line.split(",")]
    while forwarded and _is_trusted(address, trusted):
        address = _without_port(forwarded.pop())
    return address


def _without_port(address: str) -> str:
    """As some proxies append it: "1.2.3.4:5678", "[::1]:5678"; others write "[::1]"."""
    if address.startswith("["):
        return address[1:].partition("]")[0]
    return address.partition(":")[0] if address.count(":") == 1 else address


def is_https(connection: HTTPConnection, trusted: Sequence[Network]) -> bool:
    """Whether the browser speaks https, to us or to a trusted proxy before us."""
    peer = connection.client.host if connection.client else ""
    if _is_trusted(peer, trusted) and "x-forwarded-proto" in connection.headers:
        return connection.headers["x-forwarded-proto"].split(",")[-1].strip() == "https"
    return connection.url.scheme == "https"


def _is_trusted(address: str, trusted: Sequence[Network]) -> bool:
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    return any(parsed in network for network in trusted)


def refuse_foreign_origin(method: str, headers: Headers) -> None:
    """A change that a page of another site sends with our visitor's cookies. Raises ForeignOrigin.

    Browsers tell with Sec-Fetch-Site, older ones with Origin; whoever sends neither is no browser and has no cookies
    to be misused.
    """
    if method in SAFE_METHODS:
        return
    site = headers.get("sec-fetch-site")
    origin = headers.get("origin")
    if site is not None:
        foreign = site not in ("same-origin", "none")
    else:
        foreign = origin is not None and urlsplit(origin).netloc != headers.get("host", "")
    if foreign:
        raise ForeignOrigin("This was sent by a page of another site and was not done.")


class Secret:
    """32 random bytes that live in the data folder: they sign sessions and blur addresses."""

    def __init__(self, folder: Path):
        self._key = _kept(folder / "secret.key")

    def sign(self, purpose: str, text: str) -> str:
        return hmac.new(self._key, f"{purpose}\0{text}".encode(), hashlib.sha256).hexdigest()

    def address_hash(self, address: str) -> str:
        """The same for one household: IPv6 networks of 64 bits count as one address."""
        try:
            parsed = ipaddress.ip_address(address)
        except ValueError:
            return self.sign("address", address)[:32]
        if parsed.version == 6:
            mapped = parsed.ipv4_mapped
            parsed = mapped or ipaddress.ip_network((parsed, 64), strict=False).network_address
        return self.sign("address", str(parsed))[:32]


def log_signer(config: AppConfig) -> Callable[[str], str]:
    """Signs heads of the vote log: HMAC-SHA256 under the configured key, or under this data folder's secret.

    A MAC and no public signature, since no library for those is among our dependencies: it convinces whoever holds the
    key that nobody else has written the log. For everyone else the head's hash is published, and compared.
    """
    key = config.vote_log_key.encode()
    if not key:
        return partial(Secret(config.data_folder).sign, "vote log")
    return lambda text: hmac.new(key, f"vote log\0{text}".encode(), hashlib.sha256).hexdigest()


def _kept(path: Path) -> bytes:
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        write_private(path, secrets.token_bytes(32))
    return path.read_bytes()


def write_private(path: Path, content: bytes) -> None:
    """A new file that only its owner reads. Raises FileExistsError."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
