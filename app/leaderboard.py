"""The leaderboard: the board of the votes in the database, or of those in a file.

Votes are facts and ratings a cache. Elo moves with each vote, in the vote's own transaction (`count_vote`). A whole
board is computed when somebody asks and there are votes it has not seen; what was computed is kept in the table of
ratings under the id of the last vote, so that a restart finds it. Both can be thrown away and computed again.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from sqlalchemy.orm import Session

from app.formats import any_csv
from app.ratings import Board, Games, Row, choose_interval, elo, rate
from db import queries
from db.connect import Database
from db.errors import DatabaseUnavailable
from db.tables import Vote
from db.vote_kinds import VOTE_KINDS

logger = logging.getLogger(__name__)

VERSION = version("paged-arena")
WINNERS = {"a": "left", "b": "right"}  # the words of a CSV file for our kinds of vote; the other kinds are words of it
LIVE_ELO = ("elo", "none")  # method and interval under which Elo is kept vote by vote


_computing = threading.Lock()


def utc_now() -> datetime:
    return datetime.now(UTC)


def board_from_csv(
    path: Path,
    columns: tuple[str, str, str] = any_csv.DEFAULT_COLUMNS,
    *,
    method: str = "bt",
    ci: str | None = None,
) -> Board:
    """Raises BadInput for a file that cannot be read whole, ValueError for a method or interval that there is not."""
    choose_interval(method, ci)
    votes = any_csv.read(path, columns)
    return rate(votes.games, method, ci, input_sha256=votes.sha256, version=VERSION)


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
    digest = hashlib.sha256(
        any_csv.write(
            (names[vote.model_a_id], names[vote.model_b_id], WINNERS.get(vote.kind, vote.kind)) for vote in votes
        )
    )
    made = rate(games, method, ci, live_elo=live_elo, input_sha256=digest.hexdigest(), version=VERSION)
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
        (rating.last_vote_id, rating.last_decision, rating.notes["version"]) != now for _, rating in cached
    ):
        return None
    first = cached[0][1]
    return Board(
        rows=tuple(Row(name, *(getattr(rating, column) for column in ROW_COLUMNS)) for name, rating in cached),
        method=method,
        ci=ci,
        input_sha256=first.input_sha256,
        islands=tuple(tuple(island) for island in first.notes["islands"]),
        **{name: first.notes[name] for name in ("votes", "version", "prior_weight", "rounds")},
    )


def _keep(
    session: Session, made: Board, model_ids: dict[str, int], last_vote_id: int, last_decision: int, now: datetime
) -> None:
    notes = {name: getattr(made, name) for name in ("votes", "version", "prior_weight", "islands", "rounds")}
    queries.save_ratings(
        session,
        [
            {
                "model_id": model_ids[row.model],
                "method": made.method,
                "ci": made.ci,
                "last_vote_id": last_vote_id,
                "last_decision": last_decision,
                "input_sha256": made.input_sha256,
                "notes": notes,
                "updated_at": now,
                **{column: getattr(row, column) for column in ROW_COLUMNS},
            }
            for row in made.rows
        ],
    )
    queries.save_ratings(
        session,
        [
            _live_elo_row(model_ids[row.model], row.elo, row.votes, row.wins, last_vote_id, last_decision, now)
            for row in made.rows
        ],
    )
