"""The models of the arena: what the table wants, what the engines have, and bringing the second to the first.

A model is wanted while its row is enabled. `sync` compares and PUTs or DELETEs: at start, after each edit and every
few seconds, so an engine that restarted heals. Knows one engine of ours and any number of remote endpoints. What the
engine serves under names that this arena's table never held is somebody else's and is left alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import tomllib
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sqlalchemy.orm import Session

from app.config import AppConfig, endpoint_key
from app.engine_client import Delta, EngineClient, EngineError, EngineModel, EngineRefused, ModelSpec
from app.errors import BadInput, NameTaken, NotFound
from app.model_rules import (
    ABOUT,
    FIELDS,
    REMOTE,
    check_context_length,
    check_path,
    checked,
    checked_name,
    is_remote,
    name_taken,
    refusal,
)
from db import errors as db_errors
from db import queries
from db.connect import Database
from db.tables import Model

log = logging.getLogger(__name__)

DEFAULT_MODELS = Path(__file__).parent / "default_models.toml"
PROBE_SECONDS = 30.0  # between two looks at a remote endpoint
LOADING_SECONDS = 0.2  # between two comparisons while a model loads or waits for its engine
SETTLE_SECONDS = 1.0  # for a model that was just changed to be ready or to fail
FRESH_SECONDS = 0.25  # for which what the engines said is taken for what they would say
LOOK_SECONDS = 2.0  # that somebody waits for them to say it again
NOT_ASKED_YET = "the endpoint has not answered yet"
TOLD_BY_ENGINES = (
    "status",
    "reason",
    "done",
    "total",
    "unit",
    "architecture",
    "chat_format",
    "system_prompt_tokens",
    "checkpoint_context_length",
)
NOT_TAKEN = (400, 404, 409, 413, 422)  # HTTP statuses by which an engine refuses a model for what it is
FELL_OVER = 500  # by which it says that it could not, this time: the others are asked for all the same


@dataclass(frozen=True)
class ModelView:
    """A row and how it stands. `status`: waiting (for its engine), loading, ready, failed, disabled or retired."""

    name: str
    source: str
    system_prompt: str
    sampling: Mapping[str, Any]
    chat_template: str | None
    context_length: int | None
    endpoint_key_env: str | None
    enabled: bool
    retired: bool
    status: str
    sampling_weight: float = 1.0
    precision: str | None = None
    adapter: str | None = None
    kv_share: float = 0.0
    organisation: str | None = None
    licence: str | None = None
    parameters: str | None = None
    reason: str | None = None
    done: int = 0
    total: int = 0
    unit: str = ""
    architecture: str | None = None
    chat_format: str | None = None
    system_prompt_tokens: int = 0
    checkpoint_context_length: int | None = None


@dataclass(frozen=True)
class ReadyModel:
    """One that can answer now. `context_length` is None where a remote endpoint does not tell it."""

    id: int
    name: str
    source: str
    system_prompt: str
    sampling: Mapping[str, Any] = field(hash=False)
    context_length: int | None
    system_prompt_tokens: int
    endpoint_key_env: str | None
    sampling_weight: float = 1.0
    adapter: str | None = None

    @property
    def is_remote(self) -> bool:
        return self.source.startswith(REMOTE + ":")


@dataclass
class Remote:
    """An endpoint of somebody else's, and what the last look at it showed."""

    client: EngineClient
    model: str
    key_env: str | None
    status: EngineModel
    looked_at: float = float("-inf")
    look: asyncio.Task | None = None
    answering: int = 0  # streams, none of which is to be cut off


class Registry:
    def __init__(
        self,
        config: AppConfig,
        database: Database,
        engine: EngineClient,
        *,
        is_in_use: Callable[[int], bool] = lambda model_id: False,
        clock: Callable[[], float],
    ):
        """`is_in_use(model id)`: whether a turn streams from it now; its engine keeps it until that has ended."""
        self._config = config
        self._database = database
        self._engine = engine
        self.is_in_use = is_in_use
        self._clock = clock
        self._rows: list[Model] = []
        self._asked: dict[str, ModelSpec] = {}  # what the engine was last asked to serve, by name
        self._refused: dict[str, str] = {}  # models that the engine would not take, and why
        self._local: dict[str, EngineModel] = {}
        self.engine_trouble: str | None = "the engine is starting"  # why it serves nothing; None while it does
        self._remotes: dict[tuple[str, str | None], Remote] = {}
        self._lock = asyncio.Lock()
        self._compared_at = float("-inf")
        self._looking: asyncio.Task | None = None

    # Reading

    async def models(self, *, retired: bool = True) -> list[ModelView]:
        """By name, with their live status."""
        rows = await self._database.run(queries.models, retired=retired, read_only=True)
        return [self._view(row) for row in rows]

    async def model(self, name: str) -> ModelView:
        return self._view(await self._database.run(find_model, name, read_only=True))

    def ready(self) -> list[ReadyModel]:
        """Enabled and able to answer, as of the last comparison."""
        return [
            ReadyModel(
                id=row.id,
                name=row.name,
                source=row.source,
                system_prompt=row.system_prompt,
                sampling=row.sampling,
                context_length=status.context_length or row.context_length,
                system_prompt_tokens=status.system_prompt_tokens,
                endpoint_key_env=row.endpoint_key_env,
                sampling_weight=row.sampling_weight,
                adapter=row.adapter,
            )
            for row in self._rows
            if row.enabled and (status := self._status(row)).status == "ready"
        ]

    def settled(self) -> bool:
        """Whether the engines have been asked and every enabled model is ready or has failed."""
        return bool(self._rows) and all(
            self._status(row).status in ("ready", "failed", "sleeping") for row in self._rows if row.enabled
        )

    def loading(self) -> list[ModelView]:
        return [self._view(row) for row in self._rows if row.enabled and self._status(row).status == "loading"]

    def _view(self, row: Model) -> ModelView:
        return view_of(row, self._status(row))

    def _status(self, row: Model) -> EngineModel:
        if resting := resting_status(row):
            return resting
        if is_remote(row.source):
            remote = self._remotes.get((row.source, row.endpoint_key_env))
            return remote.status if remote else EngineModel(row.name, "waiting", NOT_ASKED_YET)
        if row.name in self._refused:
            return EngineModel(row.name, "failed", self._refused[row.name])
        if self._asked.get(row.name, spec_of(row)) != spec_of(row):
            return EngineModel(row.name, "waiting", "it was changed; what it answers now ends first")
        return self._local.get(row.name) or EngineModel(row.name, "waiting", self.engine_trouble)

    # Changing

    async def add(
        self,
        *,
        name: str,
        source: str,
        system_prompt: str = "",
        sampling: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
        context_length: int | None = None,
        endpoint_key_env: str | None = None,
        sampling_weight: float = 1.0,
        precision: str | None = None,
        adapter: str | None = None,
        kv_share: float = 0.0,
        settle_seconds: float = SETTLE_SECONDS,
        **about: str | None,
    ) -> ModelView:
        """Raises BadInput or NameTaken, saying which and why; a source that fails later shows in the status.

        Who asks hears whether it is ready or failed where that is known within `settle_seconds`.
        """
        values = {
            "source": source,
            "system_prompt": system_prompt,
            "sampling": sampling or {},
            "chat_template": chat_template or None,
            "context_length": context_length,
            "endpoint_key_env": endpoint_key_env or None,
            "sampling_weight": sampling_weight,
            "precision": precision or None,
            "adapter": adapter or None,
            "kv_share": kv_share,
            **{field: about.get(field) for field in ABOUT},
        }
        self._check_paths(values)
        check_context_length(source, context_length, longest_context(source, await self.models()))
        name = (await self._database.run(insert_model, name, **values)).name
        self._asked.pop(name, None)
        await self._settle(name, settle_seconds)
        return await self.model(name)

    async def change(self, name: str, **changes: Any) -> ModelView:
        """Sets some of FIELDS, or `enabled`; enabling one that failed tries it again."""
        self._check_paths(changes)
        before = await self._database.run(find_model, name, read_only=True)
        if "source" in changes or "context_length" in changes:
            source, length = (changes.get(each, getattr(before, each)) for each in ("source", "context_length"))
            check_context_length(source, length, longest_context(source, await self.models()))
        await self._database.run(update_model, name, **changes)
        if changes.get("enabled") and self._status(before).status == "failed":
            await self._forget(before)
        await self._settle(name)
        return await self.model(name)

    async def retire(self, name: str) -> ModelView:
        """Ends its part in battles for good; its votes and its name stay."""
        await self._database.run(retire_model, name)
        await self.sync()
        return await self.model(name)

    def _check_paths(self, values: Mapping[str, Any]) -> None:
        """What our own engine will not find is refused at once; another machine's disk is its engine's business."""
        if not self._config.engine_url:
            for name in ("source", "adapter"):
                check_path(values.get(name), name)

    async def _forget(self, row: Model) -> None:
        """Makes the engine take a model anew that it failed to load."""
        self._asked.pop(row.name, None)
        self._refused.pop(row.name, None)
        if remote := self._remotes.get((row.source, row.endpoint_key_env)):
            remote.looked_at = float("-inf")
            remote.status = EngineModel(remote.model, "waiting", NOT_ASKED_YET)
        if not is_remote(row.source):
            with contextlib.suppress(EngineError):
                await self._engine.delete_model(row.name)

    async def _settle(self, name: str, seconds: float = SETTLE_SECONDS) -> None:
        """Gives a model a moment to fail or to be ready, so that who asked for it hears so in the answer."""
        await self.sync()
        row = next(row for row in self._rows if row.name == name)
        ends = self._clock() + (self._config.remote_timeout_seconds if is_remote(row.source) else 0) + seconds
        while self._status(row).status in ("loading", "waiting") and self._clock() < ends:
            await asyncio.sleep(0.1)
            await self.sync()
            row = next(row for row in self._rows if row.name == name)

    # Comparing

    async def keep_in_sync(self) -> None:
        """For ever; an engine or a database that is away now is asked again later."""
        while True:
            try:
                await self.sync()
            except db_errors.DatabaseUnavailable as error:
                log.warning("models not compared", extra={"reason": str(error)})
            except Exception:
                log.exception("models not compared")
            pause = self._config.sync_seconds
            await asyncio.sleep(pause if self.settled() else min(pause, LOADING_SECONDS))

    async def look(self) -> None:
        """Asks the engines how they are, unless they just were: for who must not hear what was true a second ago.

        However many ask, one comparison runs for all; one that takes long goes on without them.
        """
        if self._clock() - self._compared_at < FRESH_SECONDS:
            return
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self.sync(), name="look at the engines")
            self._looking.add_done_callback(lambda look: look.cancelled() or look.exception())  # the next one says so
        await asyncio.wait({self._looking}, timeout=LOOK_SECONDS)

    async def sync(self) -> None:
        """Makes what the engines serve what the table wants, and takes note of how far they are."""
        async with self._lock:
            self._compared_at = self._clock()
            self._rows = await self._database.run(queries.models, retired=True, read_only=True)
            wanted = {row.name: row for row in self._rows if row.enabled and not is_remote(row.source)}
            await self._sync_local(wanted)
            await self._sync_remotes()

    async def _sync_local(self, wanted: Mapping[str, Model]) -> None:
        try:
            serving = await self._engine.models()
            if await self._change_local(wanted, serving):
                serving = await self._engine.models()
        except EngineError as error:
            says = f"the engine does not serve yet: {error}"
            if says != self.engine_trouble:
                log.warning("engine does not answer", extra={"reason": str(error)})
            self._local, self._asked, self.engine_trouble = {}, {}, says
            return
        self.engine_trouble = None
        self._local = {name: status for name, status in serving.items() if name in wanted}

    async def _change_local(self, wanted: Mapping[str, Model], serving: Mapping[str, EngineModel]) -> bool:
        changed = False
        for row in self._rows:
            name = row.name
            if name in serving and name not in wanted and not self.is_in_use(row.id):
                await self._engine.delete_model(name)
                self._asked.pop(name, None)
                changed = True
        for name in self._refused.keys() - wanted.keys():
            del self._refused[name]
        for name, row in wanted.items():
            spec = spec_of(row)
            if self._asked.get(name) == spec and (name in serving or name in self._refused):
                continue
            if name in serving and (name in self._asked or name in self._refused) and self.is_in_use(row.id):
                continue  # the old one answers to its end
            try:
                await self._engine.put_model(name, spec)
                self._refused.pop(name, None)
                changed = True
            except EngineRefused as error:
                if error.status not in (*NOT_TAKEN, FELL_OVER):
                    raise
                self._refused[name] = error.message or str(error)
                if error.status == FELL_OVER:
                    self._asked.pop(name, None)
                    continue
            self._asked[name] = spec
        for name in self._refused if changed else ():  # it may take them now, as when another gave up its share
            self._asked.pop(name, None)
        return changed

    async def _sync_remotes(self) -> None:
        wanted = {(row.source, row.endpoint_key_env) for row in self._rows if row.enabled and is_remote(row.source)}
        for gone in self._remotes.keys() - wanted:
            if not self._remotes[gone].answering:
                await close_remote(self._remotes.pop(gone))
        for source, key_env in wanted - self._remotes.keys():
            self._remotes[source, key_env] = new_remote(source, key_env)
        for remote in self._remotes.values():
            if self._clock() - remote.looked_at > PROBE_SECONDS:  # by itself: one that hangs holds up no other
                remote.looked_at = self._clock()
                remote.look = asyncio.create_task(self._look_at(remote))

    async def _look_at(self, remote: Remote) -> None:
        if remote.key_env and endpoint_key(remote.key_env) is None:
            remote.status = EngineModel(remote.model, "failed", f"the environment variable {remote.key_env} is not set")
            return
        try:
            listed = await remote.client.listed_models(self._config.remote_timeout_seconds)
        except EngineError as error:
            remote.status = EngineModel(remote.model, "failed", f"the endpoint does not answer as it should: {error}")
            return
        if remote.model in listed:
            remote.status = EngineModel(remote.model, "ready")
        else:
            others = ", ".join(sorted(listed)[:10]) or "none"
            remote.status = EngineModel(
                remote.model, "failed", f"the endpoint lists no model {remote.model!r}; it lists {others}"
            )

    # Answering

    def answer(
        self, model: ReadyModel, messages: Sequence[Mapping[str, str]], *, max_tokens: int, silence_seconds: float
    ) -> AsyncGenerator[Delta, None]:
        """One answer, streamed. A remote model's system prompt and sampling defaults travel with the request."""
        if not model.is_remote:
            return self._engine.stream_chat(
                model.name, messages, sampling={"max_tokens": max_tokens}, silence_seconds=silence_seconds
            )
        return self._answer_remotely(model, messages, {**model.sampling, "max_tokens": max_tokens}, silence_seconds)

    async def _answer_remotely(
        self, model: ReadyModel, messages: Sequence[Mapping[str, str]], sampling: Mapping, silence_seconds: float
    ) -> AsyncGenerator[Delta, None]:
        key = model.source, model.endpoint_key_env
        if key not in self._remotes:  # the row was edited since the model was drawn
            self._remotes[key] = new_remote(*key)
        remote = self._remotes[key]
        system = [{"role": "system", "content": model.system_prompt}] if model.system_prompt else []
        remote.answering += 1
        try:
            stream = remote.client.stream_chat(
                remote.model, [*system, *messages], sampling=sampling, silence_seconds=silence_seconds
            )
            async with contextlib.aclosing(stream) as deltas:
                async for delta in deltas:
                    yield delta
        finally:
            remote.answering -= 1

    async def close(self) -> None:
        if self._looking:
            self._looking.cancel()
            await asyncio.wait({self._looking})
        for remote in self._remotes.values():
            await close_remote(remote)


def view_of(row: Model, status: EngineModel) -> ModelView:
    return ModelView(
        **{name: getattr(row, name) for name in ("name", "enabled", *FIELDS)},
        retired=row.retired_at is not None,
        **{name: getattr(status, name) for name in TOLD_BY_ENGINES},
    )


def longest_context(source: str, models: Sequence[ModelView]) -> int | None:
    """Tokens that a checkpoint was made for, as one of its models tells; None before one is loaded."""
    told = (model.checkpoint_context_length for model in models if model.source == source)
    return next((length for length in told if length), None)


def resting_status(row: Model) -> EngineModel | None:
    """Of a model that no engine is asked for; None of one that is wanted."""
    if row.retired_at is not None:
        return EngineModel(row.name, "retired")
    return None if row.enabled else EngineModel(row.name, "disabled")


def new_remote(source: str, key_env: str | None) -> Remote:
    url, _, model = source.removeprefix(REMOTE + ":").partition("#")
    client = EngineClient(url, api_key=endpoint_key(key_env) if key_env else None, prefix="")
    return Remote(client, model, key_env, EngineModel(model, "waiting", NOT_ASKED_YET))


async def close_remote(remote: Remote) -> None:
    if remote.look:
        remote.look.cancel()
    await remote.client.close()


def spec_of(row: Model) -> ModelSpec:
    return ModelSpec(**{each.name: getattr(row, each.name) for each in fields(ModelSpec)})


# The table of models, for this process and for the command line


def insert_model(session: Session, name: str, **values: Any) -> Model:
    """Raises BadInput or NameTaken, saying which and why. The name of one that never was in a battle is free again."""
    name, values = checked_name(name), checked(**values)
    queries.forget_unused_model(session, name)
    for other in queries.models(session, retired=True):
        if other.name == name:
            raise name_taken("name_retired" if other.retired_at else "name_exists", name)
        if other.name.casefold() == name.casefold():
            raise name_taken("name_case", other.name)
    check_shares(session, name, values["kv_share"])
    with _spoken():
        return queries.add_model(session, name=name, now=datetime.now(UTC), **values)


def update_model(session: Session, name: str, **changes: Any) -> Model:
    """Sets some of FIELDS, or `enabled`. Raises BadInput or NotFound."""
    unknown = changes.keys() - {*FIELDS, "enabled"}
    if unknown:
        raise BadInput(f"a model has no {', '.join(sorted(unknown))} that could be changed")
    if not isinstance(changes.get("enabled", True), bool):
        raise BadInput("enabled must be true or false")
    row = find_model(session, name)
    values: dict[str, Any] = {}
    if changes != {"enabled": False}:  # which every model can be, whatever rules have come since it was registered
        values = checked(**{each: changes.get(each, getattr(row, each)) for each in FIELDS})
        if changes.get("enabled", row.enabled):
            check_shares(session, name, values["kv_share"])
    with _spoken():
        return queries.change_model(session, name, **{key: values.get(key, changes[key]) for key in changes})


def check_shares(session: Session, name: str, share: float) -> None:
    """Raises ModelRefused where the enabled models would count on more of the pool than there is."""
    taken = sum(other.kv_share for other in queries.models(session) if other.enabled and other.name != name)
    if share and taken + share > 1 + 1e-9:
        raise refusal("kv_shares", field="kv_share", share=share, taken=taken, left=1 - taken)


def retire_model(session: Session, name: str) -> Model:
    with _spoken():
        return queries.retire_model(session, name, datetime.now(UTC))


def find_model(session: Session, name: str) -> Model:
    with _spoken():
        return queries.model_named(session, name)


def seed_default_models(database: Database, file: Path = DEFAULT_MODELS) -> None:
    """Fills an arena that never had a model with those we ship."""
    with database.session() as session:
        if not queries.models(session, retired=True):
            for entry in tomllib.loads(file.read_text(encoding="utf-8"))["models"]:
                insert_model(session, **entry)


@contextlib.contextmanager
def _spoken():
    """The database's refusals as sentences for the admin."""
    try:
        yield
    except db_errors.NameTaken as error:
        raise NameTaken(f"{error}; choose another name") from error
    except db_errors.NotFound as error:
        raise NotFound(str(error)) from error
