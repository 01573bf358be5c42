"""Objects and action records on disk: what was made, found again by the key of what it was made of.

The store knows digests and bytes; it does not know what a graph is::

    objects/ab/cdef...           contents by digest (xxh3_128), mode 0444
    actions/ab/cdef....json      action key -> outputs, what the key was made of, the seconds it took
    tmp/SESSION/                 what one process is writing, and ``used``: what it relies on
    tmp/SESSION.lock             locked by that process for as long as it lives
    counts.jsonl                 hits and misses by reason, a line a process
    tmp/locks/KEY                one key at a time, across processes

Plain files and atomic renames, no database, because two builds, two projects and an NFS server must be able to share
one store, and any process may be killed at any instruction:

- everything is written to ``tmp/`` on the same file system, fsynced and renamed, the record last. A record whose object
  did not reach the disk before a power failure is a miss, therefore directories are not fsynced;
- contents are checked on every read (20 GB/s, so 0.1 ms for a package of 2 MB). What is broken is a miss: removed,
  reported, made again. Nothing is linked out of the store: an edit of a published file must not reach the object;
- locks are ``flock``: the kernel drops them with their process. filelock was considered: it polls every 50 ms, and
  where ``flock`` is missing it falls back to marker files, which outlive a killed holder;
- the time of last use is the modification time of a record, which a null build renews once a day at most. What a
  living process uses is in its ``used`` file, which :meth:`Store.gc` respects: no clock is trusted with work in flight.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import tempfile
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import xxhash

from .digest import canonical_json, digest, digest_file
from .durable import flush
from .errors import TaskError

if TYPE_CHECKING:
    from .remote import Remote
    from .signing import Keys

FORMAT = 1
"""Version of the records. Records of another version are misses, and left alone: their writer may still use them."""

DAY = 86400.0
HOUR = 3600.0
MINUTE = 60.0

REASONS = {
    "object-broken": "an object's bytes are not what its name says; it was removed",
    "object-missing": "a record names an object that is not there",
    "object-unreadable": "an object cannot be read; it was left as it is",
    "record-broken": "a record is not what was written; it was removed",
    "record-unreadable": "a record cannot be read; it was left as it is",
    "record-version": "a record was written by another version of neml2-build",
    "store-readonly": "the store cannot be written; what is made is kept for this run only",
    "locks-unavailable": "the file system has no locks; work may be done twice",
}
"""Every kind of :class:`Event` that this module reports."""

_HEX = re.compile(r"[0-9a-f]{32}")
_CHUNK = 1 << 20
_FICLONE = 0x40049409
_DENIED = (errno.EROFS, errno.EACCES, errno.EPERM)
_FULL = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "the file size limit is reached",
}


class ObjectMissing(LookupError):
    """No intact object of this digest is in the store: make it again."""


class Output(msgspec.Struct, frozen=True):
    """One file that an action made."""

    name: str
    digest: str
    size: int


class Action(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one piece of work that was done.

    Parameters
    ----------
    key
        Digest of everything that the work reads.
    stage, target
        Labels for people: which stage, and the target for which it was done first.
    outputs
        What it made.
    made_of
        What the key was made of, so that a miss can be explained.
    seconds
        How long it took: what a hit saves.
    created
        POSIX time.
    info
        Whatever its maker wants to remember.
    """

    key: str
    stage: str
    target: str
    outputs: tuple[Output, ...]
    made_of: dict[str, Any] = {}
    seconds: float = 0.0
    created: float = 0.0
    info: dict[str, Any] = {}


class Event(msgspec.Struct, frozen=True):
    """Something that the reader of a build's summary should know; *kind* is a key of :data:`REASONS`."""

    kind: str
    subject: str
    detail: str


class GcReport(msgspec.Struct, frozen=True, kw_only=True):
    """What :meth:`Store.gc` removed, and what is left. Sizes are bytes on disk."""

    actions: int = 0
    objects: int = 0
    orphans: int = 0
    interrupted: int = 0
    locks: int = 0
    freed: int = 0
    size: int = 0
    kept: int = 0


class CheckReport(msgspec.Struct, frozen=True, kw_only=True):
    """What :meth:`Store.check` read, and every problem that it found."""

    actions: int = 0
    objects: int = 0
    size: int = 0
    problems: tuple[Event, ...] = ()
    repaired: int = 0

    @property
    def ok(self) -> bool:
        """Whether nothing was wrong."""
        return not self.problems


def encode(action: Action, signatures: tuple[str, ...] = ()) -> bytes:
    """The text of *action*'s record: canonical, with its own checksum before it."""
    body = canonical_json({"format": FORMAT, "signatures": signatures, **msgspec.to_builtins(action)})
    return b'{"checksum":"' + digest(body).encode() + b'","record":' + body + b"}\n"


class _Record(msgspec.Struct, frozen=True):
    format: int
    signatures: tuple[str, ...] = ()


def decode(data: bytes, key: str) -> Action:
    """The action in the record *data*, which must be *key*'s.

    Raises
    ------
    ValueError
        When it is broken, another key's, or of another format (then :class:`ForeignFormat`).
    """
    head, mark, rest = data.partition(b'","record":')
    body = rest[:-2]
    if not mark or head != b'{"checksum":"' + digest(body).encode() or rest[-2:] != b"}\n":
        raise ValueError("its checksum does not fit")
    if (version := msgspec.json.decode(body, type=_Record).format) != FORMAT:
        raise ForeignFormat(f"format {version}, this version reads {FORMAT}")
    action = msgspec.json.decode(body, type=Action)
    if action.key != key or not all(_HEX.fullmatch(output.digest) for output in action.outputs):
        raise ValueError("it is another key's" if action.key != key else "it names something that is no digest")
    return action


class _Count(msgspec.Struct, frozen=True):
    counts: dict[str, int]
    seconds_saved: float


class ForeignFormat(ValueError):
    """A record of another version of this program."""


def _checked(name: str) -> str:
    if not _HEX.fullmatch(name):
        raise ValueError(f"not a digest: {name!r}")
    return name


def _disk_size(status: os.stat_result) -> int:
    return max(status.st_size, status.st_blocks * 512)


def _flock(path: Path, *, wait: bool) -> int | None:
    """A descriptor that holds the lock file *path*, or None where another holds it and *wait* is false."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            # gc removes lock files that nobody holds: one that is no longer at its path locks nothing.
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor
        except (BlockingIOError, FileNotFoundError) as error:
            if isinstance(error, BlockingIOError):
                os.close(descriptor)
                return None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


class Lock:
    """A lock that is held, until :meth:`release` or the end of the process. Also a context manager."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor

    def release(self) -> None:
        """Let the next one in. A second call does nothing."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class _Session:
    """This process's folder under ``tmp/``, locked while the process lives: leftovers are known for what they are."""

    def __init__(self, tmp: Path) -> None:
        tmp.mkdir(parents=True, exist_ok=True)
        self.pid = os.getpid()
        self.name = f"{self.pid}-{secrets.token_hex(6)}"
        self.folder = tmp / self.name
        self.lock = tmp / f"{self.name}.lock"
        try:
            self.descriptor = _flock(self.lock, wait=True)
        except OSError as error:
            if error.errno in (*_DENIED, *_FULL):
                raise
            self.descriptor = None
        self.used = -1
        try:
            self.folder.mkdir()
            self.used = os.open(self.folder / "used", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self.pid == os.getpid():
            shutil.rmtree(self.folder, ignore_errors=True)
            with contextlib.suppress(OSError):
                self.lock.unlink(missing_ok=True)
        for descriptor in (self.used, self.descriptor):
            if descriptor is not None and descriptor >= 0:
                os.close(descriptor)
        self.used = self.descriptor = -1


class Store:
    """A store of results in the folder *root*, which is made when it is first written.

    Safe to use from several threads, and from several processes with an instance each.

    Parameters
    ----------
    root
        The folder.
    remote
        Asked where this store does not know, and offered what is recorded.
    keys
        Whose records the remote's must be, see :mod:`neml2_build.signing`; None: they are used unsigned.
    readonly
        Use what is there and write nothing into it. A store that turns out not to be writable is treated the same way:
        what is made goes to a temporary folder that ends with this instance.

    Attributes
    ----------
    events
        What was found broken, missing or unusual, in order.
    """

    def __init__(
        self,
        root: Path | str,
        *,
        remote: Remote | None = None,
        keys: Keys | None = None,
        readonly: bool = False,
    ) -> None:
        self.root = Path(root)
        self.remote = remote
        self.keys = keys
        self.events: list[Event] = []
        self._outcomes: dict[str, tuple[str, float]] = {}
        self._settled: set[str] = set()
        self._told: set[str] = set()
        self._absent: set[str] = set()
        self._mutex = threading.RLock()
        self._marked: set[str] = set()
        self._session: _Session | None = None
        self._overlay: tempfile.TemporaryDirectory | None = None
        self._pending: dict[tuple[str, str], Path] | None = None
        if readonly:
            self._fall_back()

    # ---------------------------------------------------------------- where things are

    @property
    def readonly(self) -> bool:
        """Whether nothing is written into :attr:`root`."""
        return self._overlay is not None

    @property
    def _top(self) -> Path:
        return Path(self._overlay.name) if self._overlay else self.root

    @property
    def _layers(self) -> tuple[Path, ...]:
        return (self._top, self.root) if self._overlay else (self.root,)

    def _fall_back(self) -> None:
        self._overlay = tempfile.TemporaryDirectory(prefix="neml2-build-", ignore_cleanup_errors=True)
        session, self._session = self._session, None
        if session:
            session.close()

    def _report(self, kind: str, subject: str, detail: str) -> None:
        with self._mutex:
            self.events.append(Event(kind, subject, detail))

    def _find_file(self, kind: str, name: str) -> Path | None:
        if self._pending is not None and (part := self._pending.get((kind, name))) is not None:
            return part
        for layer in self._layers:
            path = _place(layer, kind, name)
            with contextlib.suppress(OSError):
                if path.exists():
                    return path
        return None

    # ---------------------------------------------------------------- writing

    def _writing(self, work: Callable[[], Any]) -> Any:
        """Do *work*, which writes below :attr:`_top`; again in the overlay when the store cannot be written, and again
        with new folders when somebody removed the store under us."""
        for attempt in range(3):
            try:
                return work()
            except OSError as error:
                if error.errno in _FULL:
                    raise self._full(error) from None
                if error.errno == errno.ENOENT and attempt == 0:
                    with self._mutex:
                        session, self._session = self._session, None
                        if session:
                            session.close()
                    continue
                if error.errno not in _DENIED or self.readonly:
                    raise TaskError(
                        f"the store cannot be written: {error.strerror}",
                        file=error.filename or self.root,
                        remedy=f"check the folder {self.root}, or set another one (cache in the manifest)",
                    ) from None
                with self._mutex:
                    if not self.readonly:
                        self._fall_back()
                        self._report("store-readonly", str(self.root), error.strerror or str(error))
        raise AssertionError("unreachable")

    def _full(self, error: OSError) -> TaskError:
        return TaskError(
            f"cannot write to the store: {_FULL[error.errno or errno.ENOSPC]}",
            file=self._top,
            remedy="free some space, or run `neml2-build cache gc --max-size SIZE`; what was stored before is intact",
        )

    def _own(self) -> _Session:
        with self._mutex:
            if self._session is None or self._session.pid != os.getpid():
                self._session = _Session(self._top / "tmp")
                weakref.finalize(self, self._session.close)
                self._marked.clear()
            return self._session

    def _write(self, kind: str, name: str, data: Iterable[bytes], mode: int) -> None:
        """Write a file of the store: tmp, fsync, rename. Nothing is left of it when that fails."""

        def work() -> None:
            part = self._own().folder / f"{name}.{secrets.token_hex(4)}"
            final = _place(self._top, kind, name)
            try:
                with part.open("xb", buffering=0) as stream:
                    for block in data:
                        _write_all(stream.fileno(), block)
                    os.fchmod(stream.fileno(), mode)
                    _step("written")
                    if self._pending is not None:
                        self._pending[kind, name] = part
                        return
                    os.fsync(stream.fileno())
                final.parent.mkdir(parents=True, exist_ok=True)
                _step("synced")
                try:
                    part.replace(final)
                except FileNotFoundError:  # what NFS answers when it did it, lost its answer, and was asked again
                    if not final.exists():
                        raise
                _step("renamed")
            except BaseException:
                with contextlib.suppress(OSError):
                    part.unlink(missing_ok=True)
                raise

        self._writing(work)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Let what is written meanwhile wait for the disk together, at the end; until then only this instance sees it.

        For one thread, and for much that is small. Raises `TaskError` at the end where it cannot be written.
        """
        self._pending = {}
        try:
            yield
        finally:
            pending, self._pending = self._pending, None
            parts = {key: part for key, part in pending.items() if part.exists()}

            def work() -> None:
                flush([part for part in parts.values() if part.exists()])
                for kind, name in sorted(parts, key=lambda key: ("objects", "actions").index(key[0])):
                    final = _place(self._top, kind, name)
                    final.parent.mkdir(parents=True, exist_ok=True)
                    if (part := parts[kind, name]).exists():
                        part.replace(final)

            if parts:
                self._writing(work)

    def put(self, data: bytes) -> tuple[str, int]:
        """Store *data*: its digest and its size. Stored once, however often it is put.

        Raises
        ------
        TaskError
            The disk is full; nothing is half-written.
        """
        name = digest(data)
        self.used(name, action=False)
        if not self._intact(name, len(data)):
            self._write("objects", name, (data,), 0o444)
            self.used(name, action=False)
        return name, len(data)

    def put_file(self, path: Path | str) -> tuple[str, int]:
        """Store the content of the file at *path*, as :meth:`put` does. Raises ``OSError`` where it cannot be read."""
        return self.put(Path(path).read_bytes())

    def _intact(self, name: str, size: int) -> bool:
        path = self._find_file("objects", name)
        if path is None:
            return False
        with contextlib.suppress(OSError):
            if path.stat().st_size == size and digest_file(path) == name:
                _renew(path, MINUTE)
                return True
        self._discard("objects", name, "object-broken", "found while the same content was stored")
        return False

    def record(self, action: Action) -> None:
        """Remember *action*; its outputs must have been put. The last step: from here on the key is a hit.

        It is offered to the remote, on a thread.

        Raises
        ------
        ObjectMissing
            One of its outputs is not in the store.
        TaskError
            The disk is full.
        """
        action = msgspec.convert(msgspec.to_builtins(action), Action)
        self.accept(action)
        with self._mutex:
            self._settled.add(action.key)
        if self.remote:
            self.remote.upload(action, self, self._report)

    def accept(self, action: Action, signatures: tuple[str, ...] = ()) -> None:
        """As :meth:`record`, for an action that came verified from elsewhere, with the signatures that it came with."""
        for output in action.outputs:
            if self._find_file("objects", _checked(output.digest)) is None:
                raise ObjectMissing(f"output {output.name!r} of {action.stage}:{action.target}")
        self.used(action.key)
        self._write("actions", _checked(action.key), (encode(action, signatures),), 0o644)

    def _discard(self, kind: str, name: str, reason: str, detail: str) -> None:
        self._report(reason, name, detail)
        for layer in self._layers:
            with contextlib.suppress(OSError):
                _place(layer, kind, name).unlink()

    # ---------------------------------------------------------------- reading

    def has(self, name: str) -> bool:
        """Whether an object of this digest is here. Its content is checked when it is read."""
        return self._find_file("objects", _checked(name)) is not None

    def read(self, name: str) -> bytes:
        """The content of the object *name*, checked.

        Raises
        ------
        ObjectMissing
            It is not here, or it was broken: then it was removed, and :attr:`events` says so.
        """
        self.used(name, action=False)
        path = self._find_file("objects", _checked(name))
        if path is None:
            raise ObjectMissing(name)
        try:
            data = _read(path)
        except FileNotFoundError:
            raise ObjectMissing(name) from None
        except OSError as error:
            self._report("object-unreadable", name, error.strerror or str(error))
            raise ObjectMissing(name) from None
        if digest(data) != name:
            self._discard("objects", name, "object-broken", f"{len(data)} bytes of other content")
            raise ObjectMissing(name)
        return data

    def materialize(self, name: str, destination: Path | str, mode: int = 0o644, *, durable: bool = True) -> None:
        """Put a checked copy of the object *name* at *destination*, in one step; what was there before is replaced.

        A copy on file systems that cannot share blocks, a clone where they can; never a link.

        Parameters
        ----------
        durable
            Whether it is on the disk when this returns; if not, that is the caller's to see to.

        Raises
        ------
        ObjectMissing
            As :meth:`read` does.
        TaskError
            The disk is full; what was there before still is.
        """
        self.used(name, action=False)
        source = self._find_file("objects", _checked(name))
        if source is None:
            raise ObjectMissing(name)
        target = Path(destination)
        part = target.with_name(f".{target.name[:100]}.{secrets.token_hex(4)}.tmp")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                found = _copy(source, part, mode, durable=durable)
            except FileNotFoundError:
                raise ObjectMissing(name) from None
            if found != name:
                self._discard("objects", name, "object-broken", "found while it was copied out")
                raise ObjectMissing(name)
            part.replace(target)
        except OSError as error:
            reason = _FULL.get(error.errno or 0, error.strerror)
            remedy = "free some space" if error.errno in _FULL else f"check the folder {target.parent}"
            raise TaskError(f"cannot write: {reason}", file=target, remedy=remedy) from None
        finally:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)

    def find(self, key: str) -> Action | None:
        """What is known of the work *key*, if all that it made is here, or could be fetched; None is a miss.

        :attr:`counts` says why. A key counts once, however often it is asked for: as a hit, if another build made it
        while this one waited for its lock; else for the first reason of its miss.
        """
        action, reason = self._look(key)
        outcome = "hit-local"
        if action is None and self.remote and key not in self._absent:
            problem = self.remote.fetch(key, self, self._report)
            if problem is None:
                action, outcome = self._look(key)[0], "hit-remote"
            else:
                self._absent.add(key)
                reason = reason if problem == "no-record" else problem
        with self._mutex:
            before = self._outcomes.get(key)
            if action is None:
                self._outcomes.setdefault(key, (f"miss-{reason}", 0.0))
            elif before is None or (before[0].startswith("miss") and key not in self._settled):
                self._outcomes[key] = outcome, action.seconds
        return action

    def peek(self, key: str) -> Action | None:
        """As :meth:`find`, of this folder only, and neither counted nor marked as used: for those who only look."""
        path = self._find_file("actions", _checked(key))
        try:
            action = decode(_read(path), key) if path else None
        except (ValueError, msgspec.MsgspecError, OSError):
            return None
        return action if action and all(self.has(output.digest) for output in action.outputs) else None

    def signatures(self, key: str) -> tuple[str, ...]:
        """The signatures with which the action *key* came here; none for what was made here."""
        path = self._find_file("actions", _checked(key))
        try:
            data = _read(path) if path else b""
            decode(data, key)
            return msgspec.json.decode(data.partition(b'","record":')[2][:-2], type=_Record).signatures
        except (ValueError, msgspec.MsgspecError, OSError):
            return ()

    @property
    def counts(self) -> Counter[str]:
        """Keys by what became of them: ``hit-local``, ``hit-remote``, ``miss-no-record``, ``miss-object-broken``, ..."""
        with self._mutex:
            return Counter(outcome for outcome, _ in self._outcomes.values())

    @property
    def seconds_saved(self) -> float:
        """What the hits would have taken to make."""
        with self._mutex:
            return sum(seconds for _, seconds in self._outcomes.values())

    def _look(self, key: str) -> tuple[Action | None, str]:
        self.used(key)
        path = self._find_file("actions", _checked(key))
        if path is None:
            return None, "no-record"
        _renew(path, MINUTE)
        try:
            action = decode(_read(path), key)
        except ForeignFormat as error:
            self._report("record-version", key, str(error))
            return None, "record-version"
        except FileNotFoundError:
            return None, "no-record"
        except OSError as error:
            self._report("record-unreadable", key, error.strerror or str(error))
            return None, "record-unreadable"
        except (ValueError, msgspec.MsgspecError) as error:
            self._discard("actions", key, "record-broken", str(error))
            return None, "record-broken"
        for output in action.outputs:
            self.used(output.digest, action=False)
            if (reason := self._missing(output)) is not None:
                return None, reason
        return action, ""

    def _missing(self, output: Output) -> str | None:
        path = self._find_file("objects", output.digest)
        try:
            size = path.stat().st_size if path else None
        except OSError:
            size = None
        if size is None:
            if all(event.subject != output.digest for event in self.events):  # what was found broken is missing then
                self._report("object-missing", output.digest, output.name)
            return "object-missing"
        if size != output.size:
            self._discard("objects", output.digest, "object-broken", f"{size} bytes instead of {output.size}")
            return "object-broken"
        return None

    def used(self, name: str, *, action: bool = True) -> None:
        """Mark the object or action *name* as used now: :meth:`gc` leaves it alone while this process lives.

        Parameters
        ----------
        action
            Whether it may be an action, whose file says when it was used last.
        """
        with self._mutex:
            if self.readonly or (name in self._marked and self._session and self._session.pid == os.getpid()):
                return
            if not self.root.is_dir():
                return
            try:
                os.write(self._own().used, f"{_checked(name)}\n".encode())
            except OSError:
                return
            self._marked.add(name)
        if action:
            _renew(_place(self.root, "actions", name), DAY)

    # ---------------------------------------------------------------- one at a time

    def lock(self, key: str) -> Lock:
        """Hold the work *key*, after waiting for whoever does it now. Dropped by the kernel if this process dies."""
        lock = self._acquire(key, wait=True)
        assert lock is not None
        return lock

    def try_lock(self, key: str) -> Lock | None:
        """As :meth:`lock`, but None where another holds it."""
        return self._acquire(key, wait=False)

    def _acquire(self, key: str, *, wait: bool) -> Lock | None:
        _checked(key)

        def work() -> int | None:
            folder = self._top / "tmp" / "locks"
            folder.mkdir(parents=True, exist_ok=True)
            try:
                return _flock(folder / key, wait=wait)
            except OSError as error:
                if error.errno in (*_DENIED, *_FULL):
                    raise
                self._report("locks-unavailable", key, error.strerror or str(error))
                return -1

        descriptor = self._writing(work)
        if descriptor is None:
            return None
        return Lock(None if descriptor == -1 else descriptor)

    @contextlib.contextmanager
    def tmp(self) -> Iterator[Path]:
        """A fresh folder on the store's file system, removed afterwards; if this process is killed, by :meth:`gc`."""

        def work() -> Path:
            folder = self._own().folder / f"work-{secrets.token_hex(6)}"
            folder.mkdir()
            return folder

        folder = self._writing(work)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def flush(self, timeout: float = 60.0) -> bool:
        """Wait until what was recorded is on the remote, *timeout* seconds at most: whether all of it is."""
        return self.remote.flush(timeout, self._report) if self.remote else True

    def close(self) -> None:
        """Remove this process's temporary files, add its hits and misses to :meth:`stats`, and let :meth:`gc` have what
        it used. The store can be used again. Uploads under way are not waited for: :meth:`flush` does."""
        with self._mutex:
            fresh = [self._outcomes[key] for key in self._outcomes.keys() - self._told]
            self._told.update(self._outcomes)
            if fresh and not self.readonly and self.root.is_dir():
                entry = _Count(Counter(outcome for outcome, _ in fresh), sum(seconds for _, seconds in fresh))
                with contextlib.suppress(OSError):
                    _append_count(self.root / "counts.jsonl", canonical_json(msgspec.to_builtins(entry)))
            session, self._session = self._session, None
            self._marked.clear()
            if session:
                session.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---------------------------------------------------------------- keeping it small and whole

    def gc(
        self,
        max_size: int | None = None,
        older_than: float | None = None,
        keep: Iterable[str] = frozenset(),
        *,
        grace: float = HOUR,
        now: float | None = None,
    ) -> GcReport:
        """Remove what was used least recently until the store fits, and everything that nothing needs.

        Parameters
        ----------
        max_size
            Bytes on disk that objects and records may take; None: no limit.
        older_than
            Remove what was not used for so many seconds, whatever the size; None: keep it.
        keep
            Keys and digests to leave alone: what this build used. What living processes use is left alone as well.
        grace
            Seconds for which an object that no record names is left alone.
        now
            POSIX time; for tests.
        """
        if self.readonly:
            return GcReport(size=sum(entry[2] for kind in ("objects", "actions") for entry in _walk(self.root / kind)))
        moment = time.time() if now is None else now
        interrupted, locks = self._sweep()
        objects = {name: (size, stamp) for name, _, size, stamp in _walk(self.root / "objects")}
        actions = []
        for name, path, size, stamp in _walk(self.root / "actions"):
            data = b""
            try:
                data = _read(path)
                outputs = frozenset(output.digest for output in decode(data, name).outputs)
            except ForeignFormat:  # whatever it may mean, what it names is in use
                outputs = frozenset(found.decode() for found in re.findall(rb'"([0-9a-f]{32})"', data))
            except (ValueError, msgspec.MsgspecError, OSError):
                outputs = frozenset()
            actions.append((stamp, name, size, outputs))
        actions.sort(key=lambda action: action[:2])
        # After the lists: what was used since is either in here or not in them.
        spared = set(keep) | self._in_use()
        for _, name, _, outputs in actions:
            if name in spared:
                spared |= outputs
        references = Counter(item for action in actions for item in action[3])
        removed = Counter[str]()
        total = sum(size for size, _ in objects.values()) + sum(action[2] for action in actions)
        start = total

        def drop(kind: str, name: str, size: int, count: str, stamp: float | None = None) -> bool:
            """Whether it is gone. One whose time is no longer *stamp* was used a moment ago: it stays."""
            nonlocal total
            path = _place(self.root, kind, name)
            try:
                if stamp is not None and path.stat().st_mtime != stamp:
                    return False
                path.unlink()
            except OSError:
                return not path.exists()
            total -= size
            removed[count] += 1
            return True

        for name, (size, stamp) in list(objects.items()):
            if name not in references and name not in spared and moment - stamp > grace:
                drop("objects", name, size, "orphans", stamp)
                del objects[name]
        for stamp, name, size, outputs in actions:
            expired = older_than is not None and moment - stamp > older_than
            if not expired and (max_size is None or total <= max_size):
                if older_than is None:
                    break
                continue
            if name in spared:
                continue
            if not drop("actions", name, size, "actions", stamp):
                continue
            for item in outputs:
                references[item] -= 1
                if not references[item] and item in objects and item not in spared:
                    drop("objects", item, objects.pop(item)[0], "objects")
        return GcReport(
            actions=removed["actions"],
            objects=removed["objects"],
            orphans=removed["orphans"],
            interrupted=interrupted,
            locks=locks,
            freed=start - total,
            size=total,
            kept=len(spared),
        )

    def _sweep(self) -> tuple[int, int]:
        """Remove the sessions of dead processes and the lock files that nobody holds: how many of each."""
        tmp = self.root / "tmp"
        sessions = locks = 0
        own = self._session.name if self._session else None
        for path in _list(tmp / "locks"):
            locks += _remove_if_free(path)
        for path in _list(tmp):
            if path.name == "locks" or path.name.removesuffix(".lock") == own:
                continue
            if path.suffix == ".lock":
                if not path.with_suffix("").exists():
                    _remove_if_free(path)
                continue
            if _is_dead(path):
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
                path.with_name(f"{path.name}.lock").unlink(missing_ok=True)
                sessions += 1
        return sessions, locks

    def _in_use(self) -> set[str]:
        """What living processes have said that they use."""
        names: set[str] = set()
        for path in _list(self.root / "tmp"):
            with contextlib.suppress(OSError):
                names.update((path / "used").read_text().split())
        return names

    def size(self) -> tuple[int, int]:
        """How many records there are, and the bytes on disk that they and the objects take; nothing is read."""
        records = [entry[2] for layer in self._layers for entry in _walk(layer / "actions")]
        return len(records), sum(records) + sum(entry[2] for layer in self._layers for entry in _walk(layer / "objects"))

    def stats(self) -> dict[str, Any]:
        """Numbers of the whole store, for people and ``--json``: sizes in bytes on disk, times in seconds."""
        objects = [entry for layer in self._layers for entry in _walk(layer / "objects")]
        actions = [entry for layer in self._layers for entry in _walk(layer / "actions")]
        stages: dict[str, dict[str, float]] = {}
        broken = 0
        for name, path, _, _ in actions:
            try:
                action = decode(path.read_bytes(), name)
            except (ValueError, msgspec.MsgspecError, OSError):
                broken += 1
                continue
            stage = stages.setdefault(action.stage, {"actions": 0, "seconds": 0.0, "size": 0})
            stage["actions"] += 1
            stage["seconds"] += action.seconds
            stage["size"] += sum(output.size for output in action.outputs)
        stamps = [entry[3] for entry in actions]
        return {
            "actions": len(actions),
            "objects": len(objects),
            "size": sum(entry[2] for entry in (*objects, *actions)),
            "unreadable_records": broken,
            "oldest_use": min(stamps, default=None),
            "newest_use": max(stamps, default=None),
            "stages": stages,
            **_sum_counts(self.root / "counts.jsonl"),
        }

    def check(self, repair: bool = False) -> CheckReport:
        """Read every object and record. With *repair*, what is broken is removed: the next build makes it again."""
        problems: list[Event] = []
        wrong: list[Path] = []
        objects = actions = total = 0
        sizes: dict[str, int] = {}
        for layer in self._layers:
            for name, path, size, _ in _walk(layer / "objects"):
                objects, total = objects + 1, total + size
                try:
                    if digest_file(path) == name:
                        sizes[name] = path.stat().st_size
                        continue
                    detail = "its content is not what its name says"
                except OSError as error:
                    detail = f"cannot be read: {error.strerror}"
                problems.append(Event("object-broken", name, detail))
                wrong.append(path)
        for layer in self._layers:
            for name, path, size, _ in _walk(layer / "actions"):
                actions, total = actions + 1, total + size
                try:
                    action = decode(path.read_bytes(), name)
                except ForeignFormat as error:
                    problems.append(Event("record-version", name, str(error)))
                    continue
                except (ValueError, msgspec.MsgspecError, OSError) as error:
                    problems.append(Event("record-broken", name, str(error)))
                    wrong.append(path)
                    continue
                lost = [output for output in action.outputs if sizes.get(output.digest) != output.size]
                if lost:
                    problems.extend(
                        Event("object-missing", output.digest, f"{action.stage}:{action.target} {output.name}")
                        for output in lost
                    )
                    wrong.append(path)
        repaired = 0
        if repair and not self.readonly:
            for path in wrong:
                with contextlib.suppress(OSError):
                    path.unlink()
                    repaired += 1
        return CheckReport(actions=actions, objects=objects, size=total, problems=tuple(problems), repaired=repaired)


def _place(root: Path, kind: str, name: str) -> Path:
    return root / kind / name[:2] / (f"{name[2:]}.json" if kind == "actions" else name[2:])


def _read(path: Path) -> bytes:
    """The bytes of *path*; a handle that an NFS server has forgotten in between is opened once more."""
    try:
        return path.read_bytes()
    except OSError as error:
        if error.errno != errno.ESTALE:
            raise
        return path.read_bytes()


def _append_count(path: Path, line: bytes) -> None:
    """Add *line*, in one write, so that processes do not tear each other's; a long file becomes its sum."""
    if path.exists() and path.stat().st_size > 1 << 18:
        part = path.parent / "tmp" / f"{secrets.token_hex(8)}.part"
        part.write_bytes(canonical_json(_sum_counts(path)) + b"\n")
        part.replace(path)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    try:
        os.write(descriptor, line + b"\n")
    finally:
        os.close(descriptor)


def _sum_counts(path: Path) -> dict[str, Any]:
    counts = Counter[str]()
    seconds = 0.0
    with contextlib.suppress(OSError):
        for line in path.read_bytes().splitlines():
            with contextlib.suppress(msgspec.MsgspecError):
                entry = msgspec.json.decode(line, type=_Count)
                counts.update(entry.counts)
                seconds += entry.seconds_saved
    return {"counts": dict(sorted(counts.items())), "seconds_saved": seconds}


def _step(name: str) -> None:
    """A moment at which a test may kill the process."""


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _copy(source: Path, part: Path, mode: int, *, durable: bool) -> str:
    """Copy *source* to the new file *part*: the digest of what was copied."""
    hasher = xxhash.xxh3_128()
    with source.open("rb", buffering=0) as reader, part.open("xb+", buffering=0) as writer:
        os.fchmod(writer.fileno(), mode)
        try:
            fcntl.ioctl(writer.fileno(), _FICLONE, reader.fileno())
            cloned = True
        except OSError:
            cloned = False
        stream = writer if cloned else reader
        while block := stream.read(_CHUNK):
            hasher.update(block)
            if not cloned:
                _write_all(writer.fileno(), block)
        if durable:
            os.fsync(writer.fileno())
    return hasher.hexdigest()


def _renew(path: Path, age: float) -> None:
    """Stamp the record *path*, if it is there, as used now, unless it was stamped within *age* seconds."""
    with contextlib.suppress(OSError):
        if abs(time.time() - path.stat().st_mtime) > age:
            _touch(path)


def _touch(path: Path) -> None:
    """Stamp a file of the store as used now; where it is another user's, by writing it again as our own."""
    try:
        os.utime(path)
    except PermissionError:
        part = path.parents[2] / "tmp" / f"{secrets.token_hex(8)}.part"
        try:
            part.write_bytes(path.read_bytes())
            part.chmod(path.stat().st_mode & 0o777)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)


def _list(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _walk(folder: Path) -> Iterator[tuple[str, Path, int, float]]:
    """Name, path, bytes on disk and time of every well-named file of ``objects/`` or ``actions/``."""
    for shard in _list(folder):
        try:
            entries = list(os.scandir(shard))
        except OSError:
            continue
        for entry in entries:
            name = shard.name + entry.name.removesuffix(".json")
            if not _HEX.fullmatch(name):
                continue
            try:
                status = entry.stat(follow_symlinks=False)
            except OSError:
                continue
            yield name, Path(entry.path), _disk_size(status), status.st_mtime


def _is_dead(session: Path) -> bool:
    """Whether the process of this folder of ``tmp/`` has ended. Where there are no locks, a week decides."""
    lock = session.with_name(f"{session.name}.lock")
    try:
        if not lock.exists():
            return time.time() - session.stat().st_mtime > HOUR
        descriptor = _flock(lock, wait=False)
        if descriptor is None:
            return False
        os.close(descriptor)
        return True
    except FileNotFoundError:
        return False
    except OSError:
        return time.time() - session.stat().st_mtime > 7 * DAY


def _remove_if_free(lock: Path) -> bool:
    try:
        descriptor = _flock(lock, wait=False)
        if descriptor is None:
            return False
        try:
            lock.unlink()
        finally:
            os.close(descriptor)
        return True
    except OSError:
        return False
