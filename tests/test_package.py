"""Publishing: whole trees, old or new, whatever happens meanwhile."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from neml2_build.stages import package

FILES = {"metadata.json": "m", "cpu/float64/a.pt2": "a", "cpu/float64/b.pt2": "b"}


def write(found: str, path: Path) -> None:
    path.write_text(found)


def read(folder: Path) -> dict[str, str]:
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "aoti" / "eq"


def test_files_of_every_leaf_share_one_metadata() -> None:
    leaves = {"cpu": [("a.pt2", "1"), ("b.pt2", "2")], "cuda": [("a.pt2", "3")]}
    assert package.files_of("m", leaves, "float64") == {
        "cpu/float64/a.pt2": "1",
        "cpu/float64/b.pt2": "2",
        "cuda/float64/a.pt2": "3",
        "metadata.json": "m",
    }


def test_publish_makes_exactly_the_files_and_leaves_nothing_else(folder: Path) -> None:
    package.publish(FILES, folder, write)
    assert read(folder) == FILES
    assert os.listdir(folder.parent) == ["eq"]


def test_publish_replaces_the_whole_tree(folder: Path) -> None:
    package.publish({**FILES, "cpu/float64/old.pt2": "old"}, folder, write)
    (folder / "foreign").write_text("x")
    package.publish(FILES, folder, write)
    assert read(folder) == FILES
    assert os.listdir(folder.parent) == ["eq"]


def test_a_file_or_a_link_in_the_place_of_the_folder_is_replaced(folder: Path, tmp_path: Path) -> None:
    folder.parent.mkdir()
    folder.write_text("a file")
    package.publish(FILES, folder, write)
    assert read(folder) == FILES
    elsewhere = tmp_path / "elsewhere"
    folder.rename(elsewhere)
    folder.symlink_to(elsewhere)
    package.publish({"metadata.json": "new"}, folder, write)
    assert not folder.is_symlink()
    assert read(folder) == {"metadata.json": "new"}
    assert read(elsewhere) == FILES


@pytest.mark.parametrize("exchange", [True, False])
def test_a_failure_leaves_the_old_tree(folder: Path, exchange: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    package.publish(FILES, folder, write)
    if not exchange:
        monkeypatch.setattr(package, "_exchange", lambda one, other: False)

    def fail(found: str, path: Path) -> None:
        if found == "b":
            raise OSError(28, "No space left on device")
        write(found, path)

    with pytest.raises(OSError):
        package.publish({**FILES, "metadata.json": "new"}, folder, fail)
    assert read(folder) == FILES
    assert os.listdir(folder.parent) == ["eq"]


def test_without_an_exchange_the_old_tree_is_moved_aside(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package.publish(FILES, folder, write)
    monkeypatch.setattr(package, "_exchange", lambda one, other: False)
    package.publish({"metadata.json": "new"}, folder, write)
    assert read(folder) == {"metadata.json": "new"}
    assert os.listdir(folder.parent) == ["eq"]


def test_without_an_exchange_a_failed_move_puts_the_old_tree_back(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package.publish(FILES, folder, write)
    monkeypatch.setattr(package, "_exchange", lambda one, other: False)
    stock = os.rename

    def rename(source: Path, target: Path) -> None:
        if Path(source).name == "tree":
            raise OSError(5, "Input/output error")
        stock(source, target)

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(OSError):
        package.publish({"metadata.json": "new"}, folder, write)
    assert read(folder) == FILES


def test_a_reader_never_sees_a_mix(folder: Path) -> None:
    """Reads of two files of the tree through one opened folder are of one state."""
    if sys.platform != "linux":
        pytest.skip("exchange is a call of Linux")
    package.publish(dict.fromkeys(FILES, "0"), folder, write)
    stop = threading.Event()
    seen: list[set[str]] = []

    def look() -> None:
        while not stop.is_set():
            handle = os.open(folder, os.O_RDONLY)
            found = set()
            try:
                for name in FILES:
                    with open(os.open(name, os.O_RDONLY, dir_fd=handle)) as stream:
                        found.add(stream.read())
            except FileNotFoundError:
                found.add("gone")  # the old tree was removed under an open handle: never a mix
            os.close(handle)
            seen.append(found)

    reader = threading.Thread(target=look)
    reader.start()
    for turn in range(50):
        package.publish(dict.fromkeys(FILES, str(turn)), folder, write)
    stop.set()
    reader.join()
    assert seen
    assert all(len(found - {"gone"}) <= 1 for found in seen)


def test_many_targets_publish_at_once(tmp_path: Path) -> None:
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for turn in range(40):
                package.publish({"metadata.json": f"{number} {turn}"}, tmp_path / "aoti" / f"t{number}", write)
                package.write_file(tmp_path / "aoti" / f"t{number}_aoti.i", b"stub")
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert len(os.listdir(tmp_path / "aoti")) == 16


def test_leftovers_of_killed_builds_are_swept_and_those_of_living_ones_are_not(folder: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    top = folder.parent / package.STAGING
    for name in (f"{dead.pid}-aaaa", f"{os.getpid()}-bbbb", "strange"):
        (top / name / "tree").mkdir(parents=True)
    package.publish(FILES, folder, write)
    assert sorted(os.listdir(top)) == sorted([f"{os.getpid()}-bbbb", "strange"])


def test_a_written_file_is_readable_as_the_umask_allows(tmp_path: Path) -> None:
    package.write_file(tmp_path / "stub.i", b"text")
    mask = os.umask(0)
    os.umask(mask)
    assert (tmp_path / "stub.i").stat().st_mode & 0o777 == 0o666 & ~mask
    assert (tmp_path / "stub.i").read_bytes() == b"text"
