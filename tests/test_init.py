"""The manifest that init writes: it loads, and it builds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from neml2_build.cli import main
from neml2_build.init import DODO, IGNORED, find_inputs, manifest_text
from neml2_build.manifest import FILE_NAME, Manifest

LEAF = "[Models]\n  [{name}]\n    type = {type}\n    value = {value}\n  []\n[]\n"


def write(root: Path, name: str, *, model: str = "eq", kind: str = "A", value: str = "1", more: str = "") -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(LEAF.format(name=model, type=kind, value=value) + more)


def command(root: Path, monkeypatch, *arguments: str) -> int:
    monkeypatch.setenv("NEML2_BUILD_COMPILER", "fake")
    monkeypatch.chdir(root)
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    return int(ended.value.code or 0)


def targets(root: Path) -> dict[str, str]:
    return {target.name: f"{target.input_ref}:{target.model}" for target in Manifest.load(root / FILE_NAME).targets()}


def test_every_input_becomes_an_entry_and_builds(tmp_path, monkeypatch, capsys):
    write(tmp_path, "a.i", model="one")
    write(tmp_path, "sub/b.i", model="two", more="[Drivers]\n  [run]\n    type = D\n    model = 'two'\n  []\n[]\n")
    (tmp_path / "c.i").write_text("[Models]\n  [x]\n    type = A\n  []\n  [y]\n    type = A\n  []\n[]\n")
    assert command(tmp_path, monkeypatch, "init", "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["targets"], said["skipped"]) == (4, [])
    assert targets(tmp_path) == {"one": "a.i:one", "two": "sub/b.i:two", "x": "c.i:x", "y": "c.i:y"}
    assert "# driver = \"run\"   # in place of model: runs 'two'" in (tmp_path / FILE_NAME).read_text()
    assert command(tmp_path, monkeypatch, "build", "--json") == 0
    assert json.loads(capsys.readouterr().out)["targets"]["built"] == 4


def test_targets_have_names_of_their_own(tmp_path, monkeypatch):
    for name in ("p/model.i", "q/model.i", "r.i", "EQ.i"):
        write(tmp_path, name, model="eq")
    (tmp_path / "two.i").write_text("[Models]\n  [eq]\n    type = A\n  []\n  [other]\n    type = A\n  []\n[]\n")
    write(tmp_path, "odd name (1).i", model="eq")
    assert command(tmp_path, monkeypatch, "init") == 0
    assert set(targets(tmp_path)) == {"model", "q-model", "r", "EQ", "two-eq", "two-other", "odd-name-1"}


def test_what_cannot_be_built_is_a_comment_with_its_reason(tmp_path, monkeypatch, capsys):
    write(tmp_path, "good.i")
    (tmp_path / "broken.i").write_text("[Models]\n  [a]\n    type = \n")
    (tmp_path / "mesh.i").write_text("[Mesh]\n  type = M\n[]\n")
    (tmp_path / "loop.i").write_text("!include loop.i\n")
    assert command(tmp_path, monkeypatch, "init", "--json") == 0
    skipped = {one["input"]: one["reason"] for one in json.loads(capsys.readouterr().out)["skipped"]}
    assert set(skipped) == {"broken.i", "mesh.i", "loop.i"} and skipped["mesh.i"] == "it has no [Models]"
    text = (tmp_path / FILE_NAME).read_text()
    assert all(f"#   {name}: " in text for name in skipped)
    assert list(targets(tmp_path)) == ["eq"]


def test_variables_are_offered(tmp_path, monkeypatch):
    write(tmp_path, "good.i", model="fine")
    write(tmp_path, "needy.i", model="needy", value="'${E} ${nu}'")
    assert command(tmp_path, monkeypatch, "init") == 0
    text = (tmp_path / FILE_NAME).read_text()
    assert list(targets(tmp_path)) == ["fine"]
    assert '# variables = { E = "...", nu = "..." }' in text
    entry = text[text.index("# [[model]]\n") :]
    (tmp_path / FILE_NAME).write_text("".join(line.removeprefix("# ") + "\n" for line in entry.splitlines()))
    assert [(t.name, t.variables) for t in Manifest.load(tmp_path / FILE_NAME).targets()] == [
        ("needy", {"E": "...", "nu": "..."})
    ]


def test_includes_stubs_and_other_folders_are_no_inputs(tmp_path):
    write(tmp_path, "main.i", more="!include parts/solver.i\n")
    write(tmp_path, "parts/solver.i", model="unused")
    write(tmp_path, "eq_aoti.i", kind="AOTIModel")
    write(tmp_path, "renamed.i", kind="AOTIModel")
    for folder in ("aoti", "cache", ".git", "node_modules", "env"):
        write(tmp_path, f"{folder}/x.i")
    (tmp_path / "env" / "pyvenv.cfg").write_text("")
    assert [found.path for found in find_inputs(tmp_path)] == ["main.i"]


def test_types_of_the_users_own_are_loaded(tmp_path):
    write(tmp_path, "a.i", kind="SoftPlus")
    (tmp_path / "types.py").write_text(
        'from neml2.factory import register_neml2_object\n@register_neml2_object("SoftPlus")\nclass S: ...\n'
    )
    (tmp_path / "plot.py").write_text("import neml2  # SoftPlus\n")
    found = find_inputs(tmp_path)
    assert found[0].load == ("types.py",) and 'load = ["types.py"]' in manifest_text(found)


def test_nothing_is_overwritten_without_force(tmp_path, monkeypatch, capsys):
    write(tmp_path, "a.i")
    (tmp_path / "dodo.py").write_text("mine")
    assert command(tmp_path, monkeypatch, "init", "--dodo") == 2
    assert "--force" in capsys.readouterr().err and not (tmp_path / FILE_NAME).exists()
    assert command(tmp_path, monkeypatch, "init") == 0
    before = (tmp_path / FILE_NAME).read_text()
    assert command(tmp_path, monkeypatch, "init") == 2
    assert (tmp_path / FILE_NAME).read_text() == before and (tmp_path / "dodo.py").read_text() == "mine"
    assert command(tmp_path, monkeypatch, "init", "--dodo", "--force") == 0
    assert (tmp_path / "dodo.py").read_text() == DODO and len(DODO.splitlines()) == 3


def test_gitignore_gets_the_lines_that_it_lacks(tmp_path, monkeypatch):
    write(tmp_path, "a.i")
    (tmp_path / ".gitignore").write_text("*.o\n/cache/")
    for _ in range(2):
        assert command(tmp_path, monkeypatch, "init", "--gitignore", "--force") == 0
    assert (tmp_path / ".gitignore").read_text().splitlines() == [
        "*.o",
        "/cache/",
        *(line for line in IGNORED if line != "/cache/"),
    ]


def test_another_folder_and_an_empty_one(tmp_path, monkeypatch, capsys):
    write(tmp_path, "inner/a.i")
    (tmp_path / "empty").mkdir()
    assert command(tmp_path, monkeypatch, "init", "inner") == 0
    assert "cd inner && neml2-build'" in capsys.readouterr().err and targets(tmp_path / "inner") == {"eq": "a.i:eq"}
    assert command(tmp_path, monkeypatch, "init", "empty") == 2
    (tmp_path / "empty" / "bad.i").write_text("[")
    assert command(tmp_path, monkeypatch, "init", "empty") == 2
    assert "bad.i: " in capsys.readouterr().err


def test_odd_paths_are_written_as_toml(tmp_path, monkeypatch):
    write(tmp_path, 'a "quoted" \\ name ü.i', model="eq")
    assert command(tmp_path, monkeypatch, "init") == 0
    assert list(targets(tmp_path).values()) == ['a "quoted" \\ name ü.i:eq']
