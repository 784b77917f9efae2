"""`arena serve`: one process with the website, one line when it is ready, one end for all of it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from app.config import AppConfig
from app.errors import ConfigError
from app.logs import write_logs_to
from app.registry import ModelView
from app.service_file import ServiceFile
from app.services import Services, build_services
from app.sockets import KnownSocket

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.2  # between two looks at how far the models are
PATIENCE_SECONDS = 3.0  # before it is said that somebody else's engine does not answer
END_SECONDS = 1  # for requests in flight, from Ctrl-C on


def run(config: AppConfig, config_file: Path | None = None) -> int:
    """Serves until a signal, then ends the process. Raises ArenaError or DatabaseError where it cannot begin."""
    service_file = ServiceFile(config.data_folder)
    write_logs_to(None if config.log_to_stderr else config.data_folder / "logs" / "web.jsonl")
    listening = bind(config.host, config.port)
    services = build_services(config, config_file=config_file, announce_password=print_password)
    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(run_until_signal(Website(services, listening), service_file))
    finally:
        service_file.close()
    sys.stdout.flush()
    os._exit(0)  # all is saved and closed; taking a hundred modules apart would cost seconds


async def run_until_signal(website: Website, service_file: ServiceFile) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, website.end)
    watching = asyncio.create_task(Console(website, service_file).watch())
    watching.add_done_callback(tell_failure)
    try:
        await website.run()
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


def tell_failure(console: asyncio.Task) -> None:
    """Without its console the website goes on, but nobody would hear that it is ready."""
    if not console.cancelled() and (error := console.exception()):
        log.error("the console ended", exc_info=error)
        tell(f"The website goes on, but says no more here: {type(error).__name__}: {error}")


def make_app(services: Services) -> ASGIApp:
    from app.web import create_app  # imports Gradio, which takes seconds

    return create_app(services)


class Website:
    """The services, and the server through which browsers reach them."""

    def __init__(
        self, services: Services, listening: socket.socket, *, make_app: Callable[[Services], ASGIApp] = make_app
    ):
        self.services = services
        self._make_app = make_app
        self.address = address_of(listening)
        self._listening = listening
        self._ended = asyncio.Event()
        self._server: Server | None = None

    @property
    def serves(self) -> bool:
        return self._server is not None and self._server.started

    def end(self) -> None:
        self._ended.set()

    async def run(self) -> None:
        """Until `end`: then what streams is saved while connections close, and the engine ends."""
        ended = asyncio.create_task(self._ended.wait())
        serving = asyncio.create_task(self._serve())
        try:
            await asyncio.wait({ended, serving}, return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                await serving  # raises why it could not begin
        finally:
            ended.cancel()
            if self._server is None:
                serving.cancel()
            else:
                self._server.should_exit = True
            await asyncio.gather(self.services.close(), serving, return_exceptions=True)

    async def _serve(self) -> None:
        await self.services.start()
        gc.disable()  # there is nothing to collect yet, and looking takes a fifth of the time
        try:
            app = await asyncio.to_thread(self._make_app, self.services)  # while the engine loads
        finally:
            gc.enable()
        gc.collect()
        gc.freeze()  # what was made until now stays; later collections need not walk it
        self._server = Server(
            uvicorn.Config(
                app,
                http=KnownSocket,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_graceful_shutdown=END_SECONDS,
            )
        )
        await self._server.serve(sockets=[self._listening])


class Server(uvicorn.Server):
    """Uvicorn that leaves signals to us."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


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
    tell(f"Admin password, shown this once: {password}")


class Console:
    """What the terminal is told: how the models load, what goes wrong, and one line when all is ready."""

    def __init__(self, website: Website, service_file: ServiceFile):
        self._website = website
        self._services = website.services
        self._file = service_file
        self._progress = Progress()
        self._engine_url: str | None = ""
        self._engine_ends = 0
        self._trouble: str | None = None
        self._ready = False

    async def watch(self) -> None:
        began = asyncio.get_running_loop().time()
        while True:
            self._note_engine()
            if not self._ready:
                self._tell_trouble(asyncio.get_running_loop().time() - began)
                await self._tell_progress()
            await asyncio.sleep(LOOK_SECONDS)

    def _note_engine(self) -> None:
        process = self._services.process
        if process and process.ends > self._engine_ends:
            self._engine_ends = process.ends
            tell(f"The engine ended and is started again: {process.ending}")
        url = process.url() if process else self._services.config.engine_url
        if self._website.serves and url != self._engine_url:
            self._engine_url = url
            self._file.write(url=self._website.address, key=self._services.local_key, engine_url=url)

    def _tell_trouble(self, waited_seconds: float) -> None:
        """Of somebody else's engine; ours says so itself when it ends."""
        trouble = self._services.registry.engine_trouble
        if self._services.process or trouble in (None, self._trouble) or waited_seconds < PATIENCE_SECONDS:
            return
        self._trouble = trouble
        tell(f"Waiting for {self._services.config.engine_url}: {trouble}")

    async def _tell_progress(self) -> None:
        registry = self._services.registry
        self._progress.show(registry.loading())
        if not self._website.serves or not registry.settled():
            return
        self._ready = True
        self._progress.end()
        for model in await registry.models(retired=False):
            if model.status == "failed":
                tell(f"{model.name} failed to load: {model.reason}")
        print(f"Paged Arena is ready: {self._website.address}", flush=True)


def tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


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
            print(f"\r{line:<{self._drawn}}", end="" if line else "\r", file=self._stream, flush=True)
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
