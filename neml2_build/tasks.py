"""Targets as doit tasks: ``parse:NAME``, ``export:NAME``, ``lower-cpu:NAME``, ``package:NAME``, ``stub:NAME``.

doit gives the order, the selection and the commands that its users know; it is asked for nothing else. Its own notion of
what is up to date is not used (it trusts the existence of targets, marks an input that was edited during a task as built, and
loses its database to SIGKILL): each task has one ``uptodate`` callable, which asks the records, and whose repr says the reason.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterable, Iterator
from typing import Any

from doit.exceptions import TaskFailed

from neml2_build.build import Build
from neml2_build.clean import removable, remove
from neml2_build.compiler import chosen
from neml2_build.errors import BuildError
from neml2_build.manifest import Manifest
from neml2_build.target import TargetRun


class Check:
    """Whether a stage of a target is up to date, as doit asks it; the repr is the answer in words."""

    def __init__(self, run: TargetRun, stage: str) -> None:
        self._run = run
        self._stage = stage

    def __call__(self) -> bool:
        return not self._run.check(self._stage)

    def __repr__(self) -> str:
        reasons = self._run.reasons.get(self._stage, ())
        return "; ".join(map(str, reasons)) if reasons else "up to date"


def create_tasks(manifest: Manifest, *, build: Build | None = None) -> Iterator[dict[str, Any]]:
    """doit tasks for every target of *manifest*, for use in a ``dodo.py``::

        def task_neml2():
            yield from create_tasks(Manifest.load())

    Parameters
    ----------
    manifest
        What to build.
    build
        The build that the tasks belong to; by default one of their own, which ends with the process.

    Raises
    ------
    RequestError
        If the manifest is wrong.
    """
    if build is None:
        build = Build(manifest, compiler=chosen(2, os.environ))
        atexit.register(build.close)
    yield from tasks_of(build.runs.values())


def tasks_of(runs: Iterable[TargetRun], *, keep_going: bool = False) -> Iterator[dict[str, Any]]:
    """doit tasks of *runs*.

    Parameters
    ----------
    keep_going
        Packages do not wait for a device that cannot be lowered for here, and hold the other leaves.
    """
    for run in runs:
        name = run.target.name
        for stage in run.stages:
            yield {
                "basename": stage,
                "name": name,
                "doc": _doc(run, stage),
                "actions": [(_act, [run, stage])],
                "uptodate": [Check(run, stage)],
                "task_dep": [f"{before}:{name}" for before in _before(run, stage, keep_going=keep_going)],
                "targets": _targets(run, stage),
                "clean": [(_clean, [run])] if stage == "package" else [],
                "title": _title,
                "io": {"capture": False},
                "verbosity": 2,
                "meta": {"target": name, "stage": stage, "input": run.target.input_ref, "model": run.target.model},
            }


def _before(run: TargetRun, stage: str, *, keep_going: bool) -> list[str]:
    """The stages that *stage* needs."""
    if stage == "parse":
        return []
    if stage == "export":
        return ["parse"]
    if stage == "package":
        devices = [device for device in run.target.devices if not keep_going or run.possible(device)]
        return [f"lower-{device}" for device in devices] or ["export"]
    if stage == "stub":
        return ["package"]
    return ["export"]


def _targets(run: TargetRun, stage: str) -> list[str]:
    if stage == "package":
        return [str(run.folder / "metadata.json")]
    return [str(run.stub)] if stage == "stub" else []


def _doc(run: TargetRun, stage: str) -> str:
    target = run.target
    what = {
        "parse": "read the input, write the slice that the model reaches",
        "export": "capture the graphs and the metadata",
        "package": f"publish {run.folder.name}/",
        "stub": f"write {run.stub.name}",
    }
    return f"{what.get(stage, 'compile each captured graph')} ({target.model} of {target.input_ref})"


def _title(task: Any) -> str:
    return task.name


def _act(run: TargetRun, stage: str) -> TaskFailed | None:
    """Do a stage; a failure that is the user's to mend becomes one message, not a traceback."""
    try:
        run.do(stage)
    except BuildError as error:
        return TaskFailed(str(error))
    return None


def _clean(run: TargetRun, dryrun: bool) -> None:
    for name, paths in removable(run.build, [run.target.name]):
        for path in paths:
            print(f"{name} - {'would remove' if dryrun else 'removing'} '{path}'")
        if not dryrun:
            remove(run.build, name, paths)
