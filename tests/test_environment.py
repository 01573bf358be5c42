"""Who compiles: by content, without importing anything, and nothing of where or who."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

from neml2_build import environment as module
from neml2_build.environment import Environment, Memo
from neml2_build.errors import RequestError

BASE = Environment(
    python="cpython-3.11.7-cpython-311",
    packages={name: {"version": "1", "digest": name} for name in ("neml2", "nmhit", "pyzag", "torch", "numpy", "triton")},
    compiler={"version": "g++ 12", "target": "x86_64-linux-gnu", "digest": "c"},
    cpu={"machine": "x86_64", "native": "n", "flags": "f"},
    libc="glibc 2.36",
    threads=8,
    variables={"CXXFLAGS": "-O3"},
)


class TestLook:
    def test_it_looks_the_same_twice_and_the_second_time_asks_no_program(self, monkeypatch: pytest.MonkeyPatch) -> None:
        memo = Memo()
        first = module.look(memo, os.environ)
        assert memo.changed
        again = Memo(dict(memo.entries))
        monkeypatch.setattr(module, "_ask", lambda *_, **__: pytest.fail("a program was asked"))
        assert module.look(again, os.environ) == first
        assert not again.changed
        json.dumps(memo.entries)

    def test_nothing_heavy_is_imported(self) -> None:
        code = (
            "import sys, os\nfrom neml2_build import environment as e\ne.look(e.Memo(), os.environ)\n"
            "print(sorted({'torch', 'neml2', 'numpy', 'triton'} & set(sys.modules)))"
        )
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.stdout.strip() == "[]", done.stderr

    def test_it_names_no_place(self, machine: Environment) -> None:
        text = json.dumps([machine.for_export(), machine.for_lowering("native")])
        for place in (str(Path.home()), sys.prefix, str(ROOT), os.uname().nodename):
            assert f'"{place}' not in text


class TestKeys:
    @pytest.mark.parametrize(
        ("change", "exports", "lowers"),
        [
            ({"python": "x"}, True, False),
            ({"packages": {**BASE.packages, "torch": {"version": "1", "digest": "x"}}}, True, True),
            ({"packages": {**BASE.packages, "neml2": {"version": "1", "digest": "x"}}}, True, True),
            ({"packages": {**BASE.packages, "nmhit": {"version": "1", "digest": "x"}}}, True, False),
            ({"packages": {**BASE.packages, "numpy": {"version": "1", "digest": "x"}}}, True, False),
            ({"packages": {name: about for name, about in BASE.packages.items() if name != "torch"}}, True, True),
            ({"compiler": None}, False, True),
            ({"compiler": {**(BASE.compiler or {}), "digest": "x"}}, False, True),
            ({"cpu": {**BASE.cpu, "native": "x"}}, False, True),
            ({"libc": "x"}, False, True),
            ({"threads": 9}, False, True),
            ({"variables": {"CXXFLAGS": "-O2"}}, False, True),
            ({"variables": {**BASE.variables, "NEML2_X": "1"}}, True, True),
            ({"variables": {**BASE.variables, "TORCH_X": "1"}}, True, True),
        ],
    )
    def test_what_each_field_changes(self, change: dict[str, Any], exports: bool, lowers: bool) -> None:
        import dataclasses

        other = dataclasses.replace(BASE, **change)
        assert (other.for_export() != BASE.for_export()) is exports
        assert (other.for_lowering("native") != BASE.for_lowering("native")) is lowers

    def test_portable_code_does_not_depend_on_this_cpu(self) -> None:
        import dataclasses

        other = dataclasses.replace(BASE, cpu={"machine": "x86_64", "native": "x", "flags": "x"}, threads=3)
        assert other.for_lowering("x86-64-v3") == BASE.for_lowering("x86-64-v3")
        assert other.for_lowering("native") != BASE.for_lowering("native")
        assert BASE.for_lowering("x86-64-v3") != BASE.for_lowering("x86-64-v2")


class TestVariables:
    @pytest.mark.parametrize(
        "name", ["TORCHINDUCTOR_FREEZING", "CXX", "CXXFLAGS", "CPATH", "OMP_NUM_THREADS", "TRITON_X", "NEML2_X"]
    )
    def test_hashed_and_handed_on(self, name: str) -> None:
        assert module.hashed_variable(name)
        assert module.worker_environment({name: "1"}) == {name: "1"}

    @pytest.mark.parametrize("name", ["PATH", "HOME", "USER", "TMPDIR", "LD_LIBRARY_PATH", "PYTHONPATH", "CUDA_HOME"])
    def test_handed_on_only(self, name: str) -> None:
        assert not module.hashed_variable(name)
        assert module.worker_environment({name: "1"}) == {name: "1"}

    @pytest.mark.parametrize(
        "name", ["TORCHINDUCTOR_CACHE_DIR", "TORCH_LOGS", "NEML2_BUILD_COMPILER", "EDITOR", "HOSTNAME", "PWD", "SECRET_TOKEN"]
    )
    def test_neither(self, name: str) -> None:
        assert not module.hashed_variable(name)
        assert module.worker_environment({name: "1"}) == {}

    @pytest.mark.parametrize(("asked", "threads"), [("4", 4), ("1", 2), ("0", None), ("x", None), ("6,2", 6), ("", None)])
    def test_threads(self, asked: str, threads: int | None) -> None:
        assert module.thread_count({"OMP_NUM_THREADS": asked}) == (threads or max(2, module.cores()))


class TestPackages:
    def install(
        self, site: Path, name: str, files: dict[str, str], *, record: str | None = None, url: str | None = None
    ) -> None:
        info = site / f"{name}-1.0.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        for path, text in files.items():
            (site / path).parent.mkdir(parents=True, exist_ok=True)
            (site / path).write_text(text)
        if record is not None:
            (info / "RECORD").write_text(record)
        if url is not None:
            (info / "direct_url.json").write_text(json.dumps({"url": url, "dir_info": {"editable": True}}))

    @pytest.fixture
    def site(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.syspath_prepend(str(tmp_path / "site"))
        return tmp_path / "site"

    def test_by_the_wheels_record(self, site: Path) -> None:
        self.install(site, "somewhat", {}, record="somewhat/a.py,sha256=abc,10\nsomewhat-1.0.dist-info/METADATA,sha256=x,1\n")
        first = module.package("somewhat", Memo())
        assert first is not None and first["version"] == "1.0"
        record = site / "somewhat-1.0.dist-info/RECORD"
        for same in (
            "somewhat/a.py,sha256=abc,10\nsomewhat-1.0.dist-info/METADATA,sha256=y,2\n",
            "../../bin/tool,sha256=zzz,5\nsomewhat/a.py,sha256=abc,10\nsomewhat/__pycache__/a.pyc,,\n",
        ):
            record.write_text(same)
            assert module.package("somewhat", Memo()) == first
        record.write_text("somewhat/a.py,sha256=abd,10\n")
        assert module.package("somewhat", Memo()) != first

    def test_the_memo_notices_a_new_installation(self, site: Path) -> None:
        self.install(site, "somewhat", {}, record="somewhat/a.py,sha256=abc,10\n")
        memo = Memo()
        first = module.package("somewhat", memo)
        (site / "somewhat-1.0.dist-info/RECORD").write_text("somewhat/a.py,sha256=abcd,10\n")
        assert module.package("somewhat", memo) != first

    def test_an_editable_one_by_its_sources(self, site: Path, tmp_path: Path) -> None:
        work = tmp_path / "work tree"
        (work / "src/somewhat").mkdir(parents=True)
        (work / "src/somewhat/a.py").write_text("x = 1\n")
        self.install(site, "somewhat", {}, record="somewhat.pth,,\n", url=work.as_uri())
        memo = Memo()
        first = module.package("somewhat", memo)
        (work / "notes.txt").write_text("no source")
        assert module.package("somewhat", memo) == first
        (work / "src/somewhat/a.py").write_text("x = 2\n")
        assert module.package("somewhat", memo) != first

    def test_one_that_is_not_installed(self) -> None:
        assert module.package("no-such-distribution", Memo()) is None
        assert module.package_folder("no_such_package") is None


class TestCompiler:
    def program(self, folder: Path, name: str, text: str) -> Path:
        path = folder / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        return path

    @pytest.fixture
    def tools(self, tmp_path: Path) -> Path:
        folder = tmp_path / "tools"
        folder.mkdir()
        for name in ("cc1plus", "as", "ld"):
            self.program(folder, name, "exit 0")
        self.program(
            folder,
            "mycc",
            f'case "$1" in\n-print-prog-name=*) echo {folder}/"${{1#-print-prog-name=}}";;\n'
            "--version) echo mycc 1.0;;\n-dumpmachine) echo here;;\nesac",
        )
        return folder

    def test_found_as_torch_finds_it(self, tools: Path) -> None:
        assert module.find_compiler({"CXX": "mycc", "PATH": str(tools)}) == tools / "mycc"
        assert module.find_compiler({"PATH": str(tools)}) is None
        with pytest.raises(RequestError, match="no C\\+\\+ compiler: 'g\\+\\+'"):
            module.require_compiler({"PATH": str(tools)})

    @pytest.mark.parametrize("name", ["mycc", "cc1plus", "as", "ld"])
    def test_a_change_of_any_of_its_programs(self, tools: Path, name: str) -> None:
        memo = Memo()
        first = module.identify_compiler(tools / "mycc", memo)
        assert first["version"] == "mycc 1.0"
        assert first["target"] == "here"
        assert module.identify_compiler(tools / "mycc", memo) == first
        (tools / name).write_text((tools / name).read_text() + "# another\n")
        assert module.identify_compiler(tools / "mycc", memo)["digest"] != first["digest"]

    def test_the_same_compiler_in_another_place(self, tools: Path, tmp_path: Path) -> None:
        first = module.identify_compiler(tools / "mycc", Memo())
        assert str(tools) not in json.dumps(first)


class TestMemo:
    def test_answers_are_kept_while_the_file_is_as_it_was(self, tmp_path: Path) -> None:
        file = tmp_path / "f"
        file.write_text("1")
        memo = Memo()
        asked: list[int] = []

        def ask() -> int:
            asked.append(1)
            return len(asked)

        assert [memo.get("x", [file], ask) for _ in range(3)] == [1, 1, 1]
        file.write_text("22")
        assert memo.get("x", [file], ask) == 2
        file.unlink()
        assert memo.get("x", [file], ask) == 3
        assert memo.get("x", [file], ask) == 3
