"""Everything the website is made of, put together once and passed down. Starts and ends in one order."""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from app import streams
from app.admin import Admin
from app.battles import Battles
from app.config import AppConfig, engine_environment
from app.engine_client import EngineClient
from app.engine_process import EngineProcess
from app.engine_watch import end_when_hung
from app.memory.watch import Memory
from app.prompt_room import PromptRoom
from app.registry import Registry, seed_default_models
from app.security import Secret, log_signer
from app.visitors import Visitors
from db import queries
from db.connect import Database
from db.vote_log import Sign

BOARDS_AT_ONCE = 2  # threads for who asks for a leaderboard: one computes, one may find what was kept

log = logging.getLogger(__name__)


@dataclass
class Services:
    config: AppConfig
    database: Database
    secret: Secret
    process: EngineProcess | None  # None where the engine is somebody else's
    engine: EngineClient
    registry: Registry
    battles: Battles
    memory: Memory
    visitors: Visitors
    admin: Admin
    local_key: str  # bearer key of /api/admin while this process lives, for the command line
    boards: asyncio.Semaphore = field(default_factory=partial(asyncio.Semaphore, BOARDS_AT_ONCE))
    _running: tuple[asyncio.Task, ...] = ()  # for ever
    _closing: asyncio.Task | None = None

    @property
    def sign(self) -> Sign:
        """Of heads of the vote log."""
        return log_signer(self.config)

    async def start(self) -> None:
        """Returns before any model is loaded: the site is up and says so meanwhile."""
        if self.process:
            self.process.start()  # first: it takes longest
        await asyncio.to_thread(self.database.claim)
        await asyncio.to_thread(self.database.upgrade_to_head)
        await asyncio.to_thread(seed_default_models, self.database)
        await self.database.run(queries.sign_log, self.sign)
        interrupted = await self.battles.recover()
        if interrupted:
            log.info("turns interrupted by the restart", extra={"battles": interrupted})
        endless = [self.registry.keep_in_sync()]
        if self.process:
            patience = self.config.hang_seconds
            endless.append(end_when_hung(self.process, self.engine, patience_seconds=patience, clock=time.monotonic))
        self._running = tuple(asyncio.create_task(each, name=each.__name__) for each in endless)

    async def close(self) -> None:
        """May be asked for more than once; all wait for the same end."""
        self._closing = self._closing or asyncio.create_task(self._close(), name="closing")
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        await self.memory.close()
        await self.battles.close()
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        await self.registry.close()
        await self.engine.close()
        if self.process:
            await self.process.stop()
        await asyncio.to_thread(self.database.close)


def build_services(
    config: AppConfig,
    *,
    config_file: Path | None = None,
    rng: random.Random | None = None,
    clock: Callable[[], float] = time.monotonic,
    announce_password: Callable[[str], None] = lambda password: None,
) -> Services:
    """`config_file` is read by the child engine too. `announce_password` hears of one that was made up."""
    config.data_folder.mkdir(parents=True, exist_ok=True)
    process = None
    if not config.engine_url:
        # Only this process may change what its own engine serves.
        config = replace(config, engine_admin_key=config.engine_admin_key or secrets.token_urlsafe(24))
        process = EngineProcess(
            port=config.engine_port,
            environment=engine_environment(config, config_file),
            log_file=None if config.log_to_stderr else config.data_folder / "logs" / "engine.log",
        )
    database = Database(config.database)
    engine = EngineClient(
        process.url if process else config.engine_url,
        api_key=config.engine_api_key or None,
        admin_key=config.engine_admin_key or None,
        interval_ms=round(streams.TICK_SECONDS * 1000),  # more often no reader is told anything
    )
    secret = Secret(config.data_folder)
    local_key = secrets.token_urlsafe(24)
    registry = Registry(config, database, engine, clock=clock)
    room = PromptRoom(engine, config.answer_tokens)
    battles = Battles(
        config, database, registry, room, rng=rng or random.SystemRandom(), sign=log_signer(config), clock=clock
    )
    return Services(
        config=config,
        database=database,
        secret=secret,
        process=process,
        engine=engine,
        registry=registry,
        battles=battles,
        memory=Memory(
            engine, turns_begun=lambda: battles.turns_begun, undecided=battles.undecided, shown=battles.shown
        ),
        visitors=Visitors(database),
        admin=Admin(config, secret, local_key=local_key, announce=announce_password),
        local_key=local_key,
    )
