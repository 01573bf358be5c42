"""The local store: what is found, what is not believed, what survives a kill, what is collected."""

from __future__ import annotations

import contextlib
import errno
import json
import multiprocessing
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neml2_build import store as module
from neml2_build.digest import digest
from neml2_build.errors import TaskError
from neml2_build.store import Action, ObjectMissing, Output, Store, decode, encode

ROOT = Path(__file__).parents[1]


def key(name: str) -> str:
    return digest(f"key of {name}")


def make(store: Store, name: str, *contents: bytes, seconds: float = 2.0, stage: str = "lower") -> Action:
    """Put *contents* and record the action *name* that made them."""
    outputs = tuple(Output(f"{name}-{i}", *store.put(data)) for i, data in enumerate(contents))
    action = Action(
        key=key(name), stage=stage, target=name, outputs=outputs, made_of={"of": name}, seconds=seconds, created=1e9
    )
    store.record(action)
    return action


def object_path(root: Path, name: str) -> Path:
    return root / "objects" / name[:2] / name[2:]


def action_path(root: Path, name: str) -> Path:
    return root / "actions" / name[:2] / f"{name[2:]}.json"


def files(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


def overwrite(path: Path, data: bytes) -> None:
    path.chmod(0o644)
    path.write_bytes(data)


def age(root: Path, *actions: Action, seconds: float = 1000.0) -> None:
    """Make it look as if the *actions* were used last, in this order, a second apart, *seconds* ago."""
    for i, action in enumerate(actions):
        when = time.time() - seconds + i
        os.utime(action_path(root, action.key), (when, when))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def store(root: Path):
    with Store(root) as one:
        yield one


class TestContents:
    def test_what_is_put_is_read(self, store: Store, root: Path) -> None:
        name, size = store.put(b"hello")
        assert (name, size) == (digest(b"hello"), 5)
        assert store.read(name) == b"hello"
        assert store.has(name)
        assert stat.S_IMODE(object_path(root, name).stat().st_mode) == 0o444

    def test_files_are_put(self, store: Store, tmp_path: Path) -> None:
        (tmp_path / "f").write_bytes(b"from a file")
        assert store.put_file(tmp_path / "f") == (digest(b"from a file"), 11)

    def test_the_same_content_is_stored_once(self, store: Store, root: Path) -> None:
        name, _ = store.put(b"hello")
        before = object_path(root, name).stat()
        assert store.put(b"hello")[0] == name
        assert object_path(root, name).stat().st_ino == before.st_ino
        assert len(list((root / "objects").rglob("*"))) == 2

    def test_nothing_is_made_by_looking(self, root: Path) -> None:
        with Store(root) as store:
            assert store.find(key("x")) is None
            assert not store.has(digest(b"x"))
            assert store.stats()["actions"] == 0
            assert store.check().ok
            assert store.gc(0).size == 0
        assert not root.exists()

    @pytest.mark.parametrize("damage", [b"", b"hell", b"hellO", b"hello\0"])
    def test_a_broken_object_is_a_miss_and_removed(self, store: Store, root: Path, damage: bytes) -> None:
        name, _ = store.put(b"hello")
        overwrite(object_path(root, name), damage)
        with pytest.raises(ObjectMissing):
            store.read(name)
        assert [(event.kind, event.subject) for event in store.events] == [("object-broken", name)]
        assert not store.has(name)
        store.put(b"hello")
        assert store.read(name) == b"hello"

    def test_a_broken_object_is_replaced_when_it_is_put_again(self, store: Store, root: Path) -> None:
        name, _ = store.put(b"hello")
        overwrite(object_path(root, name), b"jello")
        store.put(b"hello")
        assert object_path(root, name).read_bytes() == b"hello"
        assert [event.kind for event in store.events] == ["object-broken"]

    def test_what_was_never_put_is_missing(self, store: Store) -> None:
        with pytest.raises(ObjectMissing):
            store.read(digest(b"never"))
        assert store.events == []

    @pytest.mark.parametrize("name", ["", "..", "../../etc/passwd", "A" * 32, "0" * 31, "0" * 33, f"{'0' * 31}/"])
    def test_only_digests_are_names(self, store: Store, name: str) -> None:
        for ask in (store.has, store.read, store.find, store.lock, store.peek):
            with pytest.raises(ValueError, match="not a digest"):
                ask(name)

    def test_an_unreadable_object_is_left_alone(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        name, _ = store.put(b"hello")

        def refuse(path: Path) -> bytes:
            raise OSError(errno.EIO, "Input/output error")

        with monkeypatch.context() as patch:
            patch.setattr(module, "_read", refuse)
            with pytest.raises(ObjectMissing):
                store.read(name)
        assert [event.kind for event in store.events] == ["object-unreadable"]
        assert store.read(name) == b"hello"

    def test_a_stale_handle_is_opened_again(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        name, _ = store.put(b"hello")
        original = Path.read_bytes
        calls = []

        def once_stale(path: Path) -> bytes:
            calls.append(path)
            if len(calls) == 1:
                raise OSError(errno.ESTALE, "Stale file handle")
            return original(path)

        monkeypatch.setattr(Path, "read_bytes", once_stale)
        assert store.read(name) == b"hello"
        assert len(calls) == 2
        assert store.events == []


class TestMaterialize:
    def test_a_copy_that_can_be_edited(self, store: Store, root: Path, tmp_path: Path) -> None:
        name, _ = store.put(b"hello")
        target = tmp_path / "aoti" / "eq" / "f.pt2"
        store.materialize(name, target)
        assert target.read_bytes() == b"hello"
        assert stat.S_IMODE(target.stat().st_mode) == 0o644
        assert target.stat().st_nlink == 1
        target.write_bytes(b"edited")
        assert store.read(name) == b"hello"

    def test_it_replaces_and_leaves_nothing_else(self, store: Store, tmp_path: Path) -> None:
        name, _ = store.put(b"new")
        target = tmp_path / "out" / "f"
        target.parent.mkdir()
        target.write_bytes(b"old, and longer")
        store.materialize(name, target, mode=0o755)
        assert os.listdir(target.parent) == ["f"]
        assert target.read_bytes() == b"new"
        assert stat.S_IMODE(target.stat().st_mode) == 0o755

    def test_a_broken_object_does_not_get_out(self, store: Store, root: Path, tmp_path: Path) -> None:
        name, _ = store.put(b"hello")
        overwrite(object_path(root, name), b"jello")
        target = tmp_path / "f"
        target.write_bytes(b"old")
        with pytest.raises(ObjectMissing):
            store.materialize(name, target)
        assert target.read_bytes() == b"old"
        assert [event.kind for event in store.events] == ["object-broken"]
        assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["f"]

    def test_large_contents(self, store: Store, tmp_path: Path) -> None:
        data = bytes(range(256)) * 13000
        name, _ = store.put(data)
        store.materialize(name, tmp_path / "big")
        assert (tmp_path / "big").read_bytes() == data

    def test_a_destination_that_cannot_be_written_is_a_clear_error(self, store: Store, tmp_path: Path) -> None:
        name, _ = store.put(b"hello")
        (tmp_path / "folder").mkdir()
        with pytest.raises(TaskError) as caught:
            store.materialize(name, tmp_path / "folder")
        assert caught.value.file == str(tmp_path / "folder")
        assert caught.value.remedy


class TestActions:
    def test_a_recorded_action_is_found(self, store: Store) -> None:
        action = make(store, "eq", b"one", b"two")
        assert store.find(action.key) == action
        assert store.peek(action.key) == action

    def test_a_record_is_a_checksummed_line_of_json_without_paths(self, store: Store, root: Path) -> None:
        action = make(store, "eq", b"one")
        text = action_path(root, action.key).read_text()
        assert json.loads(text)["record"]["made_of"] == {"of": "eq"}
        assert str(root) not in text
        assert text.endswith("\n")
        assert stat.S_IMODE(action_path(root, action.key).stat().st_mode) == 0o644

    def test_outputs_come_first(self, store: Store) -> None:
        with pytest.raises(ObjectMissing):
            store.record(Action(key=key("x"), stage="lower", target="x", outputs=(Output("f", digest(b"no"), 2),)))
        assert store.find(key("x")) is None

    def test_an_action_without_outputs(self, store: Store) -> None:
        assert store.find(make(store, "none").key) is not None

    def test_recording_again_replaces(self, store: Store) -> None:
        make(store, "eq", b"one", seconds=1)
        make(store, "eq", b"two", seconds=3)
        found = store.find(key("eq"))
        assert found is not None
        assert found.seconds == 3
        assert store.read(found.outputs[0].digest) == b"two"

    def test_a_missing_object_is_a_miss(self, store: Store, root: Path) -> None:
        action = make(store, "eq", b"one", b"two")
        object_path(root, action.outputs[1].digest).unlink()
        assert store.find(action.key) is None
        assert store.peek(action.key) is None
        assert [(event.kind, event.subject) for event in store.events] == [("object-missing", action.outputs[1].digest)]
        assert store.counts == {"miss-object-missing": 1}

    def test_a_truncated_object_is_a_miss_and_removed(self, store: Store, root: Path) -> None:
        action = make(store, "eq", b"one")
        overwrite(object_path(root, action.outputs[0].digest), b"on")
        assert store.find(action.key) is None
        assert [event.kind for event in store.events] == ["object-broken"]
        assert not store.has(action.outputs[0].digest)

    def test_every_flipped_byte_of_a_record_is_noticed(self, store: Store, root: Path) -> None:
        action = make(store, "eq", b"one")
        path = action_path(root, action.key)
        good = path.read_bytes()
        for position in range(len(good)):
            path.write_bytes(good[:position] + bytes([good[position] ^ 1]) + good[position + 1 :])
            assert store.find(action.key) is None, position
        assert {event.kind for event in store.events} == {"record-broken"}
        assert len(store.events) == len(good)
        assert not path.exists()

    @pytest.mark.parametrize("text", [b"", b"{}", b"\xff\xfe", b'{"checksum":"","record":{}}\n'])
    def test_what_is_no_record_is_a_miss_and_removed(self, store: Store, root: Path, text: bytes) -> None:
        action = make(store, "eq", b"one")
        action_path(root, action.key).write_bytes(text)
        assert store.find(action.key) is None
        assert [event.kind for event in store.events] == ["record-broken"]
        assert store.counts == {"miss-record-broken": 1}

    def test_another_keys_record_is_a_miss(self, store: Store, root: Path) -> None:
        one, two = make(store, "one", b"1"), make(store, "two", b"2")
        shutil.copy(action_path(root, one.key), action_path(root, two.key))
        assert store.find(two.key) is None
        assert [event.kind for event in store.events] == ["record-broken"]

    def test_another_versions_record_is_a_miss_and_left_alone(
        self, store: Store, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(module, "FORMAT", module.FORMAT + 1)
            action = make(store, "eq", b"one")
        assert store.find(action.key) is None
        assert [event.kind for event in store.events] == ["record-version"]
        assert action_path(root, action.key).exists()
        store.close()
        later = Store(root).gc(grace=0, now=time.time() + 1e6)
        assert later.orphans == 0
        assert store.has(action.outputs[0].digest)

    def test_numbers_survive(self, store: Store) -> None:
        name, size = store.put(b"x")
        action = Action(
            key=key("n"),
            stage="s",
            target="t",
            outputs=(Output("x", name, size),),
            made_of={"int": 1, "float": 0.1, "none": None, "list": [1, [True]], "text": "ä\n"},
            seconds=5,
            info={"pi": 3.141592653589793},
        )
        store.record(action)
        assert store.find(action.key) == action

    @settings(max_examples=50, deadline=None)
    @given(
        st.dictionaries(
            st.text(), st.recursive(st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text(), st.lists)
        ),
        st.floats(0, 1e6),
    )
    def test_records_come_back_as_they_went(self, made_of: dict, seconds: float) -> None:
        action = Action(key=key("p"), stage="s", target="t", outputs=(), made_of=made_of, seconds=seconds)
        assert decode(encode(action), action.key) == action


class TestCounts:
    def test_a_key_counts_once(self, store: Store) -> None:
        assert store.find(key("eq")) is None
        assert store.find(key("eq")) is None
        make(store, "eq", b"one", seconds=7)
        assert store.find(key("eq")) is not None
        assert store.counts == {"miss-no-record": 1}
        assert store.seconds_saved == 0

    def test_hits_save_seconds(self, root: Path, store: Store) -> None:
        make(store, "a", b"1", seconds=7)
        make(store, "b", b"2", seconds=5)
        with Store(root) as other:
            for name in ("a", "b", "a"):
                assert other.find(key(name))
            assert other.counts == {"hit-local": 2}
            assert other.seconds_saved == 12

    def test_what_another_build_made_meanwhile_is_a_hit(self, root: Path, store: Store) -> None:
        with Store(root) as other:
            assert other.find(key("a")) is None
            make(store, "a", b"1", seconds=7)
            assert other.find(key("a"))
            assert other.counts == {"hit-local": 1}

    def test_the_first_reason_of_a_miss_is_kept_and_told_once(self, root: Path, store: Store) -> None:
        made = make(store, "a", b"123")
        overwrite(object_path(root, made.outputs[0].digest), b"12")
        with Store(root) as other:
            assert other.find(made.key) is None
            with other.lock(made.key):
                assert other.find(made.key) is None
            assert other.counts == {"miss-object-broken": 1}
            assert [event.kind for event in other.events] == ["object-broken"]

    def test_they_add_up_over_runs(self, root: Path, store: Store) -> None:
        make(store, "a", b"1", seconds=7)
        for _ in range(3):
            with Store(root) as other:
                other.find(key("a"))
                other.find(key("b"))
                other.close()  # twice: counted once
        stats = Store(root).stats()
        assert stats["counts"] == {"hit-local": 3, "miss-no-record": 3}
        assert stats["seconds_saved"] == 21

    def test_the_list_stays_short(self, root: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        make(store, "a", b"1", seconds=1)
        line = json.dumps({"counts": {"hit-local": 1}, "seconds_saved": 1.0}) + "\n"
        (root / "counts.jsonl").write_text("not json\n" + line * 9999)
        with Store(root) as other:
            other.find(key("a"))
        assert len((root / "counts.jsonl").read_text().splitlines()) == 2
        assert Store(root).stats()["counts"] == {"hit-local": 10000}

    def test_looking_does_not_count(self, store: Store) -> None:
        make(store, "a", b"1")
        assert store.peek(key("a"))
        assert store.peek(key("b")) is None
        assert store.counts == {}


class TestLocks:
    def test_one_holder_at_a_time(self, store: Store, root: Path) -> None:
        with store.lock(key("a")):
            assert Store(root).try_lock(key("a")) is None
            with Store(root).lock(key("b")):
                pass
        lock = Store(root).try_lock(key("a"))
        assert lock is not None
        lock.release()
        lock.release()

    def test_the_same_process_is_no_exception(self, store: Store) -> None:
        with store.lock(key("a")):
            assert store.try_lock(key("a")) is None

    def test_a_dead_holder_holds_nothing(self, store: Store, root: Path) -> None:
        code = f"import os; from neml2_build.store import Store; Store({str(root)!r}).lock({key('a')!r}); os._exit(9)"
        assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 9
        lock = store.try_lock(key("a"))
        assert lock is not None
        lock.release()

    def test_free_lock_files_are_collected_and_held_ones_are_not(self, store: Store, root: Path) -> None:
        held = store.lock(key("a"))
        store.lock(key("b")).release()
        assert store.gc().locks == 1
        assert [path.name for path in (root / "tmp" / "locks").iterdir()] == [key("a")]
        assert Store(root).try_lock(key("a")) is None
        held.release()

    def test_a_lock_file_removed_under_a_waiter_locks_nothing(
        self, store: Store, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """gc removes the file between another's open and flock: the other must not believe in it."""
        original = module.fcntl.flock
        path = root / "tmp" / "locks" / key("a")
        removed = []

        def flock(descriptor: int, operation: int) -> None:
            original(descriptor, operation)
            if not removed and path.exists():
                removed.append(path.unlink())

        monkeypatch.setattr(module.fcntl, "flock", flock)
        with store.lock(key("a")):
            assert path.exists()
            assert Store(root).try_lock(key("a")) is None
        assert removed

    def test_without_locks_work_goes_on(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(descriptor: int, operation: int) -> None:
            raise OSError(errno.ENOLCK, "No locks available")

        monkeypatch.setattr(module.fcntl, "flock", refuse)
        with store.lock(key("a")):
            make(store, "a", b"1")
        assert {event.kind for event in store.events} == {"locks-unavailable"}
        assert store.find(key("a"))


def _race(root: str, name: str, barrier, results) -> None:
    with Store(Path(root)) as store:
        barrier.wait()
        with store.lock(key(name)):
            action = store.find(key(name))
            if action is None:
                make(store, name, b"made " * 1000)
                results.put("made")
            else:
                results.put(store.read(action.outputs[0].digest)[:5].decode())


def test_of_racing_processes_one_makes_it_and_the_others_use_it(root: Path) -> None:
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(3), context.Queue()
    workers = [context.Process(target=_race, args=(str(root), "eq", barrier, results)) for _ in range(3)]
    for worker in workers:
        worker.start()
    outcomes = sorted(results.get(timeout=60) for _ in workers)
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    assert outcomes == ["made", "made ", "made "]
    assert Store(root).check().ok
    assert Store(root).stats()["actions"] == 1


class TestKilled:
    """Killed at any step, the store holds the old state or the new one, and the next one loses nothing."""

    @pytest.mark.parametrize("step", ["written", "synced", "renamed"])
    @pytest.mark.parametrize("occurrence", [1, 2])  # of the object, of the record
    def test_between_any_two_steps(self, root: Path, step: str, occurrence: int) -> None:
        code = f"""
import os, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from neml2_build import store
import test_store
seen = []
def step(name):
    seen.append(name)
    if seen.count({step!r}) == {occurrence}:
        os._exit(9)
with store.Store({str(root)!r}) as one:
    store._step = step
    test_store.make(one, "eq", b"content")
"""
        assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 9
        with Store(root) as store:
            assert store.check().ok
            whole = (step, occurrence) == ("renamed", 2)
            assert (store.find(key("eq")) is not None) == whole
            assert store.events == []
            assert store.has(digest(b"content")) == (step == "renamed" or occurrence == 2)
            report = store.gc()
            assert report.interrupted == 1
            make(store, "eq", b"content")
            assert store.find(key("eq"))
        assert not [path for path in (root / "tmp").rglob("*") if path.is_file()]

    def test_the_folders_of_living_processes_stay(self, root: Path, store: Store) -> None:
        with store.tmp() as folder:
            (folder / "half").write_text("half")
            assert Store(root).gc(0).interrupted == 0
            assert (folder / "half").exists()
        assert not folder.exists()

    def test_unknown_leftovers_go_when_they_are_old(self, root: Path, store: Store) -> None:
        make(store, "a", b"1")
        leftover = root / "tmp" / "deadbeef.part"
        leftover.write_text("x")
        assert store.gc().interrupted == 0
        os.utime(leftover, (1, 1))
        assert store.gc().interrupted == 1
        assert not leftover.exists()


class TestPulledAway:
    def test_a_store_that_is_removed_meanwhile_is_made_again(self, store: Store, root: Path) -> None:
        made = make(store, "a", b"a")
        shutil.rmtree(root)
        with pytest.raises(ObjectMissing):
            store.read(made.outputs[0].digest)
        assert store.find(made.key) is None
        again = make(store, "a", b"a")
        assert store.find(again.key) == again
        with store.lock(again.key), store.tmp() as folder:
            assert folder.is_dir()

    def test_a_rename_that_nfs_did_twice(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        original = Path.replace

        def replace(path: Path, target: Path) -> Path:
            original(path, target)
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))

        monkeypatch.setattr(Path, "replace", replace)
        made = make(store, "a", b"a")
        assert store.find(made.key) == made


class TestFullDisk:
    @pytest.fixture
    def full(self, monkeypatch: pytest.MonkeyPatch):
        original = os.write

        def write(descriptor: int, data) -> int:
            if len(data) > 1000:
                original(descriptor, bytes(data[:500]))
                raise OSError(errno.ENOSPC, "No space left on device")
            return original(descriptor, data)

        monkeypatch.setattr(os, "write", write)
        yield
        monkeypatch.undo()

    def test_a_clear_error_and_nothing_half_written(self, store: Store, root: Path, full: None) -> None:
        make(store, "small", b"small")
        before = files(root)
        with pytest.raises(TaskError, match="disk is full") as caught:
            store.put(b"x" * 2000)
        assert "cache gc" in (caught.value.remedy or "")
        assert caught.value.exit_code == 1
        assert files(root) == before
        assert store.find(key("small"))

    def test_what_was_published_before_is_still_there(
        self, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        name, _ = store.put(b"x" * 2000)
        target = tmp_path / "out" / "f"
        target.parent.mkdir()
        target.write_bytes(b"old")

        def full(*_: object, **__: object) -> str:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(module, "_copy", full)
        with pytest.raises(TaskError, match="disk is full"):
            store.materialize(name, target)
        assert os.listdir(target.parent) == ["f"]
        assert target.read_bytes() == b"old"

    def test_a_real_size_limit(self, root: Path) -> None:
        code = f"""
import resource, signal
from neml2_build.errors import TaskError
from neml2_build.store import Store
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
with Store({str(root)!r}) as store:
    store.put(b"small")
    try:
        store.put(b"x" * 9000)
    except TaskError as error:
        print(error.message)
"""
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.strip() == "cannot write to the store: the file size limit is reached"
        assert len([name for name in files(root) if name.startswith("objects")]) == 1


class TestReadOnly:
    def test_everything_found_is_used_and_nothing_is_written(self, root: Path, tmp_path: Path) -> None:
        with Store(root) as writer:
            old = make(writer, "old", b"old content")
        before = files(root)
        with Store(root, readonly=True) as store:
            assert store.find(old.key) == old
            store.materialize(old.outputs[0].digest, tmp_path / "out")
            new = make(store, "new", b"new content")
            assert store.find(new.key) == new
            assert store.read(new.outputs[0].digest) == b"new content"
            with store.lock(new.key), store.tmp() as folder:
                (folder / "f").write_text("scratch")
            assert store.gc(0).actions == 0
            assert store.check(repair=True).ok
        assert files(root) == before
        assert Store(root).find(new.key) is None

    def test_a_store_that_refuses_writes_is_used_read_only(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with Store(root) as writer:
            old = make(writer, "old", b"old content")
        before = files(root)
        original = Path.mkdir

        def mkdir(path: Path, *args, **kwargs) -> None:
            if root in path.parents:
                raise OSError(errno.EROFS, "Read-only file system", str(path))
            original(path, *args, **kwargs)

        monkeypatch.setattr(Path, "mkdir", mkdir)
        with Store(root) as store:
            assert store.find(old.key) == old
            new = make(store, "new", b"new content")
            assert store.find(new.key) == new
            with store.lock(new.key):
                pass
            assert [event.kind for event in store.events] == ["store-readonly"]
            assert store.readonly
        assert files(root) == before

    @pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become another user")
    def test_another_user_without_permission(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder).chmod(0o755)
            root = Path(folder) / "cache"
            with Store(root) as writer:
                old = make(writer, "old", b"old content")
            before = files(root)
            code = f"""
import os, sys
sys.path[:0] = [{str(ROOT)!r}, {str(Path(__file__).parent)!r}]
from neml2_build.store import *
import neml2_build.remote, msgspec, xxhash, errno
os.setgid(65534); os.setuid(65534)
with Store({str(root)!r}) as store:
    found = store.find({old.key!r})
    name, size = store.put(b"new content")
    store.record(Action(key={key("new")!r}, stage="s", target="t", outputs=(Output("o", name, size),)))
    with store.lock({key("new")!r}): pass
    print(store.read(found.outputs[0].digest), store.find({key("new")!r}) is not None, [e.kind for e in store.events])
"""
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
            assert done.stderr == ""
            assert done.stdout.strip() == "b'old content' True ['store-readonly']"
            assert files(root) == before

    def test_another_reason_is_a_clear_error(self, tmp_path: Path) -> None:
        (tmp_path / "cache").write_text("a file")
        with pytest.raises(TaskError, match="store cannot be written") as caught:
            Store(tmp_path / "cache").put(b"x")
        assert caught.value.remedy


class TestCollection:
    def test_least_recently_used_first(self, root: Path) -> None:
        with Store(root) as store:
            made = [make(store, name, name.encode() * 5000) for name in "abcd"]
        age(root, made[2], made[0], made[3], made[1])
        one = sum(path.stat().st_blocks * 512 for path in root.glob("*/*/*") if path.parts[-3] != "tmp") // 4
        report = Store(root).gc(2 * one + one // 2)
        assert (report.actions, report.objects) == (2, 2)
        assert [bool(Store(root).find(action.key)) for action in made] == [False, True, False, True]
        assert report.size <= 2 * one + one // 2

    def test_finding_is_using(self, root: Path) -> None:
        with Store(root) as store:
            made = [make(store, name, name.encode()) for name in "abc"]
        age(root, *made)
        with Store(root) as store:
            assert store.find(made[0].key)
        Store(root).gc(2 * 2 * 4096)
        assert [bool(Store(root).peek(action.key)) for action in made] == [True, False, True]

    def test_what_a_living_process_uses_stays(self, root: Path) -> None:
        with Store(root) as store:
            made = [make(store, name, name.encode()) for name in "ab"]
        with Store(root) as user:
            assert user.find(made[0].key)
            report = Store(root).gc(0)
            assert report.actions == 1
            assert user.read(made[0].outputs[0].digest) == b"a"
        assert Store(root).gc(0).size == 0

    def test_what_a_killed_process_used_goes(self, root: Path) -> None:
        with Store(root) as store:
            made = make(store, "a", b"a")
        code = f"import os; from neml2_build.store import Store; s = Store({str(root)!r}); s.find({made.key!r}); os._exit(9)"
        assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 9
        report = Store(root).gc(0)
        assert (report.interrupted, report.actions, report.size) == (1, 1, 0)

    def test_keep_names_keys_and_digests(self, root: Path) -> None:
        with Store(root) as store:
            a, b, c = (make(store, name, name.encode()) for name in "abc")
        Store(root).gc(0, keep={a.key, b.outputs[0].digest}, grace=0)
        left = Store(root)
        assert left.find(a.key) == a
        assert not left.peek(b.key)
        assert left.has(b.outputs[0].digest)
        assert not left.has(c.outputs[0].digest)

    def test_shared_objects_stay_while_one_needs_them(self, root: Path) -> None:
        with Store(root) as store:
            a, b = make(store, "a", b"shared", b"only a"), make(store, "b", b"shared")
        age(root, a, b)
        report = Store(root).gc(keep={b.key}, max_size=0)
        assert (report.actions, report.objects) == (1, 1)
        assert Store(root).find(b.key) == b

    def test_older_than(self, root: Path) -> None:
        with Store(root) as store:
            a, b = make(store, "a", b"a"), make(store, "b", b"b")
        age(root, a, seconds=86400 * 10)
        assert Store(root).gc(older_than=86400 * 5).actions == 1
        assert [bool(Store(root).peek(one.key)) for one in (a, b)] == [False, True]

    def test_orphans_go_after_a_while(self, root: Path) -> None:
        with Store(root) as store:
            name, _ = store.put(b"orphan")
        assert Store(root).gc().orphans == 0
        assert Store(root).gc(now=time.time() + 7200).orphans == 1
        assert not Store(root).has(name)

    def test_without_limits_nothing_that_is_needed_goes(self, root: Path) -> None:
        with Store(root) as store:
            a = make(store, "a", b"a")
        report = Store(root).gc(now=time.time() + 1e9)
        assert (report.actions, report.objects, report.orphans, report.freed) == (0, 0, 0, 0)
        assert Store(root).find(a.key) == a

    @pytest.mark.parametrize("jump", [-1e9, 1e9])
    def test_a_jumping_clock_takes_nothing_from_the_living(self, root: Path, store: Store, jump: float) -> None:
        a = make(store, "a", b"a")
        name, _ = store.put(b"not recorded yet")
        Store(root).gc(0, 0, grace=0, now=time.time() + jump)
        assert store.find(a.key) == a
        assert store.has(name)

    def test_a_stamp_of_the_future_is_corrected(self, root: Path) -> None:
        with Store(root) as store:
            a = make(store, "a", b"a")
        age(root, a, seconds=-1e6)
        with Store(root) as store:
            store.used(a.key)
        assert abs(action_path(root, a.key).stat().st_mtime - time.time()) < 100

    def test_used_renews_a_stamp_once_a_day(self, root: Path) -> None:
        with Store(root) as store:
            a, b = make(store, "a", b"a"), make(store, "b", b"b")
        age(root, a, seconds=3600)
        age(root, b, seconds=86400 * 2)
        with Store(root) as store:
            store.used(a.key)
            store.used(b.key)
        ages = [time.time() - action_path(root, one.key).stat().st_mtime for one in (a, b)]
        assert ages[0] > 3000
        assert ages[1] < 100

    def test_one_that_is_used_in_the_last_moment_stays(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with Store(root) as store:
            a = make(store, "a", b"a")
        age(root, a)
        collector = Store(root)

        def in_use() -> set[str]:
            os.utime(action_path(root, a.key))  # what find does, just after this list was made
            return set()

        monkeypatch.setattr(collector, "_in_use", in_use)
        assert collector.gc(0).actions == 0
        assert Store(root).find(a.key) == a

    def test_a_thousand_targets_take_seconds(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "fsync", lambda descriptor: None)
        with Store(root) as store:
            for i in range(6000):
                make(store, f"{i}", f"object {i}".encode(), *([f"more {i}".encode()] if i % 3 else []))
        start = time.perf_counter()
        stats = Store(root).stats()
        middle = time.perf_counter()
        report = Store(root).gc(stats["size"] // 2)
        end = time.perf_counter()
        assert (stats["actions"], stats["objects"]) == (6000, 10000)
        assert report.size <= stats["size"] // 2
        assert report.actions > 2000
        assert middle - start < 5
        assert end - middle < 10


class TestCheck:
    def test_it_reads_everything(self, root: Path, store: Store) -> None:
        make(store, "a", b"1", b"2")
        report = store.check()
        assert report.ok
        assert (report.actions, report.objects) == (1, 2)

    def test_it_finds_and_repairs(self, root: Path, store: Store) -> None:
        good, flipped, lost, record = (make(store, name, name.encode()) for name in ("good", "flip", "lost", "record"))
        overwrite(object_path(root, flipped.outputs[0].digest), b"flop")
        object_path(root, lost.outputs[0].digest).unlink()
        action_path(root, record.key).write_text("garbage")
        report = store.check()
        assert sorted(event.kind for event in report.problems) == [
            "object-broken",
            "object-missing",
            "object-missing",
            "record-broken",
        ]
        assert report.repaired == 0
        assert store.check(repair=True).repaired == 4
        assert store.check().ok
        assert store.find(good.key) == good
        make(store, "flip", b"flip")
        assert store.check().ok

    def test_statistics_by_stage(self, store: Store) -> None:
        make(store, "a", b"12345", seconds=3, stage="export")
        make(store, "b", b"1", b"23", seconds=4, stage="lower")
        stats = store.stats()
        assert stats["stages"]["export"] == {"actions": 1, "seconds": 3.0, "size": 5}
        assert stats["stages"]["lower"] == {"actions": 1, "seconds": 4.0, "size": 3}
        assert stats["unreadable_records"] == 0
        json.dumps(stats)


def test_a_store_that_nobody_closed_is_closed(root: Path) -> None:
    store = Store(root)
    make(store, "a", b"a")
    assert len(list((root / "tmp").iterdir())) == 2
    del store
    assert list((root / "tmp").iterdir()) == []


def test_a_new_process_after_a_fork_has_its_own_session(root: Path, store: Store) -> None:
    make(store, "a", b"a")
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            make(store, "b", b"b")
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    make(store, "c", b"c")
    assert all(store.find(key(name)) for name in "abc")


class TestTogether:
    def test_seen_here_at_once_and_by_others_afterwards(self, store: Store) -> None:
        other = Store(store.root)
        with store.together():
            action = make(store, "a", b"contents")
            name = action.outputs[0].digest
            assert store.read(name) == b"contents"
            assert store.find(action.key) == action
            assert not other.has(name)
            assert other.find(action.key) is None
        assert Store(store.root).read(name) == b"contents"
        assert Store(store.root).find(action.key) == action
        assert not list((store.root / "tmp").rglob(f"{name}*"))

    def test_what_was_written_before_a_failure_is_kept(self, store: Store) -> None:
        with pytest.raises(ValueError, match="later"), store.together():
            name, _ = store.put(b"contents")
            raise ValueError("later")
        assert Store(store.root).read(name) == b"contents"

    def test_everything_is_flushed_before_it_takes_its_place(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        flushed: list[Path] = []

        def flush(paths: Sequence[Path]) -> None:
            assert all(path.exists() for path in paths)
            assert not list((store.root / "objects").rglob("*/*"))
            flushed.extend(paths)

        monkeypatch.setattr(module, "flush", flush)
        with store.together():
            names = [store.put(bytes([number]) * 10)[0] for number in range(5)]
        assert len(flushed) == 5
        assert all(store.has(name) for name in names)

    def test_a_full_disk_is_told(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        def flush(paths: Sequence[Path]) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(module, "flush", flush)
        with pytest.raises(TaskError, match="disk is full"), store.together():
            store.put(b"contents")
