"""Who does the heavy work: NEML2 and torch in workers, or a fake that tests and benchmarks of the build itself use.

Both answer the same three calls with futures. The fake makes deterministic bytes of the slice, one graph a block of
``[Models]``, so that edits reach the stages that they would really reach; its name is in every key, so that nothing it made
can pass for the real thing.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

from neml2_build import hit
from neml2_build.digest import canonical_json, digest
from neml2_build.environment import available_memory
from neml2_build.errors import TaskError
from neml2_build.forkserver import Usage
from neml2_build.identity import REAL
from neml2_build.stages import export, lower
from neml2_build.workers import Done, ForkExecutor, Near

#: Priority of what many jobs wait for.
_FIRST = 1e9


class Compiler(Protocol):
    """Makes graphs of slices and packages of graphs. Futures give `Done`."""

    name: str

    def export(self, request: export.Request, *, priority: float, cwd: str) -> Future:
        """Capture the graphs of a model: `export.Result`."""
        ...

    def lower(self, request: lower.Request, *, priority: float, near: Near | None) -> Future:
        """Lower a graph: `lower.Result`."""
        ...

    def prepare(self, request: lower.Preparation) -> Future:
        """Make what is made once a machine; graphs that would need it before it is there are lowered after it."""
        ...

    def run(self, function: Any, *arguments: Any) -> Future:
        """Another job that needs NEML2 or torch."""
        ...

    @property
    def torch_imported(self) -> bool:
        """Whether torch was imported for this build, in whatever process."""
        ...

    def close(self, *, kill: bool) -> None:
        """End; with *kill*, do not wait for what is running."""
        ...


class RealCompiler:
    """NEML2's exporter and torch's AOTInductor, in workers forked from one preloaded process."""

    name = REAL

    def __init__(self, jobs: int, environment: Mapping[str, str], logs: Path, *, few: bool = False) -> None:
        self._executor = ForkExecutor(jobs, environment, logs, few=few, memory=available_memory())
        self._prepared: Future | None = None

    def export(self, request: export.Request, *, priority: float, cwd: str) -> Future:
        return self._executor.call(export.job, request, priority=priority, cwd=cwd, memory=request.memory)

    def lower(self, request: lower.Request, *, priority: float, near: Near | None) -> Future:
        memory = lower.memory_of(request.operations)
        after = self._prepared if request.operations < lower.LARGE else None
        return self._executor.call(lower.job, request, priority=priority, near=near, memory=memory, after=after)

    def prepare(self, request: lower.Preparation) -> Future:
        self._prepared = self._executor.call(lower.prepare, request, priority=_FIRST, memory=lower.memory_of(0))
        return self._prepared

    def run(self, function: Any, *arguments: Any) -> Future:
        return self._executor.call(function, *arguments, priority=_FIRST)

    @property
    def torch_imported(self) -> bool:
        return self._executor.started

    def close(self, *, kill: bool) -> None:
        self._executor.shutdown(wait=not kill, cancel_futures=True)


class FakeCompiler:
    """Deterministic bytes in place of compiled code; counts its calls in `calls`.

    Fields that steer it: ``fail = 'export'`` or ``'lower'`` in a block of ``[Models]`` makes that stage of it fail.
    ``NEML2_BUILD_FAKE_DELAY`` is how many seconds each call takes; to the file ``NEML2_BUILD_FAKE_LOG`` each call adds a line
    when it ends (what, the target or the graph, process), so that the calls of several processes are counted together.
    """

    name = "fake"
    torch_imported = False

    def __init__(self, jobs: int = 2) -> None:
        self._pool = ThreadPoolExecutor(jobs)
        self._lock = threading.Lock()
        self._delay = float(os.environ.get("NEML2_BUILD_FAKE_DELAY") or 0)
        self._log = os.environ.get("NEML2_BUILD_FAKE_LOG")
        self.calls: Counter[str] = Counter()

    def export(self, request: export.Request, *, priority: float, cwd: str) -> Future:
        return self._pool.submit(self._done, "export", request.target, self._export, request)

    def lower(self, request: lower.Request, *, priority: float, near: Near | None) -> Future:
        return self._pool.submit(self._done, "lower", request.graph, self._lower, request)

    def prepare(self, request: lower.Preparation) -> Future:
        return self._pool.submit(self._done, "prepare", "", str, "")

    def run(self, function: Any, *arguments: Any) -> Future:
        return self._pool.submit(self._done, "run", "", function, *arguments)

    def close(self, *, kill: bool) -> None:
        self._pool.shutdown(wait=not kill, cancel_futures=True)

    def _done(self, what: str, subject: str, work: Any, *arguments: Any) -> Done:
        with self._lock:
            self.calls[what] += 1
        time.sleep(self._delay)
        done = Done(work(*arguments), Usage(0.0, 0.0, 0))
        if self._log:
            with open(self._log, "ab", buffering=0) as log:
                log.write(f"{what} {subject} {os.getpid()}\n".encode())
        return done

    def _export(self, request: export.Request) -> export.Result:
        values = hit.fields(request.slice)
        leaves: dict[str, dict[str, str]] = {}
        for path, value in values.items():
            section, _, rest = path.partition("/")
            if section == "Models":
                name, _, field = rest.partition("/")
                leaves.setdefault(name, {})[field] = value
        tensors = {path: value for path, value in values.items() if path.startswith("Tensors/")}
        opened = [value for path, value in values.items() if path.endswith("/csv_file")]
        files = [Path(request.input).parent / name for name in opened]
        for file in files:
            if not file.exists():
                raise TaskError(f"no such file: {file.name}", file=request.input, target=request.target, stage="export")
        contents = [digest(file.read_bytes()) for file in files]
        promoted = {}
        for parameter in request.options["promoted"]:
            block, _, field = parameter.partition(".")
            promoted[parameter] = leaves.get(block, {}).pop(field, None)
        graphs = []
        for name, fields in sorted(leaves.items()):
            if fields.get("fail") == "export":
                raise TaskError("told to fail", file=request.input, target=request.target, stage="export")
            if "models" in fields:
                continue
            program = canonical_json([fields, tensors, contents])
            graphs.append(export.Graph(f"{request.model}_{name}.pt2", digest(program), program, {}, len(fields)))
        metadata = {
            "schema_version": 14,
            "model": request.model,
            "graphs": [graph.name for graph in graphs],
            "solvers": {path: value for path, value in values.items() if path.startswith("Solvers/")},
            "aliases": request.options["renames"],
            "parameters": promoted,
        }
        return export.Result(
            graphs=tuple(graphs),
            metadata=json.dumps(metadata, indent=2).encode(),
            opened=tuple((str(file.resolve()), found) for file, found in zip(files, contents, strict=True)),
        )

    def _lower(self, request: lower.Request) -> lower.Result:
        if json.loads(request.program)[0].get("fail") == "lower":
            raise TaskError("told to fail")
        package = b"fake " + canonical_json([request.graph, request.device, request.inductor, request.march])
        return lower.Result(package=package, seconds={})


def chosen(jobs: int, environ: Mapping[str, str]) -> Compiler | None:
    """The fake where ``NEML2_BUILD_COMPILER=fake`` asks for it, in tests and benchmarks; None stands for the real one."""
    return FakeCompiler(jobs) if environ.get("NEML2_BUILD_COMPILER") == "fake" else None
