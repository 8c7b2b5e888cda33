"""Print how many percent of a prompt each mutation leaves, as Markdown.

python -m tests.lab.clients
"""

from proxy.stabilize.model import SAFE, Name
from tests.lab.clients.catalogue import ROWS, Row
from tests.lab.clients.rendering import TEMPLATES, kept_share, server_with, template_facts
from tests.lab.server import LlamaServer


def cell(server: LlamaServer, row: Row) -> str:
    """Return what is kept with all off, with the safe ones, and with the opt-in ones as well."""
    facts = template_facts(server)
    choices = [frozenset[Name](), SAFE]
    choices += [row.mutation.switches] if row.mutation.opt_in else []
    return " → ".join(_written(kept_share(server, row.mutation, c, facts)) for c in choices)


def _written(share: float | None) -> str:
    return "refused" if share is None else f"{100 * share:.1f}"


def about(row: Row) -> str:
    if row.nothing_to_do:
        return f"{row.words}; nothing can be done: {row.nothing_to_do}"
    names = ", ".join(f"`{name}`" for name in Name if name in row.mutation.opt_in)
    return f"{row.words}; last figure with {names}" if names else row.words


def main() -> None:
    columns = []
    for template in TEMPLATES:
        with server_with(template) as server:
            columns.append([cell(server, row) for row in ROWS])
    print(f"| | mutation | {' | '.join(TEMPLATES)} | real clients |")
    print("|" + "---|" * (3 + len(TEMPLATES)))
    for i, row in enumerate(ROWS):
        measured = " | ".join(column[i] for column in columns)
        print(f"| {row.mutation.name} | {about(row)} | {measured} | {row.seen} |")


if __name__ == "__main__":
    main()
