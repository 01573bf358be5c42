"""Machine code of a kernel: what it uses, which candidate to take, one file for several architectures.

The tools are those that Triton and NVIDIA's packages bring: ``cuobjdump`` says what a kernel uses, ``ptxas`` makes machine code
of PTX, ``fatbinary`` puts several together. The driver takes from a fat binary the machine code of its card, or compiles the
PTX.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from neml2_build.cross.cards import Card, number, occupancy, plain

#: Occupancy above which more of it gains nothing for kernels that wait for memory; all of NEML2's do.
ENOUGH = 0.5
#: Spilled bytes of a thread up to which torch's own autotuner still times a candidate (16 registers).
SPILLS = 64

_USAGE = re.compile(r"REG:(\d+)\s+STACK:(\d+)\s+SHARED:(\d+)\s+LOCAL:(\d+)")
_NAMED = re.compile(r"arch = (sm_\w+)|Function (\w+):\s*" + _USAGE.pattern)


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """What one thread (registers, spilled bytes) and one block (bytes of shared memory) of a kernel use on *arch*."""

    arch: str
    registers: int
    spills: int
    shared: int
    occupancy: float


class Kernel(msgspec.Struct, frozen=True, kw_only=True):
    """One kernel of a graph: digest of its source; the configuration that was taken, of how many; what it uses where."""

    name: str
    code: str
    config: str
    candidates: int
    warps: int
    usage: tuple[Usage, ...]


class Tools(msgspec.Struct, frozen=True, kw_only=True):
    """Programs: Triton's, and the toolkit's ``fatbinary``."""

    ptxas: str
    ptxas_blackwell: str
    cuobjdump: str
    fatbinary: str

    def assembler(self, arch: str) -> str:
        """The ``ptxas`` that Triton takes for *arch* (``triton/backends/nvidia/compiler.py``, ``get_ptxas``)."""
        return self.ptxas_blackwell if number(arch) >= 100 else self.ptxas


def torch_ptxas() -> str | None:
    """The ``ptxas`` that torch's wheel brings, if it does."""
    import torch

    path = Path(torch.__file__).parent / "bin" / "ptxas"
    return str(path) if path.exists() else None


def tools(toolkit: Path) -> Tools:
    """The programs that Triton would take now; *toolkit* is CUDA's folder."""
    from triton import knobs

    return Tools(
        ptxas=knobs.nvidia.ptxas.path,
        ptxas_blackwell=knobs.nvidia.ptxas_blackwell.path,
        cuobjdump=knobs.nvidia.cuobjdump.path,
        fatbinary=str(toolkit / "bin" / "fatbinary"),
    )


def run(command: Sequence[str]) -> str:
    """Standard output of *command*; ``RuntimeError`` with its last line of errors."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise RuntimeError(f"{Path(command[0]).name}: {said[0] if said else f'exit code {done.returncode}'}")
    return done.stdout


def usage(cuobjdump: str, cubin: bytes) -> tuple[int, int]:
    """Registers of a thread and bytes that it spills (its stack) of the one kernel in *cubin*."""
    with tempfile.TemporaryDirectory(prefix="neml2-build-") as folder:
        file = Path(folder) / "k.cubin"
        file.write_bytes(cubin)
        found = _USAGE.search(run([cuobjdump, "-res-usage", str(file)]))
    if found is None:
        raise RuntimeError("cuobjdump does not say what the kernel uses")
    return int(found[1]), max(int(found[2]), int(found[4]))


def resources(cuobjdump: str, code: bytes) -> dict[str, dict[str, tuple[int, int, int]]]:
    """Of each kernel in *code*, a cubin or a fat binary: registers, spilled bytes, shared bytes by architecture."""
    found: dict[str, dict[str, tuple[int, int, int]]] = {}
    with tempfile.TemporaryDirectory(prefix="neml2-build-") as folder:
        file = Path(folder) / "k.cubin"
        file.write_bytes(code)
        said = run([cuobjdump, "-res-usage", str(file)])
    arch = ""
    for match in _NAMED.finditer(said):
        if match[1]:
            arch = match[1]
        else:
            registers, stack, shared, local = map(int, match.groups()[2:])
            found.setdefault(match[2], {})[arch] = (registers, max(stack, local), shared)
    return found


def assembled(tools: Tools, ptx: str, base: str, cubin: bytes, archs: Sequence[str]) -> dict[str, bytes]:
    """Machine code by architecture: *cubin*, which Triton made for *base*, and for the rest what ``ptxas`` makes of the same
    *ptx*, so that the number of warps and the shared memory, which the host code holds, are right for all."""
    codes = {base: cubin}
    with tempfile.TemporaryDirectory(prefix="neml2-build-") as folder:
        source, out = Path(folder) / "k.ptx", Path(folder) / "k.cubin"
        source.write_text(ptx)
        for arch in archs:
            if arch not in codes:
                options = ["-lineinfo", "-suppress-debug-info", "--regAllocOptLevel=2", f"--gpu-name={arch}"]
                run([tools.assembler(arch), *options, str(source), "-o", str(out)])
                codes[arch] = out.read_bytes()
    return codes


def fat(tools: Tools, ptx: str, base: str, codes: dict[str, bytes]) -> bytes:
    """One binary of *codes* and, for cards that come later, of *ptx*."""
    with tempfile.TemporaryDirectory(prefix="neml2-build-") as folder:
        images = []
        for arch, code in sorted(codes.items(), key=lambda item: (number(item[0]), item[0])):
            file = Path(folder) / f"{arch}.cubin"
            file.write_bytes(code)
            images.append(f"--image3=kind=elf,sm={arch.removeprefix('sm_')},file={file.name}")
        (Path(folder) / "k.ptx").write_text(ptx)
        images.append(f"--image3=kind=ptx,sm={number(base)},file=k.ptx")
        out = Path(folder) / "k.fatbin"
        done = subprocess.run(
            [tools.fatbinary, "-64", f"--create={out}", *images], cwd=folder, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"fatbinary: {done.stderr.strip()}")
        return out.read_bytes()


def used(tools: Tools, codes: dict[str, bytes], cards: Sequence[Card], shared: int, warps: int) -> tuple[Usage, ...]:
    """What the kernel uses on each of *cards*."""
    found = []
    for arch, code in codes.items():
        card = next(card for card in cards if card.arch == plain(arch))
        registers, spills = usage(tools.cuobjdump, code)
        share = occupancy(card, registers, shared, warps)
        found.append(Usage(arch=arch, registers=registers, spills=spills, shared=shared, occupancy=round(share, 4)))
    return tuple(found)


def best(candidates: Sequence[Sequence[Usage]]) -> int:
    """Index of the candidate to take, each given as what it uses on every architecture.

    In this order: what cannot run is out; least spilled (up to `SPILLS` bytes count as none, as for torch's autotuner); most
    occupancy up to `ENOUGH`, in eighths; then torch's own order, which starts with what its heuristics prefer.
    """

    def cost(uses: Sequence[Usage]) -> tuple[bool, int, float]:
        spilled = max(use.spills for use in uses)
        share = min(use.occupancy for use in uses)
        return share == 0.0, spilled if spilled > SPILLS else 0, -min(int(share * 8) / 8, ENOUGH)

    return min(range(len(candidates)), key=lambda index: (cost(candidates[index]), index))
