"""Runs the revisions on the connection that the ledger hands over, in the ledger's transaction."""

from alembic import context

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=context.config.attributes.get("target_metadata"),
    # One transaction over all revisions and the version row: death leaves the old schema or the
    # new.
    transaction_per_migration=False,
    transactional_ddl=False,
)
context.run_migrations()
