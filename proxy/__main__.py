"""The command line, `llama-prefix-cache`, the same as `python -m proxy`."""

import sys

import click

from proxy import __version__
from proxy.commands.bench import bench
from proxy.commands.check import check
from proxy.commands.doctor import doctor
from proxy.commands.explain import explain
from proxy.commands.ls import ls
from proxy.commands.pin import pin, unpin
from proxy.commands.rm import purge, rm
from proxy.commands.run import run
from proxy.commands.serve import serve
from proxy.commands.stats import stats
from proxy.commands.transfer import export, import_
from proxy.commands.warm import warm
from proxy.version import version_text


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, message=version_text())
def main() -> None:
    """A persistent, token-exact prefix cache in front of an unmodified llama-server."""


for command in (
    serve,
    run,
    doctor,
    explain,
    ls,
    pin,
    unpin,
    rm,
    purge,
    check,
    export,
    import_,
    stats,
    warm,
    bench,
):
    main.add_command(command)

if __name__ == "__main__":
    main(prog_name="python -m proxy" if sys.argv[0].endswith("__main__.py") else None)
