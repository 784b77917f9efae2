"""The connection: one SQLite file or one PostgreSQL server, the same code above either.

A *session* is one transaction: committed when its block ends, rolled back when the block raises. Writers of a SQLite
file queue, those of one process in `run` and those of several at `BEGIN IMMEDIATE`; readers see a snapshot and wait for
nobody. Whatever means "not now" (locked, full, gone) leaves as `DatabaseUnavailable`.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

import alembic.command
import alembic.config
import alembic.util
import sqlalchemy
import sqlalchemy.exc
from sqlalchemy.engine import URL, Connection, Engine, make_url
from sqlalchemy.orm import Session

from db.errors import DatabaseInUse, DatabaseTooNew, DatabaseUnavailable

P = ParamSpec("P")
T = TypeVar("T")

MIGRATIONS = Path(__file__).parent / "migrations"
MIGRATION_LOCK = 0x41524D49  # PostgreSQL's advisory locks are numbers of the database's users' choice
WEBSITE_LOCK = 0x57454253
MIGRATION_TIMEOUT_SECONDS = 60.0
FORGOTTEN_AFTER = "-c tcp_keepalives_idle=10 -c tcp_keepalives_interval=5 -c tcp_keepalives_count=3"  # by the server
LOST_AFTER = {  # libpq's; a server that vanished without a word would hold every thread for a quarter of an hour
    "connect_timeout": 10,  # seconds
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 20_000,  # milliseconds
}


class Database:
    """`url`: sqlite:///relative/or////absolute/file.db, or postgresql://user@host/name. Connects at first use.

    Raises ValueError for an address of another kind, DatabaseUnavailable where a SQLite file's folder cannot be made.
    """

    def __init__(self, url: str, *, busy_timeout_seconds: float = 5.0, max_connections: int = 8):
        self.url = address(url)
        self.is_sqlite = self.url.get_backend_name() == "sqlite"
        make = _sqlite_engine if self.is_sqlite else _postgresql_engine
        self._engine = make(self.url, busy_timeout_seconds, max_connections)
        self._reader = self._engine.execution_options(read_only=True)
        self._threads = ThreadPoolExecutor(max_connections, thread_name_prefix="database")
        # SQLite's own lock is polled, with pauses that grow to a tenth of a second: who waits here goes on at once.
        self._writers = ThreadPoolExecutor(1, thread_name_prefix="database writer") if self.is_sqlite else self._threads
        self._patience_seconds = busy_timeout_seconds
        self._claim: Connection | None = None

    @contextmanager
    def session(self, *, read_only: bool = False) -> Iterator[Session]:
        """One transaction. `read_only` sessions see one snapshot throughout and cannot write.

        Rows read in it may be used after it: nothing is loaded later. Raises DatabaseUnavailable.
        """
        engine = self._reader if read_only else self._engine
        with _named_unavailable(), Session(engine, expire_on_commit=False) as session, session.begin():
            if read_only and not self.is_sqlite:
                session.connection(
                    execution_options={"isolation_level": "REPEATABLE READ", "postgresql_readonly": True}
                )
            yield session

    async def run(
        self,
        function: Callable[Concatenate[Session, P], T],
        /,
        *args: P.args,
        read_only: bool = False,
        **kwargs: P.kwargs,
    ) -> T:
        """Runs `function(session, ...)` in a session of its own, in a thread: the only way from async code to SQL.

        A cancelled caller does not undo it: the transaction ends by itself, committed or not as a whole. Raises
        DatabaseUnavailable, also where those who write before it to a SQLite file take longer than its busy timeout.
        """
        threads = self._threads if read_only else self._writers
        asked = time.monotonic()

        def work() -> T:
            if threads is not self._threads and time.monotonic() - asked > self._patience_seconds:
                raise DatabaseUnavailable("database unavailable: others have been writing to it for too long")
            with self.session(read_only=read_only) as session:
                return function(session, *args, **kwargs)

        return await asyncio.get_running_loop().run_in_executor(threads, work)

    def upgrade_to_head(self, revision: str = "head") -> None:
        """Brings the tables to this version, making them where there are none. Of several processes one does it.

        `revision` stops earlier. All or nothing: a migration that fails leaves the database as it was.
        Raises DatabaseTooNew.
        """
        with self._migration_connection() as connection:
            config = alembic.config.Config(attributes={"connection": connection})
            config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
            try:
                alembic.command.upgrade(config, revision)
            except alembic.util.CommandError as error:
                if "Can't locate revision" not in str(error):
                    raise
                raise DatabaseTooNew(
                    f"the database at {self.url.render_as_string()} was migrated by a later version of Paged Arena "
                    f"({error}); start that version, or give another database"
                ) from error

    @contextmanager
    def _migration_connection(self) -> Iterator[Connection]:
        """A transaction that no other migrating process shares, waited for."""
        with _named_unavailable(), self._engine.connect() as connection:
            if self.is_sqlite:
                connection.exec_driver_sql(f"PRAGMA busy_timeout = {int(MIGRATION_TIMEOUT_SECONDS * 1000)}")
                connection.commit()  # the next statement begins the transaction anew, under the longer timeout
            with connection.begin():
                if not self.is_sqlite:
                    connection.execute(sqlalchemy.select(sqlalchemy.func.pg_advisory_xact_lock(MIGRATION_LOCK)))
                yield connection
            connection.invalidate()  # the pragma goes with it

    def claim(self) -> None:
        """Makes this the one website of a PostgreSQL database until `close`; a SQLite file has that of its data folder.

        A second one would take the turns that stream here for those of a process that has ended. Raises DatabaseInUse.
        """
        if self.is_sqlite:
            return
        with _named_unavailable():
            self._claim = self._engine.connect().execution_options(isolation_level="AUTOCOMMIT")
            self._claim.detach()  # the pool keeps all its connections for other work
            is_ours = self._claim.scalar(sqlalchemy.select(sqlalchemy.func.pg_try_advisory_lock(WEBSITE_LOCK)))
        if not is_ours:
            raise DatabaseInUse(
                f"another arena runs on the database {self.url.render_as_string()}: end it, or give this one another "
                "with --database-url"
            )

    def empty_journal(self) -> None:
        """Moves what SQLite's journal still holds into the file, and empties it: old texts lie in there too.

        Raises DatabaseUnavailable where somebody reads an old snapshot for longer than the busy timeout.
        """
        if self.is_sqlite:
            with self._engine.connect() as connection:
                connection.rollback()
                checkpoint = connection.connection.driver_connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
                is_held, *_ = checkpoint.fetchone()
            if is_held:
                raise DatabaseUnavailable(f"another program has been reading {self.url.database} all the while")

    def close(self) -> None:
        """Waits for what runs, then closes every connection."""
        self._threads.shutdown()
        self._writers.shutdown()
        if self._claim:
            self._claim.close()
        self._engine.dispose()


def address(text: str) -> URL:
    """Raises ValueError for what is no address of a database that we work with."""
    try:
        url = make_url(text)
    except sqlalchemy.exc.ArgumentError as error:
        raise ValueError(f"database must be sqlite:/// or postgresql://, not {text.partition(':')[0]!r}") from error
    if url.drivername in ("postgres", "postgresql", "postgresql+psycopg"):
        return url.set(drivername="postgresql+psycopg")
    if url.get_backend_name() != "sqlite":
        raise ValueError(f"database must be sqlite:/// or postgresql://, not {url.drivername}://")
    if url.database in (None, "", ":memory:"):
        raise ValueError("a SQLite database must be a file: votes in memory would not outlive the process")
    return url


def _sqlite_engine(url: URL, busy_timeout_seconds: float, max_connections: int) -> Engine:
    try:
        Path(url.database).parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DatabaseUnavailable(f"database unavailable: its folder cannot be made ({error})") from error
    engine = sqlalchemy.create_engine(
        url, pool_size=max_connections, max_overflow=0, connect_args={"timeout": busy_timeout_seconds}
    )

    @sqlalchemy.event.listens_for(engine, "connect")
    def prepare(connection: sqlite3.Connection, record) -> None:
        connection.isolation_level = None  # the driver begins nothing by itself; `begin` below does
        _set_wal(connection, busy_timeout_seconds)
        connection.execute("PRAGMA synchronous = FULL")  # a vote that was thanked for survives a power cut
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA secure_delete = ON")  # what was forgotten is overwritten, not only unlinked

    @sqlalchemy.event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        read_only = connection.get_execution_options().get("read_only", False)
        if connection.info.get("read_only") != read_only:  # as its last user left it
            connection.exec_driver_sql(f"PRAGMA query_only = {'ON' if read_only else 'OFF'}")
            connection.info["read_only"] = read_only
        connection.exec_driver_sql("BEGIN" if read_only else "BEGIN IMMEDIATE")

    return engine


def _set_wal(connection: sqlite3.Connection, timeout_seconds: float) -> None:
    """SQLite does not wait for its lock when the journal mode of a new file changes, so that we do."""
    deadline = time.monotonic() + timeout_seconds
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _postgresql_engine(url: URL, busy_timeout_seconds: float, max_connections: int) -> Engine:
    milliseconds = int(busy_timeout_seconds * 1000)
    return sqlalchemy.create_engine(
        url,
        pool_size=max_connections,
        max_overflow=0,
        pool_pre_ping=True,  # a server that was restarted is found again
        connect_args={"options": f"-c timezone=UTC -c lock_timeout={milliseconds} {FORGOTTEN_AFTER}", **LOST_AFTER},
    )


SQLITE_NOT_NOW = {
    sqlite3.SQLITE_BUSY: "locked by another process",
    sqlite3.SQLITE_LOCKED: "locked by another connection",
    sqlite3.SQLITE_FULL: "the disk is full",
    sqlite3.SQLITE_IOERR: "the disk cannot be written or read",
    sqlite3.SQLITE_READONLY: "the file is read-only",
    sqlite3.SQLITE_CANTOPEN: "the file cannot be opened",
    sqlite3.SQLITE_NOTADB: "the file is not a SQLite database",
    sqlite3.SQLITE_CORRUPT: "the file is damaged",
}
POSTGRESQL_NOT_NOW = {  # classes of SQLSTATE
    "08": "no connection to the server",
    "53": "the server is out of disk, memory or connections",
    "55": "locked by another transaction",
    "57": "the server is shutting down or not yet up",
    "58": "the server cannot write or read its disk",
    "40": "two transactions were in each other's way",
    "25006": "the server is read-only",
}


@contextmanager
def _named_unavailable() -> Iterator[None]:
    """What means "not now" as DatabaseUnavailable, with why."""
    try:
        yield
    except (sqlalchemy.exc.DBAPIError, sqlalchemy.exc.TimeoutError) as error:
        reason = _why_unavailable(error)
        if reason is None:
            raise
        raise DatabaseUnavailable(reason) from error


def _why_unavailable(error: sqlalchemy.exc.SQLAlchemyError) -> str | None:
    """The sentence for an error that may pass; None for one that is a bug of ours."""
    if isinstance(error, sqlalchemy.exc.TimeoutError):
        return "database unavailable: all connections are in use"
    cause = error.orig
    if isinstance(cause, sqlite3.Error):
        reason = SQLITE_NOT_NOW.get(getattr(cause, "sqlite_errorcode", 0) & 0xFF)
    elif (
        isinstance(error, sqlalchemy.exc.OperationalError | sqlalchemy.exc.InternalError)
        or error.connection_invalidated
    ):
        state = getattr(cause, "sqlstate", None) or "08"
        reason = POSTGRESQL_NOT_NOW.get(state) or POSTGRESQL_NOT_NOW.get(state[:2])
    else:
        reason = None
    return reason and f"database unavailable: {reason} ({cause})"
