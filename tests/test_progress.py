"""What a build shows: counts, lines and logs; never times."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from neml2_build.build import Build, Counts
from neml2_build.compiler import FakeCompiler
from neml2_build.engine import execute
from neml2_build.errors import TaskError
from neml2_build.events import Event
from neml2_build.manifest import Manifest, Model
from neml2_build.progress import (
    LOG_BYTES,
    LOG_LINES,
    Progress,
    bar,
    clock,
    is_terminal,
    job_line,
    log_text,
    screen,
    show,
)
from neml2_build.target import TargetRun


def project(root: Path, count: int = 3, *, fail: str = "") -> Manifest:
    """*count* targets of two graphs each; the first fails in the stage *fail*."""
    models = []
    for number in range(count):
        trouble = f"    fail = '{fail}'\n" if fail and number == 0 else ""
        text = (
            f"[Models]\n  [a]\n    type = A\n    value = {number}\n{trouble}  []\n  [m]\n    type = B\n    of = 'a'\n  []\n[]\n"
        )
        (root / f"m{number}.i").write_text(text)
        models.append(Model(input=f"m{number}.i", model="m", name=f"target{number}"))
    return Manifest(models=models, root=root)


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


def run(manifest: Manifest, stream: io.StringIO, *, verbose: bool = False, quiet: bool = False, environ=None) -> Build:
    build = Build(manifest, compiler=FakeCompiler(), environ={"PATH": "/usr/bin:/bin", "TERM": "xterm", **(environ or {})})
    with show(build, quiet=quiet, verbose=verbose, stream=stream):
        execute(build, list(build.runs.values()), keep_going=True)
    build.close()
    build.journal.tell("build-end", seconds=0.0)
    return build


def test_a_pipe_gets_one_plain_line_a_target(tmp_path):
    stream = io.StringIO()
    run(project(tmp_path), stream)
    lines = stream.getvalue().splitlines()
    assert sorted(re.sub(r"^\[ *[\d.]+ s\] ", "", line).split(" ", 1)[1].split(" (")[0] for line in lines) == [
        "target0: built",
        "target1: built",
        "target2: built",
    ]
    assert sorted(re.search(r"(\d)/3", line).group(1) for line in lines) == ["1", "2", "3"]  # type: ignore[union-attr]
    assert stream.getvalue().isascii() and "\x1b" not in stream.getvalue()


def test_verbose_says_why_and_quiet_says_nothing(tmp_path):
    manifest = project(tmp_path, 1)
    stream = io.StringIO()
    run(manifest, stream, verbose=True)
    assert stream.getvalue().count("because first-build") == 5
    assert stream.getvalue().count(" compiled (") == 2
    silent = io.StringIO()
    (tmp_path / "m0.i").write_text((tmp_path / "m0.i").read_text().replace("value = 0", "value = 7"))
    run(manifest, silent, quiet=True)
    assert silent.getvalue() == ""


def test_a_target_that_was_up_to_date_has_no_line(tmp_path):
    manifest = project(tmp_path)
    run(manifest, io.StringIO())
    stream = io.StringIO()
    (tmp_path / "m1.i").write_text("# a comment\n" + (tmp_path / "m1.i").read_text())
    run(manifest, stream)
    assert [line.split("/3 ")[1].split(":")[0] for line in stream.getvalue().splitlines()] == ["target1"]


@dataclass
class _Failing:
    """A build's stand-in whose only failure has a log."""

    counts = Counts()

    log: Path
    environ: dict = field(default_factory=dict)
    jobs: int = 2

    def __post_init__(self):
        from neml2_build.events import Journal

        self.journal = Journal()
        self.failures = [TaskError("broken", target="t", stage="export", log=self.log)]
        self.runs = {}


def test_the_log_of_a_failed_job_is_shown_in_full(tmp_path):
    log = tmp_path / "job.log"
    log.write_text("".join(f"line {number}\n" for number in range(500)))
    build = _Failing(log)
    stream = io.StringIO()
    with show(build, quiet=False, verbose=False, stream=stream):  # type: ignore[arg-type]
        build.journal.tell("failure", target="t", stage="export", info={"message": "broken"})
    lines = stream.getvalue().splitlines()
    assert lines[0] == "----- log of export:t -----" and lines[-1] == "----- end of log of export:t -----"
    assert lines[1:-1] == [f"line {number}" for number in range(500)]


def test_the_log_of_a_failure_appears_on_a_terminal_too(tmp_path):
    log = tmp_path / "job.log"
    log.write_text("what the [bold]compiler[/] said\n")
    build = _Failing(log)
    stream = Tty()
    with show(build, quiet=False, verbose=False, stream=stream):  # type: ignore[arg-type]
        build.journal.tell("failure", target="t", stage="export", info={"message": "broken"})
    assert "what the [bold]compiler[/] said" in stream.getvalue()


def test_a_huge_log_is_shown_from_its_end(tmp_path):
    log = tmp_path / "job.log"
    lines = [f"line {number:06} " + "x" * 50 for number in range(5000)]
    log.write_text("\n".join(lines) + "\n")
    shown = (log_text(log) or "").splitlines()
    assert str(log) in shown[0] and "KiB left out" in shown[0]
    assert shown[1:] == lines[-LOG_LINES:]
    assert log.stat().st_size > LOG_BYTES
    assert log_text(tmp_path / "none") is None


@pytest.mark.parametrize(
    ("environ", "expected"),
    [({}, True), ({"CI": "true"}, False), ({"CI": ""}, True), ({"CI": "false"}, True), ({"TERM": "dumb"}, False)],
)
def test_a_terminal_is_what_can_be_redrawn(environ, expected):
    assert is_terminal(Tty(), environ) is expected
    assert is_terminal(io.StringIO(), environ) is False


def test_on_ci_a_terminal_gets_plain_lines(tmp_path):
    stream = Tty()
    run(project(tmp_path), stream, environ={"CI": "1"})
    assert "\x1b" not in stream.getvalue() and len(stream.getvalue().splitlines()) == 3


def test_the_live_view_leaves_nothing_behind_on_success(tmp_path, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    stream = Tty()
    run(project(tmp_path), stream)
    assert "targets" in stream.getvalue()
    assert "target0:" not in stream.getvalue()


def test_no_color_is_honoured(tmp_path, monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", "1")
    stream = Tty()
    run(project(tmp_path), stream)
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", stream.getvalue())


def test_rich_is_not_imported_for_a_pipe(tmp_path):
    project(tmp_path, 1)
    (tmp_path / "neml2-build.toml").write_text("[[model]]\ninput = 'm0.i'\nmodel = 'm'\n")
    code = """
import sys
from neml2_build.cli import main
try:
    main(["build"])
except SystemExit:
    print("rich" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "NEML2_BUILD_COMPILER": "fake"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "False"


def progress_of(root: Path, count: int, jobs: int) -> tuple[Progress, list[float]]:
    build = Build(project(root, count), jobs=jobs, compiler=FakeCompiler(), environ={"PATH": "/usr/bin:/bin"})
    now = [0.0]
    progress = Progress(build, clock=lambda: now[0])
    for name, target in build.runs.items():
        progress.hear(Event("target-planned", 0.0, name, info={"stages": list(target.stages)}))
    return progress, now


def test_workers_take_what_takes_longest(tmp_path, monkeypatch):
    seconds = {"target0": 3.0, "target1": 2.0, "target2": 9.0}
    monkeypatch.setattr(TargetRun, "priority", lambda run, stage, graph="": seconds[run.target.name])
    progress, _ = progress_of(tmp_path, 3, 1)
    progress.hear(Event("stage-start", 0, "target0", "export"))
    progress.hear(Event("stage-start", 0, "target1", "export"))
    progress.hear(Event("graph-start", 0, "target2", "lower-cpu", "g.pt2"))
    assert [job.name for job in progress.running()] == ["target0"] and progress.waiting() == 2
    progress.hear(Event("job-end", 1, "target0", "export"))
    assert [job.name for job in progress.running()] == ["target2/g"] and progress.waiting() == 1
    progress.hear(Event("graph-end", 2, "target2", "lower-cpu", "g.pt2", "built"))
    assert [job.name for job in progress.running()] == ["target1"] and progress.compiled == 1
    progress.hear(Event("stage-end", 3, "target1", "export", "", "built"))
    assert progress.running() == [] and progress.waiting() == 0


def test_the_end_is_estimated_from_the_weight_of_what_is_left(tmp_path):
    progress, now = progress_of(tmp_path, 4, 2)
    assert progress.estimate() == (0.0, None)
    for name in ("target0", "target1"):
        progress.planned[name].outcome = dict.fromkeys(progress.planned[name].stages, "built")
    now[0] = 30.0
    assert progress.estimate() == (pytest.approx(0.5), pytest.approx(30.0))
    assert progress.targets() == (2, 4)
    assert progress.stages()["lower"] == (2, 4)
    for target in progress.planned.values():
        target.outcome = dict.fromkeys(target.stages, "built")
    assert progress.estimate() == (1.0, 0.0)


@pytest.mark.parametrize("count", [3, 300])
@pytest.mark.parametrize("size", [(120, 40), (80, 24), (40, 12), (20, 6), (10, 3)])
def test_the_view_fits_a_third_of_any_screen(tmp_path, count, size):
    from rich.console import Console

    width, height = size
    progress, _ = progress_of(tmp_path, count, 16)
    for number in range(count):
        progress.hear(Event("graph-start", 0, f"target{number}", "lower-cpu", "a_rather_long_name_of_a_graph.pt2"))
    lines = screen(progress, width, height // 3)
    assert 1 <= len(lines) <= height // 3
    stream = Tty()
    console = Console(file=stream, width=width, height=height, force_terminal=True, color_system=None)
    from neml2_build.progress import _Screen

    console.print(_Screen(progress))
    drawn = stream.getvalue().splitlines()
    assert len(drawn) <= height // 3 and all(len(line) <= width for line in drawn)
    assert f"0/{count}" in drawn[0]
    if height >= 24:
        assert "waiting for a worker" in drawn[-1] or count == 3


def test_small_things():
    from neml2_build.progress import Job

    assert [clock(seconds) for seconds in (0, 7.4, 750, 3723)] == ["0:00", "0:07", "12:30", "1:02:03"]
    assert bar(0.25, 8, ascii_only=True) == "[green]##[/][dim]------[/]"
    job = Job("a" * 50, "lower-cpu", "g.pt2", 9.0, 9.0, began=1.0)
    assert job_line(job, 8.0, 40, str).endswith("[cyan]7 s of 9 s[/]")
    assert "yellow" in job_line(job, 30.0, 40, str)
