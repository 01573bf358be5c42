from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest
from conftest import Project
from samples import rates_metadata, rates_package, rates_program

from neml2_build import graphs, history, kernels, show
from neml2_build.build import Build
from neml2_build.compiler import FakeCompiler
from neml2_build.manifest import Manifest, Model
from neml2_build.stages import lower


@pytest.fixture
def built(cli: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The command line, on a project whose target ``eq`` was built with graphs and packages in their real forms."""
    stock_export = FakeCompiler._export

    def export(self: FakeCompiler, request: Any) -> Any:
        made = stock_export(self, request)
        graphs_ = tuple(msgspec.structs.replace(graph, program=rates_program()) for graph in made.graphs)
        metadata = rates_metadata(graphs_[0].name)
        return msgspec.structs.replace(made, graphs=graphs_, metadata=json.dumps(metadata).encode())

    def lower_(self: FakeCompiler, request: Any) -> Any:
        return lower.Result(package=rates_package(), seconds={})

    monkeypatch.setattr(FakeCompiler, "_export", export)
    monkeypatch.setattr(FakeCompiler, "_lower", lower_)
    assert cli("build", "-q").code == 0
    return cli


def test_graph_one_operation_a_line(built: Any) -> None:
    said = built("show", "graph", "eq", "--graph", "one")
    assert said.code == 0
    lines = [line for line in said.out.splitlines() if "t - t~1" in line and "=" in line]
    assert [line.split()[-2:] for line in lines] == [[f"eq{n}", "(ScalarVariableRate)"] for n in (1, 2, 3)]
    assert "repeated: 't - t~1' 3 times" in said.out
    assert said.out.splitlines()[0].startswith("eq_one.pt2: forward; 9 operations of arithmetic")


def test_graph_all_of_a_target(built: Any) -> None:
    said = built("show", "graph", "eq", "--json")
    assert [graph["name"] for graph in said.json["graphs"]] == ["eq_one.pt2", "eq_two.pt2"]
    assert said.json["graphs"][0]["repeated"] == {"t - t~1": 3}


def test_graph_dot(built: Any) -> None:
    assert built("show", "graph", "eq", "--dot").out.count("digraph") == 2


def test_pictures_of_several_graphs_have_their_names(built: Any, project: Project) -> None:
    said = built("show", "graph", "eq", "--svg", "g.svg")
    assert said.code == 0 and said.out == ""
    assert sorted(path.name for path in project.root.glob("*.svg")) == ["g-eq_one.svg", "g-eq_two.svg"]
    built("show", "graph", "eq", "--graph", "eq_two.pt2", "--svg", "one.svg")
    assert (project.root / "one.svg").read_text() == (project.root / "g-eq_two.svg").read_text().replace("eq_one", "eq_two")


def test_kernel_and_its_summary(built: Any) -> None:
    said = built("show", "kernel", "eq", "-g", "one")
    assert "9 operations captured (6 sub, 3 div), 7 left in the code (4 sub, 3 div)" in said.out
    assert "// in_ptr2 is t\n" in said.out
    assert said.out.count("tmp5 = tmp3 - tmp4") == 1
    assert "C10_" not in said.out


def test_kernel_summary_alone(built: Any) -> None:
    assert "void cpp_fused" not in built("show", "kernel", "eq", "--summary").out


def test_kernel_json(built: Any) -> None:
    first = built("show", "kernel", "eq", "--json").json["graphs"][0]
    assert (first["operations"]["captured"], first["operations"]["left"], first["kernels"]) == (9, 7, 1)
    assert first["code"][0]["expressions"].count("t - t~1") == 1


def test_source_is_what_was_compiled(built: Any) -> None:
    sources = built("show", "source", "eq", "-g", "one", "--json").json["graphs"][0]["sources"]
    assert "C10_UNLIKELY" in sources["model.kernel.cpp"]
    assert "run_impl" in built("show", "source", "eq").out


def test_metadata(built: Any) -> None:
    assert json.loads(built("show", "metadata", "eq").out) == rates_metadata("eq_one.pt2")
    assert built("show", "metadata", "eq", "--json").json == rates_metadata("eq_one.pt2")


@pytest.mark.parametrize("what", ["graph", "kernel", "source", "metadata", "diff"])
def test_before_the_first_build(cli: Any, what: str) -> None:
    said = cli("show", what, "eq")
    assert said.code == 2
    assert "run 'neml2-build eq'" in said.err


def test_a_graph_that_is_not_there(built: Any) -> None:
    said = built("show", "graph", "eq", "-g", "three")
    assert said.code == 2
    assert "its graphs are eq_one.pt2, eq_two.pt2" in said.err


def test_a_device_that_was_not_built_for(built: Any) -> None:
    said = built("show", "kernel", "eq", "-d", "cuda")
    assert said.code == 2 and "no code for cuda" in said.err


def test_a_target_that_is_not_there(built: Any) -> None:
    said = built("show", "graph", "qe")
    assert said.code == 2 and "no target named 'qe'" in said.err


def test_what_is_shown_is_said_to_be_old(built: Any, project: Project) -> None:
    assert built("show", "graph", "eq").err == ""
    project.edit("a.i", ("1.5", "1.75"))
    assert "eq is out of date; this is its last build" in built("show", "graph", "eq").err


def test_nothing_is_built_and_nothing_written(built: Any, project: Project) -> None:
    before = {path: path.stat().st_mtime_ns for path in project.aoti.rglob("*")}
    records = {path: path.read_bytes() for path in project.cache.rglob("targets/*/eq/*.json")}
    for what in ("graph", "kernel", "source", "metadata"):
        built("show", what, "eq")
    assert {path: path.stat().st_mtime_ns for path in project.aoti.rglob("*")} == before
    assert {path: path.read_bytes() for path in project.cache.rglob("targets/*/eq/*.json")} == records


def test_a_lost_package_is_read_where_it_is_published(built: Any, project: Project) -> None:
    build = project.start()
    run = build.runs["eq"]
    found = show.graphs_of(run)[0]
    path = project.cache / "objects" / found.packages["cpu"][:2] / found.packages["cpu"][2:]
    path.chmod(0o644)
    path.unlink()
    assert show.package_of(run, found, "cpu") == rates_package()


def test_a_lost_program_is_an_error_with_a_remedy(built: Any, project: Project) -> None:
    record = show.record_of(project.start().runs["eq"], "export")
    for name in ("eq_one.pt2", "eq_two.pt2"):
        (project.cache / "objects" / record.objects[name][:2] / record.objects[name][2:]).unlink(missing_ok=True)
    said = built("show", "graph", "eq")
    assert said.code == 1
    assert "--force" in said.err


# ── diff ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def git(folder: Path, *arguments: str) -> None:
    identity = {f"GIT_{who}_{what}": "x@y.z" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    environment = {**os.environ, **identity, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    subprocess.run(["git", "-C", str(folder), *arguments], check=True, capture_output=True, env=environment)


def test_diff_with_the_build_before(cli: Any, project: Project) -> None:
    cli("build", "-q")
    project.edit("a.i", ("factor = 1.5", "factor = 1.75"))
    cli("build", "-q")
    told = cli("show", "diff", "eq", "--json").json
    assert told["fields"] == ["Models/one/factor: '1.5' -> '1.75'"]
    assert told["graphs"] == {"eq_one.pt2": "changed", "eq_two.pt2": "same"}
    assert told["others"] == []
    text = cli("show", "diff", "eq").out
    assert "  Models/one/factor: '1.5' -> '1.75'\n  changed  eq_one.pt2\n  same     eq_two.pt2\n" in text


def test_diff_passes_over_builds_of_the_same_slice(cli: Any, project: Project) -> None:
    cli("build", "-q")
    project.edit("a.i", ("factor = 1.5", "factor = 1.75"))
    cli("build", "-q")
    project.edit("a.i", ("# rates", "# other"))
    cli("build", "-q")
    assert cli("show", "diff", "eq", "--json").json["fields"] == ["Models/one/factor: '1.5' -> '1.75'"]
    assert len(cli("show", "diff", "eq", "--list", "--json").json["builds"]) == 2


def test_diff_with_a_key(cli: Any, project: Project) -> None:
    cli("build", "-q")
    keys = project.keys()
    for value in ("1.75", "1.875"):
        project.edit("a.i", ("factor = 1.5" if value == "1.75" else "factor = 1.75", f"factor = {value}"))
        cli("build", "-q")
    for key in (keys["parse"], keys["export"][:12]):
        assert cli("show", "diff", "eq", key, "--json").json["fields"] == ["Models/one/factor: '1.5' -> '1.875'"]
    assert cli("show", "diff", "eq", "--json").json["fields"] == ["Models/one/factor: '1.75' -> '1.875'"]


def test_diff_with_a_revision_and_its_includes(cli: Any, project: Project) -> None:
    text = (project.root / "a.i").read_text()
    block = text[text.index("  [one]") : text.index("  [two]")]
    project.write("parts/one.i", block)
    project.write("a.i", text.replace(block, "!include parts/one.i\n"))
    git(project.root, "init", "-q")
    git(project.root, "add", "a.i", "parts/one.i")
    git(project.root, "commit", "-qm", "one")
    project.edit("parts/one.i", ("1.5", "1.75"))
    assert cli("build", "-q").code == 0
    told = cli("show", "diff", "eq", "HEAD", "--json").json
    assert told["fields"] == ["Models/one/factor: '1.5' -> '1.75'"]
    assert told["graphs"] is None
    assert "is not known" in cli("show", "diff", "eq", "HEAD").out


def test_diff_with_a_revision_that_was_built(cli: Any, project: Project) -> None:
    git(project.root, "init", "-q")
    git(project.root, "add", "a.i")
    git(project.root, "commit", "-qm", "one")
    cli("build", "-q")
    project.edit("a.i", ("2.5", "3.5"))
    cli("build", "-q")
    told = cli("show", "diff", "eq", "HEAD", "--json").json
    assert told["graphs"] == {"eq_one.pt2": "same", "eq_two.pt2": "changed"}


def test_diff_tells_graphs_that_came_and_went_and_other_changes() -> None:
    before = history.Version("a", "[Models]\n[]\n", None, {"options": {"dtype": "float64"}}, {"x": "1", "y": "2"})
    after = history.Version("b", "[Models]\n[]\n", None, {"options": {"dtype": "float32"}}, {"x": "1", "z": "3"})
    change = history.compare_versions(before, after)
    assert change.graphs == {"x": "same", "z": "new", "y": "gone"}
    assert change.others == ("request-changed: options.dtype: float64 -> float32",)


def test_diff_with_nothing_before(cli: Any) -> None:
    cli("build", "-q")
    said = cli("show", "diff", "eq")
    assert said.code == 2 and "no earlier build" in said.err


def test_diff_with_what_is_neither_key_nor_revision(cli: Any, project: Project) -> None:
    cli("build", "-q")
    assert cli("show", "diff", "eq", "nonsense").code == 2
    git(project.root, "init", "-q")
    said = cli("show", "diff", "eq", "nonsense")
    assert said.code == 2 and "--list" in said.err


# ── the real thing ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.real
def test_the_example_of_the_docs(tmp_path: Path) -> None:
    """``eq`` of ``models/rates.i``, compiled for real: nine operations captured, seven left, one kernel."""
    from neml2_build.engine import execute

    source = Path(__file__).parents[1] / "models" / "rates.i"
    (tmp_path / "rates.i").write_bytes(source.read_bytes())
    store = os.environ.get("NEML2_BUILD_TEST_CACHE") or str(tmp_path / "cache")
    build = Build(Manifest(models=[Model(input="rates.i", model="eq")], root=tmp_path, cache=store))
    try:
        execute(build, build.select(), keep_going=False)
        assert not build.failures
        run = build.runs["eq"]
        (found,) = show.graphs_of(run)
        assert found.graph.repeated() == {"t - t~1": 3}
        package = kernels.read(show.package_of(run, found, "cpu"), "eq.pt2", found.graph)
        summary = kernels.summarize(found.graph, package)
        assert (sum(summary.captured.values()), sum(summary.left.values()), summary.kernels) == (9, 7, 1)
        assert package.kernels[0].expressions().count("t - t~1") == 1
        assert isinstance(found.graph, graphs.Graph) and not summary.calls
        made = show.write_debug(build, run, tmp_path / "dump", None, None, True)
    finally:
        build.close()
    assert made == 0
    names = {path.name for path in (tmp_path / "dump" / "eq").iterdir()}
    assert {"captured.py", "fx_graph_readable.py", "ir_pre_fusion.txt", "ir_post_fusion.txt", "kernel.cpp"} <= names
    assert "ir_post_fusion.txt" in (tmp_path / "dump" / "index.html").read_text()
