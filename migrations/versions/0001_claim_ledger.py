"""The first claim ledger. The tables stand here as they were then, and import nothing of ours."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

_STATES = "'PREPARING', 'PREPARED', 'UNPREPARING', 'UNPREPARED'"


def upgrade() -> None:
    op.create_table(
        "ledger",
        sa.Column("id", sa.Integer, sa.CheckConstraint("id = 1", name="one_row"), primary_key=True),
        sa.Column("uuid", sa.Text, nullable=False),
        sa.Column("node_name", sa.Text, nullable=False),
        sa.Column("created_at", sa.Text, nullable=False),
        sa.Column("opened_at", sa.Text, nullable=False),
        sa.Column("boot_id", sa.Text),
        sa.Column("last_clean_stop", sa.Text),
    )
    op.create_table(
        "claims",
        sa.Column("uid", sa.Text, primary_key=True, nullable=False),
        sa.Column("namespace", sa.Text, nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column(
            "status",
            sa.Text,
            sa.CheckConstraint(f"status IN ({_STATES})", name="known_status"),
            nullable=False,
        ),
        sa.Column("epoch", sa.Integer, nullable=False),
        sa.Column("created_at", sa.Text, nullable=False),
        sa.Column("changed_at", sa.Text, nullable=False),
        sqlite_with_rowid=False,
    )
    op.create_index("claims_by_name", "claims", ["namespace", "name"])
    op.create_index(
        "claims_tombstones",
        "claims",
        ["changed_at"],
        sqlite_where=sa.text("status = 'UNPREPARED'"),
    )
    op.create_table(
        "claim_drivers",
        sa.Column(
            "claim_uid",
            sa.Text,
            sa.ForeignKey("claims.uid", ondelete="CASCADE"),
            primary_key=True,
        ),
        sa.Column("driver", sa.Text, primary_key=True, nullable=False),
        sa.Column(
            "state",
            sa.Text,
            sa.CheckConstraint(f"state IN ({_STATES})", name="known_state"),
            nullable=False,
        ),
        sa.Column("since", sa.Text, nullable=False),
        sa.Column(
            "called",
            sa.Integer,
            sa.CheckConstraint("called IN (0, 1)", name="called"),
            nullable=False,
        ),
        sa.Column(
            "unanswered",
            sa.Integer,
            sa.CheckConstraint("unanswered IN (0, 1)", name="unanswered"),
            nullable=False,
        ),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("failing_since", sa.Text),
        sa.Column("last_error", sa.Text),
        sa.Column("boot_id", sa.Text),
        sa.Column("skip_prepare", sa.Integer, nullable=False),
        sa.Column("skip_unprepare", sa.Integer, nullable=False),
        sa.Column("confirmed_at", sa.Text),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "devices",
        sa.Column("claim_uid", sa.Text, primary_key=True, nullable=False),
        sa.Column("driver", sa.Text, primary_key=True, nullable=False),
        sa.Column("ordinal", sa.Integer, primary_key=True, nullable=False),
        sa.Column("pool", sa.Text, nullable=False),
        sa.Column("device", sa.Text, nullable=False),
        sa.Column("share_id", sa.Text),
        sa.Column(
            "request_names",
            sa.Text,
            sa.CheckConstraint("json_type(request_names) = 'array'", name="request_names"),
            nullable=False,
        ),
        sa.Column(
            "cdi_device_ids",
            sa.Text,
            sa.CheckConstraint("json_type(cdi_device_ids) = 'array'", name="cdi_device_ids"),
            nullable=False,
        ),
        sa.ForeignKeyConstraint(
            ["claim_uid", "driver"],
            ["claim_drivers.claim_uid", "claim_drivers.driver"],
            ondelete="CASCADE",
        ),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "pods",
        sa.Column("uid", sa.Text, primary_key=True, nullable=False),
        sa.Column("namespace", sa.Text, nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "claim_pods",
        sa.Column(
            "claim_uid",
            sa.Text,
            sa.ForeignKey("claims.uid", ondelete="CASCADE"),
            primary_key=True,
        ),
        sa.Column("pod_uid", sa.Text, sa.ForeignKey("pods.uid"), primary_key=True, nullable=False),
        sa.Column(
            "releasing",
            sa.Integer,
            sa.CheckConstraint("releasing IN (0, 1)", name="releasing"),
            nullable=False,
        ),
        sqlite_with_rowid=False,
    )
    op.create_index("claim_pods_by_pod", "claim_pods", ["pod_uid"])
    op.create_table(
        "events",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("at", sa.Text, nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("claim_uid", sa.Text),
        sa.Column("claim", sa.Text),
        sa.Column("pod_uid", sa.Text),
        sa.Column("pod", sa.Text),
        sa.Column("driver", sa.Text),
        sa.Column("attempt", sa.Integer),
        sa.Column("duration_ms", sa.Integer),
        sa.Column("detail", sa.Text),
        sqlite_autoincrement=True,
    )
