"""A battle from its first question to its vote.

    start ──> streaming ──> votable ──> voted
                 │  ▲          │
                 ▼  │ regenerate, retry, next turn
             interrupted ──> void          (a model of it has left, or its visitor was forgotten)

Votable means: both sides of every turn show an answer, whole or ended by Stop. Everything else that ends a turn (an
engine that failed, a reader who left, a restart of this process) makes it interrupted, to be answered anew. The
database is the state; what lives here is only the turns that stream now.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

from sqlalchemy.orm import Session

from app import identity, streams
from app.config import AppConfig
from app.errors import (
    AlreadyVoted,
    BadInput,
    NotFound,
    NotReady,
    NotVotable,
    TooMany,
    WrongState,
)
from app.leaderboard.boards import count_vote
from app.markdown import Block, render
from app.matchmaking import KnownPairs, Pair, pick_pair
from app.memory.veil import ShownText
from app.prompt_room import Count, Message, PromptRoom, answer_room, checked_prompt
from app.registry import ReadyModel, Registry
from app.streams import Outcome, Pace, TurnStream
from db import errors as db_errors
from db import queries, vote_log
from db.connect import Database
from db.tables import SIDES, Answer, Battle, Turn
from db.vote_kinds import VOTE_KINDS

log = logging.getLogger(__name__)

LIMIT_WINDOW = timedelta(hours=1)
EVENT_IDS_PER_ATTEMPT = 100_000  # ids of events rise over attempts and restarts; arena.js reads them too
REPLAY_IDS = 50_000  # the upper half of those tells a turn again that no longer streams
KEPT_SECONDS = 60.0  # for how long a turn that has ended can be resumed where a reader left it
SAVE_PAUSES_SECONDS = (0.2, 0.5, 1.0, 2.0, 4.0)  # a database that is away is asked again after each
NO_SUCH_BATTLE = "There is no such battle."
TOO_FEW = (
    "Fewer than two models are ready, so there can be no battle yet. "
    "They may still be loading; the admin can see why, and add or enable models, at /admin."
)


@dataclass(frozen=True)
class Begun:
    """A turn that streams from now on."""

    battle: str
    turn: int
    state: str = "streaming"


@dataclass(frozen=True)
class Revealed:
    """What a visitor is told once the vote is in: the names by side, and whether it counts."""

    kind: str
    models: dict[str, str]
    counted: bool
    reason: str | None  # a key of db.decisions.REASONS


@dataclass(frozen=True)
class Attempt:
    """What a turn needs to stream: each side's model, its conversation, and the row its answer goes into."""

    battle: Battle
    turn: Turn
    answers: Mapping[str, Answer]  # of the sides that answer now
    histories: Mapping[str, Sequence[Message]]  # by side, up to and with this turn's question
    attempts: int  # rows of answers in the whole battle: the base of event ids


class Battles:
    """Every method raises ArenaError with a sentence for the visitor; NotFound also for a battle of somebody else."""

    def __init__(
        self,
        config: AppConfig,
        database: Database,
        registry: Registry,
        room: PromptRoom,
        *,
        rng: random.Random,
        sign: vote_log.Sign | None = None,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ):
        self._config = config
        self._database = database
        self._registry = registry
        self._room = room
        self._rng = rng
        self._sign = sign
        self._clock = clock
        self._now = now
        self.turns_begun = 0  # in this process; rises before a model is asked
        self._pairs = KnownPairs()
        self._live: dict[str, TurnStream] = {}
        self._askers: WeakKeyDictionary[TurnStream, str] = WeakKeyDictionary()  # ids of visitors
        self._asked_bytes: dict[str, dict[str, int]] = {}  # by battle and side, while it streams
        self._models_in_use: dict[str, frozenset[int]] = {}  # by battle, while it streams
        self._tasks: set[asyncio.Task] = set()
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        registry.is_in_use = lambda model_id: any(model_id in ids for ids in self._models_in_use.values())

    # Questions

    async def start(self, visitor_id: str, address_hash: str, prompt: str) -> Begun:
        """Draws a pair and asks both sides. Refused prompts leave no row behind."""
        prompt = checked_prompt(prompt)
        ready = self._two_ready()
        await self._room.check(ready, [], prompt)

        def draw(session: Session) -> Pair[ReadyModel]:
            return pick_pair(ready, self._rng, self._pairs.look(session))

        attempt, pair = await self._database.run(
            _begin, uuid.uuid4().hex, visitor_id, address_hash, draw, prompt, self._config, self._now()
        )
        return self._stream(attempt, {"a": pair.a, "b": pair.b})

    async def next_turn(self, visitor_id: str, battle_id: str, prompt: str) -> Begun:
        prompt = checked_prompt(prompt)
        async with self._lock(battle_id):
            battle, turns, answers = await self._load(visitor_id, battle_id)
            if battle.state != "votable":
                raise WrongState(CANNOT_ASK[battle.state])
            if len(turns) >= self._config.turns_per_battle:
                raise TooMany(f"A battle has {self._config.turns_per_battle} questions at most. Please vote.")
            models = await self._pair(battle)
            histories = [_history(turns, answers, side) for side in SIDES]
            await self._room.check(self._registry.ready(), histories, prompt)
            attempt = await self._database.run(_add_turn, battle, prompt, self._now())
            return self._stream(attempt, models)

    async def regenerate(self, visitor_id: str, battle_id: str) -> Begun:
        """The same pair answers the last question anew, on both sides."""
        return await self._again(visitor_id, battle_id, ("votable", "interrupted"), lambda answers: SIDES)

    async def retry(self, visitor_id: str, battle_id: str, side: str) -> Begun:
        """Answers anew what is missing: that side, and the other one too if it has no answer either."""
        if side not in SIDES:
            raise NotFound("A battle has the sides a and b.")

        def missing(answers: Mapping[str, Answer]) -> Sequence[str]:
            sides = [each for each in SIDES if not queries.has_text(answers[each])]
            if side not in sides:
                raise WrongState("This side has its answer.")
            return sides

        return await self._again(visitor_id, battle_id, ("interrupted",), missing)

    async def _again(
        self,
        visitor_id: str,
        battle_id: str,
        states: Sequence[str],
        which: Callable[[Mapping[str, Answer]], Sequence[str]],
    ) -> Begun:
        async with self._lock(battle_id):
            battle, turns, answers = await self._load(visitor_id, battle_id)
            if battle.state not in states:
                raise WrongState(CANNOT_ANSWER_AGAIN.get(battle.state, "Both sides have answered."))
            number = turns[-1].number
            last = {side: answers[number, side] for side in SIDES}
            sides = which(last)
            if max(last[side].attempt for side in sides) >= self._config.attempts_per_turn:
                raise TooMany("This question has been answered as often as is allowed here. Please start a new battle.")
            models = await self._pair(battle)
            attempt = await self._database.run(_answer_again, battle, sides, states, self._now())
            return self._stream(attempt, models)

    async def stop(self, visitor_id: str, battle_id: str) -> None:
        """Ends both sides; what they show stays, and can be voted on where both show something."""
        await self._find(visitor_id, battle_id)
        live = self._streaming(battle_id)
        if live is None:
            raise WrongState("Nothing is being answered now.")
        live.stop()

    async def count(self, visitor_id: str | None, battle_id: str | None, prompt: str) -> Count:
        """How much room a prompt would take, in a new battle or in that one."""
        ready = self._registry.ready()
        if not ready:
            raise NotReady(TOO_FEW)
        histories: list[list[Message]] = []
        if battle_id is not None:
            _, turns, answers = await self._database.run(_read, battle_id, visitor_id, read_only=True)
            histories = [_history(turns, answers, side) for side in SIDES]
        return await self._room.count(ready, histories, prompt)

    def readiness(self) -> tuple[int, str | None]:
        """How many models are ready, and what to tell a visitor where that is not enough."""
        ready = len(self._registry.ready())
        return ready, None if ready >= 2 else TOO_FEW

    def _two_ready(self) -> list[ReadyModel]:
        ready = self._registry.ready()
        if len(ready) < 2:
            raise NotReady(TOO_FEW)
        return ready

    async def _pair(self, battle: Battle) -> dict[str, ReadyModel]:
        """The models of a battle, if both can answer. One that has left the arena voids a battle without answers."""
        ready = {model.id: model for model in self._registry.ready()}
        ids = {"a": battle.model_a_id, "b": battle.model_b_id}
        if all(model_id in ready for model_id in ids.values()):
            return {side: ready[model_id] for side, model_id in ids.items()}
        rows = await self._database.run(queries.models_of, battle, read_only=True)
        if all(row.enabled for row in rows.values()):
            raise NotReady("The models are not ready at this moment; please try once more in a few seconds.")
        if battle.state == "interrupted":
            await self._database.run(queries.advance_battle, battle.id, ("interrupted",), "void", self._now())
            raise WrongState("This battle cannot go on: one of its models has left. Please start a new one.")
        raise WrongState("One of the two models has left; vote on what you see, or start a new battle.")

    # Vote

    async def vote(self, visitor_id: str, battle_id: str, kind: str) -> Revealed:
        """Records the battle's one vote and tells the names by side, which nobody is told before."""
        if kind not in VOTE_KINDS:
            raise BadInput(f"A vote is one of {', '.join(VOTE_KINDS)}.")
        try:
            return await self._database.run(_vote, battle_id, visitor_id, kind, self._now(), self._sign)
        except db_errors.NotFound as error:
            raise NotFound(NO_SUCH_BATTLE) from error
        except db_errors.AlreadyVoted as error:
            raise AlreadyVoted("This battle has its vote already.") from error
        except db_errors.NotVotable as error:
            raise NotVotable("You can vote once both sides have answered.") from error

    # Reading

    async def current(self, visitor_id: str) -> Battle | None:
        """The battle that a visitor who comes back finds again."""
        battle = await self._database.run(queries.latest_battle, visitor_id, read_only=True)
        if battle and (live := self._live.get(battle.id)):
            live.audience.touch()
        return battle

    async def snapshot(self, visitor_id: str, battle_id: str) -> dict[str, Any]:
        """All that the visitor may see of a battle now; events after `last_event_id` go on from there."""
        async with self._lock(battle_id):
            battle, turns, answers = await self._look(visitor_id, battle_id)
            live = self._live.get(battle_id)
            revealed = None
            if battle.state == "voted":
                revealed = await self._database.run(_revealed, battle, read_only=True)
            shown = [_turn_view(turn, answers) for turn in turns]
            if live is not None and not live.log.closed:
                live.audience.touch()
                for side, blocks in live.blocks.items():
                    state = live.side_state(side)
                    shown[-1]["answers"][side] = _side_view(state, [blocks[n] for n in sorted(blocks)])
            return {
                "battle": battle.id,
                "state": battle.state,
                "turns": shown,
                "vote": revealed and revealed.kind,
                "models": revealed and revealed.models,
                "counted": revealed and revealed.counted,
                "reason": revealed and revealed.reason,
                "last_event_id": live.log.last_id if live else _replay(battle, turns, answers)[-1][0],
            }

    async def events(self, visitor_id: str, battle_id: str, after: int, silence_seconds) -> AsyncIterator[bytes] | None:
        """The battle's events after that id, or None where none will come. `silence_seconds`: of this reader."""
        async with self._lock(battle_id):
            if (live := self._streaming(battle_id)) and self._askers[live] == visitor_id:
                return _read_along(live, after, silence_seconds)
            battle, turns, answers = await self._look(visitor_id, battle_id)
            live = self._live.get(battle_id)
            if live is None:
                replay = [event for number, event in _replay(battle, turns, answers) if number > after]
                return _once(b"".join(replay)) if replay else None
            if live.log.closed and live.log.last_id <= after:
                return None
            return _read_along(live, after, silence_seconds)

    # For those who watch the memory

    async def undecided(self) -> int:
        """Battles whose vote is still to come; the ones left alone for an hour are taken for abandoned."""
        return await self._database.run(queries.undecided_battles, self._now() - LIMIT_WINDOW, read_only=True)

    def shown(self) -> dict[str, list[ShownText]]:
        """By battle that streams now, what readers have been shown of each answer; nothing else is told of it."""
        return {
            battle_id: [ShownText(asked[side], shown) for side, shown in self._live[battle_id].shown_bytes().items()]
            for battle_id, asked in self._asked_bytes.items()
        }

    async def _find(self, visitor_id: str, battle_id: str) -> Battle:
        try:
            return await self._database.run(queries.find_battle, battle_id, visitor_id, read_only=True)
        except db_errors.NotFound as error:
            raise NotFound(NO_SUCH_BATTLE) from error

    async def _load(self, visitor_id: str, battle_id: str) -> tuple[Battle, list[Turn], dict[tuple[int, str], Answer]]:
        """The battle with its turns and current answers; one that streams in no process is found interrupted."""
        try:
            found = await self._database.run(_read, battle_id, visitor_id, read_only=True)
        except db_errors.NotFound as error:
            raise NotFound(NO_SUCH_BATTLE) from error
        if found[0].state == "streaming" and self._streaming(battle_id) is None:
            await self._database.run(_interrupt, battle_id, self._now())
            found = await self._database.run(_read, battle_id, visitor_id, read_only=True)
        return found

    async def _look(self, visitor_id: str, battle_id: str) -> tuple[Battle, list[Turn], dict[tuple[int, str], Answer]]:
        """As _load, for those who only read: told as interrupted even while that cannot be written, on a full disk."""
        try:
            return await self._load(visitor_id, battle_id)
        except db_errors.DatabaseUnavailable:
            battle, turns, answers = await self._database.run(_read, battle_id, visitor_id, read_only=True)
        for row in (battle, *answers.values()):
            if row.state == "streaming":
                row.state = "interrupted"
        return battle, turns, answers

    def _lock(self, battle_id: str) -> asyncio.Lock:
        """One change of a battle at a time; a lock lives while somebody holds or awaits it."""
        return self._locks.setdefault(battle_id, asyncio.Lock())

    def _streaming(self, battle_id: str) -> TurnStream | None:
        live = self._live.get(battle_id)
        return live if live is not None and not live.log.closed else None

    # Streaming

    def _stream(self, attempt: Attempt, models: Mapping[str, ReadyModel]) -> Begun:
        """Starts the turn; from here on it lives by itself until it is saved."""
        battle_id = attempt.battle.id
        live = TurnStream(
            turn=attempt.turn.number,
            sources={side: self._source(models[side], attempt.histories[side]) for side in attempt.answers},
            save=partial(self._save, attempt),
            first_event_id=attempt.attempts * EVENT_IDS_PER_ATTEMPT,
            pace=Pace(self._config.reveal_characters_per_second, self._config.reveal_lag_seconds),
            grace_seconds=self._config.reader_grace_seconds,
            longest_answer_characters=self._config.answer_tokens * 64,
            clock=self._clock,
        )
        self.turns_begun += 1
        self._live[battle_id] = live
        self._askers[live] = attempt.battle.visitor_id
        self._asked_bytes[battle_id] = {side: _bytes_of(attempt.histories[side]) for side in attempt.answers}
        self._models_in_use[battle_id] = frozenset(models[side].id for side in attempt.answers)
        task = asyncio.create_task(self._live_through(battle_id, live), name=f"battle {battle_id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return Begun(battle_id, attempt.turn.number)

    def _source(self, model: ReadyModel, messages: Sequence[Message]) -> streams.Source:
        room = self._config.answer_tokens
        if model.context_length:
            room = answer_room(model.context_length, room)
        return partial(
            self._registry.answer,
            model,
            messages,
            max_tokens=min(model.sampling.get("max_tokens", room), room),
            silence_seconds=self._config.silence_seconds,
        )

    async def _live_through(self, battle_id: str, live: TurnStream) -> None:
        try:
            await live.run()
        except Exception:
            log.exception("a turn broke off", extra={"battle": battle_id})
            live.log.put(("state",), "state", streams.state_event(live.turn, "interrupted"))
            live.log.close()
        finally:
            self._models_in_use.pop(battle_id, None)
            self._asked_bytes.pop(battle_id, None)
        asyncio.get_running_loop().call_later(KEPT_SECONDS, self._forget, battle_id, live)

    def _forget(self, battle_id: str, live: TurnStream) -> None:
        if self._live.get(battle_id) is live:
            del self._live[battle_id]

    async def _save(self, attempt: Attempt, outcomes: Mapping[str, Outcome]) -> str:
        """Saves the answers, once, and returns the battle's state after it."""
        battle_id = attempt.battle.id
        for pause in (*SAVE_PAUSES_SECONDS, None):
            try:
                state = await self._database.run(_end_turn, battle_id, attempt.answers, outcomes, self._now())
                break
            except db_errors.DatabaseUnavailable as error:
                log.error("answers not saved", extra={"battle": battle_id, "reason": str(error), "again_in": pause})
                if pause is None:
                    return "interrupted"
                await asyncio.sleep(pause)
        for side, outcome in outcomes.items():
            log.info(
                "answer ended",
                extra={
                    "battle": battle_id, "turn": attempt.turn.number, "side": side, "state": outcome.state,
                    "reason": outcome.error, "completion_tokens": outcome.completion_tokens,
                    "first_token_ms": outcome.first_token_ms, "duration_ms": outcome.duration_ms,
                },
            )  # fmt: skip
        return state

    # Life of the process

    async def recover(self) -> int:
        """After a restart nobody streams: such turns are interrupted, all else is as it was. How many battles."""
        return await self._database.run(queries.interrupt_all, self._now())

    async def close(self, timeout_seconds: float = 1.5) -> None:
        """Interrupts what streams and waits until it is saved."""
        for live in self._live.values():
            live.interrupt()
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=timeout_seconds)


CANNOT_ASK = {
    "streaming": "Both sides are still answering.",
    "interrupted": "The last question has no answer yet; let it be answered first.",
    "voted": "This battle has its vote; please start a new one.",
    "void": "This battle has ended; please start a new one.",
}
CANNOT_ANSWER_AGAIN = {
    "streaming": "Both sides are still answering.",
    "voted": "This battle has its vote; please start a new one.",
    "void": "This battle has ended; please start a new one.",
}


# What the visitor sees


def _side_view(state: str, blocks: Sequence[str]) -> dict[str, Any]:
    shown = [] if state == "failed" else [html for html in blocks if html]
    return {"state": state, "blocks": shown, "message": streams.SIDE_MESSAGES.get(state)}


def _turn_view(turn: Turn, answers: Mapping[tuple[int, str], Answer]) -> dict[str, Any]:
    sides = {}
    for side in SIDES:
        answer = answers[turn.number, side]
        sides[side] = _side_view(answer.state, [] if answer.state == "failed" else render(answer.text))
    return {"number": turn.number, "prompt": turn.prompt, "answers": sides}


def _replay(
    battle: Battle, turns: Sequence[Turn], answers: Mapping[tuple[int, str], Answer]
) -> list[tuple[int, bytes]]:
    """The last turn told as events, for a reader of a turn that no longer streams here."""
    number = turns[-1].number
    told: list[tuple[str, dict]] = []
    for side in SIDES:
        answer = answers[number, side]
        told.append(("side", streams.side_event(number, side, "streaming")))
        if answer.state != "failed":
            for index, html in enumerate(render(answer.text)):
                told.append(("block", streams.block_event(number, side, Block(index, html, True))))
        told.append(("side", streams.side_event(number, side, answer.state)))
    told.append(("state", streams.state_event(number, battle.state)))
    first = _attempts(answers) * EVENT_IDS_PER_ATTEMPT + REPLAY_IDS
    return [(first + i, streams.encode_event(first + i, name, data)) for i, (name, data) in enumerate(told)]


async def _once(events: bytes) -> AsyncIterator[bytes]:
    yield events


async def _read_along(live: TurnStream, after: int, silence_seconds: Callable[[], float]) -> AsyncIterator[bytes]:
    with live.audience.joined(silence_seconds):
        yield b"retry: %d\n\n" % streams.RETRY_MILLISECONDS
        async for events in live.log.read(after):
            yield events


# Transactions


def _read(
    session: Session, battle_id: str, visitor_id: str | None
) -> tuple[Battle, list[Turn], dict[tuple[int, str], Answer]]:
    battle = queries.find_battle(session, battle_id, visitor_id)
    return battle, queries.turns_of(session, battle_id), queries.current_answers(session, battle_id)


def _bytes_of(messages: Sequence[Message]) -> int:
    return sum(len(message["content"].encode()) for message in messages)


def _attempts(answers: Mapping[tuple[int, str], Answer]) -> int:
    return sum(answer.attempt for answer in answers.values())


def _history(turns: Sequence[Turn], answers: Mapping[tuple[int, str], Answer], side: str) -> list[Message]:
    """What one side has been asked and has said so far."""
    messages: list[Message] = []
    for turn in turns:
        messages.append({"role": "user", "content": turn.prompt})
        messages.append({"role": "assistant", "content": answers[turn.number, side].text})
    return messages


def _attempt(session: Session, battle_id: str, answering: Mapping[str, Answer]) -> Attempt:
    battle, turns, answers = _read(session, battle_id, None)
    histories = {side: _history(turns, answers, side)[:-1] for side in SIDES}
    return Attempt(battle, turns[-1], answering, histories, _attempts(answers))


def _begin(
    session: Session,
    battle_id: str,
    visitor_id: str,
    address_hash: str,
    draw: Callable[[Session], Pair[ReadyModel]],
    prompt: str,
    config: AppConfig,
    now: datetime,
) -> tuple[Attempt, Pair[ReadyModel]]:
    since = now - LIMIT_WINDOW
    queries.count_in_turn(session, visitor_id, address_hash)
    if queries.count_battles(session, since=since, visitor_id=visitor_id) >= config.battles_per_visitor:
        raise TooMany(_limit_sentence("You have", config.battles_per_visitor), retry_after_seconds=600)
    if queries.count_battles(session, since=since, address_hash=address_hash) >= config.battles_per_address:
        raise TooMany(_limit_sentence("Your network has", config.battles_per_address), retry_after_seconds=600)
    pair = draw(session)
    battle, turn, answers = queries.add_battle(
        session,
        battle_id=battle_id,
        visitor_id=visitor_id,
        model_a_id=pair.a.id,
        model_b_id=pair.b.id,
        pair_probability=pair.probability,
        side_coin=pair.side_coin,
        address_hash=address_hash,
        prompt=prompt,
        now=now,
    )
    histories = {side: [{"role": "user", "content": turn.prompt}] for side in SIDES}
    return Attempt(battle, turn, answers, histories, attempts=len(answers)), pair


def _limit_sentence(who: str, limit: int) -> str:
    return f"{who} started {limit:,} battles within an hour, which is the limit here. Please come back a little later."


def _add_turn(session: Session, battle: Battle, prompt: str, now: datetime) -> Attempt:
    added = queries.add_turn(session, battle.id, prompt, now)
    if added is None:
        raise WrongState(CANNOT_ASK["streaming"])
    return _attempt(session, battle.id, added[1])


def _answer_again(
    session: Session, battle: Battle, sides: Sequence[str], states: Sequence[str], now: datetime
) -> Attempt:
    if not queries.advance_battle(session, battle.id, states, "streaming", now):
        raise WrongState(CANNOT_ANSWER_AGAIN["streaming"])
    turn = queries.turns_of(session, battle.id)[-1]
    answers = {side: queries.add_answer(session, turn.id, side, now) for side in sides}
    return _attempt(session, battle.id, answers)


def _end_turn(
    session: Session,
    battle_id: str,
    answers: Mapping[str, Answer],
    outcomes: Mapping[str, Outcome],
    now: datetime,
) -> str:
    for side, outcome in outcomes.items():
        queries.end_answer(session, answers[side].id, **vars(outcome))
    if queries.make_votable(session, battle_id, now):
        return "votable"
    queries.advance_battle(session, battle_id, ("streaming",), "interrupted", now)
    return queries.find_battle(session, battle_id).state


def _interrupt(session: Session, battle_id: str, now: datetime) -> None:
    for answer in queries.current_answers(session, battle_id).values():
        queries.end_answer(session, answer.id, "interrupted")
    queries.advance_battle(session, battle_id, ("streaming",), "interrupted", now)


def _vote(
    session: Session, battle_id: str, visitor_id: str, kind: str, now: datetime, sign: vote_log.Sign | None
) -> Revealed:
    """A vote that is not blind, or that a visitor in quarantine gives, is recorded and does not count."""
    queries.lock_votes(session)  # before the visitor is looked at: a quarantine of this moment holds for this vote
    not_counted = _not_counted(session, battle_id, visitor_id)
    vote = queries.cast_vote(
        session, battle_id=battle_id, visitor_id=visitor_id, kind=kind, now=now, sign=sign, **not_counted
    )
    if vote.counted:
        count_vote(session, vote, now)
    return _revealed(session, queries.find_battle(session, battle_id))


def _not_counted(session: Session, battle_id: str, visitor_id: str) -> dict[str, Any]:
    """The decision that comes with the vote; empty where it counts. Whose quarantine is taken back gets the votes back
    that it alone kept from counting, so that it comes second."""
    battle = queries.find_battle(session, battle_id, visitor_id)
    models = {
        side: identity.terms(model.name, model.source, model.organisation, model.adapter)
        for side, model in queries.models_of(session, battle).items()
    }
    texts = [text for turn in queries.conversation_of(session, battle_id) for text in turn.values()]
    if named := identity.find(texts, models):
        note = f"{named.term!r}, of side {named.side}"
        return {"counted": False, "reason": "identity", "decided_by": "identity detector", "note": note}
    visitor = queries.find_visitor(session, visitor_id)
    if visitor is not None and visitor.quarantined_at is not None:
        return {"counted": False, "reason": "quarantine", "decided_by": "quarantine"}
    return {}


def _names(session: Session, battle: Battle) -> dict[str, str]:
    return {side: model.name for side, model in queries.models_of(session, battle).items()}


def _revealed(session: Session, battle: Battle) -> Revealed:
    vote = queries.vote_of(session, battle.id)
    return Revealed(vote.kind, _names(session, battle), vote.counted, vote.not_counted_reason)
