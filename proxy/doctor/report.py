"""Prints a report for a person, coloured on a terminal and plain in a pipe, or as JSON for a program."""

from collections.abc import Iterable
from itertools import groupby

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from proxy.doctor.findings import findings_of, is_complete
from proxy.doctor.survey_facts import Survey
from proxy.doctor.verdict import Finding, Severity, exit_status, summary

PIPED_COLUMNS = 110
_MARKS = {Severity.OK: "ok", Severity.LIMIT: "limit", Severity.BLOCKER: "STOP"}
_STYLES = {Severity.OK: "green", Severity.LIMIT: "yellow", Severity.BLOCKER: "bold red"}


def report(survey: Survey, console: Console) -> str:
    """Return the verdict and every finding with its cure, as *console* shows it.

    In a pipe the lines are of the same length everywhere, without colours or trailing spaces.
    """
    if not console.is_terminal:
        console.width = PIPED_COLUMNS
    with console.capture() as captured:
        _print(survey, console)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def _print(survey: Survey, console: Console) -> None:
    findings = findings_of(survey)
    verdict = summary(findings, is_complete=is_complete(survey))
    console.print(Text(verdict, style=_STYLES[Severity(exit_status(findings))]))
    has_headings = any(finding.about for finding in findings)
    n_columns = max(len(finding.topic) for finding in findings)
    for about, group in groupby(findings, key=lambda finding: finding.about):
        console.print()
        if has_headings:
            console.print(Text(about or "all", style="bold underline"))
        console.print(_table(group, n_columns))


def _table(findings: Iterable[Finding], n_columns: int) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(width=max(map(len, _MARKS.values())))
    table.add_column(width=n_columns)
    for finding in findings:
        table.add_row(
            Text(_MARKS[finding.severity], style=_STYLES[finding.severity]),
            Text(finding.topic, no_wrap=True),
            _body(finding),
        )
    return table


def _body(finding: Finding) -> Text:
    body = Text(finding.text)
    if finding.cure:
        body.append("\n-> ", style="bold")
        body.append(finding.cure, style="bold")
    return body


def json_report(survey: Survey) -> str:
    """Return the same as one JSON object: verdict, exit status, findings and facts."""
    findings = findings_of(survey)
    content = {
        "verdict": summary(findings, is_complete=is_complete(survey)),
        "exit_status": exit_status(findings),
        "findings": [
            {
                "about": f.about,
                "topic": f.topic,
                "severity": f.severity.name.lower(),
                "text": f.text,
                "cure": f.cure,
            }
            for f in findings
        ],
        "facts": survey,
    }
    return msgspec.json.format(msgspec.json.encode(content)).decode()
