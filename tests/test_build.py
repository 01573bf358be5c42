"""One build after another, with the fake compiler: what is made, restored and left alone, and why."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
from conftest import INPUT, Project, digests, listing

from neml2_build import hit
from neml2_build.compiler import FakeCompiler
from neml2_build.errors import RequestError
from neml2_build.manifest import Model
from neml2_build.target import TargetRun


class TestFirstBuild:
    def test_every_stage_runs_once_and_the_tree_is_neml2s(self, project: Project) -> None:
        done = project.build()
        assert done.targets == {"built": 1}
        assert done.graphs == (2, 0)
        assert done.calls == {"export": 1, "lower": 2}
        assert done.ran() == ["parse", "export", "lower-cpu", "package", "stub"]
        assert sorted(project.tree()) == [
            "eq/cpu/float64/eq_one.pt2",
            "eq/cpu/float64/eq_two.pt2",
            "eq/metadata.json",
            "eq_aoti.i",
        ]
        assert json.loads((project.aoti / "eq/metadata.json").read_bytes())["graphs"] == ["eq_one.pt2", "eq_two.pt2"]

    def test_published_files_are_readable_by_others_and_nothing_else_lies_about(self, project: Project) -> None:
        project.build()
        mask = os.umask(0)
        os.umask(mask)
        for path in project.aoti.rglob("*"):
            assert path.stat().st_mode & 0o777 & ~mask == path.stat().st_mode & 0o777
            assert path.stat().st_mode & 0o044 == 0o044 & ~mask, path
        assert {path.name for path in project.aoti.iterdir()} == {"eq", "eq_aoti.i"}

    def test_the_second_build_does_nothing(self, project: Project) -> None:
        project.build()
        before = listing(project.aoti)
        again = project.build()
        assert again.targets == {"up_to_date": 1}
        assert not again.calls
        assert again.graphs == (0, 0)
        assert listing(project.aoti) == before

    def test_a_null_build_with_trusted_stats_reads_no_input(
        self, project: Project, trust_stats: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        project.build()
        monkeypatch.setattr("neml2_build.records.digest_file", lambda path: pytest.fail(f"{path} was read"))
        again = project.start()
        assert all(run.current() for run in again.runs.values())
        again.close()

    def test_a_null_build_writes_nothing(self, project: Project, trust_stats: None) -> None:
        project.build()
        project.build()
        before = listing(project.root)
        assert project.build().targets == {"up_to_date": 1}
        assert listing(project.root) == before


class TestSharing:
    def test_two_targets_with_the_same_graphs_compile_them_once(self, project: Project) -> None:
        project.models.append(Model(input="a.i", model="eq", name="twin"))
        done = project.build()
        assert done.calls["lower"] == 2
        assert done.graphs == (2, 2)
        tree = project.tree()
        assert tree["eq/cpu/float64/eq_one.pt2"] == tree["twin/cpu/float64/eq_one.pt2"]

    def test_one_graph_twice_in_one_target_is_compiled_once(self, project: Project) -> None:
        project.edit("a.i", ("from = 'b'", "from = 'a'"), ("factor = 2.5", "factor = 1.5"))
        done = project.build()
        assert done.calls["lower"] == 1
        assert done.graphs == (1, 1)

    def test_a_target_added_later_reuses_what_another_compiled(self, project: Project) -> None:
        project.build()
        project.models.append(Model(input="a.i", model="one", name="single"))
        done = project.build()
        assert done.targets == {"built": 1, "up_to_date": 1}
        assert done.calls == {"export": 1}
        assert done.graphs == (0, 1)

    def test_two_projects_share_a_store(self, project: Project, tmp_path: Path) -> None:
        project.options["cache"] = str(tmp_path / "shared")
        project.build()
        other = Project(tmp_path / "other")
        other.options["cache"] = str(tmp_path / "shared")
        done = other.build()
        assert done.targets == {"restored": 1}
        assert not done.calls
        assert done.graphs == (0, 2)
        assert other.tree() == project.tree()
        assert project.build().targets == {"up_to_date": 1}


class TestPublished:
    def test_removed_output_is_restored_without_compiling(self, project: Project) -> None:
        project.build()
        before = project.tree()
        shutil.rmtree(project.aoti)
        done = project.build()
        assert done.targets == {"restored": 1}
        assert not done.calls
        assert project.tree() == before
        assert "output-missing" in done.why("package")

    @pytest.mark.parametrize("name", ["eq/metadata.json", "eq/cpu/float64/eq_one.pt2", "eq_aoti.i"])
    @pytest.mark.parametrize("damage", ["missing", "truncated", "edited"])
    @pytest.mark.parametrize("trusting", [False, True])
    def test_a_damaged_output_is_repaired_and_named(
        self, project: Project, name: str, damage: str, trusting: bool, request: pytest.FixtureRequest
    ) -> None:
        if trusting:
            request.getfixturevalue("trust_stats")
        project.build()
        before = project.tree()
        path = project.aoti / name
        data = path.read_bytes()
        if damage == "missing":
            path.unlink()
        else:
            path.write_bytes(data[:-1] if damage == "truncated" else data[:-1] + b"!")
        done = project.build()
        assert done.targets == {"restored": 1}
        assert not done.calls
        assert project.tree() == before
        stage = "stub" if name == "eq_aoti.i" else "package"
        assert ("output-missing" if damage == "missing" else "output-changed") in done.why(stage)
        assert name in done.why(stage)

    def test_graphs_of_an_earlier_shape_are_gone(self, project: Project) -> None:
        project.build()
        project.edit("a.i", ("models = 'one two'", "models = 'one other'"))
        project.build()
        assert sorted(path.name for path in project.aoti.rglob("*.pt2")) == ["eq_one.pt2", "eq_other.pt2"]

    def test_a_foreign_file_in_a_published_folder_goes_when_the_folder_is_made_again(self, project: Project) -> None:
        project.build()
        (project.aoti / "eq" / "notes.txt").write_text("mine")
        project.edit("a.i", ("factor = 1.5", "factor = 1.75"))
        project.build()
        assert "eq/notes.txt" not in project.tree()

    def test_a_target_without_a_stub(self, project: Project) -> None:
        project.models = [Model(input="a.i", model="eq", stub=False)]
        done = project.build()
        assert list(done.stages["eq"]) == ["parse", "export", "lower-cpu", "package"]
        assert not (project.aoti / "eq_aoti.i").exists()


class TestStore:
    def test_a_deleted_cache_is_made_again_and_says_why(self, project: Project) -> None:
        project.build()
        before = project.tree()
        shutil.rmtree(project.cache)
        done = project.build()
        assert done.targets == {"built": 1}
        assert done.why("parse").startswith("first-build")
        assert project.tree() == before

    def test_a_deleted_snapshot_costs_nothing(self, project: Project, trust_stats: None) -> None:
        project.build()
        for path in project.cache.rglob("snapshot.bin"):
            path.unlink()
        again = project.build()
        assert again.targets == {"up_to_date": 1}
        assert not again.calls
        assert list(project.cache.rglob("snapshot.bin"))

    @pytest.mark.parametrize("junk", [b"", b"\x00\xff junk", b"{}"])
    def test_a_broken_snapshot_or_record_is_a_miss_not_a_crash(self, project: Project, junk: bytes) -> None:
        project.build()
        for path in [*project.cache.rglob("snapshot.bin"), *(project.cache / "targets").rglob("*.json")]:
            path.write_bytes(junk)
        again = project.build()
        assert again.summary["ok"]
        assert not again.calls
        assert again.targets == {"restored": 1}

    def test_a_flipped_byte_in_any_object_is_noticed_or_not_needed(self, project: Project) -> None:
        project.build()
        before = project.tree()
        for path in sorted((project.cache / "objects").rglob("*")):
            if not path.is_file():
                continue
            data = path.read_bytes()
            path.chmod(0o644)
            path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
            shutil.rmtree(project.aoti)
            done = project.build()
            assert done.summary["ok"], path
            assert project.tree() == before, path

    def test_every_object_lost_at_once(self, project: Project) -> None:
        project.build()
        before = project.tree()
        shutil.rmtree(project.cache / "objects")
        done = project.build()
        assert done.summary["ok"]
        assert project.tree() == before
        shutil.rmtree(project.aoti)
        assert project.build().summary["ok"]
        assert project.tree() == before

    def test_a_lost_program_is_captured_again_when_it_is_to_be_lowered(self, project: Project, look: dict[str, Any]) -> None:
        project.build()
        programs = [
            action for action in (project.cache / "actions").rglob("*.json") if b'"stage":"export"' in action.read_bytes()
        ]
        assert programs
        for path in (project.cache / "objects").rglob("*"):
            if path.is_file() and not path.read_bytes().startswith((b"fake ", b"{", b"#", b"\n", b"[M")):
                path.unlink()
        look["libc"] = "glibc 0.1"
        done = project.build()
        assert done.summary["ok"]
        assert done.calls["lower"] == 2


class TestForce:
    def test_force_makes_everything_again_to_the_same_bytes(self, project: Project) -> None:
        project.build()
        before = project.tree()
        done = project.build(force=True)
        assert done.targets == {"built": 1}
        assert done.calls == {"export": 1, "lower": 2}
        assert project.tree() == before
        assert done.why("export").startswith("forced")


class TestSelection:
    def test_patterns_and_names(self, project: Project) -> None:
        project.models = [Model(input="a.i", model=name) for name in ("one", "two", "other")]
        build = project.start()
        assert [run.target.name for run in build.select(["o*"])] == ["one", "other"]
        assert [run.target.name for run in build.select(["two", "one"])] == ["two", "one"]
        with pytest.raises(RequestError, match="no target named 'othre'") as caught:
            build.select(["othre"])
        assert caught.value.remedy == "did you mean 'other'?"
        build.close()

    def test_only_what_is_named_is_built(self, project: Project) -> None:
        project.models = [Model(input="a.i", model=name) for name in ("one", "two", "other")]
        done = project.build("two")
        assert done.calls == {"export": 1, "lower": 1}
        assert set(project.tree()) == {"two/cpu/float64/two_two.pt2", "two/metadata.json", "two_aoti.i"}

    def test_a_target_that_left_the_manifest_leaves_the_others_alone(self, project: Project) -> None:
        project.models = [Model(input="a.i", model=name) for name in ("one", "two")]
        project.build()
        project.models.pop()
        assert project.build().targets == {"up_to_date": 1}
        assert (project.aoti / "two").exists()


class TestFailures:
    def fail(self, project: Project, stage: str) -> None:
        project.write("bad.i", INPUT.replace("factor = 2.5", f"factor = 2.5\n    fail = '{stage}'"))
        project.models = [Model(input="bad.i", model="eq", name="bad"), Model(input="a.i", model="eq", name="good")]

    @pytest.mark.parametrize("stage", ["export", "lower"])
    def test_others_are_built_with_keep_going(self, project: Project, stage: str) -> None:
        self.fail(project, stage)
        done = project.build(keep_going=True)
        assert done.targets == {"built": 1, "failed": 1}
        assert not done.summary["ok"]
        (failure,) = done.summary["failures"]
        assert failure["target"] == "bad"
        assert failure["stage"] == ("export" if stage == "export" else "lower-cpu")
        assert "told to fail" in failure["message"]
        assert "good/metadata.json" in project.tree()
        assert not (project.aoti / "bad").exists()

    @pytest.mark.parametrize("stage", ["export", "lower"])
    def test_failures_are_not_cached_and_what_was_there_stays(self, project: Project, stage: str) -> None:
        project.build()
        before = project.tree()
        project.edit("a.i", ("factor = 2.5", f"factor = 2.5\n    fail = '{stage}'"))
        first = project.build()
        assert first.targets == {"failed": 1}
        assert project.tree() == before
        second = project.build()
        assert second.targets == {"failed": 1}
        assert second.calls[stage] == 1
        project.write("a.i", INPUT)
        healed = project.build()
        assert healed.summary["ok"]
        assert not healed.calls
        assert project.tree() == before

    def test_the_good_graphs_of_a_failed_target_are_kept(self, project: Project) -> None:
        project.edit("a.i", ("factor = 2.5", "factor = 2.5\n    fail = 'lower'"))
        assert project.build().targets == {"failed": 1}
        project.edit("a.i", ("\n    fail = 'lower'", ""))
        done = project.build()
        assert done.graphs == (1, 1)

    def test_two_targets_that_share_a_failing_graph_each_say_so_once(self, project: Project) -> None:
        self.fail(project, "lower")
        project.models.append(Model(input="bad.i", model="eq", name="worse"))
        done = project.build(keep_going=True)
        assert done.targets == {"built": 1, "failed": 2}
        assert {failure["target"] for failure in done.summary["failures"]} == {"bad", "worse"}
        for failure in done.summary["failures"]:
            assert failure["message"].count("eq_two.pt2") == 1
            assert f"lower-cpu:{failure['target']}" in failure["message"]

    def test_a_defect_is_a_failure_of_its_target(self, project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fail(project, "nothing")
        stock = FakeCompiler._export

        def broken(self: FakeCompiler, request: Any) -> Any:
            if request.target == "bad":
                raise ZeroDivisionError("a defect")
            return stock(self, request)

        monkeypatch.setattr(FakeCompiler, "_export", broken)
        done = project.build(keep_going=True)
        assert done.targets == {"built": 1, "failed": 1}
        assert "ZeroDivisionError: a defect" in done.summary["failures"][0]["message"]


class TestWhileItIsBuilt:
    def test_an_input_edited_during_the_build_is_noticed_by_the_next(
        self, project: Project, monkeypatch: pytest.MonkeyPatch, trust_stats: None
    ) -> None:
        stock = FakeCompiler._export

        def edit_then_export(self: FakeCompiler, request: Any) -> Any:
            project.edit("a.i", ("factor = 1.5", "factor = 7.5"))
            return stock(self, request)

        with monkeypatch.context() as patch:
            patch.setattr(FakeCompiler, "_export", edit_then_export)
            first = project.build()
        assert first.targets == {"built": 1}
        published = project.tree()
        second = project.build()
        assert second.targets == {"built": 1}
        assert second.graphs == (1, 1)
        assert project.tree() != published
        fresh = Project(project.root.parent / "fresh")
        fresh.write("a.i", (project.root / "a.i").read_text())
        fresh.build()
        assert fresh.tree() == project.tree()

    def test_an_input_edited_back_and_forth_during_the_build(self, project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
        stock = FakeCompiler._export

        def edit_then_export(self: FakeCompiler, request: Any) -> Any:
            text = (project.root / "a.i").read_text()
            project.write("a.i", text.replace("1.5", "7.5"))
            done = stock(self, request)
            project.write("a.i", text)
            return done

        with monkeypatch.context() as patch:
            patch.setattr(FakeCompiler, "_export", edit_then_export)
            project.build()
        published = project.tree()
        assert project.build().targets == {"up_to_date": 1}
        fresh = Project(project.root.parent / "fresh")
        fresh.build()
        assert fresh.tree() == published

    def test_a_data_file_edited_during_export_is_never_published_under_the_wrong_key(
        self, project: Project, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        project.write("t.csv", "1\n")
        project.write("a.i", INPUT + "[Tensors]\n  [t]\n    csv_file = t.csv\n  []\n[]\n")
        project.edit("a.i", ("factor = 1.5", "factor = 't'"))
        stock = FakeCompiler._export
        edits = iter(["2\n", "3\n"])

        def edit_then_export(self: FakeCompiler, request: Any) -> Any:
            if (text := next(edits, None)) is not None:
                project.write("t.csv", text)
            return stock(self, request)

        with monkeypatch.context() as patch:
            patch.setattr(FakeCompiler, "_export", edit_then_export)
            done = project.build()
        assert done.summary["ok"]
        assert done.calls["export"] == 3
        assert project.build().targets == {"up_to_date": 1}
        fresh = Project(project.root.parent / "fresh")
        for name in ("a.i", "t.csv"):
            fresh.write(name, (project.root / name).read_bytes())
        fresh.build()
        assert fresh.tree() == project.tree()

    def test_a_data_file_that_never_rests_is_an_error(self, project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
        project.write("t.csv", "0\n")
        project.write("a.i", INPUT + "[Tensors]\n  [t]\n    csv_file = t.csv\n  []\n[]\n")
        project.edit("a.i", ("factor = 1.5", "factor = 't'"))
        stock = FakeCompiler._export
        count = iter(range(1, 1000))

        def edit_then_export(self: FakeCompiler, request: Any) -> Any:
            project.write("t.csv", f"{next(count)}\n")
            return stock(self, request)

        monkeypatch.setattr(FakeCompiler, "_export", edit_then_export)
        done = project.build()
        assert done.targets == {"failed": 1}
        assert "keep changing" in done.summary["failures"][0]["message"]


def test_published_trees_hold_the_same_bytes_wherever_they_are_made(project: Project, tmp_path: Path) -> None:
    project.build()
    other = Project(tmp_path / "elsewhere" / "deeper with space")
    other.build()
    assert digests(other.aoti) == digests(project.aoti)


def test_a_store_at_home(project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    project.options.update(cache="~/store", output="~/out")
    assert project.build().targets == {"built": 1}
    assert (tmp_path / "home/store/objects").is_dir()
    assert (tmp_path / "home/out/eq/metadata.json").exists()
    assert sorted(path.name for path in project.root.iterdir()) == ["a.i"]


class TestSharedFiles:
    """Targets of one file are parsed from one reading of it, as long as it holds the same bytes."""

    @pytest.fixture
    def readings(self, project: Project, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
        project.models = [Model(input="a.i", model=name) for name in ("one", "two", "eq", "other")]
        stock, read = hit.read, []
        monkeypatch.setattr(hit, "read", lambda path, **how: (read.append(path), stock(path, **how))[1])
        return read

    def test_a_file_is_read_once_for_all_of_its_targets(self, project: Project, readings: list[Path]) -> None:
        assert project.build().targets == {"built": 4}
        assert readings == [project.root / "a.i"]
        together = project.tree()
        for model in project.models:
            alone = Project(project.root.parent / f"alone-{model.model}")
            alone.models = [model]
            alone.build()
            assert alone.tree().items() <= together.items()

    def test_variables_and_overrides_make_another_document(self, project: Project, readings: list[Path]) -> None:
        project.models.append(Model(input="a.i", model="one", name="b", overrides=("Models/one/factor:=7",)))
        project.build()
        assert len(readings) == 2
        assert project.tree()["b/cpu/float64/one_one.pt2"] != project.tree()["one/cpu/float64/one_one.pt2"]

    def test_a_file_that_changes_within_the_build_is_read_again(self, project: Project, readings: list[Path]) -> None:
        build = project.start()
        how = {"variables": {}, "overrides": (), "environ": {}}
        first = build.document(project.root / "a.i", **how)
        assert build.document(project.root / "a.i", **how) is first
        project.edit("a.i", ("factor = 1.5", "factor = 8.5"))
        again = build.document(project.root / "a.i", **how)
        assert again.files[0].digest != first.files[0].digest
        assert len(readings) == 2
        (project.root / "a.i").unlink()
        with pytest.raises(RequestError):
            build.document(project.root / "a.i", **how)
        build.close()


@pytest.mark.parametrize(("stale", "few"), [(1, True), (2, True), (3, False)])
def test_tables_are_filled_first_only_for_a_build_of_many_targets(
    project: Project, monkeypatch: pytest.MonkeyPatch, stale: int, few: bool
) -> None:
    monkeypatch.setattr("neml2_build.build.RealCompiler.__init__", lambda self, *_, few: setattr(self, "few", few))
    project.models = [Model(input="a.i", model=name) for name in ("one", "two", "eq")[:stale]]
    build = project.start(compiler=None)
    assert build.compiler.few is few  # type: ignore[attr-defined]


class TestPublishing:
    """What is made already is published without doit, many targets at a time."""

    @pytest.fixture
    def many(self, project: Project) -> Project:
        project.models = [Model(input="a.i", model="eq", name=f"t{number}") for number in range(12)]
        project.build()
        return project

    def test_neither_doit_nor_a_worker_is_asked(self, many: Project, monkeypatch: pytest.MonkeyPatch) -> None:
        before = many.tree()
        shutil.rmtree(many.aoti)
        monkeypatch.setattr("neml2_build.runner.run_tasks", lambda *_, **__: pytest.fail("doit ran"))
        done = many.build()
        assert done.targets == {"restored": 12}
        assert not done.calls
        assert many.tree() == before
        assert done.reasons["t3"]["package"] and "missing" in done.why("package", "t3")
        assert sorted(path.name for path in many.aoti.iterdir())[0] == "t0"  # nothing of the staging is left

    def test_one_file_that_is_gone_brings_one_target_back(self, many: Project) -> None:
        before = many.tree()
        (many.aoti / "t5/metadata.json").unlink()
        (many.aoti / "t7_aoti.i").write_text("edited")
        done = many.build()
        assert done.targets == {"restored": 2, "up_to_date": 10}
        assert [stage for stage, what in done.stages["t5"].items() if what == "restored"] == ["package"]
        assert [stage for stage, what in done.stages["t7"].items() if what == "restored"] == ["stub"]
        assert many.tree() == before

    def test_what_the_store_has_lost_is_made_again_and_the_rest_published(self, many: Project) -> None:
        before = many.tree()
        many.models[4] = Model(input="a.i", model="one", name="t4")
        many.build()
        expected = many.tree()
        only = {found for name, found in expected.items() if name.startswith("t4/")} - set(before.values())
        shutil.rmtree(many.aoti)
        for found in only:
            path = many.cache / "objects" / found[:2] / found[2:]
            path.chmod(0o644)
            path.write_bytes(b"damaged")
        done = many.build()
        assert done.summary["ok"]
        assert done.targets["restored"] >= 11
        assert many.tree() == expected

    def test_a_folder_that_cannot_be_written_to_is_one_message(self, many: Project, monkeypatch: pytest.MonkeyPatch) -> None:
        shutil.rmtree(many.aoti)

        def full(*_: object, **__: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("neml2_build.store._copy", full)
        done = many.build()
        assert not done.summary["ok"]
        assert "disk is full" in done.summary["failures"][0]["message"]
        assert not list(many.aoti.glob("t*/*"))

    def test_a_comment_in_a_file_of_many(self, many: Project, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("neml2_build.runner.run_tasks", lambda *_, **__: pytest.fail("doit ran"))
        many.edit("a.i", ("# rates", "# other rates"))
        done = many.build()
        assert not done.calls
        assert done.ran("t0") == done.ran("t11") == ["parse", "stub"]  # whose text has the comments of the file
        assert "a.i changed" in done.why("parse", "t11")
        assert many.build().targets == {"up_to_date": 12}


class TestOrder:
    def test_what_takes_longest_is_begun_first(self, project: Project) -> None:
        """New targets by the size of their files, known ones by what they took."""
        for number, size in enumerate((0, 3000, 500)):
            project.write(f"f{number}.i", INPUT + "#" * size)
        project.models = [Model(input=f"f{number}.i", model="eq", name=f"t{number}") for number in range(3)]
        build = project.start()
        runs = sorted(build.runs.values(), key=TargetRun.expected_seconds, reverse=True)
        assert [run.target.name for run in runs] == ["t1", "t2", "t0"]
        build.close()
        project.build()
        build = project.start()
        for name, seconds in (("t0", 5.0), ("t1", 1.0), ("t2", 9.0)):
            record = build.records.read(name, "lower-cpu")
            assert record is not None
            info = {**record.info, "seconds": {"eq_one.pt2": seconds}}
            build.records.write(name, msgspec.structs.replace(record, info=info))
        runs = sorted(build.runs.values(), key=TargetRun.expected_seconds, reverse=True)
        assert [run.target.name for run in runs] == ["t2", "t0", "t1"]
        build.close()

    def test_jobs_are_ordered_by_the_longest_chain_that_begins_with_them(self, project: Project) -> None:
        """A capture counts with the longest graph that follows it, so that it is not kept waiting by short graphs."""
        project.models = [Model(input="a.i", model="eq", name="t")]
        project.build()
        build = project.start()
        (run,) = build.runs.values()
        for stage in ("parse", "export", "lower-cpu"):
            assert not run.check(stage)
        assert run.exported is not None
        graph, *_ = [found.name for found in run.exported.graphs]
        record = build.records.read("t", "lower-cpu")
        assert record is not None
        build.records.write(
            "t", msgspec.structs.replace(record, info={**record.info, "seconds": {graph: 40.0, "other.pt2": 2.0}})
        )
        assert run.priority("lower-cpu", graph) == 40.0
        assert 40.0 <= run.priority("export") < 41.0
        build.records.write("t", msgspec.structs.replace(record, info={**record.info, "seconds": {}}))
        small = run.priority("lower-cpu", graph)
        run.exported = dataclasses.replace(
            run.exported, graphs=tuple(dataclasses.replace(one, operations=8000) for one in run.exported.graphs)
        )
        assert run.priority("lower-cpu", graph) > 50 * small
        build.close()
