"""``drastate check``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import click

from drastate.cli import output
from drastate.cli.options import inspects, opened
from drastate.errors import LedgerCorruptError
from drastate.ledger.check import Finding, Severity
from drastate.ledger.check import check as check_ledger


@click.command
@inspects
@click.pass_context
def check(context: click.Context, *, ledger: Path, form: str) -> None:
    """Look for damage and contradictions in a ledger. Changes nothing.

    Exit status: 0 when nothing is wrong (info lines may be there), 1 when there are warnings or
    errors, 3 when the ledger is damaged.
    """
    with opened(ledger) as reader:
        findings = check_ledger(reader)
    if form == "table":
        _write(findings)
    else:
        output.write_data(findings, form)
    context.exit(_exit_code(findings))


def _exit_code(findings: Sequence[Finding]) -> int:
    severities = {finding.severity for finding in findings}
    if Severity.DAMAGE in severities:
        return LedgerCorruptError.exit_code
    return int(bool(severities - {Severity.INFO}))


def _write(findings: Sequence[Finding]) -> None:
    for finding in findings:
        line = f"{finding.severity}: {finding.subject}: {finding.text}"
        output.write(output.plain(line))
        if finding.remedy:
            output.write(f"  remedy: {output.plain(finding.remedy)}")
    counts = Counter(finding.severity for finding in findings)
    counted = ", ".join(f"{counts[each]} {each}" for each in Severity if counts[each])
    wrong = len(findings) - counts[Severity.INFO]
    output.write(f"{'Not sound' if wrong else 'OK'}{f': {counted}' if counted else ''}")
