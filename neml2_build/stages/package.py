"""Package: publish ``aoti/NAME/`` whole.

The new tree is made beside the old one and the two change places in one system call (``renameat2`` with RENAME_EXCHANGE), so a
reader sees the old tree or the new one, and a kill at any moment leaves one of them. Files of an earlier shape that NEML2
would leave behind are gone with the old tree. Where the file system cannot exchange (NFS), the old tree is moved
aside and the new one moved in; a kill between the two is mended by the next build, which finds the target missing.

A tree is on the disk before it takes its place.

NEML2 writes ``metadata.json`` with mode 0600, which nobody else can load; here everything is readable as the umask allows.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from neml2_build.durable import flush, sync

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
#: Folder in the output folder where trees are made before they are published.
STAGING = ".neml2-build"


def files_of(metadata: str, leaves: dict[str, list[tuple[str, str]]], dtype: str) -> dict[str, str]:
    """Relative path → digest of every file of the published tree.

    Parameters
    ----------
    metadata
        Digest of ``metadata.json``.
    leaves
        Device folder → (file name, digest) of each package.
    dtype
        Name of the folder below the device.
    """
    files = {"metadata.json": metadata}
    for device, packages in leaves.items():
        for name, found in packages:
            files[f"{device}/{dtype}/{name}"] = found
    return dict(sorted(files.items()))


def publish(files: dict[str, str], folder: Path, materialize: Callable[[str, Path], None]) -> None:
    """Make *folder* hold exactly *files*.

    Parameters
    ----------
    files
        Relative path → digest.
    folder
        The published folder, ``aoti/NAME``.
    materialize
        Writes the object of a digest to a path, verified.
    """
    with staging(folder.parent) as scratch:
        flush(lay_out(files, scratch / "tree", materialize))
        swap(scratch / "tree", folder, scratch / "old")


def lay_out(files: dict[str, str], tree: Path, materialize: Callable[[str, Path], None]) -> list[Path]:
    """Make the folder *tree* of *files*; what is to be flushed before it is published."""
    folders = {tree}
    tree.mkdir()
    for name, found in files.items():
        path = tree / name
        if path.parent not in folders:
            path.parent.mkdir(parents=True, exist_ok=True)
            folders |= {path.parent, path.parent.parent}
        materialize(found, path)
    return [*(tree / name for name in files), *folders]


@contextlib.contextmanager
def staging(output: Path) -> Iterator[Path]:
    """A fresh folder on the file system of *output*; removed afterwards, with what killed builds left there."""
    top = output / STAGING
    scratch = top / f"{os.getpid()}-{uuid.uuid4().hex[:8]}"
    while True:
        # Another target's end may remove the empty folder just now, between any two of these steps.
        output.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            top.mkdir()
        try:
            scratch.mkdir()
            break
        except FileNotFoundError:
            continue
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        sweep(output)


def sweep(output: Path) -> None:
    """Remove what builds that were killed left in the staging folder."""
    with contextlib.suppress(OSError):
        for name in os.listdir(output / STAGING):
            pid, dash, _ = name.partition("-")
            if dash and pid.isdigit() and not _alive(int(pid)):
                shutil.rmtree(output / STAGING / name, ignore_errors=True)
        (output / STAGING).rmdir()


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def swap(fresh: Path, folder: Path, aside: Path) -> None:
    """Put *fresh* in the place of *folder*; what was there is afterwards at *fresh* or at *aside*."""
    if not os.path.lexists(folder):
        with contextlib.suppress(OSError):
            os.rename(fresh, folder)
            return
    if _exchange(fresh, folder):
        return
    os.rename(folder, aside)
    try:
        os.rename(fresh, folder)
    except OSError:
        os.rename(aside, folder)
        raise


def _exchange(one: Path, other: Path) -> bool:
    """Let two paths change places atomically; False where kernel or file system cannot."""
    if sys.platform != "linux":
        return False
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    if renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(other))


def write_file(path: Path, data: bytes) -> None:
    """Write *data* to *path* atomically, readable as the umask allows."""
    with staging(path.parent) as scratch:
        fresh = scratch / "file"
        fresh.write_bytes(data)
        sync(fresh)
        os.replace(fresh, path)
