"""Records of what was materialized, and the stats that are believed."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from neml2_build import records as module
from neml2_build.environment import signature
from neml2_build.reasons import Reason
from neml2_build.records import Entry, FileState, Record, Records, Snapshot, settled


@pytest.fixture
def records(tmp_path: Path) -> Records:
    root = tmp_path / "project"
    root.mkdir()
    return Records(tmp_path / "cache", root / "aoti", root)


def record(stage: str = "parse", key: str = "k") -> Record:
    return Record(
        stage=stage,
        key=key,
        made_of={"a": [1, {"b": None}]},
        inputs=[FileState("a.i", "0" * 32, [1, 2, 3, 4])],
        reasons=[Reason("forced")],
        info={"x": True},
    )


class TestRecords:
    def test_what_is_written_is_read(self, records: Records) -> None:
        records.write("eq", record())
        assert records.read("eq", "parse") == record()
        assert records.read("eq", "export") is None
        assert records.read("other", "parse") is None

    @pytest.mark.parametrize(
        "junk", [b"", b"{", b"[]", b'{"stage": 1}', b"\xff\x00", b'{"stage":"parse","key":"k","made_of":{},"version":99}']
    )
    def test_junk_and_other_versions_are_no_records(self, records: Records, junk: bytes) -> None:
        records.write("eq", record())
        (records.folder / "eq" / "parse.json").write_bytes(junk)
        assert records.read("eq", "parse") is None
        records.write("eq", record())
        assert records.read("eq", "parse") == record()

    def test_forget(self, records: Records) -> None:
        for stage in ("parse", "export"):
            records.write("eq", record(stage))
        records.forget("eq", ["export", "never"])
        assert records.targets() == ["eq"]
        records.forget("eq", ["parse"])
        assert records.targets() == []

    def test_targets_of_names_of_all_kinds(self, records: Records) -> None:
        for name in ("two words", "größe", "v1.2"):
            records.write(name, record())
        assert records.targets() == sorted(["two words", "größe", "v1.2"])

    def test_two_projects_in_one_store_do_not_meet(self, tmp_path: Path) -> None:
        one = Records(tmp_path / "cache", tmp_path / "one/aoti", tmp_path / "one")
        two = Records(tmp_path / "cache", tmp_path / "two/aoti", tmp_path / "two")
        one.write("eq", record())
        assert two.read("eq", "parse") is None

    def test_a_store_that_cannot_be_written_loses_the_record_quietly(self, records: Records) -> None:
        records.folder.parent.mkdir(parents=True)
        records.folder.write_text("in the way")
        records.write("eq", record())
        assert records.read("eq", "parse") is None

    def test_no_half_written_record_is_left(self, records: Records, monkeypatch: pytest.MonkeyPatch) -> None:
        records.write("eq", record(key="old"))

        def fail(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "replace", fail)
        records.write("eq", record(key="new"))
        found = records.read("eq", "parse")
        assert found is not None and found.key == "old"
        assert os.listdir(records.folder / "eq") == ["parse.json"]


class TestSnapshot:
    def test_what_is_written_is_read(self, records: Records) -> None:
        snapshot = Snapshot(entries={"eq": Entry("r", "e", [("a.i", [1, 2, 3, 4])], {"X": "1"})}, memo={"m": [[], 1]})
        records.write_snapshot(snapshot)
        assert records.read_snapshot() == snapshot

    @pytest.mark.parametrize("junk", [b"", b"\xc1", b"{}"])
    def test_junk_is_an_empty_one(self, records: Records, junk: bytes) -> None:
        records.write_snapshot(Snapshot(entries={"eq": Entry("r", "e", [], {})}))
        (records.folder / "snapshot.bin").write_bytes(junk)
        assert records.read_snapshot() == Snapshot()


class TestPaths:
    def test_inside_relative_outside_absolute(self, records: Records, tmp_path: Path) -> None:
        assert records.relative(records.root / "a/b.i") == "a/b.i"
        assert records.relative(tmp_path / "projects/b.i") == str(tmp_path / "projects/b.i")
        for path in (records.root / "a/b.i", tmp_path / "elsewhere.i"):
            assert records.absolute(records.relative(path)) == str(path)


class TestStats:
    @pytest.fixture
    def file(self, records: Records) -> Path:
        path = records.root / "a.i"
        path.write_text("text")
        return path

    def test_a_fresh_stat_is_not_believed(self, file: Path, records: Records) -> None:
        state = records.state(file)
        assert state.signature is None
        assert records.changed(state) is None

    def test_an_old_one_is(self, file: Path, records: Records, monkeypatch: pytest.MonkeyPatch) -> None:
        later = time.time_ns() + 3_000_000_000
        monkeypatch.setattr("time.time_ns", lambda: later)
        state = records.state(file)
        assert state.signature == signature(file)
        monkeypatch.setattr(module, "digest_file", lambda path: pytest.fail("read"))
        assert records.changed(state) is None

    def test_a_time_in_the_future_is_not_believed(self, file: Path) -> None:
        ahead = time.time_ns() + 10**12
        assert settled([1, ahead, 0, 1]) is None
        assert settled([1, 0, ahead, 1]) is None
        assert settled(None) is None

    def test_the_content_decides(self, file: Path, records: Records) -> None:
        state = records.state(file)
        os.utime(file, (1, 1))
        assert records.changed(state) is None
        file.write_text("texT")
        assert records.changed(state) == "changed"
        file.unlink()
        assert records.changed(state) == "missing"
        file.mkdir()
        assert records.changed(state) is not None

    def test_an_expected_digest_keeps_the_stat_only_where_it_holds(
        self, file: Path, records: Records, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "_SETTLED_NS", -(10**18))
        found = records.state(file).digest
        assert records.state(file, found).signature == signature(file)
        file.write_text("edited meanwhile")
        assert records.state(file, found) == FileState("a.i", found, None)
        file.unlink()
        assert records.state(file, found) == FileState("a.i", found, None)
        with pytest.raises(OSError):
            records.state(file)
