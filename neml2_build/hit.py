"""HIT text: includes, variables, overrides, reachability, and the slice that one model stands on.

nmhit parses; everything else is done here on a small tree of our own, for reasons that were each seen to go wrong:

- nmhit applies ``:=`` before it resolves ``!include``, so an override of an included field is lost without a word. Here
  every file is parsed alone, the trees are joined, and overrides are applied to the whole.
- A cyclic ``!include`` and a ``${x}`` that refers to itself end in a segmentation fault. Here both are errors with the
  chain that closed.
- ``${env X}`` of an unset variable is silently the empty string. Here it is an error, where the value is needed.

Each file is read once: the bytes that were digested are the bytes that were parsed.

A value is looked up as NEML2 does it: of repeated sections the first that holds the name wins, and ``${name}`` is resolved
from the root of the document. Expansion is done here (nmhit reads the environment of the process, a build has its own)
and compared with nmhit's wherever both see the same environment.

Reading, slicing and digesting one file of NEML2's own test suite takes about 2 ms.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

import nmhit

from .digest import digest
from .errors import BuildError, RequestError, TaskError

Block: TypeAlias = tuple[str, str]

#: Blocks that NEML2 asks for by a default, so that no value names them: every slip model of crystal plasticity looks for
#: [Data/crystal_geometry] unless told otherwise.
DEFAULT_BLOCKS: frozenset[Block] = frozenset({("Data", "crystal_geometry")})

#: Sections that hold nothing which a model looks up: runs of the model, and the settings, which are always in a slice.
_NEVER_REFERENCED = frozenset({"Drivers", "Settings"})

_HELPER = "text_"


@dataclass(frozen=True)
class SourceFile:
    """A file that was read: absolute path, and digest of exactly the bytes that were parsed."""

    path: Path
    digest: str


@dataclass(frozen=True)
class _Field:
    """``name = raw``; *quotes* are the triple quotes of a verbatim value, which then stand not in *raw*."""

    name: str
    raw: str
    quotes: str
    file: Path
    line: int

    def node(self) -> nmhit.Node:
        if not self.quotes:
            return nmhit.Field(self.name, self.raw)
        # only nmhit's parser can make a field in triple quotes
        text = f"{self.name} = {self.quotes}{self.raw}{self.quotes}\n"
        return nmhit.parse_text(text).children()[0].clone()


@dataclass(frozen=True)
class _Section:
    name: str
    items: tuple[_Item, ...]
    file: Path
    line: int

    def node(self) -> nmhit.Node:
        section = nmhit.Section(self.name)
        for item in self.items:
            section.add_child(item.node())
        return section


@dataclass(frozen=True)
class _Remark:
    """A comment, or a blank line: no text."""

    text: str
    inline: bool = False
    name: str = ""

    def node(self) -> nmhit.Node:
        return nmhit.Comment(self.text, self.inline) if self.text else nmhit.Blank()


_Item: TypeAlias = "_Field | _Section | _Remark"
_Named: TypeAlias = "_Field | _Section"


@dataclass(frozen=True)
class Document:
    """An input file with its includes merged, its variables and overrides applied.

    Parameters
    ----------
    root
        The merged document as nmhit holds it, comments and blank lines too.
    path
        The main input file, absolute.
    files
        Every file that was read, the main file first.
    environment
        The environment variables that ``${env ...}`` names anywhere in the document and that are set, with their values.
    warnings
        What is suspicious and yet no error.
    """

    root: nmhit.Root
    path: Path
    files: tuple[SourceFile, ...]
    environment: dict[str, str]
    warnings: tuple[str, ...]
    _items: tuple[_Item, ...] = field(repr=False)
    _environ: Mapping[str, str] = field(repr=False)


# ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def read(
    path: Path | str,
    *,
    variables: Mapping[str, str] | None = None,
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] = os.environ,
) -> Document:
    """Read the input file at *path*.

    Parameters
    ----------
    variables
        Top-level fields put before the text, so that ``${name}`` resolves.
    overrides
        ``PATH:=VALUE`` replaces the value of a field that exists, ``PATH=VALUE`` adds a field to a section that exists; both
        on the merged document, so that included fields are reached too.
    environ
        What ``${env NAME}`` sees.

    Raises
    ------
    RequestError
        The file does not exist or is a directory; a variable or an override is wrong.
    TaskError
        The file, or one that it includes, cannot be read or parsed; includes form a cycle.
    """
    main = _absolute(Path(path))
    files: list[SourceFile] = []
    try:
        items = _read_file(main, (), None, files)
        items = (*_variables(variables or {}, items, main), *items)
        for text in overrides:
            items = _override(items, text, main)
        root = nmhit.Root()
        for item in items:
            root.add_child(item.node())
        document = Document(root, main, tuple(files), {}, (), items, environ)
        uses = _uses(document)
    except RecursionError:
        raise TaskError("sections are nested too deeply", file=main, remedy="nest fewer than a few hundred") from None
    unused = [name for name in variables or {} if name not in uses.fields]
    warnings = [
        *(f"variable {name!r} is not used: no ${{{name}}} in {main.name}" for name in unused),
        *(f"{where}: the environment variable {name!r} is not set" for name, where in uses.unset.items()),
        *_shadowed(items, main),
    ]
    return replace(document, environment=dict(sorted(uses.environment.items())), warnings=tuple(warnings))


def _absolute(path: Path) -> Path:
    """*path* from the root, without ``..`` unless a symbolic link gives it a meaning."""
    full = Path(os.path.join(os.getcwd(), path))
    short = Path(os.path.normpath(full))
    return short if ".." not in full.parts or os.path.realpath(short) == os.path.realpath(full) else full


def _uses(document: Document) -> _Uses:
    """What the values of *document* refer to; raises where nmhit expands a value in another way than we do."""
    uses = _Uses()
    for item, node in zip(_fields_of(document._items), _nmhit_fields(document.root), strict=True):
        if "${" not in item.raw:
            continue
        own = _Uses()
        try:
            value = _value(document, item, uses=own)
        except BuildError:
            value = None  # lazy, as in NEML2: what nobody asks for may be wrong
        uses.fields |= own.fields
        uses.environment |= own.environment
        uses.unset |= own.unset
        same = all(os.environ.get(name) == text for name, text in own.environment.items())
        if value is not None and same and node.param_str() != value:
            raise TaskError(
                f"nmhit expands {item.raw!r} to {node.param_str()!r}, neml2-build to {value!r}",
                file=item.file,
                line=item.line,
                remedy="write this value in a simpler way, and report it",
            )
    return uses


def _shadowed(items: Sequence[_Item], main: Path) -> Iterator[str]:
    """A sentence for each definition that a look-up never finds, since an earlier one has its name."""
    first: dict[tuple[str, str], _Named] = {}
    for top in items:
        inner = top.items if isinstance(top, _Section) else ()
        for prefix, item in [("", top), *((top.name, child) for child in inner)]:
            if not isinstance(item, _Field if not prefix else (_Field, _Section)):
                continue
            known = first.setdefault((prefix, item.name), item)
            if known is not item:
                path = f"{prefix}/{item.name}" if prefix else item.name
                yield (
                    f"{_short(item.file, main)}:{item.line}: {path} is ignored, since the first one counts: "
                    f"{_short(known.file, main)}:{known.line}"
                )


def _read_file(path: Path, chain: tuple[Path, ...], at: tuple[Path, int] | None, files: list[SourceFile]) -> tuple[_Item, ...]:
    """The items of one file with everything that it includes in place; *at* is where it is included."""
    real = Path(os.path.realpath(path))
    if at is not None and real in chain:
        loop = [*chain[chain.index(real) :], real]
        raise TaskError(
            "the files include each other: " + " -> ".join(_short(part, chain[0]) for part in loop),
            file=at[0],
            line=at[1],
            remedy="remove one of these !include lines",
        )
    data = _bytes(path, at)
    if not any(known.path == path for known in files):
        files.append(SourceFile(path, digest(data)))
    text = _decoded(data, path)
    marked, mark, includes = _mark_includes(text)
    top = _parse(marked, path)

    def items_of(node: nmhit.Node) -> Iterator[_Item]:
        for child in node.children():
            kind = child.type()
            if kind == nmhit.NodeType.Field:
                yield _field(child, child.path(), path)
            elif kind == nmhit.NodeType.Section:
                yield _Section(child.path(), tuple(items_of(child)), path, child.line())
            elif kind == nmhit.NodeType.Comment and child.text().startswith(mark):
                number, _, rest = child.text()[len(mark) :].partition(" ")
                included = _absolute(path.parent / includes[int(number)])
                yield from _read_file(included, (*chain, real), (path, child.line()), files)
                if rest.strip():
                    yield _Remark(rest.strip(), child.is_inline())
            elif kind == nmhit.NodeType.Comment:
                yield _Remark(child.text(), child.is_inline())
            else:
                yield _Remark("")

    return tuple(items_of(top))


def _field(node: nmhit.Node, name: str, file: Path) -> _Field:
    raw = node.raw_val()
    written = node.render()[len(node.path()) + len(" = ") : -1]
    return _Field(name, raw, "" if written == raw else written[:3], file, node.line())


def _decoded(data: bytes, path: Path) -> str:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise TaskError(
            f"not UTF-8: byte 0x{data[error.start]:02x}", file=path, line=line, remedy="save the file as UTF-8"
        ) from None
    if text.startswith("\ufeff"):
        raise TaskError(
            "starts with a byte order mark, which nmhit cannot read", file=path, line=1, remedy="save it as UTF-8 without BOM"
        )
    return text


def _bytes(path: Path, at: tuple[Path, int] | None) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        reason = {
            "FileNotFoundError": "does not exist",
            "IsADirectoryError": "is a directory, not an input file",
            "PermissionError": "may not be read: permission denied",
        }.get(type(error).__name__, f"cannot be read: {error.strerror or error}")
        if at is not None:
            raise TaskError(
                f"the included file {str(path)!r} {reason}",
                file=at[0],
                line=at[1],
                remedy="a path after !include is taken relative to the file that holds the line, without quotes",
            ) from None
        kind = RequestError if isinstance(error, (FileNotFoundError, IsADirectoryError)) else TaskError
        remedy = "chmod it readable" if isinstance(error, PermissionError) else "check `input` in the manifest"
        raise kind(f"the input file {reason}", file=path, remedy=remedy) from None


#: What may hold an exclamation mark and is no include; then an include, which ends at a comment or the end of its line.
_TOKENS = re.compile(
    r"(?P<other>'''.*?'''|\"\"\".*?\"\"\"|'[^']*'|\"[^\"]*\"|#[^\n]*)"
    r"|(?<![^\s\]])!include(?=[ \t\r\n#]|$)[ \t]*(?P<path>[^#\n]*)",
    re.DOTALL,
)


def _mark_includes(text: str) -> tuple[str, str, list[str]]:
    """*text* with each ``!include PATH`` turned into a comment, how these comments begin, and the paths.

    nmhit would open the files by itself, relative to the working directory, and never say that they form a cycle.
    """
    paths: list[str] = []
    mark = "#include "
    while mark in text:
        mark = f"#{mark}"

    def marked(match: re.Match[str]) -> str:
        path = (match["path"] or "").strip()
        if match["other"] is not None or not path:
            return match[0]
        paths.append(path)
        return f"{mark}{len(paths) - 1} "

    return _TOKENS.sub(marked, text), mark, paths


def _parse(text: str, path: Path) -> nmhit.Root:
    try:
        return nmhit.parse_text(text)
    except nmhit.Error as error:
        first = error.messages[0]
        raise _syntax_error(first.message, path, first.line or None) from None
    except UnicodeDecodeError as error:
        # nmhit complains byte by byte, and the half of a character is no text: the first character of that kind is it
        line, text = _first_stray_character(text)
        raise _syntax_error(f"unexpected character {text!r}" if text else str(error), path, line) from None


def _syntax_error(message: str, path: Path, line: int | None) -> TaskError:
    remedy = "mend the line"
    if "end of file" in message:
        remedy = "a section may lack the [] that closes it, a value its closing quote"
    elif "newline in section header" in message:
        remedy = "close the name of the section with ]"
    elif "unexpected character" in message:
        remedy = "write NAME = VALUE;" if _lacks_sign(path, line) else "mend the line;"
        remedy += " a value with spaces or quotes needs '...', one with quotes or # inside needs '''...'''"
    elif "duplicate field" in message:
        remedy = "remove one of the two lines, or write := in the second"
    return TaskError(message, file=path, line=line, remedy=remedy)


def _lacks_sign(path: Path, line: int | None) -> bool:
    """Whether *line* of the file has words and no sign between them."""
    try:
        text = path.read_text(encoding="utf-8").splitlines()[(line or 0) - 1]
    except (OSError, UnicodeDecodeError, IndexError):
        return False
    return "=" not in text and not text.strip().startswith("[")


def _first_stray_character(text: str) -> tuple[int | None, str]:
    for number, line in enumerate(text.splitlines(), start=1):
        name = re.match(r"\s*([^\s=:#'\"\[\]]+)\s*:?=", line)
        if name and not name[1].isascii():
            return number, next(character for character in name[1] if not character.isascii())
    return None, ""


def _short(path: Path, first: Path) -> str:
    return os.path.relpath(path, first.parent)


# ── variables and overrides ──────────────────────────────────────────────────────────────────────────────────────────


def _variables(variables: Mapping[str, str], items: Sequence[_Item], main: Path) -> Iterator[_Field]:
    """The fields that NEML2 would get as text before the file."""
    for item in items:
        if isinstance(item, _Field) and item.name in variables:
            raise RequestError(
                f"variable {item.name!r} is given, and the input defines it too",
                file=item.file,
                line=item.line,
                remedy=f'use overrides = ["{item.name}:={variables[item.name]}"] in place of the variable',
            )
    for name, value in variables.items():
        simple = re.fullmatch(r"[\w.+\-*/~]+", value, re.ASCII)
        text = value if simple else _quoted(value) or _verbatim(value)
        try:
            item = _single_field(f"{name} = {text}") if text is not None else None
        except nmhit.Error:
            item = None
        if item is None or item.name != name or "/" in name or _content(item) != value:
            raise RequestError(
                f"variable {name!r} = {value!r} cannot be written in HIT",
                file=main,
                remedy="a plain name, and a value without ${ or triple quotes",
            )
        yield item


def _single_field(text: str) -> _Field | None:
    """The one field that *text* is, its name the whole path; None if it is more or less than that."""
    try:
        root = nmhit.parse_text(text)
    except UnicodeDecodeError:
        return None
    item: nmhit.Node = root
    while item.type() != nmhit.NodeType.Field:
        children = item.children()
        if len(children) != 1 or children[0].type() not in (nmhit.NodeType.Field, nmhit.NodeType.Section):
            return None
        item = children[0]
    return _field(item, item.fullpath(), Path("<manifest>"))


#: The path may lead through sections of any name, but for the characters that end a name.
_OVERRIDE = re.compile(r"\s*(?P<path>[^\s=:'\"\[\]#]+(?::(?!=)[^\s=:'\"\[\]#]+)*)\s*(?P<operator>:?=)(?P<value>.*)", re.DOTALL)


def _override(items: tuple[_Item, ...], text: str, main: Path) -> tuple[_Item, ...]:
    """*items* with the override *text* applied. Raises `RequestError` where it names nothing."""
    head = _OVERRIDE.fullmatch(text)
    segments = head["path"].strip("/").split("/") if head else []
    new, problem = None, ""
    try:
        new = _single_field(f"{segments[-1]} = {head['value']}") if head else None
    except nmhit.Error as error:
        problem = f": {error.messages[0].message}"
    if head is None or new is None or new.name != segments[-1]:
        raise RequestError(
            f"override {text!r} is not PATH:=VALUE{problem}",
            file=main,
            remedy="for example Solvers/newton/abs_tol:=1e-10; a value with spaces needs single quotes",
        )
    adds = head["operator"] == "="

    def applied(level: tuple[_Item, ...], depth: int) -> tuple[_Item, ...] | None:
        """*level* with the field in it; None where the path leads nowhere."""
        place = _place(level, segments[depth:], top=not depth)
        there = level[place] if place is not None else None
        if depth < len(segments) - 1:
            if not isinstance(there, _Section):
                return None
            inner = applied(there.items, depth + 1)
            return None if inner is None else _with(level, place, replace(there, items=inner))
        if isinstance(there, _Field) and adds:
            raise RequestError(
                f"override {text!r} adds a field that is there already",
                file=there.file,
                line=there.line,
                remedy="write := in place of = to replace its value",
            )
        if isinstance(there, _Field):
            return _with(level, place, replace(new, file=there.file, line=there.line))
        return (*level, new) if adds and there is None else None

    changed = applied(items, 0)
    if changed is not None:
        return changed
    parent = "/".join(segments[:-1])
    named = [(path, isinstance(item, _Section)) for path, item in _walk(items)]
    if any(path == parent and section for path, section in named) or not parent:
        known = [path for path, section in named if not section]
        raise RequestError(
            f"override {text!r}: no field {'/'.join(segments)} in the input{_nearest('/'.join(segments), known)}",
            file=main,
            remedy="write = in place of := to add a field that is not there",
        )
    known = [path for path, section in named if section]
    raise RequestError(
        f"override {text!r}: no section [{parent}] in the input{_nearest(parent, known)}",
        file=main,
        remedy="an override changes or adds a field of a section that the input has",
    )


def _with(level: tuple[_Item, ...], place: int | None, item: _Item) -> tuple[_Item, ...]:
    assert place is not None
    return (*level[:place], item, *level[place + 1 :])


def _place(items: Sequence[_Item], segments: list[str], *, top: bool) -> int | None:
    """Index of the item that the path *segments* leads through.

    At the top, of repeated sections the first that holds the second name, as NEML2 looks blocks up; the first at all for
    [Settings], of which NEML2 reads no other, and where none holds it.
    """
    found = [index for index, item in enumerate(items) if item.name == segments[0]]
    if top and len(segments) > 1 and segments[0] != "Settings":
        for index in found:
            item = items[index]
            if isinstance(item, _Section) and any(child.name == segments[1] for child in item.items):
                return index
    return found[0] if found else None


# ── values ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class _Uses:
    """What the expansion of values asked for."""

    fields: set[str] = field(default_factory=set)
    environment: dict[str, str] = field(default_factory=dict)
    unset: dict[str, str] = field(default_factory=dict)


def _content(item: _Field) -> str:
    """The text between the quotes, before expansion."""
    raw = item.raw
    if not item.quotes and len(raw) >= 2 and raw[0] == raw[-1] and raw[0] in "'\"":
        return raw[1:-1]
    return raw


def _value(document: Document, item: _Field, *, uses: _Uses | None = None, chain: tuple[_Field, ...] = ()) -> str:
    """The value of *item* with every ``${...}`` expanded: what nmhit's ``param_str`` gives."""
    text = _content(item)
    if "${" not in text:
        return text
    if item in chain:
        raise TaskError(
            "${...} refers to itself: " + " -> ".join(link.name for link in (*chain, item)),
            file=item.file,
            line=item.line,
            remedy="give one of these fields a value",
        )

    def evaluate(inner: str) -> str:
        words = _words(inner)
        command = words[0] if words and not words[0].startswith("${") else ""
        arguments = words[1:] if command else words
        # nmhit keeps plain words and nested expressions apart: the plain ones come first
        plain = [word for word in arguments if not word.startswith("${")]
        nested = [word for word in arguments if word.startswith("${")]
        if command == "raw":
            return "".join(plain) + "".join(evaluate(word[2:-1]) for word in nested)
        if command in ("env", "replace"):
            name = plain[0] if plain else evaluate(nested[0][2:-1]) if nested else ""
        else:
            name = f"{command} {plain[0]}" if plain else command
        if command == "env":
            return from_environment(name)
        return look_up(name)

    def from_environment(name: str) -> str:
        value = document._environ.get(name)
        if value is None:
            if uses is not None:
                uses.unset.setdefault(name, f"{item.file}:{item.line}")
            raise TaskError(
                f"the environment variable {name!r} is not set",
                file=item.file,
                line=item.line,
                remedy=f"export {name}=..., or override the field that uses it",
            )
        if uses is not None:
            uses.environment[name] = value
        return value

    def look_up(name: str) -> str:
        target = _find(document._items, name) if name else None
        if not isinstance(target, _Field):
            what = "is a section, not a value" if isinstance(target, _Section) else "is nowhere in the input"
            known = [path for path, _ in _walk(document._items) if "/" not in path]
            raise TaskError(
                f"${{{name}}} {what}" + _nearest(name, known),
                file=item.file,
                line=item.line,
                remedy=f'define it, or give it in the manifest: variables = {{ {name} = "..." }}',
            )
        if uses is not None:
            uses.fields.add(name)
        return _value(document, target, uses=uses, chain=(*chain, item))

    return _expanded(text, evaluate, item)


def _expanded(text: str, evaluate: Callable[[str], str], item: _Field) -> str:
    parts: list[str] = []
    position = 0
    while (start := text.find("${", position)) >= 0:
        parts.append(text[position:start])
        position = _closing(text, start)
        if position < 0:
            raise TaskError("${ without its closing brace", file=item.file, line=item.line, remedy="add the brace")
        parts.append(evaluate(text[start + 2 : position - 1]))
    return "".join(parts) + text[position:]


def _closing(text: str, start: int) -> int:
    """Position after the brace that closes the ``${`` at *start*; -1 if there is none."""
    depth, position = 1, start + 2
    while position < len(text):
        if text.startswith("${", position):
            depth, position = depth + 1, position + 2
            continue
        if text[position] == "}":
            depth -= 1
            if not depth:
                return position + 1
        position += 1
    return -1


def _words(text: str) -> list[str]:
    words, position = [], 0
    while position < len(text):
        if text[position] in " \t\n":
            position += 1
            continue
        if text.startswith("${", position):
            end = _closing(text, position)
            end = len(text) if end < 0 else end
        else:
            end = position
            while end < len(text) and text[end] not in " \t\n" and not text.startswith("${", end):
                end += 1
        words.append(text[position:end])
        position = end
    return words


def _find(items: Iterable[_Item], path: str) -> _Named | None:
    """The first item at the slash-separated *path*, without looking further when that one has no such child."""
    head, _, tail = path.partition("/")
    for item in items:
        if item.name == head and not isinstance(item, _Remark):
            if not tail:
                return item
            return _find(item.items, tail) if isinstance(item, _Section) else None
    return None


def _walk(items: Iterable[_Item], prefix: str = "") -> Iterator[tuple[str, _Named]]:
    for item in items:
        if isinstance(item, _Remark):
            continue
        yield prefix + item.name, item
        if isinstance(item, _Section):
            yield from _walk(item.items, f"{prefix}{item.name}/")


def _fields_of(items: Iterable[_Item]) -> Iterator[_Field]:
    return (item for _, item in _walk(items) if isinstance(item, _Field))


def _nearest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, [other for other in known if other != name], n=1, cutoff=0.5)
    return f"; nearest: {close[0]}" if close else ""


# ── models, blocks, reachability ─────────────────────────────────────────────────────────────────────────────────────


def model_names(document: Document) -> tuple[str, ...]:
    """Names of the models, in the order of the file."""
    return _children_of(document, "Models")


def _children_of(document: Document, section: str) -> tuple[str, ...]:
    names: dict[str, None] = {}
    for top in document._items:
        if isinstance(top, _Section) and top.name == section:
            names.update((child.name, None) for child in top.items if isinstance(child, _Section))
    return tuple(names)


def check_model(document: Document, model: str) -> None:
    """Raise `RequestError` with the models that there are, if *model* is none of them."""
    if not isinstance(_block(document, ("Models", model)), _Section):
        raise _unknown("model", "Models", model, model_names(document), document)


def _unknown(what: str, section: str, name: str, names: Sequence[str], document: Document) -> RequestError:
    there = ", ".join(names) if names else "none"
    return RequestError(
        f"no [{section}/{name}] in the input{_nearest(name, names)}",
        file=document.path,
        remedy=f"name one of its {what}s: {there}",
    )


def top_models(document: Document) -> tuple[str, ...]:
    """The models that no other model of the file uses, in the order of the file: what ``model = "*"`` stands for.

    A value that is the name of a model counts as a use of it, even where it means a variable of that name.

    Raises
    ------
    RequestError
        There is none: the file has no models, or each is named by another.
    TaskError
        A value of a model cannot be expanded.
    """
    names = model_names(document)
    references = _References(document)
    used = {
        name
        for model in names
        for section, name in references.closure([("Models", model)]) - {("Models", model)}
        if section == "Models"
    }
    top = tuple(name for name in names if name not in used)
    if not top:
        what = "every model is named by another one" if names else "the input has no [Models]"
        raise RequestError(f'model = "*": {what}', file=document.path, remedy="name the models to build")
    return top


def driver_model(document: Document, driver: str) -> str:
    """The model that ``[Drivers/driver]`` runs: its field ``model``, as ``neml2-compile --driver`` finds it."""
    for top in document._items:
        if not isinstance(top, _Section) or top.name != "Drivers":
            continue
        for block in top.items:
            if isinstance(block, _Section) and block.name == driver:
                found = _find(block.items, "model")
                if isinstance(found, _Field):
                    return _value(document, found)
                inner = _find(block.items, "driver")
                hint = f"; it wraps the driver {_value(document, inner)!r}" if isinstance(inner, _Field) else ""
                raise RequestError(
                    f"[Drivers/{driver}] has no field `model`{hint}",
                    file=block.file,
                    line=block.line,
                    remedy="name a driver that runs a model, or name the model",
                )
    raise _unknown("driver", "Drivers", driver, _children_of(document, "Drivers"), document)


def block_names(document: Document) -> frozenset[Block]:
    """Every (top-level section, name in it) that a look-up can find; the settings are not among them."""
    return frozenset(
        (top.name, child.name)
        for top in document._items
        if isinstance(top, _Section) and top.name != "Settings"
        for child in top.items
        if child.name
    )


def reach(document: Document, model: str, also: Iterable[Block] = ()) -> frozenset[Block]:
    """The blocks that *model* reaches: those that a value of a reached block names, in any section but [Drivers].

    A name counts wherever it stands in a value: as an element of a list, before the dot in ``model.variable``, inside a
    Python expression. That is more than NEML2 follows, never less, but for defaults that stand in no value: see
    `DEFAULT_BLOCKS`, and *also*, the blocks that the exporter was seen to ask for.

    Raises
    ------
    RequestError
        There is no such model.
    TaskError
        A reached value cannot be expanded.
    """
    check_model(document, model)
    known = block_names(document)
    start = {("Models", model.split("/")[0]), *(DEFAULT_BLOCKS & known), *(set(also) & known)}
    return _References(document).closure(start)


class _References:
    """Which block names which, worked out when asked for and then kept."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.blocks: dict[str, list[Block]] = {}
        for block in block_names(document):
            if block[0] not in _NEVER_REFERENCED:
                self.blocks.setdefault(block[1], []).append(block)
        # names that are no single word stand nowhere among the words of a value
        self.odd = [name for name in self.blocks if not re.fullmatch(r"\w+", name)]
        self.known: dict[Block, frozenset[Block]] = {}

    def of(self, block: Block) -> frozenset[Block]:
        if block not in self.known:
            names: set[str] = set()
            for value in _values_of(self.document, block):
                names.update(word for word in re.findall(r"\w+", value) if word in self.blocks)
                names.update(name for name in self.odd if name in value)
            self.known[block] = frozenset(other for name in names for other in self.blocks[name])
        return self.known[block]

    def closure(self, start: Iterable[Block]) -> frozenset[Block]:
        reached: set[Block] = set()
        queue = sorted(start)
        while queue:
            block = queue.pop()
            if block not in reached:
                reached.add(block)
                queue += self.of(block) - reached
        return frozenset(reached)


def _block(document: Document, block: Block) -> _Named | None:
    """The item that NEML2 finds for (section, name): of repeated sections the first that holds the name."""
    for top in document._items:
        if isinstance(top, _Section) and top.name == block[0]:
            found = _find(top.items, block[1])
            if found is not None:
                return found
    return None


def _values_of(document: Document, block: Block) -> Iterator[str]:
    found = _block(document, block)
    for item in _fields_of([found] if found else []):
        yield _value(document, item)


def data_files(document: Document, blocks: Iterable[Block]) -> tuple[Path, ...]:
    """The files that fields named ``csv_file`` of *blocks* name, absolute.

    NEML2 takes them relative to the folder of the main input file, symbolic links resolved, also for included blocks.
    """
    return tuple(dict.fromkeys(path for path, _ in _data_fields(document, blocks)))


def missing_data_files(document: Document, blocks: Iterable[Block]) -> tuple[str, ...]:
    """A sentence for each data file that is not there, with the line that names it.

    No error yet: a block may be in a slice for the sake of a name alone, and NEML2 never open its file.
    """
    return tuple(
        f"{item.file}:{item.line}: the data file {str(path)!r} does not exist"
        for path, item in _data_fields(document, blocks)
        if not path.is_file()
    )


def _data_fields(document: Document, blocks: Iterable[Block]) -> Iterator[tuple[Path, _Field]]:
    folder = document.path.resolve().parent
    for block in sorted(set(blocks)):
        found = _block(document, block)
        for item in _fields_of([found] if found else []):
            if item.name == "csv_file":
                yield folder / _value(document, item), item


# ── the slice ────────────────────────────────────────────────────────────────────────────────────────────────────────


def slice_text(document: Document, blocks: Iterable[Block]) -> str:
    """The canonical, self-contained text of *blocks* and the first [Settings].

    Everything is expanded, comments are gone, values are in single quotes, sections and blocks are sorted (they are looked
    up by name only; the order of fields and blocks inside a block is kept, since a user's own type may walk over them).
    nmhit reads from it the same text, lists and numbers for every field as from the original. The slice of a slice is
    that slice.
    """
    writer = _Writer(document)
    settings = next((top for top in document._items if isinstance(top, _Section) and top.name == "Settings"), None)
    if settings is not None:
        writer.item(settings, 0)
    for section in sorted({section for section, _ in blocks}):
        writer.lines.append(f"[{section}]")
        for name in sorted({name for other, name in blocks if other == section}):
            found = _block(document, (section, name))
            if found is not None:
                writer.item(found, 1)
        writer.lines.append("[]")
    text = "".join(f"{line}\n" for line in (*writer.helpers, *writer.lines))
    _check_slice(text, writer.values, document)
    return text


class _Writer:
    """Lines of a slice, and the top-level fields that hold what no quotes can."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.lines: list[str] = []
        self.helpers: list[str] = []
        self.values: list[str] = []

    def item(self, item: _Named, depth: int) -> None:
        pad = "  " * depth
        if isinstance(item, _Field):
            value = _value(self.document, item)
            self.values.append(value)
            self.lines.append(f"{pad}{item.name} = {self.literal(value, bool(item.quotes))}")
            return
        self.lines.append(f"{pad}[{item.name}]")
        seen: set[str] = set()
        for child in item.items:
            if isinstance(child, _Remark):
                continue
            if isinstance(child, _Field):
                if child.name in seen:
                    continue  # two includes may define a field twice; a look-up finds the first
                seen.add(child.name)
            self.item(child, depth + 1)
        self.lines.append(f"{pad}[]")

    def literal(self, value: str, verbatim: bool) -> str:
        """HIT text whose value is *value*, readable as a list or a number unless *verbatim*."""
        text = _verbatim(value) if verbatim else _quoted(value)
        if text is not None:
            return text
        quotes = "'''" if verbatim else "'"
        return quotes + "".join(f"${{{self.helper(piece)}}}" for piece in _pieces(value)) + quotes

    def helper(self, value: str) -> str:
        name = f"{_HELPER}{len(self.helpers) + 1}"
        self.helpers.append(f"{name} = {_verbatim(value)}")
        return name


_PLAIN = re.compile(r"[\w.+\-*/(),:=~]+(?:[ \n]+[\w.+\-*/(),:=~]+)*|")


def _quoted(value: str) -> str | None:
    """*value* in single quotes if nmhit reads the same back, else None."""
    if _PLAIN.fullmatch(value):
        return f"'{value}'"
    # a ${...} that the value itself holds (an environment variable may) would be expanded, or crash nmhit
    if "'" in value or "${" in value:
        return None
    return f"'{value}'" if _reads_as(f"'{value}'", value) else None


def _verbatim(value: str) -> str | None:
    """*value* in triple quotes if nmhit reads the same back, else None."""
    if "${" in value:
        return None
    for quotes in ("'''", '"""'):
        if quotes not in value and not value.endswith(quotes[0]) and _reads_as(f"{quotes}{value}{quotes}", value):
            return f"{quotes}{value}{quotes}"
    return None


def _reads_as(text: str, value: str) -> bool:
    try:
        root = nmhit.parse_text(f"x = {text}\n")
        return len(root.children()) == 1 and root.param_str("x") == value
    except (nmhit.Error, UnicodeDecodeError):
        return False


def _pieces(value: str) -> list[str]:
    """*value* as a list of texts each of which can stand in triple quotes."""
    if _verbatim(value) is not None:
        return [value]
    return re.findall(r"[^'\"$]+|'+|\"+|\$", value)


def _check_slice(text: str, values: list[str], document: Document) -> None:
    """The last word is nmhit's: it must read from *text* the very values that we meant to write."""
    try:
        root = nmhit.parse_text(text)
        read_back = [item.param_str() for item in _nmhit_fields(root) if item.parent().type() != nmhit.NodeType.Root]
    except (nmhit.Error, UnicodeDecodeError) as error:
        read_back = [str(error)]
    if read_back != values:
        wrong = next((pair for pair in zip(values, read_back, strict=False) if pair[0] != pair[1]), ("", ""))
        raise TaskError(
            f"the input cannot be written back as HIT: {wrong[0]!r} is read as {wrong[1]!r}",
            file=document.path,
            remedy="write this value in a simpler way",
        )


def _nmhit_fields(node: nmhit.Node) -> Iterator[nmhit.Field]:
    for child in node.children():
        if child.type() == nmhit.NodeType.Field:
            yield child
        elif child.type() == nmhit.NodeType.Section:
            yield from _nmhit_fields(child)


# ── what changed ─────────────────────────────────────────────────────────────────────────────────────────────────────


def fields(text: str) -> dict[str, str]:
    """The values of a slice by path: ``{"Models/elasticity/coefficients": "100 0.3", ...}``."""
    result: dict[str, str] = {}
    for item in _nmhit_fields(nmhit.parse_text(text)):
        if item.parent().type() == nmhit.NodeType.Root:
            continue
        path, number = item.fullpath(), 1
        while path in result:
            number += 1
            path = f"{item.fullpath()}#{number}"
        result[path] = item.param_str()
    return result


def diff_fields(before: str, after: str) -> list[str]:
    """What differs between two slices, one line a field: ``Models/elasticity/coefficients: '100 0.3' -> '120 0.3'``."""
    old, new = fields(before), fields(after)
    lines = []
    for path in dict.fromkeys((*old, *new)):
        if path not in new:
            lines.append(f"{path}: {old[path]!r} removed")
        elif path not in old:
            lines.append(f"{path}: {new[path]!r} added")
        elif old[path] != new[path]:
            lines.append(f"{path}: {old[path]!r} -> {new[path]!r}")
    return lines
