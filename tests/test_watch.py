"""Watching: what starts a build, what does not, and that nothing but Ctrl-C ends it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from neml2_build import cli, watch
from neml2_build.errors import RequestError

LEAF = "[Models]\n  [m]\n    type = A\n    value = {value}\n  []\n[]\n"
TOML = "[[model]]\ninput = 'a.i'\nmodel = 'm'\nname = 'a'\n[[model]]\ninput = 'b.i'\nmodel = 'm'\nname = 'b'\n"


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    for name in ("a", "b"):
        (tmp_path / f"{name}.i").write_text(LEAF.format(value=name))
    (tmp_path / "neml2-build.toml").write_text(TOML)
    monkeypatch.setenv("NEML2_BUILD_COMPILER", "fake")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def session(capsys, *edits: Callable[[], str]) -> tuple[int, list[dict]]:
    """Watch through *edits*, each a save that answers the path; the exit code and what was printed of each build."""
    steps: Iterator[Callable[[], str]] = iter(edits)

    def wait(watched: watch.Watched) -> set[str] | None:
        edit = next(steps, None)
        if edit is None:
            return None
        path = edit()
        assert not path or watched.matters(path), path
        return {path} if path else set()

    code = watch.watch(None, as_json=True, wait=wait)
    return code, [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def save(path: Path, text: str) -> Callable[[], str]:
    def edit() -> str:
        path.write_text(text)
        return str(path)

    return edit


def built(result: dict) -> tuple[int, int]:
    return result["targets"]["built"], result["targets"]["failed"]


def test_a_save_rebuilds_what_it_touches(project, capsys):
    code, builds = session(capsys, save(project / "a.i", LEAF.format(value="new")), lambda: "")
    assert code == 0 and [built(one) for one in builds] == [(2, 0), (1, 0)]
    assert [one["graphs"]["lowered"] for one in builds] == [2, 1]


def test_a_failing_edit_does_not_stop_it(project, capsys):
    code, builds = session(
        capsys,
        save(project / "a.i", "[Models]\n  [m]\n    type = \n"),
        save(project / "a.i", LEAF.format(value="'${nowhere}'")),
        save(project / "a.i", LEAF.format(value="mended")),
    )
    assert code == 0 and [built(one)[1] for one in builds] == [0, 1, 1, 0]
    assert built(builds[-1]) == (1, 0)


def test_an_input_that_vanishes_is_built_when_it_is_back(project, capsys):
    def remove() -> str:
        (project / "a.i").unlink()
        return str(project / "a.i")

    code, builds = session(capsys, remove, save(project / "a.i", LEAF.format(value="back")))
    assert code == 0 and not builds[1]["ok"] and builds[-1]["ok"] and built(builds[-1]) == (1, 0)


def test_the_manifest_is_read_again(project, capsys):
    manifest = project / "neml2-build.toml"
    more = TOML + "[[model]]\ninput = 'a.i'\nmodel = 'm'\nname = 'c'\n"
    code, builds = session(
        capsys, save(manifest, more + "oops"), save(manifest, more.replace("'m'", "'n'", 1)), save(manifest, more)
    )
    assert code == 0
    assert [one["ok"] for one in builds] == [True, False, False, True]
    assert builds[-1]["targets"]["total"] == 3 and (project / "aoti" / "c").is_dir()


def test_a_manifest_that_is_wrong_from_the_start_is_an_error(project):
    (project / "neml2-build.toml").write_text("nonsense = 1\n")
    with pytest.raises(RequestError):
        watch.watch(None, wait=lambda _: pytest.fail("must not wait"))


def test_an_interrupt_ends_it_well(project, capsys):
    def interrupt() -> str:
        raise KeyboardInterrupt

    code, builds = session(capsys, interrupt)
    assert code == 0 and len(builds) == 1


def test_one_compiler_serves_all_builds_until_the_software_changes(project, capsys, monkeypatch):
    ended = []
    real = watch.Kept.end
    monkeypatch.setattr(
        watch.Kept, "end", lambda self, *, kill: (ended.append(self._compiler is not None), real(self, kill=kill))[1]
    )

    def other_software() -> str:
        monkeypatch.setattr("neml2_build.build.identity", lambda *_: "other")
        return ""

    session(capsys, save(project / "a.i", LEAF.format(value=2)), save(project / "a.i", LEAF.format(value=3)), other_software)
    assert ended == [False, True, False]


def test_only_what_matters_is_watched(project, capsys):
    (project / "a.i").write_text("!include parts/a.i\n")
    (project / "parts").mkdir()
    table = "[Tensors]\n  [t]\n    type = C\n    csv_file = 'table.csv'\n  []\n[]\n"
    (project / "parts" / "a.i").write_text(LEAF.format(value="'t'") + table)
    (project / "table.csv").write_text("1\n")
    (project / "own").mkdir()
    (project / "own" / "__init__.py").write_text("")
    (project / "neml2-build.toml").write_text(
        TOML.replace("name = 'a'", "name = 'a'\nload = 'own'") + "[[model]]\ninput = 'more/*.i'\nmodel = 'm'\nname = '{stem}'\n"
    )
    (project / "more").mkdir()
    (project / "more" / "x.i").write_text(LEAF.format(value="x"))
    seen: list[watch.Watched] = []

    def wait(watched: watch.Watched) -> None:
        seen.append(watched)

    assert watch.watch(None, wait=wait) == 0
    watched = seen[0]
    yes = [
        "a.i",
        "b.i",
        "parts/a.i",
        "table.csv",
        "neml2-build.toml",
        "more/x.i",
        "more/new.i",
        "own/__init__.py",
        "own/deep.py",
    ]
    no = [
        "c.i",
        "a.i~",
        ".a.i.swp",
        "aoti/a_aoti.i",
        "aoti/a/metadata.json",
        "cache/doit.db",
        "other.csv",
        "own/x.txt",
        "more/x.txt",
    ]
    assert [name for name in yes if not watched.matters(str(project / name))] == []
    assert [name for name in no if watched.matters(str(project / name))] == []
    assert {str(project), str(project / "parts"), str(project / "more"), str(project / "own")} <= set(watched.folders())


def test_folders_that_do_not_exist_are_watched_from_above(tmp_path):
    files = frozenset({str(tmp_path / "not" / "yet" / "a.i")})
    watched = watch.Watched(str(tmp_path), files, (), (str(tmp_path / "**" / "*.i"),), ())
    assert watched.folders() == (str(tmp_path),) and watched.deep
    assert watched.matters(str(tmp_path / "x.i")) and watched.matters(str(tmp_path / "p" / "q" / "x.i"))
    assert watched.told({f"{tmp_path}/{name}" for name in "abcdefg"}) == [*"abcde", "2 more"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_watches_real_files_until_interrupted(project, number):
    pytest.importorskip("watchfiles")
    process = subprocess.Popen(
        [sys.executable, "-m", "neml2_build.cli", "watch", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ,
        start_new_session=True,
        # a shell ignores Ctrl-C for what it starts in the background, and that is inherited
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None and process.stderr is not None
    try:
        first = json.loads(process.stdout.readline())
        (project / "unrelated.txt").write_text("x")
        fresh = project / "a.i.new"
        fresh.write_text(LEAF.format(value="saved"))
        fresh.replace(project / "a.i")
        second = json.loads(process.stdout.readline())
        (project / "b.i").write_text(LEAF.format(value="also"))
        third = json.loads(process.stdout.readline())
        process.send_signal(number)
        rest, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0, said
    assert [built(one) for one in (first, second, third)] == [(2, 0), (1, 0), (1, 0)] and rest == ""
    assert "Traceback" not in said and "unrelated" not in said and "KeyboardInterrupt" not in said


def test_the_command_is_listed_with_an_example():
    command = cli.main_command.get_command(None, "watch")  # type: ignore[arg-type]
    assert command is not None and "neml2-build watch" in (command.help or "")
