"""What stands before all routes: who may ask, and how much at once. Knows paths and headers, no meaning of a body."""

from __future__ import annotations

import hmac
import re
import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.config import EngineConfig, is_loopback
from engine.delivery import ClientGone
from engine.errors import BodyTooLarge, EngineError, InvalidParameter, NotAuthorized
from engine.responses import error_response

OPEN_PATHS = ("/health",)
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
REQUEST_ID = re.compile(rb"[A-Za-z0-9_.:/+=@-]{1,128}")


class Gate:
    """The first look at a request: its id, host, site, key and size. What does not pass never reaches a route.

    The id is the caller's X-Request-Id, if it sent one, else one of ours; every response carries it.
    """

    def __init__(self, app: ASGIApp, config: EngineConfig) -> None:
        self.app = app
        self.config = config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        headers = dict(scope["headers"])
        request_id = headers.get(b"x-request-id", b"") or uuid.uuid4().hex.encode()
        send = with_request_id(send, request_id if REQUEST_ID.fullmatch(request_id) else uuid.uuid4().hex.encode())
        try:
            self._check_request_id(request_id)
            scope.setdefault("state", {})["request_id"] = request_id.decode()
            self._check_host(headers)
            self._check_site(scope["method"], headers)
            self._check_key(scope["path"], headers)
            body = await self._read(headers, receive)
        except ClientGone:
            return None
        except EngineError as error:
            return await error_response(error)(scope, receive, send)

        async def replay() -> Message:
            nonlocal body
            if body is None:
                return await receive()
            whole, body = body, None
            return {"type": "http.request", "body": whole, "more_body": False}

        return await self.app(scope, replay, send)

    def _check_request_id(self, request_id: bytes) -> None:
        if not REQUEST_ID.fullmatch(request_id):
            raise InvalidParameter("X-Request-Id", "X-Request-Id must be 1 to 128 letters, digits or one of -_.:/+=@")

    def _check_host(self, headers: dict[bytes, bytes]) -> None:
        """Without a key only this machine may ask, and not through a name that a web page chose (DNS rebinding)."""
        host = headers.get(b"host", b"localhost").decode("latin-1").rsplit(":", 1)[0].strip("[]")
        if not self.config.api_key and not is_loopback(host):
            raise NotAuthorized(f"without an api_key the engine answers only to loopback names, not to {host!r}")

    def _check_site(self, method: str, headers: dict[bytes, bytes]) -> None:
        """Without a key no page of another site may change or ask anything through a browser of this machine: it could
        not read the answer, but the request would be obeyed. Browsers tell with Sec-Fetch-Site, older ones with
        Origin; who sends neither is none."""
        if self.config.api_key or method in SAFE_METHODS:
            return
        site, origin = headers.get(b"sec-fetch-site"), headers.get(b"origin")
        if site is not None:
            foreign = site not in (b"same-origin", b"none")
        else:
            foreign = origin is not None and origin.partition(b"://")[2] != headers.get(b"host")
        if foreign:
            raise NotAuthorized("without an api_key the engine does nothing that a page of another site asks for")

    def _check_key(self, path: str, headers: dict[bytes, bytes]) -> None:
        keys = self._keys_of(path)
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        fits = [hmac.compare_digest(given.strip(), key.encode()) for key in keys]  # all of them, in equal time
        if keys and not (scheme.lower() == b"bearer" and any(fits)):
            raise NotAuthorized(f"{path} needs {'the admin key' if is_admin(path) else 'an API key'} as bearer token")

    def _keys_of(self, path: str) -> list[str]:
        """Those that open a path; none where it is open to all."""
        config = self.config
        if path in OPEN_PATHS:
            return []
        if is_admin(path):
            return [config.key_of_admin] if config.key_of_admin else []
        return [key for key in (config.api_key, config.admin_key) if key] if config.api_key else []

    async def _read(self, headers: dict[bytes, bytes], receive: Receive) -> bytes:
        limit, chunks, size = self.config.max_body_bytes, [], 0
        announced = headers.get(b"content-length", b"0")
        more = True
        while more:
            if max(size, int(announced) if announced.isdigit() else 0) > limit:
                raise BodyTooLarge(f"the body is over {limit:,} bytes, the most that is read")
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            chunks.append(message.get("body", b""))
            size += len(chunks[-1])
            more = message.get("more_body", False)
        return b"".join(chunks)


def with_request_id(send: Send, request_id: bytes) -> Send:
    async def send_with_id(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), (b"x-request-id", request_id)]}
        await send(message)

    return send_with_id


def is_admin(path: str) -> bool:
    return path == "/models" or path.startswith("/models/")
