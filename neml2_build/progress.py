"""What a build shows while it runs: a live view on a terminal, plain lines elsewhere, and the log of a job that failed.

`Progress` listens to the journal and knows how far the build is; it knows nothing of terminals, and rich is imported only
where there is one (0.15 s). Two things it must reckon:

- The journal tells when a job was handed to the workers, not when a worker took it. Workers take the job of the highest
  priority first (`TargetRun.priority`), and so does `Progress`; it is wrong only about jobs of the same priority.
- The time to the end is the time so far, scaled by the weight of what is left. Weights are the seconds that earlier builds
  noted, so a thirty-second graph counts as thirty of one second, and what is restored shortens the rest by itself.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from neml2_build.events import Event

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

    from neml2_build.build import Build
    from neml2_build.target import TargetRun

STAGES = ("parse", "export", "lower", "package", "stub")
#: Seconds that a stage takes where no earlier build knows.
_USUAL = {"parse": 0.01, "export": 3.0, "lower": 15.0, "package": 0.02, "stub": 0.02}
_GRAPH = 6.0
#: Records read a refresh, so that a suite of thousands does not hold up its own view.
_READS = 50
_FEW = 200
#: A log that is longer than this is shown from its end.
LOG_BYTES = 64 * 1024
LOG_LINES = 200


@contextlib.contextmanager
def show(build: Build, *, quiet: bool, verbose: bool, stream: TextIO | None = None) -> Iterator[None]:
    """Show what *build* does while open: on *stream*, by default standard error.

    Parameters
    ----------
    quiet
        Show nothing at all; errors are the caller's.
    verbose
        A line for each stage, and why it is done.
    """
    if quiet:
        yield
        return
    out: TextIO = sys.stderr if stream is None else stream
    progress = Progress(build)
    view = _live if is_terminal(out, build.environ) else _plain
    with view(progress, out, verbose):
        yield


def is_terminal(stream: TextIO, environ: Mapping[str, str]) -> bool:
    """Whether *stream* can be redrawn: a terminal that is not dumb and not a CI system's."""
    if environ.get("CI", "").lower() not in ("", "0", "false") or environ.get("TERM") == "dumb":
        return False
    return bool(getattr(stream, "isatty", lambda: False)())


@dataclass
class Job:
    """An export or a graph in the hands of the workers; *began* is None while it waits for one."""

    target: str
    stage: str
    graph: str
    expected: float | None
    priority: float
    began: float | None = None

    @property
    def name(self) -> str:
        return f"{self.target}/{self.graph.removesuffix('.pt2')}" if self.graph else self.target


class Progress:
    """How far a build is, from the events of its journal.

    Parameters
    ----------
    build
        Whose outcomes, counts and earlier records are read.
    clock
        Seconds, for tests.
    """

    def __init__(self, build: Build, clock: Callable[[], float] = time.monotonic) -> None:
        self.build = build
        self.clock = clock
        self.began = clock()
        self.planned: dict[str, TargetRun] = {}
        self.touched: dict[str, TargetRun] = {}
        self.finished: set[str] = set()
        self.jobs: dict[tuple[str, str, str], Job] = {}
        self.compiled = 0
        self._weights: dict[str, dict[str, float]] = {}
        self._unread: list[str] = []
        self._swept = (-1e9, 0)
        self._closed = False
        self._lock = threading.Lock()

    # -- listening ----------------------------------------------------------------------------------------------------

    def hear(self, event: Event) -> list[str]:
        """Take in *event*; the targets that are finished by now."""
        with self._lock:
            if self._closed:
                return []
            if event.kind == "target-planned":
                self.planned[event.target] = self.build.runs[event.target]
                self._unread.append(event.target)
            elif event.target in self.planned and event.target not in self.finished:
                self.touched[event.target] = self.planned[event.target]
            if event.kind == "graph-start" or (event.kind == "stage-start" and event.stage == "export"):
                self._start(event)
            elif event.kind == "graph-end":
                self.compiled += event.outcome == "built"
                self._end((event.target, event.stage, event.graph))
            elif event.kind == "job-end" or (event.kind in ("stage-end", "failure") and event.stage == "export"):
                self._end((event.target, event.stage, ""))
            done = [name for name, run in self.touched.items() if is_finished(run)]
            for name in done:
                self.finished.add(name)
                del self.touched[name]
            return done

    def close(self) -> list[str]:
        """Listen no more; the targets that have finished since the last event: a stub that was up to date tells nothing."""
        with self._lock:
            self._closed = True
            late = [name for name, run in self.touched.items() if is_finished(run)]
            self.finished.update(late)
            return late

    def _start(self, event: Event) -> None:
        expected = self._expected(event.target, event.stage, event.graph)
        priority = self.build.runs[event.target].priority(event.stage, event.graph)
        job = Job(event.target, event.stage, event.graph, expected, priority)
        if sum(other.began is not None for other in self.jobs.values()) < self.build.jobs:
            job.began = self.clock()
        self.jobs[event.target, event.stage, event.graph] = job

    def _end(self, key: tuple[str, str, str]) -> None:
        job = self.jobs.pop(key, None)
        waiting = [other for other in self.jobs.values() if other.began is None]
        if job is not None and job.began is not None and waiting:
            max(waiting, key=lambda other: other.priority).began = self.clock()

    def _expected(self, target: str, stage: str, graph: str) -> float | None:
        record = self.build.records.read(target, stage)
        if record is None:
            return None
        return record.info.get("seconds", {}).get(graph) if graph else record.seconds

    # -- answers ------------------------------------------------------------------------------------------------------

    @property
    def elapsed(self) -> float:
        return self.clock() - self.began

    def targets(self) -> tuple[int, int]:
        """Targets finished, and to be done."""
        with self._lock:
            return sum(is_finished(run) for run in self.planned.values()), len(self.planned)

    def done(self) -> int:
        """Targets finished; of a large suite as it was a second ago, since it takes a look at every target."""
        now = self.clock()
        if len(self.planned) <= _FEW or now - self._swept[0] > 1.0:
            self._swept = now, self.targets()[0]
        return max(self._swept[1], len(self.finished))

    def stages(self) -> dict[str, tuple[int, int]]:
        """For each stage, tasks done or found up to date, and all."""
        done: Counter[str] = Counter()
        total: Counter[str] = Counter()
        for run in list(self.planned.values()):
            for stage in run.stages:
                kind = stage.partition("-")[0]
                total[kind] += 1
                done[kind] += stage in run.outcome
        return {stage: (done[stage], total[stage]) for stage in STAGES if total[stage]}

    def running(self) -> list[Job]:
        """What workers do now, the longest running first."""
        with self._lock:
            return sorted((job for job in self.jobs.values() if job.began is not None), key=lambda job: job.began or 0.0)

    def waiting(self) -> int:
        """Jobs that wait for a worker."""
        with self._lock:
            return sum(job.began is None for job in self.jobs.values())

    def estimate(self) -> tuple[float, float | None]:
        """How much of the work is done, from 0 to 1; seconds to the end, or None while nothing is known."""
        with self._lock:
            self._read_some()
            known = list(self._weights.values())
            usual = dict(_USUAL)
            for kind in ("export", "lower"):
                values = [weights[kind] for weights in known if kind in weights]
                if values:
                    usual[kind] = sum(values) / len(values)
            done = left = 0.0
            for name, run in self.planned.items():
                weights = self._weights.get(name, {})
                over = run.failed is not None
                for stage in run.stages:
                    kind = stage.partition("-")[0]
                    weight = weights.get(kind, usual[kind])
                    if over or stage in run.outcome:
                        done += weight
                    else:
                        left += weight
            now = self.clock()
            for job in self.jobs.values():
                if job.began is not None:
                    part = min(now - job.began, job.expected or _GRAPH) if job.graph else 0.0
                    done, left = done + part, max(left - part, 0.0)
        if not left:
            return 1.0, 0.0
        part = done / (done + left)
        if part < 0.02:
            return part, left / max(self.build.jobs, 1) if known else None
        return part, self.elapsed * left / done

    def _read_some(self) -> None:
        for _ in range(min(_READS, len(self._unread))):
            name = self._unread.pop()
            weights: dict[str, float] = {}
            for stage in self.planned[name].stages:
                kind = stage.partition("-")[0]
                if kind not in ("export", "lower"):
                    continue
                record = self.build.records.read(name, stage)
                if record is not None:
                    seconds = sum(record.info.get("seconds", {}).values()) if kind == "lower" else record.seconds
                    weights[kind] = weights.get(kind, 0.0) + max(seconds, 0.01)
            if weights:
                self._weights[name] = weights


def is_finished(run: TargetRun) -> bool:
    """Whether nothing more happens to a target."""
    return run.failed is not None or all(stage in run.outcome for stage in run.stages)


# -- logs -------------------------------------------------------------------------------------------------------------


def log_text(path: Path | str) -> str | None:
    """What a job printed; the end of it where it is huge, with the number of lines left out. None where it is gone."""
    try:
        with open(path, "rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(size - LOG_BYTES, 0))
            data = stream.read()
    except OSError:
        return None
    lines = data.decode(errors="replace").splitlines()
    if size <= LOG_BYTES:
        return "\n".join(lines)
    kept = lines[1:][-LOG_LINES:]
    shown = sum(len(line.encode()) + 1 for line in kept)
    return "\n".join([f"... {(size - shown) // 1024} KiB left out; the whole log is {path} ...", *kept])


def _failed_log(build: Build, event: Event) -> str | None:
    """The log of the job whose failure *event* tells, between two lines that name it."""
    errors = [error for error in build.failures if (error.target, error.stage) == (event.target, event.stage)]
    log = errors[-1].log if errors else None
    text = log_text(log) if log else None
    if not text:
        return None
    title = f"{event.stage}:{event.target}"
    return f"----- log of {title} -----\n{text}\n----- end of log of {title} -----"


# -- plain lines ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _plain(progress: Progress, stream: TextIO, verbose: bool) -> Iterator[None]:
    """One line a finished target; with *verbose* one a stage and a graph, too. ASCII only, no escape sequences."""
    build = progress.build

    def write(text: str) -> None:
        stream.write(text + "\n")
        stream.flush()

    def finished(name: str, at: float) -> None:
        run, total = progress.planned[name], len(progress.planned)
        write(f"[{at:7.1f} s] {progress.done()}/{total} {name}: {describe(run, spent.pop(name, {}))}")

    spent: dict[str, dict[str, float]] = {}

    def hear(event: Event) -> None:
        if event.kind == "stage-end":
            spent.setdefault(event.target, {})[event.stage] = event.seconds
        for line in _verbose_lines(event) if verbose else ():
            write(line)
        if event.kind == "warning":
            write(f"neml2-build: warning: {event.target}: {event.info['message']}")
        if event.kind == "failure" and (log := _failed_log(build, event)):
            write(log)
        for name in progress.hear(event):
            finished(name, event.at)

    build.journal.listen(hear)
    try:
        yield
    finally:
        last = build.journal.events[-1].at if build.journal.events else 0.0
        for name in progress.close():
            finished(name, last)


def describe(run: TargetRun, spent: Mapping[str, float]) -> str:
    """What became of a target, and how long its stages took, those of at least a tenth of a second."""
    long = [f"{stage} {seconds:.1f} s" for stage, seconds in spent.items() if seconds >= 0.1]
    where = f" in {run.failed.stage}" if run.failed is not None and run.failed.stage else ""
    return run.summary() + where + (f" ({', '.join(long)})" if long else "")


def _verbose_lines(event: Event) -> Iterator[str]:
    head = f"[{event.at:7.1f} s] {event.stage}:{event.target}"
    if event.kind == "stage-start":
        for reason in event.info.get("reasons", ()):
            yield f"{head} because {reason}"
    elif event.kind == "stage-end":
        yield f"{head} {event.outcome} ({event.seconds:.1f} s)"
    elif event.kind == "graph-end" and event.outcome == "built":
        yield f"{head} {event.graph} compiled ({event.seconds:.1f} s)"


# -- a terminal -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _live(progress: Progress, stream: TextIO, verbose: bool) -> Iterator[None]:
    from rich.console import Console
    from rich.live import Live
    from rich.markup import escape
    from rich.text import Text

    build = progress.build
    console = Console(file=stream, highlight=False)
    with Live(_Screen(progress), console=console, refresh_per_second=5, transient=True, redirect_stdout=False) as live:

        def hear(event: Event) -> None:
            progress.hear(event)
            for line in _verbose_lines(event) if verbose else ():
                live.console.print(f"[dim]{escape(line)}[/]")
            if event.kind == "warning":
                live.console.print(f"[yellow]warning:[/] {escape(event.target)}: {escape(event.info['message'])}")
            if event.kind == "failure":
                live.console.print(f"[bold red]failed[/] {escape(event.stage)}:{escape(event.target)}")
                if log := _failed_log(build, event):
                    live.console.print(Text.from_ansi(log))

        build.journal.listen(hear)
        try:
            yield
        finally:
            progress.close()


class _Screen:
    """The live view, made anew at each refresh: at most a third of the screen, each line cut to its width."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        height = max(1, (options.height or console.size.height) // 3)
        for line in screen(self.progress, options.max_width, height, ascii_only=options.ascii_only):
            text = Text.from_markup(line)
            text.no_wrap, text.overflow = True, "ellipsis"
            yield text


def screen(progress: Progress, width: int, height: int, *, ascii_only: bool = False) -> list[str]:
    """The lines of the live view, in rich's markup: at most *height*, the most important first.

    Parameters
    ----------
    width, height
        Columns and lines that there are.
    ascii_only
        Whether the terminal shows ASCII only.
    """
    from rich.markup import escape

    done, total = progress.targets()
    failed = len(progress.build.failures)
    part, left = progress.estimate()
    head = f"[bold]{done}[/]/{total} targets  {clock(progress.elapsed)}"
    if left is not None and done < total:
        head += f"  [dim]about {clock(left)} left[/]"
    if failed:
        head += f"  [bold red]{failed} failed[/]"
    if width >= 72:
        head = f"{bar(part, min(30, width - 50), ascii_only=ascii_only)} {head}"
    counts = progress.build.counts
    hits = f"graphs: {progress.compiled} compiled, {counts.reused} reused"
    tasks = progress.stages()
    open_tasks = {stage: counts for stage, counts in tasks.items() if counts[0] < counts[1]}
    shown_tasks = tasks if width >= 72 else open_tasks
    stages = "  ".join(f"[dim]{stage}[/] {some}/{all_}" for stage, (some, all_) in shown_tasks.items())
    lines = [head]
    if height >= 3:
        lines += [stages, hits]
    running, waiting = progress.running(), progress.waiting()
    room = height - len(lines)
    crowded = len(running) > room or (waiting and len(running) == room)
    shown = running[: max(room - 1, 0)] if crowded else running
    for job in shown:
        lines.append(job_line(job, progress.clock(), width, escape))
    if height > len(lines) and (len(running) > len(shown) or waiting):
        parts = [f"{len(running) - len(shown)} more running"] if len(running) > len(shown) else []
        lines.append(f"[dim]  {', '.join([*parts, *([f'{waiting} waiting for a worker'] if waiting else [])])}[/]")
    return lines[:height]


def job_line(job: Job, now: float, width: int, escape: Callable[[str], Any]) -> str:
    """A running job: the times stand at the end and are never cut off, the name is where it is too long."""
    times = f"{now - (job.began or now):.0f} s"
    if job.expected:
        times += f" of {job.expected:.0f} s"
    verb = "compile" if job.graph else "capture"
    room = max(width - len(times) - len(verb) - 5, 4)
    name = job.name if len(job.name) <= room else f"...{job.name[-(room - 3) :]}"
    late = job.expected and now - (job.began or now) > 1.5 * job.expected
    return f"  [dim]{verb}[/] {escape(name)} [{'yellow' if late else 'cyan'}]{times}[/]"


def bar(part: float, width: int, *, ascii_only: bool = False) -> str:
    """A bar of *width* cells, filled as far as *part*, which goes from 0 to 1."""
    full = int(width * part)
    one, none = ("#", "-") if ascii_only else ("━", "━")
    return f"[green]{one * full}[/][dim]{none * (width - full)}[/]"


def clock(seconds: float) -> str:
    """``0:07``, ``12:30``, ``1:02:03``."""
    whole = int(seconds + 0.5)
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"
