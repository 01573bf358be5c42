"""Where jobs run: an executor whose workers are forked from a process that has imported torch and NEML2 once.

`ForkExecutor` is a `concurrent.futures.Executor`, and jobs are module-level functions of picklable arguments (bytes in, bytes
out), so another engine behind that interface can run the same jobs on other machines. What it adds is an order (longest
first), a bound on memory (a job that would not fit beside those that run waits for them, and the later ones with it, so that
it gets its turn), and `near`: a call made in a process that already holds what the job needs.

The server is started at the first job, so a build that restores everything never imports torch.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

from neml2_build.errors import TaskError
from neml2_build.forkserver import Call, Remote, Usage, place_of_sockets


class WorkerFailed(Exception):
    """A job ended in an exception that was not made for the user, or its process died.

    Attributes
    ----------
    kind
        Name of the exception's class, or ``"died"``.
    message, trace
        What it said; the traceback of the worker.
    log
        File with all that the worker printed.
    """

    def __init__(self, kind: str, message: str, trace: str, log: str) -> None:
        super().__init__(message)
        self.kind, self.message, self.trace, self.log = kind, message, trace, log


@dataclass(frozen=True)
class Done:
    """The value of a job, what it took, and the process that stays near it, if any."""

    value: Any
    usage: Usage
    near: Near | None = None


class Near:
    """A worker that stays, and serves calls forked from itself until `close`."""

    def __init__(self, address: str, connection: Connection) -> None:
        self.address = address
        self._connection = connection

    def close(self) -> None:
        """Let the process end. May be called twice."""
        with contextlib.suppress(OSError):
            self._connection.close()


class ForkExecutor(Executor):
    """At most *jobs* workers at a time, forked from a preloaded server.

    Parameters
    ----------
    jobs
        How many workers run at once.
    environment
        The whole environment of the workers.
    folder
        Existing folder for logs.
    few
        Whether few jobs will come, so that filling tables for them beforehand would take longer than it saves.
    memory
        Bytes that jobs may take together, as far as their needs are known; None for no bound. One job alone always runs.
    """

    def __init__(
        self, jobs: int, environment: Mapping[str, str], folder: Path, *, few: bool = False, memory: int | None = None
    ) -> None:
        self.jobs = jobs
        self._memory = memory
        self._taken: list[int] = []
        self._few = few
        self._environment = dict(environment)
        self._folder = folder
        self._queue: list[tuple[float, int, Call, Near | None, Future, int]] = []
        self._order = itertools.count()
        self._wake = threading.Condition()
        self._held: set[Future] = set()
        self._running: dict[int, Future] = {}
        self._threads: list[threading.Thread] = []
        self._closed = False
        self._server: subprocess.Popen | None = None
        self._server_lock = threading.Lock()
        self._socket_folder: tempfile.TemporaryDirectory | None = None
        self._start_error: str | None = None

    @property
    def started(self) -> bool:
        """Whether the server was started, that is: whether torch was imported."""
        return self._server is not None

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future:
        """Run ``fn(*args)`` in a worker; the future's result is the bare value, as the standard interface has it."""
        if kwargs:
            raise TypeError("jobs take positional arguments only")
        outer: Future = Future()

        def forward(inner: Future) -> None:
            error = inner.exception()
            if error is not None:
                outer.set_exception(error)
            else:
                outer.set_result(inner.result().value)

        self.call(fn, *args).add_done_callback(forward)
        return outer

    def call(
        self,
        fn: Callable[..., Any],
        /,
        *args: Any,
        priority: float = 0.0,
        near: Near | None = None,
        cwd: str | None = None,
        memory: int = 0,
        after: Future | None = None,
    ) -> Future:
        """As `submit`, with a result of type `Done`.

        Parameters
        ----------
        priority
            Jobs of a higher number start first; equal ones in the order of their coming.
        near
            Fork from this process instead of from the server.
        cwd
            Working directory of the job.
        memory
            Bytes that it is expected to take.
        after
            Wait for this one, however it ends, while other jobs run.
        """
        future: Future = Future()
        log = self._folder / f"{os.getpid()}-{next(self._order)}.log"
        call = Call(f"{fn.__module__}:{fn.__qualname__}", args, str(log), cwd or str(self._folder))

        def enter(_: Future | None = None) -> None:
            with self._wake:
                if future not in self._held:
                    return  # cancelled by a shutdown
                self._held.remove(future)
                heapq.heappush(self._queue, (-priority, next(self._order), call, near, future, memory))
                if len(self._threads) < self.jobs:
                    thread = threading.Thread(target=self._serve, daemon=True)
                    self._threads.append(thread)
                    thread.start()
                self._wake.notify()

        with self._wake:
            if self._closed:
                raise RuntimeError("the executor is shut down")
            self._held.add(future)
        if after is None:
            enter()
        else:
            after.add_done_callback(enter)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End: with *cancel_futures* what waits is cancelled and what runs is killed."""
        with self._wake:
            self._closed = True
            if cancel_futures:
                while self._held:
                    self._held.pop().cancel()
                while self._queue:
                    heapq.heappop(self._queue)[4].cancel()
                for pid in list(self._running):
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.killpg(pid, signal.SIGKILL)
            self._wake.notify_all()
        if wait:
            for thread in self._threads:
                thread.join()
        with self._server_lock:
            if self._server is not None and self._server.stdin is not None:
                self._server.stdin.close()
                if wait:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        self._server.wait(10)
            if self._socket_folder is not None:
                self._socket_folder.cleanup()
                self._socket_folder = None

    # -- threads ------------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while True:
            with self._wake:
                while not (self._queue and self._fits(self._queue[0][5])):
                    if self._closed and not self._queue and not self._held:
                        return
                    self._wake.wait()
                _, _, call, near, future, memory = heapq.heappop(self._queue)
                self._taken.append(memory)
            try:
                if future.set_running_or_notify_cancel():
                    self._answer(call, near, future)
            finally:
                with self._wake:
                    self._taken.remove(memory)
                    self._wake.notify_all()

    def _fits(self, memory: int) -> bool:
        """Whether a job that takes *memory* may run beside those that do."""
        return self._memory is None or not self._taken or sum(self._taken) + memory <= self._memory

    def _answer(self, call: Call, near: Near | None, future: Future) -> None:
        try:
            future.set_result(self._run(call, near, future))
        except BaseException as error:
            future.set_exception(error)

    def _run(self, call: Call, near: Near | None, future: Future) -> Done:
        connection = self._connect(near)
        pid = None
        try:
            try:
                _, pid = connection.recv()
                self._running[pid] = future
                connection.send(call)
                answer = connection.recv()
            except (EOFError, OSError) as error:
                raise WorkerFailed("died", self._last_words(call, pid), "", call.log) from error
        except BaseException:
            connection.close()
            raise
        finally:
            if pid is not None:
                self._running.pop(pid, None)
        if answer[0] == "stays":
            self._forget(call)
            return Done(answer[1], answer[2], Near(answer[3], connection))
        connection.close()
        if answer[0] == "done":
            self._forget(call)
            return Done(answer[1], answer[2])
        error = answer[1]
        if isinstance(error, Remote):
            raise WorkerFailed(error.kind, error.message, error.trace, call.log)
        raise error

    @staticmethod
    def _forget(call: Call) -> None:
        with contextlib.suppress(OSError):
            os.unlink(call.log)

    @staticmethod
    def _last_words(call: Call, pid: int | None) -> str:
        with contextlib.suppress(OSError):
            lines = [line.strip() for line in Path(call.log).read_text(errors="replace").splitlines()]
            # the C++ runtime ends with what was thrown, then a stack of which no line says anything to a user
            thrown = [line.partition("what():")[2] for line in lines if line.startswith("what():")]
            said = [line for line in lines if line and not line.startswith("frame #")]
            if said:
                return f"the worker process died: {(thrown or said)[-1].strip()}"
        return "the worker process died without a word: killed, or out of memory"

    def _connect(self, near: Near | None) -> Connection:
        address = near.address if near is not None else self._start()
        deadline = time.monotonic() + 10
        while True:
            try:
                return Client(address, family="AF_UNIX")
            except (ConnectionRefusedError, FileNotFoundError, BlockingIOError) as error:
                if near is not None or time.monotonic() > deadline:
                    raise WorkerFailed("died", "the process to fork workers from is gone", "", "") from error
                time.sleep(0.05)

    def _start(self) -> str:
        """Start the server once, and wait until it has imported everything; its address."""
        with self._server_lock:
            if self._start_error is not None:
                raise TaskError(self._start_error, remedy="run 'neml2-build doctor'")
            if self._socket_folder is None:
                self._socket_folder = tempfile.TemporaryDirectory(
                    prefix="neml2-build-", dir=place_of_sockets(), ignore_cleanup_errors=True
                )
            address = str(Path(self._socket_folder.name) / "s")
            if self._server is None:
                log = self._folder / f"{os.getpid()}-server.log"
                with log.open("wb") as stream:
                    self._server = subprocess.Popen(
                        [sys.executable, "-m", "neml2_build.forkserver", address, *(["--without-tables"] if self._few else [])],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=stream,
                        # what jobs leave in the temporary folder, killed or not, goes with the server
                        env={**self._environment, "PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": self._socket_folder.name},
                        start_new_session=True,
                    )
                assert self._server.stdout is not None
                if self._server.stdout.readline() != b"ready\n":
                    said = log.read_text(errors="replace").strip().splitlines()
                    self._start_error = f"torch and NEML2 cannot be imported: {said[-1] if said else 'no message'}"
                    raise TaskError(self._start_error, log=log, remedy="run 'neml2-build doctor'")
                log.unlink(missing_ok=True)
            return address
