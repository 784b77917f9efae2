"""Every format reads what its documentation describes, writes it as it was, and says which rows it cannot read."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from app.errors import BadInput
from app.votes.files import guess_format
from app.votes.formats import FORMATS, format_named
from app.votes.formats.any_csv import CsvFormat
from app.votes.formats.records import BadRow, OtherRow, VoteRecord
from app.votes.formats.rows import VotesSource
from tests.app.votes.formats.samples import KINDS, SAMPLES, by_lines, fastchat_log, written
from tests.shared_data import shared_data


def read(tmp_path, name: str, text: str | bytes) -> list:
    path = tmp_path / "votes"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return list(format_named(name).read(VotesSource(path)))


def test_every_format_has_a_sample():
    assert SAMPLES.keys() == FORMATS.keys() - {"arena"}


@pytest.mark.parametrize("name", SAMPLES)
def test_votes_are_of_the_kinds_that_the_rows_say(tmp_path, name):
    assert [record.kind for record in read(tmp_path, name, SAMPLES[name])] == KINDS[name]


@pytest.mark.parametrize("name", SAMPLES)
def test_what_is_read_is_written_as_it_was(tmp_path, name):
    written_again = "".join(format_named(name).write(read(tmp_path, name, SAMPLES[name])))
    assert by_lines(written_again) == by_lines(SAMPLES[name])


@pytest.mark.parametrize("name", SAMPLES)
def test_format_is_told_by_its_columns(tmp_path, name):
    path = tmp_path / "votes"
    path.write_text(SAMPLES[name])
    assert guess_format(path, None).name == name


@pytest.mark.parametrize("name", sorted(SAMPLES.keys() - {"csv", "comparia_reactions"}))
def test_votes_of_another_format_are_written_and_read_as_the_same_votes(tmp_path, name):
    plain = [replace(record, details=None) for record in read(tmp_path, "lmsys_33k", SAMPLES["lmsys_33k"])][:3]
    again = read(tmp_path, name, "".join(format_named(name).write(plain)))
    assert [(r.model_a, r.model_b, r.kind, r.conversation) for r in again] == [
        (r.model_a, r.model_b, r.kind, r.conversation) for r in plain
    ]


@pytest.mark.parametrize("name", sorted(SAMPLES.keys() - {"csv"}))
def test_row_without_a_winner_is_bad_and_no_tie(tmp_path, name):
    rows = by_lines(SAMPLES[name])
    marks = ("winner", "winner_model_a", "liked", "chosen_model_name", "states")
    rows[0] = {key: value for key, value in rows[0].items() if key not in marks}
    found = read(tmp_path, name, written(rows))
    bad = [row for row in found if isinstance(row, BadRow)]
    assert [row.line for row in bad] == [1]
    assert len(found) == len(read(tmp_path, name, SAMPLES[name]))


def test_bad_rows_are_told_with_their_lines(tmp_path):
    lines = SAMPLES["lmsys_33k"].splitlines()
    lines[1] = lines[1].replace('"model_b"', '"nobody"', 1).replace('"winner": "model_b"', '"winner": "who"')
    lines.insert(2, "{broken")
    lines.insert(3, "[]")
    bad = [row for row in read(tmp_path, "lmsys_33k", "\n".join(lines)) if isinstance(row, BadRow)]
    assert [row.line for row in bad] == [2, 3, 4]
    assert "model_b" in bad[0].reason and "not JSON" in bad[1].reason


def test_what_no_database_can_hold_is_a_bad_row(tmp_path):
    rows = by_lines(SAMPLES["lmarena_140k"])
    rows[0]["conversation_a"][1]["content"][0]["text"] = "half \ud83d"
    rows[1]["timestamp"] = "0001-01-01T00:00:00"
    found = read(tmp_path, "lmarena_140k", "".join(json.dumps(row) + "\n" for row in rows))
    assert [type(row) for row in found] == [BadRow, BadRow, VoteRecord, VoteRecord]


def test_name_with_nul_is_a_bad_row_and_a_text_with_it_is_kept_as_it_can_be(tmp_path):
    columns = json.loads(SAMPLES["lmsys_33k"].splitlines()[0])
    (bad,) = read(tmp_path, "lmsys_33k", json.dumps(columns | {"model_a": "a\0b"}))
    assert isinstance(bad, BadRow) and "NUL" in bad.reason
    text = json.dumps(columns).replace("Why is", "\\u0000 is")
    (kept,) = read(tmp_path, "lmsys_33k", text)
    assert kept.conversation[0].prompt.startswith("\N{SYMBOL FOR NULL}")
    assert by_lines("".join(format_named("lmsys_33k").write([kept]))) == [json.loads(text)]


@pytest.mark.parametrize("name", sorted(SAMPLES.keys() - {"csv"}))
def test_number_that_is_no_json_is_a_bad_row(tmp_path, name):
    row = json.loads(SAMPLES[name].splitlines()[0]) | {"extra": [float("nan")]}
    assert [type(each) for each in read(tmp_path, name, json.dumps(row))] == [BadRow]


def test_line_that_is_not_utf8_is_one_bad_row(tmp_path):
    text = SAMPLES["lmsys_33k"].encode().splitlines(keepends=True)
    found = read(tmp_path, "lmsys_33k", text[0] + b"\xff\n" + text[1])
    assert [type(row) for row in found] == [VoteRecord, BadRow, VoteRecord]
    assert found[1].line == 2


def test_lines_of_a_log_that_are_no_votes_are_told_apart_from_bad_ones(tmp_path):
    chat = {"type": "chat", "tstamp": 1.0, "model": "x"}
    found = read(tmp_path, "fastchat_log", written([chat, *fastchat_log()]))
    assert [type(row) for row in found] == [OtherRow] + [VoteRecord] * 4


def test_csv_row_with_line_breaks_is_told_by_the_line_on_which_it_begins(tmp_path):
    text = 'left,right,winner,why\na,b,left,"one\ntwo"\na,b,nobody,x\na,b\n'
    found = read(tmp_path, "csv", text)
    assert [(type(row), row.line) for row in found] == [(VoteRecord, 2), (BadRow, 4), (BadRow, 5)]


def test_json_array_is_read_like_lines(tmp_path):
    rows = by_lines(SAMPLES["lmsys_33k"])
    assert read(tmp_path, "lmsys_33k", json.dumps(rows, indent=1)) == read(tmp_path, "lmsys_33k", written(rows))


def test_parquet_is_refused_with_what_to_do(tmp_path):
    with pytest.raises(BadInput, match="Parquet; write its rows as JSON lines or CSV"):
        read(tmp_path, "lmsys_33k", b"PAR1\x15\x04\n")


def test_thumb_on_both_answers_of_a_model_twice_is_bad(tmp_path):
    rows = by_lines(SAMPLES["comparia_reactions"])
    assert {type(row) for row in read(tmp_path, "comparia_reactions", written([rows[0], rows[0]]))} == {BadRow}


def test_what_a_format_cannot_say_is_told():
    vote = VoteRecord("x", "y", "both_bad")
    assert "tie" in format_named("lmsys_55k").loses(vote)
    assert format_named("lmsys_33k").loses(vote) is None
    assert "not counted" in format_named("csv").loses(replace(vote, counted=False))


def test_real_sample_comes_in_whole_and_goes_out_as_it_was(tmp_path):
    path = shared_data("lmarena_140k_sample/arena_human_preference_sample_100.csv")
    lmarena = format_named("lmarena_140k")
    records = list(lmarena.read(VotesSource(path)))
    assert len(records) == 100
    assert all(isinstance(record, VoteRecord) and record.conversation for record in records)
    assert [json.loads(line) for line in lmarena.write(records)] == [
        columns for _, columns in VotesSource(path).rows(lmarena.kinds)
    ]


def test_real_csv_goes_out_byte_for_byte():
    path = shared_data("llmfao/crowd-comparisons.csv")
    text = "".join(CsvFormat().write(CsvFormat().read(VotesSource(path))))
    assert text.encode() == path.read_bytes()
