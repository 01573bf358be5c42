"""What a project's last builds left: for each target and stage, what was read and what was made.

A `Record` is the truth about one stage of one target. `Snapshot` is a summary of all targets that were up to date, in one
file: a null build reads it, takes the stat of the files that it names, and is done. On 1,000 targets that is 1 file instead
of 5,000. It is a memory of stats and may be lost at any time.

A stat that was taken within two seconds of the file's last change is not trusted: a later write in the same tick of the file
system's clock would leave it as it is. Such a file is read again by the next build.

Projects may share one store, so records lie in a folder of the project's own, named after its output folder.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from neml2_build.digest import digest, digest_file
from neml2_build.environment import signature
from neml2_build.reasons import Reason

VERSION = 1
_SETTLED_NS = 2_000_000_000


class FileState(msgspec.Struct, frozen=True):
    """A file as it was: path relative to the project where it lies inside; digest; stat, or None where it is not trusted."""

    path: str
    digest: str
    signature: list[int] | None = None


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One stage of one target as it is materialized now.

    Attributes
    ----------
    stage, key, made_of
        What was made, under which key, and what the key was made of.
    inputs, outputs
        Files that were read; files that were published.
    objects
        Name → digest of results in the store.
    reasons
        Why it was made.
    outcome
        ``built`` or ``restored``.
    seconds, time
        How long it took; when it ended, in seconds since 1970.
    info
        What the stage wants to find again.
    """

    stage: str
    key: str
    made_of: dict[str, Any]
    inputs: list[FileState] = []
    outputs: list[FileState] = []
    objects: dict[str, str] = {}
    reasons: list[Reason] = []
    outcome: str = "built"
    seconds: float = 0.0
    time: float = 0.0
    info: dict[str, Any] = {}
    version: int = VERSION


class Entry(msgspec.Struct, array_like=True):
    """A target that was up to date: digests of request and environment, file paths with stats, environment values used."""

    request: str
    environment: str
    files: list[tuple[str, list[int]]]
    variables: dict[str, str | None]


class Project(msgspec.Struct, array_like=True):
    """The project when all of it was up to date: digest of the manifest; folders and files that say what targets there are."""

    manifest: str
    files: list[tuple[str, list[int]]]


class Snapshot(msgspec.Struct):
    """All that a null build needs to know; see the module."""

    version: int = VERSION
    entries: dict[str, Entry] = {}
    memo: dict[str, list] = {}
    models: dict[str, list] = {}
    project: Project | None = None


class Records:
    """The records of one project.

    Parameters
    ----------
    store_root
        Folder of the store.
    output
        Output folder of the project, absolute.
    root
        Folder that paths in records are relative to.
    """

    def __init__(self, store_root: Path, output: Path, root: Path) -> None:
        self.folder = store_root / "targets" / f"{output.name}-{digest(str(output))[:12]}"
        self.root = root
        self._prefix = str(root) + os.sep
        self._known: dict[str, tuple[list[int], Record | None]] = {}
        self._pending: dict[tuple[str, str], Record] | None = None

    def read(self, target: str, stage: str) -> Record | None:
        """The record of *stage* of *target*; None where there is none that this version can read.

        Read once, as long as the file stays the same: a record is never changed in place.
        """
        if self._pending is not None and (record := self._pending.get((target, stage))) is not None:
            return record
        path = f"{self.folder}{os.sep}{target}{os.sep}{stage}.json"
        stat = signature(path)
        if stat is None:
            return None
        known = self._known.get(path)
        if known is not None and known[0] == stat:
            return known[1]
        try:
            record = msgspec.json.decode(Path(path).read_bytes(), type=Record)
        except (OSError, msgspec.MsgspecError):
            return None
        found = record if record.version == VERSION else None
        self._known[path] = stat, found
        return found

    def write(self, target: str, record: Record) -> None:
        """Replace the record of a stage. A store that cannot be written to loses it: the next build looks at contents."""
        if self._pending is not None:
            self._pending[target, record.stage] = record
            return
        with contextlib.suppress(OSError):
            replace(self.folder / target / f"{record.stage}.json", msgspec.json.format(msgspec.json.encode(record)))

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Write what is written meanwhile at the end, many at a time: replacing a file may wait for the disk."""
        self._pending = {}
        try:
            yield
        finally:
            pending, self._pending = self._pending, None
            if pending:
                with ThreadPoolExecutor(min(len(pending), 8)) as pool:
                    list(pool.map(lambda item: self.write(item[0][0], item[1]), pending.items()))

    def forget(self, target: str, stages: Iterable[str]) -> None:
        """Remove the records of *stages* of *target*."""
        for stage in stages:
            with contextlib.suppress(OSError):
                (self.folder / target / f"{stage}.json").unlink()
        with contextlib.suppress(OSError):
            (self.folder / target).rmdir()

    def targets(self) -> list[str]:
        """Names of all targets that have records, also of those that the manifest no longer names."""
        try:
            return sorted(entry.name for entry in os.scandir(self.folder) if entry.is_dir())
        except OSError:
            return []

    def read_snapshot(self) -> Snapshot:
        """The summary of the last build; an empty one where there is none."""
        try:
            snapshot = msgspec.msgpack.decode((self.folder / "snapshot.bin").read_bytes(), type=Snapshot)
        except (OSError, msgspec.MsgspecError):
            return Snapshot()
        return snapshot if snapshot.version == VERSION else Snapshot()

    def write_snapshot(self, snapshot: Snapshot) -> None:
        """Replace the summary."""
        with contextlib.suppress(OSError):
            replace(self.folder / "snapshot.bin", msgspec.msgpack.encode(snapshot))

    # -- files --------------------------------------------------------------------------------------------------------

    def relative(self, path: Path | str) -> str:
        """*path* relative to the project's folder where it lies inside, else absolute; forward slashes."""
        text = str(path)
        return (text[len(self._prefix) :] if text.startswith(self._prefix) else text).replace(os.sep, "/")

    def absolute(self, path: str) -> str:
        """The inverse of `relative`."""
        return path if path.startswith("/") or (os.sep != "/" and Path(path).is_absolute()) else self._prefix + path

    def state(self, path: Path | str, expected: str | None = None) -> FileState:
        """The file at *path* now. With *expected*, the digest of what was read: the stat is kept only if it still holds.

        Raises ``OSError`` where the file cannot be read and nothing was expected.
        """
        stat = signature(path)
        if expected is not None:
            if settled(stat) is None:  # no need to read what could not be believed anyway
                return FileState(self.relative(path), expected, None)
            try:
                same = digest_file(path) == expected
            except OSError:
                same = False
            return FileState(self.relative(path), expected, settled(stat) if same else None)
        return FileState(self.relative(path), digest_file(path), settled(stat))

    def changed(self, state: FileState) -> str | None:
        """How the file differs from *state*: ``missing``, ``changed``, or None. The content decides, not the stat."""
        path = self.absolute(state.path)
        stat = signature(path)
        if stat is None:
            return "missing"
        if state.signature is not None and stat == state.signature:
            return None
        try:
            return None if digest_file(path) == state.digest else "changed"
        except OSError:
            return "missing"


def settled(stat: list[int] | None) -> list[int] | None:
    """*stat* if it can be trusted to change with the file, else None; see the module."""
    if stat is None or time.time_ns() - max(stat[1], stat[2]) < _SETTLED_NS:
        return None
    return stat


def replace(path: Path, data: bytes) -> None:
    """Write *data* to *path* atomically, making its folder where there is none."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}")
    try:
        try:
            stream = fresh.open("xb")
        except FileNotFoundError:
            path.parent.mkdir(parents=True, exist_ok=True)
            stream = fresh.open("xb")
        with stream:
            stream.write(data)
        os.replace(fresh, path)
    except OSError:
        with contextlib.suppress(OSError):
            fresh.unlink()
        raise
