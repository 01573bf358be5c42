"""Runs the tasks of a build with doit, in threads that wait for workers.

The tasks themselves do little: they look things up and wait. So there are more threads than workers, and what runs at once is
bounded by the workers alone. doit's database is kept in memory here: our records decide.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from doit.cmd_base import TaskLoader2
from doit.doit_cmd import DoitMain
from doit.loader import generate_tasks

from neml2_build.build import Build
from neml2_build.errors import TaskError
from neml2_build.target import TargetRun
from neml2_build.tasks import tasks_of


class MemoryDB:
    """A doit database that is forgotten with the process."""

    desc = "kept in memory"

    def __init__(self, name: str, codec: Any, *, module_name: str | None = None) -> None:
        self.name = name
        self._values: dict[str, dict[str, Any]] = {}

    def dump(self) -> None:
        """Nothing is kept."""

    def set(self, task_id: str, dependency: str, value: Any) -> None:
        self._values.setdefault(task_id, {})[dependency] = value

    def get(self, task_id: str, dependency: str) -> Any:
        return self._values.get(task_id, {}).get(dependency)

    def in_(self, task_id: str) -> bool:
        return task_id in self._values

    def remove(self, task_id: str) -> None:
        self._values.pop(task_id, None)

    def remove_all(self) -> None:
        self._values.clear()


class _Quiet:
    """A doit reporter that prints nothing: the journal tells what happens. Notes what is no task's own failure."""

    desc = "silent"

    def __init__(self, outstream: Any, options: dict[str, Any]) -> None:
        self.errors: list[str] = []

    def initialize(self, tasks: Any, selected_tasks: Any) -> None: ...

    def get_status(self, task: Any) -> None: ...

    def execute_task(self, task: Any) -> None: ...

    def add_failure(self, task: Any, fail: Any) -> None:
        trace = getattr(fail, "traceback", None)
        if trace:
            Unexpected.found.append((task.name, "".join(trace)))

    def add_success(self, task: Any) -> None: ...

    def skip_uptodate(self, task: Any) -> None: ...

    def skip_ignore(self, task: Any) -> None: ...

    def cleanup_error(self, exception: Any) -> None: ...

    def runtime_error(self, msg: str) -> None:
        Unexpected.found.append(("", msg))

    def teardown_task(self, task: Any) -> None: ...

    def complete_run(self) -> None: ...


class Unexpected:
    """Failures that are no `BuildError`, that is: defects of this program, with their tracebacks."""

    found: list[tuple[str, str]] = []  # noqa: RUF012 - doit makes the reporter itself


class _Loader(TaskLoader2):
    def __init__(self, tasks: list[Any], config: dict[str, Any]) -> None:
        super().__init__()
        self._tasks, self._config = tasks, config

    def load_doit_config(self) -> dict[str, Any]:
        return self._config

    def load_tasks(self, cmd: Any, pos_args: Any) -> list[Any]:
        return self._tasks


def run_tasks(build: Build, stale: Sequence[TargetRun], *, keep_going: bool) -> None:
    """Do the tasks of *stale*, longest first; what fails is noted in `Build.failures`.

    One model of thousands of operations takes as long as all others of a suite: begun last, it runs alone at the end.
    """
    stale = sorted(stale, key=TargetRun.expected_seconds, reverse=True)
    tasks = list(generate_tasks("neml2", tasks_of(stale, keep_going=keep_going)))
    # Target by target, not stage by stage as doit's groups would have it: graphs are lowered while the process that captured
    # them lives, and what is finished first is published first.
    # More than run at once: the order of jobs is chosen among those that were asked for, of which some wait (`ask_ahead`).
    threads = max(2, min(len(stale) * 2, 2 * build.jobs + 8))
    config = {
        "backend": "memory",
        "dep_file": "unused",
        "reporter": _Quiet,
        "verbosity": 0,
        "continue": keep_going,
        "default_tasks": [f"{stage}:{run.target.name}" for run in stale for stage in run.stages],
        "num_process": threads,
        "par_type": "thread",
    }
    Unexpected.found.clear()
    extra = {"BACKEND": {"memory": "neml2_build.runner:MemoryDB"}}
    if DoitMain(_Loader(tasks, config), config_filenames=(), extra_config=extra).run(["run"]) == 3:
        raise RuntimeError("doit could not run the tasks")
    for name, trace in Unexpected.found:
        stage, _, target = name.partition(":")
        last = trace.strip().splitlines()[-1] if trace.strip() else "unknown"
        error = TaskError(f"internal error: {last}", remedy="this is a defect of neml2-build; run with -v for the traceback")
        error.__cause__ = RuntimeError(trace)
        if target in build.runs:
            build.runs[target].failed = error
        build.fail(error, target, stage)
