"""`arena leaderboard` as a user types it."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from app.cli import main
from db import queries
from db.connect import Database
from tests.app.votes.formats.samples import SAMPLES
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
    assert list(document)[:6] == ["rows", "votes", "method", "ci", "input_sha256", "version"]
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


def test_what_is_printed_says_how_anyone_gets_it_again(run, tmp_path, capsys):
    (tmp_path / "other votes.csv").write_text("x,y,w\nant,bee,ant\nant,bee,bee\n")
    run("other votes.csv", "--columns", "x,y,w", "--method", "elo", "--json")
    printed = capsys.readouterr().out
    words = shlex.split(json.loads(printed)["command"])
    assert words[:3] == ["arena", "leaderboard", "other votes.csv"]
    assert run(*words[2:]) == 0 and capsys.readouterr().out == printed


def test_format_of_a_file_is_told_by_its_columns(run, tmp_path, capsys):
    (tmp_path / "votes.jsonl").write_text(SAMPLES["lmsys_33k"])
    run("votes.jsonl", "--json")
    document = json.loads(capsys.readouterr().out)
    assert document["votes"] == 4 and "--format lmsys_33k" in document["command"]


def test_choice_that_leaves_nothing_is_no_board_without_votes(run, votes, capsys):
    run(votes, "--min-votes", "1000")
    assert capsys.readouterr().out == "None of the 70 votes is left by this choice.\n"


def test_text_in_place_of_a_name_is_refused_with_its_line(run, tmp_path, capsys):
    (tmp_path / "votes.csv").write_text(f"left,right,winner\n{'a' * 5000},bee,left\n")
    assert run("votes.csv") == 1
    assert "line 2: a model's name of 5,000 characters" in capsys.readouterr().err


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


def test_new_database_has_no_votes_yet(run, database, empty_url, capsys):
    assert run("--database-url", empty_url) == 0
    assert capsys.readouterr().out == "No votes yet.\n"


@pytest.mark.parametrize("words", [(), ("--database-url", "sqlite:///new.db"), ("--data-folder", "elsewhere")])
def test_database_that_is_not_there_is_missed_and_not_made(run, tmp_path, words, capsys):
    assert run(*words) == 1
    assert "there is no database at" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_database_of_the_config_file_is_read(run, tmp_path, capsys):
    (tmp_path / "arena.toml").write_text('[web]\ndatabase_url = "sqlite:///configured.db"\n')
    Database("sqlite:///configured.db").upgrade_to_head()
    assert main(["--config", str(tmp_path / "arena.toml"), "leaderboard"]) == 0
    assert capsys.readouterr().out == "No votes yet.\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("{votes}", "--columns", "a,b"), "three names"),
        (("{votes}", "--columns", "a,b,c"), "'a' missing"),
        (("{votes}", "--method", "elo", "--ci", "sandwich"), "Elo has no sandwich interval"),
        (("{votes}", "--database-url", "sqlite:///x.db"), "not both"),
        (("{votes}", "--data-folder", "x"), "not both"),
        (("--columns", "a,b,c"), "none was given"),
        (("/nowhere/votes.csv",), "cannot read"),
    ],
)
def test_what_cannot_be_done_is_said(run, votes, words, message, capsys):
    assert run(*(word.format(votes=votes) for word in words)) == 1
    out = capsys.readouterr()
    assert out.out == "" and message in out.err


@pytest.mark.parametrize("words", [("--style",), ("--category", "code"), ("--since", "2026-01-01"), ("--cluster",)])
def test_what_a_file_does_not_tell_is_not_made_up(run, votes, words, capsys):
    assert run(votes, *words) == 1
    assert "these votes" in capsys.readouterr().err


def test_every_export_is_printed_whole(run, votes, capsys):
    for name, sign in (("json", '"rows"'), ("csv", "model,rating"), ("md", "| rank |"), ("svg", "<svg ")):
        assert run(votes, "--as", name) == 0
        out = capsys.readouterr().out
        assert out.startswith(sign) or sign in out
        assert "ant" in out and "cat" in out


def test_least_number_of_votes_leaves_models_out(run, votes, capsys):
    run(votes, "--min-votes", "40", "--json")
    assert [row["model"] for row in json.loads(capsys.readouterr().out)["rows"]] == ["ant", "bee"]


def test_position_is_held_constant_and_told(run, tmp_path, capsys):
    (tmp_path / "votes.csv").write_text(
        "left,right,winner\n" + "ant,bee,left\nbee,ant,left\n" * 30 + "ant,bee,right\n" * 9
    )
    run(tmp_path / "votes.csv", "--position", "--json")
    out = capsys.readouterr()
    (effect,) = json.loads(out.out)["effects"]
    assert effect["name"] == "position" and effect["points"] > 100
    assert "position: +" in out.err


OURS_BY_TEXT = [("Write a Python loop", "```python\nfor i in x: pass\n```", "use a loop", "model_a", True)] * 30 + [
    ("What is the capital of this land?", "It is **Paris**", "It is Paris", "model_b", False)
] * 30


def test_file_with_conversations_is_rated_by_category_and_style(run, tmp_path, capsys):
    rows = [
        {"model_a": "ant", "model_b": "bee", "winner": winner, "judge": f"j{i % 7}", "turn": 1, "language": "English",
         "question_id": str(i), "anony": True, "tstamp": 1.7e9 + 86400 * i, "openai_moderation": {},
         "toxic_chat_tag": {},
         "conversation_a": [{"role": "user", "content": prompt}, {"role": "assistant", "content": a}],
         "conversation_b": [{"role": "user", "content": prompt}, {"role": "assistant", "content": b}]}
        for i, (prompt, a, b, winner, _) in enumerate(OURS_BY_TEXT)
    ]  # fmt: skip
    (tmp_path / "votes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    format_of_file = (tmp_path / "votes.jsonl", "--format", "lmsys_33k", "--json")

    def rated(*words):
        assert run(*format_of_file, *words) == 0
        return json.loads(capsys.readouterr().out)

    assert rated()["votes"] == 60
    code = rated("--category", "code")
    assert code["votes"] == 30 and code["rows"][0]["model"] == "ant"
    assert rated("--category", "english", "--cluster")["clustered"]
    assert {effect["name"] for effect in rated("--style")["effects"]} == {"length", "bold"}
    assert rated("--since", "2023-11-20")["votes"] == 54
    assert "--category code" in rated("--category", "code")["command"]
