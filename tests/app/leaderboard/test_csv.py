"""Votes in any CSV file: what is understood, and what is said about the rest."""

from __future__ import annotations

import csv
import hashlib
import os
import threading

import pytest

from app.errors import BadInput
from app.leaderboard.boards import board_from_csv
from app.votes.formats import any_csv
from tests.shared_data import shared_data


@pytest.fixture
def read(tmp_path):
    """The games of a text, as (left, right, score of the left)."""

    def read_text(text: str | bytes, *columns: str) -> list[tuple[str, str, float]]:
        path = tmp_path / "votes.csv"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        games = any_csv.read(path, columns or any_csv.DEFAULT_COLUMNS).games
        return [
            (games.models[left], games.models[right], score)
            for left, right, score in zip(games.left, games.right, games.score, strict=True)
        ]

    return read_text


@pytest.mark.parametrize(
    ("winner", "score"),
    [
        ("left", 1), ("right", 0), ("LEFT", 1), (" Right ", 0), ("model_a", 1), ("model_b", 0), ("ant", 1), ("bee", 0),
        ("tie", 0.5), ("Tie", 0.5), ("draw", 0.5), ("both_bad", 0.5), ("tie (bothbad)", 0.5), ("bothbad", 0.5),
        ("neither", 0.5), ("both bad", 0.5),
    ],
)  # fmt: skip
def test_winner_is_a_side_a_name_or_a_tie(read, winner, score):
    assert read(f"left,right,winner\nant,bee,{winner}\n") == [("ant", "bee", score)]


def test_columns_are_found_by_name_in_any_order_and_their_names_are_winners_too(read):
    text = "id,who won,x,second,first\n1,second,0,bee,ant\n2,first,0,bee,ant\n"
    assert read(text, "first", "second", "who won") == [("ant", "bee", 0), ("ant", "bee", 1)]


@pytest.mark.parametrize("delimiter", any_csv.DELIMITERS)
def test_delimiter_is_the_one_that_fits_the_header(read, delimiter):
    rows = [["left", "right", "winner", "note"], ["ant", "bee", "left", "a, b; c"]]
    text = "\r\n".join(delimiter.join(f'"{field}"' for field in row) for row in rows)
    assert read(text) == [("ant", "bee", 1)]


def test_byte_order_mark_quotes_line_breaks_and_blank_lines_are_understood(read):
    text = '\ufeffleft,right,winner\n"an\nt, the","be""e",left\n\n模型,ant,tie'
    assert read(text) == [("an\nt, the", 'be"e', 1), ("模型", "ant", 0.5)]


def test_long_columns_that_are_not_read_do_no_harm(read):
    assert read(f"left,right,winner,text\nant,bee,left,{'x' * 500_000}\n") == [("ant", "bee", 1)]


def test_bad_rows_are_listed_by_line_and_refuse_the_file(read):
    text = "\n".join(
        [
            "left,right,winner,note",
            "ant,bee,left,",
            "ant,bee,maybe,",
            'ant,bee,left,"two\nlines"',
            "ant,ant,left,",
            ",bee,left,",
            "ant,bee",
            "ant,bee,,",
        ]
    )
    with pytest.raises(BadInput) as caught:
        read(text)
    assert str(caught.value).split("\n")[0].endswith("5 of 7 rows cannot be read, so that none was:")
    assert str(caught.value).split("\n")[1:] == [
        "  line 3: winner is 'maybe', and not left, right, tie, both_bad, 'ant' or 'bee'",
        "  line 6: 'ant' against itself",
        "  line 7: a model has no name",
        "  line 8: has 2 fields and needs 3",
        "  line 9: winner is '', and not left, right, tie, both_bad, 'ant' or 'bee'",
    ]


def test_long_list_of_bad_rows_is_cut_with_its_count(read):
    with pytest.raises(BadInput, match=r"and 980 more$"):
        read("left,right,winner\n" + "ant,bee,?\n" * 1000)


def test_winner_with_two_meanings_is_refused(read):
    with pytest.raises(BadInput, match="line 2: winner 'left' is the name of a model"):
        read("left,right,winner\nant,left,left\n")
    assert read("left,right,winner\nleft,bee,left\n") == [("left", "bee", 1)], "both meanings agree"


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("a,b,winner", "'left' missing, 'right' missing among the columns: a, b, winner"),
        ("left,right,winner,left", "'left' twice among the columns"),
        ("", "the file is empty"),
    ],
)
def test_columns_that_are_not_there_are_named(read, header, message):
    with pytest.raises(BadInput, match=message):
        read(header)


def test_file_that_is_not_text_is_refused_with_its_line(read):
    with pytest.raises(BadInput, match="line 2: not UTF-8"):
        read(b"left,right,winner\n\xff\xfea,b,left\n")


def test_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(BadInput, match=r"cannot read .*none\.csv: No such file"):
        any_csv.read(tmp_path / "none.csv")


def test_pipe_is_read_once_and_hashed_whole(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    text = b"left,right,winner\n" + b"ant,bee,left\n" * 5000
    writer = threading.Thread(target=(tmp_path / "pipe").write_bytes, args=(text,))
    writer.start()
    board = board_from_csv(tmp_path / "pipe")
    writer.join()
    assert (board.votes, board.input_sha256) == (5000, hashlib.sha256(text).hexdigest())


def test_what_is_written_is_read_again(tmp_path):
    rows = [('a"nt, x', "bee\n", "left"), ("模型", "ant", "both_bad")]
    (tmp_path / "votes.csv").write_bytes(any_csv.write(rows))
    games = any_csv.read(tmp_path / "votes.csv").games
    assert games.models == ('a"nt, x', "ant", "bee", "模型")


def test_real_votes_of_two_public_files_are_read_whole():
    llmfao = board_from_csv(shared_data("llmfao/crowd-comparisons.csv"))
    assert (llmfao.votes, llmfao.rows[0].model) == (8931, "GPT 4")
    path = shared_data("lmarena_140k_sample/arena_human_preference_sample_100.csv")
    sample = any_csv.read(path, ("model_a", "model_b", "winner")).games
    with path.open(encoding="utf-8", newline="") as file:
        csv.field_size_limit(any_csv.MAX_FIELD)
        scores = {"model_a": 1, "model_b": 0, "tie": 0.5, "both_bad": 0.5}
        assert sample.score.tolist() == [scores[row["winner"]] for row in csv.DictReader(file)]
