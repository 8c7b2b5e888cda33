"""The command line, `llama-prefix-cache`, the same as `python -m proxy`."""

import gc
import sys
from importlib import resources

gc.disable()  # imports leave no garbage, and looking for it takes an eighth of the start
try:
    import click

    from proxy import __version__
    from proxy.cli import connect, look, serve, store, trace
    from proxy.cli.command import Commands
except KeyboardInterrupt:  # Ctrl-C in the second that this takes
    raise SystemExit(130) from None
gc.freeze()
gc.enable()


def version_text() -> str:
    """Return version and commit."""
    try:
        commit = resources.files("proxy").joinpath("commit.txt").read_text().strip()
    except OSError:  # the build did not know it
        commit = ""
    return f"llama-prefix-cache {__version__}" + (f" (commit {commit})" if commit else "")


@click.group(
    cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.version_option(__version__, message=version_text())
def main() -> None:
    """A persistent, token-exact prefix cache in front of an unmodified llama-server."""


for command in (
    *(serve.serve, serve.run, serve.warm),
    *(look.doctor, look.config_, connect.connect, look.explain, look.stats),
    *(store.ls, store.pin, store.unpin, store.rm),
    *(store.check, store.export, store.import_, trace.trace, trace.bench),
):
    main.add_command(command)

if __name__ == "__main__":
    main(prog_name="python -m proxy" if sys.argv[0].endswith("__main__.py") else None)
