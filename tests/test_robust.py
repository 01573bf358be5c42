"""What a build must survive: kills, company, damage, wrong inputs, full disks, odd names and places."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from conftest import INPUT, Project, command, digests, fake_environment

from neml2_build.manifest import Model
from neml2_build.stages import package
from neml2_build.store import Store

NAMES = ("alpha", "beta", "gamma")
TOML = "".join(f'[[model]]\ninput = "{name}.i"\nmodel = "eq"\nname = "{name}"\n' for name in NAMES)


def several(project: Project, factor: str) -> None:
    """Three targets of two graphs each, of which the second is the same everywhere."""
    for number, name in enumerate(NAMES):
        project.write(f"{name}.i", INPUT.replace("factor = 1.5", f"factor = {factor}{number}"))
    project.models = [Model(input=f"{name}.i", model="eq", name=name) for name in NAMES]
    project.toml(TOML)


def target_tree(tree: dict[str, str], name: str) -> dict[str, str]:
    return {path: found for path, found in tree.items() if path.startswith(f"{name}/")}


def stored_graphs(project: Project) -> set[str]:
    """Digests of all graphs whose package is in the store, whole."""
    with Store(project.cache) as store:
        keys = [path.parent.name + path.stem for path in (project.cache / "actions").rglob("*.json")]
        actions = [action for key in keys if (action := store.peek(key)) is not None]
        for action in actions:
            for output in action.outputs:
                store.read(output.digest)
        assert not store.events
    return {action.made_of["graph"] for action in actions if action.stage == "lower"}


def lines(log: Path) -> list[tuple[str, str]]:
    """What the fake compilers of all processes did: (call, subject)."""
    if not log.exists():
        return []
    return [(line.split()[0], line.split()[1]) for line in log.read_text().splitlines()]


#: Kills its own process group at the nth change of a name, or opening of a file for writing.
KILL = """
import os, signal, sys
left = int(sys.argv[1])
def hook(event, arguments):
    global left
    if event in ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "ctypes.dlopen") or (
        event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
    ):
        left -= 1
        if left == 0:
            os.killpg(0, signal.SIGKILL)
from neml2_build.cli import main
sys.addaudithook(hook)
main(["build"])
"""


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, str], dict[str, str]]:
    """What is published of the old inputs, and of the new ones."""
    trees = []
    for factor in ("1.", "2."):
        project = Project(tmp_path_factory.mktemp("state") / "p")
        several(project, factor)
        assert project.build().summary["ok"]
        trees.append(project.tree())
    return trees[0], trees[1]


class TestKills:
    def assert_whole(self, project: Project, states: tuple[dict[str, str], ...]) -> None:
        tree = {path: found for path, found in project.tree().items() if not path.startswith(package.STAGING)}
        for name in NAMES:
            mine = target_tree(tree, name)
            assert mine in ({}, *(target_tree(state, name) for state in states)), name
        for name, found in tree.items():
            assert found in {state.get(name) for state in states}, name

    def assert_mended(self, project: Project, states: tuple[dict[str, str], ...], monkeypatch: pytest.MonkeyPatch) -> None:
        log = project.root / "log"
        monkeypatch.setenv("NEML2_BUILD_FAKE_LOG", str(log))
        stored = stored_graphs(project)
        done = project.build()
        assert done.summary["ok"], done.summary["failures"]
        lowered = [graph for what, graph in lines(log) if what == "lower"]
        assert not stored.intersection(lowered)
        assert len(set(lowered)) == len(lowered)
        assert project.tree() == states[1]
        assert project.build().targets == {"up_to_date": len(NAMES)}
        with Store(project.cache) as store:
            assert store.check().ok

    @pytest.mark.parametrize("seed", range(20))
    def test_killed_at_a_random_step(
        self, project: Project, states: tuple[dict[str, str], dict[str, str]], seed: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        chance = random.Random(seed)
        cold = seed % 2 == 0
        if not cold:
            several(project, "1.")
            project.build()
        several(project, "2.")
        step = chance.randrange(5, 150)
        killed = subprocess.run(
            [sys.executable, "-c", KILL, str(step)],
            cwd=project.root,
            env=fake_environment(),
            capture_output=True,
            text=True,
            timeout=60,
            start_new_session=True,
        )
        assert killed.returncode in (-signal.SIGKILL, 0), killed.stderr
        self.assert_whole(project, states[1:] if cold else states)
        self.assert_mended(project, states, monkeypatch)

    @pytest.mark.parametrize("seed", range(4))
    def test_killed_at_a_random_time(
        self, project: Project, states: tuple[dict[str, str], dict[str, str]], seed: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        several(project, "2.")
        log = project.root / "first-log"
        environment = fake_environment(NEML2_BUILD_FAKE_DELAY="0.03", NEML2_BUILD_FAKE_LOG=str(log))
        build = subprocess.Popen(
            command("build"), cwd=project.root, env=environment, stderr=subprocess.DEVNULL, start_new_session=True
        )
        wanted = random.Random(seed).randrange(0, 7)  # kill after so many calls
        while build.poll() is None and len(lines(log)) < wanted:
            time.sleep(0.001)
        with_group = build.pid
        if build.poll() is None:
            os.killpg(with_group, signal.SIGKILL)
        build.wait()
        self.assert_whole(project, states[1:])
        self.assert_mended(project, states, monkeypatch)


class TestCompany:
    def run(self, *folders: Path, log: Path) -> None:
        environment = fake_environment(NEML2_BUILD_FAKE_DELAY="0.02", NEML2_BUILD_FAKE_LOG=str(log))
        builds = [
            subprocess.Popen(
                command("build", "--json"), cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
            for folder in folders
        ]
        for build in builds:
            out, err = build.communicate(timeout=120)
            assert build.returncode == 0, err.decode()
            assert json.loads(out)["ok"]

    def assert_once(self, log: Path, graphs: int) -> None:
        count = Counter(lines(log))
        assert len([1 for what, _ in count if what == "lower"]) == graphs
        assert {number for (what, _), number in count.items() if what == "lower"} == {1}

    def test_four_builds_in_one_directory(self, project: Project) -> None:
        several(project, "1.")
        log = project.root / "log"
        self.run(*[project.root] * 4, log=log)
        self.assert_once(log, 4)
        tree = project.tree()
        assert len(tree) == 4 * len(NAMES)
        for name in NAMES:
            assert set(target_tree(tree, name)) == {
                f"{name}/metadata.json",
                f"{name}/cpu/float64/eq_one.pt2",
                f"{name}/cpu/float64/eq_two.pt2",
            }
        assert project.build().targets == {"up_to_date": 3}
        with Store(project.cache) as store:
            assert store.check().ok

    def test_two_projects_with_one_store(self, project: Project, tmp_path: Path) -> None:
        other = Project(tmp_path / "other")
        for one in (project, other):
            several(one, "1.")
            one.options["cache"] = str(tmp_path / "store")
            one.toml(f'cache = "{tmp_path / "store"}"\n' + TOML)
        log = tmp_path / "log"
        self.run(project.root, other.root, log=log)
        self.assert_once(log, 4)
        assert Counter(lines(log))["export", "alpha"] == 1
        assert project.tree() == other.tree()
        assert project.build().targets == {"up_to_date": 3}
        assert other.build().targets == {"up_to_date": 3}

    def test_a_build_beside_the_removal_of_what_is_published(self, project: Project) -> None:
        several(project, "1.")
        project.build()
        before = project.tree()
        for _ in range(5):
            build = subprocess.Popen(command("build"), cwd=project.root, env=fake_environment(), stderr=subprocess.PIPE)
            shutil.rmtree(project.aoti, ignore_errors=True)
            _, err = build.communicate(timeout=60)
            assert b"Traceback" not in err
        assert project.build().summary["ok"]
        assert project.tree() == before


class TestDamage:
    def test_damage_is_repaired_and_said(self, project: Project, cli: Any) -> None:
        assert cli("build").code == 0
        (project.aoti / "eq/cpu/float64/eq_one.pt2").write_bytes(b"x")
        done = cli("build", "-v")
        assert done.code == 0
        assert "output-changed: aoti/eq/cpu/float64/eq_one.pt2" in done.err
        for path in (project.cache / "objects").rglob("*"):
            if path.is_file() and path.read_bytes().startswith(b"fake"):
                path.chmod(0o644)
                path.write_bytes(b"fakf" + path.read_bytes()[4:])
        shutil.rmtree(project.aoti)
        done = cli("build", "--json")
        assert done.code == 0
        assert done.json["targets"]["built"] == 1
        assert done.json["graphs"]["lowered"] == 2
        assert "object-broken" in done.err


def wrong_inputs() -> dict[str, tuple[str | bytes | None, dict[str, Any], list[str]]]:
    """Name → text of ``bad.i`` (None: no such file), options of the target, words of the message."""
    table = "[Models]\n  [eq]\n    type = T\n    t = 't'\n  []\n[]\n[Tensors]\n  [t]\n    csv_file = no.csv\n  []\n[]\n"
    return {
        "syntax": ("[Models]\n  [eq]\n    type = \n  []\n[]\n[", {}, ["bad.i:"]),
        "not closed": ("[Models]\n  [eq]\n    type = T\n", {}, ["bad.i"]),
        "stray": ("[Models]\n  [eq]\n    type = T\n  []\n[]\n}{ @@\n", {}, ["bad.i"]),
        "unknown model": (INPUT.replace("[eq]", "[equation]"), {}, ["bad.i", "Models/eq"]),
        "cycle": ("!include bad.i\n" + INPUT, {}, ["bad.i"]),
        "missing include": ("!include no.i\n" + INPUT, {}, ["bad.i:1", "no.i"]),
        "not UTF-8": (INPUT.encode() + b"# \xff\xfe\n", {}, ["bad.i", "UTF-8"]),
        "nul bytes": (b"[Models]\n\x00\n[]\n", {}, ["bad.i"]),
        "empty": ("", {}, ["bad.i"]),
        "binary": (bytes(range(256)) * 8, {}, ["bad.i"]),
        "missing csv": (table, {}, ["bad.i:9", "no.csv"]),
        "unset environment": (INPUT.replace("1.5", "${env NEML2_NO_SUCH}"), {}, ["bad.i", "NEML2_NO_SUCH"]),
        "undefined variable": (INPUT.replace("1.5", "${nope}"), {}, ["bad.i", "nope"]),
        "wrong override": (INPUT, {"overrides": ["Models/none/factor:=1"]}, ["Models/none"]),
        "failing export": (INPUT.replace("factor = 1.5", "factor = 1.5\n    fail = 'export'"), {}, ["bad.i", "told to fail"]),
    }


class TestWrongInputs:
    @pytest.mark.parametrize("kind", wrong_inputs())
    def test_one_message_and_the_others_are_built(self, project: Project, cli: Any, kind: str) -> None:
        text, options, words = wrong_inputs()[kind]
        if text is not None:
            project.write("bad.i", text)
        extra = "".join(f"{key} = {json.dumps(value)}\n" for key, value in options.items())
        bad = f'[[model]]\ninput = "bad.i"\nmodel = "eq"\nname = "bad"\n{extra}'
        project.toml(bad + '[[model]]\ninput = "a.i"\nmodel = "eq"\nname = "good"\n')
        done = cli("build", "-k", "--json")
        assert done.code in (1, 2)
        assert "Traceback" not in done.err
        assert done.json["targets"] == {"total": 2, "built": 1, "restored": 0, "up_to_date": 0, "failed": 1, "skipped": 0}
        (failure,) = done.json["failures"]
        assert failure["target"] == "bad"
        for word in words:
            assert word in failure["message"], failure["message"]
        assert failure["message"] in done.err
        assert "[parse:bad]" in failure["message"] or "[export:bad]" in failure["message"]
        assert (project.aoti / "good/metadata.json").exists()
        assert not (project.aoti / "bad").exists()
        assert not (project.aoti / package.STAGING).exists()

    @pytest.mark.parametrize("kind", ["no such file", "directory", "no permission"])
    def test_inputs_that_cannot_be_read(self, project: Project, cli: Any, kind: str) -> None:
        if kind == "directory":
            (project.root / "bad.i").mkdir()
        elif kind == "no permission":
            if os.geteuid() == 0:
                pytest.skip("root reads everything")
            project.write("bad.i", INPUT).chmod(0)
        project.toml(
            '[[model]]\ninput = "bad.i"\nmodel = "eq"\nname = "bad"\n[[model]]\ninput = "a.i"\nmodel = "eq"\nname = "good"\n'
        )
        done = cli("build", "-k", "--json")
        assert done.code in (1, 2)
        assert "Traceback" not in done.err
        assert "bad.i" in done.err
        assert len(done.json["failures"]) == 1
        assert (project.aoti / "good/metadata.json").exists()
        alone = cli("build")
        assert alone.code in (1, 2)
        assert "bad.i" in alone.err

    @pytest.mark.parametrize("how", ['model = "*"', 'driver = "driver"'])
    def test_an_input_that_must_be_read_to_know_its_targets(self, project: Project, cli: Any, how: str) -> None:
        project.write("bad.i", "[Models]\n  [")
        project.toml(f'[[model]]\ninput = "bad.i"\n{how}\n[[model]]\ninput = "a.i"\nmodel = "eq"\nname = "good"\n')
        done = cli("build", "-k", "--json")
        assert done.code in (1, 2)
        assert "bad.i" in done.err
        assert "Traceback" not in done.err
        assert (project.aoti / "good/metadata.json").exists()
        assert not done.json["ok"]

    def test_what_was_built_before_a_mistake_stays(self, project: Project, cli: Any) -> None:
        assert cli("build").code == 0
        before = project.tree()
        project.write("a.i", "[Models]\n  [")
        done = cli("build")
        assert done.code in (1, 2)
        assert project.tree() == before
        project.write("a.i", INPUT)
        assert cli("build", "--json").json["targets"]["built"] == 0


class TestNoSpace:
    """The limit is on the size of a file where nobody may mount, a file system of 600 kB where one may."""

    def test_a_limit_of_the_file_size(self, project: Project) -> None:
        project.build()
        before = project.tree()
        actions = digests(project.cache / "actions")
        project.edit("a.i", ("factor = 1.5", f"factor = '{'1 ' * 4000}'"))
        project.toml()
        limited = subprocess.run(
            ["bash", "-c", f'ulimit -f 4; trap "" XFSZ; exec {" ".join(command("build", "--json"))}'],
            cwd=project.root,
            env=fake_environment(),
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert limited.returncode == 1, limited.stderr
        assert "Traceback" not in limited.stderr
        assert "file size limit" in limited.stderr
        assert "remedy" in limited.stderr
        assert project.tree() == before
        assert actions.items() <= digests(project.cache / "actions").items()
        done = project.build()
        assert done.targets == {"built": 1}

    @pytest.mark.skipif(os.geteuid() != 0 or sys.platform != "linux", reason="mounting needs root")
    @pytest.mark.parametrize("what", ["cache", "aoti"])
    def test_a_full_disk(self, project: Project, what: str) -> None:
        place = project.root / what
        place.mkdir()
        if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(place)], capture_output=True).returncode:
            pytest.skip("this root may not mount")
        try:
            project.build()
            before = project.tree()
            free = os.statvfs(place).f_bavail * os.statvfs(place).f_frsize
            filler = place / "filler"
            filler.write_bytes(b"x" * (free - 8192 if free > 8192 else 0))
            project.edit("a.i", ("factor = 1.5", f"factor = '{'1 ' * 10000}'"), ("type = Newton", f"type = '{'N' * 60000}'"))
            done = project.build(keep_going=True)
            assert done.targets == {"failed": 1}
            (failure,) = done.summary["failures"]
            assert "full" in failure["message"] or "space" in failure["message"].lower()
            assert "remedy" in failure["message"]
            assert {name: found for name, found in project.tree().items() if name != "filler"} == before
            filler.unlink()
            done = project.build()
            assert done.summary["ok"], done.summary["failures"]
            left = [path for path in place.rglob("*") if path.name.endswith(".tmp")]
            assert not left
        finally:
            subprocess.run(["umount", "-l", str(place)], check=True)


class TestNamesAndPlaces:
    @pytest.mark.parametrize("name", ["two words", "v1.2", "größe", "模型", "a-b_c", "x+y"])
    def test_names_of_targets(self, project: Project, cli: Any, name: str) -> None:
        project.toml(f'[[model]]\ninput = "a.i"\nmodel = "eq"\nname = "{name}"\n')
        assert cli("build").code == 0
        assert (project.aoti / name / "metadata.json").exists()
        assert (project.aoti / f"{name}_aoti.i").exists()
        again = cli("build", name, "--json")
        assert again.json["targets"]["up_to_date"] == 1
        assert cli("clean", name).code == 0
        assert not list(project.aoti.iterdir())

    @pytest.mark.parametrize("name", ["two words.i", "v1.2.final.i", "größe.i", "моделі/模型.i", "-dash.i", "quo'te.i"])
    def test_names_of_inputs(self, project: Project, cli: Any, name: str) -> None:
        project.write(name, INPUT)
        project.toml(f'[[model]]\ninput = "{name}"\nmodel = "eq"\n')
        assert cli("build").code == 0
        assert cli("build", "--json").json["targets"]["up_to_date"] == 1

    def test_a_project_path_with_spaces_and_letters_of_all_kinds(self, look: Any, tmp_path: Path) -> None:
        project = Project(tmp_path / "my project (ü) 模型 'q' $x")
        project.toml()
        done = project.command("build", "--json")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["targets"]["built"] == 1

    def test_another_working_directory_and_a_relative_manifest(self, project: Project, tmp_path: Path) -> None:
        project.toml()
        (tmp_path / "else/where").mkdir(parents=True)
        manifest = os.path.relpath(project.root / "neml2-build.toml", tmp_path / "else/where")
        done = project.command("--json", "--manifest", manifest, cwd=tmp_path / "else/where")
        assert done.returncode == 0, done.stderr
        assert (project.aoti / "eq/metadata.json").exists()
        assert sorted(path.name for path in (tmp_path / "else").rglob("*")) == ["where"]
        (project.root / "sub/folder").mkdir(parents=True)
        below = project.command("--json", cwd=project.root / "sub/folder")
        assert json.loads(below.stdout)["targets"]["up_to_date"] == 1

    def test_a_project_reached_through_a_link(self, project: Project, tmp_path: Path) -> None:
        project.toml()
        (tmp_path / "link").symlink_to(project.root)
        first = project.command("build", "--json", cwd=tmp_path / "link")
        assert json.loads(first.stdout)["targets"]["built"] == 1
        second = project.command("build", "--json", "-f", str(project.root / "neml2-build.toml"))
        assert json.loads(second.stdout)["targets"]["up_to_date"] == 1

    def test_a_read_only_source_tree(self, look: Any, tmp_path: Path) -> None:
        """Outputs and store lie elsewhere; nothing is written beside the sources."""
        project = Project(tmp_path / "source")
        project.options.update(output=str(tmp_path / "out/aoti"), cache=str(tmp_path / "out/cache"))
        before = sorted(project.root.rglob("*"))
        for path in (*before, project.root):
            path.chmod(0o555 if path.is_dir() else 0o444)
        try:
            done = project.build()
            assert done.targets == {"built": 1}
            assert project.build().targets == {"up_to_date": 1}
            assert sorted(project.root.rglob("*")) == before
        finally:
            project.root.chmod(0o755)

    def test_a_read_only_project_restores_nothing_and_says_why(self, project: Project) -> None:
        if os.geteuid() == 0:
            pytest.skip("root writes everywhere")
        project.root.chmod(0o555)
        try:
            done = project.build(keep_going=True)
            assert done.targets == {"failed": 1}
            assert "remedy" in done.summary["failures"][0]["message"]
        finally:
            project.root.chmod(0o755)


class TestOutputInTheWay:
    @pytest.mark.parametrize("name", ["aoti", "cache"])
    def test_a_file_where_a_folder_belongs(self, project: Project, cli: Any, name: str) -> None:
        project.write(name, "a file")
        done = cli("build")
        assert done.code in (1, 2)
        assert "Traceback" not in done.err
        assert name in done.err
        assert (project.root / name).read_text() == "a file"

    def test_a_folder_where_the_stub_belongs(self, project: Project, cli: Any) -> None:
        (project.aoti / "eq_aoti.i").mkdir(parents=True)
        done = cli("build")
        assert done.code == 1
        assert "Traceback" not in done.err
        assert "eq_aoti.i" in done.err


def test_records_are_readable_json(project: Project) -> None:
    project.build()
    for path in (project.cache / "targets").rglob("*.json"):
        assert msgspec.json.decode(path.read_bytes())["version"] == 1
