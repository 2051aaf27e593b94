"""Each inspecting command, on each kind of ledger, in each output."""

from __future__ import annotations

import json
import shutil
import sqlite3
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from ledger_samples import C1, C2, C3, C4, C5, P1, P2, T0, held, pod, write_sample

from drastate.cli.info import boot_text, sqlite_note
from drastate.cli.main import main
from drastate.clock import SystemClock
from drastate.ledger.claims import ClaimLedger
from drastate.ledger.tables import SCHEMA_REVISION

Capture = pytest.CaptureFixture[str]
COMMANDS = (["claims"], ["claim", C1], ["pods"], ["events"], ["check"], ["info"])
LISTS = ("claims", "pods", "events")


@pytest.fixture
def ledger(ledger_file: Path) -> str:
    write_sample(ledger_file)
    return str(ledger_file)


def _json(capsys: Capture, *arguments: str) -> Any:
    assert main([*arguments, "-o", "json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("arguments", COMMANDS)
def test_yaml_says_what_json_says(arguments: list[str], ledger: str, capsys: Capture) -> None:
    """The two machine outputs carry the same keys and values."""
    as_json = _json(capsys, *arguments, "--ledger", ledger)
    assert main([*arguments, "--ledger", ledger, "-o", "yaml"]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == as_json


@pytest.mark.parametrize("arguments", COMMANDS)
def test_a_table_goes_to_stdout_and_nothing_to_stderr(
    arguments: list[str], ledger: str, capsys: Capture
) -> None:
    """A sound ledger gives an answer and no remark; no line ends in blanks."""
    assert main([*arguments, "--ledger", ledger]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert said.out.endswith("\n")
    assert all(line == line.rstrip() for line in said.out.splitlines())
    assert all(line.isprintable() for line in said.out.splitlines())


def test_claims_are_listed_in_aligned_columns(ledger: str, capsys: Capture) -> None:
    """One line a claim, without those that were let go."""
    assert main(["claims", "--ledger", ledger]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == [
        *("NAMESPACE", "NAME", "STATUS", "DRIVERS", "DEVICES", "PODS", "AGE", "UID")
    ]
    assert [line.split()[1] for line in lines[1:]] == ["c1", "c2", "c4"]
    assert "gpu.example.com,nic.example.com" in lines[1]
    assert "gpu-0,nic-0" in lines[1]
    assert "p1,p2" in lines[1]
    assert {line.index(uid) for line, uid in zip(lines[1:], (C1, C2, C4), strict=True)} == {
        lines[0].index("UID")
    }


def test_the_keys_of_claims_are_a_promise(ledger: str, capsys: Capture) -> None:
    """The JSON of a claim has these keys and no other; a change breaks users."""
    claims = _json(capsys, "claims", "--ledger", ledger)
    claim = next(each for each in claims if each["uid"] == C1)
    assert list(claim) == [
        *("uid", "namespace", "name", "status", "epoch", "created_at", "changed_at"),
        *("drivers", "pods"),
    ]
    assert claim["created_at"] == "2026-03-01T03:12:07.123456Z"
    assert list(claim["drivers"][0]) == [
        *("driver", "state", "since", "called", "unanswered", "attempts", "failing_since"),
        *("last_error", "boot_id", "skip_prepare", "skip_unprepare", "confirmed_at", "devices"),
    ]
    assert claim["drivers"][0]["devices"] == [
        {
            "pool": "node-a",
            "device": "gpu-0",
            "share_id": None,
            "request_names": ["gpu"],
            "cdi_device_ids": ["gpu.example.com/gpu=gpu-0"],
        }
    ]
    assert claim["pods"][1] == {
        "uid": P2,
        "namespace": "default",
        "name": "p2",
        "releasing": False,
    }


@pytest.mark.parametrize(
    ("arguments", "uids"),
    [
        ([], {C1, C2, C4}),
        (["--all"], {C1, C2, C3, C4, C5}),
        (["--status", "UNPREPARED"], {C3, C5}),
        (["--status", "prepared", "--status", "PREPARING"], {C1, C4}),
        (["--namespace", "lab"], {C4}),
        (["--driver", "nic.example.com"], {C1, C2}),
        (["--pod", "p2"], {C1, C2}),
        (["--pod", f"{P1}", "-n", "default"], {C1}),
        (["--since", "2020-01-01"], {C1, C2, C4}),
        (["--since", "2026-03-01T03:12:08"], set()),
        (["--since", "2026-03-01T05:12:07+02:00"], {C1, C2, C4}),
        (["--driver", "nobody"], set()),
    ],
)
def test_claims_can_be_narrowed(
    arguments: list[str], uids: set[str], ledger: str, capsys: Capture
) -> None:
    """Each option narrows the list."""
    found = _json(capsys, "claims", "--ledger", ledger, *arguments)
    assert {claim["uid"] for claim in found} == uids


def test_since_counts_back_from_now(ledger_file: Path, capsys: Capture) -> None:
    """`--since 2h` sees what changed an hour ago and not what changed a day ago."""
    now = datetime.now(UTC)

    class Past(SystemClock):
        def now(self) -> datetime:
            return now - timedelta(hours=self.hours)

    for hours in (24, 1):
        clock = Past()
        clock.hours = hours  # type: ignore[attr-defined]
        with ClaimLedger(ledger_file, clock=clock) as opened:
            opened.commit([held(f"uid-{hours}", f"h{hours}", pod(P1, "p1"), at=clock.now())])
    for since, names in (("2h", ["h1"]), ("1h30m", ["h1"]), ("2d", ["h1", "h24"]), ("5m", [])):
        found = _json(capsys, "claims", "--ledger", str(ledger_file), "--since", since)
        assert [claim["name"] for claim in found] == names
    events = _json(capsys, "events", "--ledger", str(ledger_file), "--since", "2h")
    assert [event["kind"] for event in events] == ["opened", "closed"]


def test_a_claim_is_shown_with_all_that_matters(ledger: str, capsys: Capture) -> None:
    """Pods, drivers, devices, CDI names, what is owed and the last events are all there."""
    assert main(["claim", C1[:8], "--ledger", ledger]) == 0
    text = capsys.readouterr().out
    for part in (
        f"default/p1 ({P1})",
        "gpu.example.com/gpu=gpu-0",
        "Share ID:",
        "nic.example.com is to be told to unprepare it when its last pod is gone",
        "prepared",
    ):
        assert part in text


def test_a_claim_that_waits_says_for_whom_and_since_when(ledger: str, capsys: Capture) -> None:
    """The reason a pod cannot end is on the page (C26)."""
    shown = _json(capsys, "claim", "default/c2", "--ledger", ledger)
    assert list(shown)[-2:] == ["owed", "events"]
    (owed,) = shown["owed"]
    assert owed == (
        "nic.example.com has not confirmed its unprepare since 2026-03-01T03:17:07Z (attempt 3,"
        " failing since 2026-03-01T03:17:07Z: driver nic.example.com is not registered)"
    )
    assert [event["kind"] for event in shown["events"]] == ["unprepare_failed"]
    assert shown["pods"][0]["releasing"] is True


def test_a_claim_that_was_let_go_owes_nothing(ledger: str, capsys: Capture) -> None:
    """A tombstone tells what the claim had, and that nothing is left to do."""
    assert main(["claim", "c3", "--ledger", ledger]) == 0
    text = capsys.readouterr().out
    assert "Owed:       nothing" in text
    assert "gpu.example.com/gpu=gpu-0" in text
    assert "Pods:       none" in text


def test_control_characters_do_not_reach_the_terminal(ledger: str, capsys: Capture) -> None:
    """A driver's error with colours and line breaks is shown in one plain line."""
    assert main(["claim", "lab/c4", "--ledger", ledger]) == 0
    text = capsys.readouterr().out
    assert "no GPU left\\nwith \\x1b[31mcolour\\x1b[0m" in text
    assert "\x1b" not in text


def test_an_ambiguous_or_unknown_claim_is_status_2(ledger: str, capsys: Capture) -> None:
    """The matches are listed with their UIDs, in one line."""
    assert main(["claim", "c1", "--ledger", ledger]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert C1 in said.err
    assert C5 in said.err
    assert said.err.count("\n") == 1
    assert main(["claim", "nobody", "--ledger", ledger]) == 2
    assert "no claim 'nobody'" in capsys.readouterr().err


def test_pods_say_what_they_wait_for(ledger: str, capsys: Capture) -> None:
    """An ending pod names the driver; the others are starting or ready."""
    assert main(["pods", "--ledger", ledger]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:4] == ["default", "p1", "c1,c4", "starting"]
    assert lines[2].split() == ["default", "p2", "c1,c2", "ending", "nic.example.com", P2]
    found = _json(capsys, "pods", "--ledger", ledger)
    assert list(found[0]) == ["uid", "namespace", "name", "claims"]
    assert found[1]["claims"][1]["waiting_for"] == ["nic.example.com"]
    assert _json(capsys, "pods", "--ledger", ledger, "-n", "lab") == []


def test_events_come_newest_last_and_limited(ledger: str, capsys: Capture) -> None:
    """The newest are kept, and a remark on stderr says that there are more."""
    kinds = [each["kind"] for each in _json(capsys, "events", "--ledger", ledger)]
    assert kinds == ["opened", "prepared", "unprepared", "prepared", "unprepare_failed", "closed"]
    assert main(["events", "--ledger", ledger, "--limit", "1", "-o", "json"]) == 0
    said = capsys.readouterr()
    assert [each["kind"] for each in json.loads(said.out)] == ["closed"]
    assert said.err == "The newest 1; --limit 0 shows all.\n"
    assert main(["events", "--ledger", ledger, "--limit", "6", "-o", "json"]) == 0
    assert capsys.readouterr().err == ""
    assert len(_json(capsys, "events", "--ledger", ledger, "--limit", "0")) == 6


def test_the_keys_of_events_are_a_promise(ledger: str, capsys: Capture) -> None:
    """The JSON of an event has these keys and no other."""
    (event,) = _json(capsys, "events", "--ledger", ledger, "--driver", "nic.example.com")
    assert event == {
        "id": 5,
        "at": "2026-03-01T03:17:07.123456Z",
        "kind": "unprepare_failed",
        "claim_uid": C2,
        "claim": "default/c2",
        "pod_uid": P2,
        "pod": "default/p2",
        "driver": "nic.example.com",
        "attempt": 3,
        "duration_ms": None,
        "detail": "driver nic.example.com is not registered",
    }


@pytest.mark.parametrize(
    ("arguments", "count"),
    [
        (["--claim", "c3"], 2),
        (["--pod", "p1"], 2),
        (["--kind", "OPENED"], 1),
        (["--since", "2026-03-01T03:15"], 1),
        (["--claim", "nobody"], 0),
    ],
)
def test_events_can_be_narrowed(
    arguments: list[str], count: int, ledger: str, capsys: Capture
) -> None:
    """Each option narrows the history."""
    assert len(_json(capsys, "events", "--ledger", ledger, *arguments)) == count


def test_info_says_what_the_ledger_is(ledger: str, capsys: Capture) -> None:
    """Identity, node, state, counts and the version of SQLite (C91)."""
    found = _json(capsys, "info", "--ledger", ledger)
    assert found["path"] == ledger
    assert found["node_name"] == "node-a"
    assert found["schema_revision"] == SCHEMA_REVISION
    assert found["sqlite_version"] == sqlite3.sqlite_version
    assert (found["in_use"], found["pid"], found["closed_cleanly"]) == (False, None, True)
    assert found["boot"] == "other"
    assert found["claims"]["UNPREPARED"] == 2
    assert main(["info", "--ledger", ledger]) == 0
    text = capsys.readouterr().out
    assert "State:            closed\n" in text
    assert sqlite3.sqlite_version in text


def test_info_names_the_manager_of_a_live_ledger(ledger_file: Path, capsys: Capture) -> None:
    """A ledger in use says by which pid, and in which boot."""
    import os

    with ClaimLedger(ledger_file):
        assert main(["info", "--ledger", str(ledger_file.parent)]) == 0
    text = capsys.readouterr().out
    assert f"in use by pid {os.getpid()}" in text
    assert "same (" in text
    assert "in the write-ahead log" in text


@pytest.mark.parametrize(
    ("then", "now", "text"),
    [("a", "a", "same"), ("a", "b", "other"), (None, "b", "unknown"), ("a", None, "unknown")],
)
def test_a_boot_is_the_same_only_when_both_are_known(
    then: str | None, now: str | None, text: str
) -> None:
    """Unknown is not the same (C37)."""
    assert boot_text(then, now) == text


@pytest.mark.parametrize(
    ("version", "is_affected"),
    [
        ((3, 6, 23), False),
        ((3, 7, 0), True),
        ((3, 40, 1), True),
        ((3, 44, 5), True),
        ((3, 44, 6), False),
        ((3, 45, 0), True),
        ((3, 50, 6), True),
        ((3, 50, 7), False),
        ((3, 51, 0), True),
        ((3, 51, 2), True),
        ((3, 51, 3), False),
        ((3, 52, 0), False),
    ],
)
def test_versions_of_sqlite_that_can_lose_a_commit_are_known(
    version: tuple[int, int, int], *, is_affected: bool
) -> None:
    """The range with its two back-ports (C91)."""
    assert (sqlite_note(version) is not None) is is_affected


# --- ledgers that are not as they should be -------------------------------------------------------


@pytest.mark.parametrize("name", LISTS)
def test_an_empty_ledger_has_empty_answers(name: str, ledger_file: Path, capsys: Capture) -> None:
    """Tables say so on stderr; JSON and YAML are empty lists; the status is 0."""
    with ClaimLedger(ledger_file):
        pass
    path = str(ledger_file)
    narrow = ["--claim", "nobody"] if name == "events" else []
    assert main([name, "--ledger", path, *narrow]) == 0
    assert capsys.readouterr() == ("", f"No {name}.\n")
    for form in ("json", "yaml"):
        assert main([name, "--ledger", path, *narrow, "-o", form]) == 0
        assert capsys.readouterr() == ("[]\n", "")


@pytest.mark.parametrize("arguments", COMMANDS)
def test_a_missing_ledger_is_one_line_and_status_2(
    arguments: list[str], tmp_path: Path, capsys: Capture
) -> None:
    """The path and the option to mend it are named; nothing is made."""
    assert main([*arguments, "--ledger", str(tmp_path / "nowhere")]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("drastate: error: there is no claim ledger at")
    assert "--ledger" in said.err
    assert said.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments", COMMANDS)
def test_a_newer_ledger_is_one_line_and_status_2(
    arguments: list[str], tmp_path: Path, capsys: Capture
) -> None:
    """What a newer version wrote is not guessed at."""
    path = tmp_path / "ledger.db"
    write_sample(path)
    connection = sqlite3.connect(path)
    connection.execute("UPDATE alembic_version SET version_num = '0999'")
    connection.commit()
    connection.close()
    assert main([*arguments, "--ledger", str(path)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "newer than this drastate knows" in said.err
    assert said.err.count("\n") == 1


def _text_file(path: Path) -> None:
    path.write_text("[general]\nnothing = here\n" * 50, encoding="utf-8")


def _other_database(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE theirs (x)")
    connection.commit()
    connection.close()


def _first_page_only(path: Path) -> None:
    write_sample(path)
    path.write_bytes(path.read_bytes()[:4096])


def _noise_in_the_tables(path: Path) -> None:
    write_sample(path)
    content = bytearray(path.read_bytes())
    content[4096 : len(content) - 4096] = b"\xa5" * (len(content) - 8192)
    path.write_bytes(content)


@pytest.mark.parametrize(
    "make", [Path.touch, _text_file, _other_database, _first_page_only, _noise_in_the_tables]
)
@pytest.mark.parametrize("arguments", COMMANDS)
def test_what_is_no_ledger_or_damaged_is_status_3(
    arguments: list[str], make: Any, tmp_path: Path, capsys: Capture
) -> None:
    """The file and what is wrong are named, without a stack, and the file is kept (C78)."""
    path = tmp_path / "ledger.db"
    make(path)
    content = path.read_bytes()
    assert main([*arguments, "--ledger", str(path)]) == 3
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    assert str(path) in said.err + said.out
    if arguments != ["check"]:
        assert said.out == ""
        assert said.err.count("\n") == 1
    assert path.read_bytes() == content


@pytest.mark.parametrize("form", ["table", "json"])
def test_a_damaged_row_is_reported_and_the_others_are_shown(
    form: str, tmp_path: Path, capsys: Capture
) -> None:
    """The good claims go to stdout, the bad one to stderr, and the status says damaged (C78)."""
    path = tmp_path / "ledger.db"
    write_sample(path)
    connection = sqlite3.connect(path)
    connection.execute(f"UPDATE claims SET created_at = 'soon' WHERE uid = '{C1}'")
    connection.commit()
    connection.close()
    assert main(["claims", "--ledger", str(path), "-o", form]) == 3
    said = capsys.readouterr()
    assert C2 in said.out
    assert C4 in said.out
    assert f"warning: claim {C1} cannot be read" in said.err
    assert "run `drastate check" in said.err


def test_check_says_ok_or_what_is_wrong(tmp_path: Path, capsys: Capture) -> None:
    """Status 0 with OK, 1 with an error and a remedy, 3 with damage."""
    path = tmp_path / "ledger.db"
    write_sample(path)
    assert main(["check", "--ledger", str(path)]) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[-1] == "OK: 2 info"
    assert "info: claim default/c2" in text
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA ignore_check_constraints = ON")
    connection.execute("INSERT INTO pods VALUES ('pod-x', 'default', 'lonely')")
    connection.commit()
    assert main(["check", "--ledger", str(path)]) == 1
    text = capsys.readouterr().out
    assert "warning: pod default/lonely (pod-x): is recorded, but holds no claim" in text
    assert "  remedy: " in text
    assert text.splitlines()[-1] == "Not sound: 1 warning, 2 info"
    connection.execute(f"UPDATE claims SET status = 'ODD' WHERE uid = '{C1}'")
    connection.commit()
    connection.close()
    assert main(["check", "--ledger", str(path), "-o", "json"]) == 3
    findings = json.loads(capsys.readouterr().out)
    assert list(findings[0]) == ["severity", "subject", "text", "remedy"]
    assert "damage" in {each["severity"] for each in findings}


def test_a_copy_without_its_log_is_warned_of_on_stderr(
    ledger_file: Path, tmp_path: Path, capsys: Capture
) -> None:
    """The answer goes to stdout as ever, the doubt to stderr (C96)."""
    from drastate.ledger.engine import raw_connection

    copy = tmp_path / "copy.db"
    with ClaimLedger(ledger_file) as opened:
        opened.commit([held(C1, "c1", pod(P1, "p1"), at=T0)])
        raw_connection(opened._commits._connection).execute("PRAGMA wal_checkpoint(TRUNCATE)")
        shutil.copyfile(ledger_file, copy)
    assert main(["claims", "--ledger", str(copy), "-o", "json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)[0]["uid"] == C1
    assert said.err.startswith("drastate: warning: the -wal file is missing")
    assert main(["info", "--ledger", str(copy)]) == 0
    assert "not in use, but not closed by its manager" in capsys.readouterr().out
