"""What each claim's allocation gives it, so that two claims for one device can be told apart."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.create_table(
        "allocations",
        sa.Column("claim_uid", sa.Text, primary_key=True, nullable=False),
        sa.Column("driver", sa.Text, primary_key=True, nullable=False),
        sa.Column("ordinal", sa.Integer, primary_key=True, nullable=False),
        sa.Column("pool", sa.Text, nullable=False),
        sa.Column("device", sa.Text, nullable=False),
        sa.Column("share_id", sa.Text),
        sa.Column("request", sa.Text, nullable=False),
        sa.Column(
            "admin_access",
            sa.Integer,
            sa.CheckConstraint("admin_access IN (0, 1)", name="admin_access"),
            nullable=False,
        ),
        sa.ForeignKeyConstraint(
            ["claim_uid", "driver"],
            ["claim_drivers.claim_uid", "claim_drivers.driver"],
            ondelete="CASCADE",
        ),
        sqlite_with_rowid=False,
    )
    # The older ledger knew only what drivers answered. That is what the claims hold; whether one is
    # for admin access is learned when it is prepared again.
    op.execute(
        "INSERT INTO allocations"
        " (claim_uid, driver, ordinal, pool, device, share_id, request, admin_access)"
        " SELECT claim_uid, driver, ordinal, pool, device, share_id,"
        " coalesce(json_extract(request_names, '$[0]'), ''), 0 FROM devices"
        " WHERE claim_uid IN (SELECT uid FROM claims WHERE status != 'UNPREPARED')"
    )
