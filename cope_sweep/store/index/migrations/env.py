"""Runs migrations on the connection that `database.py` hands over."""

from alembic import context

from cope_sweep.store.index.tables import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata, render_as_batch=True)
context.run_migrations()
