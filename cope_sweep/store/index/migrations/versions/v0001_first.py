"""The first version of the tables."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Create all tables."""
    op.create_table(
        "counters",
        sa.Column("name", sa.String(length=16), nullable=False),
        sa.Column("value", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name"),
    )
    op.create_table(
        "keys",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("name"),
    )
    op.create_table(
        "locks",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("expires_s", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("name"),
    )
    op.create_table(
        "mirrored",
        sa.Column("tracker", sa.Text(), nullable=False),
        sa.Column("item", sa.String(length=64), nullable=False),
        sa.Column("revision", sa.BigInteger(), nullable=False),
        sa.Column("tracked_id", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("tracker", "item"),
    )
    op.create_table(
        "parts",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("section", sa.String(length=16), nullable=False),
        sa.Column("digest", sa.String(length=32), nullable=False),
        sa.Column("content", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("digest"),
    )
    op.create_table(
        "sweeps",
        sa.Column("sweep_id", sa.String(length=64), nullable=False),
        sa.Column("ablation", sa.Text(), nullable=False),
        sa.Column("title", sa.Text(), nullable=False),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("executor", sa.String(length=16), nullable=False),
        sa.Column("started_ms", sa.BigInteger(), nullable=False),
        sa.Column("ended_ms", sa.BigInteger(), nullable=True),
        sa.Column("runs", sa.Integer(), nullable=False),
        sa.Column("reused", sa.Integer(), nullable=False),
        sa.Column("revision", sa.BigInteger(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("sweep_id"),
    )
    op.create_index("sweeps_by_ablation", "sweeps", ["ablation", "started_ms"], unique=False)
    op.create_table(
        "part_values",
        sa.Column("key", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("part", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("number", sa.Float(), nullable=True),
        sa.Column("text", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(
            ["key"],
            ["keys.id"],
        ),
        sa.ForeignKeyConstraint(
            ["part"],
            ["parts.id"],
        ),
        sa.PrimaryKeyConstraint("key", "part"),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "runs",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("run_id", sa.String(length=16), nullable=False),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("steps", sa.BigInteger(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("worker_id", sa.Text(), nullable=True),
        sa.Column("message", sa.Text(), nullable=True),
        sa.Column("sweep_id", sa.String(length=64), nullable=True),
        sa.Column("parent_id", sa.String(length=16), nullable=True),
        sa.Column("created_ms", sa.BigInteger(), nullable=True),
        sa.Column("updated_ms", sa.BigInteger(), nullable=True),
        sa.Column("ended_ms", sa.BigInteger(), nullable=True),
        sa.Column("revision", sa.BigInteger(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=True),
        sa.Column("expires_s", sa.Float(), nullable=True),
        sa.Column("task_part", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=True),
        sa.Column("model_part", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=True),
        sa.Column("train_part", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=True),
        sa.Column("evaluate_part", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=True),
        sa.Column("metrics", sa.JSON(), nullable=False),
        sa.Column("facts", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(
            ["evaluate_part"],
            ["parts.id"],
        ),
        sa.ForeignKeyConstraint(
            ["model_part"],
            ["parts.id"],
        ),
        sa.ForeignKeyConstraint(
            ["task_part"],
            ["parts.id"],
        ),
        sa.ForeignKeyConstraint(
            ["train_part"],
            ["parts.id"],
        ),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("run_id"),
    )
    op.create_index("runs_by_evaluate", "runs", ["evaluate_part"], unique=False)
    op.create_index("runs_by_id_and_status", "runs", ["run_id", "status"], unique=False)
    op.create_index("runs_by_model", "runs", ["model_part"], unique=False)
    op.create_index("runs_by_owner", "runs", ["owner"], unique=False)
    op.create_index("runs_by_revision", "runs", ["revision"], unique=False)
    op.create_index("runs_by_status", "runs", ["status"], unique=False)
    op.create_index("runs_by_task", "runs", ["task_part"], unique=False)
    op.create_index("runs_by_train", "runs", ["train_part"], unique=False)
    op.create_table(
        "sweep_runs",
        sa.Column("sweep_id", sa.String(length=64), nullable=False),
        sa.Column("ordinal", sa.Integer(), nullable=False),
        sa.Column("run_id", sa.String(length=16), nullable=False),
        sa.Column("row", sa.Text(), nullable=False),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.Column("labels", sa.JSON(), nullable=False),
        sa.Column("reused", sa.Boolean(), nullable=False),
        sa.ForeignKeyConstraint(
            ["sweep_id"],
            ["sweeps.sweep_id"],
        ),
        sa.PrimaryKeyConstraint("sweep_id", "ordinal"),
        sqlite_with_rowid=False,
    )
    op.create_index("sweep_runs_by_run", "sweep_runs", ["run_id", "sweep_id"], unique=False)
    op.create_table(
        "run_values",
        sa.Column("key", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("run", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("number", sa.Float(), nullable=True),
        sa.Column("text", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("key", "run"),
        sqlite_with_rowid=False,
    )
    op.execute("INSERT INTO counters (name, value) VALUES ('revision', 0)")
