"""Migrations build exactly what the tables say, once, and whole."""

from __future__ import annotations

import multiprocessing
import threading

import pytest
import sqlalchemy
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import text

from db.connect import MIGRATIONS, Database
from db.errors import DatabaseTooNew
from db.tables import Table
from tests.db.rows import add_visitor


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
