"""Why something is made again: recorded by whoever decides, as a name and a detail in the user's terms.

The names are few and fixed, since statistics count them; the detail is what `explain` prints.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import msgspec

#: Name → what it means.
KINDS = {
    "first-build": "nothing of this target has been built here",
    "forced": "asked for with --force",
    "input-changed": "the input file or a file that it includes changed",
    "model-changed": "the part of the input file that the model reaches changed",
    "data-changed": "a data file that the model reads changed",
    "extension-changed": "an extension module changed",
    "request-changed": "an option in the manifest changed",
    "variable-changed": "an environment variable that the input file uses changed",
    "neml2-changed": "another NEML2, nmhit or pyzag is installed",
    "torch-changed": "another torch is installed",
    "python-changed": "another Python runs the build",
    "compiler-changed": "another C++ compiler is used",
    "machine-changed": "this CPU or C library is not the one that the code was made for",
    "environment-changed": "an environment variable that inductor or the compiler reads changed",
    "builder-changed": "this neml2-build makes it differently",
    "graph-changed": "a captured graph changed",
    "metadata-changed": "the metadata changed",
    "package-changed": "a compiled graph or the metadata changed",
    "stub-changed": "the text of the stub changed",
    "not-verified": "the manifest asks for verification, and a graph was not compared yet",
    "output-missing": "a published file is missing",
    "output-changed": "a published file is not what was published",
    "store-missing": "a result is no longer in the store",
    "unreadable-record": "the record of the last build cannot be read",
    "stage-before": "a stage that this one reads the results of must be done first",
    "not-in-store": "the store has no result for this key",
}


class Reason(msgspec.Struct, frozen=True):
    """One reason: *kind*, a name of `KINDS`; *detail*, in the user's terms."""

    kind: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}" if self.detail else f"{self.kind} ({KINDS[self.kind]})"


def compare(old: Any, new: Any) -> tuple[Reason, ...]:
    """Why two keys differ, given what they were made of."""
    if not isinstance(old, dict) or not isinstance(new, dict):
        return (Reason("first-build"),)
    reasons: list[Reason] = []
    for path, before, after in _differences(old, new):
        reasons.append(Reason(_kind(path), _detail(path, before, after)))
    return tuple(reasons)


def _detail(path: tuple[str, ...], before: Any, after: Any) -> str:
    """What changed at *path*; two digests say nothing to a reader, so the name of what they are of stands for them."""
    name = path[-1] if path[0] == "files" else ".".join(path)
    if not (_is_digest(before) or _is_digest(after)):
        return f"{name}: {_short(before)} -> {_short(after)}"
    name = name.removesuffix(".digest").removeprefix("environment.").removeprefix("packages.")
    if before is None or after is None:
        return f"{name} is {'new' if before is None else 'gone'}"
    return f"{name} has other contents"


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{32}", value) is not None


def _differences(old: Any, new: Any, path: tuple[str, ...] = ()) -> Iterable[tuple[tuple[str, ...], Any, Any]]:
    if isinstance(old, dict) and isinstance(new, dict):
        for name in sorted({*old, *new}):
            yield from _differences(old.get(name), new.get(name), (*path, str(name)))
    elif old != new:
        yield path, old, new


def _kind(path: tuple[str, ...]) -> str:
    """The name of a difference at *path* in what an export or lower key is made of."""
    top, *rest = path
    if top == "environment":
        part = rest[0] if rest else ""
        package = rest[1] if part == "packages" and len(rest) > 1 else part
        if package in ("torch", "triton"):
            return "torch-changed"
        if package in ("neml2", "nmhit", "pyzag", "numpy"):
            return "neml2-changed"
        named = {
            "python": "python-changed",
            "compiler": "compiler-changed",
            "cpu": "machine-changed",
            "libc": "machine-changed",
        }
        return named.get(part, "environment-changed")
    if top == "files":
        return "extension-changed" if path[-1].endswith(".py") else "data-changed"
    named = {
        "slice": "model-changed",
        "graph": "graph-changed",
        "version": "builder-changed",
        "toolchain": "builder-changed",
        "compiler": "builder-changed",
    }
    return named.get(top, "request-changed")


def _short(value: Any) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
