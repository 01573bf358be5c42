"""Whether compiled code can run on a host: what it needs is read from the finished library, not believed of the compiler.

A lower key holds the architecture, the C library and torch, so that a store offers what was made for such a host. Two
things are looked at besides, because a key only says what was *asked for*:

- code for a named level (``march = "x86-64-v3"``) is disassembled, and an instruction outside the level fails the
  compile. Measured with torch 2.12.1: ``-march`` alone left 19 instructions with AVX-512 registers in a library that was
  asked to be v3, because inductor adds ``-mavx512*`` flags of its own;
- the newest version of a glibc symbol that the library asks the loader for (2.34 with Debian 12) is remembered with it,
  and a host whose glibc is older makes its own.

The level of an instruction is that of its encoding (VEX: v3; EVEX or a mask register: v4; REX2, XOP: none), and the
mnemonic where an extension shares an encoding: VNNI, BF16, FP16, AES, AMX and the like belong to no level. ``objdump``
comes with the linker that torch needs; an import of a disassembler in Python was considered, and would be one more
dependency that lags behind the CPUs.
"""

from __future__ import annotations

import io
import re
import shutil
import struct
import subprocess
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from typing import Any

from neml2_build.errors import TaskError

LEVELS = {"x86-64": 1, "x86-64-v2": 2, "x86-64-v3": 3, "x86-64-v4": 4}
"""Levels of the x86-64 psABI that are checked by disassembly."""

_NO_LEVEL = 9
_LINE = re.compile(r"\s*[0-9a-f]+:\t((?:[0-9a-f]{2} )+)\s*\t(.*)")
_SYMBOL = re.compile(r"[0-9a-f]+ <(.+)>:")
_WORDS = re.compile(r"(?:(?:data16|cs|ds|es|fs|gs|ss|rep[a-z]*|lock|notrack|bnd|addr32|rex[.A-Z]*|\{\w+\}) +)*([a-z]\w*)")
_BEFORE_OPCODE = frozenset(bytes.fromhex("26 2e 36 3e 64 65 67"))

_V2 = re.compile(
    r"addsubp[sd]|h(add|sub)p[sd]|lddqu|movddup|movs[hl]dup|fisttp\w*|pshufb|ph(add|sub)\w*|pmaddubsw|pmulhrsw|psign[bwd]"
    r"|pabs[bwd]|palignr|blendv?p[sd]|dpp[sd]|extractps|insertps|movntdqa|mpsadbw|packusdw|pblend(w|vb)|pcmpeqq|pextr[bdq]"
    r"|pinsr[bdq]|phminposuw|pm(ax|in)(sb|sd|uw|ud)|pmov[sz]x\w+|pmuldq|pmulld|ptest|round[ps][sd]|pcmp[ei]str\w+|pcmpgtq"
    r"|crc32\w?|popcnt\w?|cmpxchg16b|[ls]ahf"
)
_V3 = re.compile(r"lzcnt\w?|movbe\w?")  # tzcnt is what gcc writes for bsf on any x86-64
_MASK = re.compile(r"k(mov|andn?|x?n?or|not|shift|unpck|add|o?r?test)\w+")
_EXTENSION = re.compile(
    r"v?aes\w+|v?pclmul\w+|v?gf2p8\w+|v?sha(1|256|512)\w+|vsm[34]\w+|rdrand|rdseed|ad[co]x"  # cryptography
    r"|vp4?dp\w+|vp?dpbf16ps|vcvtne\w+|vbcstne\w+|vpmadd52\w+|vpopcnt\w+|vpshufbitqmb|vp2intersect\w+|v4fn?madd\w+"  # VNNI, ...
    r"|vperm([it]2)?b|vpmultishiftqb|vp(compress|expand)[bw]|vpsh[lr]dv?[wdq]|vexp2p[sd]|vr(cp|sqrt)28\w+|v(gather|scatter)pf\w+"
    r"|v(add|sub|mul|div|sqrt|min|max|cmp\w*|getexp|getmant|reduce|rndscale|scalef|rcp|rsqrt|fpclass|u?comi|mov"
    r"|fn?m(add|sub)(sub|add)?\d*|fc?(madd|mul)c)[ps]h[xyz]?|vmovw|vcvt\w+2[su]?[ps]hx?|vcvt[ps]h2\w+"  # FP16
    r"|tdp\w+|tile\w+|[ls][dt]tilecfg|tcmm\w+"  # AMX
    r"|vfn?m(add|sub)(sub|add)?[ps][sd]"  # FMA4
    r"|extrq|insertq|movnts[sd]|x(begin|end|abort|test)|[rw][dr][fg]sbase|clwb|clflushopt|cldemote|movdir\w+|enqcmds?"
    r"|serialize|tpause|umonitor|umwait|ptwrite|rdpid"
)
_F16C = frozenset({"vcvtph2ps", "vcvtps2ph"})


def examine(package: bytes, march: str) -> tuple[dict[str, Any], list[str]]:
    """Look at the libraries in a finished package.

    Parameters
    ----------
    package
        The bytes of a ``.pt2``; anything that is no zip archive needs nothing.
    march
        As in the manifest: ``native`` is not disassembled.

    Returns
    -------
    tuple
        What the code needs of a host (``glibc``: version; ``march``: the level; each only where it is known), for
        `runs_here`; and notes, about what could not be looked at.

    Raises
    ------
    TaskError
        The code has an instruction that is outside *march*.
    """
    needs: dict[str, Any] = {}
    notes: list[str] = []
    for name, library in _libraries(package):
        floor = glibc_floor(library)
        if floor is not None and (not needs.get("glibc") or _version(floor) > _version(needs["glibc"])):
            needs["glibc"] = floor
        if march != "native":
            note = _check_level(name, library, march)
            if note is None:
                needs["march"] = march
            elif note not in notes:
                notes.append(note)
    return needs, notes


def runs_here(needs: dict[str, Any], libc: str) -> bool:
    """Whether a host with the C library *libc* (such as ``glibc 2.36``) can load what `examine` said *needs* of."""
    floor = needs.get("glibc")
    name, _, version = libc.partition(" ")
    return floor is None or name != "glibc" or _version(version) >= _version(floor)


def glibc_floor(library: bytes) -> str | None:
    """The newest glibc version that the ELF library asks for, such as ``2.34``; None where it asks for none."""
    versions = [name[6:] for name in _needed_versions(library) if re.fullmatch(r"GLIBC_\d+(\.\d+)+", name)]
    return max(versions, key=_version, default=None)


def outside(library: bytes, march: str) -> tuple[int, str] | None:
    """Instructions of *library* that are outside the level *march*: how many, and the first with its function; else None.

    Raises
    ------
    FileNotFoundError
        There is no ``objdump``.
    ValueError
        ``objdump`` could not read the library.
    """
    allowed = LEVELS[march]
    count, first, function = 0, "", "?"
    for line in _disassemble(library):
        found = _LINE.match(line)
        if found is None:
            if (symbol := _SYMBOL.match(line)) is not None:
                function = symbol[1]
            continue
        words = _WORDS.match(found[2])
        if words is not None and level_of(bytes.fromhex(found[1]), words[1]) > allowed:
            count += 1
            first = first or f"'{' '.join(found[2].split('#')[0].split())}' in {function}"
    return (count, first) if count else None


def level_of(encoding: bytes, mnemonic: str) -> int:
    """The x86-64 level (1 to 4) that has the instruction of these bytes; 9 for one that no level has."""
    if _EXTENSION.fullmatch(mnemonic) and mnemonic not in _F16C:
        return _NO_LEVEL
    start = next((index for index, byte in enumerate(encoding) if byte not in _BEFORE_OPCODE), 0)
    first = encoding[start]
    if first == 0x62:  # EVEX
        return 4
    if first in (0xC4, 0xC5):  # VEX
        return 4 if _MASK.fullmatch(mnemonic) else 3
    if first == 0xD5 or (first == 0x8F and len(encoding) > start + 1 and encoding[start + 1] & 0x1F >= 8):  # REX2, XOP
        return _NO_LEVEL
    if _V3.fullmatch(mnemonic):
        return 3
    return 2 if _V2.fullmatch(mnemonic) else 1


def _check_level(name: str, library: bytes, march: str) -> str | None:
    """None where the code is within *march*, else why that is not known. Raises `TaskError` where it is not."""
    if march not in LEVELS:
        return f"not checked by disassembly: which instructions {march} has is not known here"
    try:
        found = outside(library, march)
    except FileNotFoundError:
        return f"not checked by disassembly that the code is {march}: objdump (of binutils) is not installed"
    except ValueError as error:
        return f"not checked by disassembly that the code is {march}: {error}"
    if found is None:
        return None
    count, first = found
    raise TaskError(
        f"the compiled code is not {march}: {count} instructions are outside that level, the first is {first} ({name})",
        remedy="a compiler flag (CXXFLAGS, inductor options) adds instructions; take it out, or name the level that it needs",
    )


def _libraries(package: bytes) -> Iterator[tuple[str, bytes]]:
    if not package.startswith(b"PK"):
        return
    with zipfile.ZipFile(io.BytesIO(package)) as archive:
        for name in archive.namelist():
            if name.endswith(".so"):
                data = archive.read(name)
                if data.startswith(b"\x7fELF"):
                    yield name.rpartition("/")[2], data


def _disassemble(library: bytes) -> Iterable[str]:
    program = shutil.which("objdump")
    if program is None:
        raise FileNotFoundError("objdump")
    with tempfile.NamedTemporaryFile(prefix="neml2-build-", suffix=".so") as file:
        file.write(library)
        file.flush()
        done = subprocess.run([program, "-d", "-w", file.name], capture_output=True, check=False, env={"LC_ALL": "C"})
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise ValueError(f"objdump failed: {said[-1] if said else done.returncode}")
    return done.stdout.decode(errors="replace").splitlines()


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text))


def _needed_versions(library: bytes) -> list[str]:
    """Names in ``.gnu.version_r`` (ELF64, little-endian): what the loader looks for, over all libraries."""
    if library[:6] != b"\x7fELF\x02\x01":
        return []
    names: list[str] = []
    try:
        (offset,) = struct.unpack_from("<Q", library, 0x28)
        size, count = struct.unpack_from("<HH", library, 0x3A)
        sections = [struct.unpack_from("<IIQQQQIIQQ", library, offset + index * size) for index in range(count)]
        for section in sections:
            if section[1] != 0x6FFFFFFE:  # SHT_GNU_verneed
                continue
            strings = sections[section[6]][4]
            need = section[4]
            for _ in range(section[7]):
                _, entries, _, first, following = struct.unpack_from("<HHIII", library, need)
                entry = need + first
                for _ in range(entries):
                    _, _, _, name, step = struct.unpack_from("<IHHII", library, entry)
                    start = strings + name
                    names.append(library[start : library.index(b"\0", start)].decode())
                    entry += step
                need += following
    except (struct.error, ValueError, IndexError):
        return names
    return names
