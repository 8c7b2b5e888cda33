"""The command line, `llama-prefix-cache`, the same as `python -m proxy`."""

import sys

import click

from proxy import __version__
from proxy.commands.doctor import doctor
from proxy.commands.explain import explain
from proxy.commands.run import run
from proxy.commands.serve import serve


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="llama-prefix-cache")
def main() -> None:
    """A persistent, token-exact prefix cache in front of an unmodified llama-server."""


main.add_command(serve)
main.add_command(run)
main.add_command(doctor)
main.add_command(explain)

if __name__ == "__main__":
    main(prog_name="python -m proxy" if sys.argv[0].endswith("__main__.py") else None)
