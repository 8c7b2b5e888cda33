"""Builds the image of deploy/Dockerfile, as a folder: the same steps, on a bare Debian."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from tests.deployment.dockerfile import Copy, Run, Stage
from tests.deployment.namespaces import online, run_in, unpack_debian
from tests.lab.server import REPOSITORY

FileFacts = tuple[int, int, int]


def build_stage(stage: Stage, root: Path, roots: dict[str | None, Path]) -> int:
    """Carry out the steps of a stage at *root*; return how many bytes they have added to its base."""
    unpack_debian(root)
    before = dict(_files(root))
    for step in stage.steps:
        match step:
            case Run():
                (root / step.folder.lstrip("/")).mkdir(parents=True, exist_ok=True)
                with online(root):
                    run_in(root, step.command, step.environment, step.folder)
            case Copy():
                _copy(step, roots[step.source] if step.source else REPOSITORY, root)
    return sum(facts[0] for path, facts in _files(root) if before.get(path) != facts)


def _copy(step: Copy, source: Path, root: Path) -> None:
    target = root / step.target.lstrip("/")
    for name in step.names:
        found = source / name.lstrip("/")
        if found.is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(found, target, symlinks=True, dirs_exist_ok=True, ignore=ignored)
        else:
            target.mkdir(parents=True, exist_ok=True)
            shutil.copy2(found, target)


def _files(root: Path) -> Iterator[tuple[str, FileFacts]]:
    """Yield size, inode and time of every file: one that was written again is in a layer again."""
    for folder, _, names in os.walk(root):
        for name in names:
            status = os.lstat(os.path.join(folder, name))
            path = os.path.relpath(os.path.join(folder, name), root)
            yield path, (status.st_size, status.st_ino, status.st_mtime_ns)
