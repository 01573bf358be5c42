"""From an exported graph to a ``.pt2`` for GPUs that are not here: on a laptop, on a CI runner without a driver.

`lower` is what a worker calls. The rest: `cards` (what is known of each GPU), `machine` (the one context manager that makes
torch and Triton believe in it), `program` (the graph moved to it), `binaries` (machine code for several architectures), `host`
and `driver` (the compile commands, a library to link with), `check` and `interpret` (what can be said of the result without
a GPU).

What is made here is complete, but nobody has seen it run: the record says so until ``neml2-build verify`` on a machine with
a GPU.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from neml2_build.cross.cards import CARDS, chosen, known, number
from neml2_build.errors import TaskError

#: Versions of torch and Triton with which the tests of this package have passed.
TESTED = frozenset({("2.12.1", "3.7.1")})

UNRUN = "not yet run on a GPU"


@dataclass(frozen=True)
class Lowered:
    """A package; wall seconds by phase; what the user should know; what the record keeps.

    *info* has ``unrun``, ``architectures``, ``cards`` (for whose limits the code was made) and ``kernels``
    (`neml2_build.cross.binaries.Kernel`, as plain values).
    """

    pt2: bytes
    seconds: dict[str, float]
    notes: list[str]
    info: dict[str, Any]


def untested(torch: str, triton: str) -> str | None:
    """Why these versions are refused; None where they are tested."""
    if (torch.partition("+")[0], triton) in TESTED:
        return None
    tested = ", ".join(f"torch {a} with Triton {b}" for a, b in sorted(TESTED))
    return f"compiling for a GPU that is not here is tested with {tested}; this is torch {torch} with Triton {triton}"


def lower(
    program: Any,
    *,
    architectures: Sequence[str],
    inductor: Mapping[str, Any],
    march: str,
    work_dir: Path,
    prepared_dir: Path,
    isa: dict[str, Any] | None = None,
    allow_untested: bool = False,
) -> Lowered:
    """Compile one exported program for *architectures*. Runs in a worker.

    Parameters
    ----------
    program
        A ``torch.export.ExportedProgram`` on the CPU (changed).
    architectures
        Such as ``["sm_80", "sm_90"]``: one package has machine code for all of them, and PTX for later cards.
    inductor
        Inductor options. Those that measure on the device are left out, with a note.
    march
        What the host's code may use, as in the manifest.
    work_dir, prepared_dir
        Scratch folder of this call; folder of what is made once.
    isa
        What `neml2_build.toolchain.probe` found; None lets torch probe.
    allow_untested
        Whether to go on with versions of torch and Triton that are not in `TESTED`.

    Returns
    -------
    Lowered
        The package, and what is known of it.

    Raises
    ------
    TaskError
        Where something needed is missing, or the versions are not tested.
    Exception
        What torch raises for a program that it cannot compile.
    """
    from neml2_build import environment, toolchain
    from neml2_build.cross import driver, host, machine
    from neml2_build.cross.program import move
    from neml2_build.toolchain import archive, isa_for, prime, quick, seam

    _require(architectures, allow_untested)
    import torch

    toolkit = environment.cuda_toolkit(os.environ)
    compiler = environment.find_compiler(os.environ)
    if toolkit is None or compiler is None:
        raise TaskError("no CUDA toolkit or no C++ compiler", remedy="pip install 'neml2-build[cuda]'")
    libraries = None if driver.has_driver(str(compiler)) else driver.stub(prepared_dir, str(compiler))
    options, notes = _options(inductor)
    clock = toolchain._Clock()
    toolchain.forget(program)
    pretended = machine.Machine(cards=chosen(architectures), archs=_ordered(architectures), toolkit=toolkit)
    with contextlib.ExitStack() as stack:
        work = stack.enter_context(toolchain._scratch(work_dir.resolve()))
        stack.enter_context(toolchain._variables(TORCHINDUCTOR_CACHE_DIR=str(work / "inductor")))
        stack.enter_context(torch.random.fork_rng(devices=[]))
        torch.manual_seed(0)
        notes += stack.enter_context(prime(isa, march))
        notes += stack.enter_context(quick.applied(quick.LOWERING))
        level = isa_for(march)
        if level is not None:
            options = {"cpp.simdlen": level.simdlen, **options}
        folder = environment.package_folder("torch")
        assert folder is not None
        folders = {folder: "torch", toolkit: "cuda"}
        if stack.enter_context(seam.installed(lambda run: host.Host(run, march, folders))) is None:
            raise TaskError("this torch runs its compile commands in another way", remedy="install a torch that is tested")
        stack.enter_context(machine.pretended(pretended, libraries))
        move(program)
        clock.mark("load")
        package = work / f"{archive.ROOT}.pt2"
        torch._inductor.aoti_compile_and_package(program, package_path=str(package), inductor_configs=options)
        clock.mark("python")
        data = archive.canonicalize_pt2(package.read_bytes())
        clock.mark("archive")
    cards = [f"{card.arch} ({card.name})" for card in pretended.cards]
    info = {
        "unrun": UNRUN,
        "architectures": list(pretended.archs),
        "cards": cards,
        "kernels": [msgspec.to_builtins(kernel) for kernel in pretended.kernels],
    }
    return Lowered(data, clock.seconds, notes, info)


def _ordered(architectures: Sequence[str]) -> list[str]:
    return sorted(dict.fromkeys(architectures), key=lambda arch: (number(arch), arch))


def _require(architectures: Sequence[str], allow_untested: bool) -> None:
    """Raise `TaskError` for architectures that nothing is known of, and for versions that are not tested."""
    from importlib.metadata import PackageNotFoundError, version

    import torch

    strange = sorted(set(architectures) - set(known(architectures)))
    if strange or not architectures:
        raise TaskError(
            f"no card is known of {', '.join(strange) or 'no architecture'}",
            remedy=f"name one of {', '.join(CARDS)}; newer cards run the PTX that every package has",
        )
    try:
        found = version("triton")
    except PackageNotFoundError:
        raise TaskError("Triton is not installed", remedy="pip install 'neml2-build[cuda]'") from None
    why = untested(torch.__version__, found)
    if why is not None and not allow_untested:
        raise TaskError(why, remedy="build with --allow-untested-torch, and try the result before it is used")


def _options(inductor: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The options to compile with: those asked for, without what measures on a device, and those the patches rely on."""
    from neml2_build.cross.machine import MEASURING, OPTIONS

    options: dict[str, Any] = {"aot_inductor.precompile_headers": False}
    notes = []
    for name, value in inductor.items():
        if name in MEASURING and value:
            options.update(MEASURING[name])
            notes.append(f"{name} measures on a GPU: candidates are chosen by registers, spills and occupancy instead")
        else:
            options[name] = value
    return {**options, **OPTIONS}, notes
