"""``neml2-build watch``: build, wait until a file that matters is saved, build again.

What matters is known from the records: inputs, includes, data files, extensions, the manifest, and files that a pattern of the
manifest would take in. Nothing else starts a build, least of all what a build writes.

Workers are forked from a process that has imported torch, and that process is kept from one build to the next, so that an edit
is answered without the seconds of an import. It is started anew when the installed software is no longer what it imported:
results under the new software's keys must not come from the old one.

Folders are watched by watchfiles (inotify and its kin; it groups the events of one save), as editors replace files rather than
write to them. What is saved during a build is seen after it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from neml2_build import cli
from neml2_build.compiler import Compiler, FakeCompiler, RealCompiler
from neml2_build.errors import BuildError, RequestError

if TYPE_CHECKING:
    from neml2_build.build import Build
    from neml2_build.stages import export, lower
    from neml2_build.workers import Near

#: Milliseconds of silence that end a group of saves, and the most that a group may last.
_STEP, _DEBOUNCE = 100, 1600
#: Milliseconds after which a watcher that saw nothing says so.
_GLANCE = 300
_GLOB = frozenset("*?[")


@click.command("watch", context_settings=cli._CONTEXT)
@cli.names_argument
@cli.manifest_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a build on stdout, a line each.")
@click.option("-j", "--jobs", type=click.IntRange(min=1), help="Workers at once [default: the manifest's, or one a core].")
@click.option("-v", "--verbose", is_flag=True, help="Print each stage, and why it is done.")
def watch_command(names: tuple[str, ...], manifest: str | None, as_json: bool, jobs: int | None, verbose: bool) -> int:
    """Build, and build again whenever a file is saved that matters. Ctrl-C ends it.

    \b
    neml2-build watch
    neml2-build watch 'visco*' -v
    """
    try:
        import watchfiles  # noqa: F401
    except ImportError:
        raise RequestError("watchfiles is not installed", remedy="pip install watchfiles") from None
    return watch(manifest, names, jobs=jobs, verbose=verbose, as_json=as_json, wait=Saves().wait)


def watch(
    manifest: str | None,
    names: tuple[str, ...] = (),
    *,
    jobs: int | None = None,
    verbose: bool = False,
    as_json: bool = False,
    wait: Callable[[Watched], set[str] | None],
) -> int:
    """Build, and again after each answer of *wait*, until it answers None or the user interrupts.

    Parameters
    ----------
    manifest, names, jobs, verbose, as_json
        As on the command line.
    wait
        Given what is watched, blocks; answers the paths that changed. An empty set means: look whether something did.

    Raises
    ------
    RequestError
        The manifest is wrong from the start. Later mistakes are told, and mended by the next save.
    """
    kept = Kept()
    watched: Watched | None = None
    well = False
    try:
        while True:
            try:
                build = cli.load_build(manifest, jobs=jobs, compiler=kept, keep_going=True)
                kept.fits(build)
                well = once(build, names, verbose=verbose, as_json=as_json, always=not well)
                if watched is None:
                    cli.say(f"neml2-build: watching {len(Watched.of(build).files)} files; Ctrl-C ends it")
                watched = Watched.of(build)
            except BuildError as error:
                if watched is None:
                    raise
                well = False
                cli.say(f"neml2-build: error: {error}")
                if as_json:
                    cli.print_json({"ok": False, "failures": [{"target": None, "stage": None, "message": str(error)}]})
            changed = wait(watched)
            if changed is None:
                break
            if changed:
                cli.say(f"neml2-build: changed: {', '.join(watched.told(changed))}")
    except KeyboardInterrupt:
        kept.end(kill=True)
    finally:
        kept.end(kill=False)
    cli.say("neml2-build: no longer watching")
    return 0


def once(build: Build, names: tuple[str, ...], *, verbose: bool, as_json: bool, always: bool) -> bool:
    """Bring the targets up to date, whatever fails; whether all went well. Tells of it if something was done, or *always*."""
    from neml2_build.engine import execute
    from neml2_build.progress import show

    began = time.perf_counter()
    runs = build.select(names)
    try:
        if any(not run.current() for run in runs):
            with show(build, quiet=as_json, verbose=verbose):
                execute(build, runs, keep_going=True)
    finally:
        build.close()
    result = cli.summarize(build, runs, time.perf_counter() - began)
    build.journal.tell("build-end", seconds=result["seconds"], info=result)
    for error in build.failures:
        cli.say(f"neml2-build: error: {error}")
    idle = result["targets"]["up_to_date"] == result["targets"]["total"]
    if not idle:
        build.journal.save(build.records.folder / "journal")
    if always or not idle or build.failures:
        cli.say(cli.one_line(result, build))
        if as_json:
            cli.print_json(result)
    return bool(result["ok"])


# -- what is watched --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Watched:
    """The files that matter to a build.

    Attributes
    ----------
    root
        The project's folder.
    files
        Absolute paths, also of files that are missing.
    packages
        Folders all of whose Python files matter.
    patterns
        Patterns of input files, absolute.
    written
        Folders that builds write to.
    """

    root: str
    files: frozenset[str]
    packages: tuple[str, ...]
    patterns: tuple[str, ...]
    written: tuple[str, ...]

    @classmethod
    def of(cls, build: Build) -> Watched:
        """What *build* read, by its targets and the records of their stages."""
        files: set[str] = set()
        packages: set[str] = set()
        if build.manifest.file is not None:
            files.add(str(build.manifest.file))
        for run in build.runs.values():
            target = run.target
            files.update([str(target.input), *map(str, target.extra_deps)])
            for item in map(str, target.load):
                if os.path.isdir(item):
                    packages.add(item)
                elif os.path.isabs(item):
                    files.add(item)
            for stage in ("parse", "export"):
                record = build.records.read(target.name, stage)
                if record is not None:
                    files.update(build.records.absolute(state.path) for state in record.inputs)
            if run.parsed is not None:
                files.update(path for path, _ in run.parsed.files)
                files.update(run.parsed.data_files)
        files.update(error.file for error in build.failures if error.file is not None and os.path.isabs(error.file))
        files.update(str(build.root / entry.input) for entry in build.manifest.models if not _GLOB & set(entry.input))
        patterns = {str(build.root / entry.input) for entry in build.manifest.models if _GLOB & set(entry.input)}
        return cls(
            root=str(build.root),
            files=frozenset(files | {os.path.realpath(file) for file in files}),
            packages=tuple(sorted(packages)),
            patterns=tuple(sorted(patterns)),
            written=(str(build.output) + os.sep, str(build.cache) + os.sep),
        )

    def matters(self, path: str) -> bool:
        """Whether a build could come out otherwise since *path* changed."""
        if path in self.files:
            return True
        if path.startswith(self.written):
            return False
        if path.endswith(".py") and any(path.startswith(folder + os.sep) for folder in self.packages):
            return True
        # fnmatch's star crosses folders, so this may say yes too often: that costs a look, and nothing is built
        return any(fnmatch(path, pattern.replace("**/", "*")) for pattern in self.patterns)

    def folders(self) -> tuple[str, ...]:
        """Existing folders in which something that matters may appear."""
        wanted = {os.path.dirname(file) for file in self.files} | set(self.packages)
        wanted |= {_base(pattern) for pattern in self.patterns}
        return tuple(sorted({_existing(folder) for folder in wanted}))

    @property
    def deep(self) -> bool:
        """Whether what is below the folders is watched, too."""
        return bool(self.packages) or any("/" in pattern[len(_base(pattern)) + 1 :] for pattern in self.patterns)

    def told(self, paths: set[str]) -> list[str]:
        """*paths* for the reader: relative to the project, five at most."""
        prefix = self.root + os.sep
        names = sorted(path.removeprefix(prefix) for path in paths)
        return names if len(names) <= 5 else [*names[:5], f"{len(names) - 5} more"]


def _base(pattern: str) -> str:
    """The folder below which everything lies that *pattern* matches."""
    parts = Path(pattern).parts
    fixed = next((index for index, part in enumerate(parts) if _GLOB & set(part)), len(parts))
    return str(Path(*parts[:fixed]))


def _existing(folder: str) -> str:
    while not os.path.isdir(folder) and os.path.dirname(folder) != folder:
        folder = os.path.dirname(folder)
    return folder


class Saves:
    """Waits for saves. One watcher lives through several builds, so that a save during a build is not missed."""

    def __init__(self) -> None:
        self._watching: tuple[tuple[str, ...], bool] | None = None
        self._watched: Watched | None = None
        self._changes: Iterator[set[tuple[Any, str]]] | None = None

    def wait(self, watched: Watched) -> set[str] | None:
        """The paths that changed and matter; empty after the folders to watch have changed. Raises ``KeyboardInterrupt``."""
        from watchfiles import watch as watch_files

        self._watched = watched
        wanted = (watched.folders(), watched.deep)
        fresh = wanted != self._watching
        if fresh or self._changes is None:
            self._watching = wanted
            self._changes = watch_files(
                *wanted[0],
                watch_filter=lambda _, path: self._watched is not None and self._watched.matters(path),
                debounce=_DEBOUNCE,
                step=_STEP,
                rust_timeout=_GLANCE,
                yield_on_timeout=True,
                recursive=wanted[1],
                raise_interrupt=True,
            )
            # The first step starts the watcher; what was saved between the build's look and now is found by looking again.
            return {path for _, path in next(self._changes, ())}
        for changes in self._changes:
            if changes:
                return {path for _, path in changes}
        return None


# -- the compiler that is kept ----------------------------------------------------------------------------------------


class Kept:
    """A compiler that outlives builds: their `close` does not reach it."""

    def __init__(self) -> None:
        self._fake = os.environ.get("NEML2_BUILD_COMPILER") == "fake"
        self._make: Callable[[], Compiler] | None = None
        self._made_for: tuple[Any, ...] | None = None
        self._compiler: Compiler | None = None
        self.started = 0

    @property
    def name(self) -> str:
        return FakeCompiler.name if self._fake else RealCompiler.name

    def fits(self, build: Build) -> None:
        """Make sure that *build* gets a compiler of its software, workers and folders; one that does not fit is ended."""
        wanted = (build.jobs, str(build.cache), build.identity)
        if wanted != self._made_for:
            self.end(kill=False)
            self._made_for = wanted
        self._make = lambda: self._start(build)

    def _start(self, build: Build) -> Compiler:
        if self._fake:
            return FakeCompiler(build.jobs)
        return build.start_compiler()

    @property
    def _inner(self) -> Compiler:
        if self._compiler is None:
            assert self._make is not None
            self._compiler = self._make()
            self.started += 1
        return self._compiler

    def end(self, *, kill: bool) -> None:
        """End the compiler, if there is one."""
        compiler, self._compiler = self._compiler, None
        if compiler is not None:
            compiler.close(kill=kill)

    def export(self, request: export.Request, *, priority: float, cwd: str) -> Future:
        return self._inner.export(request, priority=priority, cwd=cwd)

    def lower(self, request: lower.Request, *, priority: float, near: Near | None) -> Future:
        return self._inner.lower(request, priority=priority, near=near)

    def run(self, function: Any, *arguments: Any) -> Future:
        return self._inner.run(function, *arguments)

    @property
    def torch_imported(self) -> bool:
        return self._compiler is not None and self._compiler.torch_imported

    def close(self, *, kill: bool) -> None:
        """Nothing: see `end`."""
