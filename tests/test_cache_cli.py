"""``neml2-build cache ...``: numbers, bounds, health, keys of a CI cache, packs; and what a build leaves behind."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import Project, fake_environment

from neml2_build import upkeep
from neml2_build.digest import digest
from neml2_build.store import Action, Output, Store, encode

TWO = """\
[[model]]
input = "a.i"
model = "eq"
[[model]]
input = "a.i"
model = "other"
"""


class TestStats:
    def test_numbers(self, project: Project, cli: Any) -> None:
        project.toml('max-size = "1 MiB"\n' + TWO)
        assert cli("-q").code == 0
        found = cli("cache", "stats", "--json").json
        assert found["actions"] == sum(stage["actions"] for stage in found["stages"].values())
        assert found["stages"]["lower"]["actions"] == 3
        assert found["counts"]["miss-no-record"] >= 5
        assert 0 < found["size"] < found["max_size"] == 1 << 20
        shutil.rmtree(project.aoti)
        shutil.rmtree(project.cache / "targets")
        assert cli("-q").code == 0
        again = cli("cache", "stats", "--json").json
        assert again["counts"]["hit-local"] >= 5
        assert again["size"] == found["size"]
        text = cli("cache", "stats").out
        assert "hit-local" in text and "miss-no-record" in text and "lower" in text

    def test_of_an_empty_cache(self, cli: Any) -> None:
        assert cli("cache", "stats", "--json").json["actions"] == 0
        assert "0 objects" in cli("cache", "stats").out

    def test_looking_counts_nothing(self, project: Project, cli: Any) -> None:
        assert cli("-q").code == 0
        shutil.rmtree(project.cache / "targets")
        before = cli("cache", "stats", "--json").json["counts"]
        for look in (["status"], ["explain"], ["--dry-run"], ["list"]):
            assert cli(*look).code == 0
        assert cli("cache", "stats", "--json").json["counts"] == before


class TestBounds:
    def test_size_holds_after_every_build_and_what_it_uses_stays(self, project: Project, cli: Any) -> None:
        project.toml(TWO)
        assert cli("-q").code == 0
        small = cli("cache", "stats", "--json").json["size"]
        for factor in range(10, 16):
            project.edit("a.i", ("factor = 1.5", f"factor = {factor}.5")) if factor == 10 else project.edit(
                "a.i", (f"factor = {factor - 1}.5", f"factor = {factor}.5")
            )
            assert cli("-q").code == 0
        grown = cli("cache", "stats", "--json").json["size"]
        assert grown > small
        limit = (grown + small) // 2
        project.toml(f"max-size = {limit}\n" + TWO)
        project.edit("a.i", ("factor = 15.5", "factor = 16.5"))
        assert cli("-q").code == 0
        assert cli("cache", "stats", "--json").json["size"] <= limit
        shutil.rmtree(project.aoti)
        shutil.rmtree(project.cache / "targets")
        assert cli("--json").json["graphs"] == {"lowered": 0, "reused": 3}

    def test_targets_that_a_build_did_not_touch_stay(self, project: Project, cli: Any, trust_stats: None) -> None:
        project.write("b.i", (project.root / "a.i").read_text().replace("2.5", "7.5"))
        project.toml('max-size = "1"\n' + TWO + '[[model]]\ninput = "b.i"\nmodel = "eq"\nname = "b"\n')
        assert cli("-q").code == 0
        project.edit("a.i", ("factor = 1.5", "factor = 3.5"))
        assert cli("-q").code == 0
        shutil.rmtree(project.aoti)
        assert cli("--json").json["graphs"]["lowered"] == 0

    def test_a_null_build_changes_nothing(self, project: Project, cli: Any) -> None:
        assert cli("-q").code == 0
        junk = project.cache / "logs" / "1-1.log"
        junk.parent.mkdir(exist_ok=True)
        junk.touch()
        os.utime(junk, (1, 1))
        assert cli("-q").code == 0
        assert junk.exists()
        project.edit("a.i", ("factor = 1.5", "factor = 3.5"))
        assert cli("-q").code == 0
        assert not junk.exists()

    def test_a_large_store_is_measured_and_swept_once_a_day(
        self, project: Project, cli: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(upkeep, "MANY", 0)
        collected = []
        collect = Store.gc
        monkeypatch.setattr(Store, "gc", lambda *arguments: collected.append(1) or collect(*arguments))
        assert cli("-q").code == 0
        assert len(collected) == 1
        project.edit("a.i", ("factor = 1.5", "factor = 3.5"))
        assert cli("-q").code == 0
        assert len(collected) == 1
        os.utime(project.cache / "swept", (time.time() - 1.1 * upkeep.DAY,) * 2)
        project.edit("a.i", ("factor = 3.5", "factor = 4.5"))
        assert cli("-q").code == 0
        assert len(collected) == 2
        project.toml('max-size = 1\n[[model]]\ninput = "a.i"\nmodel = "eq"\n')
        project.edit("a.i", ("factor = 4.5", "factor = 5.5"))
        assert cli("-q").code == 0
        assert len(collected) == 3

    def test_gc_command(self, project: Project, cli: Any) -> None:
        assert cli("-q").code == 0
        for _ in range(2):
            project.edit("a.i", ("factor = 1.5", "factor = 3.5"))
            assert cli("-q").code == 0
            project.edit("a.i", ("factor = 3.5", "factor = 1.5"))
        size = cli("cache", "stats", "--json").json["size"]
        done = cli("cache", "gc", "--older-than", "30d", "--json").json
        assert done["freed"] == 0 and done["size"] == size
        done = cli("cache", "gc", "--max-size", "0", "--json").json
        assert 0 < done["freed"] == size - done["size"]
        assert "freed" in cli("cache", "gc").out

    @pytest.mark.parametrize("option", [("--max-size", "big"), ("--older-than", "old"), ("--older-than", "3")])
    def test_wrong_numbers(self, cli: Any, option: tuple[str, str]) -> None:
        said = cli("cache", "gc", *option)
        assert said.code == 2 and option[1] in said.err

    def test_prepared_pieces(self, tmp_path: Path) -> None:
        for name in ("old", "new"):
            (tmp_path / f"{name}-folder").mkdir()
            (tmp_path / f"{name}-folder" / "header.gch").write_bytes(b"x")
            (tmp_path / f"{name}.json").write_text(f'{{"folder": "{name}-folder", "files": {{}}}}')
            (tmp_path / f"{name}.lock").touch()
        os.utime(tmp_path / "old.json", (time.time() - 8 * 86400,) * 2)
        (tmp_path / "broken.json").write_text("{")
        assert upkeep.sweep_pieces(tmp_path) == 1
        assert sorted(path.name for path in tmp_path.iterdir()) == ["broken.json", "new-folder", "new.json", "new.lock"]

    def test_a_used_piece_is_stamped(self, tmp_path: Path) -> None:
        from neml2_build.toolchain import prepared

        made = []

        def make(folder: Path) -> list[Path]:
            made.append(folder)
            return []

        first = prepared.piece(tmp_path, "about", make)
        (pointer,) = tmp_path.glob("*.json")
        os.utime(pointer, (time.time() - 8 * 86400,) * 2)
        assert prepared.piece(tmp_path, "about", make) == first and len(made) == 1
        assert upkeep.sweep_pieces(tmp_path) == 0
        assert first.is_dir()

    def test_logs(self, tmp_path: Path) -> None:
        now = time.time()
        for index in range(6):
            path = tmp_path / f"{index}.log"
            path.touch()
            os.utime(path, (now - index,) * 2)
        os.utime(tmp_path / "1.log", (now - 8 * 86400,) * 2)
        assert upkeep.sweep_logs(tmp_path, keep=3) == 3
        assert sorted(path.name for path in tmp_path.iterdir()) == ["0.log", "2.log", "3.log"]
        assert upkeep.sweep_logs(tmp_path / "missing") == 0


class TestCheck:
    def test_reports_and_repairs(self, project: Project, cli: Any) -> None:
        assert cli("-q").code == 0
        assert cli("cache", "check").code == 0
        victim = max((project.cache / "objects").rglob("*"), key=lambda path: path.is_file() and path.stat().st_size)
        victim.chmod(0o644)
        victim.write_bytes(victim.read_bytes()[:-1] + b"?")
        said = cli("cache", "check")
        assert said.code == 1 and "object-broken" in said.out and "--repair" in said.err
        found = cli("cache", "check", "--json").json
        assert not found["ok"] and found["problems"][0]["kind"] == "object-broken"
        assert cli("cache", "check", "--repair").code in (0, 1)
        assert cli("cache", "check", "--repair").code in (0, 1)
        assert cli("cache", "check").code == 0
        assert cli("--json").json["ok"]


class TestKey:
    def test_it_is_the_inputs_and_who_compiles(self, project: Project, cli: Any) -> None:
        found = cli("cache", "key", "--json").json
        key, prefixes = found["key"], found["restore"]
        assert cli("cache", "key").out == key + "\n"
        assert cli("cache", "key", "--restore").out.split() == prefixes
        assert [key.startswith(prefix) for prefix in prefixes] == [True, True]
        assert key.startswith("neml2-build-linux-") and len(key) < 200 and len(key.split("-")[-1]) == 16
        assert cli("-q").code == 0
        assert cli("cache", "key").out == key + "\n", "a build does not change it"
        project.edit("a.i", ("factor = 1.5", "factor = 3.5"))
        other = cli("cache", "key").out.strip()
        assert other != key and other.startswith(prefixes[0])
        project.edit("a.i", ("factor = 3.5", "factor = 1.5"))
        assert cli("cache", "key").out.strip() == key
        project.toml(TWO)
        assert cli("cache", "key").out.strip() != key

    def test_the_same_in_another_folder(self, project: Project, cli: Any, tmp_path: Path) -> None:
        shutil.copytree(project.root, tmp_path / "elsewhere")
        command = project.command("cache", "key")
        other = project.command("cache", "key", cwd=tmp_path / "elsewhere", HOME=str(tmp_path), USER="somebody")
        assert command.stdout and command.stdout == other.stdout

    def test_portable_code_has_no_cpu_in_it(self, project: Project, cli: Any, look: dict[str, Any]) -> None:
        def key(march: str, native: str) -> str:
            project.toml(f'march = "{march}"\n' + TWO)
            look["cpu"] = {"machine": "x86_64", "native": native, "flags": native}
            return cli("cache", "key").out

        assert key("native", "a") != key("native", "b")
        assert key("x86-64-v3", "a") == key("x86-64-v3", "b")

    def test_of_a_missing_input(self, project: Project, cli: Any) -> None:
        (project.root / "a.i").unlink()
        said = cli("cache", "key")
        assert said.code == 2 and said.out == "" and "a.i" in said.err


class TestPack:
    def test_moves_what_the_manifest_needs_and_nothing_else(self, project: Project, cli: Any) -> None:
        project.edit("a.i", ("factor = 1.5", "factor = 3.5"))
        assert cli("-q").code == 0
        project.edit("a.i", ("factor = 3.5", "factor = 1.5"))
        assert cli("-q").code == 0
        tree = project.tree()
        packed = cli("cache", "pack", "x.pack", "--json").json
        everything = cli("cache", "stats", "--json").json
        assert packed["ok"] and packed["missing"] == [] and packed["actions"] == 5 < everything["actions"]
        shutil.rmtree(project.cache)
        shutil.rmtree(project.aoti)
        taken = cli("cache", "unpack", "x.pack", "--json").json
        assert taken["actions"] == 5 and taken["refused"] == []
        done = cli("--json").json
        assert done["targets"]["restored"] == 1 and done["graphs"] == {"lowered": 0, "reused": 2}
        assert project.tree() == tree
        assert cli("cache", "stats", "--json").json["stages"]["lower"]["actions"] == 2
        assert cli("cache", "unpack", "x.pack", "--json").json["present"] == 5

    def test_some_targets(self, project: Project, cli: Any) -> None:
        project.toml(TWO)
        assert cli("-q").code == 0
        whole = cli("cache", "pack", "x.pack", "--json").json
        part = cli("cache", "pack", "y.pack", "other", "--json").json
        assert part["ok"] and part["actions"] < whole["actions"]

    def test_same_store_same_bytes(self, project: Project, cli: Any) -> None:
        assert cli("-q").code == 0
        assert cli("cache", "pack", "x.pack").code == cli("cache", "pack", "y.pack").code == 0
        assert (project.root / "x.pack").read_bytes() == (project.root / "y.pack").read_bytes()

    def test_what_is_not_built_is_said(self, project: Project, cli: Any) -> None:
        project.toml(TWO)
        assert cli("-q", "eq").code == 0
        said = cli("cache", "pack", "x.pack")
        assert (
            said.code == 1 and "other" in said.err and "eq" not in said.err.partition("everything of")[2].partition(" is ")[0]
        )
        assert cli("cache", "pack", "x.pack", "eq").code == 0

    def test_what_is_no_pack(self, project: Project, cli: Any) -> None:
        project.write("x.pack", "nonsense")
        assert cli("cache", "unpack", "x.pack").code == 2
        assert cli("cache", "unpack", "missing.pack").code == 2


class TestKeys:
    def test_keygen(self, project: Project, cli: Any) -> None:
        pytest.importorskip("cryptography", reason="signatures need the package cryptography")
        said = cli("cache", "keygen", "key")
        assert said.code == 0 and said.out.strip() == (project.root / "key.pub").read_text().strip()
        assert (project.root / "key").stat().st_mode & 0o777 == 0o600
        assert cli("cache", "keygen", "key").code == 2
        other = cli("cache", "keygen", "other", "--json").json
        assert other["trusted_key"] == (project.root / "other.pub").read_text().strip()


_LOADED = """\
import sys
from neml2_build import records
records._SETTLED_NS = -(10**18)  # believe every stat at once
from neml2_build.cli import main
try:
    main(sys.argv[1:])
finally:
    print(sorted({"neml2_build.remote", "neml2_build.signing", "cryptography", "fsspec", "torch"} & set(sys.modules)))
"""


def test_nothing_of_a_shared_store_is_loaded_before_it_is_asked(project: Project) -> None:
    def loaded(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", _LOADED, *arguments],
            cwd=project.root,
            env=fake_environment(),
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()[-1]

    project.toml()
    for arguments in (["-q"], ["-q"], ["status"], ["cache", "stats"]):
        assert loaded(*arguments) == "[]"
    project.toml('remote = "../shared"\n[[model]]\ninput = "a.i"\nmodel = "eq"\n')
    for arguments in (["-q"], ["-q", "--dry-run"], ["status"]):
        assert loaded(*arguments) == "[]", "a null build asks nobody"
    project.edit("a.i", ("factor = 1.5", "factor = 3.5"))
    assert loaded("-q", "--dry-run") == "[]"
    assert "neml2_build.remote" in loaded("-q")


def test_help_of_every_command_has_an_example(cli: Any) -> None:
    for command in ("stats", "gc", "check", "key", "keygen", "pack", "unpack"):
        said = cli("cache", command, "--help")
        assert said.code == 0 and f"neml2-build cache {command}" in said.out, command


def test_stats_and_gc_of_a_thousand_targets(tmp_path: Path) -> None:
    """Ten results a target: seconds, not minutes."""
    for number in range(10_000):
        made, key = digest(b"%d" % number), digest(f"key {number}")
        action = Action(key=key, stage="lower", target="t", outputs=(Output("graph.pt2", made, 5),))
        for kind, name, data in (("objects", made, b"%5d" % number), ("actions", f"{key}.json", encode(action))):
            path = tmp_path / kind / name[:2] / name[2:]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    with Store(tmp_path) as store:
        began = time.perf_counter()
        found = store.stats()
        counted = time.perf_counter()
        assert store.size() == (10_000, found["size"])
        measured = time.perf_counter()
        removed = store.gc(found["size"] // 2)
        collected = time.perf_counter()
    assert found["actions"] == found["objects"] == 10_000
    assert 4_900 < removed.actions < 5_100 and removed.size <= found["size"] // 2
    print(f"stats {counted - began:.2f} s, size {measured - counted:.2f} s, gc {collected - measured:.2f} s")
    assert collected - began < 30
