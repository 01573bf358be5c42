"""Pieces that are made once a machine and used by every graph: precompiled headers, the interface's object, link stubs.

A piece is a folder that is never changed, named by a pointer file, ``<key>.json``. The key holds the text, the flags and the
compiler's path; the pointer holds size and time of every file that went in (headers, compiler, linker), which are looked at
before each use (about 1,200 files, 3 ms), and the size of every file that was made: an upgraded header or g++ makes a new
piece, and so does a file that was cut short. The pointer is written last, by an atomic rename, and a lock that dies with its
holder keeps two processes from making the same piece twice.

Sizes with torch 2.12.1 and g++ 12: 137 MB (header of the model's part), 161 MB (header of kernels), 0.5 MB (interface).
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from filelock import FileLock

from neml2_build.digest import digest_json

#: Raised when pieces are made in another way.
VERSION = 1

#: A folder that no pointer names is removed when it is older than this: somebody may still be using it.
_ABANDONED = 24 * 3600.0

Make = Callable[[Path], Iterable[Path]]


def piece(folder: Path, about: object, make: Make) -> Path:
    """The folder of the piece that *about* (JSON) describes; made by *make* where there is none that is fresh.

    *make* fills an empty folder and returns the files that it read.
    """
    key = digest_json([VERSION, about])
    pointer = folder / f"{key}.json"
    found = _fresh(pointer)
    if found is not None:
        _stamp(pointer)
        return found
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(str(folder / f"{key}.lock")):
        found = _fresh(pointer)
        if found is not None:
            return found
        made = Path(tempfile.mkdtemp(prefix=f"{key[:8]}-", dir=folder))
        try:
            made.chmod(0o755)
            files = {str(path): _stat(path) for path in make(made)}
            _publish(pointer, {"folder": made.name, "made": _sizes(made), "files": files})
        except BaseException:
            shutil.rmtree(made, ignore_errors=True)
            raise
        _sweep(folder)
        return made


def _fresh(pointer: Path) -> Path | None:
    """The folder that *pointer* names, if every file that went in is as it was."""
    try:
        record = json.loads(pointer.read_bytes())
        made = pointer.parent / record["folder"]
        whole = made.is_dir() and _sizes(made) == record["made"]
        fresh = whole and all(_stat(path) == known for path, known in record["files"].items())
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return None
    return made if fresh else None


def _stamp(pointer: Path) -> None:
    """Mark a piece as used, once a day: one that nobody used for long is removed by `neml2_build.upkeep`."""
    try:
        if time.time() - pointer.stat().st_mtime > 24 * 3600.0:
            os.utime(pointer)
    except OSError:
        return


def _stat(path: Path | str) -> list[int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return [status.st_size, status.st_mtime_ns]


def _sizes(made: Path) -> dict[str, int]:
    """Size of each file of the piece in the folder *made*, by its name there: what was cut short is made again."""
    return {str(path.relative_to(made)): path.stat().st_size for path in sorted(made.rglob("*")) if path.is_file()}


def _publish(pointer: Path, record: object) -> None:
    handle, name = tempfile.mkstemp(dir=pointer.parent, prefix=".pointer-")
    with open(handle, "w", encoding="utf-8") as stream:
        json.dump(record, stream)
        os.fchmod(stream.fileno(), 0o644)
    os.replace(name, pointer)


def _sweep(folder: Path) -> None:
    """Remove folders of pieces (`piece` names them with a dash) that no pointer names and nobody can be using or making."""
    named = set()
    for pointer in folder.glob("*.json"):
        try:
            named.add(json.loads(pointer.read_bytes())["folder"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
    before = time.time() - _ABANDONED
    for path in folder.iterdir():
        try:
            if path.is_dir() and "-" in path.name and path.name not in named and path.stat().st_mtime < before:
                shutil.rmtree(path, ignore_errors=True)
        except OSError:
            continue


def compile_noting_files(command: Sequence[str], cwd: Path) -> list[Path]:
    """Run the compile *command* in *cwd*; the files that it read, those in *cwd* left out, and the compiler's own."""
    subprocess.run([*command, "-MD", "-MF", "read.d"], cwd=cwd, check=True, capture_output=True)
    rule = (cwd / "read.d").read_text(encoding="utf-8", errors="surrogateescape")
    read = [(cwd / name).resolve() for name in rule_prerequisites(rule)]
    inside = cwd.resolve()
    return [path for path in read if inside not in path.parents] + list(programs(command[0]))


def rule_prerequisites(rule: str) -> list[str]:
    """The prerequisites of the first make rule in the text *rule*, as ``g++ -MD`` writes it."""
    joined = rule.replace("\\\n", " ").partition(": ")[2].partition("\n")[0]
    return [name.replace("\0", " ") for name in joined.replace("\\ ", "\0").split()]


@functools.cache
def programs(compiler: str) -> tuple[Path, ...]:
    """The driver *compiler* and the programs that it hands the work to."""
    found = [compiler]
    for name in ("cc1plus", "as", "ld"):
        asked = subprocess.run([compiler, f"-print-prog-name={name}"], capture_output=True, text=True, check=False)
        found.append(asked.stdout.strip())
    paths = (shutil.which(name) for name in found if name)
    return tuple(Path(path).resolve() for path in paths if path)
