"""The command line: what it prints, what it returns, what it leaves alone."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import INPUT, Project, command, fake_environment, listing

from neml2_build import null

TWO = '[[model]]\ninput = "a.i"\nmodel = "eq"\n[[model]]\ninput = "b.i"\nmodel = "eq"\nname = "other"\n'


@pytest.fixture
def failing(project: Project, cli: Any) -> Any:
    """The command line in a project of a target that builds and one that does not; the bad one comes first."""
    project.write("b.i", INPUT.replace("factor = 2.5", "factor = 2.5\n    fail = 'lower'"))
    project.toml(
        '[[model]]\ninput = "b.i"\nmodel = "eq"\nname = "bad"\n[[model]]\ninput = "a.i"\nmodel = "eq"\nname = "good"\n'
    )
    return cli


class TestBuild:
    def test_json_is_one_object_of_the_agreed_shape(self, cli: Any) -> None:
        first = cli("build", "--json")
        assert first.code == 0
        found = first.json
        assert found.pop("seconds") >= 0
        assert found == {
            "ok": True,
            "targets": {"total": 1, "built": 1, "restored": 0, "up_to_date": 0, "failed": 0, "skipped": 0},
            "graphs": {"lowered": 2, "reused": 0},
            "torch_imported": False,
            "failures": [],
        }
        assert first.out.count("\n") == 1
        again = cli("--json").json
        assert again["targets"] == {"total": 1, "built": 0, "restored": 0, "up_to_date": 1, "failed": 0, "skipped": 0}
        assert again["graphs"] == {"lowered": 0, "reused": 0}
        assert again["torch_imported"] is False

    def test_without_json_standard_output_is_empty(self, cli: Any) -> None:
        done = cli("build")
        assert done.out == ""
        assert "1 target: 1 built; 2 graphs compiled, 0 reused" in done.err

    def test_quiet_prints_nothing_and_quiet_failures_are_heard(self, failing: Any) -> None:
        assert failing("build", "good", "-q").err == ""
        assert "told to fail" in failing("build", "bad", "-q").err

    def test_verbose_says_why(self, project: Project, cli: Any) -> None:
        cli("build")
        project.edit("a.i", ("factor = 1.5", "factor = 1.75"))
        done = cli("build", "-v")
        assert "parse:eq because input-changed: a.i changed" in done.err
        assert "Models/one/factor" in done.err

    @pytest.mark.parametrize("words", [["build", "eq"], ["eq"], ["e*"], ["-j", "2"], ["build", "-j", "1", "eq"], []])
    def test_ways_to_ask(self, cli: Any, words: list[str]) -> None:
        assert cli(*words, "--json").json["targets"]["built"] == 1

    def test_an_unknown_target_is_a_wrong_request_that_names_the_nearest(self, project: Project, cli: Any) -> None:
        project.toml('[[model]]\ninput = "a.i"\nmodel = "eq"\nname = "viscoplasticity"\n')
        for words in (
            ["build", "viscoplastcity"],
            ["viscoplastcity"],
            ["status", "viscoplastcity"],
            ["explain", "viscoplastcity"],
        ):
            done = cli(*words)
            assert done.code == 2
            assert "no target named 'viscoplastcity'" in done.err
            assert "did you mean 'viscoplasticity'?" in done.err
        assert not project.cache.exists() or not list((project.cache).rglob("*.json"))

    @pytest.mark.parametrize("words", [["-j", "0"], ["-j", "x"], ["--no-such-option"], ["build", "--manifest"]])
    def test_wrong_options(self, cli: Any, words: list[str]) -> None:
        done = cli(*words)
        assert done.code == 2
        assert "Traceback" not in done.err

    def test_force(self, cli: Any) -> None:
        cli("build")
        assert cli("build", "--force", "--json").json["graphs"] == {"lowered": 2, "reused": 0}

    def test_help_and_version(self, cli: Any) -> None:
        for words in (["--help"], ["-h"], ["build", "--help"], ["status", "-h"], ["--version"]):
            done = cli(*words)
            assert done.code == 0
            assert "neml2-build" in done.out


class TestFailures:
    def test_exit_code_and_object(self, failing: Any, project: Project) -> None:
        done = failing("build", "-k", "--json")
        assert done.code == 1
        found = done.json
        assert found["ok"] is False
        assert found["targets"] == {"total": 2, "built": 1, "restored": 0, "up_to_date": 0, "failed": 1, "skipped": 0}
        (failure,) = found["failures"]
        assert failure["target"] == "bad"
        assert failure["stage"] == "lower-cpu"
        assert "told to fail" in failure["message"]
        assert "Traceback" not in done.err
        assert (project.aoti / "good/metadata.json").exists()

    def test_the_first_failure_ends_the_build_without_keep_going(self, failing: Any) -> None:
        done = failing("build", "--json", "-j", "1")
        assert done.code == 1
        targets = done.json["targets"]
        assert targets["failed"] == 1
        assert targets["failed"] + targets["built"] + targets["skipped"] == 2

    def test_a_wrong_manifest(self, project: Project, cli: Any) -> None:
        project.toml('[[model]]\ninput = "a.i"\nmodle = "eq"\n')
        done = cli("build", "--json")
        assert done.code == 2
        assert done.json["ok"] is False
        assert "modle" in done.json["failures"][0]["message"]
        assert "neml2-build.toml:3" in done.err
        assert not project.cache.exists()
        assert not project.aoti.exists()

    def test_no_manifest(self, project: Project, cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "empty").mkdir()
        monkeypatch.chdir(tmp_path / "empty")
        done = cli("build")
        assert done.code == 2
        assert "neml2-build.toml" in done.err
        assert "Traceback" not in done.err
        assert cli("build", "-f", "no.toml").code == 2

    def test_cuda_on_a_machine_without_one(self, project: Project, cli: Any) -> None:
        if os.path.exists("/proc/driver/nvidia/version"):
            pytest.skip("this machine has a driver")
        project.toml('devices = ["cpu", "cuda"]\n[[model]]\ninput = "a.i"\nmodel = "eq"\n')
        done = cli("build", "-k", "--json")
        assert done.code == 1
        (failure,) = done.json["failures"]
        assert failure["stage"] == "lower-cuda"
        assert "CUDA" in failure["message"]
        assert sorted(project.tree()) == [
            "eq/cpu/float64/eq_one.pt2",
            "eq/cpu/float64/eq_two.pt2",
            "eq/metadata.json",
            "eq_aoti.i",
        ]

    def test_cuda_on_a_machine_without_one_fails_before_anything_is_done(self, project: Project, cli: Any) -> None:
        if os.path.exists("/proc/driver/nvidia/version"):
            pytest.skip("this machine has a driver")
        project.toml('devices = ["cpu", "cuda"]\n[[model]]\ninput = "a.i"\nmodel = "eq"\n')
        done = cli("build", "--json")
        assert done.code == 1
        assert [failure["stage"] for failure in done.json["failures"]] == ["lower-cuda"]
        assert done.json["torch_imported"] is False
        assert not project.aoti.exists()
        assert not list(project.cache.rglob("export.json"))

    def test_a_missing_compiler(self, project: Project) -> None:
        """Asked for only when something is to be compiled, and before anything is."""
        project.toml()
        environment = {name: value for name, value in fake_environment().items() if name != "NEML2_BUILD_COMPILER"}
        done = subprocess.run(
            command("build", "--json"),
            cwd=project.root,
            env={**environment, "CXX": "no-such-compiler"},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode in (1, 2)
        assert "no C++ compiler: 'no-such-compiler' is not on the PATH" in done.stderr
        assert "apt-get install g++" in done.stderr
        assert "Traceback" not in done.stderr
        assert not project.aoti.exists()


class TestDryRun:
    @pytest.mark.parametrize("state", ["nothing built", "up to date", "edited", "removed", "broken"])
    def test_it_writes_nothing(self, project: Project, cli: Any, state: str) -> None:
        if state != "nothing built":
            cli("build")
        if state == "edited":
            project.edit("a.i", ("factor = 1.5", "factor = 1.75"))
        elif state == "removed":
            shutil.rmtree(project.aoti)
        elif state == "broken":
            project.write("a.i", "[Models")
        before = listing(project.root)
        done = cli("build", "--dry-run", "--json")
        assert listing(project.root) == before
        assert done.code in ((1, 2) if state == "broken" else (0,))
        found = done.json
        assert found["dry_run"] is True
        plan = {task["task"]: task["what"] for task in found["tasks"]}
        if state == "up to date":
            assert plan == {}
            assert "everything is up to date" in done.err
        elif state == "nothing built":
            assert list(plan) == ["parse:eq", "export:eq", "lower-cpu:eq", "package:eq", "stub:eq"]
        elif state == "edited":
            assert plan["parse:eq"] == plan["export:eq"] == "run"
            assert plan["lower-cpu:eq"] == "unknown"
        elif state == "removed":
            assert plan == {"package:eq": "restore", "stub:eq": "run"} or plan == {
                "package:eq": "restore",
                "stub:eq": "restore",
            }
        else:
            assert found["ok"] is False
            assert found["failures"][0]["target"] == "eq"

    def test_it_foresees_what_comes_from_the_store(self, project: Project, cli: Any) -> None:
        cli("build")
        project.edit("a.i", ("factor = 1.5", "factor = 1.75"))
        cli("build")
        project.write("a.i", INPUT)
        plan = {task["task"]: task["what"] for task in cli("build", "-n", "--json").json["tasks"]}
        assert plan["export:eq"] == plan["lower-cpu:eq"] == plan["package:eq"] == "restore"
        assert cli("build", "--json").json["targets"]["restored"] == 1


class TestStatus:
    def test_states(self, project: Project, cli: Any) -> None:
        project.write("b.i", INPUT)
        project.toml(TWO)
        rows = cli("status", "--json").json["targets"]
        assert [(row["name"], row["state"]) for row in rows] == [("eq", "not built"), ("other", "not built")]
        cli("build")
        rows = cli("status", "--json").json["targets"]
        assert [row["state"] for row in rows] == ["up-to-date", "up-to-date"]
        project.edit("b.i", ("factor = 1.5", "factor = 1.75"))
        rows = cli("status", "--json").json["targets"]
        assert [row["state"] for row in rows] == ["up-to-date", "out of date"]
        assert "b.i" in rows[1]["why"]
        (row,) = cli("status", "other", "--json").json["targets"]
        assert {stage["stage"]: stage["what"] for stage in row["stages"]}["parse"] == "run"
        assert "Models/one/factor" in " ".join(reason for stage in row["stages"] for reason in stage["reasons"])

    def test_it_writes_nothing_and_speaks_on_standard_output(self, project: Project, cli: Any) -> None:
        cli("build")
        project.edit("a.i", ("factor = 1.5", "factor = 1.75"))
        before = listing(project.root)
        for words in (["status"], ["status", "-v"], ["explain"], ["list"], ["status", "--json"], ["explain", "--json"]):
            done = cli(*words)
            assert done.code == 0
            assert "eq" in done.out
        assert listing(project.root) == before

    def test_what_left_the_manifest_is_named(self, project: Project, cli: Any) -> None:
        project.write("b.i", INPUT)
        project.toml(TWO)
        cli("build")
        project.toml()
        assert "no longer in the manifest: other" in cli("status").out
        assert cli("clean", "other").code == 0
        assert not (project.aoti / "other").exists()
        assert (project.aoti / "eq").exists()
        assert "no longer" not in cli("status").out

    def test_a_wrong_input_is_a_state(self, project: Project, cli: Any) -> None:
        project.write("b.i", "[Models")
        project.toml(TWO)
        rows = cli("status", "--json").json["targets"]
        assert [row["state"] for row in rows] == ["not built", "error"]
        assert "b.i" in rows[1]["why"]


class TestList:
    def test_rows(self, project: Project, cli: Any) -> None:
        project.write("b.i", INPUT)
        project.toml(TWO + '[[model]]\ninput = "a.i"\ndriver = "driver"\nname = "driven"\n')
        assert cli("list", "--json").json == {
            "targets": [
                {"name": "eq", "input": "a.i", "model": "eq", "driver": None, "devices": ["cpu"]},
                {"name": "other", "input": "b.i", "model": "eq", "driver": None, "devices": ["cpu"]},
                {"name": "driven", "input": "a.i", "model": "eq", "driver": "driver", "devices": ["cpu"]},
            ]
        }
        assert len(cli("list").out.splitlines()) == 3


class TestExplain:
    def test_what_an_up_to_date_target_depends_on(self, project: Project, cli: Any) -> None:
        project.write("t.csv", "1\n")
        project.write("ext/mine.py", "x = 1\n")
        project.write(
            "a.i", INPUT.replace("factor = 1.5", "factor = 't'") + "[Tensors]\n  [t]\n    csv_file = t.csv\n  []\n[]\n"
        )
        project.toml('[[model]]\ninput = "a.i"\nmodel = "eq"\nload = ["ext/mine.py"]\n')
        cli("build")
        (row,) = cli("explain", "--json").json["targets"]
        assert row["state"] == "up-to-date"
        assert [last["outcome"] for last in row["last"]] == ["built"] * 5
        assert {"input a.i", "file t.csv", "file ext/mine.py"} <= set(row["depends_on"])
        assert any(line.startswith("packages ") and "torch" in line for line in row["depends_on"])

    def test_each_edit_is_named(self, project: Project, cli: Any) -> None:
        cli("build")
        project.edit("a.i", ("abs_tol = 1e-8", "abs_tol = 1e-10"))
        text = cli("explain").out
        assert "Solvers/newton/abs_tol" in text
        assert "1e-8" in text
        assert "1e-10" in text


class TestClean:
    def test_everything_and_back(self, project: Project, cli: Any) -> None:
        cli("build")
        before = project.tree()
        trial = cli("clean", "--dry-run", "--json")
        assert trial.json == {"ok": True, "removed": ["aoti/eq", "aoti/eq_aoti.i"], "dry_run": True}
        assert project.tree() == before
        done = cli("clean", "--json")
        assert done.json == {"ok": True, "removed": ["aoti/eq", "aoti/eq_aoti.i"], "dry_run": False}
        assert not project.tree()
        assert cli("build", "--json").json["targets"]["restored"] == 1
        assert project.tree() == before

    def test_only_what_a_build_made_is_removed(self, project: Project, cli: Any) -> None:
        cli("build")
        project.write("aoti/mine.txt", "x")
        project.write("aoti/eq2/file", "x")
        cli("clean")
        assert set(project.tree()) == {"mine.txt", "eq2/file"}

    def test_a_name_that_nobody_knows(self, cli: Any) -> None:
        done = cli("clean", "nobody")
        assert done.code == 2
        assert "nobody" in done.err


class TestQuickLook:
    """`null.unchanged` answers only when everything is up to date; each thing that it must see, one by one."""

    @pytest.fixture
    def quiet(self, project: Project, cli: Any, trust_stats: None, look: Any) -> Callable[[], int | None]:
        project.write("t.csv", "1\n")
        project.write("part.i", "[Models]\n  [three]\n    type = Scale\n    factor = '${env THREE}'\n  []\n[]\n")
        project.write("parts/p1.i", INPUT)
        project.write("ext/mine.py", "x = 1\n")
        text = INPUT.replace("factor = 1.5", "factor = 't'").replace("'one two'", "'one two three'")
        project.write("a.i", "!include part.i\n" + text + "[Tensors]\n  [t]\n    csv_file = t.csv\n  []\n[]\n")
        project.toml(
            '[[model]]\ninput = "a.i"\nmodel = "eq"\nload = ["ext/mine.py"]\n'
            '[[model]]\ninput = "parts/*.i"\nmodel = "*"\nname = "{stem}-{model}"\n'
        )
        os.environ["THREE"] = "3"
        try:
            assert cli("build").code == 0
            assert cli("build").code == 0

            def ask(**environment: str) -> int | None:
                return null.unchanged(None, {**os.environ, **environment}, "fake", False)

            yield ask
        finally:
            del os.environ["THREE"]

    def test_nothing_changed(self, quiet: Callable[..., int | None]) -> None:
        assert quiet() is not None
        assert quiet(UNRELATED="1", USER="x") is not None

    @pytest.mark.parametrize("name", ["a.i", "part.i", "t.csv", "parts/p1.i", "ext/mine.py", "neml2-build.toml"])
    def test_an_edited_file(self, project: Project, quiet: Callable[..., int | None], cli: Any, name: str) -> None:
        path = project.root / name
        data = path.read_bytes()
        stat = path.stat()
        path.write_bytes(data[:-1] + (b" " if data[-1:] == b"\n" else b"!"))
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        assert quiet() is None

    @pytest.mark.parametrize("name", ["parts/p2.i", "parts/p1.i"])
    def test_a_file_that_comes_or_goes(self, project: Project, quiet: Callable[..., int | None], cli: Any, name: str) -> None:
        if (project.root / name).exists():
            (project.root / name).unlink()
            project.write("parts/p3.i", INPUT)
        else:
            project.write(name, INPUT)
        assert quiet() is None

    def test_every_published_file(self, project: Project, quiet: Callable[..., int | None]) -> None:
        for name in project.tree():
            path = project.aoti / name
            kept = path.with_name("kept")
            os.link(path, kept)
            path.unlink()
            assert quiet() is None, name
            kept.rename(path)

    @pytest.mark.parametrize("environment", [{"THREE": "4"}, {"TORCHINDUCTOR_FREEZING": "1"}, {"CXXFLAGS": "-O1"}])
    def test_the_environment(self, quiet: Callable[..., int | None], environment: dict[str, str]) -> None:
        assert quiet(**environment) is None

    def test_who_compiles(self, quiet: Callable[..., int | None], look: dict[str, Any], machine: Any) -> None:
        assert null.unchanged(None, os.environ, "another", False) is None
        for field, value in (("libc", "x"), ("python", "x"), ("threads", 99), ("compiler", None)):
            look[field] = value
            assert quiet() is None, field
            del look[field]
        about = machine.packages["torch"]
        look["packages"] = {**machine.packages, "torch": {**about, "digest": "0"}}
        assert quiet() is None

    def test_a_lost_cache(self, project: Project, quiet: Callable[..., int | None]) -> None:
        shutil.rmtree(project.cache)
        assert quiet() is None

    def test_a_failure(self, project: Project, quiet: Callable[..., int | None], cli: Any) -> None:
        project.edit("t.csv", ("1", "2"))
        project.edit("parts/p1.i", ("factor = 2.5", "factor = 2.5\n    fail = 'lower'"))
        assert cli("build", "-k").code == 1
        assert quiet() is None
        assert cli("build", "-k", "--json").json["targets"]["failed"] > 0

    def test_a_part_of_the_targets(self, project: Project, quiet: Callable[..., int | None], cli: Any) -> None:
        project.edit("t.csv", ("1", "2"))
        project.edit("parts/p1.i", ("factor = 2.5", "factor = 3.5"))
        assert cli("build", "eq").code == 0
        assert quiet() is None
        found = cli("build", "--json").json["targets"]
        assert found["built"] > 0
        assert quiet() is not None


class TestProcess:
    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_interrupted(self, project: Project, tmp_path: Path, number: signal.Signals) -> None:
        """Ctrl-C, or a job that is cancelled: exit code 130, no traceback, and what was finished is kept."""
        project.toml()
        log = tmp_path / "log"
        build = subprocess.Popen(
            command("build", "-j", "1"),
            cwd=project.root,
            env=fake_environment(NEML2_BUILD_FAKE_DELAY="2", NEML2_BUILD_FAKE_LOG=str(log)),
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            # a shell ignores Ctrl-C for what it starts in the background, and that is inherited
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        while build.poll() is None and not (log.exists() and "lower" in log.read_text()):
            pass
        build.send_signal(number)
        _, err = build.communicate(timeout=30)
        assert build.returncode == 130, err
        assert "Traceback" not in err
        assert "interrupted" in err
        done = project.build()
        assert done.calls["export"] == 0
        assert done.summary["ok"]

    def test_a_closed_pipe(self, project: Project) -> None:
        project.toml()
        done = subprocess.run(
            ["bash", "-c", f"{' '.join(command('list'))} | head -0; exit ${{PIPESTATUS[0]}}"],
            cwd=project.root,
            env=fake_environment(),
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert "Traceback" not in done.stderr
        assert "Exception" not in done.stderr

    def test_an_ascii_terminal(self, project: Project) -> None:
        project.toml('[[model]]\ninput = "a.i"\nmodel = "eq"\nname = "größe"\n')
        done = project.command("build", PYTHONIOENCODING="ascii", LC_ALL="C")
        assert done.returncode == 0, done.stderr
        listed = project.command("list", "--json", PYTHONIOENCODING="ascii", LC_ALL="C")
        assert listed.returncode == 0, listed.stderr
        assert json.loads(listed.stdout)["targets"][0]["name"] == "größe"

    def test_modules_that_a_null_build_does_not_load(self, project: Project) -> None:
        project.toml()
        assert project.command("build").returncode == 0
        code = (
            "import sys\nfrom neml2_build.cli import main\n"
            "try:\n    main([])\nexcept SystemExit: pass\n"
            "print(sorted({'torch', 'neml2', 'numpy', 'rich', 'jinja2', 'fsspec', 'cryptography'} & set(sys.modules)))"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=project.root, env=fake_environment(), capture_output=True, text=True, timeout=60
        )
        assert done.stdout.strip() == "[]", done.stderr
