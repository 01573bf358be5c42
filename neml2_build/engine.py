"""Brings targets up to date: publishes together what is made already, and has doit run the tasks of the rest."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from neml2_build.durable import flush
from neml2_build.errors import BuildError
from neml2_build.stages import package
from neml2_build.store import ObjectMissing

if TYPE_CHECKING:
    from neml2_build.build import Build
    from neml2_build.target import TargetRun

#: Targets published at a time; what they take lies on the disk twice meanwhile.
_TOGETHER = 100
_WAITERS = 8


def execute(build: Build, runs: Sequence[TargetRun], *, keep_going: bool) -> None:
    """Bring *runs* up to date. Failures are noted in `Build.failures`; the first one ends the rest unless *keep_going*.

    A target for a GPU that nothing here can compile for fails before anything is captured.
    """
    stale = [run for run in runs if not run.current()]
    hopeless = [] if keep_going else [run for run in stale if run.hopeless()]
    if not stale or hopeless:
        return
    for run in stale:
        build.journal.tell("target-planned", target=run.target.name, info={"stages": list(run.stages)})
    read_again(build, stale)
    left = {run: run.unpublished() for run in stale}
    done = publish(build, [run for run in stale if left[run]])
    stale = [run for run in stale if left[run] != [] and run not in done]
    if not stale:
        return
    from neml2_build.runner import run_tasks  # imports doit, which publishing does without

    run_tasks(build, stale, keep_going=keep_going)


def read_again(build: Build, runs: Sequence[TargetRun]) -> None:
    """Parse the inputs of *runs* that were published before, where a file of theirs changed, and store the slices together.

    Most often nothing else is to be done then. What goes wrong is left to the tasks; so is what would wait for a shared store.
    """
    before = [run for run in runs if run.build.store.remote is None and run.published_before()]
    if before:
        with build.records.together(), build.store.together():
            for run in before:
                with contextlib.suppress(OSError, BuildError):
                    run.read_again()


def publish(build: Build, runs: Sequence[TargetRun]) -> set[TargetRun]:
    """Publish *runs*, of which all is made, many at a time: those for which that is all there was to do.

    One target after another waits for the disk each time. What goes wrong with one is left to its tasks.
    """
    published: set[TargetRun] = set()
    for start in range(0, len(runs), _TOGETHER):
        some = runs[start : start + _TOGETHER]
        with contextlib.suppress(OSError), package.staging(build.output) as scratch:
            places = {run: scratch / str(number) for number, run in enumerate(some)}
            with ThreadPoolExecutor(min(_WAITERS, len(some))) as pool:
                laid = dict(zip(some, pool.map(_lay_out, some, places.values()), strict=True))
                flush([path for paths in laid.values() for path in paths or ()])
                whole = [run for run in some if laid[run] is not None]
                done = pool.map(_put_in_place, whole, [places[run] for run in whole])
                published |= {run for run, well in zip(whole, done, strict=True) if well}
    return published


def _lay_out(run: TargetRun, place: Path) -> list[Path] | None:
    """What is to be flushed; None where something is wrong."""
    try:
        return run.lay_out(place)
    except (OSError, BuildError, ObjectMissing):
        return None


def _put_in_place(run: TargetRun, place: Path) -> bool:
    """Whether it is published."""
    try:
        run.put_in_place(place)
    except OSError:
        return False
    return True
