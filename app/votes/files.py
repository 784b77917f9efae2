"""Votes between the database and files: every format of `app.votes.formats`, in and out. Knows no command line.

An import adds to the log what the file holds: a row that cannot be read refuses it, unless it is told to leave such
rows out; a vote that is here already is left out and counted. Names that this arena has not become retired models.
"""

from __future__ import annotations

import hashlib
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path

from sqlalchemy.orm import Session

from app.errors import BadInput, NameTaken
from app.votes.formats import Format, format_named, ours
from app.votes.formats.records import BadRow, DecisionRecord, OtherRow, Row, Said, VoteRecord
from app.votes.formats.rows import VotesSource
from db import queries, vote_log
from db.connect import Database
from db.decisions import REASONS
from db.tables import Battle, Visitor, Vote

BATCH = 500  # votes a transaction, so that a running arena need not wait for the whole file
SHOWN = 20
IMPORTED = "imported"  # source of a model that is only a name in a file


@dataclass
class Imported:
    """What an import did."""

    file_sha256: str = ""
    votes: int = 0
    decisions: int = 0
    already_here: int = 0
    no_votes: int = 0  # rows that are no votes, nor want to be
    bad: list[BadRow] = field(default_factory=list)
    new_models: list[str] = field(default_factory=list)


def import_file(
    database: Database,
    path: Path,
    votes_format: Format,
    sign: vote_log.Sign,
    *,
    skip_bad: bool = False,
    same_models: bool = False,
) -> Imported:
    """Reads the file twice: first whether all of it can be read. Raises BadInput or NameTaken, and nothing is changed.

    `same_models`: models of the arena that are named in the file are those of the file.
    """
    done = Imported()
    names: set[str] = set()
    source = VotesSource(path)
    for row in votes_format.read(source):
        if isinstance(row, BadRow):
            done.bad.append(row)
        elif isinstance(row, OtherRow):
            done.no_votes += 1
        elif isinstance(row, VoteRecord):
            names |= {row.model_a, row.model_b}
    if done.bad and not skip_bad:
        raise BadInput(f"{path}: {listed(done.bad)}")
    done.file_sha256 = source.sha256
    with database.session() as session:
        models = _models(session, names, same_models, done)
    rows = iter(votes_format.read(VotesSource(path)))
    numbers: dict[int, int] = {}  # of the file's log: ids here
    told: Counter[str] = Counter()  # a conversation that was voted on twice is two votes
    origin = f"{votes_format.name} sha256:{done.file_sha256}"
    while batch := list(islice(rows, BATCH)):
        with database.session() as session:
            queries.lock_votes(session)
            for row in batch:
                if isinstance(row, VoteRecord) and row.battle:
                    told[row.battle] += 1
                    row = replace(row, battle=_nth(row.battle, told[row.battle]))
                _import(session, row, models, origin, sign, numbers, done)
    return done


def _nth(battle: str, time: int) -> str:
    return battle if time == 1 else hashlib.sha256(f"{battle} {time}".encode()).hexdigest()[:32]


def listed(bad: list[BadRow]) -> str:
    shown = [f"line {row.line}: {row.reason}" for row in bad[:SHOWN]]
    if len(bad) > SHOWN:
        shown.append(f"and {len(bad) - SHOWN:,} more")
    rows = "1 row" if len(bad) == 1 else f"{len(bad):,} rows"
    return "\n  ".join([f"{rows} cannot be read:", *shown])


def _models(session: Session, names: set[str], same_models: bool, done: Imported) -> dict[str, int]:
    known = {model.name: model for model in queries.models(session, retired=True)}
    active = sorted(name for name in names if name in known and known[name].retired_at is None)
    if active and not same_models:
        raise NameTaken(
            f"{', '.join(active)}: this arena has models of these names. If the votes of the file are on the same "
            "models, say so with --same-models; otherwise rename them in the file"
        )
    now = datetime.now(UTC)
    for name in sorted(names - known.keys()):
        known[name] = queries.add_model(session, name=name, source=IMPORTED, now=now, enabled=False)
        queries.retire_model(session, name, now)
        done.new_models.append(name)
    return {name: known[name].id for name in names}


def _import(
    session: Session,
    row: Row,
    models: dict[str, int],
    origin: str,
    sign: vote_log.Sign,
    numbers: dict[int, int],
    done: Imported,
) -> None:
    if isinstance(row, DecisionRecord):
        _decide(session, row, sign, numbers, done)
    if not isinstance(row, VoteRecord):
        return
    if row.battle and queries.battle_exists(session, row.battle):
        done.already_here += 1
        return
    now = datetime.now(UTC)
    vote = queries.import_vote(
        session,
        battle_id=row.battle or uuid.uuid4().hex,
        visitor_id=_visitor(session, row.visitor, row.created_at or now),
        model_ids=(models[row.model_a], models[row.model_b]),
        kind=row.kind,
        created_at=row.created_at or now,
        conversation=[vars(turn) for turn in row.conversation],
        sign=sign,
        salt=row.salt,
        private_digest=row.private if row.private and not row.salt else None,
        pair_probability=row.pair_probability,
        side_coin=row.side_coin,
        imported_from=row.imported_from if row.number else origin,
        details=dict(row.details) if row.details is not None else None,
    )
    done.votes += 1
    if row.number:
        numbers[row.number] = vote.id
    if not row.counted:
        queries.decide(session, [vote], False, "imported", "import", now, note=row.reason or "", sign=sign)


def _visitor(session: Session, public_id: str | None, now: datetime) -> str:
    known = public_id and queries.visitor_called(session, public_id)
    return (known or queries.add_visitor(session, uuid.uuid4().hex, now, public_id=public_id)).id


def _decide(
    session: Session, row: DecisionRecord, sign: vote_log.Sign, numbers: dict[int, int], done: Imported
) -> None:
    """Of votes that came with the same file; those that were here before keep what was decided here.

    Boards may have been made between the transaction of the vote and this one: the decision is a recount for them.
    """
    if row.vote not in numbers:
        return
    vote = session.get(Vote, numbers[row.vote])
    reason = row.reason if row.reason in REASONS else "imported"
    queries.decide(session, [vote], row.counted, reason, row.decided_by, row.created_at, note=row.note, sign=sign)
    done.decisions += 1


# Export


@dataclass
class Exported:
    votes: int = 0
    lost: list[str] = field(default_factory=list)  # what the format could not say, a sentence a vote


def export_lines(session: Session, votes_format: Format, program: str, done: Exported) -> Iterator[str]:
    """The text of a file, line by line, from one snapshot of the database."""
    if votes_format.name == ours.FORMAT.name:
        yield from _ours(session, program, done)
        return
    yield from votes_format.write(_noting(session, votes_format, done))


def _noting(session: Session, votes_format: Format, done: Exported) -> Iterator[VoteRecord]:
    for entry, vote in queries.logged_votes(session):
        record = record_of(session, entry, vote)
        done.votes += 1
        if lost := votes_format.loses(record):
            done.lost.append(f"vote {entry.number} {lost}")
        yield record


def _ours(session: Session, program: str, done: Exported) -> Iterator[str]:
    yield ours.header(program, datetime.now(UTC))
    for entry, vote in queries.logged_votes(session):
        done.votes += 1
        yield ours.vote_line(entry, record_of(session, entry, vote))
    for entry, _ in queries.logged_decisions(session):
        yield ours.decision_line(entry)
    yield ours.heads_line({name: queries.log_head(session, name) for name in (vote_log.VOTES, vote_log.DECISIONS)})


def record_of(session: Session, entry: vote_log.Entry, vote: Vote) -> VoteRecord:
    battle = session.get(Battle, vote.battle_id)
    return VoteRecord(
        model_a=entry.body["model_a"],
        model_b=entry.body["model_b"],
        kind=vote.kind,
        battle=vote.battle_id,
        visitor=session.get(Visitor, vote.visitor_id).public_id,
        created_at=vote.created_at,
        conversation=tuple(Said(**said) for said in queries.conversation_of(session, vote.battle_id)),
        counted=vote.counted,
        reason=vote.not_counted_reason,
        salt=vote.private_salt,
        pair_probability=battle.pair_probability or None,
        side_coin=battle.side_coin,
        imported_from=vote.imported_from,
        number=vote.number,
        private=vote.private_digest,
        details=vote.details,
    )


def guess_format(path: Path, columns: Iterable[str] | None) -> Format:
    """By the columns of the first row. Raises BadInput where no format has them."""
    from app.votes.formats.any_csv import CsvFormat

    if columns:
        return CsvFormat(tuple(columns))
    first = next(iter(VotesSource(path).rows({})), (1, {}))[1]
    names = set() if isinstance(first, BadRow) else first.keys()
    for marks, name in MARKS:
        if set(marks) <= names:
            return format_named(name)
    raise BadInput(
        f"{path}: no format has these columns ({', '.join(sorted(names)) or 'none'}); say which with --format"
    )


MARKS = (  # columns that only this format has; the first that fits
    (("schema", "version"), "arena"),
    (("type", "tstamp"), "fastchat_log"),
    (("winner_model_a", "winner_tie"), "lmsys_55k"),
    (("evaluation_session_id", "winner"), "lmarena_140k"),
    (("judge_hash", "winner"), "lmarena_100k"),
    (("judge", "question_id", "winner"), "lmsys_33k"),
    (("refers_to_model", "liked"), "comparia_reactions"),
    (("chosen_model_name", "both_equal"), "comparia_votes"),
    (("left", "right", "winner"), "csv"),
)
