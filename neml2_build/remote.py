"""The shared tier: the same actions and objects, fetched from and offered to other machines.

Where: a folder, ``http(s)://``, or any address that fsspec knows (extra ``neml2-build[remote]``). All three hold the two
kinds of names of Bazel's plain cache protocol, so a folder that nginx serves is an HTTP cache, and bazel-remote is one::

    ac/SHA256      SHA256 of "neml2-build action 1\\n" + our key, because servers want 64 digits
    cas/SHA256     contents, zlib-compressed, by the sha256 of the compressed bytes, because servers check it

A record travels as Bazel's ``ActionResult`` message, because bazel-remote refuses to store anything else below ``ac/``
(and then keeps a record only as long as its contents); ours is inside, in ``stdout_raw``. It holds the action, the
sha256 of each content, and signatures over these exact bytes. xxh3, which names local objects, is no defence against an
attacker; sha256 is.

zlib level 6 makes a third of a package (380 kB -> 115 kB in 10 ms, on a thread of its own, and 1.3 ms back). zstandard is
as small and ten times as fast, but not in Python before 3.14, and a reader must never lack the decoder; lzma would save
another fifth for twice the time.

Nothing here can fail a build. What is missing is a miss; what does not verify is a miss with a named reason; and a remote
that fails or hangs (after one retry) is reported once, then left alone for the rest of the run. Reading and writing break
separately: a full or write-protected remote can still be read.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import http.client
import os
import queue
import re
import secrets
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
import zlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec

from .digest import canonical_json, digest
from .errors import RequestError
from .signing import Keys, Refused
from .store import FORMAT, Action, ObjectMissing, Output, Store

REASONS = {
    "remote-off": "the shared store failed; it was not asked again in this run",
    "remote-write-off": "nothing more was written to the shared store in this run",
    "remote-record-broken": "a record of the shared store cannot be read",
    "remote-record-version": "a record of the shared store was written by another version of neml2-build",
    "remote-replayed": "the shared store answered with another key's record",
    "remote-unsigned": "a record of the shared store is not signed",
    "remote-unknown-key": "a record of the shared store is signed by a key that is not trusted",
    "remote-signature-wrong": "a record of the shared store was altered after it was signed",
    "remote-object-missing": "the shared store lacks the contents of a record",
    "remote-object-broken": "the shared store sent other contents than the record says",
    "remote-upload-unfinished": "the run ended before everything was written to the shared store",
}
"""Every kind of event that this module reports."""

WRITE_VARIABLE = "NEML2_BUILD_REMOTE_WRITE"
AUTHORIZATION_VARIABLE = "NEML2_BUILD_REMOTE_AUTHORIZATION"
"""Environment variable with the value of the ``Authorization`` header that HTTP requests carry."""

_CONTEXT = b"neml2-build record 1\n"
_RECORD_LIMIT = 16 << 20
_LIES = frozenset({"remote-record-broken", "remote-replayed", "remote-signature-wrong", "remote-object-broken"})
_MANY_LIES = 5
_SLOWEST = 1_000_000.0  # bytes a second
_DIGEST = re.compile(r"[0-9a-f]{32}")
_SHA256 = re.compile(r"[0-9a-f]{64}")

Report = Callable[[str, str, str], None]


# ---------------------------------------------------------------- what travels


class _Blob(msgspec.Struct, frozen=True):
    sha256: str
    size: int


class _Envelope(msgspec.Struct, frozen=True):
    """*body* is text, not a value, because it is signed: it must come back byte for byte."""

    body: str
    signatures: tuple[str, ...] = ()
    blobs: dict[str, _Blob] = {}


class _Version(msgspec.Struct, frozen=True):
    format: int


class _Body(msgspec.Struct, frozen=True):
    action: Action
    sha256: dict[str, str]


@dataclass(frozen=True)
class Sealed:
    """An action ready to travel: where its record goes, the record, and its contents by name."""

    name: str
    record: bytes
    blobs: Mapping[str, bytes]


@dataclass(frozen=True)
class Opened:
    """A record from outside, verified: the action, the sha256 of each content, and where each content is."""

    action: Action
    sha256: Mapping[str, str]
    blobs: Mapping[str, _Blob]
    signatures: tuple[str, ...]


def record_name(key: str) -> str:
    """Where the record of the action *key* is."""
    return f"ac/{hashlib.sha256(b'neml2-build action 1' + bytes([10]) + key.encode()).hexdigest()}"


def blob_name(sha256: str) -> str:
    """Where the compressed content is whose compressed bytes have this sha256."""
    return f"cas/{sha256}"


def seal(action: Action, contents: Mapping[str, bytes], keys: Keys | None, signatures: Iterable[str] = ()) -> Sealed:
    """Make *action* and its contents (bytes by digest) ready to travel, signed if *keys* can sign.

    Parameters
    ----------
    signatures
        Those with which it came here, if it came from outside: they still hold, because sealing is deterministic.
    """
    body = canonical_json(
        {
            "format": FORMAT,
            "action": msgspec.to_builtins(action),
            "sha256": {name: hashlib.sha256(data).hexdigest() for name, data in contents.items()},
        }
    )
    blobs: dict[str, bytes] = {}
    where: dict[str, _Blob] = {}
    for name, data in sorted(contents.items()):
        packed = zlib.compress(data, 6)
        where[name] = _Blob(hashlib.sha256(packed).hexdigest(), len(packed))
        blobs[blob_name(where[name].sha256)] = packed
    own = keys.sign(_CONTEXT + body) if keys else None
    signed = tuple(sorted({*signatures, own} if own else set(signatures)))
    envelope = msgspec.json.encode(_Envelope(body.decode(), signed, where))
    return Sealed(record_name(action.key), _to_message(zlib.compress(envelope, 6), action.outputs, where), blobs)


def open_record(data: bytes, key: str | None, keys: Keys | None) -> Opened:
    """Verify the record *data*, which must be the one of *key* (None: of whichever key it says).

    Raises
    ------
    Refused
        With one of :data:`REASONS`. Nothing of an untrusted record is looked at before its signature holds.
    """
    try:
        envelope = msgspec.json.decode(_inflate(_from_message(data), _RECORD_LIMIT), type=_Envelope)
        body = envelope.body.encode()
    except (ValueError, msgspec.MsgspecError, zlib.error, RecursionError) as error:
        raise Refused("remote-record-broken", str(error)) from None
    if keys:
        keys.verify(_CONTEXT + body, envelope.signatures)
    try:
        version = msgspec.json.decode(body, type=_Version).format
        if version != FORMAT:
            raise Refused("remote-record-version", f"format {version}, this version reads {FORMAT}")
        opened = msgspec.json.decode(body, type=_Body)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise Refused("remote-record-broken", str(error)) from None
    if key is not None and opened.action.key != key:
        raise Refused("remote-replayed", f"asked for {key}, got {opened.action.key[:64]}")
    if not _is_sound(opened, envelope.blobs):
        raise Refused("remote-record-broken", "it names something that it must not, or not what it must")
    return Opened(opened.action, opened.sha256, envelope.blobs, envelope.signatures)


def _is_sound(body: _Body, blobs: Mapping[str, _Blob]) -> bool:
    """Whether every name is of its kind, and each output has its contents: a stranger's names never become paths."""
    return bool(_DIGEST.fullmatch(body.action.key)) and all(
        _DIGEST.fullmatch(output.digest)
        and output.size >= 0
        and not {"..", "", "."} & set(re.split(r"[/\\]", output.name))
        and "\0" not in output.name
        and _SHA256.fullmatch(body.sha256.get(output.digest, ""))
        and (blob := blobs.get(output.digest)) is not None
        and _SHA256.fullmatch(blob.sha256)
        and blob.size >= 0
        for output in body.action.outputs
    )


def open_blob(packed: bytes, output: Output, opened: Opened) -> bytes:
    """The content of *output* out of its compressed bytes, verified in every way there is.

    Raises
    ------
    Refused
        ``remote-object-broken``.
    """
    blob = opened.blobs[output.digest]
    if len(packed) != blob.size or hashlib.sha256(packed).hexdigest() != blob.sha256:
        raise Refused("remote-object-broken", f"{len(packed)} bytes that are not {blob.sha256[:12]}…")
    try:
        data = _inflate(packed, output.size)
    except (ValueError, zlib.error) as error:
        raise Refused("remote-object-broken", str(error)) from None
    if not _is_content(data, output, opened):
        raise Refused("remote-object-broken", "its content is not what the record says")
    return data


def _is_content(data: bytes, output: Output, opened: Opened) -> bool:
    return (
        len(data) == output.size
        and digest(data) == output.digest
        and hashlib.sha256(data).hexdigest() == opened.sha256[output.digest]
    )


def _inflate(packed: bytes, limit: int) -> bytes:
    """Decompress to *limit* bytes at most: what a stranger sends must not fill the memory."""
    machine = zlib.decompressobj()
    data = machine.decompress(packed, limit + 1)
    if len(data) > limit or not machine.eof or machine.unused_data:
        raise ValueError("it is truncated, or larger than it may be")
    return data


# Bazel's ActionResult, as far as a server looks: output_files = 2 (path = 1, digest = 2 (hash = 1, size_bytes = 2)),
# stdout_raw = 5, execution_metadata = 9 (worker = 1). bazel-remote fills an empty worker in, hence rewrites the message.


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _field(number: int, data: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _to_message(record: bytes, outputs: Iterable[Output], where: Mapping[str, _Blob]) -> bytes:
    files = b""
    for output in outputs:
        blob = where[output.digest]
        hashed = _field(1, blob.sha256.encode()) + _varint(2 << 3) + _varint(blob.size)
        files += _field(2, _field(1, output.name.encode()) + _field(2, hashed))
    return files + _field(5, record) + _field(9, _field(1, b"neml2-build"))


def _from_message(data: bytes) -> bytes:
    """The bytes of ``stdout_raw``. Raises ``ValueError`` where there are none."""
    position = 0

    def varint() -> int:
        nonlocal position
        value = shift = 0
        while position < len(data) and shift < 64:
            byte = data[position]
            position += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7
        raise ValueError("it is truncated")

    while position < len(data):
        number, kind = divmod(varint(), 8)
        if kind == 0:
            varint()
            continue
        length = varint() if kind == 2 else {1: 8, 5: 4}.get(kind, len(data))
        if position + length > len(data):
            raise ValueError("it is truncated, or no record")
        if (number, kind) == (5, 2):
            return data[position : position + length]
        position += length
    raise ValueError("it is no record of neml2-build")


# ---------------------------------------------------------------- where it is


class Backend(Protocol):
    """Bytes by name. Any exception means that the remote failed."""

    label: str

    def get(self, name: str, limit: int) -> bytes | None:
        """The bytes of *name*, at most *limit* + 1 of them; None where it is not there."""
        ...

    def put(self, name: str, data: bytes) -> None:
        """Store *data* as *name*."""
        ...

    def has(self, name: str) -> bool:
        """Whether *name* is there."""
        ...


class FolderBackend:
    """A shared folder."""

    def __init__(self, folder: Path, *, create: bool) -> None:
        self.label = str(folder)
        self._folder = folder
        self._create = create

    def _present(self) -> None:
        if not self._folder.is_dir():
            if not self._create:
                raise FileNotFoundError(f"the folder {self._folder} does not exist")
            self._folder.mkdir(parents=True, exist_ok=True)

    def get(self, name: str, limit: int) -> bytes | None:
        try:
            with (self._folder / name).open("rb") as stream:
                return stream.read(limit + 1)
        except FileNotFoundError:
            self._present()
            return None

    def put(self, name: str, data: bytes) -> None:
        self._present()
        final = self._folder / name
        part = self._folder / "tmp" / f"{secrets.token_hex(8)}"
        for folder in (final.parent, part.parent):
            folder.mkdir(exist_ok=True)
        try:
            with part.open("xb") as stream:
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
            part.replace(final)
        finally:
            part.unlink(missing_ok=True)

    def has(self, name: str) -> bool:
        return (self._folder / name).exists()


class HttpBackend:
    """A server of Bazel's plain cache protocol. Credentials: ``https://user:password@host/``, or the environment."""

    def __init__(self, url: str, *, timeout: float, authorization: str | None = None) -> None:
        parts = urllib.parse.urlsplit(url)
        host = parts.netloc.rpartition("@")[2]
        if parts.username and authorization is None:
            words = f"{urllib.parse.unquote(parts.username)}:{urllib.parse.unquote(parts.password or '')}"
            authorization = f"Basic {base64.b64encode(words.encode()).decode()}"
        self.label = urllib.parse.urlunsplit((parts.scheme, host, parts.path.rstrip("/"), "", ""))
        self._timeout = timeout
        self._authorization = authorization

    def _send(self, method: str, name: str, data: bytes | None = None) -> http.client.HTTPResponse:
        request = urllib.request.Request(f"{self.label}/{name}", data=data, method=method)
        request.add_header("User-Agent", "neml2-build")
        if data is not None:
            request.add_header("Content-Type", "application/octet-stream")
        if self._authorization:  # not for the host of a redirection
            request.add_unredirected_header("Authorization", self._authorization)
        return urllib.request.urlopen(request, timeout=self._timeout)

    def get(self, name: str, limit: int) -> bytes | None:
        try:
            with self._send("GET", name) as response:
                if (length := response.length) is not None and length > limit:
                    return response.read(limit + 1)
                return response.read() if length is not None else response.read(limit + 1)
        except urllib.error.HTTPError as error:
            with error:
                if error.code in (404, 410):
                    return None
                raise OSError(f"HTTP {error.code} {error.reason}") from None

    def put(self, name: str, data: bytes) -> None:
        try:
            self._send("PUT", name, data).close()
        except urllib.error.HTTPError as error:
            with error:
                if error.code not in (409, 412):  # it is there already
                    raise OSError(f"HTTP {error.code} {error.reason}") from None

    def has(self, name: str) -> bool:
        try:
            self._send("HEAD", name).close()
        except urllib.error.HTTPError as error:
            with error:
                if error.code in (404, 405, 410, 501):
                    return False
                raise OSError(f"HTTP {error.code} {error.reason}") from None
        return True


class FsspecBackend:
    """Anything that fsspec reaches: ``s3://``, ``gs://``, ``abfs://``, ``sftp://``, ... Credentials as each of them does."""

    def __init__(self, url: str) -> None:
        try:
            from fsspec.core import url_to_fs
        except ImportError:
            raise RequestError(
                f"the shared store {url} needs the package fsspec, which is not installed",
                remedy="pip install 'neml2-build[remote]'",
            ) from None
        try:
            self._fs, self._root = url_to_fs(url, use_listings_cache=False, skip_instance_cache=True)
        except ImportError as error:
            raise RequestError(f"the shared store {url} needs another package: {error}") from None
        except ValueError as error:
            raise RequestError(f"the shared store {url} is of no kind that is known: {error}") from None
        self.label = url

    def get(self, name: str, limit: int) -> bytes | None:
        try:
            return self._fs.cat_file(f"{self._root}/{name}", start=None, end=None)
        except FileNotFoundError:
            return None

    def put(self, name: str, data: bytes) -> None:
        path = f"{self._root}/{name}"
        with contextlib.suppress(Exception):  # what has no folders needs none
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        self._fs.pipe_file(path, data)

    def has(self, name: str) -> bool:
        return bool(self._fs.exists(f"{self._root}/{name}"))


def open_remote(
    address: str,
    *,
    write: bool = False,
    root: Path | None = None,
    timeout: float = 10.0,
    environ: Mapping[str, str] | None = None,
) -> Remote:
    """The shared store at *address*; nothing is asked of it yet.

    Parameters
    ----------
    address
        A folder (relative to *root*), ``file://``, ``http(s)://``, or an address that fsspec knows.
    write
        Whether this run writes to it. ``NEML2_BUILD_REMOTE_WRITE=1`` in the environment says so as well.
    timeout
        Seconds without an answer after which it is given up.

    Raises
    ------
    RequestError
        The address is of no known kind, or needs a package that is not installed.
    """
    variables = os.environ if environ is None else environ
    write = write or variables.get(WRITE_VARIABLE, "").strip().lower() in ("1", "true", "yes", "on")
    scheme, mark, rest = address.partition("://")
    if mark and scheme in ("http", "https"):
        authorization = variables.get(AUTHORIZATION_VARIABLE) or None
        backend: Backend = HttpBackend(address, timeout=timeout, authorization=authorization)
    elif mark and scheme != "file":
        backend = FsspecBackend(address)
    else:
        folder = Path(urllib.parse.unquote(rest) if mark else address).expanduser()
        backend = FolderBackend((root or Path()) / folder, create=write)
    return Remote(backend, write=write, timeout=timeout)


# ---------------------------------------------------------------- what is asked of it


class _Off(Exception):
    """The remote is not asked any more."""


class Remote:
    """A shared store behind a :class:`Store`, which asks it for what it does not have.

    Parameters
    ----------
    backend
        Where it is.
    write
        Whether this run writes to it.
    timeout
        Seconds for one answer; contents have as much longer as 1 MB/s would take.
    threads
        How many uploads, and how many downloads, at a time.

    Attributes
    ----------
    sent, received
        Compressed bytes that went over.
    """

    def __init__(self, backend: Backend, *, write: bool = False, timeout: float = 10.0, threads: int = 4) -> None:
        self.backend = backend
        self.write = write
        self._timeout = timeout
        self._threads = threads
        self._mutex = threading.Lock()
        self._idle = threading.Condition(self._mutex)
        self._off: set[str] = set()
        self._lies = 0
        self._broken: set[str] = set()
        self._pending = 0
        self._uploads: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._uploaders: list[threading.Thread] = []
        self.sent = 0
        self.received = 0

    @property
    def label(self) -> str:
        """Its address, without credentials."""
        return self.backend.label

    # one question, with patience

    def _ask(self, side: str, question: Callable[[], Any], report: Report, size: int = 0) -> Any:
        """Answer of the backend, in time, after one retry at most. Raises :class:`_Off` when there will be none."""
        problem = ""
        for _ in range(2):
            if side in self._off:
                raise _Off
            try:
                return _in_time(question, self._timeout + size / _SLOWEST)
            except Exception as error:
                problem = str(error) or type(error).__name__
        self._trip(side, problem, report)
        raise _Off

    def _trip(self, side: str, problem: str, report: Report) -> None:
        with self._mutex:
            known = side in self._off
            self._off |= {"write"} if side == "write" else {"read", "write"}
        if not known:
            report("remote-off" if side == "read" else "remote-write-off", self.label, problem)

    def get_action(self, key: str, report: Report) -> bytes | None:
        """The record of the action *key*, as it travels and not verified; None where there is none."""
        return self._ask("read", lambda: self.backend.get(record_name(key), _RECORD_LIMIT), report)

    def get_object(self, sha256: str, size: int, report: Report) -> bytes | None:
        """The compressed content with this sha256 and size, not verified; None where there is none."""
        return self._ask("read", lambda: self.backend.get(blob_name(sha256), size), report, size)

    # what a store asks

    def fetch(self, key: str, store: Store, report: Report) -> str | None:
        """Bring the action *key* into *store*, everything verified: None when it is there, else the reason why not."""
        try:
            data = self.get_action(key, report)
            if data is None:
                return "no-record"
            opened = open_record(data, key, store.keys)
            outputs = {output.digest: output for output in opened.action.outputs}
            with ThreadPoolExecutor(self._threads) as pool:
                list(pool.map(lambda output: self._bring(output, opened, store, report), outputs.values()))
            store.accept(opened.action, opened.signatures)
            return None
        except _Off:
            return "remote-off"
        except ObjectMissing:  # another process found it damaged, or wanted the space, since it came
            return "object-missing"
        except Refused as refusal:
            report(refusal.kind, key, f"{self.label}: {refusal.detail}")
            self._count_lie(refusal.kind, report)
            return refusal.kind

    def _bring(self, output: Output, opened: Opened, store: Store, report: Report) -> None:
        blob = opened.blobs[output.digest]
        with contextlib.suppress(ObjectMissing):
            if store.has(output.digest):
                if _is_content(store.read(output.digest), output, opened):
                    return
                raise Refused("remote-object-broken", f"other content than {output.name} has here")
        packed = self.get_object(blob.sha256, blob.size, report)
        if packed is None:
            raise Refused("remote-object-missing", f"{output.name} ({blob.sha256[:12]}…)")
        try:
            data = open_blob(packed, output, opened)
        except Refused:
            self._broken.add(blob_name(blob.sha256))
            raise
        with self._mutex:
            self.received += len(packed)
        store.put(data)

    def _count_lie(self, kind: str, report: Report) -> None:
        if kind not in _LIES:
            return
        with self._mutex:
            self._lies += 1
        if self._lies >= _MANY_LIES:
            self._trip("read", f"{self._lies} answers did not verify", report)

    def upload(self, action: Action, store: Store, report: Report) -> None:
        """Write *action* and its contents to the remote, on a thread: returns at once."""
        if not self.write or "write" in self._off:
            return
        if store.keys and store.keys.secret is None:
            self._trip("write", "readers want signed records, and there is no signing key (signing-key)", report)
            return

        def work() -> None:
            with contextlib.suppress(_Off, ObjectMissing):
                self._send(action, store, report)

        with self._mutex:
            self._pending += 1
            if len(self._uploaders) < min(self._threads, self._pending):
                thread = threading.Thread(target=self._uploader, name="neml2-build-upload", daemon=True)
                self._uploaders.append(thread)
                thread.start()
        self._uploads.put(work)

    def _uploader(self) -> None:
        while True:
            work = self._uploads.get()
            try:
                work()
            finally:
                with self._idle:
                    self._pending -= 1
                    self._idle.notify_all()

    def _send(self, action: Action, store: Store, report: Report) -> None:
        contents = {output.digest: store.read(output.digest) for output in action.outputs}
        sealed = seal(action, contents, store.keys)
        for name, packed in sealed.blobs.items():
            if name in self._broken or not self._ask("write", lambda name=name: self.backend.has(name), report):
                self._put(name, packed, report)
        self._put(sealed.name, sealed.record, report)

    def _put(self, name: str, data: bytes, report: Report) -> None:
        self._ask("write", lambda: self.backend.put(name, data), report, len(data))
        with self._mutex:
            self.sent += len(data)

    def flush(self, timeout: float, report: Report) -> bool:
        """Wait for the uploads, *timeout* seconds at most: whether all are done. What is not done is given up."""
        deadline = time.monotonic() + timeout
        with self._idle:
            self._idle.wait_for(lambda: not self._pending, max(0.0, deadline - time.monotonic()))
            left = self._pending
        if left:
            self._off.add("write")
            report("remote-upload-unfinished", self.label, f"{left} not written within {timeout:g} s")
        return not left


def _in_time(question: Callable[[], Any], seconds: float) -> Any:
    """The answer, or ``TimeoutError``: on a daemon thread, because neither NFS nor fsspec lets itself be interrupted."""
    answer: list[Any] = []
    problem: list[BaseException] = []

    def ask() -> None:
        try:
            answer.append(question())
        except BaseException as error:
            problem.append(error)

    thread = threading.Thread(target=ask, name="neml2-build-remote", daemon=True)
    thread.start()
    thread.join(seconds)
    if problem:
        raise problem[0]
    if not answer:
        raise TimeoutError(f"no answer within {seconds:.3g} s")
    return answer[0]
