"""Which edit costs which stage: the table of the design, a test a line; and what is in no key.

What the fake compiler makes of a slice keeps the shape of what NEML2 makes of it: a graph a leaf, solver settings and renames
in the metadata, promoted parameters outside the graphs.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import INPUT, ROOT, Outcome, Project, fake_environment

from neml2_build.manifest import Model

STAGES = ["parse", "export", "lower-cpu", "package", "stub"]


def assert_ran(done: Outcome, stages: list[str], graphs: tuple[int, int], target: str = "eq") -> None:
    """The stages that made something, in order; graphs lowered and reused; the calls that go with them."""
    assert done.summary["ok"], done.summary["failures"]
    assert done.ran(target) == stages
    assert done.graphs == graphs
    assert done.calls["lower"] == graphs[0]
    assert done.calls["export"] == ("export" in stages)


@pytest.fixture
def built(project: Project) -> Project:
    project.build()
    return project


class TestNothing:
    def test_nothing(self, built: Project) -> None:
        done = built.build()
        assert_ran(done, [], (0, 0))
        assert done.targets == {"up_to_date": 1}

    @pytest.mark.parametrize("trusting", [False, True])
    def test_touch(self, project: Project, trusting: bool, request: pytest.FixtureRequest) -> None:
        if trusting:
            request.getfixturevalue("trust_stats")
        project.build()
        os.utime(project.root / "a.i", (1e9, 1e9))
        for path in project.aoti.rglob("*"):
            os.utime(path, (1e9, 1e9))
        done = project.build()
        assert_ran(done, [], (0, 0))
        assert done.targets == {"up_to_date": 1}

    def test_neither_torch_nor_neml2_is_imported_by_a_null_build(self, built: Project) -> None:
        built.toml()
        code = (
            "import sys, json\n"
            "from neml2_build.cli import main\n"
            "try:\n    main(['build', '--json'])\n"
            "except SystemExit as done: code = done.code\n"
            "heavy = sorted(name for name in ('torch', 'neml2', 'numpy', 'pyzag') if name in sys.modules)\n"
            "print(json.dumps([code, heavy]))\n"
        )
        for _ in range(2):  # the first finds contents up to date, the second stats
            done = subprocess.run(
                [sys.executable, "-c", code], cwd=built.root, env=fake_environment(), capture_output=True, text=True, timeout=60
            )
            first, last = done.stdout.splitlines()
            assert '"torch_imported": false' in first
            assert last == "[0, []]", done.stderr


class TestText:
    """Edits that the slice does not see."""

    @pytest.mark.parametrize(
        ("old", "new", "stub"),
        [
            ("# rates", "# other words", True),  # NEML2's stub keeps comments
            ("[Models]\n", "[Models]\n\n\n", None),
            ("    factor = 9.5", "    factor = 10.5", None),
            ("    nsteps = 5", "    nsteps = 6", None),
            ("    factor = 1.5\n", "    factor =    1.5\n", None),
        ],
        ids=["comment", "blank line", "another model", "driver", "spaces"],
    )
    def test_only_parse_and_perhaps_the_stub(self, built: Project, old: str, new: str, stub: bool | None) -> None:
        before = built.tree()
        keys = built.keys()
        built.edit("a.i", (old, new))
        done = built.build()
        stub_changed = built.tree()["eq_aoti.i"] != before["eq_aoti.i"]
        if stub is not None:
            assert stub_changed is stub
        assert_ran(done, ["parse", "stub"] if stub_changed else ["parse"], (0, 0))
        assert {**built.tree(), "eq_aoti.i": ""} == {**before, "eq_aoti.i": ""}
        after = built.keys()
        assert after["parse"] != keys["parse"]
        assert [after[stage] for stage in STAGES[1:4]] == [keys[stage] for stage in STAGES[1:4]]

    def test_order_of_unrelated_blocks(self, built: Project) -> None:
        head, drivers, tail = INPUT.partition("[Drivers]\n")
        built.write("a.i", drivers + tail + head)
        keys = built.keys()
        done = built.build()
        assert done.ran() in (["parse"], ["parse", "stub"])
        assert not done.calls
        assert [built.keys()[stage] for stage in STAGES[1:4]] == [keys[stage] for stage in STAGES[1:4]]

    def test_order_of_targets_in_the_manifest(self, project: Project) -> None:
        project.models = [Model(input="a.i", model=name) for name in ("one", "two", "other")]
        project.build()
        project.models.reverse()
        assert project.build().targets == {"up_to_date": 3}


class TestMetadata:
    """Edits that no graph sees."""

    def test_solver_tolerance(self, built: Project) -> None:
        built.edit("a.i", ("abs_tol = 1e-8", "abs_tol = 1e-10"))
        done = built.build()
        assert_ran(done, ["parse", "export", "package"], (0, 0))
        assert "Solvers/newton" in done.why("export")
        assert "abs_tol" in done.why("export")

    def test_rename(self, built: Project) -> None:
        built.models = [Model(input="a.i", model="eq", rename_inputs={"a": "alpha"})]
        assert_ran(built.build(), ["export", "package"], (0, 0))

    def test_value_of_a_promoted_parameter(self, project: Project) -> None:
        project.models = [Model(input="a.i", model="eq", parameters=["one.factor"])]
        project.build()
        project.edit("a.i", ("factor = 1.5", "factor = 7.5"))
        done = project.build()
        assert done.ran() == ["parse", "export", "package"]
        assert done.graphs == (0, 0)


class TestGraphs:
    def test_baked_value_of_one_leaf(self, built: Project) -> None:
        before = built.tree()
        built.edit("a.i", ("factor = 1.5", "factor = 1.75"))
        done = built.build()
        assert_ran(done, STAGES[:4], (1, 1))
        assert "eq_one.pt2" in done.why("lower-cpu")
        assert "eq_two.pt2" not in done.why("lower-cpu")
        changed = {name for name, found in built.tree().items() if before[name] != found}
        assert changed == {"eq/cpu/float64/eq_one.pt2"}

    def test_back_to_an_earlier_state(self, built: Project) -> None:
        before = built.tree()
        built.edit("a.i", ("factor = 1.5", "factor = 1.75"))
        built.build()
        built.edit("a.i", ("factor = 1.75", "factor = 1.5"))
        done = built.build()
        assert done.targets == {"restored": 1}
        assert not done.calls
        assert done.graphs == (0, 2)
        assert built.tree() == before

    def test_a_hundred_switches_between_two_branches(self, built: Project) -> None:
        texts = [INPUT, INPUT.replace("factor = 2.5", "factor = 3.5").replace("1e-8", "1e-9")]
        trees = [built.tree()]
        built.write("a.i", texts[1])
        built.build()
        trees.append(built.tree())
        for turn in range(10):
            built.write("a.i", texts[turn % 2])
            done = built.build()
            assert done.targets == {"restored": 1}
            assert not done.calls
            assert built.tree() == trees[turn % 2]

    def test_a_leaf_more_and_a_leaf_less(self, built: Project) -> None:
        built.edit("a.i", ("models = 'one two'", "models = 'one two other'"))
        assert_ran(built.build(), STAGES[:4], (1, 2))
        built.edit("a.i", ("models = 'one two other'", "models = 'two'"))
        done = built.build()
        assert done.graphs == (0, 1)
        assert not (built.aoti / "eq/cpu/float64/eq_one.pt2").exists()

    def test_inductor_options_lower_every_graph_again_and_capture_none(self, built: Project) -> None:
        built.models = [Model(input="a.i", model="eq", inductor={"max_autotune": True})]
        done = built.build()
        assert_ran(done, ["lower-cpu", "package"], (2, 0))
        assert "max_autotune" in done.why("lower-cpu")

    def test_march(self, built: Project) -> None:
        built.models = [Model(input="a.i", model="eq", march="x86-64-v3")]
        done = built.build()
        assert_ran(done, ["lower-cpu", "package"], (2, 0))
        assert "march" in done.why("lower-cpu")

    @pytest.mark.parametrize(
        "option",
        [{"derivatives": ["x:a"]}, {"example_batch_shape": "(2,)"}, {"dynamic_batch": False}, {"parameters": ["one.none"]}],
        ids=lambda option: next(iter(option)),
    )
    def test_options_of_the_export(self, built: Project, option: dict[str, Any]) -> None:
        built.models = [Model(input="a.i", model="eq", **option)]
        done = built.build()
        assert done.calls["export"] == 1
        assert next(iter(option)).partition("_")[0] in done.why("export").replace("promoted", "parameters")
        assert built.build().targets == {"up_to_date": 1}

    def test_options_of_one_target_leave_the_others_alone(self, project: Project) -> None:
        project.models = [Model(input="a.i", model=name) for name in ("one", "two")]
        project.build()
        project.models[0] = Model(input="a.i", model="one", march="x86-64-v3")
        done = project.build()
        assert done.targets == {"built": 1, "up_to_date": 1}


class TestFiles:
    @pytest.fixture
    def table(self, project: Project) -> Project:
        project.write("data/t.csv", "1\n2\n")
        project.write("a.i", INPUT + "[Tensors]\n  [t]\n    type = CSVScalar\n    csv_file = data/t.csv\n  []\n[]\n")
        project.edit("a.i", ("factor = 1.5", "factor = 't'"))
        project.build()
        return project

    def test_an_edited_csv(self, table: Project) -> None:
        table.write("data/t.csv", "1\n3\n")
        done = table.build()
        assert done.ran()[:2] == ["export", "lower-cpu"]
        assert done.calls == {"export": 1, "lower": 2}
        assert "data-changed" in done.why("export")
        assert "data/t.csv" in done.why("export")
        table.write("data/t.csv", "1\n2\n")
        assert table.build().targets == {"restored": 1}

    def test_a_touched_csv(self, table: Project) -> None:
        os.utime(table.root / "data/t.csv", (1e9, 1e9))
        assert table.build().targets == {"up_to_date": 1}

    def test_a_csv_edited_to_the_same_size_and_time(self, table: Project, trust_stats: None) -> None:
        table.build()
        path = table.root / "data/t.csv"
        stat = path.stat()
        path.write_text("1\n7\n")
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        assert table.build().calls["export"] == 1

    def test_a_missing_csv_is_one_message_that_names_file_line_and_remedy(self, table: Project) -> None:
        before = table.tree()
        (table.root / "data/t.csv").unlink()
        done = table.build()
        assert done.targets == {"failed": 1}
        (failure,) = done.summary["failures"]
        assert failure["stage"] == "export"
        line = (table.root / "a.i").read_text().splitlines().index("    csv_file = data/t.csv") + 1
        assert failure["message"].startswith(f"{table.root / 'a.i'}:{line}: [export:eq]")
        assert "data/t.csv" in failure["message"]
        assert "remedy" in failure["message"]
        assert table.tree() == before

    def test_a_csv_of_another_model(self, table: Project) -> None:
        table.edit("a.i", ("factor = 't'", "factor = 1.5"))
        table.build()
        table.write("data/t.csv", "9\n")
        assert table.build().targets == {"up_to_date": 1}

    def test_an_extension(self, project: Project) -> None:
        project.write("ext/mine.py", "x = 1\n")
        project.models = [Model(input="a.i", model="eq", load=["ext/mine.py"])]
        project.build()
        project.write("ext/mine.py", "x = 2\n")
        done = project.build()
        assert done.calls == {"export": 1}
        assert "extension-changed" in done.why("export")
        assert "ext/mine.py" in done.why("export")
        project.write("ext/mine.py", "x = 1\n")
        assert project.build().targets == {"restored": 1}

    def test_extra_dependencies(self, project: Project) -> None:
        project.write("notes.txt", "1")
        project.models = [Model(input="a.i", model="eq", extra_deps=["notes.txt"])]
        project.build()
        project.write("notes.txt", "2")
        assert project.build().calls == {"export": 1}

    def test_an_include(self, project: Project) -> None:
        project.write("part.i", "[Models]\n  [three]\n    type = Scale\n    factor = 3.0\n  []\n[]\n")
        project.write("a.i", "!include part.i\n" + INPUT.replace("'one two'", "'one two three'"))
        project.build()
        project.edit("part.i", ("3.0", "4.0"))
        done = project.build()
        assert done.graphs == (1, 2)
        assert "part.i" in done.why("parse")

    def test_two_files_of_one_name_outside_the_project(self, project: Project, tmp_path: Path) -> None:
        """Neither may hide the other in the key."""
        for folder in ("left", "right"):
            (tmp_path / folder).mkdir()
            (tmp_path / folder / "t.txt").write_text(folder)
        project.models = [
            Model(input="a.i", model="eq", extra_deps=[str(tmp_path / "left/t.txt"), str(tmp_path / "right/t.txt")])
        ]
        project.build()
        for folder in ("left", "right"):
            (tmp_path / folder / "t.txt").write_text(f"{folder} edited")
            assert project.build().calls["export"] == 1, folder


class TestVariables:
    @pytest.fixture
    def text(self, project: Project) -> Project:
        project.edit("a.i", ("factor = 1.5", "factor = '${f}'"), ("from = 'b'", "from = '${env WHICH}'"))
        project.models = [Model(input="a.i", model="eq", variables={"f": "1.5"})]
        project.environ["WHICH"] = "b"
        project.build()
        return project

    def test_a_variable(self, text: Project) -> None:
        text.models = [Model(input="a.i", model="eq", variables={"f": "2.25"})]
        done = text.build()
        assert_ran(done, STAGES, (1, 1))
        text.models = [Model(input="a.i", model="eq", variables={"f": "1.5"})]
        assert text.build().targets == {"restored": 1}

    @pytest.mark.parametrize("trusting", [False, True])
    def test_a_value_of_the_environment(self, text: Project, trusting: bool, request: pytest.FixtureRequest) -> None:
        if trusting:
            request.getfixturevalue("trust_stats")
            assert text.build().targets == {"up_to_date": 1}
        text.environ["WHICH"] = "c"
        done = text.build()
        assert_ran(done, STAGES[:4], (1, 1))
        assert "variable-changed: WHICH: 'b' -> 'c'" in done.why("parse")

    def test_an_unset_value_of_the_environment_is_an_error_that_names_it(self, text: Project) -> None:
        before = text.tree()
        del text.environ["WHICH"]
        done = text.build()
        assert done.targets == {"failed": 1}
        assert "WHICH" in done.summary["failures"][0]["message"]
        assert text.tree() == before

    def test_an_override(self, text: Project) -> None:
        text.models = [Model(input="a.i", model="eq", variables={"f": "1.5"}, overrides=["Models/two/factor:=8"])]
        assert_ran(text.build(), STAGES[:4], (1, 1))

    def test_a_value_of_the_environment_that_nothing_reads(self, text: Project) -> None:
        text.environ["UNRELATED"] = "x"
        text.environ["USER"] = "somebody"
        assert text.build().targets == {"up_to_date": 1}


class TestMachine:
    @pytest.mark.parametrize(
        ("field", "value", "kind", "calls"),
        [
            ("python", "cpython-3.99", "python-changed", {"export": 1}),
            ("libc", "glibc 9.9", "machine-changed", {"lower": 2}),
            ("cpu", {"machine": "x86_64", "native": "0", "flags": "0"}, "machine-changed", {"lower": 2}),
            ("compiler", {"version": "g++ 99", "target": "x", "digest": "0"}, "compiler-changed", {"lower": 2}),
            ("threads", 77, "environment-changed", {"lower": 2}),
        ],
    )
    def test_who_compiles(
        self, built: Project, look: dict[str, Any], field: str, value: Any, kind: str, calls: dict[str, int]
    ) -> None:
        keys = built.keys()
        look[field] = value
        done = built.build()
        assert done.calls == calls
        assert kind in done.why("export" if "export" in calls else "lower-cpu")
        assert built.keys() != keys
        del look[field]
        assert built.build().targets == {"restored": 1}

    @pytest.mark.parametrize("package", ["torch", "neml2", "nmhit"])
    @pytest.mark.parametrize("trusting", [False, True])
    def test_installed_packages_by_content(
        self,
        project: Project,
        look: dict[str, Any],
        machine: Any,
        package: str,
        trusting: bool,
        request: pytest.FixtureRequest,
    ) -> None:
        if trusting:
            request.getfixturevalue("trust_stats")
        project.build()
        project.build()
        about = machine.packages[package]
        look["packages"] = {**machine.packages, package: {**about, "digest": "0" * 32}}
        done = project.build()
        assert done.calls["export"] == 1
        assert done.calls["lower"] == (0 if package == "nmhit" else 2)
        assert ("torch-changed" if package == "torch" else "neml2-changed") in done.why("export")

    def test_variables_that_inductor_reads(self, built: Project) -> None:
        built.environ["TORCHINDUCTOR_FREEZING"] = "1"
        done = built.build()
        assert done.calls == {"lower": 2}
        assert "TORCHINDUCTOR_FREEZING" in done.why("lower-cpu")

    def test_variables_that_only_say_where_things_are(self, built: Project) -> None:
        built.environ.update(TORCHINDUCTOR_CACHE_DIR="/elsewhere", TMPDIR=str(built.root), HOME="/home/me", TORCH_LOGS="all")
        assert built.build().targets == {"up_to_date": 1}

    def test_the_prepared_toolchain_is_in_the_key_of_the_real_compiler(self, project: Project) -> None:
        from neml2_build.build import Build

        one = Build(project.manifest(), environ=project.environ)
        two = Build(project.manifest(), environ=project.environ, stock=True)
        assert one.identity != two.identity
        assert one.toolchain != two.toolchain


class TestInNoKey:
    @pytest.fixture
    def rich(self, project: Project) -> Project:
        """A project that reads every kind of file."""
        project.write("t.csv", "1\n")
        project.write("ext/mine.py", "x = 1\n")
        project.write("part.i", "[Models]\n  [three]\n    type = Scale\n    factor = 't'\n  []\n[]\n")
        project.write(
            "a.i",
            "!include part.i\n"
            + INPUT.replace("'one two'", "'one two three'")
            + "[Tensors]\n  [t]\n    csv_file = t.csv\n  []\n[]\n",
        )
        project.models = [Model(input="a.i", model="eq", load=["ext/mine.py"])]
        project.build()
        return project

    def test_the_location_of_the_project(self, rich: Project, tmp_path: Path) -> None:
        """A copy of the project elsewhere, with its store but without what was published, restores everything."""
        keys, tree = rich.keys(), rich.tree()
        place = tmp_path / "moved here" / "ünïcode"
        shutil.copytree(rich.root, place)
        shutil.rmtree(place / "aoti")
        shutil.rmtree(place / "cache/targets")
        moved = Project.__new__(Project)
        moved.__dict__.update({**rich.__dict__, "root": place})
        done = moved.build()
        assert done.targets == {"restored": 1}
        assert not done.calls
        assert moved.keys() == keys
        assert moved.tree() == tree

    def test_no_key_holds_a_place(self, rich: Project) -> None:
        for path in (rich.cache / "actions").rglob("*.json"):
            text = path.read_text()
            made_of = text.partition('"made_of":')[2].partition(',"outputs"')[0]
            assert str(rich.root) not in made_of
            assert str(ROOT) not in made_of
            assert os.uname().nodename not in made_of

    def test_a_moved_cache(self, rich: Project, tmp_path: Path) -> None:
        keys = rich.keys()
        (rich.root / "cache").rename(tmp_path / "store")
        rich.options["cache"] = str(tmp_path / "store")
        done = rich.build()
        assert not done.calls
        assert done.summary["ok"]
        assert rich.keys() == keys

    @pytest.mark.parametrize("jobs", [1, 2, 7])
    def test_the_number_of_jobs(self, rich: Project, jobs: int) -> None:
        keys = rich.keys()
        assert rich.build(jobs=jobs).targets == {"up_to_date": 1}
        assert rich.build(jobs=jobs, force=True).summary["ok"]
        assert rich.keys() == keys

    def test_whose_build_it_is(self, rich: Project) -> None:
        keys = rich.keys()
        rich.environ.update(USER="nobody", LOGNAME="nobody", HOME="/nowhere", HOSTNAME="other", LANG="C", COLUMNS="7")
        assert rich.build(force=True).summary["ok"]
        assert rich.keys() == keys

    def test_the_time(self, rich: Project, monkeypatch: pytest.MonkeyPatch) -> None:
        keys = rich.keys()
        monkeypatch.setattr("time.time", lambda: 4e9)
        assert rich.build(force=True).summary["ok"]
        assert rich.keys() == keys

    def test_the_name_of_the_target_is_in_no_key_of_a_graph(self, rich: Project) -> None:
        rich.models.append(Model(input="a.i", model="eq", name="twin", load=["ext/mine.py"]))
        done = rich.build()
        assert done.targets["up_to_date"] == 1
        assert not done.calls
        assert rich.keys("twin")["export"] == rich.keys()["export"]
        assert rich.keys("twin")["lower-cpu"] == rich.keys()["lower-cpu"]
