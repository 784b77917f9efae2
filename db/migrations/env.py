"""Alembic's entry: migrates over the connection that `Database.upgrade_to_head` hands in, inside its transaction."""

from alembic import context

from db.tables import Table

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Table.metadata,
    transactional_ddl=True,  # ours: SQLite can roll back a table as well, since we begin the transaction ourselves
    render_as_batch=True,
)
context.run_migrations()
