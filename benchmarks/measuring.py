"""Two commands side by side: wall and CPU seconds, and the memory of everything that they start.

The sides take turns, so that a machine which grows slower while it measures is slower for both; the figure of a row is the
median of the ratios of neighbours. CPU seconds are the kernel's account of the process and of all its descendants that were
waited for. They depend less than wall seconds on what else the machine does, so both are kept.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

#: How often the memory of a process tree is looked at, in seconds: the processes that count live for seconds.
SAMPLE_SECONDS = 0.1

#: Variables that would let one side do what the other does not, or take what another run left.
_DROPPED = ("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX", "TORCHINDUCTOR_CACHE_DIR", "TMPDIR")
_DROPPED_PREFIXES = ("NEML2_BUILD_", "TORCHINDUCTOR_", "AOT_INDUCTOR_", "TORCH_")


class Failed(RuntimeError):
    """A command that is measured ended with an error: no figure is given of it."""


@dataclass(frozen=True)
class Run:
    """What one command took: wall seconds, CPU seconds, and peak memory in bytes where it was sampled."""

    seconds: float
    cpu_seconds: float
    peak_bytes: int = 0
    output: str = ""


def environment(scratch: Path, **more: str) -> dict[str, str]:
    """The environment of a command: this process's without what would favour a side, and caches of its own in *scratch*.

    Byte code is allowed, as it is in an installation: both sides start from it.
    """
    kept = {
        name: value for name, value in os.environ.items() if name not in _DROPPED and not name.startswith(_DROPPED_PREFIXES)
    }
    for name in ("tmp", "inductor"):
        (scratch / name).mkdir(parents=True, exist_ok=True)
    return {**kept, "TMPDIR": str(scratch / "tmp"), "TORCHINDUCTOR_CACHE_DIR": str(scratch / "inductor"), **more}


def program(name: str) -> list[str]:
    """The command *name* of the environment that this Python belongs to."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise Failed(f"{name} is not installed beside {sys.executable}")
    return [found]


def run(command: Sequence[str], *, cwd: Path, env: Mapping[str, str], sample: bool = False) -> Run:
    """Run *command* to its end. Raises `Failed` with the last it said if it does not end well."""
    with tempfile.TemporaryFile() as said:
        began = time.perf_counter()
        process = subprocess.Popen(
            list(command), cwd=cwd, env=dict(env), stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT
        )
        watch = Watch(process.pid) if sample else None
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        peak = watch.stop() if watch is not None else 0
        said.seek(0)
        output = said.read().decode(errors="replace")
    if process.returncode != 0:
        raise Failed(f"{' '.join(command)[:300]}: exit {process.returncode}: {output[-600:]}")
    return Run(seconds, usage.ru_utime + usage.ru_stime, peak, output)


class Watch:
    """The most memory that a process and everything it starts held at one time, as the sum of proportional set sizes.

    A proportional set counts a page that several processes share once, divided among them: pages of a forked process are not
    counted twice, and libraries that two programs map are shared between these two.
    """

    def __init__(self, pid: int) -> None:
        self._tree = Tree(pid)
        self._peak = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._done.is_set():
            self._peak = max(self._peak, sum(map(proportional_set, self._tree.living())))
            self._done.wait(SAMPLE_SECONDS)

    def stop(self) -> int:
        """The peak in bytes."""
        self._done.set()
        self._thread.join()
        return self._peak


class Tree:
    """A process and all that it started, found by looking again and again.

    One that was seen once belongs to the tree until it ends, whoever its parent is by then.
    """

    def __init__(self, pid: int) -> None:
        self._known = {pid: _parent_and_start(pid)[1]}

    def living(self) -> list[int]:
        """Process ids of those alive now."""
        found = {int(name): _parent_and_start(int(name)) for name in os.listdir("/proc") if name.isdigit()}
        self._known = {pid: start for pid, start in self._known.items() if pid in found and found[pid][1] == start}
        grew = True
        while grew:
            new = {pid: start for pid, (parent, start) in found.items() if parent in self._known and pid not in self._known}
            self._known.update(new)
            grew = bool(new)
        return list(self._known)


def _parent_and_start(pid: int) -> tuple[int, int]:
    """Parent and start time of process *pid*; (0, 0) if it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0, 0
    fields = text.rpartition(")")[2].split()
    return int(fields[1]), int(fields[19])


def proportional_set(pid: int) -> int:
    """Proportional set size of *pid* in bytes; 0 if it is gone."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def in_turn(ours: Callable[[], Run], other: Callable[[], Run], rounds: int) -> tuple[list[Run], list[Run]]:
    """*rounds* runs of both sides, one after the other; who begins changes from round to round."""
    mine: list[Run] = []
    theirs: list[Run] = []
    for number in range(rounds):
        first, second = ((ours, mine), (other, theirs)) if number % 2 == 0 else ((other, theirs), (ours, mine))
        for work, runs in (first, second):
            runs.append(work())
    return mine, theirs


def ratio_of_pairs(over: Sequence[float], under: Sequence[float]) -> float:
    """Median of the ratios of neighbours."""
    return statistics.median(a / b for a, b in zip(over, under, strict=True))


def load() -> float:
    """How many processes wanted to run in the last minute; this program's own are among them."""
    return round(os.getloadavg()[0], 2)
