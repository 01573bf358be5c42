"""Jobs that tests of the workers run; workers import this module by name."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from neml2_build.errors import TaskError
from neml2_build.forkserver import Stay

kept: dict[str, Any] = {}


def add(a: int, b: int) -> int:
    return a + b


def pid() -> int:
    return os.getpid()


def parent() -> int:
    return os.getppid()


def where() -> tuple[str, dict[str, str]]:
    return os.getcwd(), dict(os.environ)


def leave_traces() -> list[str]:
    """What is left by earlier jobs, then traces of this one: in modules, the environment, threads, audit hooks, umask."""
    found = [name for name in ("leaked_module",) if name in sys.modules]
    found += sorted(kept)
    found += [name for name in os.environ if name == "LEAKED"]
    import torch

    found += [] if torch.get_default_dtype() == torch.float32 else ["dtype"]
    sys.modules["leaked_module"] = sys
    kept["value"] = 1
    os.environ["LEAKED"] = "1"
    torch.set_default_dtype(torch.float64)
    os.chdir("/")
    return found


def sum_in_parallel() -> float:
    """A parallel loop of OpenMP: hangs in a child of a process that ran one."""
    import torch

    torch.set_num_threads(2)
    return float(torch.ones(4_000_000, dtype=torch.float64).sum())


def die(how: str) -> None:
    print("last words", flush=True)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "exit":
        os._exit(7)
    if how == "abort":  # as the C++ runtime does for an exception of torch that nothing caught
        print("terminate called after throwing an instance of 'c10::Error'\n  what():  Invalid pool", file=sys.stderr)
        print(
            "Exception raised from here:\nframe #0: one\nframe #1: <unknown function> + 0x1098ec", file=sys.stderr, flush=True
        )
        os.abort()
    raise SystemExit(3)


def fail(how: str) -> None:
    if how == "task":
        raise TaskError("the user's mistake", file="a.i", line=3, remedy="mend it")
    if how == "unpicklable":
        raise _Strange(lambda: None)
    raise ValueError("a defect")


class _Strange(Exception):
    pass


def unpicklable() -> Any:
    return lambda: None


def print_much(lines: int) -> str:
    for number in range(lines):
        print("x" * 200, number)
    sys.stdout.flush()
    subprocess.run(["echo", "from a program"], check=True)
    os.write(2, b"to standard error\n")
    return "done"


def read_input() -> str:
    return sys.stdin.read() if sys.stdin else ""


def sleep_with_child(mark: str) -> None:
    """Runs a program that would outlive the job, names it in the file *mark*."""
    child = subprocess.Popen(["sleep", "1000"])
    Path(mark).write_text(f"{os.getpid()} {child.pid}")
    time.sleep(1000)


def wait_for(path: str) -> str:
    while not Path(path).exists():
        time.sleep(0.005)
    return path


def note(path: str, text: str) -> None:
    with open(path, "ab", buffering=0) as stream:
        stream.write(f"{text}\n".encode())


def big(size: int) -> bytes:
    return bytes(size)


def length(data: bytes) -> int:
    return len(data)


def stay(value: int) -> Stay:
    kept["staying"] = value
    return Stay(value)


def look_near() -> int | None:
    return kept.get("staying")


def load_program(data: bytes) -> str:
    """What `lower.load` makes of *data*: the kind of the result or of the exception."""
    from neml2_build.stages import lower

    try:
        return type(lower.load(data)).__name__
    except Exception as error:
        return f"{type(error).__name__}: {error}"
