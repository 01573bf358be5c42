"""Files on the disk, before they take the place of others.

Waiting for the disk file by file is what takes longest of writing small files. Many threads that wait at once are served by one
write of the file system's journal: 85 files of 20 MB were on the disk after 37 ms, and after 320 ms one after another.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_THREADS = 16


def flush(paths: Sequence[Path]) -> None:
    """Have files and folders on the disk, all of them together. Raises ``OSError`` for a file that cannot be written."""
    if len(paths) <= 1:
        for path in paths:
            sync(path)
        return
    with ThreadPoolExecutor(min(len(paths), _THREADS)) as pool:
        list(pool.map(sync, paths))


def sync(path: Path) -> None:
    """Have one file, or the names in a folder, on the disk, the latter as far as the file system can."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:
        if not path.is_dir():  # some network file systems cannot do it for folders
            raise
    finally:
        os.close(handle)
