"""Migrations build exactly what the tables say, once, and whole."""

from __future__ import annotations

import multiprocessing
import threading

import pytest
import sqlalchemy
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import text

from db import queries, vote_log
from db.connect import MIGRATIONS, Database
from db.errors import DatabaseTooNew
from db.tables import Table, Visitor, Vote
from tests.db.rows import NOW, add_visitor, add_votable_battle


def schema(database: Database) -> dict:
    """All that the database knows of its tables, constraints and indexes, Alembic's own table left out."""
    inspector = sqlalchemy.inspect(database._engine)
    return {
        name: {
            "columns": [{**column, "type": str(column["type"])} for column in inspector.get_columns(name)],
            "key": inspector.get_pk_constraint(name),
            "foreign": by_name(inspector.get_foreign_keys(name)),
            "unique": by_name(inspector.get_unique_constraints(name)),
            "checks": by_name(inspector.get_check_constraints(name)),
            "indexes": by_name(inspector.get_indexes(name)),
        }
        for name in inspector.get_table_names()
        if name != "alembic_version"
    }


def by_name(constraints: list) -> list:
    return sorted(constraints, key=lambda constraint: constraint["name"])


def test_migrations_build_what_the_tables_say(connect):
    database = connect()
    database.upgrade_to_head()
    migrated = schema(database)
    with database._engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), Table.metadata) == []
    with database.session() as session:
        Table.metadata.drop_all(session.connection())
        Table.metadata.create_all(session.connection())
    assert migrated == schema(database)


def test_second_start_changes_nothing(database):
    with database.session() as session:
        add_visitor(session)
    before = schema(database)
    database.upgrade_to_head()
    assert schema(database) == before
    with database.session() as session:
        assert session.scalar(text("SELECT count(*) FROM visitors")) == 1


def test_threads_that_start_at_once_migrate_once(connect):
    databases = [connect() for _ in range(8)]
    failures = []

    def upgrade(database):
        try:
            database.upgrade_to_head()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=upgrade, args=(database,)) for database in databases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    with databases[0].session() as session:
        add_visitor(session)


def _upgrade(url: str) -> None:
    Database(url).upgrade_to_head()


def test_processes_that_start_at_once_migrate_once(empty_url):
    spawn = multiprocessing.get_context("spawn")
    processes = [spawn.Process(target=_upgrade, args=(empty_url,)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]


def test_migration_that_fails_leaves_nothing_behind(connect, monkeypatch):
    database = connect()
    monkeypatch.setattr("alembic.op.create_index", lambda *args, **kwargs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        database.upgrade_to_head()
    assert schema(database) == {}
    monkeypatch.undo()
    database.upgrade_to_head()
    assert "votes" in schema(database)


def test_database_of_a_later_version_is_left_alone(database):
    with database.session() as session:
        session.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(DatabaseTooNew, match="later version"):
        database.upgrade_to_head()


def test_migrations_are_one_line_of_numbered_files():
    files = sorted(path.name for path in (MIGRATIONS / "versions").glob("0*.py"))
    assert [int(name[:4]) for name in files] == list(range(1, len(files) + 1))


VOTE_OF_BEFORE = """
INSERT INTO models (id, name, source, system_prompt, sampling, enabled, created_at)
  VALUES (1, 'alpha', 'path:/a', '', '{}', TRUE, '2026-11-29 12:00:00'),
         (2, 'beta', 'path:/b', '', '{}', TRUE, '2026-11-29 12:00:00');
INSERT INTO visitors (id, created_at) VALUES ('v1', '2026-11-29 12:00:00'), ('v2', '2026-11-29 12:00:00');
INSERT INTO battles
  (id, visitor_id, model_a_id, model_b_id, pair_probability, side_coin, state, created_at, updated_at)
  VALUES ('b1', 'v1', 1, 2, 1.0, FALSE, 'voted', '2026-11-29 12:00:00', '2026-11-29 12:00:00'),
         ('b2', 'v2', 2, 1, 1.0, TRUE, 'voted', '2026-11-29 12:00:00', '2026-11-29 12:00:00');
INSERT INTO turns (id, battle_id, number, prompt, created_at) VALUES (51, 'b1', 1, 'Why?', '2026-11-29 12:00:00');
INSERT INTO answers (id, turn_id, side, attempt, state, text, created_at)
  VALUES (61, 51, 'a', 1, 'failed', '', '2026-11-29 12:00:00'), (62, 51, 'a', 2, 'done', 'So.', '2026-11-29 12:00:00'),
         (63, 51, 'b', 1, 'done', 'Thus.', '2026-11-29 12:00:00');
INSERT INTO votes (battle_id, visitor_id, kind, created_at)
  VALUES ('b1', 'v1', 'a', '2026-11-29 12:00:00.5'), ('b2', 'v2', 'tie', '2026-11-29 12:00:01')
"""


def test_votes_of_the_first_version_are_chained_as_they_stand(connect):
    database = connect()
    database.upgrade_to_head("0001")
    with database.session() as session:
        for statement in VOTE_OF_BEFORE.split(";"):
            session.execute(text(statement.replace(":", r"\:")))
    database.upgrade_to_head()
    with database.session() as session:
        votes = session.scalars(sqlalchemy.select(Vote).order_by(Vote.id)).all()
        assert [(vote.number, vote.counted, vote.kind) for vote in votes] == [(1, True, "a"), (2, True, "tie")]
        assert queries.conversation_of(session, "b1") == [{"prompt": "Why?", "a": "So.", "b": "Thus."}]
        assert queries.verify_log(session, None).faults == ()
        head = queries.log_head(session, vote_log.VOTES)
        assert (head.entries, head.signed_from, head.signature) == (2, 2, None)
        assert len({visitor.public_id for visitor in session.scalars(sqlalchemy.select(Visitor))}) == 2
        assert queries.model_named(session, "alpha").sampling_weight == 1.0
        votable = add_votable_battle(session, "v1", (1, 2))
        assert queries.cast_vote(session, battle_id=votable.id, visitor_id="v1", kind="b", now=NOW).number == 3
        assert queries.verify_log(session, None).faults == ()
