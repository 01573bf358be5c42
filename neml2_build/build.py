"""One build: what its targets share, from the manifest to the workers.

Targets share the store, the records, what is known of the machine, the compiler, and the graphs: a graph that two targets ask
for is compiled once, also when the other target belongs to another process.
"""

from __future__ import annotations

import contextlib
import copy
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from neml2_build import environment as environments
from neml2_build import hit, versions
from neml2_build.compiler import Compiler, RealCompiler
from neml2_build.digest import digest_file, digest_json
from neml2_build.errors import BuildError, RequestError, TaskError
from neml2_build.events import Journal
from neml2_build.identity import identity, toolchain_identity
from neml2_build.manifest import Manifest, Model, Target
from neml2_build.null import glob_folders, manifest_digest
from neml2_build.records import Entry, Project, Records, Snapshot, replace, settled
from neml2_build.stages import lower
from neml2_build.store import Action, ObjectMissing, Output, Store
from neml2_build.target import TargetRun
from neml2_build.workers import Done

#: How many input files are kept as they were read: targets that share one follow each other.
_DOCUMENTS = 8
#: Up to so many targets to build, the workers' server does not fill inductor's tables first (`forkserver.preload`).
_FEW = 2
#: How long a build waits at its end for what it writes to the shared store.
UPLOAD_SECONDS = 60.0
#: The same after a failure or an interrupt.
HURRIED_SECONDS = 5.0


@dataclass
class Counts:
    """Graphs of one run: compiled in it, or taken from the store or from another target of it; seconds that this saved."""

    lowered: int = 0
    reused: int = 0
    saved: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, *, lowered: int = 0, reused: int = 0, saved: float = 0.0) -> None:
        with self.lock:
            self.lowered += lowered
            self.reused += reused
            self.saved += saved


class Build:
    """What the targets of one run share.

    Parameters
    ----------
    manifest
        What to build.
    jobs
        Workers at once; by default the manifest's, by default one a core.
    force
        Make everything again, whatever is known.
    stock
        Compile exactly as torch does, without the prepared toolchain.
    compiler
        Who compiles, instead of NEML2 and torch.
    environ
        The process environment. NEML2_BUILD_MACHINE names a folder for what is made once a machine (what torch says of the
        CPU, precompiled headers: 300 MB), to share among projects; by default each cache has its own.
    journal
        Who is told what happens.
    untested
        Compile for GPUs that are not here with versions of torch and Triton on which that was never tested.
    keep_going
        Build without the targets of an input file that is missing or cannot be read; it is among `failures`.
    """

    def __init__(
        self,
        manifest: Manifest,
        *,
        jobs: int | None = None,
        force: bool = False,
        stock: bool = False,
        untested: bool = False,
        compiler: Compiler | None = None,
        environ: Mapping[str, str] | None = None,
        journal: Journal | None = None,
        store: Store | None = None,
        keep_going: bool = False,
    ) -> None:
        self.manifest = manifest
        self.environ = dict(os.environ if environ is None else environ)
        self.root = Path(manifest.root).resolve()
        self.output = self.root / os.path.expanduser(manifest.output)
        self.cache = self.root / os.path.expanduser(manifest.cache)
        shared = self.environ.get("NEML2_BUILD_MACHINE")
        self.machine = self.root / os.path.expanduser(shared) if shared else self.cache / "toolchain"
        self.jobs = jobs or manifest.jobs or environments.cores()
        self.force = force
        self.stock = stock
        self.untested = untested
        self.journal = journal or Journal()
        self.store = store or Store(self.cache)
        self.records = Records(self.cache, self.output, self.root)
        self.snapshot = self.records.read_snapshot()
        self.memo = environments.Memo(dict(self.snapshot.memo))
        self.environment = environments.look(self.memo, self.environ)
        self.counts = Counts()
        self.failures: list[BuildError] = []
        self._compiler = compiler
        self._compiler_lock = threading.Lock()
        self._digests: dict[str, tuple[list[int] | None, str]] = {}
        self._documents: dict[str, hit.Document] = {}
        self._documents_lock = threading.Lock()
        self._graphs: dict[str, Future] = {}
        self._graphs_lock = threading.Lock()
        self._answers: dict[str, dict[str, Any]] = {}
        self._answer_locks: dict[str, threading.Lock] = {}
        self._answers_lock = threading.Lock()
        self._ahead: threading.Thread | None = None
        self._connected = store is not None
        self._connecting = threading.Lock()
        self._models: dict[str, list] = {}
        self.toolchain = toolchain_identity(self.compiler_name, stock)
        self.identity = identity(self.environment, self.toolchain)
        self.targets = manifest.targets(self._models_of, on_error=self.failures.append if keep_going else None)
        self.runs = {target.name: TargetRun(self, target) for target in self.targets}
        self.journal.tell("build-start", info={"began": self.journal.began, "jobs": self.jobs, "targets": len(self.runs)})

    # -- what is shared -----------------------------------------------------------------------------------------------

    @property
    def compiler(self) -> Compiler:
        """Who compiles; started at the first use."""
        with self._compiler_lock:
            if self._compiler is None:
                few = sum(not run.current() for run in self.runs.values()) <= _FEW
                self._compiler = self.start_compiler(few=few)
            return self._compiler

    def start_compiler(self, *, few: bool = False) -> RealCompiler:
        """NEML2 and torch, for this build's machine and folders. Raises `RequestError` where there is no C++ compiler."""
        if self.environment.compiler is None:
            environments.require_compiler(self.environ)
        logs = self.cache / "logs"
        try:
            logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RequestError(f"the cache cannot be written to: {error.strerror}", file=self.cache) from None
        return RealCompiler(self.jobs, environments.worker_environment(self.environ), logs, few=few)

    def connect(self, *, keys: bool = False) -> None:
        """Put the shared store and the keys that the manifest names behind the store: when there is something to do, because
        a null build asks nobody. Raises `RequestError` where the address or a key is of no use.

        Parameters
        ----------
        keys
            Whether the keys are needed without a shared store as well: for packs.
        """
        with self._connecting:
            if self._connected:
                return
            manifest = self.manifest
            trusted = [manifest.trusted_keys] if isinstance(manifest.trusted_keys, str) else manifest.trusted_keys
            configured = bool(trusted or manifest.signing_key or self.environ.get("NEML2_BUILD_SIGNING_KEY"))
            if configured and (keys or manifest.remote):
                from neml2_build.signing import Keys

                self.store.keys = Keys.load(trusted, manifest.signing_key, root=self.root, environ=self.environ)
            if manifest.remote:
                from neml2_build.remote import open_remote

                write = manifest.remote_write
                self.store.remote = open_remote(manifest.remote, write=write, root=self.root, environ=self.environ)
            self._connected = True

    @property
    def torch_imported(self) -> bool:
        """Whether this build imported torch, in whatever process."""
        return self._compiler is not None and self._compiler.torch_imported

    @property
    def compiler_name(self) -> str:
        """Name of who compiles, without starting it."""
        return self._compiler.name if self._compiler is not None else RealCompiler.name

    def _models_of(self, path: Path, model: Model) -> Sequence[str]:
        """The models that ``model = "*"`` or ``driver`` stands for, remembered while the files are as they were."""
        name = digest_json([str(path), model.model, model.driver, model.variables, list(model.overrides)])
        known = self.snapshot.models.get(name)
        if known is not None and all(environments.signature(file) == stat for file, stat in known[0]):
            self._models[name] = known
            return known[1]
        document = hit.read(
            path, variables={k: str(v) for k, v in model.variables.items()}, overrides=model.overrides, environ=self.environ
        )
        found = [hit.driver_model(document, model.driver)] if model.driver is not None else list(hit.top_models(document))
        stats = [(str(source.path), settled(environments.signature(source.path))) for source in document.files]
        if not document.environment and all(stat is not None for _, stat in stats):
            self._models[name] = [[list(pair) for pair in stats], found]
        return found

    def document(
        self, path: Path, *, variables: Mapping[str, str], overrides: Sequence[str], environ: Mapping[str, str]
    ) -> hit.Document:
        """`hit.read`, once for the targets that share a file, as long as every file that was read holds the same bytes.

        Reading is nine tenths of parsing a file of 50 models, 8.8 ms for each of them.
        """
        name = digest_json([str(path), dict(variables), list(overrides)])
        with self._documents_lock:
            known = self._documents.pop(name, None)
            if known is None or any(_digest_or_none(file.path) != file.digest for file in known.files):
                known = hit.read(path, variables=variables, overrides=overrides, environ=environ)
            self._documents[name] = known
            if len(self._documents) > _DOCUMENTS:
                del self._documents[next(iter(self._documents))]
            return known

    def digest_of(self, path: Path | str) -> str:
        """Digest of a file's content, read once a build as long as its stat stays. Raises ``OSError``."""
        stat = environments.signature(path)
        known = self._digests.get(str(path))
        if known is not None and stat is not None and known[0] == stat:
            return known[1]
        found = digest_file(path)
        self._digests[str(path)] = (stat, found)
        return found

    def select(self, names: Iterable[str] = ()) -> list[TargetRun]:
        """The runs of the targets named (shell patterns allowed), or of all; `RequestError` names the nearest."""
        import difflib
        import fnmatch

        wanted = list(names)
        if not wanted:
            return list(self.runs.values())
        chosen: dict[str, TargetRun] = {}
        for name in wanted:
            found = [name] if name in self.runs else fnmatch.filter(self.runs, name)
            if not found:
                near = difflib.get_close_matches(name, self.runs, n=1)
                raise RequestError(
                    f"no target named '{name}'",
                    file=self.manifest.file,
                    remedy=f"did you mean '{near[0]}'?" if near else "'neml2-build list' shows all targets",
                )
            chosen.update((one, self.runs[one]) for one in found)
        return list(chosen.values())

    def fail(self, error: BuildError, target: str, stage: str) -> None:
        """Note that *stage* of *target* failed."""
        error.target = error.target or target
        error.stage = error.stage or stage
        self.failures.append(error)
        self.journal.tell("failure", target=target, stage=stage, outcome="failed", info={"message": str(error)})

    # -- lowering, shared by targets ----------------------------------------------------------------------------------

    def isa_key(self) -> tuple[str, dict[str, Any]]:
        """The key of what torch says of this CPU, and what it is made of."""
        return _answer_key("probe", self.environment.for_lowering("native"))

    def isa(self) -> dict[str, Any] | None:
        """What torch says of this CPU: asked once a machine, compiler and torch, and kept in the store."""
        if self.compiler_name != RealCompiler.name or self.stock:
            return None
        return self._ask("probe", self.environment.for_lowering("native"), lower.probe)

    def ask_ahead(self, target: Target) -> None:
        """Have what is made once a machine made beside the first exports, of which that of *target* is one.

        On a machine that is new, `isa` takes 5 s, and then the pieces that code for the CPU needs 20.
        """

        def ask() -> None:
            with contextlib.suppress(Exception):
                key, _ = self.isa_key()
                known = self.store.find(key) is not None or self._answer_of_machine(key) is not None
                pieces = any(self.machine.glob("*.json"))
                isa = self.isa()
                if not (known and pieces) and isa is not None and "cpu" in target.devices:
                    self._prepare(isa, target.march)

        with self._answers_lock:
            if self._ahead is None and self.compiler_name == RealCompiler.name and not self.stock:
                self._ahead = threading.Thread(target=ask, daemon=True)
                self._ahead.start()

    def _prepare(self, isa: dict[str, Any], march: str) -> None:
        request = lower.Preparation(
            march=march,
            threads=self.environment.threads_for(march),
            isa=isa,
            prepared=str(self.machine),
            work=str(self.work()),
        )
        done = self.compiler.prepare(request).result()
        self.journal.tell("job-end", stage="prepare", seconds=done.usage.seconds)

    def work(self) -> Path:
        """Folder in which lowerings make their scratch folders."""
        folder = self.cache / "tmp" / "work"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def check_inductor(self, target: Target) -> None:
        """Raise `RequestError` if *target* sets an option that this torch's inductor does not have, or to a wrong type."""
        if not target.inductor or self.compiler_name != RealCompiler.name:
            return
        known = self._ask("inductor-options", {"torch": self.environment.packages.get("torch")}, lower.inductor_options)
        for name, value in target.inductor.items():
            problem = lower.wrong_option(name, value, known)
            if problem is not None:
                message, remedy = problem
                raise RequestError(message, file=self.manifest.file, target=target.name, stage="export", remedy=remedy)

    def _ask(self, stage: str, about: dict[str, Any], job: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The answer of *job*, which runs in a worker once for all builds that share the store, as long as *about* holds."""
        key, made_of = _answer_key(stage, about)
        with self._answers_lock:
            lock = self._answer_locks.setdefault(key, threading.Lock())
        with lock:
            if key in self._answers:
                return self._answers[key]
            with self.store.lock(key):
                action = self.store.find(key)
                if action is not None:
                    with contextlib.suppress(ObjectMissing, msgspec.MsgspecError):
                        self._answers[key] = msgspec.json.decode(self.store.read(action.outputs[0].digest))
                if key not in self._answers:
                    began = time.perf_counter()
                    self._answers[key] = self._answer_of_machine(key) or self._answer_of_worker(key, stage, job)
                    self.keep(key, stage, "", {"answer.json": msgspec.json.encode(self._answers[key])}, made_of, began)
            return self._answers[key]

    def _answer_of_machine(self, key: str) -> dict[str, Any] | None:
        """The answer *key* that another project of this machine got, where they share a folder (NEML2_BUILD_MACHINE)."""
        try:
            return msgspec.json.decode((self.machine / "answers" / f"{key}.json").read_bytes(), type=dict[str, Any])
        except (OSError, msgspec.MsgspecError):
            return None

    def _answer_of_worker(self, key: str, stage: str, job: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        done = self.compiler.run(job).result()
        self.journal.tell("job-end", stage=stage, seconds=done.usage.seconds)
        if self.machine != self.cache / "toolchain":
            with contextlib.suppress(OSError):
                replace(self.machine / "answers" / f"{key}.json", msgspec.json.encode(done.value))
        return done.value

    def lower_once(self, key: str, made_of: dict[str, Any], request: Callable[[], lower.Request], **how: Any) -> Future:
        """A future of (`Action`, lowered): the graph of *key*, from the store or compiled, once for all who ask.

        Parameters
        ----------
        key, made_of
            The lower key.
        request
            Makes the request if it must be compiled.
        how
            ``target``, ``graph`` for messages; ``priority``, ``near`` for the compiler.
        """
        with self._graphs_lock:
            known = self._graphs.get(key)
            if known is not None:
                shared: Future = Future()
                known.add_done_callback(lambda done: _copy(done, shared))
                return shared
            future: Future = Future()
            self._graphs[key] = future
        try:
            if not self._lower_now(future, key, made_of, request, how):
                waiter = threading.Thread(target=self._lower_later, args=(future, key, made_of, request, how), daemon=True)
                waiter.start()
        except BaseException as error:
            future.set_exception(error)
        return future

    def _lower_now(self, future: Future, key: str, made_of: dict, request: Callable[[], lower.Request], how: dict) -> bool:
        """Answer *future* from the store or start the compile; False while another process is compiling the same."""
        if (action := self._usable(key)) is not None:
            future.set_result((action, False))
            return True
        lock = self.store.try_lock(key)
        if lock is None:
            return False
        try:
            if (action := self._usable(key)) is not None:
                lock.release()
                future.set_result((action, False))
                return True
            began = time.perf_counter()
            self.journal.tell("graph-start", target=how["target"], stage=how["stage"], graph=how["graph"])
            running = self.compiler.lower(request(), priority=how["priority"], near=how["near"])
        except BaseException:
            lock.release()
            raise

        def finish(done: Future) -> None:
            try:
                result: Done = done.result()
                from neml2_build import fit

                package = result.value.package
                needs, notes = fit.examine(package, made_of["march"])
                info = {
                    "phases": result.value.seconds,
                    "notes": [*result.value.notes, *notes],
                    "needs": needs,
                    **result.value.info,
                    "cpu_seconds": round(result.usage.cpu_seconds, 3),
                    "peak_bytes": result.usage.peak_bytes,
                }
                took = round(result.usage.seconds, 3)
                action = self.keep(key, "lower", how["target"], {"graph.pt2": package}, made_of, began, info, took)
            except BaseException as error:
                self.journal.tell("graph-end", target=how["target"], stage=how["stage"], graph=how["graph"], outcome="failed")
                lock.release()
                future.set_exception(error)
                return
            lock.release()
            self.journal.tell(
                "graph-end",
                target=how["target"],
                stage=how["stage"],
                graph=how["graph"],
                outcome="built",
                seconds=result.usage.seconds,
                info={**info, "bytes": len(package)},
            )
            future.set_result((action, True))

        running.add_done_callback(finish)
        return True

    def _usable(self, key: str) -> Action | None:
        """The stored lowering of *key*, if this machine can run it."""
        from neml2_build import fit

        action = None if self.force else self.store.find(key)
        return action if action is not None and fit.runs_here(action.info.get("needs") or {}, self.environment.libc) else None

    def forget_lost(self, lowered: Mapping[str, str]) -> None:
        """Have graphs lowered again, given as key → digest, whose packages the store has lost since."""
        with self._graphs_lock:
            for key, found in lowered.items():
                if not self.store.has(found):
                    self._graphs.pop(key, None)

    def _lower_later(self, future: Future, key: str, made_of: dict, request: Callable[[], lower.Request], how: dict) -> None:
        try:
            pause = 0.02
            while not self._lower_now(future, key, made_of, request, how):
                time.sleep(pause)
                pause = min(pause * 1.5, 0.5)
        except BaseException as error:
            future.set_exception(error)

    def keep(
        self,
        key: str,
        stage: str,
        target: str,
        contents: Mapping[str, bytes],
        made_of: dict[str, Any],
        began: float,
        info: dict[str, Any] | None = None,
        seconds: float | None = None,
    ) -> Action:
        """Store *contents* (bytes by name) and the record of the work *key* that made them: the record.

        Once more where another process took the contents away in between: it emptied the store, or found them damaged.

        Raises
        ------
        TaskError
            The store cannot be written, or lost the contents twice.
        """
        for _ in range(2):
            outputs = [Output(name, *self.store.put(data)) for name, data in contents.items()]
            action = self.action(key, stage, target, outputs, made_of, began, info or {})
            if seconds is not None:
                action = msgspec.structs.replace(action, seconds=seconds)
            with contextlib.suppress(ObjectMissing):
                self.store.record(action)
                return action
        raise TaskError("the store keeps losing what is stored", file=self.cache, remedy="check the disk")

    @staticmethod
    def action(
        key: str,
        stage: str,
        target: str,
        outputs: Sequence[Output],
        made_of: dict[str, Any],
        began: float,
        info: dict[str, Any],
    ) -> Action:
        """A record for the store of what was just made; *began* on `time.perf_counter`."""
        return Action(
            key=key,
            stage=stage,
            target=target,
            outputs=tuple(outputs),
            made_of=made_of,
            seconds=round(time.perf_counter() - began, 3),
            created=round(time.time(), 3),
            info=info,
        )

    # -- the end ------------------------------------------------------------------------------------------------------

    def close(self, *, kill: bool = False) -> None:
        """End the workers and remember what the next null build can use."""
        for run in self.runs.values():
            run.release()
        if self._compiler is not None:
            self._compiler.close(kill=kill)
        self.remember()
        if any(outcome != "up-to-date" for run in self.runs.values() for outcome in run.outcome.values()):
            from neml2_build import upkeep

            self.store.flush(HURRIED_SECONDS if kill else UPLOAD_SECONDS)
            upkeep.tidy(self)
        self.store.close()

    def remember(self) -> None:
        """Write the snapshot if it would differ."""
        entries = dict(self.snapshot.entries)
        changed = self.memo.changed or self._models != self.snapshot.models
        for run in self.runs.values():
            entry = run.entry()
            if entry is None and entries.pop(run.target.name, None) is not None:
                changed = True
            elif entry is not None and entries.get(run.target.name) != entry:
                entries[run.target.name] = entry
                changed = True
        for name in set(entries) - set(self.runs):
            del entries[name]
            changed = True
        project = self._project(entries)
        if changed or project != self.snapshot.project:
            snapshot = Snapshot(entries=entries, memo=self.memo.entries, models=self._models, project=project)
            self.records.write_snapshot(snapshot)

    def _project(self, entries: Mapping[str, Entry]) -> Project | None:
        """What the quick look at the whole project needs; None unless every target is up to date."""
        if self.manifest.file is None or set(entries) != set(self.runs):
            return None
        folders: dict[str, list[int]] = {}
        for model in self.manifest.models:
            for folder in glob_folders(self.root, model.input, (self.output, self.cache)):
                stat = settled(environments.signature(folder))
                if stat is None:
                    return None
                folders[str(folder)] = stat
        files = [(path, stat) for stats, _ in self._models.values() for path, stat in stats]
        try:
            text = self.manifest.file.read_bytes()
        except OSError:
            return None
        return Project(manifest_digest(text), sorted([*folders.items(), *files]))


def _digest_or_none(path: Path) -> str | None:
    try:
        return digest_file(path)
    except OSError:
        return None


def _answer_key(stage: str, about: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The key of an answer of torch, and what it is made of."""
    made_of = {"stage": stage, "version": versions.LOWER, "environment": about}
    return digest_json(made_of), made_of


def _copy(done: Future, shared: Future) -> None:
    """Pass on to *shared* what another target's request made: for this one it is a reuse."""
    error = done.exception()
    if error is not None:
        shared.set_exception(copy.copy(error) if isinstance(error, BuildError) else error)
    else:
        shared.set_result((done.result()[0], False))
