"""The admin: one password, a signed cookie for the browser, a bearer key for programs, and patience with neither.

The password is the config's, or one made up when the data folder is new: printed once, kept only as a scrypt hash.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path

from starlette.requests import HTTPConnection
from starlette.responses import Response

from app.config import AppConfig
from app.errors import NotSignedIn, TooMany
from app.security import Secret, client_address, write_private

COOKIE = "arena_admin"
SESSION_SECONDS = 12 * 3600
FREE_TRIES = 3  # wrong passwords from one address before each next one must wait
LONGEST_WAIT_SECONDS = 300.0
SCRYPT = {"n": 2**14, "r": 8, "p": 1, "maxmem": 64 * 1024 * 1024}
WRONG = "That password is not right."


class Admin:
    def __init__(
        self,
        config: AppConfig,
        secret: Secret,
        *,
        local_key: str = "",
        clock: Callable[[], float] = time.time,
        announce: Callable[[str], None] = lambda password: None,
    ):
        """`local_key` lets the command line of this machine in. `announce` hears of a password that was made up."""
        self._config = config
        self._local_key = local_key
        self._secret = secret
        self._clock = clock
        self._hash = _configured(config) or _kept(config.data_folder / "admin_password.json", announce)
        self._tries: dict[str, tuple[int, float]] = {}  # hashed address: wrong tries in a row, time of the last
        self._one_at_a_time = threading.Lock()  # tries sent at once must not slip past each other's count

    # Browser

    def sign_in(self, connection: HTTPConnection, password: str) -> str:
        """The value of the session's cookie. Raises NotSignedIn, or TooMany after wrong tries; slow (scrypt)."""
        self._check(connection, lambda: _matches(password, self._hash))
        text = f"{int(self._clock()) + SESSION_SECONDS}.{secrets.token_hex(8)}"
        return f"{text}.{self._signature(text)}"

    def auth_dependency(self, connection: HTTPConnection) -> str | None:
        """ "admin" for a request with a living session, else None: what `gr.mount_gradio_app` asks for."""
        text, _, signature = connection.cookies.get(COOKIE, "").rpartition(".")
        if not text or not hmac.compare_digest(self._signature(text).encode(), signature.encode("utf-8", "replace")):
            return None
        return "admin" if int(text.partition(".")[0]) > self._clock() else None

    def _signature(self, text: str) -> str:
        """Bound to the password: a new one ends every session."""
        return self._secret.sign("admin session", f"{text}.{self._hash['hash']}")

    # Programs

    def require(self, connection: HTTPConnection) -> None:
        """A living session, or the bearer key. Raises NotSignedIn or TooMany."""
        if self.auth_dependency(connection):
            return
        scheme, _, key = connection.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not key:
            raise NotSignedIn("This needs the admin: sign in, or send the key as a bearer token.")
        key = key.strip()
        if not self._is_local_key(key):  # which nobody guesses, and no wrong tries of others lock out
            self._check(connection, lambda: self._is_key(key))

    def _is_local_key(self, key: str) -> bool:
        return bool(self._local_key) and hmac.compare_digest(key.encode(), self._local_key.encode())

    def _is_key(self, key: str) -> bool:
        if self._config.admin_key:
            return hmac.compare_digest(key.encode(), self._config.admin_key.encode())
        return _matches(key, self._hash)

    # Patience

    def _check(self, connection: HTTPConnection, is_right: Callable[[], bool]) -> None:
        address = client_address(connection, self._config.proxy_networks)
        with self._one_at_a_time:
            self._try(self._secret.address_hash(address), is_right)

    def _try(self, address: str, is_right: Callable[[], bool]) -> None:
        wrong, last = self._tries.get(address, (0, 0.0))
        wait = min(2.0 ** min(wrong - FREE_TRIES, 30), LONGEST_WAIT_SECONDS) if wrong >= FREE_TRIES else 0.0
        left = last + wait - self._clock()
        if left > 0:
            seconds = math.ceil(left)
            raise TooMany(f"Too many wrong tries; wait {seconds} s.", retry_after_seconds=seconds)
        if is_right():
            self._tries.pop(address, None)
            return
        self._forget_old_tries()
        self._tries[address] = (wrong + 1, self._clock())
        raise NotSignedIn(WRONG)

    def _forget_old_tries(self) -> None:
        old = self._clock() - 2 * LONGEST_WAIT_SECONDS
        for address in [address for address, (_, last) in self._tries.items() if last < old]:
            del self._tries[address]


def set_cookie(response: Response, value: str, *, secure: bool) -> None:
    response.set_cookie(
        COOKIE, value, max_age=SESSION_SECONDS, path="/", httponly=True, samesite="strict", secure=secure
    )


def clear_cookie(response: Response) -> None:
    response.delete_cookie(COOKIE, path="/", httponly=True, samesite="strict")


def _hashed(password: str, salt: bytes) -> dict[str, str]:
    return {"salt": salt.hex(), "hash": hashlib.scrypt(password.encode(), salt=salt, **SCRYPT).hex()}


def _matches(password: str, stored: dict[str, str]) -> bool:
    right = _hashed(password, bytes.fromhex(stored["salt"]))["hash"]
    return hmac.compare_digest(right, stored["hash"])


def _configured(config: AppConfig) -> dict[str, str] | None:
    """Salted by the password alone, so that sessions outlive a restart."""
    password = config.admin_password
    return _hashed(password, hashlib.sha256(password.encode()).digest()[:16]) if password else None


def _kept(path: Path, announce: Callable[[str], None]) -> dict[str, str]:
    """The hash of the password that was made up for this data folder; makes one up where there is none."""
    password = secrets.token_urlsafe(12)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        write_private(path, json.dumps(_hashed(password, secrets.token_bytes(16))).encode())
        announce(password)
    except FileExistsError:
        pass
    return json.loads(path.read_bytes())
