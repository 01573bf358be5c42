"""Packs: exactly what the keys need, in one file with the same bytes every time, verified when it comes out."""

from __future__ import annotations

import errno
import io
import os
import tarfile
from pathlib import Path

import pytest

from neml2_build.digest import digest
from neml2_build.errors import RequestError, TaskError
from neml2_build.pack import pack, unpack
from neml2_build.remote import Remote, record_name
from neml2_build.signing import Keys, keygen
from neml2_build.store import Action, Output, Store


def key(name: str) -> str:
    return digest(f"key of {name}")


def make(store: Store, name: str, *contents: bytes) -> Action:
    outputs = tuple(Output(f"{name}-{i}", *store.put(data)) for i, data in enumerate(contents))
    action = Action(key=key(name), stage="lower", target=name, outputs=outputs, made_of={"of": name}, seconds=2.0)
    store.record(action)
    return action


@pytest.fixture
def store(tmp_path: Path):
    with Store(tmp_path / "one") as one:
        yield one


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Keys, Keys]:
    pytest.importorskip("cryptography", reason="signatures need the package cryptography")
    _, public = keygen(tmp_path / "team.key")
    writer, reader = Keys.load([], tmp_path / "team.key", environ={}), Keys.load([public], environ={})
    assert writer and reader
    return writer, reader


def members(file: Path) -> dict[str, bytes]:
    with tarfile.open(file) as archive:
        return {entry.name: (archive.extractfile(entry) or io.BytesIO()).read() for entry in archive}


def rewrite(file: Path, contents: dict[str, bytes]) -> None:
    with tarfile.open(file, "w:", format=tarfile.USTAR_FORMAT) as archive:
        for name, data in contents.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))


class TestRoundTrip:
    def test_what_was_packed_is_found(self, store: Store, tmp_path: Path) -> None:
        made = [make(store, "a", b"one" * 1000, b"shared"), make(store, "b", b"shared"), make(store, "empty")]
        make(store, "not asked for", b"other")
        report = pack(store, [action.key for action in made], tmp_path / "p.tar")
        assert (report.actions, report.objects, report.missing) == (3, 2, ())
        assert report.size == (tmp_path / "p.tar").stat().st_size
        with Store(tmp_path / "two") as other:
            taken = unpack(other, tmp_path / "p.tar")
            assert (taken.actions, taken.objects, taken.present, taken.refused) == (3, 2, 0, ())
            assert [other.find(action.key) for action in made] == made
            assert other.find(key("not asked for")) is None
            assert other.check().ok
            assert other.stats()["objects"] == 2

    def test_again_takes_nothing(self, store: Store, tmp_path: Path) -> None:
        made = make(store, "a", b"one")
        pack(store, [made.key], tmp_path / "p")
        report = unpack(store, tmp_path / "p")
        assert (report.actions, report.objects, report.present) == (0, 0, 1)

    def test_the_same_store_gives_the_same_bytes(self, store: Store, tmp_path: Path) -> None:
        made = [make(store, f"{i}", f"content {i}".encode() * 100) for i in range(5)]
        ordered = [action.key for action in made]
        pack(store, ordered, tmp_path / "p")
        pack(store, [*reversed(ordered), ordered[0]], tmp_path / "q")
        assert (tmp_path / "p").read_bytes() == (tmp_path / "q").read_bytes()
        unpack(Store(tmp_path / "two"), tmp_path / "p")
        pack(Store(tmp_path / "two"), ordered, tmp_path / "r")
        assert (tmp_path / "r").read_bytes() == (tmp_path / "p").read_bytes()

    def test_it_holds_nothing_of_the_machine(self, store: Store, tmp_path: Path) -> None:
        pack(store, [make(store, "a", b"one").key], tmp_path / "p")
        with tarfile.open(tmp_path / "p") as archive:
            for entry in archive:
                assert (entry.mtime, entry.uid, entry.gid, entry.uname, entry.gname) == (0, 0, 0, "", "")

    def test_it_is_compressed(self, store: Store, tmp_path: Path) -> None:
        report = pack(store, [make(store, "a", b"same" * 250_000).key], tmp_path / "p")
        assert report.size < 50_000

    def test_what_is_missing_is_named(self, store: Store, tmp_path: Path) -> None:
        a, b = make(store, "a", b"one"), make(store, "b", b"two")
        name = b.outputs[0].digest
        path = store.root / "objects" / name[:2] / name[2:]
        path.chmod(0o644)
        path.write_bytes(b"twO")
        report = pack(store, [a.key, b.key, key("never")], tmp_path / "p")
        assert report.actions == 1
        assert report.missing == tuple(sorted([b.key, key("never")]))

    def test_packing_is_not_a_hit(self, store: Store, tmp_path: Path) -> None:
        pack(store, [make(store, "a", b"one").key], tmp_path / "p")
        assert store.counts == {}


class TestSigned:
    def test_signed_packs_are_believed_and_keep_their_signatures(self, tmp_path: Path, keys: tuple[Keys, Keys]) -> None:
        writer, reader = keys
        with Store(tmp_path / "one", keys=writer) as store:
            made = make(store, "a", b"one")
            pack(store, [made.key], tmp_path / "p")
        with Store(tmp_path / "two", keys=reader) as store:
            assert unpack(store, tmp_path / "p").actions == 1
            pack(store, [made.key], tmp_path / "q")
        assert (tmp_path / "q").read_bytes() == (tmp_path / "p").read_bytes()
        with Store(tmp_path / "three", keys=reader) as store:
            assert unpack(store, tmp_path / "q").refused == ()
            assert store.find(made.key) == made

    def test_unsigned_packs_are_refused(self, store: Store, tmp_path: Path, keys: tuple[Keys, Keys]) -> None:
        made = make(store, "a", b"one")
        pack(store, [made.key], tmp_path / "p")
        with Store(tmp_path / "two", keys=keys[1]) as other:
            report = unpack(other, tmp_path / "p")
            assert report.actions == 0
            assert [(name, kind) for name, kind, _ in report.refused] == [(record_name(made.key), "remote-unsigned")]
            assert other.find(made.key) is None
            assert other.stats()["objects"] == 0


class TestDamage:
    """A damaged pack gives what is whole in it, or nothing; never anything else."""

    @pytest.fixture
    def file(self, store: Store, tmp_path: Path) -> Path:
        pack(store, [make(store, name, name.encode() * 500).key for name in "ab"], tmp_path / "p")
        return tmp_path / "p"

    def test_swapped_contents(self, file: Path, tmp_path: Path) -> None:
        contents = members(file)
        one, two = (name for name in contents if name.startswith("cas/"))
        contents[one], contents[two] = contents[two], contents[one]
        rewrite(file, contents)
        report = unpack(Store(tmp_path / "two"), file)
        assert report.actions == 0
        assert {kind for _, kind, _ in report.refused} == {"remote-object-broken"}

    def test_one_broken_content_costs_one_action(self, file: Path, tmp_path: Path) -> None:
        contents = members(file)
        name = next(name for name in contents if name.startswith("cas/"))
        contents[name] = b"broken"
        rewrite(file, contents)
        report = unpack(Store(tmp_path / "two"), file)
        assert (report.actions, report.objects, len(report.refused)) == (1, 1, 1)
        assert Store(tmp_path / "two").check().ok

    def test_missing_contents(self, file: Path, tmp_path: Path) -> None:
        rewrite(file, {name: data for name, data in members(file).items() if name.startswith("ac/")})
        report = unpack(Store(tmp_path / "two"), file)
        assert [kind for _, kind, _ in report.refused] == ["remote-object-missing"] * 2

    def test_a_record_under_another_name(self, file: Path, tmp_path: Path) -> None:
        contents = members(file)
        one, two = (name for name in contents if name.startswith("ac/"))
        contents[one] = contents[two]
        rewrite(file, contents)
        report = unpack(Store(tmp_path / "two"), file)
        assert [(name, kind) for name, kind, _ in report.refused] == [(one, "remote-replayed")]
        assert report.actions == 1

    @pytest.mark.parametrize("name", ["../../evil", "/etc/evil", "cas/../../evil", "ac/short", "objects/ab/cd"])
    def test_other_names_are_refused_whole(self, file: Path, tmp_path: Path, name: str) -> None:
        rewrite(file, {**members(file), name: b"evil"})
        with pytest.raises(RequestError, match="which no pack holds"):
            unpack(Store(tmp_path / "two"), file)
        assert not (tmp_path / "two").exists()
        assert not list(tmp_path.rglob("evil"))

    @pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE])
    def test_links_and_the_like_are_refused_whole(self, file: Path, tmp_path: Path, kind: bytes) -> None:
        with tarfile.open(file, "a:") as archive:
            entry = tarfile.TarInfo(f"cas/{'0' * 64}")
            entry.type, entry.linkname = kind, "/etc/passwd"
            archive.addfile(entry)
        with pytest.raises(RequestError, match="which no pack holds"):
            unpack(Store(tmp_path / "two"), file)

    def test_every_truncation(self, file: Path, tmp_path: Path) -> None:
        """Cut anywhere, between two members as well, nothing is taken."""
        good = file.read_bytes()
        for size in (*range(0, len(good), 97), *range(0, len(good), 512)):
            file.write_bytes(good[:size])
            with pytest.raises(RequestError, match="no intact pack") as caught:
                unpack(Store(tmp_path / "two"), file)
            assert caught.value.remedy
        assert not (tmp_path / "two").exists()

    @pytest.mark.parametrize("data", [b"", b"not a tar" * 1000, bytes(600), b"\x1f\x8b\x08\x00" + bytes(600)])
    def test_no_pack_at_all(self, tmp_path: Path, data: bytes) -> None:
        (tmp_path / "p").write_bytes(data)
        with pytest.raises(RequestError, match="no intact pack") as caught:
            unpack(Store(tmp_path / "two"), tmp_path / "p")
        assert caught.value.exit_code == 2

    def test_no_file(self, tmp_path: Path) -> None:
        with pytest.raises(RequestError, match="No such file"):
            unpack(Store(tmp_path / "two"), tmp_path / "nowhere")


class TestFullDisk:
    def test_the_old_pack_stays(self, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        made = make(store, "a", b"one")
        target = tmp_path / "out" / "p"
        target.parent.mkdir()
        target.write_bytes(b"old")

        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(tarfile.TarFile, "addfile", full)
        with pytest.raises(TaskError, match="No space left"):
            pack(store, [made.key], target)
        assert os.listdir(target.parent) == ["p"]
        assert target.read_bytes() == b"old"


def test_a_pack_is_a_shared_store(store: Store, tmp_path: Path) -> None:
    """Extracted with any tar, it serves as one."""
    made = make(store, "a", b"one")
    pack(store, [made.key], tmp_path / "p")
    for name, data in members(tmp_path / "p").items():
        path = tmp_path / "shared" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    from neml2_build.remote import FolderBackend

    other = Store(tmp_path / "two", remote=Remote(FolderBackend(tmp_path / "shared", create=False)))
    assert other.find(made.key) == made
