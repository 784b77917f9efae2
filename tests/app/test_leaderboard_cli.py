"""`arena leaderboard` as a user types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from app.cli import main
from db import queries
from tests.db.rows import NOW, add_models, add_visitor, add_votable_battle

VOTES = "left,right,winner\n" + "ant,bee,left\n" * 30 + "ant,bee,right\n" * 10 + "bee,cat,tie\n" * 30


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Runs the command with the given words in an empty folder; returns its exit code."""
    for name in ("ARENA_CONFIG", "ARENA_DATABASE_URL", "ARENA_DATA_FOLDER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)

    def run_command(*words: str | Path) -> int:
        return main(["leaderboard", *map(str, words)])

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


@pytest.mark.parametrize("words", [(), ("--database-url", "sqlite:///new.db"), ("--data-folder", "elsewhere")])
def test_new_database_has_no_votes_yet(run, words, capsys):
    assert run(*words) == 0
    assert capsys.readouterr().out == "No votes yet.\n"


def test_database_of_the_config_file_is_read(run, tmp_path, capsys):
    (tmp_path / "arena.toml").write_text('[web]\ndatabase_url = "sqlite:///configured.db"\n')
    assert main(["--config", str(tmp_path / "arena.toml"), "leaderboard"]) == 0
    assert (tmp_path / "configured.db").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("{votes}", "--columns", "a,b"), "three names"),
        (("{votes}", "--columns", "a,b,c"), "'a' missing"),
        (("{votes}", "--method", "elo", "--ci", "sandwich"), "Elo has no sandwich interval"),
        (("{votes}", "--database-url", "sqlite:///x.db"), "not both"),
        (("{votes}", "--data-folder", "x"), "not both"),
        (("--columns", "a,b,c"), "none was given"),
        (("--database-url", "mysql://x"), "must be sqlite"),
        (("/nowhere/votes.csv",), "cannot read"),
    ],
)
def test_what_cannot_be_done_is_said(run, votes, words, message, capsys):
    assert run(*(word.format(votes=votes) for word in words)) == 1
    out = capsys.readouterr()
    assert out.out == "" and message in out.err


@pytest.mark.parametrize("words", [("--style",), ("--category", "code"), ("--ci", "none")])
def test_option_that_is_not_there_yet_is_refused(run, votes, words):
    with pytest.raises(SystemExit):
        run(votes, *words)
