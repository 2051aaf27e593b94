"""The schema.

``ledger``         One row about the file itself: who it belongs to, in which boot it was last
opened,
                   when it was last closed in good order. Written at open and close. Never deleted.
``claims``         One row per ResourceClaim UID that was ever prepared here, until retention
removes
                   it. ``status`` follows from the claim's drivers and pods and is stored so that a
                   reader needs no code of ours. ``epoch`` counts how often the claim came back
                   after it had been unprepared. Written by every change; deleted by retention
                   alone, and only while UNPREPARED (then a *tombstone*).
``claim_drivers``  One row per driver of a claim: the state machine, and what the next call owes.
                   Goes with its claim, or is replaced when the claim comes back.
``devices``        The driver's last complete answer, a row per device. Replaced whole; kept on a
                   tombstone as history. The two lists are JSON arrays of strings because nothing
                   queries into them: they go to the runtime as they came.
``allocations``    What the claim's allocation gave it at a driver when it was last prepared, a row
                   per device. Written before the driver is called, so that it is known who holds a
                   device even when no answer came. Goes the way of ``devices``.
``pods``           Pods that hold at least one claim. Goes with the pod's last reference.
``claim_pods``     Which pod holds which claim. ``releasing`` = 1: the pod has asked to let go and
not
                   every driver has confirmed. Deleted when they all have.
``events``         What happened, in order. Only ever appended to; retention removes the oldest
rows.
                   Names and UIDs are copied, not referenced: history outlives what it speaks of.

Instants are UTC, ISO 8601 with six fraction digits and a ``Z``, so that they sort as text and can
be read without us. Revisions of this schema are in ``migrations/``; `SCHEMA_REVISION` is the
newest.
"""

from __future__ import annotations

from sqlalchemy import (
    CheckConstraint,
    Column,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    MetaData,
    Table,
    Text,
    text,
)

#: The schema this code reads and writes. Revisions are numbered, so that "newer" can be told.
SCHEMA_REVISION = "0002"

#: ``PRAGMA application_id`` of a claim ledger: "DRAS". Tells a ledger from any other SQLite file.
APPLICATION_ID = 0x44524153

_STATES = "'PREPARING', 'PREPARED', 'UNPREPARING', 'UNPREPARED'"

metadata = MetaData()

ledger = Table(
    "ledger",
    metadata,
    Column("id", Integer, CheckConstraint("id = 1", name="one_row"), primary_key=True),
    Column("uuid", Text, nullable=False),
    Column("node_name", Text, nullable=False),
    Column("created_at", Text, nullable=False),
    Column("opened_at", Text, nullable=False),
    Column("boot_id", Text),
    Column("last_clean_stop", Text),
)

claims = Table(
    "claims",
    metadata,
    Column("uid", Text, primary_key=True, nullable=False),
    Column("namespace", Text, nullable=False),
    Column("name", Text, nullable=False),
    Column(
        "status",
        Text,
        CheckConstraint(f"status IN ({_STATES})", name="known_status"),
        nullable=False,
    ),
    Column("epoch", Integer, nullable=False),
    Column("created_at", Text, nullable=False),
    Column("changed_at", Text, nullable=False),
    # People find a claim by its name.
    Index("claims_by_name", "namespace", "name"),
    # Retention takes tombstones oldest first, without looking at live claims.
    Index("claims_tombstones", "changed_at", sqlite_where=text("status = 'UNPREPARED'")),
    sqlite_with_rowid=False,
)

claim_drivers = Table(
    "claim_drivers",
    metadata,
    Column("claim_uid", Text, ForeignKey("claims.uid", ondelete="CASCADE"), primary_key=True),
    Column("driver", Text, primary_key=True, nullable=False),
    Column(
        "state", Text, CheckConstraint(f"state IN ({_STATES})", name="known_state"), nullable=False
    ),
    Column("since", Text, nullable=False),
    Column("called", Integer, CheckConstraint("called IN (0, 1)", name="called"), nullable=False),
    Column(
        "unanswered",
        Integer,
        CheckConstraint("unanswered IN (0, 1)", name="unanswered"),
        nullable=False,
    ),
    Column("attempts", Integer, nullable=False),
    Column("failing_since", Text),
    Column("last_error", Text),
    Column("boot_id", Text),
    Column("skip_prepare", Integer, nullable=False),
    Column("skip_unprepare", Integer, nullable=False),
    Column("confirmed_at", Text),
    sqlite_with_rowid=False,
)

devices = Table(
    "devices",
    metadata,
    Column("claim_uid", Text, primary_key=True, nullable=False),
    Column("driver", Text, primary_key=True, nullable=False),
    Column("ordinal", Integer, primary_key=True, nullable=False),
    Column("pool", Text, nullable=False),
    Column("device", Text, nullable=False),
    Column("share_id", Text),
    Column(
        "request_names",
        Text,
        CheckConstraint("json_type(request_names) = 'array'", name="request_names"),
        nullable=False,
    ),
    Column(
        "cdi_device_ids",
        Text,
        CheckConstraint("json_type(cdi_device_ids) = 'array'", name="cdi_device_ids"),
        nullable=False,
    ),
    ForeignKeyConstraint(
        ["claim_uid", "driver"],
        ["claim_drivers.claim_uid", "claim_drivers.driver"],
        ondelete="CASCADE",
    ),
    sqlite_with_rowid=False,
)

allocations = Table(
    "allocations",
    metadata,
    Column("claim_uid", Text, primary_key=True, nullable=False),
    Column("driver", Text, primary_key=True, nullable=False),
    Column("ordinal", Integer, primary_key=True, nullable=False),
    Column("pool", Text, nullable=False),
    Column("device", Text, nullable=False),
    Column("share_id", Text),
    Column("request", Text, nullable=False),
    Column(
        "admin_access",
        Integer,
        CheckConstraint("admin_access IN (0, 1)", name="admin_access"),
        nullable=False,
    ),
    ForeignKeyConstraint(
        ["claim_uid", "driver"],
        ["claim_drivers.claim_uid", "claim_drivers.driver"],
        ondelete="CASCADE",
    ),
    sqlite_with_rowid=False,
)

pods = Table(
    "pods",
    metadata,
    Column("uid", Text, primary_key=True, nullable=False),
    Column("namespace", Text, nullable=False),
    Column("name", Text, nullable=False),
    sqlite_with_rowid=False,
)

claim_pods = Table(
    "claim_pods",
    metadata,
    Column("claim_uid", Text, ForeignKey("claims.uid", ondelete="CASCADE"), primary_key=True),
    Column("pod_uid", Text, ForeignKey("pods.uid"), primary_key=True, nullable=False),
    Column(
        "releasing",
        Integer,
        CheckConstraint("releasing IN (0, 1)", name="releasing"),
        nullable=False,
    ),
    Index("claim_pods_by_pod", "pod_uid"),
    sqlite_with_rowid=False,
)

events = Table(
    "events",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("at", Text, nullable=False),
    Column("kind", Text, nullable=False),
    Column("claim_uid", Text),
    Column("claim", Text),
    Column("pod_uid", Text),
    Column("pod", Text),
    Column("driver", Text),
    Column("attempt", Integer),
    Column("duration_ms", Integer),
    Column("detail", Text),
    # AUTOINCREMENT: an id is never used twice, so a reader that follows the history misses nothing
    # after retention has removed the newest rows it saw.
    sqlite_autoincrement=True,
)
