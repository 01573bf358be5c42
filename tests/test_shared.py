"""Builds on a shared store: what one machine made is not made by another, whatever the shared store does."""

from __future__ import annotations

import itertools
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Outcome, Project, listing

from neml2_build.remote import FolderBackend
from neml2_build.store import ObjectMissing, Store

Machines = Callable[..., Project]


@pytest.fixture
def machines(tmp_path: Path, look: dict[str, Any]) -> Machines:
    """A fresh checkout of the same project on another machine, behind the shared folder ``shared``."""
    count = itertools.count(1)

    def make(**options: Any) -> Project:
        number = next(count)
        home = tmp_path / f"home{number}"
        home.mkdir()
        project = Project(tmp_path / f"machine{number}" / "project")
        project.environ.update(HOME=str(home), USER=f"user{number}", TMPDIR=str(home))
        project.options = {"remote": str(tmp_path / "shared"), **options}
        return project

    return make


def kinds(done: Outcome) -> set[str]:
    return {event.kind for event in done.build.store.events}


class TestSharing:
    def test_what_one_machine_made_another_does_not_make(self, machines: Machines) -> None:
        writer, reader = machines(remote_write=True), machines()
        first = writer.build()
        assert first.graphs == (2, 0) and first.calls == {"export": 1, "lower": 2}
        second = reader.build()
        assert second.calls == {} and second.graphs == (0, 2) and second.targets == {"restored": 1}
        assert second.build.store.counts["hit-remote"] >= 4
        assert reader.tree() == writer.tree()
        assert kinds(first) == kinds(second) == set()

    def test_read_only_unless_told_otherwise(self, machines: Machines, tmp_path: Path) -> None:
        (tmp_path / "shared").mkdir()
        assert machines().build().graphs == (2, 0)
        assert list((tmp_path / "shared").iterdir()) == []
        writer = machines()
        writer.environ["NEML2_BUILD_REMOTE_WRITE"] = "1"
        assert writer.build().graphs == (2, 0)
        assert machines().build().graphs == (0, 2)

    def test_an_edit_makes_only_what_it_touches(self, machines: Machines) -> None:
        machines(remote_write=True).build()
        reader = machines()
        reader.edit("a.i", ("factor = 1.5", "factor = 7.5"))
        done = reader.build()
        assert done.graphs == (1, 1) and done.calls == {"export": 1, "lower": 1}

    def test_a_null_build_asks_nobody(self, machines: Machines, monkeypatch: pytest.MonkeyPatch, trust_stats: None) -> None:
        writer = machines(remote_write=True)
        writer.build()
        asked: list[str] = []
        monkeypatch.setattr(FolderBackend, "get", lambda self, name, limit: asked.append(name))
        done = writer.build()
        assert done.targets == {"up_to_date": 1} and asked == [] and done.build.store.remote is None
        for preview in (run.preview() for run in machines().start().select()):
            assert preview[0].what == "run"
        assert asked == []

    def test_graphs_are_looked_up_at_once(self, machines: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
        """Each look-up of a graph waits until as many are under way as the target has graphs: one by one would never end."""
        writer, reader = machines(remote_write=True), machines()
        (run,) = writer.build().build.select()
        lowered = {one.key for one in run.lowered["cpu"]}
        assert len(lowered) == 2
        gate = threading.Barrier(2, timeout=20)
        find = Store.find

        def meet(store: Store, key: str) -> Any:
            if key in lowered:
                lowered.discard(key)
                gate.wait()
            return find(store, key)

        monkeypatch.setattr(Store, "find", meet)
        assert reader.build().graphs == (0, 2)
        assert lowered == set() and not gate.broken


class TestTrouble:
    @pytest.mark.parametrize("damage", ["cut", "flip", "gone", "swap"])
    def test_what_is_damaged_is_made_again(self, machines: Machines, tmp_path: Path, damage: str) -> None:
        writer = machines(remote_write=True)
        writer.build()
        contents = sorted((tmp_path / "shared" / "cas").iterdir())
        texts = [path.read_bytes() for path in contents]
        for index, path in enumerate(contents):
            if damage == "gone":
                path.unlink()
            elif damage == "cut":
                path.write_bytes(texts[index][:-3])
            elif damage == "flip":
                path.write_bytes(texts[index][:-1] + bytes([texts[index][-1] ^ 1]))
            else:
                path.write_bytes(texts[index - 1])
        reader = machines()
        done = reader.build()
        assert done.targets == {"built": 1} and done.graphs == (2, 0)
        assert reader.tree() == writer.tree()
        assert kinds(done) <= {"remote-object-broken", "remote-object-missing", "remote-off"} and kinds(done)

    def test_a_shared_store_that_is_not_there(self, machines: Machines) -> None:
        done = machines().build()
        assert done.targets == {"built": 1}
        assert [event.kind for event in done.build.store.events] == ["remote-off"]

    def test_one_that_fails_is_left_alone(self, machines: Machines, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        (tmp_path / "shared").mkdir()
        asked: list[str] = []

        def fail(self: Any, name: str, limit: int) -> None:
            asked.append(name)
            raise OSError("HTTP 500")

        monkeypatch.setattr(FolderBackend, "get", fail)
        done = machines(remote_write=True).build()
        assert done.targets == {"built": 1}
        assert len(asked) == 2, "one retry"
        assert [event.kind for event in done.build.store.events] == ["remote-off"]

    def test_what_vanishes_between_look_up_and_use_is_made_again(
        self, machines: Machines, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        project = machines()
        record = Store.record
        lost: list[str] = []

        def vanish(store: Store, action: Any) -> None:
            if len(lost) < 1:
                lost.append(action.key)
                raise ObjectMissing("gone")
            record(store, action)

        monkeypatch.setattr(Store, "record", vanish)
        done = project.build()
        assert done.targets == {"built": 1} and len(lost) == 1 and done.build.failures == []

    def test_what_vanishes_each_time_is_a_failure_that_says_so(
        self, machines: Machines, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def vanish(store: Store, action: Any) -> None:
            raise ObjectMissing("gone")

        monkeypatch.setattr(Store, "record", vanish)
        done = machines().build()
        assert done.targets == {"failed": 1}
        assert "keeps losing" in done.build.failures[0].message

    @pytest.mark.parametrize("address", ["nonsense://somewhere/x"])
    def test_wrong_address_is_told_before_anything_is_built(self, project: Project, cli: Any, address: str) -> None:
        pytest.importorskip("fsspec", reason="needs fsspec (extra neml2-build[remote])")
        project.toml(f'remote = "{address}"\n[[model]]\ninput = "a.i"\nmodel = "eq"\n')
        said = cli()
        assert said.code == 2 and address in said.err
        assert not project.aoti.exists()


class TestReadOnly:
    def test_everything_found_is_used_and_what_is_missing_is_made(self, project: Project) -> None:
        project.build()
        tree = project.tree()
        shutil.rmtree(project.aoti)
        shutil.rmtree(project.cache / "targets")
        before = listing(project.cache)

        def stored() -> dict[str, tuple[int, int, int]]:
            return {name: about for name, about in listing(project.cache).items() if not name.startswith("targets")}

        done = project.build(store=Store(project.cache, readonly=True))
        assert done.targets == {"restored": 1} and done.calls == {} and project.tree() == tree
        assert stored() == before
        project.edit("a.i", ("factor = 1.5", "factor = 7.5"))
        done = project.build(store=Store(project.cache, readonly=True))
        assert done.targets == {"built": 1} and done.graphs == (1, 1)
        assert stored() == before
        assert project.build().graphs == (0, 0), "what was published is intact"


class TestTrust:
    @pytest.fixture
    def keys(self, tmp_path: Path) -> tuple[Path, str]:
        pytest.importorskip("cryptography", reason="signatures need the package cryptography")
        from neml2_build.signing import keygen

        return tmp_path / "key", keygen(tmp_path / "key")[1]

    def test_signed_by_a_trusted_key(self, machines: Machines, keys: tuple[Path, str]) -> None:
        secret, public = keys
        writer = machines(remote_write=True, signing_key=str(secret), trusted_keys=public)
        writer.build()
        done = machines(trusted_keys=[public]).build()
        assert done.graphs == (0, 2) and kinds(done) == set()
        by_variable = machines(trusted_keys=[public], remote_write=True)
        by_variable.environ["NEML2_BUILD_SIGNING_KEY"] = secret.read_text()
        by_variable.edit("a.i", ("factor = 1.5", "factor = 7.5"))
        assert by_variable.build().graphs == (1, 1)
        again = machines(trusted_keys=[public])
        again.edit("a.i", ("factor = 1.5", "factor = 7.5"))
        assert again.build().graphs == (0, 2)

    @pytest.mark.parametrize("stranger", ["unsigned", "unknown"])
    def test_a_strangers_results_are_refused_and_made_again(
        self, machines: Machines, keys: tuple[Path, str], tmp_path: Path, stranger: str
    ) -> None:
        from neml2_build.signing import keygen

        _, public = keys
        options: dict[str, Any] = {"remote_write": True}
        if stranger == "unknown":
            keygen(tmp_path / "other")
            options["signing_key"] = str(tmp_path / "other")
        machines(**options).build()
        done = machines(trusted_keys=[public]).build()
        assert done.graphs == (2, 0) and done.targets == {"built": 1}
        assert kinds(done) == {"remote-unsigned" if stranger == "unsigned" else "remote-unknown-key"}

    def test_a_reader_without_a_key_cannot_write(self, machines: Machines, keys: tuple[Path, str], tmp_path: Path) -> None:
        (tmp_path / "shared").mkdir()
        done = machines(trusted_keys=[keys[1]], remote_write=True).build()
        assert done.targets == {"built": 1} and kinds(done) == {"remote-write-off"}
        assert list((tmp_path / "shared").rglob("*")) == []


@pytest.mark.real
def test_two_cold_builds_are_byte_identical(tmp_path: Path) -> None:
    """One graph, in two folders, with two caches, by two users, one of them with things in inductor's own cache."""
    from conftest import ROOT, digests

    from neml2_build.build import Build
    from neml2_build.engine import execute
    from neml2_build.manifest import Manifest, Model

    trees, digests_of_graphs = [], []
    for number in (1, 2):
        root = tmp_path / ("a" * number * 7) / "project"
        home = tmp_path / f"home{number}"
        (home / "tmp").mkdir(parents=True)
        root.mkdir(parents=True)
        shutil.copy(ROOT / "models" / "rates.i", root / "rates.i")
        environ = {**os.environ, "HOME": str(home), "USER": f"user{number}", "TMPDIR": str(home / "tmp")}
        if number == 2:
            warm = home / "inductor"
            (warm / "ab").mkdir(parents=True)
            (warm / "ab" / "cab.main.cpp").write_text("int broken")
            environ["TORCHINDUCTOR_CACHE_DIR"] = str(warm)
        model = Model(input="rates.i", model="eq")
        build = Build(Manifest(models=[model], root=root, cache=f"cache{number}"), jobs=number, environ=environ)
        try:
            execute(build, build.select(), keep_going=False)
        finally:
            build.close()
        assert build.failures == [] and build.counts.lowered == 1
        trees.append(digests(build.output))
        digests_of_graphs.append(sorted(one.digest for run in build.select() for one in run.lowered["cpu"]))
    assert trees[0] == trees[1]
    assert digests_of_graphs[0] == digests_of_graphs[1]
