"""What a build leaves behind stays bounded: the store, the prepared pieces of the toolchain, the logs of failures.

Done at the end of every build that did something, never of a null build. It cannot fail the build: what cannot be removed
now is removed by the next one.
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING

from neml2_build.manifest import parse_size
from neml2_build.store import GcReport

if TYPE_CHECKING:
    from neml2_build.build import Build

DAY = 86400.0
WEEK = 7 * DAY
MANY = 2000
"""Records of a large store."""
LOGS = 200
"""How many logs of failed jobs are kept, of the last week."""


def tidy(build: Build, *, max_size: int | None = None, older_than: float | None = None) -> GcReport:
    """Bring what is below the cache folder of *build* within its bounds.

    Reading every record takes 0.1 ms each. So where nothing is asked for, a large store is only measured (0.04 ms each) while
    it is within its size, and swept for what was interrupted or orphaned once a day.

    Parameters
    ----------
    max_size
        Bytes that the store may take; by default the manifest's ``max-size``.
    older_than
        Seconds after which what was not used goes, whatever the size.
    """
    limit = parse_size(build.manifest.max_size) if max_size is None else max_size
    swept = build.cache / "swept"
    if max_size is None and older_than is None:
        records, size = build.store.size()
        if records > MANY and size <= limit and _age(swept) < DAY:
            return GcReport(size=size)
    report = build.store.gc(limit, older_than, used_by(build))
    if not build.store.readonly:
        sweep_pieces(build.machine)
        sweep_logs(build.cache / "logs")
        with contextlib.suppress(OSError):
            swept.touch()
    return report


def _age(path: Path) -> float:
    """Seconds since the file *path* was touched; endless where it is not there, or from the future."""
    try:
        age = time.time() - path.stat().st_mtime
    except OSError:
        return math.inf
    return age if age >= 0 else math.inf


def used_by(build: Build) -> set[str]:
    """Keys and digests that the targets of *build* rely on, by their records; of null ones too, which look nothing up."""
    used: set[str] = set()
    for run in build.runs.values():
        for stage in run.stages:
            record = build.records.read(run.target.name, stage)
            if record is None:
                continue
            used |= {record.key, *record.objects.values(), *(state.digest for state in record.outputs)}
            used |= {record.info["base"]} if "base" in record.info else set()
            for _, key, found in record.info.get("graphs", ()) if stage.startswith("lower-") else ():
                used |= {key, found}
    return used


def sweep_pieces(folder: Path, *, now: float | None = None) -> int:
    """Remove prepared pieces (see `neml2_build.toolchain.prepared`) that nobody used for a week: how many.

    A pointer is stamped when its piece is used. One piece is up to 161 MB, and each torch or compiler makes its own.
    """
    moment = time.time() if now is None else now
    removed = 0
    for pointer in _glob(folder, "*.json"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            if moment - pointer.stat().st_mtime <= WEEK:
                continue
            name = Path(json.loads(pointer.read_bytes())["folder"]).name
            pointer.unlink()
            shutil.rmtree(folder / name, ignore_errors=True)
            pointer.with_suffix(".lock").unlink(missing_ok=True)
            removed += 1
    return removed


def sweep_logs(folder: Path, *, keep: int = LOGS, now: float | None = None) -> int:
    """Remove logs of failed jobs but the last *keep* of a week: how many."""
    moment = time.time() if now is None else now
    logs = []
    for path in _glob(folder, "*.log"):
        with contextlib.suppress(OSError):
            logs.append((path.stat().st_mtime, path))
    removed = 0
    for index, (stamp, path) in enumerate(sorted(logs, reverse=True)):
        if index >= keep or moment - stamp > WEEK:
            with contextlib.suppress(OSError):
                path.unlink()
                removed += 1
    return removed


def _glob(folder: Path, pattern: str) -> list[Path]:
    try:
        return list(folder.glob(pattern))
    except OSError:
        return []
