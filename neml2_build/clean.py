"""What of a project's outputs may be removed, and its removal. The store is not touched."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from neml2_build.errors import RequestError

if TYPE_CHECKING:
    from neml2_build.build import Build

_STAGES = ("parse", "export", "lower-cpu", "lower-cuda", "package", "stub", "verify")


def removable(build: Build, names: Iterable[str]) -> list[tuple[str, list[Path]]]:
    """Each target named (all of the manifest by default) with the paths that a build published of it.

    Raises `RequestError` for a name that neither the manifest nor an earlier build knows.
    """
    known = set(build.records.targets())
    chosen: list[str] = []
    for name in names:
        chosen += [name] if name in known and name not in build.runs else [run.target.name for run in build.select([name])]
    if not list(names):
        chosen = list(build.runs)
    return [(name, _published(build, name)) for name in dict.fromkeys(chosen)]


def _published(build: Build, name: str) -> list[Path]:
    paths = [build.output / name, build.output / f"{name}_aoti.i"]
    return [path for path in paths if path.exists() and (path.is_file() or (path / "metadata.json").exists())]


def remove(build: Build, name: str, paths: list[Path]) -> None:
    """Remove *paths* and the records of the target *name*."""
    import shutil

    try:
        for path in paths:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    except OSError as error:
        raise RequestError(f"cannot remove: {error.strerror}", file=error.filename) from None
    build.records.forget(name, _STAGES)
    if name in build.runs:
        build.runs[name].forget()
    build.snapshot.entries.pop(name, None)
