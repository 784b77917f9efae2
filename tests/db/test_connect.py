"""The connection: transactions, snapshots, waiting, and what is said when the database cannot."""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta, timezone

import pytest
import sqlalchemy
from sqlalchemy import select, text
from sqlalchemy.exc import IntegrityError, StatementError

from db import queries
from db.connect import LOST_AFTER, Database
from db.errors import DatabaseInUse, DatabaseUnavailable
from db.tables import Visitor, Vote
from tests.db.rows import NOW, add_battle, add_models, add_visitor, add_votable_battle

only_sqlite = pytest.mark.parametrize("empty_url", ["sqlite"], indirect=True)
only_postgresql = pytest.mark.parametrize("empty_url", ["postgresql"], indirect=True)


def count(database: Database, table: str) -> int:
    with database.session(read_only=True) as session:
        return session.scalar(text(f"SELECT count(*) FROM {table}"))


def test_block_that_raises_leaves_nothing_behind(database):
    with pytest.raises(RuntimeError), database.session() as session:
        add_visitor(session)
        raise RuntimeError
    assert count(database, "visitors") == 0


def test_rows_can_be_read_after_their_session(database):
    with database.session() as session:
        visitor_id = add_visitor(session)
        battle = add_battle(session, visitor_id, add_models(session, "x", "y"))
    assert (battle.visitor_id, battle.state, battle.created_at) == (visitor_id, "streaming", NOW)


def test_read_only_session_cannot_write(database):
    with pytest.raises(DatabaseUnavailable, match="read-only"), database.session(read_only=True) as session:
        add_visitor(session)
    with database.session() as session:  # and the connection it used is not left so
        add_visitor(session)
    assert count(database, "visitors") == 1


def test_read_only_session_sees_one_snapshot(database):
    with database.session(read_only=True) as session:
        before = session.scalar(text("SELECT count(*) FROM visitors"))
        with database.session() as other:
            add_visitor(other)
        assert session.scalar(text("SELECT count(*) FROM visitors")) == before == 0
    assert count(database, "visitors") == 1


def test_reader_does_not_wait_for_a_writer(connect, database):
    impatient = connect(busy_timeout_seconds=0.05)
    with database.session() as session:
        add_visitor(session)
        assert count(impatient, "visitors") == 0


def test_run_does_its_work_in_a_thread_and_commits(database):
    def work(session, now):
        queries.add_visitor(session, "v", now)
        return threading.current_thread().name

    assert asyncio.run(database.run(work, NOW)).startswith("database")
    assert count(database, "visitors") == 1


def test_cancelled_run_is_committed_whole(database):
    begun, go_on = threading.Event(), threading.Event()

    def work(session):
        add_visitor(session)
        begun.set()
        go_on.wait(30)
        add_visitor(session)

    async def cancel_midway():
        task = asyncio.create_task(database.run(work))
        await asyncio.to_thread(begun.wait, 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel_midway())
    go_on.set()
    database.close()  # waits for the thread
    assert count(database, "visitors") == 2


def test_more_sessions_than_connections_wait_their_turn(connect, database):
    narrow = connect(max_connections=2)

    async def many():
        await asyncio.gather(*(narrow.run(add_visitor) for _ in range(40)))

    asyncio.run(many())
    assert count(database, "visitors") == 40


@only_sqlite
def test_writers_of_one_process_queue_and_keep_no_reader_from_a_thread(connect, database):
    narrow = connect(max_connections=2)
    begun, go_on = threading.Event(), threading.Event()

    def first(session):
        begun.set()
        assert go_on.wait(30)

    async def two_writers_and_a_reader():
        writers = [asyncio.create_task(narrow.run(each)) for each in (first, add_visitor)]
        await asyncio.to_thread(begun.wait, 10)
        async with asyncio.timeout(30):
            seen = await narrow.run(lambda session: session.scalar(text("SELECT 1")), read_only=True)
        assert not any(writer.done() for writer in writers)
        go_on.set()
        await asyncio.gather(*writers)
        return seen

    assert asyncio.run(two_writers_and_a_reader()) == 1
    assert count(database, "visitors") == 1


@only_sqlite
def test_writer_whose_turn_comes_too_late_is_told_so(connect, database):
    impatient, go_on = connect(busy_timeout_seconds=0.5), threading.Event()

    async def one_after_the_other():
        slow = asyncio.create_task(impatient.run(lambda session: go_on.wait(30)))
        late = asyncio.create_task(impatient.run(add_visitor))
        await asyncio.sleep(0)  # both have asked
        await asyncio.sleep(0.6)
        go_on.set()
        return await asyncio.gather(slow, late, return_exceptions=True)

    first, second = asyncio.run(one_after_the_other())
    assert first is True and isinstance(second, DatabaseUnavailable)
    assert count(database, "visitors") == 0


def test_time_without_a_zone_is_refused(database):
    with pytest.raises(StatementError, match="without a zone"), database.session() as session:
        queries.add_visitor(session, "v", datetime(2026, 11, 29))


def test_times_come_back_in_utc(database):
    east = timezone(timedelta(hours=8))
    with database.session() as session:
        queries.add_visitor(session, "v", NOW.astimezone(east))
    with database.session() as session:
        created_at = session.get(Visitor, "v").created_at
    assert created_at == NOW and created_at.tzinfo is UTC


def test_every_character_of_a_prompt_comes_back_and_nul_as_its_symbol(database):
    prompt = "Grüße 🤷🏽‍♀️ 中文 العربية e\u0301 <|im_end|>\r\n\t\x01 \x00 \ufffe \U0010ffff"
    with database.session() as session:
        battle = add_battle(session, add_visitor(session), add_models(session, "x", "y"), prompt=prompt)
    with database.session() as session:
        assert queries.turns_of(session, battle.id)[0].prompt == prompt.replace("\x00", "␀")


@pytest.mark.parametrize(
    "statement",
    [
        "INSERT INTO turns (id, battle_id, number, prompt, created_at) VALUES (1, 'none', 1, '', '2026-11-29')",
        "UPDATE battles SET state = 'won'",
        "UPDATE battles SET model_b_id = model_a_id",
        "UPDATE answers SET state = 'ok'",
        "UPDATE answers SET side = 'c'",
    ],
)
def test_database_itself_refuses_what_makes_no_sense(database, statement):
    with database.session() as session:
        add_battle(session, add_visitor(session), add_models(session, "x", "y"))
    with pytest.raises(IntegrityError), database.session() as session:
        session.execute(text(statement))


def test_wrong_sql_is_a_bug_and_not_called_unavailable(database):
    with pytest.raises(Exception, match="nowhere") as caught, database.session() as session:
        session.execute(text("SELECT * FROM nowhere"))
    assert not isinstance(caught.value, DatabaseUnavailable)


def test_locked_database_is_unavailable_and_keeps_the_battle_votable(connect, database):
    with database.session() as session:
        visitor_id = add_visitor(session)
        battle = add_votable_battle(session, visitor_id, add_models(session, "x", "y"))
    impatient = connect(busy_timeout_seconds=0.1)
    with database.session() as lock:
        queries.advance_battle(lock, battle.id, ("votable",), "votable", NOW)
        with pytest.raises(DatabaseUnavailable, match="locked"), impatient.session() as session:
            queries.cast_vote(session, battle_id=battle.id, visitor_id=visitor_id, kind="a", now=NOW)
    with impatient.session() as session:
        assert queries.find_battle(session, battle.id).state == "votable"
        queries.cast_vote(session, battle_id=battle.id, visitor_id=visitor_id, kind="a", now=NOW)
    assert count(database, "votes") == 1


def test_pool_without_a_free_connection_is_unavailable(connect, database):
    narrow = connect(max_connections=1)
    narrow._engine.pool._timeout = 0.05
    with narrow.session(read_only=True) as session:
        session.execute(text("SELECT 1"))
        with pytest.raises(DatabaseUnavailable, match="in use"), narrow.session() as other:
            other.execute(text("SELECT 1"))


def test_unreachable_server_is_unavailable(tmp_path):
    database = Database(f"postgresql://nobody@/none?host={tmp_path}")
    with pytest.raises(DatabaseUnavailable, match="no connection"), database.session() as session:
        add_visitor(session)
    database.close()


@pytest.mark.parametrize(
    ("path", "message"),
    [("text.db", "not a SQLite database"), ("text.db/below.db", "folder cannot be made"), (".", "cannot be opened")],
)
def test_file_that_cannot_be_a_database_is_unavailable(tmp_path, path, message):
    (tmp_path / "text.db").write_text("This is the story of a file that was no database. " * 100)
    with pytest.raises(DatabaseUnavailable, match=message):
        Database(f"sqlite:///{tmp_path}/{path}").upgrade_to_head()


@only_postgresql
def test_server_that_restarts_is_found_again(connect, database):
    with database.session() as session:
        connection_id = session.scalar(text("SELECT pg_backend_pid()"))
    with connect().session() as session:
        session.execute(text("SELECT pg_terminate_backend(:id)"), {"id": connection_id})
    with database.session() as session:
        add_visitor(session)
    assert count(database, "visitors") == 1


@only_postgresql
def test_server_that_vanished_without_a_word_is_given_up(database):
    with database.session() as session:
        set_up = session.connection().connection.driver_connection.info.get_parameters()
    assert {name: int(set_up[name]) for name in LOST_AFTER} == LOST_AFTER
    assert LOST_AFTER["keepalives_idle"] + 3 * LOST_AFTER["keepalives_interval"] < 30


@only_postgresql
def test_one_website_has_a_database_until_it_ends(connect, database):
    database.claim()
    second = connect(max_connections=1)
    with pytest.raises(DatabaseInUse, match="another arena runs on the database"):
        second.claim()
    with second.session() as session:
        add_visitor(session)
    database.close()
    second.claim()
    with second.session() as session:
        add_visitor(session)


@only_postgresql
def test_connection_lost_midway_is_unavailable(database):
    with pytest.raises(DatabaseUnavailable), database.session() as session:
        add_visitor(session)
        session.execute(text("SELECT pg_terminate_backend(pg_backend_pid())"))
    assert count(database, "visitors") == 0


def test_new_sqlite_file_that_another_process_writes_is_waited_for(tmp_path):
    """SQLite itself gives up at once where the journal mode of such a file is to change."""
    writer = sqlite3.connect(tmp_path / "arena.db", isolation_level=None, check_same_thread=False)
    writer.execute("BEGIN IMMEDIATE")
    threading.Timer(0.3, writer.close).start()
    database = Database(f"sqlite:///{tmp_path}/arena.db")
    database.upgrade_to_head()
    database.close()


def test_sqlite_connections_are_set_up_for_many_processes(tmp_path):
    database = Database(f"sqlite:///{tmp_path}/deep/down/arena.db")
    with database.session() as one, database.session(read_only=True) as two:
        for session in (one, two):
            pragmas = ("journal_mode", "foreign_keys", "busy_timeout", "synchronous")
            assert [session.scalar(text(f"PRAGMA {name}")) for name in pragmas] == ["wal", 1, 5000, 2]
    database.close()


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:", "mysql://localhost/arena"])
def test_database_that_would_forget_or_that_we_do_not_know_is_refused(url):
    with pytest.raises(ValueError, match=r"must be (a file|sqlite)"):
        Database(url)


@pytest.fixture(params=["page limit", "small disk"])
def nearly_full(request, tmp_path) -> Iterator[tuple[Database, Callable[[], None]]]:
    """A SQLite database with little room left, and a function that makes room."""
    if request.param == "page limit":
        database = Database(f"sqlite:///{tmp_path}/arena.db")

        @sqlalchemy.event.listens_for(database._engine, "connect")
        def limit(connection, record):
            connection.execute("PRAGMA max_page_count = 90")

        def make_room():
            with database.session() as session:
                session.execute(text("PRAGMA max_page_count = 2000"))

        yield database, make_room
        database.close()
        return
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"may not mount a small file system: {mounted.stderr.strip()}")
    try:
        database = Database(f"sqlite:///{disk}/arena.db")
        yield database, lambda: subprocess.run(["mount", "-o", "remount,size=8m", disk], check=True)
        database.close()
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


def test_full_disk_takes_no_vote_and_keeps_the_battle_votable(nearly_full):
    database, make_room = nearly_full
    database.upgrade_to_head()
    with database.session() as session:
        visitor_id = add_visitor(session)
        models = add_models(session, "x", "y")
    battles = []
    with pytest.raises(DatabaseUnavailable):
        while True:
            with database.session() as session:
                battle = add_votable_battle(session, visitor_id, models, prompt="?" * 3000)
            battles.append(battle.id)

    def vote(battle_id):
        with database.session() as session:
            queries.cast_vote(session, battle_id=battle_id, visitor_id=visitor_id, kind="a", now=NOW)

    voted, refused = [], None
    for battle_id in battles:
        try:
            vote(battle_id)
            voted.append(battle_id)
        except DatabaseUnavailable as error:
            assert "full" in str(error)
            refused = battle_id
            break
    assert refused, "the disk never became full"
    with database.session(read_only=True) as session:
        assert session.scalar(text("PRAGMA integrity_check")) == "ok"
        assert [vote.battle_id for vote in session.scalars(select(Vote).order_by(Vote.id))] == voted
        assert queries.find_battle(session, refused).state == "votable"
    make_room()
    vote(refused)
    assert count(database, "votes") == len(voted) + 1
