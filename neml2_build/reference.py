"""``docs/reference.md``, written from the code: manifest keys, commands, exit codes, reasons, environment variables.

``python -m neml2_build.reference`` writes the page; with ``--check`` it only says whether the page is up to date. Everything
on it that the code knows is taken from there: keys and types from the structs of :mod:`neml2_build.manifest` with their
docstrings, commands from click, reasons and notes from their tables. So what is wrong on the page is wrong in the code.
"""

from __future__ import annotations

import difflib
import inspect
import re
import sys
import textwrap
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType

import click
import msgspec

from neml2_build import cli, environment, reasons, remote, store
from neml2_build.manifest import MARCHES, Manifest, Model, parse_size

PAGE = Path(__file__).parents[1] / "docs" / "reference.md"

#: Variables that the doit process reads itself, by name, with their meaning. A test finds those that are missing here.
OWN_VARIABLES = {
    remote.WRITE_VARIABLE: "`1`: this machine writes to the shared store (also `remote-write`)",
    remote.AUTHORIZATION_VARIABLE: "value of the `Authorization` header for a shared store over HTTP",
    "NEML2_BUILD_SIGNING_KEY": "text of the secret key to sign with (also `signing-key`)",
    "NEML2_BUILD_MACHINE": "folder for what is made once a machine (precompiled headers, what torch says of the CPU; 300 MB), "
    "to share among projects; by default each cache has its own",
    "NEML2_BUILD_COMPILER": "`fake`: deterministic bytes in place of NEML2 and torch, for tests of a build set-up; "
    "nothing that it makes is mistaken for compiled code",
    "NEML2_BUILD_FAKE_DELAY": "seconds that each call of the fake compiler takes",
    "NEML2_BUILD_FAKE_LOG": "file to which each call of the fake compiler adds a line",
    "CI": "set: no live view on a terminal",
    "TERM": "`dumb`: no live view on a terminal",
    "NO_COLOR": "set: no colours",
}

_INTRODUCTION = """\
# Reference

This page is written by `python -m neml2_build.reference` from the code. For a first look see the
[tutorial](tutorial.md); for what a build is keyed on, [keys](keys.md).
"""

#: A text for several keys is said again at each of them if it is not longer.
_SHORT = 80
_WORDS = {str: "string", int: "integer", float: "number", bool: "true or false"}


def page() -> str:
    """The whole page, as Markdown."""
    parts = [
        _INTRODUCTION,
        _contents(),
        *_manifest_part(),
        *_commands_part(),
        _exit_codes(),
        *_reasons_part(),
        *_variables_part(),
    ]
    return "\n\n".join(part.strip("\n") if _laid_out(part) else _filled(part) for part in parts) + "\n"


def _laid_out(part: str) -> bool:
    return part.startswith(("|", "#", "```", "-"))


def _filled(part: str) -> str:
    return "\n\n".join(textwrap.fill(paragraph, 120, break_long_words=False) for paragraph in part.split("\n\n"))


def _contents() -> str:
    titles = ("The manifest", "Commands", "Exit codes", "Reasons and notes", "Environment variables")
    return "\n".join(f"- [{title}](#{title.lower().replace(' ', '-')})" for title in titles)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _code(text: str, language: str = "") -> str:
    return f"```{language}\n{text}\n```"


# -- the manifest -----------------------------------------------------------------------------------------------------


def _manifest_part() -> Iterator[str]:
    yield "## The manifest"
    yield (
        "`neml2-build.toml`, or the table `[tool.neml2-build]` of `pyproject.toml`, here or in the nearest parent folder; "
        "another with `-f FILE`. Relative paths are relative to it. Unknown keys and wrong types are errors that name the "
        "key, its line and the nearest known key. In Python the keys have underscores and are fields of "
        "`neml2_build.Manifest` and `neml2_build.Model`; there, the list of entries is called `models`."
    )
    yield "### Top of the file"
    yield _keys_table(Manifest, "manifest")
    yield "### `[[model]]`"
    yield 'One entry is one target, or several: a list or `"*"` under `model`, or a glob under `input`.'
    yield _keys_table(Model, "model")
    yield "### Values"
    sizes = _sentence(_first_paragraph(parse_size)).partition(": ")[2]
    levels = ", ".join(f'`"{name}"`' for name in MARCHES)
    yield f"- Sizes: {sizes}\n- `march`: {levels}, or another name that the compiler takes."


def _keys_table(struct: type[msgspec.Struct], kind: str) -> str:
    meanings = _meanings(struct)
    hints = typing.get_type_hints(struct)
    rows = [
        [f"`{field.encode_name}`", _type_words(hints[field.name]), _default(field), meanings[field.name]]
        for field in msgspec.structs.fields(struct)
        if field.name in meanings and field.name not in ("root", "file")
    ]
    rows = [row if row[0] != "`model`" or kind == "model" else [*row[:1], "`[[model]]` entries", *row[2:]] for row in rows]
    return _table(("key", "value", "default", "meaning"), rows)


def _meanings(struct: type[msgspec.Struct]) -> dict[str, str]:
    """Field → what its docstring says, which may describe several in one text. A field that it leaves out raises."""
    text = inspect.getdoc(struct) or ""
    section = text.partition("Parameters\n----------\n")[2]
    found: dict[str, str] = {}
    for match in re.finditer(r"^(\w[\w, ]*)\n((?:[ ]+.*\n?|\n)+)", section, re.MULTILINE):
        names = match[1].split(", ")
        meaning = _sentence(" ".join(match[2].split()))
        parts = [f"{part[:1].upper()}{part[1:]}." for part in meaning.removesuffix(".").split("; ")]
        if len(parts) == len(names):
            found.update(zip(names, parts, strict=True))
        else:
            found.update(dict.fromkeys(names, meaning))
            if len(meaning) > _SHORT:
                found.update(dict.fromkeys(names[1:], f"See `{names[0].replace('_', '-')}`."))
    missing = set(struct.__struct_fields__) - set(found)
    if missing:
        raise LookupError(f"the docstring of {struct.__name__} says nothing of {', '.join(sorted(missing))}")
    return found


def _sentence(text: str) -> str:
    """A docstring's text as Markdown, with the names that a TOML file has."""
    text = re.sub(r":class:`~?(?:\w+\.)*Manifest`", "the manifest", text)
    text = text.replace("text for :func:`parse_size`", "text as below")
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text)
    text = re.sub(r"(?<!\*)\*(\w+)\*(?!\*)", lambda match: f"`{match[1].replace('_', '-')}`", text)
    return text.replace("``", "`")


def _type_words(hint: object) -> str:
    """What a value of the type *hint* is called in TOML."""
    arguments = typing.get_args(hint)
    origin = typing.get_origin(hint)
    if origin in (UnionType, typing.Union):
        parts = [_type_words(part) for part in arguments if part is not NoneType]
        return " or ".join(part for part in parts if not (part == "integer" and "number" in parts))
    if origin is list:
        return "list of " + ("entries" if arguments[0] is Model else f"{_type_words(arguments[0])}s")
    if origin is dict:
        parts = _type_words(arguments[1]).split(" or ")
        return "table of " + ("values" if len(parts) > 2 else " or ".join(f"{part}s" for part in parts))
    return _WORDS[typing.cast(type, hint)]


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return "required"
    value = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
    if value is None or value in ([], {}):
        return ""
    return f"`{_toml(value)}`"


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_toml(item) for item in value)}]"
    return f'"{value}"' if isinstance(value, str) else str(value)


def _first_paragraph(function: object) -> str:
    """The docstring of *function* up to its first section, in one line."""
    return " ".join((inspect.getdoc(function) or "").split("\n\nRaises\n")[0].split())


# -- commands ---------------------------------------------------------------------------------------------------------


def commands() -> Iterator[tuple[str, click.Command]]:
    """Every command with its full name, ``neml2-build`` itself first, groups before what is in them."""
    yield from _commands("neml2-build", cli.main_command, None)


def _commands(name: str, command: click.Command, parent: click.Context | None) -> Iterator[tuple[str, click.Command]]:
    yield name, command
    if isinstance(command, click.Group):
        context = click.Context(command, parent, name.rpartition(" ")[2])
        for word in command.list_commands(context):
            found = command.get_command(context, word)
            if found is not None and not found.hidden:
                yield from _commands(f"{name} {word}", found, context)


def examples(command: click.Command) -> list[str]:
    """The examples in a command's help: the lines of the paragraph that is printed as it stands."""
    blocks = re.findall(r"^\x08\n((?:.+\n?)+)", inspect.cleandoc(command.help or ""), re.MULTILINE)
    return [line for block in blocks for line in block.splitlines()]


def _commands_part() -> Iterator[str]:
    yield "## Commands"
    shared = _options(next(command for name, command in commands() if name.endswith(" list")))
    common = [row for row in shared if row[0].startswith(("`-f`", "`--json`"))]
    yield (
        "`neml2-build NAME ...` is `neml2-build build NAME ...`. A NAME is a target of the manifest; shell patterns "
        "(in quotes) are allowed. Every command has `-h`/`--help`; nearly all have"
    )
    yield _table(("option", "does"), common)
    for name, command in commands():
        if name == "neml2-build":
            continue
        group = isinstance(command, click.Group)
        yield f"### `{name}`"
        text = re.sub(r"^\x08\n(?:.+\n?)+", "", inspect.cleandoc(command.help or ""), flags=re.MULTILINE).strip()
        yield "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n") if paragraph.strip())
        if not group:
            context = click.Context(command, info_name=name)
            yield _code(f"{command.get_usage(context).removeprefix('Usage: ')}", "text")
        yield _code("\n".join(examples(command)), "sh")
        rows = [row for row in _options(command) if row not in common]
        if rows:
            yield _table(("option", "does"), rows)


def _options(command: click.Command) -> list[list[str]]:
    rows = []
    for option in command.params:
        if not isinstance(option, click.Option) or option.hidden:
            continue
        names = ", ".join(f"`{name}`" for name in sorted(option.opts, key=len))
        metavar = "" if option.is_flag else f" {option.make_metavar(click.Context(command))}"
        words = re.sub(r" RANGE$", "", metavar)
        rows.append([names + (f" `{words.strip()}`" if words else ""), (option.help or "").strip()])
    return rows


# -- the rest ---------------------------------------------------------------------------------------------------------


def _exit_codes() -> str:
    """The codes, as the module docstring of the command line says them."""
    line = re.search(r"^Exit codes: (.+)\.$", cli.__doc__ or "", re.MULTILINE)
    assert line is not None
    rows = [[f"`{code}`", meaning] for code, _, meaning in (part.partition(" ") for part in line[1].split("; "))]
    return "## Exit codes\n\n" + _table(("code", "meaning"), rows)


def _reasons_part() -> Iterator[str]:
    yield "## Reasons and notes"
    yield "Why a stage runs, as `status`, `explain`, `build -n` and `build -v` say it:"
    yield _kinds(reasons.KINDS)
    yield "What a build notes about a store, and `cache stats` counts; the build makes again what was not usable:"
    yield _kinds({**store.REASONS, **remote.REASONS})


def _kinds(kinds: Mapping[str, str]) -> str:
    return _table(("name", "meaning"), [[f"`{name}`", meaning] for name, meaning in kinds.items()])


def _variables_part() -> Iterator[str]:
    yield "## Environment variables"
    yield "Read by neml2-build itself; none of them is in a key:"
    yield _table(("variable", "what for"), [[f"`{name}`", meaning] for name, meaning in OWN_VARIABLES.items()])
    yield (
        "Workers get these and no others. What torch's inductor or the compiler may read is in the keys of what they "
        "make, so a change compiles again:"
    )
    prefixes = ", ".join(f"`{name}*`" for name in environment.HASHED_PREFIXES)
    rows = [
        ["in keys", f"{', '.join(f'`{name}`' for name in environment.HASHED_NAMES)}, {prefixes}"],
        ["handed on, in no key", ", ".join(f"`{name}`" for name in environment.PASSED_NAMES)],
        ["never handed on", ", ".join(f"`{name}`" for name in environment.DROPPED_NAMES)],
    ]
    yield _table(("", "variables"), rows)
    yield "An input file's `${env NAME}` is tracked by itself, whatever its name."


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page, or with ``--check`` say whether it is up to date. Gives the exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    if set(given) - {"--check"}:
        print("usage: python -m neml2_build.reference [--check]", file=sys.stderr)
        return 2
    wanted = page()
    before = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    if before == wanted:
        return 0
    if "--check" in given:
        lines = difflib.unified_diff(before.splitlines(), wanted.splitlines(), "docs/reference.md", "the code", lineterm="")
        print("\n".join(lines))
        print("docs/reference.md is not up to date: run 'python -m neml2_build.reference'", file=sys.stderr)
        return 1
    PAGE.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
