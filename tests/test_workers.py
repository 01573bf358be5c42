"""Workers: forked from one process that imported torch and NEML2; each job starts clean, and none outlives its client."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, Executor, Future
from pathlib import Path
from typing import Any

import pytest
import worker_jobs as jobs
from conftest import ROOT

from neml2_build import environment as environments
from neml2_build.compiler import RealCompiler
from neml2_build.errors import TaskError
from neml2_build.workers import ForkExecutor, WorkerFailed


@pytest.fixture(scope="module")
def executor(workers: RealCompiler) -> ForkExecutor:
    return workers._executor


def result(future: Future) -> Any:
    return future.result(timeout=120)


def processes() -> dict[int, tuple[int, str]]:
    """Every process: parent and command line."""
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                stat = Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()
                line = Path("/proc", entry, "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if stat[0] != "Z":
                found[int(entry)] = (int(stat[1]), line)
    return found


def gone(*pids: int, seconds: float = 20.0) -> bool:
    """Whether the processes end within *seconds*."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not set(pids) & set(processes()):
            return True
        time.sleep(0.01)
    return False


def named_in(mark: Path) -> list[int]:
    """The job and the program that it runs, once `worker_jobs.sleep_with_child` has named both in *mark*."""
    jobs.wait_for(str(mark))
    while len(mark.read_text().split()) < 2:
        time.sleep(0.001)
    return list(map(int, mark.read_text().split()))


class TestJobs:
    def test_it_is_an_executor_of_the_standard_interface(self, executor: ForkExecutor) -> None:
        assert isinstance(executor, Executor)
        assert result(executor.submit(jobs.add, 2, 3)) == 5
        assert list(executor.map(jobs.add, range(4), range(4))) == [0, 2, 4, 6]
        with pytest.raises(TypeError):
            executor.submit(jobs.add, a=1, b=2)

    def test_a_call_says_what_it_took(self, executor: ForkExecutor) -> None:
        done = result(executor.call(jobs.add, 2, 3))
        assert done.value == 5
        assert 0 <= done.usage.seconds < 60
        assert done.usage.peak_bytes > 10_000_000
        assert done.near is None

    def test_each_job_is_a_process_of_its_own(self, executor: ForkExecutor) -> None:
        pids = [result(executor.submit(jobs.pid)) for _ in range(4)]
        assert len({*pids, os.getpid()}) == 5
        assert gone(*pids)

    def test_nothing_of_one_job_reaches_the_next(self, executor: ForkExecutor) -> None:
        for _ in range(3):
            assert result(executor.submit(jobs.leave_traces)) == []

    def test_a_parallel_loop_runs_in_every_fork(self, executor: ForkExecutor) -> None:
        for _ in range(3):
            assert result(executor.submit(jobs.sum_in_parallel)) == 4e6

    def test_where_it_runs(self, executor: ForkExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("NEML2_BUILD_SECRET", "x")
        done = result(executor.call(jobs.where, cwd=str(tmp_path)))
        assert done.value[0] == str(tmp_path)
        assert "NEML2_BUILD_SECRET" not in done.value[1]
        assert set(done.value[1]) <= {
            name for name in done.value[1] if environments.hashed_variable(name) or name in environments.PASSED_NAMES
        } | {"PYTHONDONTWRITEBYTECODE", "LC_CTYPE", "KMP_INIT_AT_FORK", "KMP_DUPLICATE_LIB_OK", *environments.DROPPED_NAMES}

    def test_large_arguments_and_results(self, executor: ForkExecutor) -> None:
        assert result(executor.submit(jobs.length, bytes(50_000_000))) == 50_000_000
        assert len(result(executor.submit(jobs.big, 50_000_000))) == 50_000_000

    def test_printing_goes_to_a_log_that_success_removes(self, executor: ForkExecutor) -> None:
        before = set(os.listdir(executor._folder))
        assert result(executor.submit(jobs.print_much, 20_000)) == "done"
        assert set(os.listdir(executor._folder)) == before

    def test_standard_input_is_empty(self, executor: ForkExecutor) -> None:
        assert result(executor.submit(jobs.read_input)) == ""

    def test_the_longest_first(self, executor: ForkExecutor, tmp_path: Path) -> None:
        gate, log = tmp_path / "gate", tmp_path / "log"
        holding = [executor.call(jobs.wait_for, str(gate), priority=1e9) for _ in range(executor.jobs)]
        while sum(future.running() for future in holding) < executor.jobs:
            time.sleep(0.001)
        rest = [executor.call(jobs.note, str(log), str(number), priority=float(number)) for number in (1, 3, 2)]
        # One worker takes them in turn while the other still waits at its own gate.
        slow = executor.call(jobs.wait_for, str(tmp_path / "second gate"), priority=1e8)
        gate.touch()
        for future in rest:
            result(future)
        (tmp_path / "second gate").touch()
        result(slow)
        assert log.read_text().split() == ["3", "2", "1"]


class TestMemory:
    """With the real queue and threads, and jobs that only wait: what matters is which of them run at once."""

    @pytest.fixture
    def gate(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
        running: list[str] = []
        seen: list[tuple[str, ...]] = []
        lock, go = threading.Lock(), threading.Event()

        def run(self: ForkExecutor, call: Any, near: Any, future: Future) -> str:
            (name,) = call.arguments
            with lock:
                running.append(name)
                seen.append(tuple(sorted(running)))
            go.wait(0.05)
            with lock:
                running.remove(name)
            return name

        monkeypatch.setattr(ForkExecutor, "_run", run)

        def at_once(memory: int | None, *wanted: tuple[str, int]) -> set[tuple[str, ...]]:
            seen.clear()
            executor = ForkExecutor(4, {}, tmp_path, memory=memory)
            futures = [
                executor.call(jobs.add, name, memory=size, priority=-number) for number, (name, size) in enumerate(wanted)
            ]
            assert sorted(result(future) for future in futures) == sorted(name for name, _ in wanted)
            executor.shutdown()
            return set(seen)

        return at_once

    def test_what_does_not_fit_waits(self, gate: Any) -> None:
        assert all(len(names) <= 2 for names in gate(10, *((name, 5) for name in "abcdef")))
        assert all(len(names) == 1 for names in gate(10, ("a", 6), ("b", 6), ("c", 6)))

    def test_what_never_fits_runs_alone(self, gate: Any) -> None:
        assert {names for names in gate(10, ("a", 2), ("big", 50), ("b", 2)) if "big" in names} == {("big",)}

    def test_without_a_bound_or_a_need_nothing_waits(self, gate: Any) -> None:
        assert max(map(len, gate(None, *((name, 50) for name in "abcd")))) > 1
        assert max(map(len, gate(10, *((name, 0) for name in "abcd")))) > 1


class TestAfter:
    """A job that waits for another holds no worker. The jobs themselves are replaced: the order is what is looked at."""

    @pytest.fixture()
    def one_worker(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ForkExecutor]:
        executor = ForkExecutor(1, {}, tmp_path)
        monkeypatch.setattr(ForkExecutor, "_run", lambda self, call, near, future: call.arguments[0])
        yield executor
        executor.shutdown(cancel_futures=True)

    @pytest.mark.parametrize("end", ["value", "error", "cancel"])
    def test_it_waits_while_others_run_however_the_first_ends(self, one_worker: ForkExecutor, end: str) -> None:
        first: Future = Future()
        held = one_worker.call(jobs.add, "held", priority=9.0, after=first)
        assert result(one_worker.call(jobs.add, "other")) == "other"
        assert not held.done()
        if end == "value":
            first.set_result(None)
        elif end == "error":
            first.set_exception(OSError())
        else:
            first.cancel()
        assert result(held) == "held"

    def test_of_what_is_done_already_nothing_waits(self, one_worker: ForkExecutor) -> None:
        first = one_worker.call(jobs.add, "first")
        result(first)
        assert result(one_worker.call(jobs.add, "second", after=first)) == "second"

    def test_a_shutdown_waits_for_it(self, one_worker: ForkExecutor) -> None:
        first: Future = Future()
        held = one_worker.call(jobs.add, "held", after=first)
        result(one_worker.call(jobs.add, "other"))
        threading.Timer(0.2, first.set_result, [None]).start()
        one_worker.shutdown()
        assert held.done() and result(held) == "held"

    def test_a_shutdown_that_cancels_cancels_it(self, one_worker: ForkExecutor) -> None:
        first: Future = Future()
        held = one_worker.call(jobs.add, "held", after=first)
        one_worker.shutdown(cancel_futures=True)
        with pytest.raises(CancelledError):
            result(held)
        first.set_result(None)  # too late, and no harm


class TestFailures:
    @pytest.mark.parametrize("how", ["kill", "exit"])
    def test_a_job_that_dies(self, executor: ForkExecutor, how: str) -> None:
        with pytest.raises(WorkerFailed) as caught:
            result(executor.submit(jobs.die, how))
        assert caught.value.kind == "died"
        assert "last words" in str(caught.value)
        assert "last words" in Path(caught.value.log).read_text()
        assert result(executor.submit(jobs.add, 1, 1)) == 2

    def test_of_an_exception_that_ended_the_process_what_it_says_is_told(self, executor: ForkExecutor) -> None:
        with pytest.raises(WorkerFailed) as caught:
            result(executor.submit(jobs.die, "abort"))
        assert str(caught.value) == "the worker process died: Invalid pool"

    def test_a_job_that_exits(self, executor: ForkExecutor) -> None:
        with pytest.raises(WorkerFailed) as caught:
            result(executor.submit(jobs.die, "system exit"))
        assert caught.value.kind == "SystemExit"

    def test_a_users_mistake_comes_as_it_is(self, executor: ForkExecutor) -> None:
        with pytest.raises(TaskError) as caught:
            result(executor.submit(jobs.fail, "task"))
        assert (caught.value.message, caught.value.file, caught.value.line, caught.value.remedy) == (
            "the user's mistake",
            "a.i",
            3,
            "mend it",
        )

    @pytest.mark.parametrize(("how", "kind"), [("defect", "ValueError"), ("unpicklable", "_Strange")])
    def test_a_defect_comes_with_its_traceback(self, executor: ForkExecutor, how: str, kind: str) -> None:
        with pytest.raises(WorkerFailed) as caught:
            result(executor.submit(jobs.fail, how))
        assert caught.value.kind == kind
        assert "worker_jobs.py" in caught.value.trace
        assert "worker_jobs.py" in Path(caught.value.log).read_text()

    def test_a_result_that_cannot_be_sent(self, executor: ForkExecutor) -> None:
        with pytest.raises(WorkerFailed, match="the result cannot be sent"):
            result(executor.submit(jobs.unpicklable))

    def test_an_argument_that_cannot_be_sent(self, executor: ForkExecutor) -> None:
        with pytest.raises((pickle.PicklingError, AttributeError, TypeError)):
            result(executor.submit(jobs.length, lambda: None))
        assert result(executor.submit(jobs.add, 1, 1)) == 2

    def test_a_function_that_is_not_there(self, executor: ForkExecutor) -> None:
        def local() -> None: ...

        with pytest.raises(WorkerFailed):
            result(executor.submit(local))


class TestNear:
    def test_calls_are_forked_from_the_process_that_stays(self, executor: ForkExecutor) -> None:
        done = result(executor.call(jobs.stay, 42))
        assert done.value == 42
        assert done.near is not None
        near = [result(executor.call(jobs.look_near, near=done.near)).value for _ in range(3)]
        assert near == [42, 42, 42]
        assert result(executor.call(jobs.look_near)).value is None
        inside = result(executor.call(jobs.pid, near=done.near)).value
        folder = Path(done.near.address).parent
        assert folder.exists()
        done.near.close()
        done.near.close()
        assert gone(inside)
        deadline = time.monotonic() + 20
        while folder.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not folder.exists()

    def test_what_near_jobs_run_ends_when_the_client_hangs_up_and_the_server_ends_at_once(
        self, executor: ForkExecutor, tmp_path: Path
    ) -> None:
        """Both reach the process that stays: the one must not stop it in the middle of what it does about the other."""
        for number in range(60):
            done = result(executor.call(jobs.stay, number))
            stays = result(executor.call(jobs.parent, near=done.near)).value
            mark = tmp_path / str(number)
            running = executor.call(jobs.sleep_with_child, str(mark), near=done.near)
            pids = named_in(mark)
            done.near.close()
            until = time.perf_counter() + 5e-6 * number
            while time.perf_counter() < until:
                pass
            os.kill(stays, signal.SIGTERM)
            left = [pid for pid in pids if not gone(pid, seconds=5)]
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            assert not left, f"round {number}"
            assert running.exception() is not None

    def test_a_near_process_that_is_gone(self, executor: ForkExecutor) -> None:
        done = result(executor.call(jobs.stay, 1))
        done.near.close()
        folder = Path(done.near.address).parent
        while folder.exists():
            time.sleep(0.01)
        with pytest.raises(WorkerFailed) as caught:
            result(executor.call(jobs.look_near, near=done.near))
        assert caught.value.kind == "died"


CLIENT = """
import sys
from pathlib import Path
import worker_jobs as jobs
from neml2_build import environment as environments
from neml2_build.workers import ForkExecutor
import os
executor = ForkExecutor(2, environments.worker_environment(os.environ), Path(sys.argv[1]))
near = executor.call(jobs.stay, 1).result().near
running = executor.submit(jobs.sleep_with_child, sys.argv[2])
beside = executor.call(jobs.sleep_with_child, sys.argv[3], near=near)
print(executor._server.pid, flush=True)
{end}
"""


@pytest.mark.parametrize("end", ["killed", "shutdown"])
def test_nothing_outlives_its_client(tmp_path: Path, end: str) -> None:
    """The client is killed, or shuts down at once: server, jobs, near processes, and the programs that they run are gone."""
    if not Path("/proc/self/stat").exists():
        pytest.skip("needs /proc")
    tail = "running.result()" if end == "killed" else "sys.stdin.readline(); executor.shutdown(wait=True, cancel_futures=True)"
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{Path(__file__).parent}"}
    client = subprocess.Popen(
        [sys.executable, "-c", CLIENT.format(end=tail), str(tmp_path), str(tmp_path / "one"), str(tmp_path / "two")],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert client.stdout is not None
    server = int(client.stdout.readline())
    pids = [server]
    for mark in ("one", "two"):
        pids += named_in(tmp_path / mark)
    assert set(pids) <= set(processes())
    if end == "killed":
        client.send_signal(signal.SIGKILL)
    else:
        client.communicate("\n", timeout=60)
    client.wait(timeout=60)
    left = [pid for pid in pids if not gone(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left


class TestShutdown:
    def test_before_anything_ran_nothing_is_started(self, tmp_path: Path) -> None:
        executor = ForkExecutor(2, {}, tmp_path)
        assert not executor.started
        executor.shutdown()
        assert not executor.started
        with pytest.raises(RuntimeError):
            executor.submit(jobs.add, 1, 1)

    def test_what_waits_is_cancelled_and_what_runs_is_killed(self, tmp_path: Path) -> None:
        environment = environments.worker_environment(
            {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{Path(__file__).parent}"}
        )
        executor = ForkExecutor(1, environment, tmp_path)
        running = executor.submit(jobs.sleep_with_child, str(tmp_path / "mark"))
        waiting = executor.call(jobs.add, 1, 1)
        jobs.wait_for(str(tmp_path / "mark"))
        executor.shutdown(wait=True, cancel_futures=True)
        with pytest.raises(CancelledError):
            waiting.result(timeout=1)
        with pytest.raises((WorkerFailed, CancelledError)):
            running.result(timeout=1)
        assert gone(*map(int, (tmp_path / "mark").read_text().split()))

    def test_a_server_that_cannot_import_is_one_message(self, tmp_path: Path) -> None:
        (tmp_path / "broken" / "torch").mkdir(parents=True)
        (tmp_path / "broken" / "torch" / "__init__.py").write_text("raise ImportError('this torch is broken')\n")
        environment = {**os.environ, "PYTHONPATH": f"{tmp_path / 'broken'}{os.pathsep}{ROOT}"}
        executor = ForkExecutor(1, environment, tmp_path)
        for _ in range(2):
            with pytest.raises(TaskError, match="this torch is broken") as caught:
                result(executor.submit(jobs.add, 1, 1))
            assert "doctor" in (caught.value.remedy or "")
        executor.shutdown()
