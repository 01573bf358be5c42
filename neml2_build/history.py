"""Earlier builds of a target, found in the store or made of a git revision, and how two of them differ.

A store keeps an action of stage ``parse`` for every state of an input that was built, with the slice as its output, and an
action of ``export`` with the digest of every graph. So two builds are compared in the user's terms (fields of the slice)
and then in graphs, without building anything.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from neml2_build import hit
from neml2_build.digest import digest
from neml2_build.errors import BuildError, RequestError, TaskError
from neml2_build.reasons import compare
from neml2_build.stages import parse as parsing
from neml2_build.store import Action, ForeignFormat, ObjectMissing, Store, decode

if TYPE_CHECKING:
    from neml2_build.target import TargetRun


@dataclass(frozen=True)
class Version:
    """A target as it was once.

    Attributes
    ----------
    label
        For people: ``last build``, a key, a revision.
    slice
        The canonical input text.
    created
        POSIX time, or None where it is not known.
    made_of
        What the export key was made of, if it was exported here.
    graphs
        Package → digest of the graph; None if it was not exported here.
    data
        Data file → digest, as far as they are known.
    """

    label: str
    slice: str
    created: float | None
    made_of: dict[str, Any] | None
    graphs: dict[str, str] | None


@dataclass(frozen=True)
class Change:
    """How two versions differ: fields, other things, and package → ``changed``, ``new``, ``gone`` or ``same``."""

    before: str
    after: str
    fields: tuple[str, ...]
    others: tuple[str, ...]
    graphs: dict[str, str] | None


def actions(store: Store, root: Path, stage: str) -> Iterator[Action]:
    """Every readable action of *stage* in the store at *root*, in no order."""
    del store
    for path in (root / "actions").glob("??/*.json"):
        with contextlib.suppress(OSError, ValueError, ForeignFormat, msgspec.MsgspecError):
            action = decode(path.read_bytes(), path.parent.name + path.stem)
            if action.stage == stage:
                yield action


def current(run: TargetRun) -> Version:
    """The target as it was built last. Raises `RequestError` where it never was."""
    parsed = run.build.records.read(run.target.name, "parse")
    exported = run.build.records.read(run.target.name, "export")
    if parsed is None:
        raise RequestError(f"{run.target.name} has not been built", remedy=f"run 'neml2-build {run.target.name}'")
    graphs = {name: found for name, found, *_ in exported.info["graphs"]} if exported is not None else None
    text = _text(run, parsed.objects["slice"])
    return Version("the last build", text, parsed.time, exported.made_of if exported is not None else None, graphs)


def earlier(run: TargetRun) -> list[tuple[Action, Action | None]]:
    """Parse actions of the target with different slices, the newest first, each with the export of its slice."""
    parses = [one for one in actions(run.build.store, run.build.cache, "parse") if one.target == run.target.name]
    exports: dict[str, Action] = {}
    for one in sorted(actions(run.build.store, run.build.cache, "export"), key=lambda one: one.created):
        if one.info.get("graphs") is not None and one.made_of.get("model") == run.target.model:
            exports[one.made_of.get("slice", "")] = one
    found: dict[str, Action] = {}
    for one in sorted(parses, key=lambda one: -one.created):
        found.setdefault(_slice_of(one), one)
    return [(one, exports.get(text)) for text, one in found.items()]


def previous(run: TargetRun) -> Version:
    """The newest earlier build of another slice than the current one. Raises `RequestError` where there is none."""
    parsed = run.build.records.read(run.target.name, "parse")
    now = parsed.objects["slice"] if parsed is not None else ""
    for action, exported in earlier(run):
        if _slice_of(action) != now:
            return _version(run, action, exported)
    raise RequestError(
        f"the store knows no earlier build of {run.target.name} with another input",
        remedy="name a git revision, as in 'neml2-build show diff NAME HEAD~1'",
    )


def named(run: TargetRun, name: str) -> Version:
    """The version that *name* stands for: the beginning of a key, or a git revision.

    Raises
    ------
    RequestError
        Where it is neither, or where several keys begin so.
    """
    if re.fullmatch(r"[0-9a-f]{4,32}", name):
        pairs = earlier(run)
        keys = {action.key: (action, exported) for action, exported in pairs}
        keys |= {exported.key: (action, exported) for action, exported in pairs if exported is not None}
        found = {key: pair for key, pair in keys.items() if key.startswith(name)}
        if len({pair[0].key for pair in found.values()}) > 1:
            raise RequestError(f"several builds of {run.target.name} have keys that begin with '{name}': {', '.join(found)}")
        if found:
            return _version(run, *next(iter(found.values())))
    return at_revision(run, name)


def at_revision(run: TargetRun, revision: str) -> Version:
    """The target with its input, and what it includes, as they were at a git *revision*; the manifest is today's."""
    target = run.target
    top = _git(target.input.parent, "rev-parse", "--show-toplevel")
    commit = _git(target.input.parent, "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}")
    if top is None or commit is None:
        what = "no key of this target begins so" if top is None else f"'{revision}' is no revision, nor does a key begin so"
        raise RequestError(f"{what}", target=target.name, remedy="'neml2-build show diff NAME --list' shows what is known")
    root = Path(top.strip())
    commit = commit.strip()
    with tempfile.TemporaryDirectory(prefix="neml2-build-") as folder:
        main = _fetch(root, commit, target.input.resolve(), Path(folder), set())
        if main is None:
            raise RequestError(f"{target.input_ref} is not in revision {revision}", target=target.name)
        there = msgspec.structs.replace(target, input=main, stub=False)
        record = run.build.records.read(target.name, "parse")
        also = [(section, block) for section, block in record.info.get("also", ())] if record is not None else []
        try:
            parsed = parsing.parse(there, also=frozenset(also), environ=run.build.environ)
        except BuildError as error:
            error.message = f"at revision {revision}: {error.message}"
            raise
    found = digest(parsed.slice)
    exported = next((one for one in _exports(run) if one.made_of.get("slice") == found), None)
    return Version(f"revision {revision}", parsed.slice, None, _made_of(exported), _graphs(exported))


def compare_versions(before: Version, after: Version) -> Change:
    """How *after* differs from *before*."""
    fields = tuple(hit.diff_fields(before.slice, after.slice))
    others: list[str] = []
    if before.made_of is not None and after.made_of is not None:
        found = compare(before.made_of, after.made_of)
        others = [str(reason) for reason in found if not (reason.kind == "model-changed" and reason.detail.startswith("slice"))]
    graphs = None
    if before.graphs is not None and after.graphs is not None:
        graphs = {
            name: "changed" if before.graphs.get(name, found) != found else "same" for name, found in after.graphs.items()
        }
        graphs |= {name: "new" for name in after.graphs if name not in before.graphs}
        graphs |= {name: "gone" for name in before.graphs if name not in after.graphs}
    return Change(before.label, after.label, fields, tuple(others), graphs)


# ── small things ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _exports(run: TargetRun) -> list[Action]:
    found = [one for one in actions(run.build.store, run.build.cache, "export") if one.info.get("graphs") is not None]
    return sorted((one for one in found if one.made_of.get("model") == run.target.model), key=lambda one: -one.created)


def _slice_of(action: Action) -> str:
    return next((output.digest for output in action.outputs if output.name == "slice"), "")


def _text(run: TargetRun, found: str) -> str:
    try:
        return run.build.store.read(found).decode()
    except ObjectMissing:
        raise TaskError(
            f"the store no longer has the slice of this build of {run.target.name}", remedy="build again, or name another build"
        ) from None


def _version(run: TargetRun, action: Action, exported: Action | None) -> Version:
    return Version(
        f"build {action.key[:8]}", _text(run, _slice_of(action)), action.created, _made_of(exported), _graphs(exported)
    )


def _made_of(exported: Action | None) -> dict[str, Any] | None:
    """What the key of *exported* was made of, as records keep it: without the files that were found on the way."""
    return {name: value for name, value in exported.made_of.items() if name != "opened"} if exported is not None else None


def _graphs(exported: Action | None) -> dict[str, str] | None:
    return {name: found for name, found, *_ in exported.info["graphs"]} if exported is not None else None


_INCLUDE = re.compile(r"^\s*!include\s+(?:'([^']+)'|\"([^\"]+)\"|(\S+))", re.MULTILINE)


def _fetch(root: Path, commit: str, path: Path, folder: Path, known: set[Path]) -> Path | None:
    """Write *path* as it was at *commit*, and what it includes, below *folder*, each at its own place."""
    try:
        relative = path.relative_to(root.resolve())
    except ValueError:
        return None
    place = folder / relative
    if path in known:
        return place
    known.add(path)
    try:
        data = subprocess.run(
            ["git", "-C", str(root), "show", f"{commit}:{relative.as_posix()}"], capture_output=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(data)
    for match in _INCLUDE.finditer(data.decode(errors="replace")):
        _fetch(root, commit, (path.parent / next(filter(None, match.groups()))).resolve(), folder, known)
    return place


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout if done.returncode == 0 and done.stdout.strip() else None
