"""The doit tasks: names, order, reasons; and doit itself, through the project's dodo.py and a foreign one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import INPUT, ROOT, Project, fake_environment, listing

from neml2_build import environment as environments
from neml2_build.manifest import Model
from neml2_build.tasks import create_tasks, tasks_of

FOREIGN = """\
from neml2_build import Manifest, create_tasks
def task_neml2():
    yield from create_tasks(Manifest.load())
"""


def doit(project: Project, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "doit", *arguments],
        cwd=project.root,
        env=fake_environment(**environment),
        capture_output=True,
        text=True,
        timeout=120,
    )


class TestTasks:
    def test_names_order_and_targets(self, project: Project) -> None:
        build = project.start()
        tasks = {f"{task['basename']}:{task['name']}": task for task in tasks_of(build.runs.values())}
        build.close()
        assert list(tasks) == ["parse:eq", "export:eq", "lower-cpu:eq", "package:eq", "stub:eq"]
        assert [task["task_dep"] for task in tasks.values()] == [
            [],
            ["parse:eq"],
            ["export:eq"],
            ["lower-cpu:eq"],
            ["package:eq"],
        ]
        assert tasks["package:eq"]["targets"] == [str(project.aoti / "eq/metadata.json")]
        assert tasks["stub:eq"]["targets"] == [str(project.aoti / "eq_aoti.i")]
        assert not any("file_dep" in task for task in tasks.values())
        assert all("eq of a.i" in task["doc"] for task in tasks.values())

    def test_devices_are_lowered_side_by_side(self, project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(environments, "cuda_device", lambda memo: None)
        project.models = [Model(input="a.i", model="eq", devices=["cpu", "cuda"])]
        build = project.start()
        tasks = {task["basename"]: task for task in tasks_of(build.runs.values())}
        assert tasks["package"]["task_dep"] == ["lower-cpu:eq", "lower-cuda:eq"]
        without = {task["basename"]: task for task in tasks_of(build.runs.values(), keep_going=True)}
        assert without["package"]["task_dep"] == ["lower-cpu:eq"]
        assert "lower-cuda" in without
        build.close()

    def test_the_question_says_its_answer(self, project: Project) -> None:
        project.build()
        project.edit("a.i", ("factor = 1.5", "factor = 1.75"))
        build = project.start()
        (check,) = next(iter(tasks_of(build.runs.values())))["uptodate"]
        assert check() is False
        assert repr(check) == "input-changed: a.i changed"
        build.close()
        project.write("a.i", INPUT)
        build = project.start()
        (check,) = next(iter(tasks_of(build.runs.values())))["uptodate"]
        assert check() is True
        assert repr(check) == "up to date"
        build.close()

    def test_tasks_of_a_manifest_made_in_code(self, project: Project) -> None:
        build = project.start()
        assert len(list(create_tasks(project.manifest(), build=build))) == 5
        build.close()


@pytest.fixture(params=["dodo.py of this project", "foreign dodo.py"])
def dodo(request: pytest.FixtureRequest, project: Project) -> Project:
    text = FOREIGN if request.param == "foreign dodo.py" else (ROOT / "dodo.py").read_text()
    project.write("dodo.py", text)
    project.models = [Model(input="a.i", model="eq", name="rates"), Model(input="a.i", model="one")]
    project.toml('[[model]]\ninput = "a.i"\nmodel = "eq"\nname = "rates"\n[[model]]\ninput = "a.i"\nmodel = "one"\n')
    return project


class TestDoit:
    def test_build_twice(self, dodo: Project) -> None:
        log = dodo.root / "log"
        first = doit(dodo, NEML2_BUILD_FAKE_LOG=str(log))
        assert first.returncode == 0, first.stderr
        assert "rates/metadata.json" in dodo.tree()
        assert len(log.read_text().splitlines()) == 4  # two exports, and two graphs, of which the targets share one
        again = doit(dodo, NEML2_BUILD_FAKE_LOG=str(log))
        assert again.returncode == 0
        assert len(log.read_text().splitlines()) == 4
        assert {line.split()[0] for line in again.stdout.splitlines() if line.strip()} <= {"--"}
        assert dodo.build().targets == {"up_to_date": 2}

    def test_its_database_may_be_lost(self, dodo: Project) -> None:
        assert doit(dodo).returncode == 0
        for path in [*dodo.root.glob(".doit*"), *dodo.cache.glob("doit.db*")]:
            path.unlink()
        log = dodo.root / "log"
        before = listing(dodo.aoti)
        again = doit(dodo, NEML2_BUILD_FAKE_LOG=str(log))
        assert again.returncode == 0
        assert not log.exists()
        assert listing(dodo.aoti) == before

    def test_list_and_info(self, dodo: Project) -> None:
        listed = doit(dodo, "list", "--all", "--quiet")
        assert listed.returncode == 0, listed.stderr
        names = listed.stdout.split()
        for stage in ("parse", "export", "lower-cpu", "package", "stub"):
            assert {f"{stage}:rates", f"{stage}:one"} <= set(names)
        info = doit(dodo, "info", "lower-cpu:rates")
        assert info.returncode in (0, 1), info.stderr  # 1: doit's way to say "not up to date"
        assert "eq of a.i" in info.stdout
        assert "export:rates" in info.stdout
        assert "Traceback" not in info.stderr + info.stdout

    def test_info_of_every_task_before_and_after_a_build(self, dodo: Project) -> None:
        for _ in range(2):
            for stage in ("parse", "export", "lower-cpu", "package", "stub"):
                info = doit(dodo, "info", f"{stage}:rates")
                assert "Traceback" not in info.stderr + info.stdout, (stage, info.stderr)
                assert info.returncode in (0, 1)
            assert doit(dodo).returncode == 0

    def test_status_of_the_list(self, dodo: Project) -> None:
        assert doit(dodo).returncode == 0
        listed = doit(dodo, "list", "--all", "--status")
        assert listed.returncode == 0, listed.stderr
        assert "Traceback" not in listed.stderr
        assert len(listed.stdout.splitlines()) >= 10

    def test_one_target(self, dodo: Project) -> None:
        done = doit(dodo, "stub:one")
        assert done.returncode == 0, done.stderr
        assert set(dodo.tree()) == {"one/cpu/float64/one_one.pt2", "one/metadata.json", "one_aoti.i"}

    def test_clean(self, dodo: Project) -> None:
        assert doit(dodo).returncode == 0
        trial = doit(dodo, "clean", "--dry-run")
        assert "would remove" in trial.stdout
        assert "rates/metadata.json" in dodo.tree()
        one = doit(dodo, "clean", "package:one")
        assert one.returncode == 0, one.stderr
        assert {name.split("/")[0] for name in dodo.tree()} == {"rates", "rates_aoti.i"}
        cleaned = doit(dodo, "clean")
        assert cleaned.returncode == 0, cleaned.stderr
        assert not dodo.tree()
        log = dodo.root / "log"
        assert doit(dodo, NEML2_BUILD_FAKE_LOG=str(log)).returncode == 0
        assert not log.exists()  # restored
        assert "rates/metadata.json" in dodo.tree()

    @pytest.mark.parametrize("how", [["-n", "2"], ["-n", "2", "-P", "thread"]], ids=["processes", "threads"])
    def test_in_parallel(self, dodo: Project, how: list[str]) -> None:
        log = dodo.root / "log"
        done = doit(dodo, *how, NEML2_BUILD_FAKE_LOG=str(log))
        assert done.returncode == 0, done.stderr + done.stdout
        assert {name.split("/")[0] for name in dodo.tree()} == {"rates", "rates_aoti.i", "one", "one_aoti.i"}
        lowered = [line.split()[1] for line in log.read_text().splitlines() if line.startswith("lower")]
        assert len(lowered) == len(set(lowered)) == 2
        again = doit(dodo, *how, NEML2_BUILD_FAKE_LOG=str(log))
        assert again.returncode == 0, again.stderr
        assert len([line for line in log.read_text().splitlines() if line.startswith("lower")]) == 2
        dodo.edit("a.i", ("factor = 1.5", "factor = 1.75"))
        edited = doit(dodo, *how, NEML2_BUILD_FAKE_LOG=str(log))
        assert edited.returncode == 0, edited.stderr
        assert dodo.build().targets == {"up_to_date": 2}

    def test_a_failure_is_one_message(self, dodo: Project) -> None:
        dodo.edit("a.i", ("factor = 2.5", "factor = 2.5\n    fail = 'lower'"))
        done = doit(dodo, "--continue")
        assert done.returncode in (1, 2)  # 2: a task that another one waits for failed
        assert "Traceback" not in done.stdout + done.stderr
        assert "told to fail" in done.stdout + done.stderr
        assert "one/metadata.json" in dodo.tree()
        assert "rates/metadata.json" not in dodo.tree()

    def test_a_wrong_manifest_is_one_message(self, dodo: Project) -> None:
        dodo.toml('[[modle]]\ninput = "a.i"\n')
        done = doit(dodo)
        assert done.returncode != 0
        assert "modle" in done.stderr


def test_doit_does_not_import_torch(project: Project) -> None:
    project.write("dodo.py", FOREIGN)
    project.toml()
    assert doit(project).returncode == 0
    code = (
        "import sys, json\nfrom doit.doit_cmd import DoitMain\ncode = DoitMain().run([])\n"
        "print(json.dumps([code, sorted({'torch', 'neml2', 'numpy'} & set(sys.modules))]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=project.root, env=fake_environment(), capture_output=True, text=True, timeout=60
    )
    assert json.loads(done.stdout.splitlines()[-1]) == [0, []], done.stderr


def test_a_build_between_two_of_doits(project: Project) -> None:
    """The command line and doit keep one state."""
    project.write("dodo.py", FOREIGN)
    project.toml()
    assert doit(project).returncode == 0
    shutil.rmtree(project.aoti / "eq")
    assert project.build().targets == {"restored": 1}
    before = listing(project.aoti)
    assert doit(project).returncode == 0
    assert listing(project.aoti) == before
    assert not os.path.exists(Path(project.aoti, ".neml2-build"))
