"""Stand-ins for torch's libraries at link time.

Of the 0.21 s that linking a graph takes, 0.16 s are spent on reading the symbols of ``libtorch_cpu.so`` (77,000 of them, most
in C++). A shared library may leave symbols undefined, so all that the linker takes from there is the library's name and, for
each symbol that a graph refers to, that it lies there. A stub is an empty library with the same name and the same symbols,
as far as another library of the link might define them too, or C code might refer to them.

Whether the result is the same is not argued but looked at: `make` links a probe, which uses what graphs use, against both, and
compares size, libraries, versions, and every dynamic symbol. What differs is the order of the symbols, because the linker's
hash table grows with what it reads (with all 77,000 symbols in the stub the bytes are the same, and so is the time).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

#: The only libraries of a CPU link that are replaced; torch is given as ``-l`` name and ``-L`` folder.
REPLACED = ("torch", "torch_cpu")

_PROBE = r"""
#include <stdexcept>
#include <string>
#include <vector>
#include <cmath>
#include <memory>
extern "C" int aoti_torch_get_dtype(void*, int*);
extern "C" int aoti_torch_empty_strided(long, const long*, const long*, int, int, int, void**);
extern "C" long probe(void* handle, double* out, std::vector<std::string>& names, long n) {
  int dtype = 0;
  if (aoti_torch_get_dtype(handle, &dtype)) throw std::runtime_error("dtype");
  void* made = nullptr;
  aoti_torch_empty_strided(n, nullptr, nullptr, 0, 0, 0, &made);
  names.push_back(std::to_string(dtype));
  auto shared = std::make_shared<std::vector<double>>(static_cast<size_t>(n));
#pragma omp parallel for
  for (long i = 0; i < n; ++i) out[i] = std::exp(out[i]) + std::pow((*shared)[static_cast<size_t>(i)], out[i]);
  return std::stoi(names.at(0));
}
"""


class NotTheSame(Exception):
    """A link against the stubs gave other bytes, or could not be tried."""


def make(
    folder: Path, link: Sequence[str], compile_flags: Sequence[str], libraries: dict[str, Path], beside: Sequence[Path] = ()
) -> None:
    """Fill *folder* with stubs of *libraries* (``-l`` name -> file) and prove them on a probe.

    Parameters
    ----------
    link
        The command of a real link without inputs and output; its ``-L`` folders are where *libraries* lie.
    compile_flags
        What graphs are compiled with.
    beside
        Object files that are part of every graph; linked with the probe, which then need not use what they use.

    Raises
    ------
    NotTheSame
        If linking against a stub gives other bytes than linking against the library.
    """
    system = _system_symbols(link)
    for name, path in libraries.items():
        _stub(folder, link[0], name, path, system)
    probe = folder / "probe.cpp"
    probe.write_text(_PROBE)
    _run([link[0], *compile_flags, "-w", "-c", probe.name, "-o", "probe.o"], folder)
    inputs = [link[0], "probe.o", *map(str, beside)]
    _run([*inputs, *link[1:], "-o", "real.so"], folder)
    _run([*inputs, f"-L{folder}", *link[1:], "-o", "stub.so"], folder)
    if _summary(folder / "real.so") != _summary(folder / "stub.so"):
        raise NotTheSame("linking against stubs of torch's libraries does not give the same library here")
    for name in ("probe.cpp", "probe.o", "real.so", "stub.so"):
        (folder / name).unlink()


def _stub(folder: Path, compiler: str, name: str, path: Path, system: set[str]) -> None:
    """Write ``lib<name>.so`` in *folder*, which says of itself what the library at *path* says."""
    lines = ["\t.text"]
    for symbol, kind in _symbols(path):
        if symbol.startswith("_Z") and symbol not in system:
            continue
        weak = "weak" if kind in "WVu" else "globl"
        section, type_ = ("\t.data", "@object") if kind in "BDRVGSu" else ("\t.text", "@function")
        lines += [section, f'\t.{weak}\t"{symbol}"', f'\t.type\t"{symbol}", {type_}', f'"{symbol}":', "\t.byte\t0"]
    lines.append('\t.section\t.note.GNU-stack,"",%progbits')
    (folder / f"{name}.s").write_text("\n".join(lines) + "\n")
    soname = _soname(path) or path.name
    output = f"lib{name}.so"
    _run([compiler, "-shared", "-nostdlib", f"-Wl,-soname,{soname}", f"{name}.s", "-o", output], folder)
    (folder / f"{name}.s").unlink()


def _system_symbols(link: Sequence[str]) -> set[str]:
    """Every symbol that a library which g++ adds by itself defines."""
    names: set[str] = set()
    for library in ("libstdc++.so", "libgcc_s.so.1", "libm.so.6", "libc.so.6", "libgomp.so"):
        asked = subprocess.run([link[0], f"-print-file-name={library}"], capture_output=True, text=True, check=True)
        path = Path(asked.stdout.strip())
        if path.is_absolute():
            names.update(symbol for symbol, _ in _symbols(path))
    return names


def _symbols(path: Path) -> list[tuple[str, str]]:
    """Name and kind (as ``nm`` writes it) of every dynamic symbol that the library at *path* defines, without version."""
    found = {}
    for line in tell("nm", "-D", "--defined-only", "-P", str(path)).splitlines():
        symbol, kind = line.split()[:2]
        found.setdefault(symbol.partition("@")[0], kind)
    return list(found.items())


def _soname(path: Path) -> str | None:
    match = re.search(r"^\s*SONAME\s+(\S+)", tell("objdump", "-p", str(path)), re.MULTILINE)
    return match[1] if match else None


def _summary(path: Path) -> list[object]:
    """What a program that loads the library at *path* can tell of it, without the order of its symbols."""
    symbols = sorted(tuple(line.split()[:2]) for line in tell("nm", "-D", "-P", str(path)).splitlines())
    private = tell("objdump", "-p", str(path))
    needed = re.findall(r"^\s*(?:NEEDED\s+\S+|0x[0-9a-f]+ 0x[0-9a-f]+ \d+ \S+)$", private, re.MULTILINE)
    relocations = sorted(tuple(line.split()[2:3]) for line in tell("readelf", "-rW", str(path)).splitlines())
    return [path.stat().st_size, symbols, sorted(" ".join(line.split()[:2] + line.split()[3:]) for line in needed), relocations]


def tell(tool: str, *arguments: str) -> str:
    found = shutil.which(tool)
    if found is None:
        raise NotTheSame(f"there is no {tool} to look at torch's libraries with")
    return subprocess.run([found, *arguments], capture_output=True, text=True, check=True).stdout


def _run(command: Sequence[str], cwd: Path) -> None:
    done = run_to_its_end(command, cwd)
    if done.returncode:
        raise NotTheSame(f"{Path(command[0]).name} failed on the stubs: {done.stderr.strip()[-400:]}")


def run_to_its_end(command: Sequence[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    """The *command*, run in *cwd*. Raises ``OSError`` if it was killed or found no space, which says nothing of what it can."""
    environment = {**os.environ, "LC_ALL": "C"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    if done.returncode < 0 or (done.returncode and re.search("signal terminated program|No space left", done.stderr)):
        raise OSError(f"{Path(command[0]).name} was killed, or found no space")
    return done
