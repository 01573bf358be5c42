"""Lowering: what its key holds, whom it trusts, what it says when it fails; and one build from end to end."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import subprocess
import sys
import zipfile
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import worker_jobs as jobs
from conftest import ROOT, Kept, Project, command
from test_export import RATES, capture, rewritten

from neml2_build.compiler import FakeCompiler, RealCompiler
from neml2_build.manifest import Model
from neml2_build.stages import lower

PARTS: dict[str, Any] = {
    "graph": "g",
    "device": "cpu",
    "dtype": "float64",
    "inductor": {"max_autotune": False},
    "march": "native",
    "environment": {"torch": "1"},
    "toolchain": {"compiler": "aotinductor"},
}


class TestKey:
    @pytest.mark.parametrize(
        ("part", "other"),
        [
            ("graph", "h"),
            ("device", "cuda:sm_90"),
            ("dtype", "float32"),
            ("inductor", {"max_autotune": True}),
            ("march", "x86-64-v3"),
            ("environment", {"torch": "2"}),
            ("toolchain", {"compiler": "other"}),
            ("debug", True),
        ],
    )
    def test_every_part_counts(self, part: str, other: Any) -> None:
        before = lower.key_of(PARTS["graph"], **{name: value for name, value in PARTS.items() if name != "graph"})
        changed = {**PARTS, part: other}
        assert lower.key_of(changed.pop("graph"), **changed) != before


class TestOptions:
    KNOWN = {"max_autotune": "bool", "cpp.threads": "int", "freezing": "bool", "cpp.cxx": "tuple", "name": "str"}  # noqa: RUF012

    @pytest.mark.parametrize(("name", "value"), [("max_autotune", True), ("cpp.threads", 4), ("cpp.cxx", "x"), ("name", "x")])
    def test_right(self, name: str, value: Any) -> None:
        assert lower.wrong_option(name, value, self.KNOWN) is None

    @pytest.mark.parametrize(
        ("name", "value", "words"),
        [
            ("max_autotun", True, "did you mean 'max_autotune'?"),
            ("cpp.thread", 1, "did you mean 'cpp.threads'?"),
            ("zzz", 1, "torch._inductor.config"),
            ("max_autotune", 1, "true or false"),
            ("cpp.threads", True, "a number"),
            ("name", 3, "text"),
        ],
    )
    def test_wrong(self, name: str, value: Any, words: str) -> None:
        found = lower.wrong_option(name, value, self.KNOWN)
        assert found is not None
        assert words in " ".join(found)


class TestMessages:
    def test_the_compilers_first_error(self) -> None:
        error = lower._explain(
            RuntimeError("C++ compile error\n\nOutput:\nx.cpp:1: note: a\nx.cpp:3:5: error: no\nx.cpp:9: error: b")
        )
        assert error.message == "RuntimeError: x.cpp:3:5: error: no"
        assert "doctor" in (error.remedy or "")

    def test_a_full_disk(self) -> None:
        error = lower._explain(RuntimeError("C++ compile error\nfatal error: cannot write: No space left on device"))
        assert "No space left" in error.message
        assert "TMPDIR" in (error.remedy or "")

    def test_anything_else_is_one_line(self) -> None:
        error = lower._explain(ValueError("first\nsecond"))
        assert error.message == "ValueError: first"
        assert lower._explain(ValueError()).message == "ValueError: ValueError"


class Harmful:
    """A pickle that writes a file where it is loaded."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


@pytest.mark.real
class TestTrust:
    def test_a_saved_program_runs_no_code_of_others(self, workers: RealCompiler, tmp_path: Path) -> None:
        """Every pickle of the archive in turn is one that makes a folder: loading it must refuse, and make none."""
        project = Project(tmp_path / "p")
        project.write("a.i", RATES)
        run = capture(project, Kept(workers))
        assert run.exported is not None
        program = run.build.store.read(run.exported.graphs[0].program)
        assert workers._executor.submit(jobs.load_program, program).result(timeout=120) == "ExportedProgram"
        place = tmp_path / "harm"
        plain = pickle.dumps(Harmful(str(place)))
        stream = io.BytesIO()
        with zipfile.ZipFile(stream, "w") as archive:
            archive.writestr("archive/data.pkl", plain)
            archive.writestr("archive/version", b"3\n")
        names: list[str] = []
        rewritten(program, lambda name, data: names.append(name) or data)
        targets = [name for name in names if name.startswith("data/sample_inputs/") or data_is_pickle(program, name)]
        assert targets
        for name in targets:
            for harm in (plain, stream.getvalue()):
                bad = rewritten(program, lambda found, data, n=name, h=harm: h if found == n else data)
                said = workers._executor.submit(jobs.load_program, bad).result(timeout=120)
                assert not place.exists(), name
                assert said, name


def data_is_pickle(program: bytes, wanted: str) -> bool:
    with zipfile.ZipFile(io.BytesIO(program)) as archive:
        for info in archive.infolist():
            if info.filename.partition("/")[2] == wanted:
                return archive.read(info)[:2] in (b"\x80\x02", b"\x80\x04", b"\x80\x05", b"PK")
    return False


class TestOnceAMachine:
    """What is asked and made once a machine, beside the first captures; the answer itself is a stand-in."""

    @pytest.fixture
    def prepared(self, project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
        machine = tmp_path / "machine"
        project.environ["NEML2_BUILD_MACHINE"] = str(machine)
        monkeypatch.setattr(lower, "probe", lambda: {"picked": "VecAVX2"})

        class Compiler(FakeCompiler):
            name = RealCompiler.name

            def prepare(self, request: lower.Preparation) -> Future:
                asked.append(request)
                (machine / "a.json").write_text("{}")
                return super().prepare(request)

        asked: list[lower.Preparation] = []

        def ask(**options: Any) -> list[lower.Preparation]:
            asked.clear()
            build = project.start(compiler=Compiler(1), **options)
            for _ in range(2):
                build.ask_ahead(build.select()[0].target)
            if build._ahead is not None:
                build._ahead.join()
            build.close()
            return list(asked)

        return ask

    def test_pieces_are_made_after_the_first_answer_and_not_again(self, prepared: Any, project: Project) -> None:
        (request,) = prepared()
        assert request.isa == {"picked": "VecAVX2"} and request.march == "native"
        assert Path(request.work).is_dir()
        assert prepared() == []
        shutil.rmtree(project.cache)  # another project of this machine
        assert prepared() == []

    def test_pieces_that_are_gone_are_made_again(self, prepared: Any, tmp_path: Path) -> None:
        prepared()
        (tmp_path / "machine" / "a.json").unlink()
        assert len(prepared()) == 1

    def test_with_the_stock_toolchain_or_without_a_cpu_target_nothing_is_made(self, prepared: Any, project: Project) -> None:
        assert prepared(stock=True) == []
        project.models = [Model(input="a.i", model="eq", devices=["cuda"], cuda_arch=["sm_80"])]
        assert prepared() == []


@pytest.mark.real
class TestEndToEnd:
    """The only test here that compiles: one graph."""

    @pytest.fixture
    def small(self, tmp_path: Path) -> Project:
        project = Project(tmp_path / "project")
        project.write("a.i", RATES)
        project.toml()
        return project

    def run(self, project: Project, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command(*words),
            cwd=project.root,
            env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
            capture_output=True,
            text=True,
            timeout=900,
        )

    def test_build_edit_restore(self, small: Project) -> None:
        first = self.run(small, "build", "--json")
        assert first.returncode == 0, first.stderr
        found = json.loads(first.stdout)
        assert found["targets"]["built"] == 1
        assert found["graphs"] == {"lowered": 1, "reused": 0}
        assert found["torch_imported"] is True
        tree = small.tree()
        (package,) = small.aoti.rglob("*.pt2")
        assert zipfile.is_zipfile(package)
        null = json.loads(self.run(small, "build", "--json").stdout)
        assert null["targets"]["up_to_date"] == 1
        assert null["torch_imported"] is False
        small.edit("a.i", ("[Models]", "# a comment\n[Models]"))
        shutil.rmtree(small.aoti / "eq")
        comment = json.loads(self.run(small, "build", "--json").stdout)
        assert comment["graphs"]["lowered"] == 0
        assert comment["torch_imported"] is False
        assert {name: found for name, found in small.tree().items() if name != "eq_aoti.i"} == {
            name: found for name, found in tree.items() if name != "eq_aoti.i"
        }
        code = "import neml2, sys; neml2.load_model('aoti/eq_aoti.i', 'eq'); print('loaded')"
        loaded = subprocess.run([sys.executable, "-c", code], cwd=small.root, capture_output=True, text=True, timeout=300)
        assert loaded.stdout.strip().endswith("loaded"), loaded.stderr

    def test_a_compiler_that_fails_is_one_message(self, small: Project, tmp_path: Path) -> None:
        compiler = tmp_path / "broken-g++"
        compiler.write_text(
            '#!/bin/sh\nfor word; do case "$word" in *.cpp) echo "x.cpp:1:1: error: out of order" >&2; exit 1;; esac; done\n'
            'exec g++ "$@"\n'
        )
        compiler.chmod(0o755)
        done = self.run(small, "build", "--json", CXX=str(compiler))
        assert done.returncode == 1
        assert "Traceback" not in done.stderr
        (failure,) = json.loads(done.stdout)["failures"]
        assert failure["stage"] == "lower-cpu"
        assert "remedy" in failure["message"]
        assert not small.aoti.exists() or not list(small.aoti.rglob("*.pt2"))
