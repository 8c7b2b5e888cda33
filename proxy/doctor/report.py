"""Prints a report for a person, coloured on a terminal and plain in a pipe, or as JSON for a program."""

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from proxy.doctor.facts import Facts
from proxy.doctor.findings import findings_of, is_complete
from proxy.doctor.verdict import Finding, Severity, exit_status, summary

PIPED_COLUMNS = 110
_MARKS = {Severity.OK: "ok", Severity.LIMIT: "limit", Severity.BLOCKER: "STOP"}
_STYLES = {Severity.OK: "green", Severity.LIMIT: "yellow", Severity.BLOCKER: "bold red"}


def report(facts: Facts, console: Console) -> str:
    """Return the verdict and every finding with its cure, as *console* shows it.

    In a pipe the lines are of the same length everywhere, without colours or trailing spaces.
    """
    if not console.is_terminal:
        console.width = PIPED_COLUMNS
    with console.capture() as captured:
        _print(facts, console)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def _print(facts: Facts, console: Console) -> None:
    findings = findings_of(facts)
    verdict = summary(findings, is_complete=is_complete(facts))
    console.print(Text(verdict, style=_STYLES[Severity(exit_status(findings))]))
    console.print()
    table = Table.grid(padding=(0, 2))
    for finding in findings:
        table.add_row(
            Text(_MARKS[finding.severity], style=_STYLES[finding.severity]),
            Text(finding.topic, no_wrap=True),
            _body(finding),
        )
    console.print(table)


def _body(finding: Finding) -> Text:
    body = Text(finding.text)
    if finding.cure:
        body.append("\n-> ", style="bold")
        body.append(finding.cure, style="bold")
    return body


def json_report(facts: Facts) -> str:
    """Return the same as one JSON object: verdict, exit status, findings and facts."""
    findings = findings_of(facts)
    content = {
        "verdict": summary(findings, is_complete=is_complete(facts)),
        "exit_status": exit_status(findings),
        "findings": [
            {
                "topic": f.topic,
                "severity": f.severity.name.lower(),
                "text": f.text,
                "cure": f.cure,
            }
            for f in findings
        ],
        "facts": facts,
    }
    return msgspec.json.format(msgspec.json.encode(content)).decode()
