"""The process that workers are forked from: it has imported torch and NEML2 once, and has run no kernel.

Importing torch, NEML2 and inductor takes 3.7 s here; a fork of a process that has done so takes 10 ms, and starts as clean
as a new interpreter: extensions, the CSV cache and the type registry of one target never reach another. The rule that makes
fork safe is that this process runs no kernel: a child of a process whose OpenMP pool has started hangs at its first
parallel loop.

The same loop serves a second purpose. A worker that has captured the graphs of a model may stay (`Stay`) and fork from
itself once for each graph that is to be lowered: this saves loading the saved program, which takes as long as a tenth to a
half of a lowering.

Protocol, one connection a job over a Unix socket in a private folder: the client sends a `Call`; the child answers
``("started", pid)``, then ``("done", value, Usage)`` or ``("failed", exception, Usage)``. Each child leads a process group of
its own, so that one signal ends it and the compilers it runs. When the client goes away, so does everything here.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import pickle
import resource
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

from neml2_build.errors import BuildError

#: What a lowering needs, found by comparing ``sys.modules`` before and after one.
PRELOAD = (
    "torch",
    "torch._inductor.compile_fx",
    "torch._inductor.codegen.cpp_wrapper_cpu",
    "torch._inductor.codegen.cpp",
    "torch._inductor.codegen.cuda_combined_scheduling",
    "torch._inductor.fx_passes.post_grad",
    "torch._inductor.fx_passes.joint_graph",
    "torch._inductor.kernel.mm",
    "torch._inductor.package",
    "torch.export.passes",
    "torch.utils.mkldnn",
    "sympy.physics.units",  # sympy's simplify imports it when a kernel is vectorized: 0.12 s of CPU of each lowering
    "neml2",
    "neml2.cli.aoti_export",
    "neml2.cli.aoti_compile",
    "numpy",
)


@dataclass(frozen=True)
class Call:
    """A job: ``module:function`` called with *arguments*, its output to the file *log*."""

    function: str
    arguments: tuple
    log: str
    cwd: str


@dataclass(frozen=True)
class Usage:
    """What a job took: wall and CPU seconds (with the programs it ran), peak resident memory in bytes."""

    seconds: float
    cpu_seconds: float
    peak_bytes: int


@dataclass(frozen=True)
class Stay:
    """Returned by a job whose process is to serve further calls, forked from it, until the client hangs up.

    The client receives *value* and the address to call.
    """

    value: Any


@dataclass(frozen=True)
class Remote:
    """An exception that was not meant for the user, with the traceback of the process that it happened in."""

    kind: str
    message: str
    trace: str


def main() -> None:
    """Serve on the socket named by the first argument until standard input closes."""
    address = sys.argv[1]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the client decides what ends
    with Listener(address, family="AF_UNIX", backlog=128) as listener:
        preload(tables="--without-tables" not in sys.argv)
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        serve(listener, sys.stdin.fileno())
    flush()
    os._exit(0)  # nothing is left to do, and taking torch down takes 0.2 s for which the build would wait


def preload(*, tables: bool = True) -> None:
    """Import what jobs need. A module that this torch does not have is left out; torch and NEML2 themselves must import.

    With *tables*, also fill inductor's, which takes as long as it saves four lowerings.
    """
    os.environ["SYMPY_CACHE_SIZE"] = "200000"  # read at import; by default 1,000 answers, too few for a large graph: 4 %
    for name in PRELOAD:
        try:
            importlib.import_module(name)
        except ImportError:
            if name in ("torch", "neml2"):
                raise
    import sympy  # noqa: F401 - as torch has it
    import torch

    del os.environ["SYMPY_CACHE_SIZE"]

    torch.set_num_threads(1)
    from neml2_build import toolchain

    if tables:
        toolchain.warm()
    gc.collect()
    gc.freeze()  # the collector of a child would otherwise touch, and so copy, every page


def serve(listener: Listener, *lifelines: int) -> None:
    """Fork a child for every connection, until one of *lifelines* is readable: closed, or woken by a signal."""
    children: set[int] = set()
    socket = listener._listener._socket  # type: ignore[attr-defined]
    try:
        while True:
            ready, _, _ = select.select([socket, *lifelines], [], [], 1.0)
            reap(children)
            if any(lifeline in ready for lifeline in lifelines):
                break
            if socket in ready:
                connection = listener.accept()
                pid = os.fork()
                if pid == 0:
                    with contextlib.suppress(BaseException):
                        socket.close()
                        work(connection)
                    os._exit(0)
                children.add(pid)
                connection.close()
    finally:
        end(children)


def end(children: set[int]) -> None:
    """End *children* and what they run: asked first, since one that stays has children of its own to end."""
    groups = set(children)
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in groups:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, number)
        deadline = time.monotonic() + 2
        while children and time.monotonic() < deadline:
            reap(children)
            time.sleep(0.005)


def reap(children: set[int]) -> None:
    """Collect the children that have ended."""
    for pid in list(children):
        with contextlib.suppress(ChildProcessError):
            if os.waitpid(pid, os.WNOHANG)[0] == 0:
                continue
        children.discard(pid)


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies (Linux; elsewhere the closed socket ends it)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)


def renew_thread_pool() -> None:
    """Have torch make its pthreadpool anew, as it must in a forked child, while this is the only thread.

    ``caffe2::pthreadpool()`` drops the pool of the parent at its first call in a child, and for a moment there is none
    (caffe2/utils/threadpool/pthreadpool-cpp.cc): of two threads of autograd that start together, one then ends the process
    with "Invalid thread pool!". One export in seven that differentiates with autograd died of it.
    """
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)


def work(connection: Connection) -> None:
    """The life of a worker: one call, and where that returns `Stay`, calls served from here."""
    die_with_parent()
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    started = time.perf_counter()
    connection.send(("started", os.getpid()))
    call: Call = connection.recv()
    redirect(call.log)
    renew_thread_pool()
    try:
        os.chdir(call.cwd)
        value = resolve(call.function)(*call.arguments)
        answer = ("done", value)
    except BuildError as error:
        traceback.print_exc()
        answer = ("failed", error)
    except BaseException as error:
        traceback.print_exc()
        answer = ("failed", Remote(type(error).__name__, str(error), traceback.format_exc()))
    flush()
    own, ran = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    usage = Usage(
        time.perf_counter() - started,
        own.ru_utime + own.ru_stime + ran.ru_utime + ran.ru_stime,
        max(own.ru_maxrss, ran.ru_maxrss) * (1 if sys.platform == "darwin" else 1024),
    )
    if answer[0] == "done" and isinstance(answer[1], Stay):
        stay(connection, answer[1].value, usage)
        return
    send(connection, (*answer, usage))


def place_of_sockets() -> str:
    """Folder for folders of sockets: the temporary one, unless its name is too long for a socket's (108 bytes on Linux)."""
    usual = tempfile.gettempdir()
    return usual if len(os.fsencode(usual)) <= 80 else "/tmp"


def stay(connection: Connection, value: Any, usage: Usage) -> None:
    """Answer, and serve calls at a new address until the client hangs up."""
    folder = tempfile.mkdtemp(prefix="neml2-build-", dir=place_of_sockets())
    address = str(Path(folder) / "s")
    gc.collect()
    gc.freeze()
    # SIGTERM wakes `serve`, which then ends its children: an exception might come while it does so already, and stop it.
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        with Listener(address, family="AF_UNIX", backlog=64) as listener:
            send(connection, ("stays", value, usage, address))
            serve(listener, connection.fileno(), woken)
    finally:
        with contextlib.suppress(OSError):
            Path(address).unlink(missing_ok=True)
            Path(folder).rmdir()


def send(connection: Connection, answer: tuple) -> None:
    """Send *answer*; what cannot be pickled becomes a failure that says so."""
    try:
        data = pickle.dumps(answer, protocol=5)
    except Exception as error:
        data = pickle.dumps(("failed", Remote(type(error).__name__, f"the result cannot be sent: {error}", ""), answer[2]))
    connection.send_bytes(data)


def resolve(function: str) -> Callable[..., Any]:
    """The function named ``module:function``."""
    module, _, name = function.partition(":")
    return getattr(importlib.import_module(module), name)


def redirect(log: str) -> None:
    """Send standard output and error of this process and of what it runs to the file *log*."""
    flush()
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(target)
    os.close(nothing)


def flush() -> None:
    """Write out what the standard streams hold back."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


if __name__ == "__main__":
    from neml2_build import forkserver  # the module that jobs import, not this second copy named __main__

    forkserver.main()
