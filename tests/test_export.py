"""Capturing graphs with the real NEML2: what it reads is seen, what it makes is digested for what it is."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, SUITE, Kept, Project

from neml2_build import environment as environments
from neml2_build import hit
from neml2_build.build import Build
from neml2_build.cli import _dependencies, _warnings_of
from neml2_build.errors import TaskError
from neml2_build.manifest import Model
from neml2_build.stages import export
from neml2_build.target import TargetRun

RATES = """\
[Models]
  [eq1]
    type = ScalarVariableRate
    variable = 'a'
  []
  [eq2]
    type = ScalarVariableRate
    variable = 'b'
  []
  [eq]
    type = ComposedModel
    models = 'eq1 eq2'
  []
[]
"""

#: A linear model whose weight is what the Tensors block says.
WEIGHTED = """\
[Tensors]
  [w]
    type = Python
    expr = '''
EXPR
    '''
  []
[]
[Models]
  [eq]
    type = ScalarLinearCombination
    from = 'a'
    to = 'b'
    weights = 'w'
  []
[]
"""


@pytest.fixture
def project(tmp_path: Path) -> Project:
    project = Project(tmp_path / "project")
    project.write("a.i", RATES)
    return project


def capture(project: Project, real: Any, name: str = "eq") -> TargetRun:
    """Bring parse and export of a target up to date, and end its process."""
    build = Build(project.manifest(), environ=project.environ, compiler=real)
    run = build.runs[name]
    try:
        for stage in ("parse", "export"):
            if run.check(stage):
                run.do(stage)
    finally:
        run.release()
        build.close()
    return run


def graphs(run: TargetRun) -> dict[str, str]:
    assert run.exported is not None
    return {graph.name: graph.digest for graph in run.exported.graphs}


# -- the seam ---------------------------------------------------------------------------------------------------------


def source(name: str) -> str:
    folder = environments.package_folder("neml2")
    if folder is None:
        pytest.skip("NEML2 is not installed")
    return (folder / name).read_text()


class TestUpstream:
    """What this stage relies on in NEML2's source. When one of these fails, NEML2 changed: look at the seam first."""

    def test_the_lowering_is_imported_where_it_is_called(self) -> None:
        text = source("models/export.py")
        assert re.search(r"^    +from torch\._inductor import aoti_compile_and_package$", text, re.M)
        assert len(re.findall(r"^ +aoti_compile_and_package\(", text, re.M)) == 1
        assert "aoti_compile_and_package(ep, **aoti_kwargs)" in text

    def test_the_options_of_the_lowering(self) -> None:
        text = source("models/export.py")
        assert set(re.findall(r'aoti_kwargs\["(\w+)"\]|aoti_kwargs[^=]*= \{"(\w+)"', text)) <= {
            ("inductor_configs", ""),
            ("", "package_path"),
        }

    def test_input_files_are_looked_into_through_one_method(self) -> None:
        text = source("factory.py")
        assert re.search(r"^class _NativeInputFile", text, re.M)
        assert re.search(r"^    def _find_in_section\(self, section: str, name: str\)", text, re.M)
        assert re.search(r"^def load_input\(", text, re.M)
        assert "self._cache" in text

    def test_the_exporter(self) -> None:
        text = source("cli/aoti_export.py")
        assert re.search(r"^def export_model_for_aoti\(", text, re.M)
        for option in ("device", "dtype", "promoted", "example_batch_shape", "dynamic_batch", "derivatives", "renames"):
            assert re.search(rf"\b{option}\b", text.partition("def export_model_for_aoti(")[2].partition(") ->")[0]), option
        assert "load_user_extensions" in source("cli/_extensions.py")


# -- what is read -----------------------------------------------------------------------------------------------------


@pytest.mark.real
class TestCapture:
    def test_the_same_graphs_in_another_place_after_a_comment(self, project: Project, real: Kept, tmp_path: Path) -> None:
        first = capture(project, real)
        other = Project(tmp_path / "elsewhere" / "with space")
        other.write("b.i", "# a comment\n" + RATES + "[Models]\n  [unrelated]\n    type = Nonsense\n  []\n[]\n")
        other.models = [Model(input="b.i", model="eq")]
        second = capture(other, real)
        assert real.calls["export"] == 2
        assert graphs(first) == graphs(second)
        assert len(graphs(first)) >= 1
        assert first.exported is not None and second.exported is not None
        assert first.exported.metadata == second.exported.metadata
        assert [graph.program for graph in first.exported.graphs] == [graph.program for graph in second.exported.graphs]
        assert first.exported.random == ()
        assert first.exported.opened == {}

    def test_up_to_date_afterwards(self, project: Project, real: Kept) -> None:
        capture(project, real)
        capture(project, real)
        project.write("a.i", "# a comment\n" + RATES)
        capture(project, real)
        shutil.rmtree(project.cache / "targets")
        capture(project, real)
        assert real.calls["export"] == 1

    def test_another_graph_has_another_digest(self, project: Project, real: Kept) -> None:
        before = capture(project, real)
        project.edit("a.i", ("'eq1 eq2'", "'eq1'"))
        after = capture(project, real)
        assert set(graphs(before).values()).isdisjoint(graphs(after).values())


@pytest.mark.real
class TestSlice:
    @pytest.fixture
    def crystal(self, project: Project) -> Project:
        folder = SUITE / "regression/solid_mechanics/crystal_plasticity/per_slip_hardening_declared"
        if not folder.exists():
            pytest.skip("needs the suite of NEML2's inputs")
        shutil.copytree(folder, project.root / "crystal")
        project.models = [Model(input="crystal/model.i", model="model", name="eq")]
        return project

    def test_a_block_that_the_slice_left_out_widens_it_once_and_for_all(
        self, crystal: Project, real: Kept, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Crystal plasticity asks for [Data/crystal_geometry] by a default that no value names."""
        monkeypatch.setattr(hit, "DEFAULT_BLOCKS", frozenset())
        run = capture(crystal, real)
        assert real.calls["export"] == 2
        assert run.parsed is not None
        assert ("Data", "crystal_geometry") in map(tuple, run.parsed.blocks)
        capture(crystal, real)
        crystal.edit("crystal/model.i", ("[Models]", "# a comment\n[Models]"))
        capture(crystal, real)
        shutil.rmtree(crystal.cache / "targets")
        again = capture(crystal, real)
        assert real.calls["export"] == 2
        assert graphs(again) == graphs(run)


@pytest.mark.real
class TestRandom:
    def test_random_tensors_are_named(self, project: Project, real: Kept) -> None:
        project.write("a.i", WEIGHTED.replace("EXPR", "      Scalar(torch.rand((), dtype=torch.float64))"))
        run = capture(project, real)
        assert run.exported is not None
        assert run.exported.random == ("Tensors/w",)
        (warning,) = [text for text in _warnings_of(run) if "not reproducible" in text]
        assert "Tensors/w" in warning
        capture(project, real)
        assert real.calls["export"] == 1


@pytest.mark.real
class TestFiles:
    def test_a_file_that_an_expression_opens(self, project: Project, real: Kept) -> None:
        project.write("value.txt", "2.5\n")
        project.write("a.i", WEIGHTED.replace("EXPR", "      Scalar(torch.as_tensor(np.loadtxt('value.txt')))"))
        run = capture(project, real)
        assert run.exported is not None
        assert list(run.exported.opened) == ["value.txt"]
        assert "file value.txt" in _dependencies(run)
        before = graphs(run)
        project.write("value.txt", "3.5\n")
        build = Build(project.manifest(), environ=project.environ, compiler=real)
        assert build.runs["eq"].check("parse") == ()
        (reason,) = build.runs["eq"].check("export")
        assert str(reason) == "data-changed: value.txt"
        build.close()
        after = capture(project, real)
        assert graphs(after) != before
        assert real.calls["export"] == 2
        project.write("value.txt", "2.5\n")
        assert graphs(capture(project, real)) == before
        assert real.calls["export"] == 2
        (project.root / "value.txt").unlink()
        with pytest.raises(TaskError, match=r"value\.txt"):
            capture(project, real)

    def test_what_an_extension_imports(self, project: Project, real: Kept) -> None:
        text = (ROOT / "models/ext/softplus.py").read_text()
        project.write("ext/helper_of_softplus.py", "value = 1\n")
        lines = "import os, sys\nsys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))\nimport helper_of_softplus\n"
        future = "from __future__ import annotations\n"
        project.write("ext/softplus.py", text.replace(future, future + lines, 1) if future in text else lines + text)
        project.write("a.i", (ROOT / "models/extension.i").read_text())
        project.models = [Model(input="a.i", model="model", name="eq", load=["ext/softplus.py"])]
        run = capture(project, real)
        assert run.exported is not None
        assert list(run.exported.opened) == ["ext/helper_of_softplus.py"]
        project.write("ext/helper_of_softplus.py", "value = 2\n")
        build = Build(project.manifest(), environ=project.environ, compiler=real)
        build.runs["eq"].check("parse")
        (reason,) = build.runs["eq"].check("export")
        assert str(reason) == "extension-changed: ext/helper_of_softplus.py"
        build.close()
        project.models = [Model(input="a.i", model="model", name="eq")]
        with pytest.raises(TaskError, match="SoftPlus"):  # nothing of the extension was left in the workers
            capture(project, real)


@pytest.mark.real
class TestErrors:
    @pytest.mark.parametrize(
        ("change", "words"),
        [
            (
                ("ScalarVariableRate\n    variable = 'b'", "ScalarVariableRat\n    variable = 'b'"),
                ["ScalarVariableRat", "remedy"],
            ),
            (("variable = 'b'", "variabel = 'b'"), ["variabel"]),
        ],
        ids=["unknown type", "unknown field"],
    )
    def test_neml2s_message_with_file_and_target(
        self, project: Project, real: Kept, change: tuple[str, str], words: list[str]
    ) -> None:
        project.edit("a.i", change)
        with pytest.raises(TaskError) as caught:
            capture(project, real)
        text = str(caught.value)
        assert str(project.root / "a.i") in text
        assert "[export:eq]" in text
        assert "Traceback" not in text
        for word in words:
            assert word in text


# -- the digest -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def program(workers: Any, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A saved program with constants."""
    project = Project(tmp_path_factory.mktemp("program") / "p")
    project.write("a.i", WEIGHTED.replace("EXPR", "      Scalar(torch.tensor(2.0, dtype=torch.float64))"))
    run = capture(project, Kept(workers))
    assert run.exported is not None
    return run.build.store.read(run.exported.graphs[0].program)


def rewritten(program: bytes, change: Callable[[str, bytes], bytes | None]) -> bytes:
    """*program* with each file of the archive, by its name below the root, as *change* makes it; None leaves it out."""
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(program)) as old, zipfile.ZipFile(stream, "w") as new:
        for info in old.infolist():
            data = change(info.filename.partition("/")[2], old.read(info))
            if data is not None:
                new.writestr(info.filename, data)
    return stream.getvalue()


def with_model(program: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    """*program* with its graph as *change* leaves it."""

    def edit(name: str, data: bytes) -> bytes:
        if not name.startswith("models/"):
            return data
        model = json.loads(data)
        change(model)
        return json.dumps(model).encode()

    return rewritten(program, edit)


def nodes(model: dict[str, Any]) -> list[dict[str, Any]]:
    return model["graph_module"]["graph"]["nodes"]


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every number, text and truth value in *value*."""
    if isinstance(value, dict):
        return [found for name, item in value.items() for found in leaves(item, (*path, name))]
    if isinstance(value, list):
        return [found for index, item in enumerate(value) for found in leaves(item, (*path, index))]
    return [path]


@pytest.mark.real
class TestDigest:
    def test_what_the_code_does_not_depend_on(self, program: bytes) -> None:
        before = export.graph_digest(program, {})

        def other_words(model: dict[str, Any]) -> None:
            model["torch_version"] = "9.9"
            for node in nodes(model):
                node["metadata"] = {"stack_trace": "/somewhere/else.py", "nn_module_stack": "other", "source_fn_stack": "x"}

        assert export.graph_digest(with_model(program, other_words), {}) == before
        samples = rewritten(program, lambda name, data: b"other" if name.startswith("data/sample_inputs/") else data)
        assert samples != program
        assert export.graph_digest(samples, {}) == before

    def test_inductor_options(self, program: bytes) -> None:
        assert export.graph_digest(program, {}) != export.graph_digest(program, {"max_autotune": True})

    def test_each_constant(self, program: bytes) -> None:
        before = export.graph_digest(program, {})
        names: list[str] = []
        rewritten(program, lambda name, data: names.append(name) or data)
        held = [name for name in names if name.startswith(("data/constants/", "data/weights/"))]
        assert held
        for wanted in held:
            flipped = rewritten(program, lambda name, data, w=wanted: data[:-1] + bytes([data[-1] ^ 1]) if name == w else data)
            assert export.graph_digest(flipped, {}) != before, wanted
            gone = rewritten(program, lambda name, data, w=wanted: None if name == w else data)
            assert export.graph_digest(gone, {}) != before, wanted

    def test_every_value_of_the_graph_but_what_is_left_out_on_purpose(self, program: bytes) -> None:
        """Changes each leaf of the model in turn: operations, arguments, shapes, hints, constraints, signature."""
        models: list[dict[str, Any]] = []
        with_model(program, models.append)
        (model,) = models
        before = export.digest_json(export._canonical(model))
        blind = []
        for path in leaves(model):
            spot = model
            for step in path[:-1]:
                spot = spot[step]
            old = spot[path[-1]]
            spot[path[-1]] = not old if isinstance(old, bool) else f"{old}x" if isinstance(old, str) else (old or 0) + 1
            if export.digest_json(export._canonical(model)) == before:
                blind.append(path)
            spot[path[-1]] = old
        assert len(leaves(model)) > 50
        for path in blind:
            assert (
                path[0] in ("torch_version", "schema_version", "opset_version")
                or "metadata" in path
                or "module_call_graph" in path
                or path[-1] == "metadata"
            ), path

    def test_a_node_more_and_nodes_in_another_order(self, program: bytes) -> None:
        before = export.graph_digest(program, {})
        assert export.graph_digest(with_model(program, lambda model: nodes(model).append(nodes(model)[-1])), {}) != before
        models: list[dict[str, Any]] = []
        with_model(program, models.append)
        if len(nodes(models[0])) > 1:
            assert export.graph_digest(with_model(program, lambda model: nodes(model).reverse()), {}) != before


class TestKey:
    ARGUMENTS: tuple[Any, ...] = ("model", "slice", [("a.csv", "1")], {"dtype": "float64"}, {"python": "3"})

    def test_every_part_counts(self) -> None:
        before = export.key_of(*self.ARGUMENTS)
        for index, other in enumerate(("other", "other", [("a.csv", "2")], {"dtype": "float32"}, {"python": "4"})):
            changed = [*self.ARGUMENTS]
            changed[index] = other
            assert export.key_of(*changed) != before

    def test_the_order_of_files_does_not(self) -> None:
        one = export.key_of("m", "s", [("a", "1"), ("b", "2")], {}, {})
        assert one == export.key_of("m", "s", [("b", "2"), ("a", "1")], {}, {})


def test_files_of_the_installation_are_not_recorded(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    opened = {os.__file__: None, str(tmp_path / "mine.txt"): None, "/proc/self/stat": None, str(tmp_path / "missing"): None}
    (tmp_path / "mine.txt").write_text("x")
    found = export._files_read(dict(opened), set(), str(tmp_path / "scratch"))
    assert list(found) == [str(tmp_path / "mine.txt")]
