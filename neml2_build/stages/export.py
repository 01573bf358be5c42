"""Export: from the slice to one exported program a graph, through NEML2's own exporter.

NEML2 lowers each graph by ``torch._inductor.aoti_compile_and_package(ep, package_path=...)``. While a model is exported that
one name is answered by `Seam`, which keeps the program: so file names, metadata, segments and solver settings are NEML2's own,
whatever its version, and a model of five graphs is captured in about 2 s.

What is read is watched. The slice is all that NEML2 can see of the input file; a look-up of a block that the file has and
the slice left out (the default of an option, an existence test) is not answered with "absent": it ends the job with the
wish to widen the slice. Files that are opened, and extension modules that are imported, are recorded by an audit hook and by
comparing ``sys.modules``, and later builds check their contents.

`graph_digest` is where early cutoff happens. The saved program holds things that the code does not depend on: stack traces
with paths, the modules an operation came from, torch's version, sample values. Without these, the same graph in another
model, folder or environment has the same digest.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from neml2_build import versions
from neml2_build.digest import digest, digest_file, digest_json
from neml2_build.environment import signature
from neml2_build.errors import TaskError
from neml2_build.forkserver import Stay


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What an export job is sent.

    Attributes
    ----------
    target
        For messages.
    slice
        The self-contained input text.
    blocks
        Every block of the whole file, as (section, name), to tell "absent" from "left out".
    input
        Absolute path of the input file: NEML2 resolves csv files relative to its folder.
    model
        Name of the model.
    options
        Keyword arguments of NEML2's exporter.
    load
        Extension files or modules.
    keep
        Whether the process is to stay near its programs for lowering.
    memory
        Bytes that the job is expected to take: what it took last time, else what most do.
    """

    target: str
    slice: str
    blocks: tuple[tuple[str, str], ...]
    input: str
    model: str
    options: dict[str, Any]
    load: tuple[str, ...]
    keep: bool
    memory: int = 600_000_000


class Graph(msgspec.Struct, frozen=True):
    """One captured graph: file name of its package, digest, saved program, the inductor options NEML2 asked for, operations."""

    name: str
    digest: str
    program: bytes
    inductor: dict[str, Any]
    operations: int


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What an export job answers.

    Attributes
    ----------
    graphs
        In the order in which NEML2 makes them.
    metadata
        The bytes of ``metadata.json``.
    opened
        Absolute paths of files outside the installation that were read, with their digests; an empty one for a file that
        changed after it was read.
    widen
        Blocks that NEML2 looked up and the slice left out; then nothing else is given.
    random
        Tensors and parameters that differ when the slice is loaded twice.
    """

    graphs: tuple[Graph, ...] = ()
    metadata: bytes = b""
    opened: tuple[tuple[str, str], ...] = ()
    widen: tuple[tuple[str, str], ...] = ()
    random: tuple[str, ...] = ()


class _TooNarrow(BaseException):
    """A look-up that the slice cannot answer. Not an Exception: NEML2 must not take it for "absent"."""


class _Captured:
    """The exported programs of this process, by digest, for lowerings that are forked from it."""

    programs: dict[str, Any] = {}  # noqa: RUF012 - one process, one model


def captured(graph: str) -> Any | None:
    """The exported program of digest *graph*, if this process or the one it was forked from captured it."""
    return _Captured.programs.get(graph)


# -- the job ----------------------------------------------------------------------------------------------------------


def job(request: Request) -> Result | Stay:
    """Capture the graphs of one model. Runs in a fresh worker.

    Raises `TaskError` with NEML2's own message for whatever it cannot load or export.
    """
    from neml2.cli._extensions import load_user_extensions
    from neml2.cli.aoti_export import export_model_for_aoti

    from neml2_build.toolchain import quick

    sys.dont_write_bytecode = True
    with tempfile.TemporaryDirectory(prefix="neml2-build-") as folder:
        sys.pycache_prefix = folder  # a stale .pyc beside an edited extension must not be believed
        opened = _watch_files(folder)
        modules = set(sys.modules)
        seam = Seam()
        try:
            load_user_extensions(list(request.load))
            with _input_file(request) as lookups, seam.instead_of_lowering(), uncollected(), quick.applied(quick.CAPTURE):
                export_model_for_aoti(request.input, request.model, folder, **request.options)
                metadata = (Path(folder) / "metadata.json").read_bytes()
                random = _random_tensors(request, lookups)
        except _TooNarrow:
            return Result(widen=tuple(sorted(_Lookups.current_missing())))
        except Exception as error:
            if lookups_missing := tuple(sorted(_Lookups.current_missing())):
                return Result(widen=lookups_missing)
            raise _explain(error, request) from error
        read = _files_read(opened, set(sys.modules) - modules, folder)
        files = [(path, stat, digest_file(path)) for path, stat in sorted(read.items()) if Path(path).is_file()]
        result = Result(
            graphs=tuple(seam.graphs),
            metadata=metadata,
            opened=tuple((path, found if stat == signature(path) else "") for path, stat, found in files),
            random=tuple(random),
        )
    if request.keep:
        _Captured.programs.update(seam.programs)
        return Stay(result)
    return result


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Without the cycle collector: torch keeps nearly all that it makes of a graph until it is done, and looking through it
    again and again takes 15 % of the time of a capture and 13 % of a lowering. Leaving the rest takes 14 % more memory."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Seam:
    """Answers NEML2's call to lower a graph by keeping the exported program."""

    def __init__(self) -> None:
        self.graphs: list[Graph] = []
        self.programs: dict[str, Any] = {}

    def lower(self, program: Any, *, package_path: str, inductor_configs: dict | None = None, **other: Any) -> str:
        """Stands for ``aoti_compile_and_package``: saves *program*, and leaves an empty package for NEML2 to touch up."""
        if other:
            raise TaskError(
                f"NEML2 passes options to the lowering that are not known here: {', '.join(other)}",
                remedy="use a NEML2 that this version of neml2-build supports (3.1)",
            )
        normalize(program)
        data = save(program)
        name = Path(package_path).name
        found = graph_digest(data, inductor_configs or {})
        self.graphs.append(Graph(name, found, data, dict(inductor_configs or {}), len(program.graph.nodes)))
        self.programs[found] = program
        with zipfile.ZipFile(package_path, "w"):
            pass
        return package_path

    @contextlib.contextmanager
    def instead_of_lowering(self) -> Iterator[None]:
        """While open, NEML2's ``compile_model`` finds this seam under the name that it imports when called
        (``neml2/models/export.py``: ``from torch._inductor import aoti_compile_and_package``)."""
        import torch._inductor

        stock = torch._inductor.aoti_compile_and_package
        torch._inductor.aoti_compile_and_package = self.lower  # type: ignore[assignment]
        try:
            yield
        finally:
            torch._inductor.aoti_compile_and_package = stock


def normalize(program: Any) -> None:
    """Take out of *program* what the code does not depend on: stack traces, and the values of constants that nothing uses.

    A program carries every buffer of its model, so without the second an edit of any of them would change every graph. The
    modules that operations came from stay: `show graph` names them.
    """
    import torch

    unused = {node.name for node in program.graph.nodes if node.op == "placeholder" and not node.users}
    for spec in program.graph_signature.input_specs:
        for values in (program.state_dict, program.constants):
            if getattr(spec.arg, "name", None) in unused and isinstance(values.get(spec.target), torch.Tensor):
                values[spec.target] = torch.zeros_like(values[spec.target])  # a new one: the model's own is still in use

    for module in program.graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in module.graph.nodes:
                node.meta.pop("stack_trace", None)
                node.meta.pop("source_fn_stack", None)


def save(program: Any) -> bytes:
    """The bytes of *program*; equal for equal programs."""
    import torch

    stream = io.BytesIO()
    torch.export.save(program, stream)
    return stream.getvalue()


def graph_digest(program: bytes, inductor: dict[str, Any]) -> str:
    """Digest of a saved program in canonical form: operations, shapes, constraints, signature, constants.

    Parameters
    ----------
    program
        The bytes of ``torch.export.save``: a zip with the graph as JSON and the constants as files.
    inductor
        Options that NEML2 gives for this graph.
    """
    parts: list[list[Any]] = [["inductor", inductor]]
    with zipfile.ZipFile(io.BytesIO(program)) as archive:
        for info in sorted(archive.infolist(), key=lambda info: info.filename):
            name = info.filename.partition("/")[2]
            if name.startswith("models/"):
                parts.append([name, digest_json(_canonical(json.loads(archive.read(info))))])
            elif not name.startswith(("data/sample_inputs/", ".data/")) and name not in _FORMAT_MARKS:
                parts.append([name, digest(archive.read(info))])
    return digest_json(parts)


_FORMAT_MARKS = ("archive_format", "archive_version", "byteorder", "version")


def _canonical(model: dict[str, Any]) -> dict[str, Any]:
    """The graph of ``models/model.json`` without what says who made it and where."""
    kept = {name: value for name, value in model.items() if name not in ("torch_version", "schema_version", "opset_version")}
    module = dict(kept["graph_module"])
    module["graph"] = _without_metadata(module["graph"])
    # Only the root's signature shapes the calling convention; the others are names of submodules.
    module["module_call_graph"] = [entry for entry in module.get("module_call_graph", ()) if entry.get("signature")]
    kept["graph_module"] = module
    return kept


def _without_metadata(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_metadata(item) for name, item in value.items() if name != "metadata" or "target" not in value}
    if isinstance(value, list):
        return [_without_metadata(item) for item in value]
    return value


# -- what NEML2 looks at ----------------------------------------------------------------------------------------------


class _Lookups:
    """Blocks that were asked for and are not in the slice, though the file has them."""

    active: _Lookups | None = None

    def __init__(self, left_out: frozenset[tuple[str, str]]) -> None:
        self.left_out = left_out
        self.missing: set[tuple[str, str]] = set()
        self.factories: list[Any] = []

    @classmethod
    def current_missing(cls) -> set[tuple[str, str]]:
        return cls.active.missing if cls.active is not None else set()


@contextlib.contextmanager
def _input_file(request: Request) -> Iterator[_Lookups]:
    """While open, ``neml2.factory.load_input`` gives the slice, under the path of the input file, and watches look-ups.

    Stands for ``load_input`` and ``_NativeInputFile._find_in_section`` of ``neml2/factory.py``; without it csv files would be
    sought beside a temporary file, and a block that the slice left out would pass for one that does not exist.
    """
    import neml2.factory as factory
    import nmhit

    root = nmhit.parse_text(request.slice, [], [])
    inside = {(top.path(), block.path()) for top in root.children(nmhit.NodeType.Section) for block in top.children()}
    lookups = _Lookups(frozenset(request.blocks) - inside)

    class Watched(factory._NativeInputFile):
        def _find_in_section(self, section: str, name: str) -> Any:
            node = super()._find_in_section(section, name)
            if node is None and (section, name.split("/")[0]) in lookups.left_out:
                lookups.missing.add((section, name.split("/")[0]))
                raise _TooNarrow(f"[{section}/{name}]")
            return node

    def load_input(path: Any, **_: Any) -> Any:
        loaded = Watched(nmhit.parse_text(request.slice, [], []), Path(request.input))
        lookups.factories.append(loaded)
        return loaded

    stock = factory.load_input
    factory.load_input = load_input  # type: ignore[assignment]
    _Lookups.active = lookups
    try:
        yield lookups
    finally:
        factory.load_input = stock


def _random_tensors(request: Request, lookups: _Lookups) -> list[str]:
    """Names of tensors and parameters that differ when the slice is loaded once more (20 ms)."""
    import neml2.factory as factory
    import torch

    again = factory.load_input(request.input)
    model = again.get_model(request.model)
    first = factory.load_input(request.input)
    other = first.get_model(request.model)

    def raw(value: Any) -> Any:
        return getattr(value, "data", value) if not isinstance(value, torch.Tensor) else value

    def same(a: Any, b: Any) -> bool:
        a, b = raw(a), raw(b)
        if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
            return True
        return a.shape == b.shape and torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))

    names = [
        f"Tensors/{name}"
        for (section, name), value in again._cache.items()
        if section == "Tensors" and not same(value, first._cache.get((section, name)))
    ]
    if not names:
        twice = {**dict(other.named_parameters()), **dict(other.named_buffers())}
        names = [
            name
            for name, value in {**dict(model.named_parameters()), **dict(model.named_buffers())}.items()
            if not same(value, twice.get(name))
        ]
    return sorted(names)


def _watch_files(folder: str) -> dict[str, list[int] | None]:
    """Record, from now on, every file that this process opens for reading, in the returned dict, with its first stat."""
    opened: dict[str, list[int] | None] = {}

    def hook(event: str, arguments: tuple) -> None:
        if event == "open" and isinstance(arguments[0], (str, bytes)):
            mode = arguments[1]
            if isinstance(mode, str) and any(letter in mode for letter in "wax+"):
                return
            path = os.path.abspath(os.fsdecode(arguments[0]))
            if path not in opened:
                opened[path] = signature(path)

    sys.addaudithook(hook)
    return opened


def _files_read(opened: dict[str, list[int] | None], modules: set[str], folder: str) -> dict[str, list[int] | None]:
    """Of all that was opened or imported, the user's files, with stats: what lies outside the installation and the system."""
    paths = {str(Path(name).resolve()): stat for name, stat in opened.items() if name and not name.endswith(".pyc")}
    for name in modules:
        source = getattr(sys.modules.get(name), "__file__", None)
        if source:
            paths.setdefault(str(Path(source).resolve()), signature(source))
    outside = _installation(folder)
    return {path: stat for path, stat in paths.items() if not path.startswith(outside) and Path(path).is_file()}


def _installation(folder: str) -> tuple[str, ...]:
    """Prefixes of what comes with the system, Python, NEML2 and torch, whose identity is in the key already."""
    import sysconfig

    import neml2
    import torch

    import neml2_build

    roots = {
        folder,
        "/proc",
        "/sys",
        "/dev",
        "/etc",
        "/usr/share",
        "/usr/lib",
        str(Path(tempfile.gettempdir()) / "torchinductor_"),
    }
    roots.update(str(Path(module.__file__).resolve().parent) for module in (neml2, torch, neml2_build) if module.__file__)
    roots.update(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    resolved = {str(Path(root).resolve()) for root in roots} | roots
    return tuple(root if root.endswith("_") else root.rstrip("/") + "/" for root in resolved)


# -- errors -----------------------------------------------------------------------------------------------------------


def _explain(error: BaseException, request: Request) -> TaskError:
    """NEML2's message in one line, with the file, and the line of the block that it names where it names one."""
    if isinstance(error, TaskError):
        return error
    message = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, KeyError):
        message = message.strip("\"'")
    message = message.replace("NativeRegistry", "NEML2's registry").partition(" The Python-native object surface")[0]
    if len(message) > 600:
        message = message[:600] + " ..."
    remedy = None
    if "is not registered" in message:
        remedy = "check the type's spelling ('neml2-syntax' lists all), or name the extension that defines it under 'load'"
    elif isinstance(error, ImportError):
        remedy = "check the paths under 'load'"
    elif isinstance(error, FileNotFoundError):
        remedy = "check the path; csv files are sought relative to the folder of the input file"
    return TaskError(message, file=request.input, target=request.target, stage="export", remedy=remedy)


def options_of(target: Any) -> dict[str, Any]:
    """The keyword arguments of NEML2's ``export_model_for_aoti`` for *target*; graphs are captured on the CPU."""
    return {
        "device": "cpu",
        "dtype": target.dtype,
        "promoted": tuple(sorted(target.parameters)),
        "example_batch_shape": target.example_batch_shape,
        "dynamic_batch": target.dynamic_batch,
        "derivatives": tuple(target.derivatives),
        "renames": target.renames(),
    }


def key_of(
    model: str,
    slice_digest: str,
    files: Sequence[tuple[str, str]],
    options: dict[str, Any],
    environment: dict[str, Any],
) -> dict[str, Any]:
    """What an export key is made of.

    Parameters
    ----------
    model
        Its name: NEML2 names files after it.
    slice_digest
        Digest of the slice.
    files
        Name (relative to the project where it lies inside) and digest of each data file and extension source.
    options
        As given to NEML2's exporter.
    environment
        `Environment.for_export`.
    """
    return {
        "stage": "export",
        "version": versions.EXPORT,
        "model": model,
        "slice": slice_digest,
        "files": dict(sorted(files)),
        "options": {name: list(value) if isinstance(value, tuple) else value for name, value in options.items()},
        "environment": environment,
    }
