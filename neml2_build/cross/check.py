"""What can be said of a package for a GPU without one: its machine code, and whether its symbols resolve.

`neml2_build.cross.interpret` says whether the kernels compute the right thing.
"""

from __future__ import annotations

import io
import os
import re
import struct
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

#: Begins a fat binary (CUDA's ``fatbinary_section.h``): magic, version, size of the header, size of what follows.
_FAT = struct.Struct("<IHHQ")
_MAGIC = 0xBA55ED50


def library(package: bytes) -> bytes:
    """The shared library in *package*."""
    with zipfile.ZipFile(io.BytesIO(package)) as archive:
        return next(archive.read(name) for name in archive.namelist() if name.endswith(".so"))


def fat_binaries(data: bytes) -> list[bytes]:
    """The fat binaries that lie in the library *data*, in order: one a kernel."""
    found = []
    magic = struct.pack("<I", _MAGIC)
    start = data.find(magic)
    while start >= 0:
        _, version, header, size = _FAT.unpack_from(data, start)
        if version == 1 and header == _FAT.size and start + header + size <= len(data):
            found.append(data[start : start + header + size])
            start += header + size
        else:
            start += 1
        start = data.find(magic, start)
    return found


def kernels(package: bytes) -> list[str]:
    """Names of the kernels that the host code of *package* loads."""
    with zipfile.ZipFile(io.BytesIO(package)) as archive:
        text = next(archive.read(name).decode() for name in archive.namelist() if name.endswith(".wrapper.cpp"))
    return sorted(set(re.findall(r"\bloadKernel\(__(\w+)_start\b", text)))


def architectures(fat: bytes, cuobjdump: str) -> dict[str, list[str]]:
    """What *fat* has: architectures of its machine code (``elf``) and of its PTX (``ptx``), as ``cuobjdump`` lists them.

    For machine code that is what the code itself says (``-elf``'s header), not only its label in the fat binary.
    """
    found: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory(prefix="neml2-build-") as folder:
        file = Path(folder) / "k.fatbin"
        file.write_bytes(fat)
        for kind in ("elf", "ptx"):
            said = subprocess.run([cuobjdump, f"-l{kind}", str(file)], capture_output=True, text=True, check=False).stdout
            found[kind] = re.findall(r"\.(sm_\w+)\.", said)
        said = subprocess.run([cuobjdump, "-sass", str(file)], capture_output=True, text=True, check=False).stdout
        found["sass"] = re.findall(r"code for (sm_\w+)", said)
    return found


def unresolved(data: bytes, stub: Path | None) -> str | None:
    """Why the library *data* cannot be loaded with every symbol resolved; None where it can.

    Parameters
    ----------
    stub
        Folder with a ``libcuda.so.1``, where the system has none.
    """
    with tempfile.TemporaryDirectory(prefix="neml2-build-") as folder:
        file = Path(folder) / "model.so"
        file.write_bytes(data)
        places = [str(stub)] if stub is not None else []
        places += [place for place in [os.environ.get("LD_LIBRARY_PATH", "")] if place]
        done = subprocess.run(
            [sys.executable, "-c", "import ctypes, os, sys, torch; ctypes.CDLL(sys.argv[1], os.RTLD_NOW)", str(file)],
            env={**os.environ, "LD_LIBRARY_PATH": ":".join(places)},
            capture_output=True,
            text=True,
            check=False,
        )
    return None if done.returncode == 0 else done.stderr.strip().splitlines()[-1]
