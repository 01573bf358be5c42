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
    name: str
    raw: str
    verbatim: bool
    file: Path
    line: int
    node: nmhit.Node = field(compare=False, repr=False)


@dataclass(frozen=True)
class _Section:
    name: str
    items: tuple[_Item, ...]
    file: Path
    line: int
    node: nmhit.Node = field(compare=False, repr=False)


@dataclass(frozen=True)
class _Remark:
    """A comment or a blank line."""

    text: str
    node: nmhit.Node = field(compare=False, repr=False)
    name: str = ""


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
    main = Path(os.path.abspath(path))
    given = dict(variables or {})
    files: list[SourceFile] = []
    items = _read_file(main, (), None, files)
    _refuse_shadowed(given, items)
    items = (*(_variable(name, value) for name, value in given.items()), *items)
    for text in overrides:
        items = _override(items, text)

    root = nmhit.Root()
    for item in items:
        root.add_child(_rebuilt(item))
    document = Document(root, main, tuple(files), {}, (), items, environ)
    uses = _Uses()
    for found in _fields_of(items):
        try:
            _value(document, found, uses=uses)
        except BuildError:
            pass  # lazy, as in NEML2: a value that nobody asks for may be wrong
    warnings = [
        f"variable {name!r} is not used by {main.name}: no ${{{name}}} in it" for name in given if name not in uses.fields
    ]
    return replace(document, environment=dict(sorted(uses.environment.items())), warnings=tuple(warnings))


def _read_file(path: Path, chain: tuple[Path, ...], at: tuple[Path, int] | None, files: list[SourceFile]):
    """The items of one file with everything that it includes in place."""
    real = path.resolve()
    if real in chain:
        loop = [*chain[chain.index(real) :], real]
        assert at is not None
        raise TaskError(
            "the files include each other: " + " -> ".join(_short(part, chain[0]) for part in loop),
            file=at[0],
            line=at[1],
            remedy="remove one of these !include lines",
        )
    data = _bytes(path, at)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise TaskError(
            f"not UTF-8: byte 0x{data[error.start]:02x}",
            file=path,
            line=data.count(b"\n", 0, error.start) + 1,
            remedy="save the file as UTF-8",
        ) from None
    if text.startswith("\ufeff"):
        raise TaskError(
            "starts with a byte order mark, which nmhit cannot read", file=path, line=1, remedy="save it as UTF-8 without BOM"
        )
    if not any(known.path == path for known in files):
        files.append(SourceFile(path, digest(data)))
    marked, includes = _mark_includes(text)
    top = _parse(marked, path)
    return _items_of(top, path, includes, (*chain, real), files)


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
_MARK = "#\x1finclude "


def _mark_includes(text: str) -> tuple[str, list[str]]:
    """*text* with each ``!include PATH`` turned into a comment that only we write, and the paths.

    nmhit would open the files by itself, relative to the working directory, and forget which text came from where.
    """
    paths: list[str] = []

    def mark(match: re.Match[str]) -> str:
        path = (match["path"] or "").strip()
        if match["other"] is not None or not path:
            return match[0]
        paths.append(path)
        return f"{_MARK}{len(paths) - 1} "

    return _TOKENS.sub(mark, text), paths


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
    elif "unexpected character" in message:
        remedy = "a value with spaces or quotes needs '...', one with quotes or # inside needs '''...'''"
    elif "duplicate field" in message:
        remedy = "remove one of the two lines, or write := in the second"
    return TaskError(message, file=path, line=line, remedy=remedy)


def _first_stray_character(text: str) -> tuple[int | None, str]:
    for number, line in enumerate(text.splitlines(), start=1):
        name = re.match(r"\s*([^\s=:#'\"\[\]]+)\s*:?=", line)
        if name and not name[1].isascii():
            return number, next(character for character in name[1] if not character.isascii())
    return None, ""


def _items_of(
    node: nmhit.Node, path: Path, includes: list[str], chain: tuple[Path, ...], files: list[SourceFile]
) -> tuple[_Item, ...]:
    items: list[_Item] = []
    for child in node.children():
        kind = child.type()
        if kind == nmhit.NodeType.Field:
            raw = child.raw_val()
            plain = child.render() == f"{child.path()} = {raw}\n"
            items.append(_Field(child.path(), raw, not plain, path, child.line(), child))
        elif kind == nmhit.NodeType.Section:
            inner = _items_of(child, path, includes, chain, files)
            items.append(_Section(child.path(), inner, path, child.line(), child))
        elif kind == nmhit.NodeType.Comment and child.text().startswith(_MARK):
            number, _, rest = child.text()[len(_MARK) :].partition(" ")
            included = path.parent / includes[int(number)]
            items += _read_file(Path(os.path.abspath(included)), chain, (path, child.line()), files)
            if rest.strip():
                items.append(_Remark(rest.strip(), nmhit.Comment(rest.strip(), child.is_inline())))
        else:
            items.append(_Remark(child.render(), child))
    return tuple(items)


def _rebuilt(item: _Item) -> nmhit.Node:
    if not isinstance(item, _Section):
        return item.node.clone()
    section = nmhit.Section(item.name)
    for child in item.items:
        section.add_child(_rebuilt(child))
    return section


def _short(path: Path, first: Path) -> str:
    return os.path.relpath(path, first.parent)


# ── variables and overrides ──────────────────────────────────────────────────────────────────────────────────────────


def _refuse_shadowed(variables: Mapping[str, str], items: Sequence[_Item]) -> None:
    for item in items:
        if isinstance(item, _Field) and item.name in variables:
            raise RequestError(
                f"variable {item.name!r} is given, and the input defines it too",
                file=item.file,
                line=item.line,
                remedy=f'use overrides = ["{item.name}:={variables[item.name]}"] in place of the variable',
            )


def _variable(name: str, value: str) -> _Field:
    value = str(value)
    text = value if re.fullmatch(r"[\w.+\-*/~]+", value, re.ASCII) else _quoted(value)
    try:
        item = _single_field(f"{name} = {text}") if text is not None else None
    except nmhit.Error:
        item = None
    if item is None or item.name != name or _content(item) != value:
        raise RequestError(
            f"variable {name!r} = {value!r} cannot be written in HIT", remedy="a plain name, and a value without ${ and quotes"
        )
    return item


def _single_field(text: str) -> _Field | None:
    """The one field that *text* is, its name the whole path; None if it is more or less than that."""
    try:
        item: nmhit.Node = nmhit.parse_text(text)
    except UnicodeDecodeError:
        return None
    path: list[str] = []
    while item.type() != nmhit.NodeType.Field:
        children = item.children()
        if len(children) != 1:
            return None
        item = children[0]
        path.append(item.path())
    raw = item.raw_val()
    plain = item.render() == f"{item.path()} = {raw}\n"
    return _Field("/".join(path), raw, not plain, Path("<override>"), 1, item)


def _override(items: tuple[_Item, ...], text: str) -> tuple[_Item, ...]:
    """*items* with the override *text* applied. Raises `RequestError` where it names nothing."""
    head = re.match(r"\s*([^\s=:'\"\[\]#]+(?::(?!=)[^\s=:'\"\[\]#]+)*)\s*(:?=)", text)
    try:
        new = _single_field(text) if head else None
        problem = ""
    except nmhit.Error as error:
        new, problem = None, f": {error.messages[0].message}"
    if head is None or new is None:
        raise RequestError(
            f"override {text!r} is not PATH:=VALUE{problem}",
            remedy='for example "Solvers/newton/abs_tol:=1e-10"; a value with spaces in single quotes',
        )
    segments = new.name.split("/")
    adds = head[2] == "="
    return _replaced(items, segments, new, adds, text, items)


def _replaced(items, segments: list[str], new: _Field, adds: bool, text: str, everything) -> tuple[_Item, ...]:
    name, rest = segments[0], segments[1:]
    place = _place(items, segments, top=items is everything)
    if not rest:
        if place is None and adds:
            return (*items, replace(new, name=name))
        if place is not None and isinstance(items[place], _Field):
            old = items[place]
            if adds:
                raise RequestError(
                    f"override {text!r} adds a field that is there already",
                    file=old.file,
                    line=old.line,
                    remedy="write := to replace its value",
                )
            return (*items[:place], replace(new, name=name, file=old.file, line=old.line), *items[place + 1 :])
    elif place is not None and isinstance(items[place], _Section):
        inner = _replaced(items[place].items, rest, new, adds, text, everything)
        return (*items[:place], replace(items[place], items=inner), *items[place + 1 :])
    paths = [path for path, _ in _walk(everything)]
    if adds:
        paths = sorted({path.rpartition("/")[0] + f"/{new.name.rpartition('/')[2]}" for path in paths if "/" in path})
    raise RequestError(
        f"override {text!r}: the input has no {'section ' + new.name.rpartition('/')[0] if adds else new.name}"
        + _nearest(new.name, paths),
        remedy=None if adds else "write = in place of := to add a field that the section does not have",
    )


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


def _content(item: _Field) -> str:
    """The text between the quotes, before expansion."""
    raw = item.raw
    if not item.verbatim and len(raw) >= 2 and raw[0] == raw[-1] and raw[0] in "'\"":
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
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
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
    if ("Models", model.split("/")[0]) not in block_names(document):
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
    """
    names = model_names(document)
    used = {name for model in names for section, name in reach(document, model) if section == "Models" and name != model}
    return tuple(name for name in names if name not in used)


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
    sections: dict[str, list[Block]] = {}
    for block in known:
        if block[0] not in _NEVER_REFERENCED:
            sections.setdefault(block[1], []).append(block)
    odd = [name for name in sections if not re.fullmatch(r"\w+", name)]

    start = {("Models", model.split("/")[0])} | (DEFAULT_BLOCKS & known) | (set(also) & known)
    reached: set[Block] = set()
    queue = sorted(start)
    while queue:
        block = queue.pop()
        if block in reached:
            continue
        reached.add(block)
        for value in _values_of(document, block):
            names = {name for name in re.findall(r"\w+", value) if name in sections}
            names.update(name for name in odd if name in value)
            queue += [other for name in names for other in sections[name] if other not in reached]
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
    folder = document.path.resolve().parent
    files: dict[Path, None] = {}
    for block in sorted(set(blocks)):
        found = _block(document, block)
        for item in _fields_of([found] if found else []):
            if item.name == "csv_file":
                files[folder / _value(document, item)] = None
    return tuple(files)


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
            self.lines.append(f"{pad}{item.name} = {self.literal(value, item.verbatim)}")
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
    return f"'{value}'" if "'" not in value and _reads_as(f"'{value}'", value) else None


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
