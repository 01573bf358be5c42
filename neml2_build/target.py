"""The five stages of one target: for each a question (`TargetRun.check`) and an act (`TargetRun.do`).

The question is whether what is there is what a build would make, and if not, why; it is answered from records of contents. A
stage sees only the results of the stage before it, so a comment edit ends at the slice and a tolerance edit at the graphs.
doit asks the one and runs the other, in order; dry runs and `explain` ask only.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from neml2_build import environment as environments
from neml2_build import hit, versions
from neml2_build.digest import digest, digest_file, digest_json
from neml2_build.errors import BuildError, TaskError
from neml2_build.manifest import Target
from neml2_build.reasons import Reason, compare
from neml2_build.records import Entry, FileState, Record
from neml2_build.stages import export, lower, package
from neml2_build.stages import parse as parsing
from neml2_build.stages.stub import emitter_digest, stub_text_in_worker
from neml2_build.store import Action, ObjectMissing
from neml2_build.workers import Near, WorkerFailed

if TYPE_CHECKING:
    from neml2_build.build import Build

_VARIANTS = 16
#: What a small graph takes to be lowered, and how many operations of a large one take a second (torch 2.12, one core).
_SECONDS, _OPERATIONS_A_SECOND = 1.0, 80
#: How many graphs of a target are looked up in a shared store at a time.
_LOOK_UPS = 8


@dataclass(frozen=True)
class GraphRef:
    """A captured graph without its bytes: file name of its package, digest, object of the program, options, operations."""

    name: str
    digest: str
    program: str
    inductor: dict[str, Any]
    operations: int


@dataclass(frozen=True)
class Exported:
    """What export found: graphs, digest of ``metadata.json``, files that were read, tensors that are random."""

    key: str
    graphs: tuple[GraphRef, ...]
    metadata: str
    opened: dict[str, str]
    random: tuple[str, ...]


@dataclass(frozen=True)
class Lowered:
    """One graph on one device: file name, key, digest of the package."""

    name: str
    key: str
    digest: str


@dataclass(frozen=True)
class Verdict:
    """What a build would do at a stage: ``up-to-date``, ``restore``, ``run`` or ``unknown``, and why."""

    stage: str
    what: str
    reasons: tuple[Reason, ...] = ()
    detail: str = ""


class TargetRun:
    """The stages of one target in one build."""

    def __init__(self, build: Build, target: Target) -> None:
        self.build = build
        self.target = target
        self.folder = build.output / target.name
        self.stub = build.output / f"{target.name}_aoti.i"
        self.compiling = ("export", *(f"lower-{device}" for device in target.devices))
        self.publishing = ("package", "stub") if target.stub else ("package",)
        self.stages = ("parse", *self.compiling, *self.publishing)
        self.outcome: dict[str, str] = {}
        self.reasons: dict[str, tuple[Reason, ...]] = {}
        self.failed: BuildError | None = None
        self.parsed: parsing.Parsed | None = None
        self.slice: str | None = None
        self.stub_digest: str | None = None
        self.parse_files: list[FileState] = []
        self.exported: Exported | None = None
        self.lowered: dict[str, list[Lowered]] = {}
        self._near: Near | None = None
        self._current: bool | None = None
        self._lock = threading.RLock()

    # -- the fast way -------------------------------------------------------------------------------------------------

    def current(self) -> bool:
        """Whether stats alone show that nothing changed since the target was last found up to date."""
        if self._current is None:
            self._current = not self.build.force and self._unchanged()
            if self._current:
                self.outcome = dict.fromkeys(self.stages, "up-to-date")
        return self._current

    def _unchanged(self) -> bool:
        entry = self.build.snapshot.entries.get(self.target.name)
        if entry is None or entry.environment != self.build.identity or entry.request != self._request_digest():
            return False
        if any(self.build.environ.get(name) != value for name, value in entry.variables.items()):
            return False
        prefix = str(self.build.root) + os.sep
        for path, stat in entry.files:
            if environments.signature(path if path.startswith("/") else prefix + path) != stat:
                return False
        return True

    def _request_digest(self) -> str:
        return digest(msgspec.json.encode(self.target.request(), order="sorted"))

    def entry(self) -> Entry | None:
        """What a null build needs to know of this target; None unless it is up to date and every stat can be trusted."""
        if self._current:
            return self.build.snapshot.entries.get(self.target.name)
        if not self.outcome:
            return self.build.snapshot.entries.get(self.target.name) if self._current is None else None
        if self.failed is not None or any(stage not in self.outcome for stage in self.stages):
            return None
        files: dict[str, list[int]] = {}
        variables: dict[str, str | None] = {}
        for stage in self.stages:
            record = self.build.records.read(self.target.name, stage)
            if record is None:
                return None
            for state in (*record.inputs, *record.outputs):
                stat = state.signature
                if stat is None or stat != environments.signature(self.build.records.absolute(state.path)):
                    stat = self.build.records.state(self.build.records.absolute(state.path), state.digest).signature
                if stat is None:
                    return None
                files[state.path] = stat
            variables.update(record.info.get("environment", {}))
        if "cuda" in self.target.devices:
            variables.update((name, self.build.environ.get(name)) for name in environments.CUDA_PLACES)
            for path in environments.cuda_files(self.build.environ):
                stat = environments.signature(path)
                if stat is None:
                    return None
                files[str(path)] = stat
        return Entry(self._request_digest(), self.build.identity, sorted(files.items()), variables)

    # -- question and act ---------------------------------------------------------------------------------------------

    def check(self, stage: str) -> tuple[Reason, ...]:
        """Why *stage* must be done; empty if it is up to date. Never raises for a user's mistake: `do` does."""
        if self.current():
            return ()
        question = getattr(self, f"_check_{stage.partition('-')[0]}")
        try:
            reasons = self._prepare(stage) or question(stage)
        except BuildError as error:
            reasons = (Reason("input-changed", error.message),)
        if not reasons and stage in self.outcome:
            return ()  # done by this build, which is to be told, not that it need not be done again
        if not reasons:
            self.outcome[stage] = "up-to-date"
        self.reasons[stage] = reasons
        return reasons

    def do(self, stage: str) -> None:
        """Do *stage*. Raises `BuildError`; whatever else is raised is a defect of the build."""
        self._current = False
        for before in self._needed(stage):
            if self.check(before):
                self.do(before)
        act = getattr(self, f"_do_{stage.partition('-')[0]}")
        self.build.journal.tell(
            "stage-start", target=self.target.name, stage=stage, info={"reasons": [str(r) for r in self.reasons.get(stage, ())]}
        )
        began = time.perf_counter()
        try:
            self.build.connect()
            self.outcome[stage] = act(stage)
        except BuildError as error:
            self._fail(error, stage)
            raise
        except WorkerFailed as failed:
            error = TaskError(
                f"{failed.kind}: {failed}" if failed.kind != "died" else str(failed),
                log=failed.log or None,
                remedy="out of memory? try a lower -j; else see the log" if failed.kind == "died" else None,
            )
            self._fail(error, stage)
            raise error from failed
        except OSError as error:
            wrapped = TaskError(
                f"{error.strerror or error}", file=error.filename2 or error.filename, remedy="check space and permissions"
            )
            self._fail(wrapped, stage)
            raise wrapped from error
        self.build.journal.tell(
            "stage-end", target=self.target.name, stage=stage, outcome=self.outcome[stage], seconds=time.perf_counter() - began
        )

    def _needed(self, stage: str) -> list[str]:
        """The stages whose results *stage* reads and which this process does not know.

        Within one process each stage leaves them for the next. With ``doit -n 2`` another process made them; ``doit info``
        asks a stage alone. The records hold them.
        """
        kind = stage.partition("-")[0]
        needed = [] if kind == "parse" or self.slice is not None else ["parse"]
        if kind in ("lower", "package") and self.exported is None:
            needed.append("export")
        if kind == "package":
            needed += [
                f"lower-{device}" for device in self.target.devices if device not in self.lowered and self.possible(device)
            ]
        return needed

    def hopeless(self) -> bool:
        """Whether graphs are to be lowered for a device and cannot be here: the target has then failed, before anything ran."""
        for device in self.target.devices:
            try:
                self._require(device)
            except TaskError as error:
                self._fail(error, f"lower-{device}")
                return True
        return False

    def possible(self, device: str) -> bool:
        """Whether graphs can be lowered for *device* here: with ``-k``, packages do not wait for what cannot be made."""
        try:
            self._require(device)
        except TaskError:
            return False
        return True

    def _require(self, device: str) -> None:
        """Raise `TaskError` unless the target's graphs can be lowered for *device* here."""
        if device != "cuda":
            return
        try:
            environments.require_cuda(self.build.memo, self.target.cuda_arch, self.build.environ)
        except TaskError as error:
            error.stage = "lower-cuda"
            raise

    def _prepare(self, stage: str) -> tuple[Reason, ...]:
        """Take the results that *stage* reads from the records; the reasons for which one of them must be made first."""
        for before in self._needed(stage):
            if self.check(before):
                return (Reason("stage-before", before),)
        return ()

    def _place(self, error: BuildError) -> None:
        """Add to what NEML2 says the line of the name that it says it of, and the nearest name that the file has."""
        import difflib

        option = re.match(r"--(derivative|parameter|rename-\w+) ", error.message)
        if option is not None:
            name = {"derivative": "derivatives", "parameter": "parameters"}.get(option[1], f"{option[1]}s")
            error.message = f"{name}: {error.message[option.end() :]}"
            error.file = str(self.build.manifest.file) if self.build.manifest.file else error.file
            return
        missing = re.match(r"No \[(\w+)/([^\]]+)\] found", error.message)
        if missing is not None:
            error.message = f"no block [{missing[1]}/{missing[2]}], which another block names"
            known = [name for section, name in _blocks(self.parsed.all_blocks) if section == missing[1]] if self.parsed else []
            near = difflib.get_close_matches(missing[2], known, n=1)
            error.remedy = f"did you mean '{near[0]}'?" if near else error.remedy
        for found in re.finditer(r"\[\w+/([^\]{}]+)\]|'([^']+)'", error.message):
            error.line = error.line or self._line_of(found[1] or found[2])

    def _fail(self, error: BuildError, stage: str) -> None:
        if stage == "export" and error.line is None and error.file == str(self.target.input):
            self._place(error)
        self.failed = error
        self.release()
        self.build.fail(error, self.target.name, stage)

    def release(self) -> None:
        """Let the process that captured the graphs end."""
        with self._lock:
            if self._near is not None:
                self._near.close()
                self._near = None

    def summary(self) -> str:
        """``failed``, ``built``, ``restored``, ``up-to-date``, or ``skipped`` where a failure elsewhere ended the build."""
        if self.failed is not None:
            return "failed"
        if any(stage not in self.outcome for stage in self.stages):
            return "skipped"
        done = set(self.outcome.values())
        return "built" if "built" in done else "restored" if "restored" in done else "up-to-date"

    def _record(self, stage: str) -> Record | None:
        return self.build.records.read(self.target.name, stage)

    # -- parse --------------------------------------------------------------------------------------------------------

    def _parse_request(self) -> dict[str, Any]:
        target = self.target
        return {
            "input": target.input_ref,
            "model": target.model,
            "driver": target.driver,
            "name": target.name,
            "variables": dict(target.variables),
            "overrides": list(target.overrides),
            "stub": target.stub,
            "version": versions.PARSE,
        }

    def _check_parse(self, stage: str) -> tuple[Reason, ...]:
        record = self._record(stage)
        if self.build.force:
            return (Reason("forced"),)
        if record is None:
            return (Reason("first-build"),)
        if record.made_of.get("request") != self._parse_request():
            return compare(record.made_of.get("request"), self._parse_request()) or (Reason("request-changed"),)
        if record.made_of.get("emitter") != emitter_digest():
            return (Reason("neml2-changed"),)
        for state in record.inputs:
            if (how := self.build.records.changed(state)) is not None:
                return (Reason("input-changed", f"{state.path} {how}"),)
        for name, value in record.info["environment"].items():
            if self.build.environ.get(name) != value:
                return (Reason("variable-changed", f"{name}: {value!r} -> {self.build.environ.get(name)!r}"),)
        try:
            text = self.build.store.read(record.objects["slice"]).decode()
        except ObjectMissing:
            return (Reason("store-missing", "slice"),)
        if self.target.stub and not self.build.store.has(record.objects["stub"]):
            return (Reason("store-missing", "stub"),)
        self.parsed = msgspec.convert({**record.info["parsed"], "slice": text, "stub": None}, parsing.Parsed)
        self.slice, self.stub_digest = record.objects["slice"], record.objects.get("stub")
        self.parse_files = [
            state if state.signature else self.build.records.state(self.build.records.absolute(state.path), state.digest)
            for state in record.inputs
        ]
        return ()

    def _do_parse(self, stage: str, *, alone: bool = False) -> str:
        return self._parse(self._also(), self._record(stage), alone=alone)

    def _parse(self, also: Iterable[tuple[str, str]], previous: Record | None, *, alone: bool = False) -> str:
        began = time.perf_counter()
        also = sorted(set(also))
        parsed = parsing.parse(self.target, also=frozenset(also), environ=self.build.environ, read=self.build.document)
        if alone and self.target.stub and parsed.stub is None:
            raise TaskError("the stub is written by a worker")
        self.parsed = parsed
        store = self.build.store
        key, made_of = self._parse_key(parsed, also)
        action = None if self.build.force else store.find(key)
        if action is not None:
            objects = {output.name: output.digest for output in action.outputs}
        else:
            texts = {"slice": parsed.slice}
            if self.target.stub:
                texts["stub"] = parsed.stub if parsed.stub is not None else self._stub_by_worker(parsed)
            contents = {name: text.encode() for name, text in texts.items()}
            made = self.build.keep(key, "parse", self.target.name, contents, made_of, began)
            objects = {output.name: output.digest for output in made.outputs}
        self.slice, self.stub_digest = objects["slice"], objects.get("stub")
        self.parse_files = [self.build.records.state(path, found) for path, found in parsed.files]
        for warning in parsed.warnings:
            self.build.journal.tell("warning", target=self.target.name, stage="parse", info={"message": warning})
        reasons = self.reasons.get("parse", ())
        if previous is not None:
            reasons = (*reasons, *self._slice_differences(previous.objects.get("slice")))
            self.reasons["parse"] = reasons
        kept = {
            name: value for name, value in msgspec.to_builtins(parsed).items() if name not in ("slice", "stub", "stub_source")
        }
        self.build.records.write(
            self.target.name,
            Record(
                stage="parse",
                key=key,
                made_of=made_of,
                inputs=self.parse_files,
                objects=objects,
                reasons=list(reasons),
                outcome="restored" if action else "built",
                seconds=round(time.perf_counter() - began, 4),
                time=time.time(),
                info={"environment": parsed.environment, "parsed": kept, "also": [list(block) for block in also]},
            ),
        )
        return "restored" if action is not None else "built"

    def _parse_key(self, parsed: parsing.Parsed, also: Iterable[tuple[str, str]]) -> tuple[str, dict[str, Any]]:
        """The key of the slice and stub, and what it is made of; *also* is sorted."""
        made_of = {
            "stage": "parse",
            "request": self._parse_request(),
            "emitter": emitter_digest(),
            "files": self._named(parsed.files),
            "environment": parsed.environment,
            "also": [list(block) for block in also],
        }
        return digest_json(made_of), made_of

    def _stub_by_worker(self, parsed: parsing.Parsed) -> str:
        target = self.target
        future = self.build.compiler.run(
            _stub_job, parsed.stub_source or "", target.model, target.name, target.driver is not None, target.input_ref
        )
        return future.result().value

    def _slice_differences(self, before: str | None) -> tuple[Reason, ...]:
        if before is None or self.parsed is None or before == self.slice:
            return ()
        try:
            changes = hit.diff_fields(self.build.store.read(before).decode(), self.parsed.slice)
        except (ObjectMissing, BuildError):
            return ()
        return tuple(Reason("model-changed", change if len(change) <= 200 else f"{change[:197]}...") for change in changes[:50])

    def _name(self, path: Path | str) -> str:
        """A file's name in a key: relative to the project, or its bare name where it lies outside. Never absolute."""
        relative = self.build.records.relative(path)
        return f"outside/{Path(relative).name}" if Path(relative).is_absolute() else relative

    def _named(self, files: Iterable[tuple[str, str]]) -> dict[str, str]:
        """Name in a key → digest. Files outside the project may have the same bare name: none may hide another."""
        named: dict[str, str] = {}
        for path, found in files:
            name, count = self._name(path), 1
            while (unique := name if count == 1 else f"{name}#{count}") in named:
                count += 1
            named[unique] = found
        return named

    # -- export -------------------------------------------------------------------------------------------------------

    def _options(self) -> dict[str, Any]:
        return export.options_of(self.target)

    def _declared(self) -> list[str]:
        """Files that the model is known to read before it is loaded: csv files, extensions, what the user declared."""
        assert self.parsed is not None
        files = [*self.parsed.data_files, *map(str, self.target.extra_deps)]
        for item in self.target.load:
            path = Path(item)
            if path.is_dir():
                path = path / "__init__.py"
            if isinstance(item, Path) or path.exists():
                files.append(str(path))
        return list(dict.fromkeys(files))

    def _base(self) -> tuple[str, dict[str, Any]]:
        """The export key as far as it is known before the model is loaded."""
        assert self.parsed is not None and self.slice is not None
        files = []
        for path in self._declared():
            try:
                files.append((path, self.build.digest_of(path)))
            except OSError as error:
                raise TaskError(
                    f"cannot read the data file {self.build.records.relative(path)}: {error.strerror}",
                    file=self.target.input,
                    line=self._line_of(Path(path).name),
                    target=self.target.name,
                    stage="export",
                    remedy="check the path; csv files are sought relative to the folder of the input file",
                ) from None
        named = list(self._named(files).items())
        made_of = export.key_of(self.target.model, self.slice, named, self._options(), self.build.environment.for_export())
        made_of["load"] = [self._name(item) if isinstance(item, Path) else str(item) for item in self.target.load]
        made_of["compiler"] = self.build.compiler_name
        return digest_json(made_of), made_of

    def _line_of(self, text: str) -> int | None:
        with contextlib.suppress(OSError, UnicodeDecodeError):
            for number, line in enumerate(self.target.input.read_text(encoding="utf-8").splitlines(), 1):
                if re.search(rf"(?<![\w.]){re.escape(text)}(?![\w])", line.partition("#")[0]):
                    return number
        return None

    def _check_export(self, stage: str) -> tuple[Reason, ...]:
        record = self._record(stage)
        if self.build.force:
            return (Reason("forced"),)
        if record is None:
            return (Reason("first-build"),)
        base, made_of = self._base()
        if record.info["base"] != base:
            slice_changes = self._slice_differences(record.made_of.get("slice"))
            others = tuple(
                reason for reason in compare(record.made_of, made_of) if not (slice_changes and reason.kind == "model-changed")
            )
            return (*slice_changes, *others) or (Reason("request-changed"),)
        for path, found in record.info["opened"].items():
            absolute = self.build.records.absolute(path)
            try:
                same = self.build.digest_of(absolute) == found
            except OSError:
                same = False
            if not same:
                return (Reason("extension-changed" if path.endswith(".py") else "data-changed", path),)
        self.exported = _exported(record.key, record.objects, record.info)
        return ()

    def _find_export(self, base: str, *, look_only: bool = False) -> tuple[Action | None, list[tuple[str, str]]]:
        """The stored result whose every file is as it was; and the blocks that the slice is known to lack."""
        find = self.build.store.peek if look_only else self.build.store.find
        index = find(base)
        if index is None:
            return None, []
        if index.info.get("widen"):
            return None, _blocks(index.info["widen"])
        for variant in index.info.get("variants", ()):
            try:
                same = all(
                    self.build.digest_of(self.build.records.absolute(path)) == found
                    for path, found in variant["opened"].items()
                )
            except OSError:
                continue
            if same and (action := find(variant["key"])) is not None:
                return action, []
        return None, []

    def _do_export(self, stage: str) -> str:
        began = time.perf_counter()
        self.build.check_inductor(self.target)
        outcome = "restored"
        for _ in range(8):
            base, made_of = self._base()
            with self.build.store.lock(base):
                action, wider = (None, []) if self.build.force else self._find_export(base)
                if action is None and not wider:
                    action, wider = self._run_export(base, made_of, began)
                    outcome = "built"
            if action is not None:
                break
            if wider:
                self._parse([*wider, *self._also()], self._record("parse"))
        else:
            raise TaskError("the files that the model reads keep changing while it is loaded", file=self.target.input)
        if outcome == "restored":
            self.build.counts.add(saved=action.seconds)
        self.exported = _exported(action.key, {output.name: output.digest for output in action.outputs}, action.info)
        paths = self._declared()
        names = self._named((path, "") for path in paths)
        inputs = [self.build.records.state(path, made_of["files"][name]) for path, name in zip(paths, names, strict=True)]
        inputs += [
            self.build.records.state(self.build.records.absolute(path), found) for path, found in self.exported.opened.items()
        ]
        self.build.records.write(
            self.target.name,
            Record(
                stage=stage,
                key=action.key,
                made_of=made_of,
                inputs=list({state.path: state for state in inputs}.values()),
                objects={output.name: output.digest for output in action.outputs},
                reasons=list(self.reasons.get(stage, ())),
                outcome=outcome,
                seconds=round(time.perf_counter() - began, 4),
                time=time.time(),
                info={**action.info, "base": base},
            ),
        )
        return outcome

    def _also(self) -> list[tuple[str, str]]:
        record = self._record("parse")
        return _blocks(record.info.get("also", ())) if record is not None else []

    def _run_export(self, base: str, made_of: dict[str, Any], began: float) -> tuple[Action | None, list[tuple[str, str]]]:
        assert self.parsed is not None
        request = export.Request(
            target=self.target.name,
            slice=self.parsed.slice,
            blocks=tuple(_blocks(self.parsed.all_blocks)),
            input=str(self.target.input),
            model=self.target.model,
            options=self._options(),
            load=tuple(map(str, self.target.load)),
            keep=True,
            **(
                {"memory": record.info["peak_bytes"]}
                if (record := self._record("export")) and record.info.get("peak_bytes")
                else {}
            ),
        )
        # What the key says of each declared file, and the stat that goes with it: an edit before the job reads the file would
        # otherwise be stored under the contents of before, even where it is taken back in time.
        paths = self._declared()
        digests = self._named((path, self.build.digest_of(path)) for path in paths)
        if digests != made_of["files"]:
            return None, []
        stats = [environments.signature(path) for path in paths]
        self.build.ask_ahead(self.target)
        done = self.build.compiler.export(request, priority=self.priority("export"), cwd=str(self.build.root)).result()
        result: export.Result = done.value
        store = self.build.store
        self.build.journal.tell(
            "job-end",
            target=self.target.name,
            stage="export",
            seconds=done.usage.seconds,
            info={"cpu_seconds": round(done.usage.cpu_seconds, 3), "peak_bytes": done.usage.peak_bytes},
        )
        if result.widen:
            if set(result.widen) <= set(_blocks(self.parsed.blocks)):
                raise TaskError(f"NEML2 asks for blocks that it was given: {result.widen}", file=self.target.input)
            info = {"widen": [list(block) for block in result.widen]}
            store.record(self.build.action(base, "export", self.target.name, [], made_of, began, info))
            return None, _blocks(result.widen)
        declared = {str(Path(path).resolve()): found for path, found in zip(paths, digests.values(), strict=True)}
        changed = any(declared.get(path, found) != found or not found for path, found in result.opened)
        if changed or [environments.signature(path) for path in paths] != stats:
            return None, []
        opened = {self.build.records.relative(path): found for path, found in result.opened if path not in declared}
        contents = {"metadata.json": result.metadata, **{graph.name: graph.program for graph in result.graphs}}
        graphs = [[graph.name, graph.digest, graph.inductor, graph.operations] for graph in result.graphs]
        full = {**made_of, "opened": sorted([self._name(path), found] for path, found in opened.items())}
        info = {
            "graphs": graphs,
            "opened": opened,
            "random": list(result.random),
            "cpu_seconds": round(done.usage.cpu_seconds, 3),
            "peak_bytes": done.usage.peak_bytes,
        }
        took = round(done.usage.seconds, 3)
        action = self.build.keep(digest_json(full), "export", self.target.name, contents, full, began, info, took)
        index = store.find(base)
        variants = [{"key": action.key, "opened": opened}]
        if index is not None:
            variants += [one for one in index.info.get("variants", ()) if one["key"] != action.key]
        known = {"variants": variants[:_VARIANTS]}
        store.record(self.build.action(base, "export-index", self.target.name, [], made_of, began, known))
        with self._lock:
            if self._near is not None:
                self._near.close()
            self._near = done.near
        return action, []

    def _memory(self) -> dict[str, int]:
        """Bytes that the export took last time."""
        record = self._record("export")
        peak = record.info.get("peak_bytes") if record is not None else None
        return {"memory": peak} if peak else {}

    def priority(self, stage: str, graph: str = "") -> float:
        """Seconds from the start of a job to the end of what can only follow it: jobs of the longest such chain go first.

        Parameters
        ----------
        stage, graph
            The export, or the lowering of the graph of that file name.
        """
        if stage == "export":
            return self.expected_seconds()
        record = self._record(stage)
        known = record.info.get("seconds", {}).get(graph) if record is not None else None
        if known is not None:
            return known
        found = next((one for one in self.exported.graphs if one.name == graph), None) if self.exported is not None else None
        return _SECONDS + (found.operations / _OPERATIONS_A_SECOND if found is not None else 0.0)

    def expected_seconds(self) -> float:
        """How long it takes to capture the graphs and to lower the longest: as last time, else by the size of the input.

        Of 79 inputs of NEML2's own the largest (5 to 10 kB) take 30 to 120 s, those of 1 to 3 kB 3 to 10 s.
        """
        exported, *lowered = [self._record(stage) for stage in self.compiling]
        if exported is not None and all(lowered):
            seconds = [record.info.get("seconds", {}).values() for record in lowered if record is not None]
            return exported.info.get("cpu_seconds", exported.seconds) + max(itertools.chain(*seconds), default=0.0)
        try:
            size = len(self.parsed.slice) if self.parsed is not None else self.target.input.stat().st_size
        except OSError:
            return 0.0
        return 2 * _SECONDS + (size / 1000) ** 2

    # -- lower --------------------------------------------------------------------------------------------------------

    def _lower_keys(self, device: str) -> list[tuple[GraphRef, str, dict[str, Any]]]:
        """Each graph with its lower key on *device* and what that is made of."""
        assert self.exported is not None
        target, build = self.target, self.build
        keys = []
        where = device if device != "cuda" or not target.cuda_arch else "cuda:" + ",".join(sorted(target.cuda_arch))
        environment = build.environment.for_lowering(target.march)
        if device == "cuda":
            environment = {
                **environment,
                "cuda": environments.cuda_identity(build.memo, target.cuda_arch, build.environ),
                "triton": build.environment.packages.get("triton"),
                "cross": versions.CROSS,
            }
        for graph in self.exported.graphs:
            made_of = lower.key_of(
                graph.digest,
                device=where,
                dtype=target.dtype,
                inductor={**graph.inductor, **target.inductor},
                march=target.march,
                environment=environment,
                toolchain=build.toolchain,
            )
            keys.append((graph, digest_json(made_of), made_of))
        return keys

    def _check_lower(self, stage: str) -> tuple[Reason, ...]:
        device = stage.partition("-")[2]
        record = self._record(stage)
        if self.build.force:
            return (Reason("forced"),)
        if record is None:
            return (Reason("first-build"),)
        keys = self._lower_keys(device)
        before = {name: (key, found) for name, key, found in record.info["graphs"]}
        reasons: list[Reason] = []
        lowered = []
        for graph, key, made_of in keys:
            if graph.name not in before:
                reasons.append(Reason("graph-changed", f"{graph.name} is new"))
                continue
            old, found = before[graph.name]
            if old != key:
                changes = compare(record.made_of.get(graph.name), made_of)
                reasons += [Reason(one.kind, f"{graph.name}: {one.detail}") for one in changes] or [
                    Reason("graph-changed", graph.name)
                ]
            elif not self._available(found, f"{device}/{self.target.dtype}/{graph.name}"):
                reasons.append(Reason("store-missing", graph.name))
            else:
                lowered.append(Lowered(graph.name, key, found))
        reasons += [
            Reason("graph-changed", f"{name} is gone") for name in before if name not in {graph.name for graph, _, _ in keys}
        ]
        if not reasons:
            self.lowered[device] = lowered
        return tuple(reasons)

    def _available(self, found: str, name: str) -> bool:
        """Whether the contents *found* are in the store, or intact where they were published."""
        if self.build.store.has(found):
            return True
        try:
            return digest_file(self.folder / name) == found
        except OSError:
            return False

    def _do_lower(self, stage: str) -> str:
        device = stage.partition("-")[2]
        began = time.perf_counter()
        assert self.exported is not None
        self._require(device)

        def ask(one: tuple[GraphRef, str, dict[str, Any]]) -> Future:
            graph, key, made_of = one
            return self.build.lower_once(
                key,
                made_of,
                lambda: self._lower_request(graph, device, made_of),
                target=self.target.name,
                stage=stage,
                graph=graph.name,
                priority=self.priority(stage, graph.name),
                near=self._near if device == "cpu" else None,
            )

        keys = self._lower_keys(device)
        if self.build.store.remote is None:
            futures = list(map(ask, keys))
        else:  # an answer of a shared store takes as long as its network does
            with ThreadPoolExecutor(_LOOK_UPS) as pool:
                futures = list(pool.map(ask, keys))
        waiting = [(*one, future) for one, future in zip(keys, futures, strict=True)]
        done: list[Lowered] = []
        seconds: dict[str, float] = {}
        notes: dict[str, list[str]] = {}
        cuda: dict[str, dict[str, Any]] = {}
        compiled, saved = 0, 0.0
        first_error: BaseException | None = None
        seen: set[str] = set()
        for graph, key, _, future in waiting:
            try:
                action, made = future.result()
            except BaseException as error:
                if isinstance(error, BuildError):
                    error.message = f"{graph.name}: {error.message}"
                first_error = first_error or error
                continue
            made = made and key not in seen
            seen.add(key)
            compiled += made
            saved += 0.0 if made else action.seconds
            seconds[graph.name] = action.seconds
            if action.info.get("notes"):
                notes[graph.name] = action.info["notes"]
            if action.info.get("cuda"):
                cuda[graph.name] = action.info["cuda"]
            done.append(Lowered(graph.name, key, action.outputs[0].digest))
        self.build.counts.add(lowered=compiled, reused=len(done) - compiled, saved=saved)
        if first_error is not None:
            raise first_error
        self.lowered[device] = done
        outcome = "built" if compiled else "restored"
        self.build.records.write(
            self.target.name,
            Record(
                stage=stage,
                key=digest_json([one.key for one in done]),
                made_of={graph.name: made_of for graph, _, made_of, _ in waiting},
                objects={one.name: one.digest for one in done},
                reasons=list(self.reasons.get(stage, ())),
                outcome=outcome,
                seconds=round(time.perf_counter() - began, 4),
                time=time.time(),
                info={
                    "graphs": [[one.name, one.key, one.digest] for one in done],
                    "seconds": seconds,
                    "lowered": compiled,
                    "reused": len(done) - compiled,
                    "notes": notes,
                    **({"cuda": cuda} if cuda else {}),
                },
            ),
        )
        return outcome

    def _lower_request(self, graph: GraphRef, device: str, made_of: dict[str, Any]) -> lower.Request:
        build, target = self.build, self.target
        return lower.Request(
            graph=graph.digest,
            program=self._program(graph),
            device=made_of["device"],
            inductor=made_of["inductor"],
            march=target.march,
            threads=build.environment.threads_for(target.march),
            isa=build.isa(),
            prepared=str(build.machine),
            work=str(build.work()),
            stock=build.stock,
            untested=build.untested,
            operations=graph.operations,
        )

    def _program(self, graph: GraphRef) -> bytes:
        """The saved program of *graph*; captured again where the store has lost it."""
        try:
            return self.build.store.read(graph.program)
        except ObjectMissing:
            pass
        with self._lock:
            with contextlib.suppress(ObjectMissing):
                return self.build.store.read(graph.program)
            base, made_of = self._base()
            self._run_export(base, made_of, time.perf_counter())
            try:
                return self.build.store.read(graph.program)
            except ObjectMissing:
                # A model that is not reproducible, or files that are being edited: this graph will not come again.
                self.build.records.forget(self.target.name, ["export"])
                raise TaskError(
                    f"the store lost the captured graph {graph.name}", remedy="build again: it is captured anew"
                ) from None

    # -- package ------------------------------------------------------------------------------------------------------

    def _expected_files(self) -> dict[str, str]:
        assert self.exported is not None
        leaves = {device: [(one.name, one.digest) for one in graphs] for device, graphs in self.lowered.items()}
        return package.files_of(self.exported.metadata, leaves, self.target.dtype)

    def _check_package(self, stage: str) -> tuple[Reason, ...]:
        record = self._record(stage)
        if self.build.force:
            return (Reason("forced"),)
        if record is None:
            return (Reason("first-build"),)
        expected = self._expected_files()
        published = {state.path: state for state in record.outputs}
        reasons: list[Reason] = []
        for name, found in expected.items():
            path = self.build.records.relative(self.folder / name)
            state = published.get(path)
            if state is None or state.digest != found:
                reasons.append(Reason("metadata-changed" if name == "metadata.json" else "package-changed", name))
            elif (how := self.build.records.changed(state)) is not None:
                reasons.append(Reason(f"output-{how}", path))
        wanted = {self.build.records.relative(self.folder / name) for name in expected}
        reasons += [Reason("package-changed", f"{path} is no longer made") for path in published if path not in wanted]
        if self.target.verify:
            from neml2_build.verify import pending

            reasons += [Reason("not-verified", name) for name in pending(self)]
        return tuple(reasons)

    def _do_package(self, stage: str) -> str:
        began = time.perf_counter()
        self.release()
        if self.target.verify:
            from neml2_build.verify import require

            require(self.build, self)
        self.build.output.mkdir(parents=True, exist_ok=True)

        def materialize(found: str, path: Path) -> None:
            try:
                self.build.store.materialize(found, path, durable=False)
            except ObjectMissing:
                name = path.relative_to(_tree_of(path)).as_posix()
                if not self._republish(found, name, path):
                    raise _Lost(name) from None

        for _ in range(4):
            expected = self._expected_files()
            try:
                package.publish(expected, self.folder, materialize)
                break
            except _Lost as lost:
                self._make_again(str(lost))
        else:
            raise TaskError("the store keeps losing what is stored", file=self.build.cache, remedy="check the disk")
        return self._record_package(expected, began)

    def _record_package(self, expected: dict[str, str], began: float) -> str:
        outcome = "built" if self._fresh() else "restored"
        outputs = [self.build.records.state(self.folder / name, found) for name, found in expected.items()]
        self.build.records.write(
            self.target.name,
            Record(
                stage="package",
                key=digest_json(expected),
                made_of=dict(expected),
                outputs=outputs,
                reasons=list(self.reasons.get("package", ())),
                outcome=outcome,
                seconds=round(time.perf_counter() - began, 4),
                time=time.time(),
                info={"devices": sorted(self.lowered), "random": list(self.exported.random) if self.exported else []},
            ),
        )
        return outcome

    def _fresh(self) -> bool:
        """Whether anything of what is published was made in this build."""
        return any(self.outcome.get(stage) == "built" for stage in self.compiling)

    def _make_again(self, name: str) -> None:
        """Make the published file *name* again, whose contents turned out to be broken or gone when they were needed."""
        if name == "metadata.json":
            self.outcome["export"] = self._do_export("export")
        for device, graphs in list(self.lowered.items()):
            self.build.forget_lost({one.key: one.digest for one in graphs})
            self.outcome[f"lower-{device}"] = self._do_lower(f"lower-{device}")
        self.release()

    def _republish(self, found: str, name: str, path: Path) -> bool:
        """Take contents that the store has lost from where they are published, if they are intact there."""
        try:
            data = (self.folder / name).read_bytes()
        except OSError:
            return False
        if digest(data) != found:
            return False
        path.write_bytes(data)
        with contextlib.suppress(BuildError):
            self.build.store.put(data)
        return True

    # -- stub ---------------------------------------------------------------------------------------------------------

    def _check_stub(self, stage: str) -> tuple[Reason, ...]:
        record = self._record(stage)
        if self.build.force:
            return (Reason("forced"),)
        if record is None:
            return (Reason("first-build"),)
        if record.key != self.stub_digest:
            return (Reason("stub-changed"),)
        how = self.build.records.changed(record.outputs[0])
        return (Reason(f"output-{how}", record.outputs[0].path),) if how is not None else ()

    def _do_stub(self, stage: str) -> str:
        began = time.perf_counter()
        assert self.stub_digest is not None
        previous = self._record(stage)
        try:
            data = self.build.store.read(self.stub_digest)
        except ObjectMissing:
            self._parse(self._also(), self._record("parse"))
            data = self.build.store.read(self.stub_digest)
        self.build.output.mkdir(parents=True, exist_ok=True)
        package.write_file(self.stub, data)
        return self._record_stub(previous, began)

    def _record_stub(self, previous: Record | None, began: float) -> str:
        assert self.stub_digest is not None
        same = previous is not None and previous.key == self.stub_digest
        outcome = "restored" if same or self.outcome.get("parse") != "built" else "built"
        self.build.records.write(
            self.target.name,
            Record(
                stage="stub",
                key=self.stub_digest,
                made_of={"text": self.stub_digest},
                outputs=[self.build.records.state(self.stub, self.stub_digest)],
                reasons=list(self.reasons.get("stub", ())),
                outcome=outcome,
                seconds=round(time.perf_counter() - began, 4),
                time=time.time(),
            ),
        )
        return outcome

    # -- what needs no task -------------------------------------------------------------------------------------------

    def published_before(self) -> bool:
        """Whether a build finished this target, and this one does not begin anew."""
        return not self.build.force and not self.current() and self._record("package") is not None

    def read_again(self) -> None:
        """Parse, if that is to be done and needs no worker. Raises `BuildError`: nothing happened then."""
        if not (reasons := self.check("parse")):
            return
        began = time.perf_counter()
        outcome = self._do_parse("parse", alone=True)
        self._tell_stage("parse", reasons, outcome, time.perf_counter() - began)

    def unpublished(self) -> list[str] | None:
        """The stages that are left to do, if these only publish what is in the store; None if something must be made."""
        if self.build.force or self.target.verify or self.current():
            return None
        if any(self.check(stage) for stage in ("parse", *self.compiling)):
            return None
        return [stage for stage in self.publishing if self.check(stage)]

    def lay_out(self, scratch: Path) -> list[Path]:
        """Write what is to be published to the new folder *scratch*; what must be flushed before `put_in_place`.

        Raises ``OSError``, `TaskError` or `ObjectMissing`; nothing is published then, and `do` knows what helps.
        """
        scratch.mkdir()
        store, paths = self.build.store, []
        if self.reasons.get("package"):
            expected = self._expected_files()
            paths = package.lay_out(
                expected, scratch / "tree", lambda found, path: store.materialize(found, path, durable=False)
            )
        if self.reasons.get("stub"):
            assert self.stub_digest is not None
            stub = scratch / "file"
            stub.write_bytes(store.read(self.stub_digest))
            paths.append(stub)
        return paths

    def put_in_place(self, scratch: Path) -> None:
        """Publish what `lay_out` wrote. Raises ``OSError``."""
        for stage in self.publishing:
            if not (reasons := self.reasons.get(stage)):
                continue
            began = time.perf_counter()
            if stage == "package":
                package.swap(scratch / "tree", self.folder, scratch / "old")
                outcome = self._record_package(self._expected_files(), began)
            else:
                os.replace(scratch / "file", self.stub)
                outcome = self._record_stub(self._record(stage), began)
            self._tell_stage(stage, reasons, outcome, time.perf_counter() - began)

    def _tell_stage(self, stage: str, reasons: Sequence[Reason], outcome: str, seconds: float) -> None:
        self._current = False
        self.outcome[stage] = outcome
        tell, target = self.build.journal.tell, self.target.name
        tell("stage-start", target=target, stage=stage, info={"reasons": [str(reason) for reason in reasons]})
        tell("stage-end", target=target, stage=stage, outcome=outcome, seconds=seconds)

    # -- asking only --------------------------------------------------------------------------------------------------

    def preview(self) -> list[Verdict]:
        """What a build would do, and why, without writing anything. Raises `BuildError` where a build would."""
        if self.current():
            return [Verdict(stage, "up-to-date") for stage in self.stages]
        verdicts: list[Verdict] = []
        for stage in self.stages:
            verdicts.append(self._preview(stage, {verdict.stage: verdict for verdict in verdicts}))
        return verdicts

    def _preview(self, stage: str, before: dict[str, Verdict]) -> Verdict:
        kind = stage.partition("-")[0]
        if kind == "export" and self.parsed is None:
            return Verdict(stage, "unknown")
        if kind == "lower" and self.exported is None:
            return Verdict(stage, "unknown", detail="depends on the graphs that export captures")
        if kind == "package" and any(verdict.what in ("unknown", "run") for name, verdict in before.items() if name != "parse"):
            return Verdict(stage, "run", (Reason("package-changed"),))
        if kind == "package" and (self.exported is None or any(f"lower-{d}" not in before for d in self.target.devices)):
            return Verdict(stage, "unknown")
        reasons = self.check(stage)
        if not reasons:
            return Verdict(stage, "up-to-date")
        if kind == "parse":
            record = self._record("parse")
            also = _blocks(record.info.get("also", ())) if record is not None else ()
            self.parsed = parsing.parse(self.target, also=frozenset(also), environ=self.build.environ)
            self.slice = digest(self.parsed.slice)
            self.stub_digest = digest(self.parsed.stub) if self.parsed.stub is not None else None
            return Verdict(stage, "run", (*reasons, *(self._slice_differences(record.objects.get("slice")) if record else ())))
        if kind == "export":
            base, _ = self._base()
            action, _ = (None, []) if self.build.force else self._find_export(base, look_only=True)
            if action is None:
                return Verdict(stage, "run", reasons)
            self.exported = _exported(action.key, {output.name: output.digest for output in action.outputs}, action.info)
            return Verdict(stage, "restore", reasons)
        if kind == "lower":
            device = stage.partition("-")[2]
            keys = self._lower_keys(device)
            found = (
                [] if self.build.force else [action for _, key, _ in keys if (action := self.build.store.peek(key)) is not None]
            )
            detail = f"{len(keys) - len(found)} of {len(keys)} graphs to compile"
            if len(found) == len(keys):
                self.lowered[device] = [
                    Lowered(graph.name, key, action.outputs[0].digest)
                    for (graph, key, _), action in zip(keys, found, strict=True)
                ]
                return Verdict(stage, "restore", reasons, detail)
            return Verdict(stage, "run", reasons, detail)
        return Verdict(stage, "restore" if kind == "package" else "run", reasons)

    def walk(self) -> Iterator[str]:
        """Keys of all the stored work that a build without any records would look up, in order, as far as the store has it.

        Raises `BuildError` where the input cannot be read.
        """
        also: list[tuple[str, str]] = []
        for _ in range(8):
            self.parsed = parsing.parse(self.target, also=frozenset(also), environ=self.build.environ)
            self.slice = digest(self.parsed.slice)
            yield self._parse_key(self.parsed, also)[0]
            base, _ = self._base()
            yield base
            action, wider = self._find_export(base, look_only=True)
            if not wider:
                break
            also = sorted({*also, *wider})
        else:
            return
        if action is None:
            return
        yield action.key
        self.exported = _exported(action.key, {output.name: output.digest for output in action.outputs}, action.info)
        for device in self.target.devices:
            yield from (key for _, key, _ in self._lower_keys(device))

    def reads(self) -> list[str]:
        """Absolute paths of the files that the target is known to read before its model is loaded: input, includes, data,
        extensions. Raises `BuildError` where the input cannot be read."""
        self.parsed = parsing.parse(self.target, also=frozenset(), environ=self.build.environ)
        return [*(str(path) for path, _ in self.parsed.files), *self._declared()]

    def forget(self) -> None:
        """Have the next question answered without the memory of this build: the outputs were removed."""
        self._current = False
        self.outcome = {}


# -- small things -----------------------------------------------------------------------------------------------------


class _Lost(Exception):
    """The store has no intact contents of the published file of this name."""


def _tree_of(path: Path) -> Path:
    """The root of the tree that is being made at *path*: the folder below the staging folder's scratch."""
    for parent in path.parents:
        if parent.parent.parent.name == package.STAGING:
            return parent
    return path.parent


def _blocks(blocks: Iterable[Sequence[str]]) -> list[tuple[str, str]]:
    return [(section, name) for section, name in blocks]


def _exported(key: str, objects: dict[str, str], info: dict[str, Any]) -> Exported:
    return Exported(
        key=key,
        graphs=tuple(
            GraphRef(name, found, objects[name], inductor, operations) for name, found, inductor, operations in info["graphs"]
        ),
        metadata=objects["metadata.json"],
        opened=dict(info["opened"]),
        random=tuple(info["random"]),
    )


def _stub_job(text: str, model: str, artifact: str, keep_drivers: bool, input_name: str) -> str:
    return stub_text_in_worker(text, model=model, artifact=artifact, keep_drivers=keep_drivers, input_name=input_name)
