"""`arena leaderboard` as a user types it."""

from __future__ import annotations

import argparse
import json

import pytest

from app.errors import BadInput
from app.leaderboard_cli import add_parser
from db import queries
from tests.db.rows import NOW, add_models, add_visitor, add_votable_battle

VOTES = "left,right,winner\n" + "ant,bee,left\n" * 30 + "ant,bee,right\n" * 10 + "bee,cat,tie\n" * 30


@pytest.fixture
def run(monkeypatch):
    """Runs the command with the given words; returns its exit code."""
    for name in ("ARENA_CONFIG", "ARENA_DATABASE_URL", "ARENA_DATA_FOLDER"):
        monkeypatch.delenv(name, raising=False)
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers(required=True))

    def run_command(*words: str) -> int:
        args = parser.parse_args(["leaderboard", *map(str, words)])
        return args.run(args)

    return run_command


@pytest.fixture
def votes(tmp_path):
    path = tmp_path / "votes.csv"
    path.write_text(VOTES)
    return path


def test_json_of_a_file_is_one_document_of_the_agreed_shape(run, votes, capsys):
    assert run(votes, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert list(document) == ["rows", "votes", "method", "ci", "input_sha256", "version"]
    assert [row["model"] for row in document["rows"]] == ["ant", "bee", "cat"]
    assert (document["votes"], document["method"], document["ci"]) == (70, "bt", "sandwich")


def test_table_of_a_file_shows_rank_rating_interval_votes_wins_and_elo(run, votes, capsys):
    run(votes, "--method", "elo", "--ci", "bootstrap")
    out = capsys.readouterr()
    assert out.out.splitlines()[0].split() == ["rank", "model", "rating", "95%", "interval", "votes", "wins", "elo"]
    assert "70 votes, Elo, bootstrap intervals" in out.out
    assert "1,000 rounds" in out.err


def test_columns_are_chosen(run, tmp_path, capsys):
    (tmp_path / "other.csv").write_text('x,y,"who, then"\nant,bee,ant\nant,bee,bee\n')
    run(tmp_path / "other.csv", "--columns", 'x,y,"who, then"', "--json")
    assert json.loads(capsys.readouterr().out)["votes"] == 2


def test_without_a_file_the_votes_of_the_database_are_rated(run, empty_url, connect, capsys):
    database = connect()
    database.upgrade_to_head()
    with database.session() as session:
        visitor_id = add_visitor(session)
        battle = add_votable_battle(session, visitor_id, tuple(add_models(session, "ant", "bee")))
        queries.cast_vote(session, battle_id=battle.id, visitor_id=visitor_id, kind="b", now=NOW)
    assert run("--database-url", empty_url, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert [(row["model"], row["votes"], row["elo"]) for row in document["rows"]] == [("bee", 1, 1002), ("ant", 1, 998)]


def test_new_database_has_no_votes_yet(run, tmp_path, capsys):
    assert run("--database-url", f"sqlite:///{tmp_path}/new.db") == 0
    assert capsys.readouterr().out == "No votes yet.\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("{votes}", "--columns", "a,b"), "three names"),
        (("{votes}", "--columns", "a,b,c"), "'a' missing"),
        (("{votes}", "--method", "elo", "--ci", "sandwich"), "Elo has no sandwich interval"),
        (("{votes}", "--database-url", "sqlite:///x.db"), "not both"),
        (("--columns", "a,b,c"), "none was given"),
        (("--database-url", "mysql://x"), "must be sqlite"),
        (("/nowhere/votes.csv",), "cannot read"),
    ],
)
def test_what_cannot_be_done_is_said(run, votes, words, message, capsys):
    with pytest.raises(BadInput, match=message):
        run(*(word.format(votes=votes) for word in words))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("words", [("--style",), ("--category", "code"), ("--ci", "none")])
def test_option_that_is_not_there_yet_is_refused(run, votes, words):
    with pytest.raises(SystemExit):
        run(votes, *words)
