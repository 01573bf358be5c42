"""From an exported graph to a ``.pt2``, with torch's own code and a cheaper way to the same machine code.

`lower` is what a worker calls; the rest of the package is how: `isa` (what the CPU can do, asked once), `quick` (Python that is
not repeated), `seam` (the compile commands of a graph), `upstream` (which texts of torch may be cut, and the check), `prepared`
and `stubs` (pieces made once), `archive` (one form for the result). ``stock=True`` turns all of it off except the last.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from neml2_build.environment import package_folder
from neml2_build.toolchain import archive, prepared, quick, seam, upstream
from neml2_build.toolchain.isa import isa_for, prime, probe, silent

__all__ = ["Lowered", "identity", "isa_for", "lower", "prepare", "prime", "probe", "warm"]

#: Raised when `lower` makes other bytes of the same program.
VERSION = 1

_FORGOTTEN = ("stack_trace", "nn_module_stack", "source_fn_stack", "from_node", "torch_fn")


@dataclass(frozen=True)
class Lowered:
    """A package, wall seconds by phase, and what the user should know of how it was made."""

    pt2: bytes
    seconds: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def identity(stock: bool) -> dict[str, Any]:
    """What of the toolchain a lower key holds; torch is not imported.

    With *stock*, only the form of the package: the rest is torch's and the compiler's own identity.
    """
    if stock:
        return {"way": "stock", "version": VERSION}
    versions = [VERSION, seam.VERSION, prepared.VERSION]
    return {"way": "cut", "version": versions, "texts": upstream.identity(package_folder("torch"))}


def lower(
    program: Any,
    *,
    inductor: Mapping[str, Any],
    prepared_dir: Path,
    work_dir: Path,
    stock: bool = False,
    isa: dict[str, Any] | None = None,
    march: str = "native",
    debug: bool = False,
) -> Lowered:
    """Compile one exported program. Runs in a worker.

    Parameters
    ----------
    program
        A ``torch.export.ExportedProgram`` (changed: see `forget`) or one saved as bytes.
    inductor
        Inductor options, as ``torch._inductor.aoti_compile_and_package`` takes them.
    prepared_dir
        Folder for pieces that are made once; shared by any number of processes.
    work_dir
        Scratch folder of this call; inductor's cache lies in it.
    stock
        Whether torch runs its compile commands by itself.
    isa
        What `probe` returned on this machine; None lets torch probe.
    march
        ``native``, or a level that the code must not go beyond.
    debug
        Whether to keep line tables and debug symbols.

    Returns
    -------
    Lowered
        *seconds* has ``load``, ``prepare``, ``wrapper``, ``kernel``, ``weights``, ``link``, ``python``, ``archive``.

    Raises
    ------
    Exception
        What torch raises for a program that it cannot compile.
    """
    import torch

    clock = _Clock()
    if isinstance(program, (bytes, bytearray)):
        program = _load(bytes(program))
    forget(program)
    clock.mark("load")
    notes: list[str] = []
    device = _device(program)
    if device != "cpu" and not stock:
        notes.append(f"compiled as torch does: the shorter way is for the CPU, this graph is for {device}")
        stock = True
    with contextlib.ExitStack() as stack:
        work = stack.enter_context(_scratch(work_dir))
        stack.enter_context(_variables(TORCHINDUCTOR_CACHE_DIR=str(work / "inductor")))
        stack.enter_context(torch.random.fork_rng(devices=[]))
        torch.manual_seed(0)  # large constants are found again in the library by a random number (codecache.py, magic_number)
        if device == "cpu":
            notes += stack.enter_context(prime(isa, march))
        if not stock and not debug:
            notes += stack.enter_context(quick.applied(quick.LOWERING))
        used = _install(stack, prepared_dir, stock, march, debug, notes) if device == "cpu" else None
        package = work / f"{archive.ROOT}.pt2"
        options = _options(inductor, fast=used is not None and not stock, march=march, debug=debug)
        torch._inductor.aoti_compile_and_package(program, package_path=str(package), inductor_configs=options)
        clock.mark("python", less=sum(used.seconds.values()) if used else 0.0)
        data = archive.canonicalize_pt2(package.read_bytes())
        clock.mark("archive")
    if used:
        notes += used.notes
    return Lowered(data, {**clock.seconds, **(used.seconds if used else {})}, notes)


def forget(program: Any) -> None:
    """Take out of *program* what must not matter: where its operations were written, and the values of sample inputs."""
    import torch
    from torch.utils import _pytree

    for module in program.graph_module.modules():
        for node in getattr(getattr(module, "graph", None), "nodes", ()):
            for name in _FORGOTTEN:
                node.meta.pop(name, None)
    if program.example_inputs is not None:
        program.example_inputs = _pytree.tree_map_only(torch.Tensor, torch.zeros_like, program.example_inputs)


def warm() -> str | None:
    """Lower a small graph, without a compiler, in the process that workers are forked from.

    A first lowering imports 60 modules, traces the patterns of the optimizer and fills tables: 0.4 s of CPU that no worker
    then spends. No thread is left and no process is started, so that forking stays safe.

    Returns
    -------
    str or None
        Why this could not be done, which is no harm.
    """
    import torch
    from torch._inductor import config

    with contextlib.suppress(ImportError):
        import tqdm

        tqdm.tqdm.monitor_interval = 0  # torch/fx/interpreter.py makes a bar, whose class would start a thread
    metadata = dict(config.aot_inductor.metadata)
    try:
        with contextlib.ExitStack() as stack:
            work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="neml2-build-")))
            stack.enter_context(_variables(TORCHINDUCTOR_CACHE_DIR=str(work)))
            stack.enter_context(torch.random.fork_rng(devices=[]))
            stack.enter_context(prime(silent(), "x86-64"))
            if stack.enter_context(seam.installed(lambda run: _pretend)) is None:
                return "this torch runs its compile commands in another way"
            options = {"aot_inductor.precompile_headers": False}
            torch._inductor.aoti_compile_and_package(_small(), package_path=str(work / "w.pt2"), inductor_configs=options)
    except Exception as error:  # a torch that is built in another way is used as it is
        return f"{type(error).__name__}: {error}"
    finally:
        config.aot_inductor.metadata = metadata
    return None


def prepare(
    *, inductor: Mapping[str, Any], prepared_dir: Path, work_dir: Path, isa: dict[str, Any] | None, march: str = "native"
) -> None:
    """Make the pieces that every graph needs, by lowering a small one; parameters as of `lower`. Runs in a worker."""
    lower(_small(), inductor=inductor, prepared_dir=prepared_dir, work_dir=work_dir, isa=isa, march=march)


def _small() -> Any:
    import torch

    class Small(torch.nn.Module):
        def forward(self, x: Any, y: Any) -> Any:
            return torch.cat([x * y + torch.exp(x), x @ y.transpose(-1, -2) @ y], -1), torch.linalg.solve(y.mT @ y, y.mT)

    batch = torch.export.Dim("batch", min=2, max=1 << 20)
    example = torch.ones(2, 3, 3, dtype=torch.float64)
    return torch.export.export(Small(), (example, example.clone()), dynamic_shapes=({0: batch}, {0: batch}))


def _pretend(cmd_line: str, cwd: str) -> None:
    """Stands for a compiler: an empty output."""
    del cwd
    Path(seam.parse(cmd_line).output).write_bytes(bytes(64))


def _load(data: bytes) -> Any:
    from neml2_build.stages.lower import load

    return load(data)


def _device(program: Any) -> str:
    """Type of the device that *program* computes on: the first that is not the CPU, if any."""
    import torch

    values = [node.meta.get("val") for node in program.graph_module.graph.nodes]
    kinds = {value.device.type for value in values if isinstance(value, torch.Tensor)}
    return next(iter(sorted(kinds - {"cpu", "meta"})), "cpu")


def _install(
    stack: contextlib.ExitStack, prepared_dir: Path, stock: bool, march: str, debug: bool, notes: list[str]
) -> seam.Seam | None:
    """The seam, in its place; None where it has nothing to do or no place."""
    if stock and march == "native":
        return None
    folder = package_folder("torch")
    if folder is None:
        notes.append("compiled as torch does: its folder was not found")
        return None

    def make(run: seam.Run) -> seam.Seam:
        return seam.Seam(prepared=prepared_dir, torch_folder=folder, run=run, stock=stock, march=march, debug=debug)

    used = stack.enter_context(seam.installed(make))
    if used is None:
        notes.append("compiled as torch does: this torch runs its compile commands in another way")
    return used


def _options(inductor: Mapping[str, Any], *, fast: bool, march: str, debug: bool) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if fast or march != "native":
        # torch keeps its headers in a folder shared by everybody, whatever the cache folder, and by a key that does not hold
        # what -march was rewritten to
        options["aot_inductor.precompile_headers"] = False
    if debug:
        options["aot_inductor.debug_symbols"] = True
    return {**options, **inductor}


@contextlib.contextmanager
def _scratch(work_dir: Path) -> Iterator[Path]:
    """*work_dir*, or another folder where torch could not write its commands for it (it does not quote blanks)."""
    if not any(blank in str(work_dir) for blank in " \t\n'\"\\"):
        work_dir.mkdir(parents=True, exist_ok=True)
        yield work_dir
        return
    with tempfile.TemporaryDirectory(prefix="neml2-build-") as folder:
        yield Path(folder)


@contextlib.contextmanager
def _variables(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


class _Clock:
    """Wall seconds since the last mark."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def mark(self, phase: str, less: float = 0.0) -> None:
        now = time.perf_counter()
        self.seconds[phase] = now - self._last - less
        self._last = now
