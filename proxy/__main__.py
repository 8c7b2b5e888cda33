"""The command line, `llama-prefix-cache`, the same as `python -m proxy`."""

import sys
from importlib import resources

import click

from proxy import __version__
from proxy.cli.doctor import bench, doctor
from proxy.cli.look import explain, stats
from proxy.cli.serve import run, serve, warm
from proxy.cli.store import check, export, import_, ls, pin, purge, rm, unpin
from proxy.llama.state_file import SUPPORTED_VERSIONS
from proxy.store.index import FORMAT_VERSION

# What `llama-prefix-cache --version` tells: what this is, where it comes from, what it can read.


def find_commit() -> str | None:
    """Return the git commit that the package was built from; None where the build did not know it."""
    try:
        return resources.files("proxy").joinpath("commit.txt").read_text().strip() or None
    except OSError:
        return None


def version_text() -> str:
    """Return version and commit, and the formats of files that this build reads and writes."""
    commit = find_commit()
    built_from = f" (commit {commit})" if commit else ""
    versions = " and ".join(map(str, SUPPORTED_VERSIONS))
    return (
        f"llama-prefix-cache {__version__}{built_from}\n"
        f"llama-server's slot files: versions {versions}\n"
        f"index: format {FORMAT_VERSION}"
    )


# The command line, `llama-prefix-cache`, the same as `python -m proxy`.


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
