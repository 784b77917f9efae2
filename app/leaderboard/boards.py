"""The leaderboard: the board of the votes in the database, or of those in a file.

Votes are facts and ratings a cache. Elo moves with each vote, in the vote's own transaction (`count_vote`). A whole
board is computed when somebody asks and there are votes it has not seen; what was computed is kept in the table of
ratings under the id of the last vote, so that a restart finds it. Both can be thrown away and computed again.

A `Sheet` is a board of chosen votes with what the page draws beside it. Sheets are kept in memory only.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from weakref import WeakKeyDictionary

import numpy as np
from sqlalchemy.orm import Session

from app.errors import BadInput
from app.leaderboard.sheet import VERSION, Sheet, make_sheet
from app.leaderboard.votes import Selection, Voted, Votes
from app.ratings import Board, Games, choose_interval, elo, rate
from app.votes.formats import any_csv, format_named
from app.votes.formats.records import BadRow, VoteRecord
from app.votes.formats.rows import VotesSource
from db import board_queries, queries
from db.connect import Database
from db.errors import DatabaseUnavailable
from db.tables import Vote
from db.vote_kinds import VOTE_KINDS

logger = logging.getLogger(__name__)

WINNERS = {"a": "left", "b": "right"}  # the words of a CSV file for our kinds of vote; the other kinds are words of it
KEPT_SHEETS = 32
SHOWN_BAD_ROWS = 20
LIVE_ELO = ("elo", "none")  # method and interval under which Elo is kept vote by vote


_computing = threading.Lock()
_ledgers: WeakKeyDictionary[Database, Ledger] = WeakKeyDictionary()


def utc_now() -> datetime:
    return datetime.now(UTC)


def board_from_csv(
    path: Path,
    columns: tuple[str, str, str] = any_csv.DEFAULT_COLUMNS,
    *,
    method: str = "bt",
    ci: str | None = None,
) -> Board:
    """Raises BadInput for a file that cannot be read whole, and for a method or interval that there is not."""
    return sheet_from_csv(path, columns, Selection(method, ci)).board


def sheet_from_file(path: Path, format_name: str, selection: Selection) -> Sheet:
    """Of a file in one of `app.votes.formats`. Raises BadInput, also for a row that cannot be understood."""
    source = VotesSource(path)
    rows = list(format_named(format_name).read(source))
    if bad := [f"line {row.line}: {row.reason}" for row in rows if isinstance(row, BadRow)]:
        listed = "\n  ".join(
            bad[:SHOWN_BAD_ROWS] + ([f"and {len(bad) - SHOWN_BAD_ROWS:,} more"] if len(bad) > SHOWN_BAD_ROWS else [])
        )
        raise BadInput(f"{path}: {len(bad):,} rows cannot be read, so that none was:\n  {listed}")
    votes = Votes.of(
        Voted.on(
            [(said.prompt, said.a, said.b) for said in row.conversation],
            row.model_a,
            row.model_b,
            row.kind,
            row.visitor,
            row.created_at,
            row.pair_probability,
        )
        for row in rows
        if isinstance(row, VoteRecord) and row.counted
    )
    return make_sheet(votes, selection, input_sha256=source.sha256)


def sheet_from_csv(path: Path, columns: tuple[str, str, str], selection: Selection) -> Sheet:
    """Of any CSV file, three columns of it. Raises BadInput."""
    read = any_csv.read(path, columns)
    return make_sheet(Votes.of_games(read.games), selection, input_sha256=read.sha256)


def sheet(database: Database, selection: Selection | None = None) -> Sheet:
    """Of the votes in the database so far. Blocks. Raises BadInput and DatabaseUnavailable."""
    selection = selection or Selection()
    with _computing:
        ledger = _ledgers.setdefault(database, Ledger(weakref.ref(database)))
    whole = board(database, method=selection.method, ci=selection.ci) if selection.is_of_all() else None
    return ledger.sheet(selection, whole)


def digest_of(votes: Iterable[tuple[str, str, str]]) -> str:
    """Of votes as (model a, model b, kind): that of the CSV file which holds no more than them."""
    rows = ((a, b, WINNERS.get(kind, kind)) for a, b, kind in votes)
    return hashlib.sha256(any_csv.write(rows)).hexdigest()


class Ledger:
    """The votes of one database with what their texts tell, each conversation read once; and their sheets."""

    def __init__(self, database: weakref.ref[Database]):
        self._database = database
        self._lock = threading.Lock()
        self._voted: list[Voted] = []
        self._state = (0, 0)  # last vote, last decision
        self._votes, self._digest = Votes.of([]), digest_of([])
        self._sheets: OrderedDict[tuple, Sheet] = OrderedDict()

    def sheet(self, selection: Selection, whole: Board | None) -> Sheet:
        """`whole` is the board where it is known already."""
        with self._lock:
            self._catch_up()
            key = (selection, whole and (whole.votes, whole.input_sha256))
            if key not in self._sheets:
                self._sheets[key] = make_sheet(self._votes, selection, whole=whole, input_sha256=self._digest)
                while len(self._sheets) > KEPT_SHEETS:
                    self._sheets.popitem(last=False)
            self._sheets.move_to_end(key)
            return self._sheets[key]

    def _catch_up(self) -> None:
        with self._database().session(read_only=True) as session:
            state = (queries.last_vote_id(session), queries.last_decision(session))
            if state == self._state:
                return
            anew = state[1] != self._state[1] or state[0] < self._state[0]
            voted = [] if anew else list(self._voted)
            names = {model.id: model.name for model in queries.models(session, retired=True)}
            for row in board_queries.voted_battles(session, after=0 if anew else self._state[0]):
                columns = (row.kind, row.visitor_id, row.created_at, row.pair_probability)
                voted.append(Voted.on(row.turns, names[row.model_a_id], names[row.model_b_id], *columns))
        self._voted, self._state, self._votes = voted, state, Votes.of(voted)
        self._digest = digest_of((vote.model_a, vote.model_b, vote.kind) for vote in voted)
        self._sheets.clear()


def board(
    database: Database, *, method: str = "bt", ci: str | None = None, clock: Callable[[], datetime] = utc_now
) -> Board:
    """The board of all votes so far, from the cache if no vote came since. Blocks; opens sessions of its own.

    Raises ValueError for a method or interval that there is not, DatabaseUnavailable.
    """
    ci = choose_interval(method, ci)
    with database.session(read_only=True) as session:
        cached = _cached_board(session, method, ci, queries.last_vote_id(session))
    if cached is not None:
        return cached
    with _computing:  # many ask at once after a vote: the first computes, the others find what it kept
        return _compute_board(database, method, ci, clock)


def _compute_board(database: Database, method: str, ci: str, clock: Callable[[], datetime]) -> Board:
    with database.session(read_only=True) as session:
        last_vote_id = queries.last_vote_id(session)
        last_decision = queries.last_decision(session)
        cached = _cached_board(session, method, ci, last_vote_id)
        if cached is not None:
            return cached
        votes = queries.votes_in_order(session)
        model_ids = {model.name: model.id for model in queries.models(session, retired=True)}
        live_elo = _live_elo(session, last_vote_id)
    names = {model_id: name for name, model_id in model_ids.items()}
    games = Games.of((names[vote.model_a_id], names[vote.model_b_id], VOTE_KINDS[vote.kind].score_a) for vote in votes)
    games = games.knowing(both_bad=np.array([vote.kind == "both_bad" for vote in votes], bool))
    digest = digest_of((names[vote.model_a_id], names[vote.model_b_id], vote.kind) for vote in votes)
    made = rate(games, method, ci, live_elo=live_elo, input_sha256=digest, version=VERSION)
    try:
        with database.session() as session:
            _keep(session, made, model_ids, last_vote_id, last_decision, clock())
    except DatabaseUnavailable as error:  # the board is right all the same, and will be computed again
        logger.warning("the board was not cached: %s", error)
    return made


def count_vote(session: Session, vote: Vote, now: datetime) -> None:
    """Moves the Elo of the two models of a vote just cast in this session.

    Where the cache has not seen every earlier vote (it was cleared, or votes were imported) it stays as it is until a
    board is computed from all votes.
    """
    live = {rating.model_id: rating for _, rating in queries.cached_ratings(session, *LIVE_ELO)}
    seen = {(rating.last_vote_id, rating.last_decision) for rating in live.values()} or {(0, 0)}
    last_decision = queries.last_decision(session)
    if seen != {(queries.last_vote_id(session, before=vote.id), last_decision)}:
        return
    battle = queries.find_battle(session, vote.battle_id)
    score = VOTE_KINDS[vote.kind].score_a
    pair = (battle.model_a_id, battle.model_b_id)
    before = [live[model_id].elo if model_id in live else elo.START for model_id in pair]
    rows = []
    for model_id, rating, won in zip(pair, elo.update(*before, score), (score == 1, score == 0), strict=True):
        votes, wins = (live[model_id].votes, live[model_id].wins) if model_id in live else (0, 0)
        rows.append(_live_elo_row(model_id, rating, votes + 1, wins + won, vote.id, last_decision, now))
    queries.save_ratings(session, rows)
    queries.advance_ratings(session, *LIVE_ELO, vote.id, now)


def _live_elo_row(
    model_id: int, rating: float, votes: int, wins: int, vote_id: int, last_decision: int, now: datetime
) -> dict:
    method, ci = LIVE_ELO
    return {
        "model_id": model_id,
        "method": method,
        "ci": ci,
        "rating": rating,
        "lower": None,
        "upper": None,
        "rank_best": None,
        "rank_worst": None,
        "votes": votes,
        "wins": wins,
        "elo": rating,
        "last_vote_id": vote_id,
        "last_decision": last_decision,
        "input_sha256": None,
        "notes": {},
        "updated_at": now,
    }


def _live_elo(session: Session, last_vote_id: int) -> dict[str, float] | None:
    """By model; None where the cache is not right up to the last vote."""
    live = queries.cached_ratings(session, *LIVE_ELO)
    now = (last_vote_id, queries.last_decision(session))
    if not live or any((rating.last_vote_id, rating.last_decision) != now for _, rating in live):
        return None
    return {name: rating.elo for name, rating in live}


ROW_COLUMNS = ("rating", "lower", "upper", "rank_best", "rank_worst", "votes", "wins", "elo")


def _cached_board(session: Session, method: str, ci: str, last_vote_id: int) -> Board | None:
    """What `_keep` kept, if it has seen the last vote and was made by this version."""
    cached = queries.cached_ratings(session, method, ci)
    now = (last_vote_id, queries.last_decision(session), VERSION)
    if not cached or any(
        (rating.last_vote_id, rating.last_decision, rating.notes.get("version")) != now or "row" not in rating.notes
        for _, rating in cached
    ):
        return None
    rows = [rating.notes["row"] | {"model": name} for name, rating in cached]
    return Board.from_dict(cached[0][1].notes | {"rows": rows})


def _keep(
    session: Session, made: Board, model_ids: dict[str, int], last_vote_id: int, last_decision: int, now: datetime
) -> None:
    """Unless a recount came since: its rows would stay for ever beside those of the boards after it."""
    queries.lock_votes(session)
    if queries.last_decision(session) != last_decision:
        return
    whole = made.as_dict()
    rows = whole.pop("rows")
    queries.save_ratings(
        session,
        [
            {
                "model_id": model_ids[row["model"]],
                "method": made.method,
                "ci": made.ci,
                "last_vote_id": last_vote_id,
                "last_decision": last_decision,
                "input_sha256": made.input_sha256,
                "notes": whole | {"row": row},
                "updated_at": now,
                **{column: row[column] for column in ROW_COLUMNS},
            }
            for row in rows
        ],
    )
    queries.save_ratings(
        session,
        [
            _live_elo_row(model_ids[row.model], row.elo, row.votes, row.wins, last_vote_id, last_decision, now)
            for row in made.rows
        ],
    )
