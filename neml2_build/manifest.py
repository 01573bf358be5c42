"""What to build: ``neml2-build.toml``, or ``[tool.neml2-build]`` of ``pyproject.toml``, or the same built in code.

TOML is turned once, here, into frozen structs; nothing later looks into raw dicts. Types and unknown keys are checked
by msgspec in C. What its messages lack (file, line, the value found, the nearest key) is looked up only when an error
is raised, so that a right manifest does not pay for it: 1,000 entries of five keys load and become targets in 0.055 s
(tomllib takes 0.023 s of it), and 10,000 in 0.7 s.

Nothing here reads an input file, save for what only the file knows: the models that ``"*"`` stands for, and the model
that a driver runs. So a broken input file stops its own target and no other.
"""

from __future__ import annotations

import glob
import math
import os
import re
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from .errors import BuildError, RequestError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pyright: ignore[reportMissingImports]

FILE_NAME = "neml2-build.toml"
TABLE = "tool.neml2-build"

DEVICES = ("cpu", "cuda")
MARCHES = ("native", "x86-64", "x86-64-v2", "x86-64-v3", "x86-64-v4", "armv8-a")
REFUSED_DEVICES = {
    "hip": "code for AMD GPUs needs the ROCm build of torch, which neml2-build has not been made for",
    "xpu": "code for Intel GPUs needs the XPU build of torch, which neml2-build has not been made for",
    "mps": "Apple GPUs have no float64, and every graph that NEML2 exports is float64",
}

Expand = Callable[[Path, "Model"], Sequence[str]]


class Model(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="kebab"):
    """One ``[[model]]`` entry, as it was written. In TOML the keys have dashes: ``example-batch-shape``.

    Parameters
    ----------
    input
        The input file, or a glob (``**`` too), relative to the manifest's folder.
    model, driver
        Exactly one of them. *model* is a name, a list of names, or ``"*"``: every model that no other model of the file
        uses. *driver* names a block of ``[Drivers]``, whose model is built and which the stub keeps.
    name
        What the target is called, by default as its model. ``{stem}`` and ``{parent}`` stand for the input file's name
        without suffix and its folder's name, ``{path}`` for the whole path with dashes for slashes, ``{model}`` for the
        model.
    derivatives
        Pairs ``OUT:IN`` to compile derivative graphs for; an empty side means all.
    parameters
        Qualified names of parameters that become inputs of the graphs.
    rename_inputs, rename_outputs, rename_parameters
        From the model's names to those that the compiled model shows.
    example_batch_shape
        ``"(2,)"`` or ``"(2; 100)"`` (dynamic batch; sub-batch), or a table with one such entry a variable.
    dynamic_batch
        Whether the leading batch axis may vary at run time; by default what the input file says.
    load
        Extensions: ``.py`` files, package folders, or dotted module names.
    overrides
        ``"Path:=value"``, applied to the input file in the order given.
    variables
        Text put before the file, so that ``${name}`` resolves.
    extra_deps
        Files that the model reads and that nothing else shows.
    devices, cuda_arch, march, verify
        As in :class:`Manifest`, for this entry.
    dtype
        ``"float64"``.
    stub
        Whether ``NAME_aoti.i`` is written.
    inductor
        Options of ``torch._inductor.config``.
    """

    input: str
    model: str | list[str] | None = None
    driver: str | None = None
    name: str | None = None
    derivatives: str | list[str] = []
    parameters: str | list[str] = []
    rename_inputs: dict[str, str] = {}
    rename_outputs: dict[str, str] = {}
    rename_parameters: dict[str, str] = {}
    example_batch_shape: str | dict[str, str] | None = None
    dynamic_batch: bool | None = None
    load: str | list[str] = []
    overrides: str | list[str] = []
    variables: dict[str, str | int | float] = {}
    extra_deps: str | list[str] = []
    devices: str | list[str] | None = None
    cuda_arch: str | list[str] | None = None
    dtype: str = "float64"
    stub: bool = True
    inductor: dict[str, bool | int | float | str] = {}
    march: str | None = None
    verify: bool | None = None


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """One model of one input file, with every option resolved: what the five stages are made for."""

    name: str
    root: Path
    input: Path
    model: str
    driver: str | None = None
    derivatives: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    rename_inputs: dict[str, str] = {}
    rename_outputs: dict[str, str] = {}
    rename_parameters: dict[str, str] = {}
    example_batch_shape: str | dict[str, str] | None = None
    dynamic_batch: bool | None = None
    load: tuple[Path | str, ...] = ()
    overrides: tuple[str, ...] = ()
    variables: dict[str, str] = {}
    extra_deps: tuple[Path, ...] = ()
    devices: tuple[str, ...] = ("cpu",)
    cuda_arch: tuple[str, ...] = ()
    dtype: str = "float64"
    stub: bool = True
    inductor: dict[str, bool | int | float | str] = {}
    march: str = "native"
    verify: bool = False

    @property
    def input_ref(self) -> str:
        """The input file relative to the manifest's folder, with forward slashes."""
        return _reference(self.root, self.input)

    def options(self) -> dict[str, Any]:
        """What shapes the exported graphs besides the input file and what it reads."""
        return {
            "derivatives": list(self.derivatives),
            "parameters": list(self.parameters),
            "example_batch_shape": self.example_batch_shape,
            "dynamic_batch": self.dynamic_batch,
            "dtype": self.dtype,
        }

    def renames(self) -> dict[str, dict[str, str]]:
        """Renames in the form that NEML2's exporter takes. They change the metadata and no graph."""
        return {
            "inputs": self.rename_inputs,
            "outputs": self.rename_outputs,
            "parameters": self.rename_parameters,
        }

    def request(self) -> dict[str, Any]:
        """Every field as plain data, with paths relative to the manifest's folder: the same in any checkout."""
        fields = {name: getattr(self, name) for name in self.__struct_fields__ if name != "root"}
        fields["input"] = self.input_ref
        fields["load"] = [_reference(self.root, item) if isinstance(item, Path) else item for item in self.load]
        fields["extra_deps"] = [_reference(self.root, item) for item in self.extra_deps]
        return {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="kebab"):
    """What a project builds, where to, and how. Relative paths are relative to *root*.

    Parameters
    ----------
    output, cache
        Folders of the compiled models and of the store.
    devices
        ``"cpu"``, ``"cuda"``, or ``"cuda:sm_80"``, which is ``"cuda"`` with that entry in *cuda_arch*.
    cuda_arch
        CUDA architectures to compile for, as ``"sm_80"``; by default that of the GPU at hand.
    march
        ``"native"``, a level as ``"x86-64-v3"``, or another name that the compiler's ``-march`` takes.
    jobs
        How many tasks may run at once; 0 means one a core.
    models
        The entries (``[[model]]`` in TOML).
    max_size
        What the store may hold after a build: bytes, or text for :func:`parse_size`.
    remote, remote_write, trusted_keys, signing_key
        The shared store's address; whether this machine writes to it; public keys (64 hexadecimal digits, base64, or a
        path) whose records are believed; path of the secret key to sign with.
    verify
        Whether each compiled graph is compared with its captured graph as part of the build.
    root, file
        Folder that paths are relative to (by default the working directory), and the file that this came from. They
        are no keys of the file.
    """

    output: str = "aoti"
    cache: str = "cache"
    devices: str | list[str] = msgspec.field(default_factory=lambda: ["cpu"])
    cuda_arch: str | list[str] = []
    march: str = "native"
    jobs: int = 0
    models: list[Model] = msgspec.field(name="model", default_factory=list)
    max_size: str | int = "10 GiB"
    remote: str | None = None
    remote_write: bool = False
    trusted_keys: str | list[str] = []
    signing_key: str | None = None
    verify: bool = False
    root: Path = msgspec.field(default_factory=Path.cwd)
    file: Path | None = None

    @classmethod
    def load(cls, path: Path | str | None = None, *, start: Path | str | None = None) -> Manifest:
        """Read the manifest at *path*, or the one found in *start* (the working directory) or the nearest parent.

        Raises
        ------
        RequestError
            Where there is none, or it cannot be read, is not TOML, has a key that is not known, a value of the wrong
            type, or a setting that cannot be met. Entries are checked further by :meth:`targets`.
        """
        file = _absolute(path) if path is not None else _find(_absolute(start or "."))
        text = _read(file)
        document = _table(_toml(text, file), file)
        try:
            manifest = msgspec.structs.replace(_typed(document), root=file.parent, file=file)
            _check_settings(manifest)
        except _Wrong as wrong:
            raise wrong.error(file, text) from None
        return manifest

    def path(self, text: str) -> Path:
        """The absolute path of *text*, which is relative to *root* and may begin with ``~``."""
        return Path(os.path.normpath(os.path.join(os.path.abspath(self.root), os.path.expanduser(text))))

    def targets(
        self, expand: Expand | None = None, *, on_error: Callable[[BuildError], None] | None = None
    ) -> tuple[Target, ...]:
        """Every target, in the order of the entries; files of a glob are sorted.

        Parameters
        ----------
        expand
            Given an input file and the entry, the models meant: asked only for ``model = "*"`` and for ``driver``. By
            default the file is read with :mod:`neml2_build.hit`; pass one that remembers, to read each file once.
        on_error
            Told of an input file that is missing or cannot be expanded; its targets are left out. By default the error
            is raised.

        Raises
        ------
        RequestError
            Where an entry is wrong, matches no file, or two targets would have the same name.
        """
        try:
            checked = msgspec.structs.replace(_typed(self._builtins()), root=self.root, file=self.file)
            _check_settings(checked)
            if not checked.models:
                raise _Wrong("model", "the manifest has no [[model]] entry", 'add one, with "input" and "model"')
            found = list(checked._expanded(expand or _expand_with_hit, on_error))
            _check_names(found)
        except _Wrong as wrong:
            raise self._error(wrong) from None
        return tuple(target for _, target in found)

    def _expanded(self, expand: Expand, on_error: Callable[[BuildError], None] | None) -> Iterator[tuple[int, Target]]:
        written = {key: str(self.path(getattr(self, key))) + os.sep for key in _FOLDERS}
        for index, entry in enumerate(self.models):
            try:
                shared = _shared_options(entry, self)
                chosen = _chosen_models(entry)
                files = _input_files(entry, self, written)
            except _Wrong as wrong:
                raise wrong.within(f"model[{index}]") from None
            several = len(files) > 1
            for file in files:
                try:
                    _check_input(file)
                    names = chosen if chosen is not None else _ask(expand, file, entry)
                except (_Wrong, BuildError) as problem:
                    error = problem
                    if isinstance(error, _Wrong):
                        error = self._error(error.within(f"model[{index}]"))
                    if on_error is None:
                        raise error from None
                    on_error(error)
                    continue
                several = several or len(names) > 1
                for name in names:
                    try:
                        label = _label(entry, self.root, file, name, several)
                    except _Wrong as wrong:
                        raise wrong.within(f"model[{index}]") from None
                    yield index, Target(name=label, input=file, model=name, **shared)

    def _builtins(self) -> dict[str, Any]:
        try:
            document = msgspec.to_builtins(self, enc_hook=os.fspath)
        except TypeError as problem:
            raise _Wrong("", str(problem)) from None
        return {key: value for key, value in document.items() if key not in ("root", "file")}

    def _error(self, wrong: _Wrong) -> RequestError:
        text = None
        if self.file is not None:
            try:
                text = self.file.read_text("utf-8-sig")
            except (OSError, ValueError):
                pass
        return wrong.error(self.file, text)


_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([kmgtp]?)(i?)b?\s*", re.IGNORECASE)


def parse_size(text: str | int) -> int:
    """Bytes in *text*: ``"10 GiB"``, ``"500 MB"``, ``"1.5T"``, or a plain count.

    ``k``, ``M``, ``G``, ``T``, ``P`` are powers of 1000, with ``i`` powers of 1024; case and the ``B`` do not matter.

    Raises
    ------
    RequestError
        Where it is no size.
    """
    match = _SIZE.fullmatch(str(text))
    if match is None or (match[3] and not match[2]):
        raise RequestError(f'{text!r} is no size: expected a count of bytes, or text as "10 GiB" or "500 MB"')
    number, unit, binary = match.groups()
    scale = (1024 if binary else 1000) ** (" kmgtp".index(unit.lower()) if unit else 0)
    return int(number) * scale if number.isdigit() else int(float(number) * scale)


class _Wrong(Exception):
    """A key whose value is wrong; file and line are added where they are known."""

    def __init__(self, key: str, message: str, remedy: str | None = None) -> None:
        super().__init__(key, message, remedy)
        self.key, self.message, self.remedy = key, message, remedy

    def within(self, prefix: str) -> _Wrong:
        return _Wrong(f"{prefix}.{self.key}" if self.key else prefix, self.message, self.remedy)

    def error(self, file: Path | None, text: str | None) -> RequestError:
        line = _line_of(text, self.key) if text else None
        message = f"{self.key}: {self.message}" if self.key else self.message
        return RequestError(message, file=file, line=line, remedy=self.remedy)


# Finding and reading the file.


def _absolute(path: Path | str) -> Path:
    return Path(os.path.abspath(os.path.expanduser(path)))


def _find(start: Path) -> Path:
    for folder in (start, *start.parents):
        if os.path.lexists(folder / FILE_NAME):
            return folder / FILE_NAME
        project = folder / "pyproject.toml"
        try:
            # Another tool's broken or unreadable pyproject.toml on the way up is not ours to complain about.
            text = project.read_text("utf-8-sig")
        except (OSError, ValueError):
            continue
        if "neml2-build" in text and _has_table(text, project):
            return project
    raise RequestError(
        f"no manifest found: looked for {FILE_NAME}, and for [{TABLE}] in pyproject.toml, in {start} and every folder above it",
        remedy="write one with `neml2-build init`, or name it with --manifest",
    )


def _has_table(text: str, file: Path) -> bool:
    tool = _toml(text, file).get("tool")
    return isinstance(tool, dict) and "neml2-build" in tool


def _read(file: Path) -> str:
    try:
        data = file.read_bytes()
    except FileNotFoundError:
        remedy = "check the path, or write one with `neml2-build init`"
        raise RequestError("the manifest does not exist", file=file, remedy=remedy) from None
    except IsADirectoryError:
        remedy = f"name the file in it, as {file / FILE_NAME}"
        raise RequestError("the manifest is a directory; expected a file", file=file, remedy=remedy) from None
    except (OSError, ValueError) as problem:
        reason = getattr(problem, "strerror", None) or str(problem)
        raise RequestError(f"the manifest cannot be read: {reason}", file=file, remedy="check its permissions") from None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        line = data[: problem.start].count(b"\n") + 1
        message = f"the manifest is not UTF-8: byte 0x{data[problem.start]:02x}"
        raise RequestError(message, file=file, line=line, remedy="save it as UTF-8") from None


def _toml(text: str, file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except ValueError as problem:
        message, line = str(problem), None
        if match := re.search(r" \(at line (\d+), (column \d+)\)$", message):
            message, line = f"{message[: match.start()]} at {match[2]}", int(match[1])
        elif message.endswith(" (at end of document)"):
            line = len(text.splitlines())
        message = f"not valid TOML: {message}"
        raise RequestError(message, file=file, line=line, remedy="text values need quotes; see https://toml.io") from None
    except RecursionError:
        raise RequestError("not valid TOML: nested too deeply", file=file) from None


def _table(document: dict[str, Any], file: Path) -> dict[str, Any]:
    if file.name != "pyproject.toml":
        return document
    tool = document.get("tool")
    table = tool.get("neml2-build") if isinstance(tool, dict) else None
    if table is None:
        remedy = "add it, or write a manifest with `neml2-build init`"
        raise RequestError(f"there is no [{TABLE}] table", file=file, remedy=remedy)
    if not isinstance(table, dict):
        raise RequestError(f"{TABLE}: expected a table, found {_found(table)}", file=file)
    return table


_HEADER = re.compile(r"\s*(\[\[?)\s*([^\[\]#]+?)\s*\]")


def _line_of(text: str, path: str) -> int | None:
    """The line on which the key at *path* (``jobs``, ``model[2].derivatives[0]``) is written, or its entry's first."""
    match = re.match(r"model\[(\d+)\](?:\.([^\[.]+))?", path)
    wanted, key = (int(match[1]), match[2]) if match else (None, re.split(r"[\[.]", path, maxsplit=1)[0])
    home = [] if wanted is None else ["model"]
    assignment = re.compile(rf"\s*[\"']?{re.escape(key or '')}[\"']?\s*[=.]")
    table: list[str] = []
    entry, first = -1, None
    for number, line in enumerate(text.splitlines(), 1):
        if header := _HEADER.match(line):
            table = [part.strip().strip("\"'") for part in header[2].split(".")]
            if table[:2] == TABLE.split("."):
                table = table[2:]
            entry += header[1] == "[[" and table == ["model"]
            if wanted is not None and entry == wanted and first is None:
                first = number
            if key and table == [*home, key] and wanted in (None, entry):
                return number
        elif key and table == home and wanted in (None, entry) and assignment.match(line):
            return number
    return first


# Types and keys. msgspec's messages are translated: key path, what was expected in TOML's words, what was found.

_NOUNS = {
    "str": "a string",
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "array": "a list of strings",
    "object": "a table",
}
_NO_KEYS = ("root", "file")


def _keys(struct: type[msgspec.Struct]) -> list[str]:
    return [field.encode_name for field in msgspec.structs.fields(struct) if field.name not in _NO_KEYS]


def _typed(document: dict[str, Any]) -> Manifest:
    for key in _NO_KEYS:
        if key in document:
            raise _unknown_key("", key)
    try:
        return msgspec.convert(document, Manifest)
    except msgspec.ValidationError as problem:
        raise _translated(str(problem), document) from None


def _translated(message: str, document: dict[str, Any]) -> _Wrong:
    what, _, path = message.partition(" - at `$")
    path = path.rstrip("`").lstrip(".")
    if match := re.match(r"Object contains unknown field `(.*)`", what, re.DOTALL):
        return _unknown_key(path, match[1])
    if match := re.match(r"Object missing required field `(.*)`", what):
        return _Wrong(path, f"the key {match[1]!r} is missing")
    match = re.match(r"Expected `(.*?)`", what)
    if match is None:
        return _Wrong(path, what[:1].lower() + what[1:])
    kinds = match[1].split(" | ")
    path, value = _look_up(document, path, kinds)
    if path == "model":
        return _Wrong(path, f"expected [[model]] entries, found {_found(value)}", "write [[model]], in double brackets")
    if path.startswith("model[") and path.endswith("]") and path.count("[") == 1:
        return _Wrong(path, f"expected a table, found {_found(value)}")
    # An integer is a number, and TOML has no null.
    nouns = [_NOUNS.get(kind, kind) for kind in kinds if kind != "null" and not (kind == "int" and "float" in kinds)]
    expected = " or ".join(part for part in (", ".join(nouns[:-1]), nouns[-1]) if part)
    return _Wrong(path, f"expected {expected}, found {_found(value)}")


def _look_up(document: Any, path: str, kinds: list[str]) -> tuple[str, Any]:
    """The value at msgspec's *path*, in which ``[...]`` is some entry of a table: then the first that fits no kind."""
    value, known = document, ""
    for part in re.findall(r"\[\.\.\.\]|\[\d+\]|[^.\[\]]+", path):
        if part == "[...]":
            key = next((key for key, item in value.items() if _kind(item) not in kinds), next(iter(value)))
            value, known = value[key], f"{known}.{key}"
        elif part.startswith("["):
            value, known = value[int(part[1:-1])], known + part
        else:
            value, known = value[part], f"{known}.{part}".lstrip(".")
    return known, value


def _kind(value: Any) -> str:
    names = {dict: "object", list: "array", tuple: "array"}
    return names.get(type(value), type(value).__name__)


def _found(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (dict, list, tuple)):
        return "a table" if isinstance(value, dict) else "a list"
    noun = {str: "the string ", int: "the integer ", float: "the number "}.get(type(value), f"a {type(value).__name__}, ")
    text = repr(value) if isinstance(value, (str, int, float)) else str(value)
    return noun + (text if len(text) <= 60 else text[:57] + "...")


def _unknown_key(path: str, key: str) -> _Wrong:
    here, there = (Model, Manifest) if path else (Manifest, Model)
    full = f"{path}.{key}" if path else key
    remedy = f"known keys here: {', '.join(_keys(here))}"
    if key in _keys(there):
        place = "the top of the manifest, before the first [[model]]" if path else "a [[model]] entry"
        return _Wrong(full, f"unknown key {key!r} here; it belongs in {place}", remedy)
    return _Wrong(full, f"unknown key {key!r}{_nearest(key, _keys(here))}", remedy)


def _nearest(word: str, options: Iterable[str]) -> str:
    import difflib

    match = difflib.get_close_matches(word.lower(), list(options), 1, 0.6)
    return f"; did you mean {match[0]!r}?" if match else ""


# Settings of the manifest.


def _check_settings(manifest: Manifest) -> None:
    """Raise ``_Wrong`` for a setting that cannot be met."""
    if manifest.jobs < 0:
        raise _Wrong("jobs", f"expected 0 (every core) or a positive count, found {manifest.jobs}")
    _check_folders(manifest)
    try:
        parse_size(manifest.max_size)
    except RequestError as problem:
        raise _Wrong("max-size", problem.message) from None
    for key, value in (("remote", manifest.remote), ("signing-key", manifest.signing_key)):
        if value is not None and not value.strip():
            raise _Wrong(key, "must not be empty", "leave the key out")
    for index, key in enumerate(_listed(manifest.trusted_keys)):
        if not _is_public_key(key) and not manifest.path(key).is_file():
            message = f"{key!r} is neither a public key (32 bytes, as 64 hexadecimal digits or base64) nor a file"
            raise _Wrong(f"trusted-keys[{index}]", message)
    _device_list(manifest.devices, manifest.cuda_arch)
    _check_march(manifest.march)


_FOLDERS = {"output": "aoti", "cache": "cache"}


def _check_folders(manifest: Manifest) -> None:
    root = Path(os.path.realpath(manifest.root))
    folders: dict[str, Path] = {}
    for key, usual in _FOLDERS.items():
        written = getattr(manifest, key)
        if not written.strip() or "\0" in written:
            raise _Wrong(key, f"expected the name of a folder, found {written!r}")
        folder = folders[key] = Path(os.path.realpath(manifest.path(written)))
        if folder == root or folder in root.parents:
            message = f"{written!r} is the manifest's own folder, or holds it: {folder}"
            raise _Wrong(key, message, f'name a folder of its own, as {key} = "{usual}"')
        if os.path.isfile(folder):
            raise _Wrong(key, f"{written!r} is a file; expected a folder")
    output, cache = folders["output"], folders["cache"]
    if output == cache:
        raise _Wrong("output", f"output and cache are the same folder, {manifest.output!r}")
    if cache in output.parents:
        raise _Wrong("output", f"output {manifest.output!r} lies inside cache {manifest.cache!r}")
    if output in cache.parents:
        raise _Wrong("cache", f"cache {manifest.cache!r} lies inside output {manifest.output!r}")


def _is_public_key(text: str) -> bool:
    return bool(re.fullmatch(r"[0-9a-fA-F]{64}|[A-Za-z0-9+/_-]{43}=?", text))


def _listed(value: str | Sequence[str] | None) -> Sequence[str]:
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else value


_ARCH = re.compile(r"sm_\d{2,3}[af]?")


def _device_list(devices: str | Sequence[str], archs: str | Sequence[str] | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Device families and CUDA architectures, each once, in the order given."""
    families: dict[str, None] = {}
    found: dict[str, None] = {}
    for index, device in enumerate(_listed(devices)):
        key = f"devices[{index}]" if not isinstance(devices, str) else "devices"
        family, colon, arch = device.partition(":")
        if family in REFUSED_DEVICES:
            raise _Wrong(key, f"device {device!r} is not supported: {REFUSED_DEVICES[family]}", 'use "cpu" or "cuda"')
        if family not in DEVICES or (colon and family == "cpu"):
            message = f'unknown device {device!r}: expected "cpu", "cuda" or "cuda:sm_NN"{_nearest(device, DEVICES)}'
            raise _Wrong(key, message)
        if colon and not _ARCH.fullmatch(arch):
            raise _Wrong(key, f"unknown CUDA architecture {arch!r}{_arch_hint(arch)}")
        families[family] = None
        if colon:
            found[arch] = None
    if not families:
        raise _Wrong("devices", "the list is empty", 'name at least one device, as ["cpu"]')
    for index, arch in enumerate(_listed(archs)):
        key = f"cuda-arch[{index}]" if not isinstance(archs, str) else "cuda-arch"
        if not _ARCH.fullmatch(arch):
            raise _Wrong(key, f"unknown CUDA architecture {arch!r}{_arch_hint(arch)}")
        found[arch] = None
    return tuple(families), tuple(found) if "cuda" in families else ()


def _arch_hint(arch: str) -> str:
    if arch.isdigit() and len(arch) == 1:
        return f": {arch!r} looks like the number of one GPU, which is chosen at run time"
    digits = re.sub(r"^(sm|compute)?[_-]?|\.", "", arch)
    near = f"sm_{digits}"
    return f'; did you mean "{near}"?' if _ARCH.fullmatch(near) else '; expected "sm_NN", as "sm_80"'


def _check_march(march: str) -> None:
    known = ", ".join(f'"{name}"' for name in MARCHES)
    if not re.fullmatch(r"[a-z0-9][a-z0-9.+_-]*", march):
        message = f"{march!r} is no architecture: expected {known}, or another name of the compiler's -march"
        raise _Wrong("march", f"{message}{_nearest(march.removeprefix('-march='), MARCHES)}")
    if re.match(r"x86[_-]?64", march) and march not in MARCHES:
        raise _Wrong("march", f"unknown level {march!r}: expected {known}{_nearest(march, MARCHES)}")


# One entry.


def _shared_options(entry: Model, manifest: Manifest) -> dict[str, Any]:
    """The fields that all targets of *entry* have in common, resolved. Raises ``_Wrong`` with the key in the entry."""
    if (entry.model is None) == (entry.driver is None):
        both = "both 'model' and 'driver' are given" if entry.driver is not None else "neither 'model' nor 'driver' is given"
        raise _Wrong(
            "", f"{both}; expected exactly one", 'keep one: model = "NAME" builds a model, driver = "NAME" its driver\'s'
        )
    renames = {
        "rename_inputs": entry.rename_inputs,
        "rename_outputs": entry.rename_outputs,
        "rename_parameters": entry.rename_parameters,
    }
    parameters = _strings(entry.parameters, "parameters")
    for name, table in renames.items():
        if table:
            _check_renames(name.replace("_", "-"), table, entry, parameters)
    own_archs = entry.cuda_arch if entry.cuda_arch is not None else manifest.cuda_arch
    devices, archs = _device_list(entry.devices if entry.devices is not None else manifest.devices, own_archs)
    if entry.cuda_arch and "cuda" not in devices:
        raise _Wrong("cuda-arch", "given for a model that is not built for cuda", 'add "cuda" to its devices')
    if entry.dtype != "float64":
        _refuse_dtype(entry.dtype)
    if entry.march is not None:
        _check_march(entry.march)
    return {
        "root": manifest.root,
        "driver": entry.driver,
        "derivatives": _derivatives(entry.derivatives),
        "parameters": parameters,
        **renames,
        "example_batch_shape": _example_shape(entry.example_batch_shape),
        "dynamic_batch": entry.dynamic_batch,
        "load": tuple(_extension(key, text, manifest) for key, text in _items(entry.load, "load")),
        "overrides": _overrides(entry.overrides),
        "variables": _variables(entry.variables),
        "extra_deps": tuple(_dependency(key, text, manifest) for key, text in _items(entry.extra_deps, "extra-deps")),
        "devices": devices,
        "cuda_arch": archs,
        "dtype": entry.dtype,
        "stub": entry.stub,
        "inductor": _inductor(entry.inductor),
        "march": entry.march if entry.march is not None else manifest.march,
        "verify": entry.verify if entry.verify is not None else manifest.verify,
    }


def _items(value: str | Sequence[str], key: str) -> Iterator[tuple[str, str]]:
    """Each string of *value* with its key path; an empty one is wrong."""
    for index, text in enumerate(_listed(value)):
        path = key if isinstance(value, str) else f"{key}[{index}]"
        if not text.strip():
            raise _Wrong(path, "must not be empty")
        yield path, text


def _strings(value: str | Sequence[str], key: str) -> tuple[str, ...]:
    """The strings of *value*, stripped, each once."""
    return tuple(dict.fromkeys(text.strip() for _, text in _items(value, key))) if value else ()


def _refuse_dtype(dtype: str) -> None:
    if dtype == "float32":
        message = (
            "dtype float32 is refused: NEML2 3.1.0 reads no dtype when it traces a model, so its compiler writes float64 "
            "graphs into a float32 folder, and they give wrong numbers for float32 tensors"
        )
        raise _Wrong("dtype", message, 'use dtype = "float64", or leave it out')
    raise _Wrong("dtype", f'unknown dtype {dtype!r}: expected "float64"')


def _check_renames(key: str, table: dict[str, str], entry: Model, parameters: Sequence[str]) -> None:
    if entry.driver is not None:
        message = "NEML2 refuses renames with 'driver': the stub keeps the driver, which uses the model's own names"
        raise _Wrong(key, message, "use 'model' instead of 'driver', or leave the renames out")
    seen: dict[str, str] = {}
    for old, new in table.items():
        if not old.strip() or not new.strip():
            raise _Wrong(key, f"cannot rename {old!r} to {new!r}: both names must be given")
        if new in seen:
            raise _Wrong(f"{key}.{old}", f"{seen[new]!r} and {old!r} would both be called {new!r}")
        seen[new] = old
        if key == "rename-parameters" and old not in parameters:
            message = f"{old!r} is not among the promoted parameters{_nearest(old, parameters)}"
            raise _Wrong(f"{key}.{old}", message, f'add it: parameters = ["{old}"]')


def _derivatives(value: str | Sequence[str]) -> tuple[str, ...]:
    for key, text in _items(value, "derivatives"):
        if text.count(":") != 1:
            message = f'{text!r} is not of the form OUT:IN, as "stress:strain"'
            raise _Wrong(key, message, 'an empty side means all: "stress:", ":strain", or ":"')
    return tuple(dict.fromkeys(":".join(side.strip() for side in text.split(":")) for text in _listed(value)))


_EXTENTS = r"\s*(?:[1-9][0-9]*\s*(?:,\s*[1-9][0-9]*\s*)*,?\s*)?"
_SHAPE = re.compile(rf"\s*\({_EXTENTS}(?:;{_EXTENTS})?\)\s*")


def _example_shape(value: str | dict[str, str] | None) -> str | dict[str, str] | None:
    table = value if isinstance(value, dict) else {"": value} if value is not None else {}
    for name, text in table.items():
        if not _SHAPE.fullmatch(text):
            key = f"example-batch-shape.{name}" if name else "example-batch-shape"
            message = f'{text!r} is no shape: expected "(2,)" or "(2; 100)", positive extents of dynamic batch; sub-batch'
            raise _Wrong(key, message)
    return value or None


def _overrides(value: str | Sequence[str]) -> tuple[str, ...]:
    for key, text in _items(value, "overrides"):
        path, sign, new = text.partition(":=")
        if not sign or not new.strip() or "\n" in new or not re.fullmatch(r"[^\s/=:\[\]]+(/[^\s/=:\[\]]+)*", path.strip()):
            better = text.replace("=", ":=", 1) if "=" in text and not sign else "Solvers/newton/abs_tol:=1e-10"
            raise _Wrong(key, f"{text!r} is not of the form Path:=value", f'write it as "{better}"')
    return tuple(_listed(value))


def _variables(table: dict[str, str | int | float]) -> dict[str, str]:
    for name, value in table.items():
        if not name.isidentifier():
            raise _Wrong(f"variables.{name}", f"{name!r} is no name of a variable: letters, digits and _ only")
        if isinstance(value, str) and re.search(r"[\r\n\0]", value):
            raise _Wrong(f"variables.{name}", "the value of a variable must be one line")
    return {name: value if isinstance(value, str) else repr(value) for name, value in table.items()}


def _inductor(table: dict[str, bool | int | float | str]) -> dict[str, bool | int | float | str]:
    for name, value in table.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise _Wrong(f"inductor.{name}", f"expected a finite number, found {value}")
    return table


def _extension(key: str, text: str, manifest: Manifest) -> Path | str:
    """A path where there is one, as NEML2 decides it; a dotted module name otherwise."""
    path = manifest.path(text)
    if path.is_dir():
        if not (path / "__init__.py").is_file():
            raise _Wrong(key, f"the folder {text!r} has no __init__.py", "name the .py files in it, or add one")
        return path
    if path.exists():
        return path
    if not text.endswith(".py") and all(part.isidentifier() for part in text.split(".")):
        return text
    raise _Wrong(key, f"{text!r} does not exist: {path}", "name a .py file, a package folder, or a dotted module name")


def _dependency(key: str, text: str, manifest: Manifest) -> Path:
    path = manifest.path(text)
    if not path.is_file():
        raise _Wrong(key, f"{text!r} is no file: {path}")
    return path


def _chosen_models(entry: Model) -> Sequence[str] | None:
    """The models that *entry* names, or None where only the file knows them."""
    if entry.driver is not None:
        if not entry.driver.strip():
            raise _Wrong("driver", "must not be empty")
        return None
    if entry.model == "*":
        return None
    names = _strings(entry.model or "", "model")
    if not names:
        raise _Wrong("model", "names no model", 'name at least one, or "*"')
    if "*" in names:
        raise _Wrong("model", "'*' means every model that no other uses, and stands alone", 'write model = "*"')
    if len(names) < len(_listed(entry.model)):
        raise _Wrong("model", "the list names a model twice")
    if len(names) > 1 and entry.name is not None and not _PLACEHOLDER.search(entry.name):
        raise _several(entry.name)
    return names


def _input_files(entry: Model, manifest: Manifest, written: dict[str, str]) -> list[Path]:
    """The input files of *entry*: the one it names, or the sorted matches of its glob.

    *written* holds the folders that a build writes, by key: what lies in them is no input.
    """
    text = entry.input
    if not text.strip() or "\0" in text:
        raise _Wrong("input", f"expected a file or a glob, found {text!r}")
    path = manifest.path(text)
    if not glob.has_magic(text) or path.is_file():
        for key, folder in written.items():
            if str(path).startswith(folder):
                raise _Wrong("input", f"{text!r} lies in the {key} folder, which builds write and remove")
        return [path]
    # Names that begin with a dot are not matched, so `**` stays out of .git and .venv.
    matches = glob.glob(os.path.expanduser(text), root_dir=manifest.path(""), recursive=True)
    files = [file for file in map(manifest.path, sorted(set(matches))) if file.is_file()]
    files = [file for file in files if not str(file).startswith(tuple(written.values()))]
    if not files:
        raise _Wrong("input", f"the glob {text!r} matches no file in {manifest.path('')}")
    return files


def _check_input(file: Path) -> None:
    try:
        str(file).encode()
    except UnicodeEncodeError:
        raise _Wrong("input", f"the name of the input file is not UTF-8: {os.fsencode(file)!r}", "rename it") from None
    try:
        mode = os.stat(file).st_mode
    except FileNotFoundError:
        raise _Wrong("input", f"the input file does not exist: {file}{_nearest_file(file)}") from None
    except OSError as problem:
        raise _Wrong("input", f"the input file cannot be read: {problem.strerror}: {file}") from None
    if stat.S_ISDIR(mode):
        raise _Wrong("input", f"the input file is a directory: {file}", f'use a glob for what is in it: "{file.name}/*.i"')


def _nearest_file(file: Path) -> str:
    try:
        return _nearest(file.name, sorted(os.listdir(file.parent)))
    except OSError:
        return ""


def _ask(expand: Expand, file: Path, entry: Model) -> Sequence[str]:
    names = list(expand(file, entry))
    if not names:
        raise _Wrong("model", f"no model in {file}", "name the models that are meant")
    return names


def _expand_with_hit(path: Path, entry: Model) -> Sequence[str]:
    """The models of the file at *path* that ``"*"`` or the driver of *entry* stands for."""
    from . import hit

    document = hit.read(path, variables=_variables(entry.variables), overrides=_overrides(entry.overrides))
    if entry.driver is not None:
        return [hit.driver_model(document, entry.driver)]
    return hit.top_models(document)


# Names of targets.

_PLACEHOLDER = re.compile(r"\{(\w+)\}")
_NAMES = ("stem", "parent", "path", "model")
_SPELLED = "{stem}, {parent}, {path} or {model}"


def _label(entry: Model, root: Path, file: Path, model: str, several: bool) -> str:
    template = entry.name if entry.name is not None else "{model}"
    if several and not _PLACEHOLDER.search(template):
        raise _several(template)
    name = _filled(template, root, file, model) if entry.name is not None else model
    _check_name(name, "name" if entry.name is not None else "")
    return name


def _several(name: str) -> _Wrong:
    message = f"the entry makes several targets, which cannot all be called {name!r}"
    return _Wrong("name", message, f'leave it out, or use {_SPELLED}, as in "{name}-{{model}}"')


def _filled(template: str, root: Path, file: Path, model: str) -> str:
    if re.search(r"[{}]", _PLACEHOLDER.sub("", template)):
        raise _Wrong("name", f"{template!r} has a brace that belongs to no placeholder: expected {_SPELLED}")

    def value(match: re.Match[str]) -> str:
        word = match[1]
        if word == "model":
            return model
        if word == "stem":
            return file.stem
        if word == "path":
            return _reference(root, file.with_suffix("")).replace("/", "-")
        if word == "parent":
            parent = _reference(root, file).split("/")[:-1]
            if not parent or parent[-1] == "..":
                # The name of the checkout's own folder differs from one checkout to the next.
                message = f"{{parent}} has no value for {file.name!r}, which lies in no folder below the manifest's"
                raise _Wrong("name", message)
            return parent[-1]
        raise _Wrong("name", f"unknown placeholder {{{word}}}: expected {_SPELLED}{_nearest(word, _NAMES)}")

    return _PLACEHOLDER.sub(value, template)


# "=" and "*" mean something else to doit; the others cannot be part of a file's name everywhere.
_FORBIDDEN = re.compile(r"[/\\=*\x00-\x1f\x7f]")


def _check_name(name: str, key: str) -> None:
    reason = None
    if not name or name != name.strip():
        reason = "it is empty, or has blanks at its ends"
    elif match := _FORBIDDEN.search(name):
        reason = f"it holds {match[0]!r}"
    elif name[0] in ".-":
        reason = f"it begins with {name[0]!r}"
    elif name.casefold().endswith("_aoti.i"):
        reason = "names that end in '_aoti.i' are kept for the stubs of other targets"
    elif len(name) > 50 and len(name.encode()) > 200:
        reason = "it is longer than 200 bytes, and file names end at 255"
    if reason:
        remedy = None if key else "choose another with `name`"
        raise _Wrong(key, f"{name!r} cannot name a target: {reason}", remedy)


def _folded(name: str) -> str:
    """Names that some file systems take for the same are the same."""
    if name.isascii():
        return name.lower()
    import unicodedata

    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())


def _check_names(found: Sequence[tuple[int, Target]]) -> None:
    taken: dict[str, tuple[int, Target]] = {}
    for index, target in found:
        first_index, first = taken.setdefault(_folded(target.name), (index, target))
        if first is target:
            continue
        same = target.name == first.name
        kind = f"are both called {target.name!r}" if same else "have names that differ only in case"
        message = f"two targets {kind}: {_described(first_index, first)} and {_described(index, target)}"
        remedy = "give one of them another `name`"
        if index == first_index and (template := _unique_template([item for at, item in found if at == index])):
            remedy = f'write name = "{template}"'
        raise _Wrong(f"model[{index}]", message, remedy)


def _described(index: int, target: Target) -> str:
    return f"model[{index}] ({target.input_ref}, model {target.model!r}, name {target.name!r})"


def _unique_template(targets: Sequence[Target]) -> str | None:
    for template in ("{stem}", "{stem}-{model}", "{parent}", "{parent}-{model}", "{parent}-{stem}", "{path}", "{path}-{model}"):
        try:
            names = {_folded(_filled(template, item.root, item.input, item.model)) for item in targets}
        except _Wrong:
            continue
        if len(names) == len(targets):
            return template
    return None


def _reference(root: Path, path: Path) -> str:
    text, base = str(path), os.path.abspath(root)
    inside = text.startswith(base + os.sep)
    return (text[len(base) + 1 :] if inside else os.path.relpath(text, base)).replace(os.sep, "/")
