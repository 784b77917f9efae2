"""`arena serve`: one process with the website, one line when it is ready, one end for all of it."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import uvicorn

from app.config import AppConfig
from app.errors import ConfigError
from app.logs import write_logs_to
from app.registry import ModelView
from app.service_file import ServiceFile
from app.services import Services, build_services
from app.web import KnownSocket, create_app

LOOK_SECONDS = 0.2  # between two looks at how far the models are
END_SECONDS = 1  # for requests in flight, from Ctrl-C on


def run(config: AppConfig, config_file: Path | None = None) -> int:
    """Serves until a signal. Raises ConfigError where it cannot begin."""
    service_file = ServiceFile(config.data_folder)
    write_logs_to(None if config.log_to_stderr else config.data_folder / "logs" / "web.jsonl")
    listening = bind(config.host, config.port)
    services = build_services(config, config_file=config_file, announce_password=print_password)
    server = Server(services)
    try:
        asyncio.run(serve(server, services, listening, service_file))
    finally:
        service_file.close()
    return 0 if server.started else 1


async def serve(server: Server, services: Services, listening: socket.socket, service_file: ServiceFile) -> None:
    announcing = asyncio.create_task(announce(server, services, address_of(listening), service_file))
    try:
        await server.serve(sockets=[listening])
    finally:
        announcing.cancel()
        await asyncio.gather(announcing, return_exceptions=True)


class Server(uvicorn.Server):
    """Uvicorn, ended by the first signal at once and cleanly: what streams is saved while connections close."""

    def __init__(self, services: Services, *, signals: bool = True):
        """`signals` False leaves them alone: for a server in a thread, which its starter ends."""
        super().__init__(
            uvicorn.Config(
                create_app(services),
                http=KnownSocket,
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_graceful_shutdown=END_SECONDS,
            )
        )
        self._services = services
        self._signals = (signal.SIGINT, signal.SIGTERM) if signals else ()
        self._ending: asyncio.Task | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in self._signals:
            loop.add_signal_handler(number, self._end)
        try:
            yield
        finally:
            for number in self._signals:
                loop.remove_signal_handler(number)

    def _end(self) -> None:
        self.force_exit = self.should_exit  # a second signal waits for nothing
        self.should_exit = True
        self._ending = self._ending or asyncio.create_task(self._services.close())


def bind(host: str, port: int) -> socket.socket:
    """Raises ConfigError, so that a port in use is told before anything is started."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen(2048)
    except (OSError, OverflowError) as error:
        listening.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {error}", key="port") from error
    return listening


def address_of(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{host}:{port}"


def print_password(password: str) -> None:
    print(f"Admin password, shown this once: {password}", file=sys.stderr, flush=True)


async def announce(server: Server, services: Services, address: str, service_file: ServiceFile) -> None:
    """Shows how the models load, and one line with the address once each of them is ready or has failed."""
    progress = Progress()
    engine_url = None
    ready = False
    while True:
        if services.process and services.process.url() != engine_url:
            engine_url = services.process.url()
            service_file.write(url=address, engine_url=engine_url)
        if not ready:
            progress.show(services.registry.loading())
            if server.started and services.registry.settled():
                ready = True
                progress.end()
                for line in troubles(await services.registry.models(retired=False)):
                    print(line, file=sys.stderr)
                print(f"Paged Arena is ready: {address}", flush=True)
        await asyncio.sleep(LOOK_SECONDS)


def troubles(models: Sequence[ModelView]) -> list[str]:
    return [f"{model.name} failed to load: {model.reason}" for model in models if model.status == "failed"]


class Progress:
    """One line that is redrawn in a terminal; elsewhere plain lines, one each tenth of the way."""

    def __init__(self, stream=sys.stderr):
        self._stream = stream
        self._last: dict[str, int] = {}
        self._drawn = 0

    def show(self, loading: Sequence[ModelView]) -> None:
        known = {model.source: model for model in loading if model.total}
        if self._stream.isatty():
            self._redraw("   ".join(f"{name_of(each)} {bar(each)}" for each in known.values()))
            return
        for source, each in known.items():
            tenth = 10 * each.done // each.total
            if tenth > self._last.get(source, -1):
                self._last[source] = tenth
                print(f"Loading {source}: {amount(each)}", file=self._stream, flush=True)

    def end(self) -> None:
        if self._stream.isatty():
            self._redraw("")

    def _redraw(self, line: str) -> None:
        if line or self._drawn:
            print(f"\r{line:<{self._drawn}}", end="\r" if not line else "", file=self._stream, flush=True)
        self._drawn = len(line)


def name_of(model: ModelView) -> str:
    return model.source.partition(":")[2].rpartition("/")[2]


def bar(model: ModelView, width: int = 20) -> str:
    filled = width * model.done // model.total
    return f"[{'#' * filled}{'.' * (width - filled)}] {amount(model)}"


def amount(model: ModelView) -> str:
    if model.unit == "bytes":
        return f"{model.done / 1e6:,.0f} of {model.total / 1e6:,.0f} MB"
    return f"{model.done:,} of {model.total:,} {model.unit}"
