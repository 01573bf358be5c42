"""What tests of the build share: a project in a temporary folder, built with the fake compiler in this process."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from neml2_build import environment as environments
from neml2_build import records
from neml2_build.build import Build
from neml2_build.cli import main, summarize
from neml2_build.compiler import FakeCompiler, RealCompiler
from neml2_build.digest import digest_file
from neml2_build.engine import execute
from neml2_build.manifest import Manifest, Model

ROOT = Path(__file__).parents[1]
SUITE = Path(os.environ.get("NEML2_BUILD_SUITE", ROOT.parent / "shared" / "suite"))

#: Two leaves of one composed model, one solver that it names, and blocks that it does not reach.
INPUT = """\
# rates
[Models]
  [one]
    type = Scale
    from = 'a'
    factor = 1.5
  []
  [two]
    type = Scale
    from = 'b'
    factor = 2.5
  []
  [eq]
    type = ComposedModel
    models = 'one two'
    solver = 'newton'
  []
  [other]
    type = Scale
    factor = 9.5
  []
[]
[Solvers]
  [newton]
    type = Newton
    abs_tol = 1e-8
  []
[]
[Drivers]
  [driver]
    type = ModelDriver
    model = 'eq'
    nsteps = 5
  []
[]
"""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one build did: the object of ``--json``, the calls of the fake compiler, stage → outcome of each target."""

    summary: dict[str, Any]
    calls: Counter[str]
    stages: dict[str, dict[str, str]]
    reasons: dict[str, dict[str, list[str]]]
    build: Build

    @property
    def targets(self) -> dict[str, int]:
        """Targets by what became of them, without the zeros."""
        return {name: count for name, count in self.summary["targets"].items() if count and name != "total"}

    @property
    def graphs(self) -> tuple[int, int]:
        """Graphs lowered and reused."""
        return self.summary["graphs"]["lowered"], self.summary["graphs"]["reused"]

    def ran(self, target: str = "eq") -> list[str]:
        """The stages of *target* that made something."""
        return [stage for stage, outcome in self.stages[target].items() if outcome == "built"]

    def why(self, stage: str, target: str = "eq") -> str:
        """The reasons of *stage*."""
        return "; ".join(self.reasons[target].get(stage, []))


class Project:
    """A project in the folder *root*: one input file and one target ``eq``, until a test says otherwise."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.options: dict[str, Any] = {}
        self.models: list[Model] = [Model(input="a.i", model="eq")]
        self.environ: dict[str, str] = dict(os.environ)
        root.mkdir(parents=True, exist_ok=True)
        self.write("a.i", INPUT)

    @property
    def aoti(self) -> Path:
        return self.root / "aoti"

    @property
    def cache(self) -> Path:
        return self.root / self.options.get("cache", "cache")

    def write(self, name: str, text: str | bytes) -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return path

    def edit(self, name: str, *changes: tuple[str, str]) -> None:
        """Replace in the file *name* the first text of each pair, which must be there, by the second."""
        text = (self.root / name).read_text()
        for old, new in changes:
            assert old in text, old
            text = text.replace(old, new)
        self.write(name, text)

    def manifest(self) -> Manifest:
        return Manifest(models=self.models, root=self.root, **self.options)

    def start(self, **options: Any) -> Build:
        """A build, not yet run."""
        options.setdefault("compiler", FakeCompiler(2))
        return Build(self.manifest(), environ=self.environ, **options)

    def build(self, *names: str, keep_going: bool = False, **options: Any) -> Outcome:
        """Build *names*, or everything, and close."""
        build = self.start(**options)
        runs = build.select(names)
        try:
            execute(build, runs, keep_going=keep_going)
        finally:
            build.close()
        compiler = build.compiler
        assert isinstance(compiler, FakeCompiler)
        return Outcome(
            summarize(build, runs, 0.0),
            compiler.calls,
            {run.target.name: dict(run.outcome) for run in runs},
            {run.target.name: {stage: [str(r) for r in found] for stage, found in run.reasons.items()} for run in runs},
            build,
        )

    def keys(self, target: str = "eq") -> dict[str, str]:
        """The key of each stage of *target*, of the last build."""
        found = records.Records(self.cache, self.aoti, self.root.resolve())
        stages = ("parse", "export", "lower-cpu", "package", "stub")
        return {stage: record.key for stage in stages if (record := found.read(target, stage)) is not None}

    def tree(self) -> dict[str, str]:
        """Digest of every published file."""
        return digests(self.aoti)

    def toml(self, text: str = '[[model]]\ninput = "a.i"\nmodel = "eq"\n') -> Path:
        return self.write("neml2-build.toml", text)

    def command(self, *arguments: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
        """``neml2-build`` with the fake compiler, in a process of its own."""
        return subprocess.run(
            command(*arguments),
            cwd=cwd or self.root,
            env=fake_environment(**environment),
            capture_output=True,
            text=True,
            timeout=120,
        )


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "neml2_build.cli", *arguments]


def fake_environment(**more: str) -> dict[str, str]:
    return {**os.environ, "NEML2_BUILD_COMPILER": "fake", "PYTHONPATH": str(ROOT), **more}


def digests(folder: Path) -> dict[str, str]:
    """Digest of every file below *folder*, by relative path."""
    return {path.relative_to(folder).as_posix(): digest_file(path) for path in sorted(folder.rglob("*")) if path.is_file()}


def listing(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Size, time of change and inode of everything below *folder*."""
    found = {}
    for path in sorted(folder.rglob("*")):
        stat = path.lstat()
        found[str(path.relative_to(folder))] = (stat.st_size, stat.st_mtime_ns, stat.st_ino)
    return found


@pytest.fixture(scope="session")
def machine() -> environments.Environment:
    """This machine, looked at once for all tests."""
    return environments.look(environments.Memo(), {"PATH": os.environ["PATH"]})


@pytest.fixture
def look(monkeypatch: pytest.MonkeyPatch, machine: environments.Environment) -> dict[str, Any]:
    """Fields to put in place of what this machine is; variables are those of the build's environment."""
    changes: dict[str, Any] = {}

    def stand_in(memo: Any, environ: dict[str, str]) -> environments.Environment:
        variables = {name: environ[name] for name in sorted(environ) if environments.hashed_variable(name)}
        return dataclasses.replace(machine, **{"variables": variables, **changes})

    monkeypatch.setattr(environments, "look", stand_in)
    return changes


@pytest.fixture
def project(tmp_path: Path, look: dict[str, Any]) -> Project:
    return Project(tmp_path / "project")


@pytest.fixture
def trust_stats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Believe every stat at once, as if two seconds had passed since the last change."""
    monkeypatch.setattr(records, "_SETTLED_NS", -(10**18))


@dataclasses.dataclass(frozen=True)
class Said:
    """What a command answered."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """The object on standard output, which holds nothing else."""
        return json.loads(self.out)


@pytest.fixture
def cli(project: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Any]:
    """Run ``neml2-build ARGUMENTS`` in this process, in the project's folder, with the fake compiler."""
    monkeypatch.setenv("NEML2_BUILD_COMPILER", "fake")
    monkeypatch.chdir(project.root)
    project.toml()

    def run(*arguments: str) -> Said:
        capsys.readouterr()
        with pytest.raises(SystemExit) as done:
            main(list(arguments))
        captured = capsys.readouterr()
        code = done.value.code
        return Said(code if isinstance(code, int) else -1, captured.out, captured.err)

    yield run


# -- the real exporter ------------------------------------------------------------------------------------------------


class Kept:
    """The real compiler, shared by tests: `Build.close` does not end it. Counts calls like the fake."""

    def __init__(self, real: RealCompiler) -> None:
        self._real = real
        self.name = real.name
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._real, name)
        if name not in ("export", "lower", "run"):
            return found

        def counted(*arguments: Any, **options: Any) -> Any:
            self.calls[name] += 1
            return found(*arguments, **options)

        return counted

    def close(self, *, kill: bool) -> None:
        pass


@pytest.fixture(scope="session", autouse=True)
def once_a_machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What is made once a machine is made once for all tests: 35 s of CPU for each real build with a cache of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NEML2_BUILD_MACHINE", os.environ.get("NEML2_BUILD_MACHINE") or str(tmp_path_factory.mktemp("machine")))
        yield


@pytest.fixture(scope="session")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealCompiler]:
    """Workers that have imported torch and NEML2 once for all tests (4 s), and can import `worker_jobs` from here."""
    environment = environments.worker_environment({**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{Path(__file__).parent}"})
    compiler = RealCompiler(2, environment, tmp_path_factory.mktemp("logs"))
    yield compiler
    compiler.close(kill=True)


@pytest.fixture
def real(workers: RealCompiler) -> Kept:
    return Kept(workers)
