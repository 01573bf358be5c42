"""The benchmarks' own code: projects, ratios, comparison, and the three forms of the result. No time is asserted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from conftest import ROOT, Project, fake_environment

from neml2_build import hit
from neml2_build.manifest import Manifest
from neml2_build.store import Action, Output, Store

sys.path.insert(0, str(ROOT / "benchmarks"))

import measuring
import projects
import results
import rows
import run
import sameness


def a_row(name: str = "one", **fields: Any) -> results.Row:
    given: dict[str, Any] = {
        "title": f"the row <{name}>",
        "ours": "a",
        "other": "b",
        "unit": "s",
        "ours_values": [1.0, 2.0, 3.0],
        "other_values": [20.0, 10.0, 30.0],
        "ratio": 10.0,
        "goal": 8,
        "at_least": True,
        "warm_up": "none",
        "same": "equal",
    }
    return results.Row(name, **{**given, **fields})


# -- projects ---------------------------------------------------------------------------------------------------------


def test_a_large_project_shares_files_and_is_valid(tmp_path: Path) -> None:
    targets = projects.large(tmp_path, 23)
    assert len({target.name for target in targets}) == 23
    assert [len([one for one in targets if one.input == path]) for path in sorted({one.input for one in targets})] == [
        10,
        10,
        3,
    ]
    loaded = Manifest.load(tmp_path / "neml2-build.toml").targets()
    assert [target.name for target in loaded] == [target.name for target in targets]
    for target in targets:
        assert target.model in hit.model_names(hit.read(tmp_path / target.input))


def test_numbers_are_distinct_unless_asked_otherwise(tmp_path: Path) -> None:
    def stiffnesses(distinct: int | None) -> set[str]:
        text = "".join(projects.models_text(number, first=10 * number, distinct=distinct) for number in range(3))
        return {line for line in text.splitlines() if "coefficients =" in line}

    assert len(stiffnesses(None)) == 30
    assert len(stiffnesses(10)) == 10


def test_a_large_project_builds_and_is_then_up_to_date(tmp_path: Path) -> None:
    projects.large(tmp_path, 12, distinct=10)
    command = [sys.executable, "-m", "neml2_build.cli", "--json"]
    first, second = (
        json.loads(subprocess.run(command, cwd=tmp_path, env=fake_environment(), capture_output=True, check=True).stdout)
        for _ in range(2)
    )
    assert first["targets"]["built"] + first["targets"]["restored"] == 12
    assert first["graphs"]["lowered"] + first["graphs"]["reused"] == 36
    assert second["targets"]["up_to_date"] == 12


def test_plain_doit_has_one_dependency_and_one_target_a_task(tmp_path: Path) -> None:
    projects.plain_doit(tmp_path, 7)
    command = [sys.executable, "-m", "doit", "-v", "0"]
    said = [subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout for _ in range(2)]
    assert said[0].count(".  copy") == 7
    assert said[1].count("-- copy") == 7
    assert len(list((tmp_path / "out").iterdir())) == 7


def test_without_a_suite_the_models_of_the_repository_are_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NEML2_BUILD_SUITE", str(tmp_path))
    name, targets = projects.suite(ROOT)
    assert name == "models/"
    for target in targets:
        assert target.model in hit.model_names(hit.read(Path(target.input)))


# -- measuring --------------------------------------------------------------------------------------------------------


def test_sides_take_turns_and_who_begins_changes() -> None:
    order: list[str] = []

    def side(name: str, seconds: float) -> Any:
        def work() -> measuring.Run:
            order.append(name)
            return measuring.Run(seconds, 0.0)

        return work

    mine, theirs = measuring.in_turn(side("ours", 2.0), side("other", 8.0), 3)
    assert order == ["ours", "other", "other", "ours", "ours", "other"]
    assert measuring.ratio_of_pairs([one.seconds for one in theirs], [one.seconds for one in mine]) == 4.0


def test_the_ratio_is_the_median_of_pairs() -> None:
    assert measuring.ratio_of_pairs([10.0, 100.0, 9.0], [1.0, 2.0, 3.0]) == 10.0


def test_a_command_that_fails_gives_no_figure(tmp_path: Path) -> None:
    with pytest.raises(measuring.Failed, match="exit 3: so it is"):
        measuring.run(["sh", "-c", "echo so it is; exit 3"], cwd=tmp_path, env={"PATH": "/usr/bin:/bin"})


def test_both_sides_get_caches_of_their_own_and_byte_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTHONDONTWRITEBYTECODE", "TORCHINDUCTOR_VEC_ISA_OK", "NEML2_BUILD_COMPILER", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
    found = measuring.environment(tmp_path, MORE="2")
    assert found["TMPDIR"] == str(tmp_path / "tmp")
    assert found["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "inductor")
    assert found["MORE"] == "2"
    assert found["OMP_NUM_THREADS"] == "1"
    assert not {"PYTHONDONTWRITEBYTECODE", "TORCHINDUCTOR_VEC_ISA_OK", "NEML2_BUILD_COMPILER"} & set(found)


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="no smaps_rollup in /proc")
def test_a_tree_holds_what_was_started_by_what_was_started() -> None:
    script = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(1, flush=True); input()'])"
    process = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    tree = measuring.Tree(process.pid)
    assert process.stdout is not None
    process.stdout.readline()
    living = tree.living()
    assert process.pid in living
    assert len(living) == 2
    assert all(measuring.proportional_set(pid) > 2**20 for pid in living)
    process.communicate(b"\n")
    assert tree.living() == []


# -- comparing --------------------------------------------------------------------------------------------------------


def tree(folder: Path, metadata: str, *names: str) -> Path:
    folder.mkdir()
    (folder / "metadata.json").write_text(metadata)
    for name in names:
        (folder / name).write_bytes(b"")
    return folder


def test_trees_are_compared_by_names_and_metadata(tmp_path: Path) -> None:
    ours = tree(tmp_path / "ours", '{"a": 1, "b": 2}', "x.pt2")
    assert sameness.trees(ours, tree(tmp_path / "same", '{"b": 2,\n"a": 1}', "x.pt2")) == []
    assert sameness.trees(ours, tree(tmp_path / "other", '{"a": 2}', "y.pt2")) == [
        "only ours has x.pt2",
        "only the other has y.pt2",
        "metadata.json differs",
    ]


def test_the_verdict_names_what_differs() -> None:
    good = {"models": 2, "worst": 0.0, "bitwise": 2, "odd": {}}
    assert sameness.verdict({"a": []}, good, 2).startswith("equal: names and metadata of 2; numbers of 2")
    assert sameness.verdict({"a": ["metadata.json differs"]}, good, 2).startswith("DIFFERENT: a: metadata")
    assert sameness.verdict({}, {**good, "worst": 1e-3}, 2).startswith("DIFFERENT")
    assert sameness.verdict({}, {**good, "odd": {"m": ["no", "no"]}}, 2).endswith("1 fail alike")
    assert sameness.verdict({}, {**good, "odd": {"m": ["no", ""]}}, 2).startswith("DIFFERENT: m")
    assert sameness.verdict({}, {**good, "odd": {"all": "it crashed"}}, 2).startswith("DIFFERENT: all: it crashed")


def test_forgetting_results_keeps_what_is_made_once_a_machine(project: Project) -> None:
    project.build()
    with Store(project.cache) as store:
        known, size = store.put(b"{}")
        made = (Output("answer.json", known, size),)
        probe = Action(key="a" * 32, stage="probe", target="", outputs=made, made_of={}, seconds=11.0, created=0.0, info={})
        store.record(probe)
    piece = project.write("cache/toolchain/piece", "made once")
    rows.forget_results(project.root)
    with Store(project.cache) as store:
        assert store.find(probe.key) is not None
        assert store.read(known) == b"{}"
    assert piece.exists()
    assert not project.aoti.exists()
    assert [path.parent.name + path.name for path in (project.cache / "objects").rglob("*") if path.is_file()] == [known]
    assert project.build().targets == {"built": 1}


# -- the three forms --------------------------------------------------------------------------------------------------


def test_a_row_knows_its_goal_in_both_senses() -> None:
    faster = a_row(ratio=10.0, goal=8, at_least=True)
    part = a_row(ratio=0.25, goal=0.45, at_least=False)
    assert (faster.reached, faster.times_less, faster.goal_times_less) == (True, 10.0, 8)
    assert (part.reached, part.times_less, part.goal_times_less) == (True, 4.0, 1 / 0.45)
    assert not a_row(ratio=7.9).reached
    assert not a_row(ratio=0.46, goal=0.45, at_least=False).reached


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "0"), (0.01234, "0.0123"), (0.5, "0.500"), (12.34, "12.3"), (123.4, "123"), (4567.8, "4568")]
)
def test_numbers_have_three_digits(value: float, text: str) -> None:
    assert results.number(value) == text


def test_rows_measured_again_replace_themselves(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    results.save(file, results.merged(file, [a_row("one"), a_row("two")]), {"cpu": "x"})
    results.save(file, results.merged(file, [a_row("three"), a_row("one", ratio=5.0)]), {"cpu": "x"})
    found = results.read(file)
    assert [(row.name, row.ratio) for row in found] == [("one", 5.0), ("two", 10.0), ("three", 10.0)]
    assert found[1] == a_row("two")


def test_the_picture_has_a_bar_and_a_mark_for_every_row() -> None:
    picture = results.svg([a_row("one"), a_row("two", ratio=0.25, goal=0.5, at_least=False)], {"cpu": "x & y"})
    root = ElementTree.fromstring(picture)
    space = "{http://www.w3.org/2000/svg}"
    bars = root.findall(f"{space}rect")
    assert [bar.get("class") for bar in bars] == ["good", "good"]
    assert len([line for line in root.findall(f"{space}line") if line.get("class") == "goal"]) == 2
    wide, narrow = (float(bar.get("width", "0")) for bar in bars)
    assert wide / narrow == pytest.approx(1.661, rel=1e-2)  # log 10 / log 4


def test_the_command_shows_what_a_file_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.json"
    results.save(file, [a_row("one"), a_row("two", ratio=2.0)], {})
    picture = tmp_path / "rows.svg"
    assert run.main(["--show", "--json", str(file), "--svg", str(picture)]) == 0
    assert ElementTree.fromstring(picture.read_text()) is not None
    assert "10.0 x" in capsys.readouterr().out
    assert run.main(["--show", "--json", str(file), "--markdown"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == "| the row <one> | 2.00 s (of 3) | 20.0 s (of 3) | **10.0 x** | >= 8 x | 0 |"
    assert "| 2.00 x | >= 8 x |" in lines[3]


def test_what_could_not_be_measured_is_told_and_no_figure_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(bench: rows.Bench) -> list[results.Row]:
        raise measuring.Failed("the compiler is not there")

    monkeypatch.setattr(
        rows, "ROWS", {"bad": fails, "good": lambda bench: [a_row()], "odd": lambda bench: [a_row("odd", same="DIFFERENT")]}
    )
    assert run.main(["--only", "good"]) == 0
    assert run.main(["--only", "bad", "--only", "good"]) == 1
    assert "bad: the compiler is not there" in capsys.readouterr().err
    assert run.main(["--only", "odd"]) == 1
