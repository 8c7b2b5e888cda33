"""Print how much of a prompt each mutation leaves, without and with its stabilizers, as Markdown.

python -m tests.lab.clients
"""

from tests.lab.clients.catalogue import ROWS, Row
from tests.lab.clients.rendering import TEMPLATES, kept_share, server_with, template_facts
from tests.lab.server import LlamaServer


def cells(server: LlamaServer, row: Row) -> str:
    facts = template_facts(server)
    before = kept_share(server, row.mutation, frozenset(), facts)
    after = kept_share(server, row.mutation, row.mutation.switches, facts)
    return f"{_written(before)} → {_written(after)}"


def _written(share: float | None) -> str:
    return "refused" if share is None else f"{100 * share:.1f} %"


def main() -> None:
    columns = []
    for template in TEMPLATES:
        with server_with(template) as server:
            columns.append([cells(server, row) for row in ROWS])
    print(f"| row | mutation | {' | '.join(TEMPLATES)} | real clients |")
    print("|" + "---|" * (3 + len(TEMPLATES)))
    for i, row in enumerate(ROWS):
        measured = " | ".join(column[i] for column in columns)
        print(f"| {row.mutation.name} | {row.words} | {measured} | {row.seen} |")


if __name__ == "__main__":
    main()
