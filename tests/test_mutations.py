"""Every edit of every file of `models/`, one at a time: what a model reads changes its key, and nothing else does.

What a target reaches is told by the blocks of its slice; whether the key of its export moves with a field is then asked of the
field itself. Options of the manifest and of neml2-compile are gone through one by one, so that none can be forgotten.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from conftest import ROOT, Project

from neml2_build.build import Build
from neml2_build.compiler import FakeCompiler
from neml2_build.errors import BuildError
from neml2_build.manifest import Manifest, Model

INPUTS = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "models").rglob("*.i"))
_FIELD = re.compile(r"^(\s*)([\w:]+)\s*=\s*(['\"]?)(.+)$")


class Suite:
    """A copy of `models/` whose files can be changed."""

    def __init__(self, root: Path) -> None:
        self.root = root
        shutil.copytree(ROOT / "models", root / "models", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "neml2-build.toml", root)
        self.build = self.start()
        self.readers: dict[str, set[str]] = {}
        self.blocks: dict[str, set[tuple[str, str]]] = {}
        for name, run in self.build.runs.items():
            for path in run.reads():
                self.readers.setdefault(Path(path).relative_to(root).as_posix(), set()).add(name)
            assert run.parsed is not None
            self.blocks[name] = {(section, block) for section, block in run.parsed.blocks}
        self.before = self.keys(self.build.runs)

    def start(self) -> Build:
        return Build(Manifest.load(self.root / "neml2-build.toml"), compiler=FakeCompiler(1))

    def keys(self, names: Any) -> dict[str, str]:
        """Of each target the key of its export, or what is wrong with it."""
        build = self.start()
        found = {}
        for name in names:
            try:
                found[name] = list(build.runs[name].walk())[1]
            except BuildError as error:
                found[name] = f"error: {error.message}"
        return found

    def changed(self, file: str, text: str, names: Any = None) -> set[str]:
        """The targets (of *names*, by default those that read the file) whose key another *text* of *file* changes."""
        path = self.root / file
        original = path.read_text()
        path.write_text(text)
        try:
            after = self.keys(self.readers[file] if names is None else names)
        finally:
            path.write_text(original)
        return {name for name, key in after.items() if key != self.before[name]}


@pytest.fixture
def suite(tmp_path: Path, look: dict[str, Any]) -> Suite:
    return Suite(tmp_path / "suite")


def lines_of(text: str) -> Iterator[tuple[int, str, tuple[str, str]]]:
    """Number, text, and the block (section, name) of every line of an input file; in no block: two empty texts."""
    stack: list[str] = []
    for number, line in enumerate(text.splitlines()):
        bare = line.partition("#")[0].strip()
        if re.fullmatch(r"\[(\.\./)?\]", bare):
            stack.pop()
        elif found := re.fullmatch(r"\[(?:\./)?([\w/]+)\]", bare):
            stack.append(found[1])
        path = "/".join(stack).split("/") if stack else []
        yield number, line, (path[0] if path else "", path[1] if len(path) > 1 else "")


@pytest.mark.parametrize("file", INPUTS)
def test_every_field(suite: Suite, file: str) -> None:
    text = (ROOT / file).read_text()
    lines = text.splitlines()
    seen = 0
    for number, line, (section, block) in lines_of(text):
        field = _FIELD.match(line.partition("#")[0])
        if field is None:
            continue
        value = field[4]
        mutant = "".join([line[: field.start(4)], "z", value, line[field.end(4) :]])
        changed = suite.changed(file, "\n".join([*lines[:number], mutant, *lines[number + 1 :]]) + "\n")
        for target in suite.readers[file]:
            options = suite.build.runs[target].target
            reached = section in ("", "Settings") or (section, block) in suite.blocks[target]
            if (section, block, field[2]) == ("Drivers", options.driver, "model"):
                reached = True  # it names the model that is built
            if any(one.startswith(f"{section}/{block}/{field[2]}:") for one in options.overrides):
                reached = False
            assert (target in changed) == reached, f"{file}:{number + 1} {line.strip()!r} of [{section}/{block}] for {target}"
        seen += 1
    assert seen >= 3


@pytest.mark.parametrize("file", INPUTS)
def test_no_comment_space_or_block_of_others(suite: Suite, file: str) -> None:
    text = (ROOT / file).read_text()
    lines = text.splitlines()
    for number, line, _ in lines_of(text):
        quotes = sum(one.count("'") for one in lines[:number])
        if quotes % 2:
            continue  # within a value that goes over several lines
        for inserted in (["# another comment"], ["", "   "]):
            assert suite.changed(file, "\n".join([*lines[:number], *inserted, *lines[number:]]) + "\n") == set()
        if line.strip().startswith("["):
            indented = [*lines[:number], f"\t {line.strip()}   ", *lines[number + 1 :]]
            assert suite.changed(file, "\n".join(indented) + "\n") == set()
    alone = "\n[Models]\n  [nobody_asks_for_it]\n    type = ScalarConstantParameter\n    value = 1\n  []\n[]\n"
    assert suite.changed(file, text + alone) == set()
    if not re.search(r"'[^'\n]*\n[^']*'", "\n".join(line.partition("#")[0] for line in lines)):  # else values hold line ends
        assert suite.changed(file, text.replace("\n", "\r\n")) == set()


def test_blocks_that_are_not_reached_may_stand_in_any_order(suite: Suite) -> None:
    swapped = 0
    for file in INPUTS:
        text = (ROOT / file).read_text()
        pairs = re.finditer(r"(?m)^(  \[(\w+)\]\n(?:    .*\n)*?  \[\]\n)(  \[(\w+)\]\n(?:    .*\n)*?  \[\]\n)", text)
        for found in pairs:
            first, second = found[2], found[4]
            names = {block for target in suite.readers[file] for _, block in suite.blocks[target]}
            if first in names and second in names:
                continue
            other = text[: found.start()] + found[3] + found[1] + text[found.end() :]
            assert suite.changed(file, other) == set(), f"{first} and {second} of {file}"
            swapped += 1
    assert swapped >= 1


def test_every_cell_of_a_table(suite: Suite) -> None:
    file = "models/modulus.csv"
    rows = [row.split(",") for row in (ROOT / file).read_text().splitlines()]
    for row, cells in enumerate(rows):
        for column, cell in enumerate(cells):
            mutant = [list(one) for one in rows]
            mutant[row][column] = f"{cell}1"
            assert suite.changed(file, "\n".join(map(",".join, mutant)) + "\n") == {"csv_table"}


def test_every_line_of_an_extension(suite: Suite) -> None:
    (file,) = (name for name in suite.readers if name.endswith(".py"))
    lines = (ROOT / file).read_text().splitlines()
    for number, line in enumerate(lines):
        assert suite.changed(file, "\n".join([*lines[:number], f"{line} #", *lines[number + 1 :]]) + "\n") == {"softplus"}


def test_every_variable_override_and_option_of_the_manifest(suite: Suite) -> None:
    text = (ROOT / "neml2-build.toml").read_text()
    edits = {
        'youngs_modulus = "4.5e4"': ('youngs_modulus = "4.6e4"', {"laminate"}),
        'layers = "3"': ('layers = "4"', {"laminate"}),
        "CTE:=1.5e-6": ("CTE:=1.6e-6", {"viscoplasticity_invar"}),
        'rename-inputs = { strain = "eps" }': ('rename-inputs = { strain = "epsilon" }', {"thermoelasticity"}),
        'rename-outputs = { von_mises_stress = "q" }': ('rename-outputs = { von_mises_stress = "vm" }', {"thermoelasticity"}),
        'derivatives = ["mandel_stress:strain"]': ('derivatives = [":"]', {"promoted"}),
        '"elasticity.E", "elasticity.nu"': ('"elasticity.E"', {"promoted"}),
        "jobs = 0": ("jobs = 7", set()),
        'output = "aoti"': ('output = "elsewhere"', set()),
        'cache = "cache"': ('cache = "kept"', set()),
    }
    for old, (new, expected) in edits.items():
        assert text.count(old) >= 1, old
        assert suite.changed("neml2-build.toml", text.replace(old, new), list(suite.before)) == expected, old


def test_the_same_keys_in_another_place(suite: Suite, tmp_path: Path) -> None:
    assert Suite(tmp_path / "some" / "where" / "else").before == suite.before


# -- options ----------------------------------------------------------------------------------------------------------

#: Field of an entry → another value of it, and the first stage whose key changes; None: no key holds it.
OPTIONS: dict[str, tuple[Any, str | None]] = {
    "input": ("b.i", "parse"),
    "model": ("one", "parse"),
    "driver": (None, None),  # instead of `model`: test_cutoff and test_models
    "name": ("other", "parse"),
    "derivatives": (["x:a"], "export"),
    "parameters": (["one.weight_0"], "export"),
    "rename_inputs": ({"a": "b"}, "export"),
    "rename_outputs": ({"x": "y"}, "export"),
    "rename_parameters": ({"one.weight_0": "w"}, "export"),
    "example_batch_shape": ("(3,)", "export"),
    "dynamic_batch": (False, "export"),
    "load": (["ext.py"], "export"),
    "overrides": (["Models/one/factor:=7"], "parse"),
    "variables": ({"unused": "1"}, "parse"),
    "extra_deps": (["data.txt"], "export"),
    "devices": (["cpu"], None),  # the default; other devices are other tasks
    "cuda_arch": (None, None),  # test_cross
    "dtype": ("float64", None),  # the only one that NEML2 exports; others are refused
    "stub": (False, "parse"),
    "inductor": ({"max_autotune": True}, "lower-cpu"),
    "march": ("x86-64-v3", "lower-cpu"),
    "verify": (False, None),  # asks for a check of what is made; what is made is the same
}


def test_every_option_of_an_entry_is_here() -> None:
    assert set(OPTIONS) == {field.name for field in msgspec.structs.fields(Model)}


@pytest.mark.parametrize("option", [name for name, (value, _) in OPTIONS.items() if value is not None])
def test_option(project: Project, option: str) -> None:
    project.write("b.i", (project.root / "a.i").read_text())
    project.write("ext.py", "")
    project.write("data.txt", "1")
    value, first = OPTIONS[option]
    if option == "rename_parameters":
        project.models = [msgspec.structs.replace(project.models[0], parameters=["one.weight_0"])]
    project.build()
    before = project.keys()
    project.models = [msgspec.structs.replace(project.models[0], **{option: value})]
    done = project.build()
    name = next(iter(done.build.runs))
    after = project.keys(name)
    changed = [stage for stage in before if before[stage] != after.get(stage)]
    assert (changed[0] if changed else None) == first
    if option == "name":
        assert "export" not in changed and "lower-cpu" not in changed
    if option in ("stub", "variables"):
        assert set(changed) <= {"parse", "stub"}


#: Option of neml2-compile → the key of an entry or of the manifest with the same meaning, or why there is none.
COMPILE = {
    "--model": "model",
    "--driver": "driver",
    "--output-dir": "output",
    "--device": "devices",
    "--dtype": "dtype",
    "-j": "jobs",
    "--jobs": "jobs",
    "--no-stub": "stub",
    "-p": "parameters",
    "--parameter": "parameters",
    "-d": "derivatives",
    "--derivative": "derivatives",
    "--example-batch-shape": "example-batch-shape",
    "--dynamic-batch": "dynamic-batch",
    "--no-dynamic-batch": "dynamic-batch",
    "--rename-input": "rename-inputs",
    "--rename-output": "rename-outputs",
    "--rename-parameter": "rename-parameters",
    "--load": "load",
    "-h": "says what the options are",
    "--help": "says what the options are",
    "-i": "asks the user: neml2-build init",
    "--interactive": "asks the user: neml2-build init",
    "-q": "says less: neml2-build -q",
    "--quiet": "says less: neml2-build -q",
}


@pytest.mark.real
def test_every_option_of_neml2_compile_has_its_key() -> None:
    command = "import sys; from neml2.cli.aoti_compile import main; sys.argv = ['neml2-compile', '--help']; sys.exit(main())"
    said = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True, timeout=300).stdout
    found = {name for line in re.findall(r"(?m)^  (-.*)$", said) for name in re.findall(r"(?:^|, )(--?[a-z][a-z-]*)", line)}
    assert found == set(COMPILE)
    keys = {name.replace("_", "-") for kind in (Model, Manifest) for name in kind.__struct_fields__}
    assert {key for key in COMPILE.values() if " " not in key} <= keys
