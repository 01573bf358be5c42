"""The pages of docs/ and README.md: what they tell the reader to type is typed here, and what they show is what comes out.

A page is a script. A block ``title="NAME"`` is a file, written to the reader's folder. A ``console`` block is typed: lines
that begin with ``$ `` are commands, the lines after each what it prints, in which a line ``...`` stands for any lines.
Times, sizes, digests, dates, versions and the width of this CPU's vectors may be others.

How-to pages are run with the fake compiler, those of `REAL` and the tutorial with the real one. After a change of output::

    python tests/test_docs.py [--real] docs/tutorial.md      # runs the page and writes what came out into it

What may differ is written too, unless a step leaves lines out (``...``) and is still right.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import pytest

from neml2_build import cli, environment, reference

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
HOWTO = sorted((ROOT / "docs" / "howto").glob("*.md"))
#: How-to pages whose point is what the compiled model answers.
REAL = ("parameters.md",)

_SAME = [
    (r"\b[0-9a-f]{8,32}\b", "DIGEST"),
    (r"\d{4}-\d\d-\d\d \d\d:\d\d", "DATE"),
    (r"\d+(\.\d+)? (s|min|h|days)\b", "TIME"),
    (r"\[ *TIME\]", "[TIME]"),
    (r" \(saved TIME\)", ""),
    (r" \(((parse|export|lower-cpu|package|stub) TIME(, )?)+\)", ""),
    (r"\d+(\.\d+)? (B|KiB|MiB|GiB)\b", "SIZE"),
    (r"\(\d+% of SIZE\)", "(SHARE of SIZE)"),
    (r"\d+ objects, \d+ records", "COUNTS"),
    (r", TIME to make", ""),
    (r"asked \d+ times: \d+ hits \(\d+%\)", "ASKED"),
    (r"\d\.\de[+-]\d\d", "FLOAT"),
    (r"(neml2|nmhit|pyzag|torch|numpy|glibc) \d[\w.+]*", r"\1 VERSION"),
    (r"(lower-cpu: \d+ graphs?), .*", r"\1, MACHINE"),
    (r"vectorized: .*", "vectorized: WIDTH"),
    (r"x0\+=\d+|, \d+\)(?=;$)", "STEP"),
    (r" +", " "),
]
#: What the fake compiler counts otherwise: it makes a graph of each leaf.
_FAKE = [(r"; \d+ graphs? compiled, \d+ reused", "")]


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, the file that it is (or ""), its lines, and where its first line is (from 0)."""

    language: str
    title: str
    lines: tuple[str, ...]
    start: int


@dataclass(frozen=True)
class Step:
    """A command of a page, what is shown of its output, and which lines of the page that is."""

    command: str
    shown: tuple[str, ...]
    start: int


def blocks(text: str) -> Iterator[Block]:
    """The fenced blocks of a page."""
    lines = text.split("\n")
    opened: int | None = None
    for number, line in enumerate(lines):
        if not line.startswith("```"):
            continue
        if opened is None:
            opened = number
            continue
        language, _, rest = lines[opened][3:].partition(" ")
        title = re.search(r'title="(.+?)"', rest)
        yield Block(language, title[1] if title else "", tuple(lines[opened + 1 : number]), opened + 1)
        opened = None
    assert opened is None, f"a block is not closed: line {opened}"


def steps(block: Block) -> Iterator[Step]:
    """The commands of a ``console`` block."""
    starts = [index for index, line in enumerate(block.lines) if line.startswith("$ ")]
    for index, end in zip(starts, [*starts[1:], len(block.lines)], strict=True):
        yield Step(block.lines[index][2:], block.lines[index + 1 : end], block.start + index + 1)


def _told(name: str) -> bool:
    """Whether `explain` would list the variable: what this machine has set is on no page."""
    return name in environment.HASHED_NAMES or name.startswith(environment.HASHED_PREFIXES)


class Reader:
    """Somebody who does what a page says, in the folder *home*."""

    def __init__(self, home: Path, *, fake: bool) -> None:
        self.home, self.fake = home, fake
        programs = Path(tempfile.mkdtemp(prefix="bin-", dir=home.parent))
        for name, module in {"neml2-build": "-m neml2_build.cli", "doit": "-m doit", "python": ""}.items():
            program = programs / name
            program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {module} "$@"\n')
            program.chmod(0o755)
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("NEML2_BUILD_") and not _told(name)},
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "COLUMNS": "100",
            **({"NEML2_BUILD_COMPILER": "fake"} if fake else {}),
        }
        home.mkdir(parents=True, exist_ok=True)

    def type(self, command: str) -> list[str]:
        """Type *command*; what it prints."""
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=self.home,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=900,
            check=False,
        )
        assert "Traceback" not in done.stdout, f"$ {command}\n{done.stdout}"
        self.code = done.returncode
        return done.stdout.replace(str(self.home), "/home/me/project").rstrip("\n").split("\n") if done.stdout.strip() else []

    def follow(self, text: str, *, every: bool = False) -> list[tuple[Step, list[str]]]:
        """Do all that the page *text* says; the steps whose output is not the one that is shown, or *every* one."""
        wrong = []
        for block in blocks(text):
            if block.title:
                file = self.home / block.title
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text("\n".join(block.lines) + "\n", encoding="utf-8")
            elif block.language == "console":
                for step in steps(block):
                    if self.fake and step.command.startswith("python "):
                        continue
                    printed = self.type(step.command)
                    if every or not self.same(step.shown, printed):
                        wrong.append((step, printed))
        return wrong

    def same(self, shown: Sequence[str], printed: Sequence[str]) -> bool:
        """Whether *printed* is what is *shown*, but for what may differ."""
        pattern = "\n".join(r"(.*\n)*?.*" if line == "..." else re.escape(self.plain(line)) for line in shown)
        return re.fullmatch(pattern, "\n".join(map(self.plain, printed))) is not None

    def plain(self, line: str) -> str:
        for pattern, word in _SAME + (_FAKE if self.fake else []):
            line = re.sub(pattern, word, line)
        return line.strip()


def told(wrong: list[tuple[Step, list[str]]]) -> str:
    """What is wrong with a page, for people."""
    return "\n\n".join(
        f"line {step.start}: $ {step.command}\n--- the page\n" + "\n".join(step.shown) + "\n--- printed\n" + "\n".join(printed)
        for step, printed in wrong
    )


def commands_of(text: str) -> Iterator[str]:
    """Every call of neml2-build in a page: in blocks, and in the running text."""
    for block in blocks(text):
        for line in block.lines if block.language in ("", "console", "sh", "text") else ():
            line = line.removeprefix("$ ").strip()
            if block.language == "console" and f"$ {line}" not in block.lines:
                continue
            if line.startswith("neml2-build ") or line == "neml2-build":
                yield line
    running = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    yield from re.findall(r"`(neml2-build(?: [^`]*)?)`", running)


def understood(words: list[str]) -> None:
    """Let click read a command, without running it. Raises `click.ClickException`."""
    name, command = "neml2-build", cli.main_command
    first = next((word for word in words if not word.startswith("-")), None)
    if first not in cli.COMMANDS and not {"--help", "--version", "-h"} & set(words):
        words = ["build", *words]
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        context = click.Context(command, info_name=name)
        found = command.get_command(context, words[0])
        assert found is not None, f"{name} has no command {words[0]}"
        name, command, words = words[0], found, words[1:]
    if {"--help", "-h", "--version"} & set(words) or (isinstance(command, click.Group) and not words):
        return
    with command.make_context(name, list(words)):
        pass


def _variants(command: str) -> list[str]:
    """``show graph|kernel NAME`` is two commands."""
    command = command.replace("\\|", "|").split(" #")[0].split(" && ")[0].split(" > ")[0]
    command = re.sub(r" {3,}.*", "", command)
    alternatives = re.search(r"\S+\|\S+", command)
    if alternatives is None:
        return [command]
    return [command.replace(alternatives[0], word) for word in alternatives[0].split("|")]


# -- the pages --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_resolve(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?://", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), f"{page.name}: {link}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            anchors = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
            assert anchor in anchors, f"{page.name}: {link}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_and_options_exist(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for text in commands_of(page.read_text(encoding="utf-8")):
        if "[" in text:  # a synopsis
            continue
        for command in _variants(text):
            try:
                understood(shlex.split(command)[1:])
            except click.ClickException as error:
                # A text that names a command need not give what the command needs.
                assert isinstance(error, click.MissingParameter), f"{page.name}: {command}: {error.format_message()}"


def test_every_page_is_found_from_the_readme() -> None:
    seen, todo = set(), [ROOT / "README.md"]
    while todo:
        page = todo.pop()
        if page in seen:
            continue
        seen.add(page)
        links = re.findall(r"\]\(([^)#\s]+\.md)", page.read_text(encoding="utf-8"))
        todo += [(page.parent / link).resolve() for link in links if not link.startswith("http")]
    assert seen >= set(PAGES)


@pytest.mark.parametrize("page", HOWTO, ids=lambda page: page.stem)
def test_howto(page: Path, tmp_path: Path) -> None:
    """With the fake compiler; what Python prints of the compiled model is left to the real one."""
    wrong = Reader(tmp_path / "home", fake=True).follow(page.read_text(encoding="utf-8"))
    assert not wrong, told(wrong)


@pytest.fixture(scope="session")
def toolchain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is prepared once a machine to compile quickly; it changes no output."""
    if kept := os.environ.get("NEML2_BUILD_TEST_CACHE"):
        return Path(kept).resolve() / "toolchain"
    return tmp_path_factory.mktemp("toolchain")


def with_toolchain(home: Path, toolchain: Path) -> None:
    """Have a project in *home* use the prepared *toolchain*."""
    (home / "cache").mkdir(parents=True)
    toolchain.mkdir(parents=True, exist_ok=True)
    (home / "cache" / "toolchain").symlink_to(toolchain)


@pytest.mark.real
@pytest.mark.parametrize("name", ["tutorial.md", *(f"howto/{name}" for name in REAL)])
def test_with_the_real_compiler(name: str, tmp_path: Path, toolchain: Path) -> None:
    """Four graphs in all."""
    home = tmp_path / "home"
    with_toolchain(home, toolchain)
    wrong = Reader(home, fake=False).follow((ROOT / "docs" / name).read_text(encoding="utf-8"))
    assert not wrong, told(wrong)


# -- README -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def readme() -> str:
    return (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what of this repository is built."""
    home = tmp_path / "home"
    shutil.copytree(ROOT / "models", home / "models", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "neml2-build.toml", home)
    return home


class TestReadme:
    def test_the_build_of_this_repository(self, readme: str, checkout: Path) -> None:
        reader = Reader(checkout, fake=True)
        reader.type("neml2-build")
        assert reader.code == 0
        (shown,) = [block for block in blocks(readme) if block.language == "console"]
        assert not reader.follow(readme)
        assert any("18 up to date" in line for line in shown.lines)
        stub, model = re.findall(r'load_model\("(.+?)", "(.+?)"\)', readme)[0]
        assert f"[{model}]" in (checkout / stub).read_text()

    def test_commands_for_a_project_of_ones_own(self, readme: str, checkout: Path) -> None:
        (block,) = [block for block in blocks(readme) if any(line.startswith("neml2-build init") for line in block.lines)]
        (checkout / "neml2-build.toml").unlink()
        reader = Reader(checkout, fake=True)
        typed = [line for line in block.lines if not line.startswith("pip install")]
        assert len(typed) >= 5
        for line in typed:
            stub = next((checkout / "aoti").glob("*_aoti.i"), Path())
            printed = reader.type(line.replace("NAME", stub.stem.removesuffix("_aoti")))
            # What doctor finds is this machine's affair.
            assert reader.code == 0 or "doctor" in line, f"$ {line}\n" + "\n".join(printed)
            assert printed, line

    def test_the_manifest_that_it_shows(self, readme: str, checkout: Path) -> None:
        (block,) = [block for block in blocks(readme) if block.language == "toml"]
        (checkout / "neml2-build.toml").write_text("\n".join(block.lines))
        (checkout / "materials").mkdir()
        shutil.copy(ROOT / "models" / "forward.i", checkout / "materials")
        printed = Reader(checkout, fake=True).type("neml2-build list")
        assert printed[0].split() == ["rates", "eq", "of", "models/rates.i", "[cpu]"]
        assert "forward-thermoelasticity" in [line.split()[0] for line in printed]

    def test_doit(self, readme: str, checkout: Path) -> None:
        (dodo,) = [block for block in blocks(readme) if block.language == "python" and "create_tasks" in str(block.lines)]
        (typed,) = [block for block in blocks(readme) if block.lines and block.lines[0] == "doit"]
        (checkout / "dodo.py").write_text("\n".join(dodo.lines))
        reader = Reader(checkout, fake=True)
        for line in typed.lines:
            printed = reader.type(line)
            assert reader.code == 0, f"$ {line}\n" + "\n".join(printed)
            if line == "doit":
                assert (checkout / "aoti" / "rates_aoti.i").exists()
            if "list" in line:
                assert {f"{stage}:rates" for stage in ("parse", "export", "lower-cpu", "package", "stub")} <= {
                    line.split()[0] for line in printed if line.strip()
                }
        assert not (checkout / "aoti" / "rates").exists()

    def test_versions_of_python(self, readme: str) -> None:
        wanted = re.search(r'requires-python = ">=(3\.\d+),<3\.(\d+)"', (ROOT / "pyproject.toml").read_text())
        assert wanted is not None
        assert f"Python ({wanted[1]} to 3.{int(wanted[2]) - 1})" in readme

    def test_every_command_is_named(self, readme: str) -> None:
        for name in cli.COMMANDS:
            assert re.search(rf"\b{name}\b", readme), name


# -- reference and help -----------------------------------------------------------------------------------------------


class TestReference:
    def test_is_up_to_date(self, capsys: pytest.CaptureFixture[str]) -> None:
        code = reference.main(["--check"])
        assert code == 0, capsys.readouterr().out

    def test_check_tells_and_writes_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        page = tmp_path / "reference.md"
        page.write_text("# old\n")
        monkeypatch.setattr(reference, "PAGE", page)
        assert reference.main(["--check"]) == 1
        assert page.read_text() == "# old\n"
        assert "-# old" in capsys.readouterr().out
        assert reference.main([]) == 0
        assert reference.main(["--check"]) == 0
        assert reference.main(["--chekc"]) == 2

    def test_holds_every_key_command_and_exit_code(self) -> None:
        page = reference.page()
        for key in ("output", "trusted-keys", "max-size", "rename-inputs", "extra-deps", "example-batch-shape"):
            assert f"| `{key}` |" in page
        assert "| `root` |" not in page
        for name, _ in reference.commands():
            assert name == "neml2-build" or f"### `{name}`" in page
        for code in (0, 1, 2, 130):
            assert f"| `{code}` |" in page

    def test_own_environment_variables_are_all_there(self) -> None:
        """What the source names with our prefix is on the page; what is on the page is read somewhere."""
        source = "\n".join(
            path.read_text(encoding="utf-8")
            for path in sorted((ROOT / "neml2_build").rglob("*.py"))
            if path.name != "reference.py"
        )
        named = set(re.findall(r"NEML2_BUILD_[A-Z_]*[A-Z]", source))
        assert named <= set(reference.OWN_VARIABLES)
        for name in reference.OWN_VARIABLES:
            assert f'"{name}"' in source, name

    def test_no_markup_of_docstrings_is_left(self) -> None:
        page = reference.page()
        assert not re.search(r":\w+:`|(?<!`)``(?!`)", page)


@pytest.mark.parametrize(
    ("name", "command"), list(reference.commands()), ids=lambda value: value if isinstance(value, str) else ""
)
def test_help_has_an_example(name: str, command: click.Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """And click understands it."""
    monkeypatch.chdir(ROOT)
    lines = reference.examples(command)
    assert lines, f"{name} --help has no example"
    for line in lines:
        assert "neml2-build" in line
        if line.startswith("neml2-build"):
            for variant in _variants(line):
                understood(shlex.split(variant)[1:])
    if not isinstance(command, click.Group):
        assert any(line.startswith(name) or f"$({name})" in line for line in lines), f"no example of {name} itself"


# -- to bring a page up to date ---------------------------------------------------------------------------------------


def update(page: Path, *, fake: bool) -> int:
    """Follow *page* and write into it what was printed. Gives how many steps were not as shown."""
    text = page.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder).resolve() / "home"
        with_toolchain(home, Path(os.environ.get("NEML2_BUILD_TEST_CACHE", folder)).resolve() / "toolchain")
        reader = Reader(home, fake=fake)
        found = reader.follow(text, every=True)
    lines, wrong = text.split("\n"), 0
    for step, printed in reversed(found):
        right = reader.same(step.shown, printed)
        wrong += not right
        if not (right and "..." in step.shown):
            lines[step.start : step.start + len(step.shown)] = printed
    page.write_text("\n".join(lines), encoding="utf-8")
    return wrong


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        if argument != "--real":
            print(argument, update(Path(argument), fake="--real" not in sys.argv))
