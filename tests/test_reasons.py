"""Why something is made again, in words."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from conftest import ROOT

from neml2_build.environment import EXPORT_PACKAGES
from neml2_build.reasons import KINDS, Reason, compare


def test_a_reason_reads_as_its_detail_or_its_meaning() -> None:
    assert str(Reason("input-changed", "a.i changed")) == "input-changed: a.i changed"
    assert str(Reason("forced")) == "forced (asked for with --force)"


def test_every_reason_that_is_given_is_a_known_kind() -> None:
    given = set()
    for path in Path(ROOT, "neml2_build").rglob("*.py"):
        given |= set(re.findall(r'Reason\(\s*"([a-z-]+)"', path.read_text()))
    assert given
    assert given <= set(KINDS)


def test_equal_keys_have_no_reasons() -> None:
    made_of = {"stage": "export", "environment": {"packages": {"torch": {"digest": "1"}}}}
    assert compare(made_of, {"environment": {"packages": {"torch": {"digest": "1"}}}, "stage": "export"}) == ()


def test_nothing_to_compare_with_is_a_first_build() -> None:
    assert compare(None, {}) == (Reason("first-build"),)


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        (("environment", "packages", "torch", "digest"), "torch-changed"),
        (("environment", "packages", "neml2", "version"), "neml2-changed"),
        (("environment", "packages", "nmhit", "version"), "neml2-changed"),
        (("environment", "torch", "digest"), "torch-changed"),
        (("environment", "neml2", "digest"), "neml2-changed"),
        (("environment", "python"), "python-changed"),
        (("environment", "compiler", "version"), "compiler-changed"),
        (("environment", "cpu", "native"), "machine-changed"),
        (("environment", "libc"), "machine-changed"),
        (("environment", "threads"), "environment-changed"),
        (("environment", "variables", "CXXFLAGS"), "environment-changed"),
        (("files", "data/a.csv"), "data-changed"),
        (("files", "ext/mine.py"), "extension-changed"),
        (("slice",), "model-changed"),
        (("graph",), "graph-changed"),
        (("version",), "builder-changed"),
        (("toolchain", "digest"), "builder-changed"),
        (("compiler",), "builder-changed"),
        (("options", "derivatives"), "request-changed"),
        (("inductor", "max_autotune"), "request-changed"),
        (("march",), "request-changed"),
    ],
    ids=".".join,
)
def test_the_kind_of_each_difference(path: tuple[str, ...], kind: str) -> None:
    old: object = "before"
    new: object = "after"
    for step in reversed(path):
        old, new = {step: old}, {step: new}
    (reason,) = compare(old, new)
    assert reason.kind == kind
    name = path[-1] if path[0] == "files" else ".".join(path)
    assert reason.detail == f"{name}: before -> after"


@pytest.mark.parametrize(
    ("path", "said"),
    [
        (("files", "ext/mine.py"), "ext/mine.py"),
        (("graph",), "graph"),
        (("environment", "packages", "torch", "digest"), "torch"),
        (("environment", "compiler", "digest"), "compiler"),
    ],
    ids=".".join,
)
def test_a_digest_is_told_by_the_name_of_its_contents(path: tuple[str, ...], said: str) -> None:
    def key(value: str | None) -> object:
        made_of: object = value
        for step in reversed(path):
            made_of = {step: made_of}
        return made_of

    one, other = "0" * 32, "f" * 32
    assert [reason.detail for reason in compare(key(one), key(other))] == [f"{said} has other contents"]
    assert [reason.detail for reason in compare(key(None), key(other))] == [f"{said} is new"]
    assert [reason.detail for reason in compare(key(one), key(None))] == [f"{said} is gone"]


def test_every_package_of_the_export_key_has_a_reason_of_its_own() -> None:
    for name in EXPORT_PACKAGES:
        (reason,) = compare({"environment": {"packages": {name: "1"}}}, {"environment": {"packages": {name: "2"}}})
        assert reason.kind in ("torch-changed", "neml2-changed")


def test_what_came_and_what_went_is_none() -> None:
    reasons = compare({"files": {"a.csv": "1"}}, {"files": {"b.csv": "2"}})
    assert [reason.detail for reason in reasons] == ["a.csv: 1 -> none", "b.csv: none -> 2"]


def test_long_values_are_cut() -> None:
    (reason,) = compare({"march": "x" * 1000}, {"march": "y"})
    assert len(reason.detail) < 100
