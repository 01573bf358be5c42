"""One form for a ``.pt2``: the same bytes from two folders, two users, a cold or a warm cache.

Of what torch writes, these depend on where and when it ran (measured on 2.12.1): the names of the generated sources (they
hash the compile command, which holds the folders of torch and Python), the compile commands at the end of each source (once
more for each time that the cache folder was warm), the folder named in the kernel's first line, ``.data/serialization_id``
(it hashes the former), the root folder (the file's stem), padding. The library's own paths are the compiler's matter: see
`neml2_build.toolchain.seam`.
"""

from __future__ import annotations

import hashlib
import io
import re
import zipfile

#: Every package has this root folder, and its sources these stems.
ROOT = "model"
STEM = "model"

_MODEL = "data/aotinductor/model/"
_SERIALIZATION_ID = ".data/serialization_id"
_EPOCH = (1980, 1, 1, 0, 0, 0)
_GENERATED = re.compile(r"^c[a-z2-7]{51}\.(wrapper|kernel)(?=[._]|$)")
_COMMANDS = re.compile(r"^// (?:Compile|Link) cmd\n// .*\n", re.MULTILINE)
_PATH = re.compile(r"""(?P<before>[\s="']|-[IL])(?P<path>/[^\s"'/][^\s"']*)""")


def canonicalize_pt2(data: bytes) -> bytes:
    """The package *data* without what depends on folders, time and cache: same members, same code, fixed names.

    Applied twice it changes nothing more. Members are stored uncompressed, as torch stores them.
    """
    members = _renamed(_read(data))
    for name in list(members):
        if name.startswith(_MODEL) and name.endswith((".cpp", ".h")):
            members[name] = _source(members[name].decode()).encode()
    if _SERIALIZATION_ID in members:
        members[_SERIALIZATION_ID] = _serialization_id(members)
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        for name in sorted(members):
            info = zipfile.ZipInfo(f"{ROOT}/{name}", _EPOCH)
            info.create_system = 3  # the same on every host
            info.external_attr = 0o100644 << 16
            archive.writestr(info, members[name])
    return out.getvalue()


def _read(data: bytes) -> dict[str, bytes]:
    """Members by name without the root folder."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name.partition("/")[2]: archive.read(name) for name in archive.namelist() if not name.endswith("/")}


def _renamed(members: dict[str, bytes]) -> dict[str, bytes]:
    """*members* with generated stems replaced; as they are where two would get one name (several models in one package)."""
    renamed = {_member(name): content for name, content in members.items()}
    return renamed if len(renamed) == len(members) else members


def _member(name: str) -> str:
    folder, slash, base = name.rpartition("/")
    return folder + slash + _GENERATED.sub(rf"{STEM}.\1", base) if name.startswith(_MODEL) else name


def _source(text: str) -> str:
    """A generated source with its commands named once and without folders."""
    commands = list(dict.fromkeys(_COMMANDS.findall(text)))
    kinds: dict[str, str] = {}
    for command in commands:
        kinds.setdefault(command.partition("\n")[0], command)
    head = _COMMANDS.sub("", text).rstrip("\n")
    first, newline, rest = head.partition("\n")
    if first.startswith("// Triton kernels are embedded as comments in "):
        head = _plain(first) + newline + rest
    return head + "\n\n" + "".join(_plain(command) for command in kinds.values())


def _plain(text: str) -> str:
    """*text* with the folder of every absolute path, and every generated stem, taken out."""
    bases = _PATH.sub(lambda match: match["before"] + match["path"].rstrip("/").rpartition("/")[2], text)
    return re.sub(r"\bc[a-z2-7]{51}\.(wrapper|kernel|weights)\b", rf"{STEM}.\1", bases)


def _serialization_id(members: dict[str, bytes]) -> bytes:
    """Forty digits, as torch writes, of the contents in their one form."""
    hasher = hashlib.blake2b(digest_size=16)
    for name in sorted(members):
        if name != _SERIALIZATION_ID:
            hasher.update(f"{name}\0{len(members[name])}\0".encode())
            hasher.update(members[name])
    return str(int.from_bytes(hasher.digest(), "big")).zfill(40)[:40].encode()
