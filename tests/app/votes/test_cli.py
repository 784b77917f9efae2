"""`arena votes`: votes come in and go out, and whoever changed one of them is found."""

from __future__ import annotations

import json

import pytest

from app.cli import main
from app.votes.files import import_file
from app.votes.formats import format_named
from db import queries
from db.connect import Database
from tests.app.votes.formats.samples import SAMPLES, by_lines
from tests.db.rows import NOW, add_models, add_visitor, add_votable_battle
from tests.shared_data import shared_data

SAMPLE = "lmarena_140k_sample/arena_human_preference_sample_100"


@pytest.fixture
def arena(tmp_path, capsys):
    """arena("votes", ...) -> (exit status, standard output, standard error), on a data folder of the test's own."""

    def run(*arguments: str, folder: str = "data") -> tuple[int, str, str]:
        data = tmp_path / folder
        data.mkdir(exist_ok=True)
        status = main([*arguments, "--data-folder", str(data)])
        return status, *capsys.readouterr()

    return run


@pytest.fixture
def sample(tmp_path):
    def write(name: str) -> str:
        path = tmp_path / f"{name}.votes"
        path.write_text(SAMPLES[name])
        return str(path)

    return write


@pytest.mark.parametrize("name", SAMPLES)
def test_format_goes_through_the_database_and_out_as_it_was(arena, sample, tmp_path, name):
    assert arena("votes", "import", sample(name))[0] == 0
    out = tmp_path / "out"
    assert arena("votes", "export", "--format", name, "-o", str(out))[0] == 0
    assert by_lines(out.read_text()) == by_lines(SAMPLES[name])
    assert arena("votes", "verify")[0] == 0


def test_real_sample_comes_in_whole(arena):
    status, out, _ = arena("votes", "import", str(shared_data(f"{SAMPLE}.csv")), "--json")
    told = json.loads(out)
    assert (status, told["votes"], told["bad"], told["format"]) == (0, 100, [], "lmarena_140k")
    report = json.loads(arena("votes", "verify", "--json")[1])
    assert (report["whole"], report["votes"], report["counted"]) == (True, 100, 100)


def test_own_format_restores_the_log_with_its_hashes(arena, sample, tmp_path):
    arena("votes", "import", sample("lmsys_33k"))
    first, second = tmp_path / "first", tmp_path / "second"
    arena("votes", "export", "-o", str(first))
    assert arena("votes", "import", str(first), folder="other")[0] == 0
    arena("votes", "export", "-o", str(second), folder="other")
    *votes, heads = first.read_text().splitlines()[1:]
    *restored, own_heads = second.read_text().splitlines()[1:]
    assert restored == votes
    hashes = [json.loads(line)["heads"]["votes"]["chain_hash"] for line in (heads, own_heads)]
    assert hashes[0] == hashes[1]


def test_votes_that_are_here_already_are_counted_and_not_added_twice(arena, sample):
    arena("votes", "import", sample("lmsys_33k"))
    status, out, _ = arena("votes", "import", sample("lmsys_33k"), "--json")
    assert (status, json.loads(out)["votes"], json.loads(out)["already_here"]) == (0, 0, 4)


def test_file_with_a_bad_row_is_refused_whole_and_taken_without_it_when_asked(arena, tmp_path):
    path = tmp_path / "votes.csv"
    path.write_text("left,right,winner\na,b,left\na,b,nobody\n")
    status, _, error = arena("votes", "import", str(path))
    assert status == 1 and "line 3: winner is 'nobody'" in error
    assert json.loads(arena("votes", "verify", "--json")[1])["votes"] == 0
    status, out, error = arena("votes", "import", str(path), "--skip-bad")
    assert status == 0 and out.startswith("1 vote of any CSV") and "line 3: left out" in error


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("created_at", "soon", "created_at"),
        ("created_at", "2026-01-01T00:00:00", "timezone"),
        ("created_at", "0001-01-01T00:00:00+14:00", "year 1"),
        ("created_at", 5, "not a line"),
        ("battle", "f" * 200, "battle"),
        ("number", 0, "number"),
        ("private", "", "private"),
        ("pair_probability", 7, "pair_probability"),
        ("conversation", [{"prompt": "Why?", "a": "half \ud83d", "b": ""}], "half a character"),
        ("conversation", [{"prompt": "Why?", "a": "So."}], "conversation.0.b"),
        ("visitor", 5, "visitor"),
        ("visitor", "v\0", "NUL"),
        ("details", {"more": float("inf")}, "infinite"),
    ],
)
def test_value_that_no_vote_can_have_is_named_with_its_line_and_nothing_is_imported(
    arena, sample, tmp_path, field, value, told
):
    arena("votes", "import", sample("lmsys_33k"))
    path = tmp_path / "votes"
    arena("votes", "export", "-o", str(path))
    first, line, *rest = map(json.loads, path.read_text().splitlines())
    line["vote"][field] = value
    path.write_text("".join(json.dumps(each) + "\n" for each in (first, line, *rest)))
    status, _, error = arena("votes", "import", str(path), folder="other")
    assert status == 1 and "line 2: " in error and told in error
    assert json.loads(arena("votes", "verify", "--json", folder="other")[1])["votes"] == 0


def test_text_with_nul_is_hashed_as_it_is_kept(database, tmp_path):
    said = [{"role": "user", "content": "Why\0?"}, {"role": "assistant", "content": "\0"}]
    row = {"model_a": "ant", "model_b": "bee", "winner": "tie", "conversation_a": said, "conversation_b": said}
    path = tmp_path / "votes"
    path.write_text(json.dumps(row))
    assert import_file(database, path, format_named("lmsys_33k"), str.upper).votes == 1
    with database.session(read_only=True) as session:
        assert queries.verify_log(session, str.upper).faults == ()


def test_number_that_is_no_json_is_told_before_anything_is_imported(arena, tmp_path):
    path = tmp_path / "votes"
    rows = [{"model_a": "ant", "model_b": f"bee{n // 500}", "winner": "tie", "extra": n} for n in range(601)]
    rows[600]["extra"] = float("nan")
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    status, _, error = arena("votes", "import", str(path), "--format", "lmsys_33k")
    assert status == 1 and "line 601: holds NaN" in error
    assert json.loads(arena("votes", "verify", "--json")[1])["votes"] == 0
    assert "ant" not in arena("models", "list", "--retired")[1]


def test_names_of_the_arenas_own_models_are_not_taken_for_the_same(arena, tmp_path):
    arena("models", "add", "ant", "hf:a/b")
    path = tmp_path / "votes.csv"
    path.write_text("left,right,winner\nant,bee,left\n")
    assert "--same-models" in arena("votes", "import", str(path))[2]
    assert arena("votes", "import", str(path), "--same-models")[0] == 0


def edited(line: str) -> str:
    return line.replace('"kind": "a"', '"kind": "b"')


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda lines: [*lines[:1], edited(lines[1]), *lines[2:]], "vote 1 was edited"),
        (lambda lines: [*lines[:2], *lines[3:]], "vote 2 is missing"),
        (lambda lines: [lines[0], lines[2], lines[1], *lines[3:]], "vote 1 stands after vote 2"),
        (lambda lines: [*lines[:4], lines[5]], "the last of the votes is missing"),
        (
            lambda lines: [lines[0], lines[1].replace("Scattering", "Magic"), *lines[2:]],
            "vote 1: its visitor, its texts",
        ),
        (
            lambda lines: [lines[0], lines[1].replace('"counted": true', '"counted": false'), *lines[2:]],
            "vote 1 stands",
        ),
    ],
)
def test_changed_file_is_found_and_the_row_named(arena, sample, tmp_path, change, fault):
    arena("votes", "import", sample("lmsys_33k"))
    path = tmp_path / "votes.jsonl"
    arena("votes", "export", "-o", str(path))
    assert arena("votes", "verify", str(path))[0] == 0
    path.write_text("".join(change(path.read_text().splitlines(keepends=True))))
    status, out, _ = arena("votes", "verify", str(path))
    assert status == 1 and f"FAULT  {fault}" in out


def test_head_that_was_published_is_found_again_or_missed(arena, sample):
    arena("votes", "import", sample("lmsys_33k"))
    head = json.loads(arena("votes", "verify", "--json")[1])["head"]
    arena("votes", "import", sample("csv"))
    assert arena("votes", "verify", "--head", head)[0] == 0
    status, out, _ = arena("votes", "verify", "--head", "0" * 64)
    assert status == 1 and "not the one that was published" in out


def test_decision_of_a_file_is_a_recount_for_boards_made_before_it_came(arena, tmp_path, monkeypatch):
    (tmp_path / "first").mkdir()
    database = Database(f"sqlite:///{tmp_path}/first/arena.sqlite3")
    database.upgrade_to_head()
    with database.session() as session:
        models, visitor = tuple(add_models(session, "ant", "bee")), add_visitor(session)
        for reason in ("", "identity"):
            battle = add_votable_battle(session, visitor, models)
            queries.cast_vote(
                session, battle_id=battle.id, visitor_id=visitor, kind="a", now=NOW, counted=not reason, reason=reason
            )
        assert queries.last_decision(session) == 0
    path = str(tmp_path / "votes.jsonl")
    arena("votes", "export", "-o", path, folder="first")
    monkeypatch.setattr("app.votes.files.BATCH", 1)
    arena("votes", "import", path)
    with Database(f"sqlite:///{tmp_path}/data/arena.sqlite3").session() as session:
        assert queries.last_decision(session) == 1


def test_chance_that_a_file_does_not_tell_stays_unknown(arena, sample, tmp_path):
    arena("votes", "import", sample("lmsys_33k"))
    arena("votes", "export", "-o", str(tmp_path / "votes.jsonl"))
    votes = [json.loads(line).get("vote") for line in (tmp_path / "votes.jsonl").read_text().splitlines()]
    assert {vote["pair_probability"] for vote in votes if vote} == {None}
    assert "not every vote here has the chance" in arena("leaderboard", "--propensity")[2]
