"""``neml2-build init``: a commented manifest for the input files of a folder.

What it writes builds as it stands. So only what is known to be right is written as an entry: a file that cannot be parsed, or
that needs values for ``${...}`` which nothing defines, stands there as a comment with the reason, ready to be filled in.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from neml2_build import cli, hit
from neml2_build.errors import BuildError, RequestError
from neml2_build.manifest import FILE_NAME, Manifest

#: Folders that hold no inputs of the user's own.
_SKIPPED = {"__pycache__", "aoti", "build", "cache", "dist", "node_modules", "site-packages", "venv"}
_UNDEFINED = re.compile(r"\$\{(\S+?)\} is nowhere in the input")
_MOST_VARIABLES = 50

DODO = """\
from neml2_build import Manifest, create_tasks
def task_neml2():
    yield from create_tasks(Manifest.load())
"""
IGNORED = ("/aoti/", "/cache/", ".doit.db*")


@dataclass(frozen=True)
class Found:
    """An input file and what can be built of it.

    Attributes
    ----------
    path
        Relative to the manifest's folder, with forward slashes.
    models
        The models that no other model of the file uses.
    drivers
        Driver to the model that it runs.
    variables
        Names that ``${...}`` needs and that nothing defines.
    load
        Python files that define types which the file uses.
    problem
        Why nothing can be built of it; empty otherwise.
    """

    path: str
    models: tuple[str, ...] = ()
    drivers: tuple[tuple[str, str], ...] = ()
    variables: tuple[str, ...] = ()
    load: tuple[str, ...] = ()
    problem: str = ""


@click.command("init", context_settings=cli._CONTEXT)
@click.argument("folder", default=".", type=click.Path(exists=True, file_okay=False, path_type=Path))
@cli.json_option
@click.option("--force", is_flag=True, help="Replace files that exist.")
@click.option("--dodo", is_flag=True, help="Write dodo.py too, for those who call doit.")
@click.option("--gitignore", is_flag=True, help="Add the folders that builds write to .gitignore.")
def init_command(folder: Path, as_json: bool, force: bool, dodo: bool, gitignore: bool) -> int:
    """Write a commented neml2-build.toml for the .i files below FOLDER (here, by default).

    \b
    neml2-build init
    neml2-build init models --dodo --gitignore
    """
    folder = folder.resolve()
    files = {FILE_NAME: folder / FILE_NAME, **({"dodo.py": folder / "dodo.py"} if dodo else {})}
    for path in files.values():
        if path.exists() and not force:
            raise RequestError(f"{path.name} exists", file=path, remedy="--force replaces it")
    found = find_inputs(folder)
    if not any(file.models for file in found):
        seen = f"none of the {len(found)} .i files here has a model" if found else "no .i file here or below"
        reasons = "".join(f"\n  {file.path}: {file.problem}" for file in found[:5])
        raise RequestError(f"{seen}{reasons}", file=folder, remedy="run it in the folder that holds the input files")
    text = manifest_text(found)
    written = [_write(files[FILE_NAME], text)]
    if dodo:
        written.append(_write(files["dodo.py"], DODO))
    if gitignore and (added := _ignore(folder / ".gitignore")):
        written.append(added)
    targets = len(Manifest.load(files[FILE_NAME]).targets()) if _entries(found) else 0
    left = [file for file in found if not file.models or file.variables]
    for path in written:
        cli.say(f"neml2-build: wrote {os.path.relpath(path)}")
    cli.say(f"neml2-build: {targets} target{'s' if targets != 1 else ''} of {len(found)} input files")
    for file in left[:10]:
        cli.say(f"  left out: {file.path}: {file.problem or 'needs ' + ', '.join(file.variables)}")
    if len(left) > 10:
        cli.say(f"  and {len(left) - 10} more: see the end of {FILE_NAME}")
    where = "" if folder == Path.cwd() else f"cd {os.path.relpath(folder)} && "
    cli.say(f"next: look at {FILE_NAME}, then '{where}neml2-build doctor' and '{where}neml2-build'")
    if as_json:
        skipped = [{"input": file.path, "reason": file.problem, "variables": list(file.variables)} for file in left]
        cli.print_json({"ok": True, "written": [str(path) for path in written], "targets": targets, "skipped": skipped})
    return 0


def _write(path: Path, text: str) -> Path:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RequestError(f"cannot write: {error.strerror}", file=path) from None
    return path


def _ignore(path: Path) -> Path | None:
    """Add to *path* the lines of `IGNORED` that it lacks; None if it lacks none."""
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    missing = [line for line in IGNORED if line not in before.splitlines()]
    if not missing:
        return None
    gap = "" if not before or before.endswith("\n") else "\n"
    return _write(path, before + gap + "\n".join(missing) + "\n")


# -- looking ----------------------------------------------------------------------------------------------------------


def find_inputs(folder: Path) -> list[Found]:
    """The input files below *folder*, sorted by path. Stubs, and files that others include, are left out."""
    paths, sources = _walk(folder)
    looked = [(path, *_look(path, folder, sources)) for path in paths]
    included = {file for path, _, files in looked for file in files if file != path}
    return [found for path, found, _ in looked if path not in included and found is not None]


def _walk(folder: Path) -> tuple[list[Path], dict[str, str]]:
    """Input files below *folder*, and the text of the Python files that speak of NEML2, by relative path."""
    inputs: list[Path] = []
    sources: dict[str, str] = {}
    for place, folders, names in os.walk(folder):
        here = Path(place)
        folders[:] = sorted(
            name
            for name in folders
            if name not in _SKIPPED and not name.startswith(".") and not (here / name / "pyvenv.cfg").exists()
        )
        for name in sorted(names):
            if name.endswith(".i") and not name.endswith("_aoti.i"):
                inputs.append(here / name)
            elif name.endswith(".py"):
                try:
                    text = (here / name).read_text(encoding="utf-8")
                except (OSError, ValueError):
                    continue
                if "neml2" in text:
                    sources[(here / name).relative_to(folder).as_posix()] = text
    return inputs, sources


def _look(path: Path, folder: Path, sources: dict[str, str]) -> tuple[Found | None, set[Path]]:
    """What can be built of the file at *path*; None for a stub; and the files that it is made of."""
    reference = path.relative_to(folder).as_posix()
    variables: dict[str, str] = {}
    files: set[Path] = set()
    while True:
        try:
            document = hit.read(path, variables=variables)
            files = {source.path for source in document.files}
            if not hit.model_names(document):
                return Found(reference, problem="it has no [Models]"), files
            models = hit.top_models(document)
            slices = [hit.slice_text(document, hit.reach(document, model)) for model in models]
            types = {value for text in slices for name, value in hit.fields(text).items() if name.endswith("/type")}
            drivers = tuple(_drivers(document))
            break
        except BuildError as error:
            undefined = _UNDEFINED.search(error.message)
            name = undefined.group(1) if undefined else ""
            if not name or name in variables or len(variables) >= _MOST_VARIABLES:
                where = f"line {error.line}: " if error.line and error.file == str(path) else ""
                return Found(reference, problem=f"{where}{error.message}"), files
            variables[name] = "1"
    if "AOTIModel" in types:
        return None, files
    load = tuple(name for name, text in sources.items() if any(_defines(text, one) for one in types))
    return Found(reference, models, drivers, tuple(variables), load), files


def _defines(source: str, name: str) -> bool:
    """Whether Python text *source* registers the type *name* with NEML2."""
    registered = rf"register_neml2_object\(\s*['\"]{re.escape(name)}['\"]"
    return re.search(registered, source) is not None


def _drivers(document: hit.Document) -> Iterator[tuple[str, str]]:
    names = sorted(name for section, name in hit.block_names(document) if section == "Drivers")
    for name in names:
        try:
            yield name, hit.driver_model(document, name)
        except BuildError:
            continue


# -- writing ----------------------------------------------------------------------------------------------------------

_HEAD = """\
# What neml2-build makes: one [[model]] is one target, a model of an input file, with options. `neml2-build` makes of it
# aoti/NAME/ (the compiled graphs) and aoti/NAME_aoti.i (an input file that loads them in place of the model).
# Every path is relative to this file.

output = "aoti"         # where the compiled models go
cache = "cache"         # where everything is kept that was ever compiled; may be shared between projects
devices = ["cpu"]       # "cpu", "cuda"; a model may have its own
jobs = 0                # how many processes; 0: one a core

# What else a [[model]] can have:
#   name = "another"                              # by default the model's name; unique in this file
#   derivatives = ["stress:strain"]               # also compile d(stress)/d(strain); ":" means all pairs
#   parameters = ["elasticity.E"]                 # inputs of the compiled model instead of constants in it
#   rename-inputs = { strain = "eps" }            # also rename-outputs, rename-parameters
#   overrides = ["Models/elasticity/E:=2e5"]      # values to replace in the input file
#   variables = { nbatch = "2" }                  # text put before the file, so that ${nbatch} resolves
#   example-batch-shape = "(2,)"                  # the batch that the capture runs with
#   load = ["my_types.py"]                        # Python files with types of your own
#   devices = ["cpu", "cuda"]
#   driver = "name"                               # instead of model: the model that it runs; the stub keeps the driver
"""


def _entries(found: Iterable[Found]) -> list[Found]:
    return [file for file in found if file.models and not file.variables]


def manifest_text(found: Sequence[Found]) -> str:
    """The manifest for *found*: an entry a file, then comments for what cannot be built as it stands."""
    names = _names(found)
    parts = [_HEAD]
    parts += [_entry(file, names[file.path]) for file in _entries(found)]
    waiting = [file for file in found if file.models and file.variables]
    if waiting:
        parts.append("# These need values, in place of the dots; then take the '# ' away.\n")
        parts += [_commented(_entry(file, names[file.path])) for file in waiting]
    broken = [file for file in found if not file.models]
    if broken:
        lines = [f"#   {file.path}: {' '.join(file.problem.split())}" for file in broken]
        parts.append("\n".join(["# Nothing can be built of these:", *lines, ""]))
    return "\n".join(parts)


def _entry(file: Found, name: str | None) -> str:
    models = file.models[0] if len(file.models) == 1 else list(file.models)
    lines = ["[[model]]", f"input = {_toml(file.path)}", f"model = {_toml(models)}"]
    if name is not None:
        lines.append(f"name = {_toml(name)}")
    if file.load:
        lines.append(f"load = {_toml(list(file.load))}")
    if file.variables:
        pairs = ", ".join(f'{_key(one)} = "..."' for one in file.variables)
        lines.append(f"variables = {{ {pairs} }}")
    lines += [f"# driver = {_toml(driver)}   # in place of model: runs '{model}'" for driver, model in file.drivers[:3]]
    return "\n".join(lines) + "\n"


def _commented(text: str) -> str:
    return "".join(f"# {line}\n" for line in text.splitlines())


def _toml(value: str | list[str]) -> str:
    """A TOML string or list of strings; JSON's escapes are TOML's."""
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _toml(name)


def _names(found: Sequence[Found]) -> dict[str, str | None]:
    """The name that each file's entry needs so that all targets have their own; None where the model's own will do."""
    files = [file for file in found if file.models]
    taken: dict[str, int] = {}
    for file in files:
        for model in file.models:
            taken[model.casefold()] = taken.get(model.casefold(), 0) + 1
    used = {name for name, count in taken.items() if count == 1}
    chosen: dict[str, str | None] = {}
    for file in files:
        if all(taken[model.casefold()] == 1 for model in file.models):
            chosen[file.path] = None
            continue
        stem, whole = Path(file.path).stem, file.path.removesuffix(".i").replace("/", "-")
        many = len(file.models) > 1
        for base in (stem, whole, *(f"{whole}-{number}" for number in range(2, len(files) + 3))):
            base = re.sub(r"[^\w.-]+", "-", base).strip(".-") or "model"
            wanted = [f"{base}-{model}".casefold() for model in file.models] if many else [base.casefold()]
            if not used & set(wanted):
                used |= set(wanted)
                chosen[file.path] = f"{base}-{{model}}" if many else base
                break
    return chosen
