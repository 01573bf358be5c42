"""One file with exactly what some keys need, to carry a store from one machine to another.

CI systems keep files, not stores: GitHub's cache entries are immutable and many small ones run into its rate limit. A
pack is a plain tar of what a shared store would hold (see :mod:`neml2_build.remote`): the same records, signed if there
are keys, the same compressed contents, under the same names. So it is verified by the same code when it is unpacked, and
nothing in it is ever written to a path that it names. The same store gives the same bytes.
"""

from __future__ import annotations

import io
import re
import secrets
import tarfile
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from .errors import RequestError, TaskError
from .remote import Opened, blob_name, open_blob, open_record, record_name, seal
from .signing import Refused
from .store import ObjectMissing, Output, Store

_NAME = re.compile(r"(ac|cas)/[0-9a-f]{64}")
_RECORD_LIMIT = 16 << 20


class PackReport(msgspec.Struct, frozen=True, kw_only=True):
    """What :func:`pack` wrote; *missing* are the keys that the store does not have whole."""

    actions: int
    objects: int
    size: int
    missing: tuple[str, ...] = ()


class UnpackReport(msgspec.Struct, frozen=True, kw_only=True):
    """What :func:`unpack` brought; *refused* says what was not believed: name in the pack, reason, detail."""

    actions: int
    objects: int
    present: int
    refused: tuple[tuple[str, str, str], ...] = ()


def pack(store: Store, keys: Iterable[str], file: Path | str) -> PackReport:
    """Write the actions *keys* and their contents to *file*, in one step.

    Raises
    ------
    TaskError
        *file* cannot be written; what was there before still is.
    """
    target = Path(file)
    part = target.with_name(f".{target.name[:100]}.{secrets.token_hex(4)}.tmp")
    written: set[str] = set()
    missing: list[str] = []
    actions = 0
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(part, "x:", format=tarfile.USTAR_FORMAT) as archive:
            for key in sorted(set(keys)):
                action = store.peek(key)
                try:
                    contents = {output.digest: store.read(output.digest) for output in action.outputs} if action else {}
                except ObjectMissing:
                    action, contents = None, {}
                if action is None:
                    missing.append(key)
                    continue
                sealed = seal(action, contents, store.keys, store.signatures(key))
                for name, data in (*sealed.blobs.items(), (sealed.name, sealed.record)):
                    if name not in written:
                        written.add(name)
                        entry = tarfile.TarInfo(name)
                        entry.size = len(data)
                        archive.addfile(entry, io.BytesIO(data))
                actions += 1
        part.replace(target)
        size = target.stat().st_size
    except OSError as error:
        remedy = f"check the folder {target.parent}, and the space on its disk"
        raise TaskError(f"the pack cannot be written: {error.strerror}", file=target, remedy=remedy) from None
    finally:
        part.unlink(missing_ok=True)
    return PackReport(actions=actions, objects=len(written) - actions, size=size, missing=tuple(missing))


def unpack(store: Store, file: Path | str) -> UnpackReport:
    """Bring what is in the pack *file* into *store*, everything verified as if it came from a shared store.

    Raises
    ------
    RequestError
        *file* cannot be read, or is no intact pack: nothing was taken from it.
    TaskError
        The disk is full; what was taken so far is whole.
    """
    path = Path(file)
    try:
        _check_end(path)
        with tarfile.open(path, "r:") as archive:
            members = {member.name: member for member in archive.getmembers()}
            for name, member in members.items():
                if member.type != tarfile.REGTYPE or not _NAME.fullmatch(name):
                    raise RequestError(f"the pack holds {name[:100]!r}, which no pack holds", file=path)

            def content(name: str, limit: int) -> bytes:
                stream = archive.extractfile(members[name]) if name in members else None
                return stream.read(limit + 1) if stream else b""

            return _take(store, [name for name in members if name.startswith("ac/")], content)
    except (tarfile.TarError, EOFError, ValueError, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise RequestError(
            f"this is no intact pack: {reason}", file=path, remedy="make it again with `neml2-build cache pack FILE`"
        ) from None


def _check_end(path: Path) -> None:
    """Raise ``ValueError`` for a pack that was cut off: tarfile takes one that ends between two members for whole."""
    with path.open("rb") as stream:
        size = stream.seek(0, io.SEEK_END)
        stream.seek(max(0, size - 2 * tarfile.BLOCKSIZE))
        if not size or size % tarfile.RECORDSIZE or stream.read().strip(b"\0"):
            raise ValueError("its end is missing")


def _take(store: Store, records: list[str], content: Callable[[str, int], bytes]) -> UnpackReport:
    refused: list[tuple[str, str, str]] = []
    taken: set[str] = set()
    actions = present = 0
    for name in sorted(records):
        try:
            opened = open_record(content(name, _RECORD_LIMIT), None, store.keys)
            action = opened.action
            if record_name(action.key) != name:
                raise Refused("remote-replayed", f"it is the record of {action.key}")
            if store.peek(action.key):
                present += 1
                continue
            for output in {output.digest: output for output in action.outputs}.values():
                if _bring(store, output, opened, content):
                    taken.add(output.digest)
            store.accept(action, opened.signatures)
            actions += 1
        except Refused as refusal:
            refused.append((name, refusal.kind, refusal.detail))
        except ObjectMissing as lost:  # another process removed it since it came
            refused.append((name, "object-missing", str(lost)))
    return UnpackReport(actions=actions, objects=len(taken), present=present, refused=tuple(refused))


def _bring(store: Store, output: Output, opened: Opened, content: Callable[[str, int], bytes]) -> bool:
    blob = opened.blobs[output.digest]
    packed = content(blob_name(blob.sha256), blob.size)
    if not packed:
        raise Refused("remote-object-missing", output.name)
    known = store.has(output.digest)
    store.put(open_blob(packed, output, opened))
    return not known
