"""The connection below a request: lets a stream see that its reader has gone silent. Knows no HTTP above it."""

from __future__ import annotations

import asyncio
import socket
import struct

from uvicorn.protocols.http.h11_impl import H11Protocol


class KnownSocket(H11Protocol):
    """Lets a request find its socket in scope["state"], so that a reader that went silent can be told."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.app_state = {**self.app_state, "socket": transport.get_extra_info("socket")}


def peer_silence_seconds(connection: socket.socket | None) -> float:
    """For how long bytes of ours have been under way to a peer that acknowledges nothing; 0 where all have arrived.

    Read from the kernel (tcp_info: tcpi_unacked at byte 24, tcpi_last_ack_recv in ms at 56), so that a cut network
    is noticed long before a write fails. Elsewhere than on Linux always 0.
    """
    if connection is None or not hasattr(socket, "TCP_INFO"):
        return 0.0
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
    except OSError:
        return 0.0
    (unacknowledged,) = struct.unpack_from("I", info, 24)
    (last_acknowledged_ms,) = struct.unpack_from("I", info, 56)
    return last_acknowledged_ms / 1000 if unacknowledged else 0.0
