"""`arena votes audit|deduplicate` and `arena visitors`: who is found can be put out, in again, or forgotten."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from datetime import UTC, datetime
from functools import partial
from uuid import uuid4

import pytest

from app.cli import main
from db import queries
from db.connect import Database
from tests.app.votes.voters import add_voters
from tests.db.rows import add_models


@pytest.fixture
def arena(tmp_path, capsys):
    """arena("votes", ...) -> (exit status, the JSON it printed), on two honest visitors and one who votes in bursts."""
    database = Database(f"sqlite:///{tmp_path}/arena.sqlite3")
    database.upgrade_to_head()
    with database.session() as session:
        add_voters(session, tuple(add_models(session, "alpha", "beta")))
    database.close()

    def run(*arguments: str) -> tuple[int, dict]:
        status = main([*arguments, "--json", "--data-folder", str(tmp_path)])
        return status, json.loads(capsys.readouterr().out)

    return run


def counted(arena) -> int:
    _, report = arena("votes", "verify")
    assert [fault for fault in report["faults"] if "signature" not in fault] == []
    return report["counted"]


def test_burst_is_found_put_into_quarantine_and_released(arena):
    status, found = arena("votes", "audit")
    assert status == 1
    assert [(each["visitor"], each["votes"]) for each in found["suspects"]] == [("burst", 12)]
    assert counted(arena) == 36
    assert arena("votes", "audit", "--quarantine")[1]["stopped"] == 12
    assert counted(arena) == 24
    assert arena("votes", "audit")[0] == 0
    assert arena("visitors", "release", "burst")[1]["votes"] == 12
    assert counted(arena) == 36


def test_visitor_is_forgotten_by_the_id_of_exports(arena):
    assert arena("visitors", "forget", "slow")[1]["votes"] == 12
    assert arena("votes", "verify")[1]["forgotten"] == 12
    assert counted(arena) == 36


def test_texts_that_a_reader_keeps_in_the_journal_are_told_and_gone_once_it_has_ended(
    arena, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr("app.votes.cli.Database", partial(Database, busy_timeout_seconds=0.1))
    forget = ["visitors", "forget", "slow", "--data-folder", str(tmp_path)]
    with contextlib.closing(sqlite3.connect(tmp_path / "arena.sqlite3", isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM votes").fetchone()
        assert main(forget) == 1
        told = capsys.readouterr().err
        assert "journal still holds texts" in told and "End that program" in told
        assert main([*forget[:2], "nobody", *forget[3:]]) == 1
        told = capsys.readouterr().err
        assert "there is no visitor nobody; and SQLite's journal still holds" in told
        reader.execute("ROLLBACK")
        assert main(forget) == 1 and "there is no visitor slow" in capsys.readouterr().err
        assert (tmp_path / "arena.sqlite3-wal").stat().st_size == 0
    assert arena("votes", "verify")[1]["forgotten"] == 12


def test_unknown_visitor_is_refused(tmp_path, capsys):
    Database(f"sqlite:///{tmp_path}/arena.sqlite3").upgrade_to_head()
    assert main(["visitors", "forget", "nobody", "--data-folder", str(tmp_path)]) == 1
    assert "there is no visitor nobody" in capsys.readouterr().err


def test_frequent_prompts_are_thinned_and_the_thinning_taken_back(arena):
    assert arena("votes", "deduplicate", "--percentile", "90")[1] == {"stopped": 11, "counted_again": 0}
    assert counted(arena) == 25
    assert arena("votes", "deduplicate", "--percentile", "90")[1] == {"stopped": 0, "counted_again": 0}
    assert arena("votes", "deduplicate", "--percentile", "100")[1] == {"stopped": 0, "counted_again": 11}
    assert counted(arena) == 36


@pytest.mark.parametrize("words", [("votes", "verify"), ("votes", "audit"), ("visitors", "forget", "slow")])
def test_database_that_is_not_there_is_missed_and_not_made(tmp_path, capsys, words):
    assert main([*words, "--data-folder", str(tmp_path / "none")]) == 1
    assert "there is no database at" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("verb", ["audit", "deduplicate"])
def test_votes_are_cast_while_the_others_are_looked_at(arena, tmp_path, monkeypatch, verb):
    def look(*args, **named):
        with Database(f"sqlite:///{tmp_path}/arena.sqlite3", busy_timeout_seconds=0.1).session() as session:
            queries.add_visitor(session, uuid4().hex, datetime.now(UTC))
        return []

    monkeypatch.setattr("app.votes.honesty.anomalous.find", look)
    monkeypatch.setattr("app.votes.honesty.frequent.too_frequent", look)
    arena("votes", verb)


def test_thinned_votes_of_visitors_in_quarantine_or_forgotten_do_not_come_back(arena):
    arena("votes", "deduplicate", "--percentile", "90")
    arena("visitors", "quarantine", "slow")
    assert arena("votes", "deduplicate", "--percentile", "100")[1] == {"stopped": 0, "counted_again": 0}
    arena("visitors", "release", "slow")
    arena("visitors", "forget", "slow")
    assert arena("votes", "deduplicate", "--percentile", "90")[1] == {"stopped": 0, "counted_again": 0}
    assert counted(arena) == 25
