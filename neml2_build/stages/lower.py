"""Lower: from one exported graph to one ``.pt2``, on one device.

A lowering depends on the graph's canonical digest and on who compiles, not on the model that the graph came from; so two
targets with the same graph share it, and a graph that another branch compiled comes back. To make that true the job takes
out of the program what differs between two targets with equal graphs (names of modules, sample values) before it compiles.

Graphs are lowered one a job, each in a fresh worker: a model of nine graphs fills every core.
"""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from neml2_build import versions
from neml2_build.errors import TaskError
from neml2_build.stages.export import captured, uncollected


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What a lowering job is sent.

    Attributes
    ----------
    graph
        Canonical digest of the graph.
    program
        The saved exported program.
    device
        ``cpu``, ``cuda``, or ``cuda:sm_90,...`` for named architectures.
    inductor
        Inductor options: NEML2's for this graph, then the user's.
    march
        As in the manifest.
    threads
        How many threads inductor plans for.
    isa
        What `probe` found on this machine.
    prepared, work
        Existing folders: pieces of the toolchain that are made once; scratch space, in which the job makes a folder of its own.
    stock
        Whether to compile exactly as torch does.
    debug
        Whether to keep line tables and everything inductor can tell.
    untested
        Whether to compile for named architectures with versions of torch and Triton on which that was never tested.
    operations
        Of the graph, as far as the caller knows: says how much memory the job will take.
    """

    graph: str
    program: bytes
    device: str
    inductor: dict[str, Any]
    march: str
    threads: int
    isa: dict[str, Any] | None
    prepared: str
    work: str
    stock: bool = False
    debug: bool = False
    untested: bool = False
    operations: int = 0


#: A graph of so many operations keeps torch's Python busy for longer than it takes to `prepare` what the compiler needs then.
LARGE = 1500


def memory_of(operations: int) -> int:
    """Bytes that lowering a graph of so many operations takes at most: its process, and the compiler beside it.

    Of 279 graphs of NEML2's own inputs the small ones took 0.4 GB, one of 5,400 operations 0.9 GB, one of 15,000 2.1 GB.
    """
    return 450_000_000 + 115_000 * operations


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The package, seconds by phase, what the user should know of how it was made, and what the record keeps of it."""

    package: bytes
    seconds: dict[str, float]
    notes: tuple[str, ...] = ()
    info: dict[str, Any] = msgspec.field(default_factory=dict)


def probe() -> dict[str, Any]:
    """Ask torch once what this CPU can do (5 s of compiles). Runs in a worker."""
    import json

    from neml2_build.toolchain import isa

    # torch keeps what it compiles to find out in a folder that it shares with every torch of this user.
    with tempfile.TemporaryDirectory(prefix="neml2-build-", ignore_cleanup_errors=True) as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        answers = isa.probe()
    # Plain values only: torch's version is a class of torch, which the process that asked would import to unpickle it.
    return json.loads(json.dumps(answers))


class Preparation(msgspec.Struct, frozen=True, kw_only=True):
    """What `prepare` is sent; fields as in `Request`."""

    march: str
    threads: int
    isa: dict[str, Any]
    prepared: str
    work: str


def prepare(request: Preparation) -> None:
    """Make the pieces of the toolchain that graphs for the CPU share (20 s of g++), by lowering a small one. Runs in a worker.

    Two graphs that come first would want the same pieces in the same order: one would make them, the other wait in its worker.
    """
    from neml2_build import toolchain

    with tempfile.TemporaryDirectory(dir=request.work, ignore_cleanup_errors=True) as work:
        toolchain.prepare(
            inductor={"cpp.threads": request.threads},
            prepared_dir=Path(request.prepared),
            work_dir=Path(work),
            isa=request.isa,
            march=request.march,
        )


def inductor_options() -> dict[str, Any]:
    """Every option of this torch's inductor with the name of its type. Runs in a worker."""
    import torch._inductor
    from torch._inductor import config

    options: dict[str, Any] = {}
    for name in torch._inductor.list_options():
        value: Any = config
        for part in name.split("."):
            value = getattr(value, part, None)
        options[name] = type(value).__name__
    return options


def wrong_option(name: str, value: Any, known: dict[str, str]) -> tuple[str, str] | None:
    """What is wrong with setting *name* to *value*, and what to do; None if nothing is.

    Parameters
    ----------
    known
        Answer of `inductor_options`. A type is compared where it is plain: torch documents no types, only defaults.
    """
    import difflib

    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        return (
            f"torch's inductor has no option '{name}'",
            f"did you mean '{near[0]}'?" if near else "see torch._inductor.config",
        )
    wanted = known[name]
    if wanted == "bool" and not isinstance(value, bool):
        return f"inductor option '{name}' is true or false, not {value!r}", f"write {name} = true"
    if wanted in ("int", "float") and (isinstance(value, bool) or not isinstance(value, (int, float))):
        return f"inductor option '{name}' is a number, not {value!r}", "write a number without quotes"
    if wanted == "str" and not isinstance(value, str):
        return f"inductor option '{name}' is text, not {value!r}", "put it in quotes"
    return None


def job(request: Request) -> Result:
    """Lower one graph. Runs in a fresh worker, or in one forked from the process that captured the graph."""
    from neml2_build import toolchain

    program = captured(request.graph)
    if program is None:
        program = load(request.program)
    family, _, architectures = request.device.partition(":")
    if family == "cuda" and not architectures:
        program = _on_cuda(program)
    try:
        # A folder of its own: two jobs that run at once would take each other's package for theirs.
        with tempfile.TemporaryDirectory(dir=request.work, ignore_cleanup_errors=True) as work, uncollected():
            if architectures:
                return _elsewhere(program, architectures.split(","), request, Path(work))
            lowered = toolchain.lower(
                program,
                inductor={"cpp.threads": request.threads, **request.inductor},
                prepared_dir=Path(request.prepared),
                work_dir=Path(work),
                stock=request.stock,
                isa=request.isa,
                march=request.march,
                debug=request.debug,
            )
    except TaskError:
        raise
    except Exception as error:
        raise _explain(error) from error
    return Result(package=lowered.pt2, seconds=lowered.seconds, notes=tuple(lowered.notes))


def _on_cuda(program: Any) -> Any:
    """*program* moved to the GPU of this machine and planned for a batch that fills it, or one line that says why not."""
    import torch
    from torch.export.passes import move_to_device_pass

    from neml2_build.cross.program import plan

    if not torch.cuda.is_available():
        raise TaskError(
            "this machine has no usable CUDA device",
            remedy="build on a machine with a GPU and driver, or remove 'cuda' from 'devices'",
        )
    plan(program)
    return move_to_device_pass(program, "cuda")


def _elsewhere(program: Any, architectures: list[str], request: Request, work: Path) -> Result:
    """*program* for named architectures, whatever GPU is here: the same code on every machine."""
    from neml2_build import cross

    made = cross.lower(
        program,
        architectures=architectures,
        inductor=request.inductor,
        march=request.march,
        work_dir=work,
        prepared_dir=Path(request.prepared),
        isa=request.isa,
        allow_untested=request.untested,
    )
    return Result(package=made.pt2, seconds=made.seconds, notes=tuple(made.notes), info={"cuda": made.info})


def load(data: bytes) -> Any:
    """The exported program saved in *data*, with NEML2's types and operators known, and no other pickle allowed."""
    import neml2.models.export  # noqa: F401 - registers the operators that graphs call
    import torch

    with _known_types(), _no_arbitrary_pickle():
        return torch.export.load(io.BytesIO(data))


@contextlib.contextmanager
def _known_types() -> Iterator[None]:
    """Sample inputs hold NEML2's tensor types; torch is told that these, and only these, may be unpickled."""
    import inspect

    import neml2.types as types
    import torch

    known: list[Any] = [value for name in dir(types) if inspect.isclass(value := getattr(types, name))]
    with torch.serialization.safe_globals(known):
        yield


@contextlib.contextmanager
def _no_arbitrary_pickle() -> Iterator[None]:
    """``torch.export.load`` falls back to unrestricted unpickling of the sample inputs (``torch/_export/serde/serialize.py``,
    ``deserialize_torch_artifact``); a store that several people write to must not run their code."""
    import torch

    stock = torch.load

    def strict(*args: Any, **kwargs: Any) -> Any:
        return stock(*args, **{**kwargs, "weights_only": True})

    torch.load = strict  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.load = stock


def _explain(error: Exception) -> TaskError:
    """The compiler's first error line, or inductor's message."""
    text = str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    compiler = [line for line in lines if "error:" in line or "undefined reference" in line or "No space left" in line]
    message = compiler[0] if compiler else (lines[0] if lines else type(error).__name__)
    remedy = None
    if any("No space left" in line for line in lines):
        remedy = "free some space, or set TMPDIR to a file system that has some"
    elif compiler:
        remedy = "run 'neml2-build doctor' to check the compiler, or build with --stock-toolchain"
    return TaskError(f"{type(error).__name__}: {message}"[:600], remedy=remedy)


def key_of(
    graph: str,
    *,
    device: str,
    dtype: str,
    inductor: dict[str, Any],
    march: str,
    environment: dict[str, Any],
    toolchain: dict[str, Any],
    debug: bool = False,
) -> dict[str, Any]:
    """What a lower key is made of.

    Parameters
    ----------
    graph
        Canonical digest of the exported graph.
    device, dtype, march
        As asked for.
    inductor
        All options in force.
    environment
        `Environment.for_lowering`.
    toolchain
        Identity of the compiler seam (``neml2_build.toolchain.identity``).
    debug
        Whether line tables are kept.
    """
    return {
        "stage": "lower",
        "version": versions.LOWER,
        "graph": graph,
        "device": device,
        "dtype": dtype,
        "inductor": inductor,
        "march": march,
        "environment": environment,
        "toolchain": toolchain,
        "debug": debug,
    }
