from __future__ import annotations

import io
import json
import math
import os
import struct
import zipfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
from conftest import Project
from samples import node, program

from neml2_build import comparison, verify
from neml2_build.build import Build
from neml2_build.cli import _warnings_of
from neml2_build.comparison import Difference
from neml2_build.engine import execute
from neml2_build.errors import TaskError
from neml2_build.manifest import Manifest, Model
from neml2_build.workers import WorkerFailed

MODELS = Path(__file__).parents[1] / "models"


class Answers:
    """Stands for the job of a worker: notes what it was asked, answers what it was told."""

    def __init__(self) -> None:
        self.requests: list[comparison.Request] = []
        self.wrong: dict[str, float] = {}

    def __call__(self, request: comparison.Request) -> Difference:
        self.requests.append(request)
        apart = self.wrong.get(request.graph, 1e-16)
        return Difference(
            graph=request.graph,
            device=request.device,
            ok=apart <= request.tolerance,
            absolute=apart,
            relative=apart,
            tolerance=request.tolerance,
            batches=request.batches,
            outputs=4,
            inputs="between 0.1 and 1",
        )


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Answers:
    found = Answers()
    monkeypatch.setattr(comparison, "job", found)
    return found


def test_every_graph_is_compared_at_every_size(cli: Any, answers: Answers) -> None:
    cli("build", "-q")
    said = cli("verify")
    assert said.code == 0
    assert sorted(request.graph for request in answers.requests) == ["eq_one.pt2", "eq_two.pt2"]
    assert all(request.batches == (1, 2, 7, 1000) and request.tolerance == 1e-10 for request in answers.requests)
    assert [line.split()[:3] for line in said.out.splitlines()[1:3]] == [
        ["eq", f"eq_{name}.pt2", "cpu"] for name in ("one", "two")
    ]
    assert said.out.count("agrees") == 2
    assert "inputs of 2 graphs: between 0.1 and 1" in said.out


def test_beyond_the_tolerance_the_exit_code_is_one(cli: Any, answers: Answers) -> None:
    cli("build", "-q")
    answers.wrong = {"eq_two.pt2": 1e-9}
    said = cli("verify", "--json")
    assert said.code == 1
    assert not said.json["ok"]
    assert [graph["ok"] for graph in said.json["targets"][0]["graphs"]] == [True, False]
    assert "DIFFERS: beyond 1e-10" in cli("verify").out
    assert cli("verify", "--tolerance", "1e-8").code == 0


def test_sizes_that_are_asked_for(cli: Any, answers: Answers) -> None:
    cli("build", "-q")
    assert cli("verify", "--batches", "50,3 50").code == 0
    assert {request.batches for request in answers.requests} == {(3, 50)}
    assert cli("verify", "--batches", "0").code == 2
    assert cli("verify", "--batches", "many").code == 2


def test_the_result_is_kept(cli: Any, answers: Answers, project: Project) -> None:
    cli("build", "-q")
    cli("verify")
    build = project.start()
    found = verify.recorded(build.runs["eq"])
    assert [(one.graph, one.ok) for one in found] == [("eq_one.pt2", True), ("eq_two.pt2", True)]


def test_what_ran_on_a_gpu_is_no_longer_called_unrun(cli: Any, answers: Answers, project: Project) -> None:
    cli("build", "-q")
    build = project.start()
    run = build.runs["eq"]
    record = build.records.read("eq", "lower-cpu")
    assert record is not None
    made = {"unrun": "not yet run on a GPU", "cards": ["sm_80 (A100)"]}
    cuda = {name: made for name, _, _ in record.info["graphs"]}
    build.records.write("eq", msgspec.structs.replace(record, stage="lower-cuda", info={**record.info, "cuda": cuda}))

    def warnings(*ran: tuple[str, bool | None]) -> list[str]:
        packages = {name: found for name, _, found in record.info["graphs"]}
        verify.keep(run, [Difference(graph=name, device="cuda", ok=ok, compared=packages[name]) for name, ok in ran])
        return _warnings_of(run)

    limits = "not yet run on a GPU; made for the limits of sm_80 (A100)"
    assert warnings() == [f"cuda: {limits}"]
    assert warnings(("eq_one.pt2", True), ("eq_two.pt2", None)) == [f"cuda: 1 of 2 graphs {limits}"]
    assert warnings(("eq_one.pt2", True), ("eq_two.pt2", True)) == []
    (wrong,) = warnings(("eq_one.pt2", True), ("eq_two.pt2", False))
    assert "differs from the captured graph: eq_two.pt2" in wrong


def test_the_package_that_was_compared_is_kept(cli: Any, answers: Answers, project: Project) -> None:
    cli("build", "-q")
    cli("verify")
    run = project.start().runs["eq"]
    record = run.build.records.read("eq", "lower-cpu")
    assert record is not None
    assert verify.ran(run, "cpu") == {found for _, _, found in record.info["graphs"]}
    assert verify.ran(run, "cuda") == set()


def test_infinity_is_kept_and_told(cli: Any, answers: Answers, project: Project) -> None:
    cli("build", "-q")
    answers.wrong = {"eq_one.pt2": math.inf}
    told = cli("verify", "--json")
    assert told.json["targets"][0]["graphs"][0]["absolute"] == "inf"
    assert verify.recorded(project.start().runs["eq"])[0].ok is False


def test_before_the_first_build(cli: Any, answers: Answers) -> None:
    said = cli("verify", "--json")
    assert said.code == 2
    assert "run 'neml2-build eq'" in said.json["failures"][0]["message"]


def test_graphs_of_the_fake_compiler_are_not_compared(cli: Any) -> None:
    cli("build", "-q")
    said = cli("verify")
    assert said.code == 0
    assert said.out.count("not compared: made by the fake compiler") == 2


def test_a_process_that_dies_is_an_error(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cli("build", "-q")

    def dies(request: comparison.Request) -> Difference:
        raise WorkerFailed("died", "the worker process died", "", "")

    monkeypatch.setattr(comparison, "job", dies)
    said = cli("verify")
    assert said.code == 1
    assert "[verify:eq] cannot compare: died" in said.err


def test_a_graph_lowered_again_has_the_same_bytes(cli: Any, answers: Answers) -> None:
    cli("build", "-q")
    rows = cli("verify", "--rebuild", "1", "--json").json["targets"][0]["rebuilt"]
    assert len(rows) == 1 and rows[0]["same"]
    assert len(cli("verify", "--rebuild", "9", "--json").json["targets"][0]["rebuilt"]) == 2


def test_other_bytes_are_told(cli: Any, answers: Answers, monkeypatch: pytest.MonkeyPatch) -> None:
    from neml2_build.compiler import FakeCompiler
    from neml2_build.stages import lower

    cli("build", "-q")
    monkeypatch.setattr(FakeCompiler, "_lower", lambda self, request: lower.Result(package=b"other", seconds={}))
    said = cli("verify", "--rebuild", "1")
    assert said.code == 1
    assert "OTHER BYTES" in said.out


# ── before publishing ────────────────────────────────────────────────────────────────────────────────────────────────


def asking(project: Project) -> None:
    project.models = [Model(input="a.i", model="eq", verify=True)]


def test_a_build_verifies_before_it_publishes(project: Project, answers: Answers) -> None:
    asking(project)
    assert project.build().targets == {"built": 1}
    assert len(answers.requests) == 2
    assert project.build().targets == {"up_to_date": 1}
    assert len(answers.requests) == 2


def test_what_differs_is_not_published(project: Project, answers: Answers) -> None:
    asking(project)
    answers.wrong = {"eq_two.pt2": 0.5}
    outcome = project.build()
    assert outcome.targets == {"failed": 1}
    assert not (project.aoti / "eq").exists()
    (error,) = outcome.build.failures
    assert error.stage in ("verify", "package")
    assert "eq_two.pt2 on cpu (absolute 5.0e-01, relative 5.0e-01)" in error.message
    answers.wrong = {}
    assert project.build().targets == {"restored": 1}
    assert (project.aoti / "eq" / "metadata.json").exists()


def test_a_failure_keeps_what_was_published_before(project: Project, answers: Answers) -> None:
    asking(project)
    project.build()
    before = project.tree()
    project.edit("a.i", ("factor = 1.5", "factor = 1.75"))
    answers.wrong = {"eq_one.pt2": 0.5}
    assert project.build().targets == {"failed": 1}
    assert {name: found for name, found in project.tree().items() if name.startswith("eq/")} == {
        name: found for name, found in before.items() if name.startswith("eq/")
    }


def test_a_graph_that_agreed_is_not_compared_again(project: Project, answers: Answers) -> None:
    asking(project)
    project.build()
    project.edit("a.i", ("factor = 1.5", "factor = 1.75"))
    project.build()
    assert sorted(request.graph for request in answers.requests) == ["eq_one.pt2", "eq_one.pt2", "eq_two.pt2"]


def test_a_wish_that_comes_later_is_met(project: Project, answers: Answers) -> None:
    project.build()
    asking(project)
    build = project.start()
    reasons = [str(reason) for verdict in build.runs["eq"].preview() for reason in verdict.reasons]
    assert reasons == ["not-verified: eq_one.pt2", "not-verified: eq_two.pt2"]
    build.close()
    assert project.build().targets == {"restored": 1}
    assert len(answers.requests) == 2
    assert project.build().targets == {"up_to_date": 1}


def test_without_the_wish_nothing_is_compared(project: Project, answers: Answers) -> None:
    project.build()
    assert answers.requests == []


def test_require_names_the_worst(project: Project, answers: Answers) -> None:
    build = project.start()
    run = build.runs["eq"]
    execute(build, [run], keep_going=False)
    answers.wrong = {"eq_one.pt2": 1.0}
    with pytest.raises(TaskError, match=r"by more than 1e-10: eq_one\.pt2 on cpu"):
        verify.require(build, run)
    build.close()


# ── inputs ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def hints(project: Project, inputs: list[str], nodes: list[dict[str, Any]], shapes: dict[str, list[Any]]) -> tuple[str, ...]:
    build = project.start()
    data = program(inputs, nodes, [inputs[0]], shapes=shapes)
    try:
        return verify._hints(build.runs["eq"], "g.pt2", build.store.put(data)[0])
    finally:
        build.close()


def test_square_inputs_of_a_solve_are_near_the_identity(project: Project) -> None:
    three = {"as_int": 3}
    solve = node("aten.linalg_solve.default", "s", A="x", B="y")
    shapes = {"x": [three, three], "y": [three]}
    assert hints(project, ["x", "y"], [solve], shapes) == ("identity", "")
    assert hints(project, ["x", "y"], [node("aten.mul.Tensor", "s", self="x", other="y")], shapes) == ("", "")


# ── with torch ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.real
def test_inputs_are_ones_at_which_the_graph_is_well_conditioned() -> None:
    """The sine of a large number loses every digit between 0.1 and 1, half of them below 0.01, and few below 0.0001."""
    import torch

    class Loses(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sin((1e4 * x) ** 4)

    class Is(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 3.0

    def chosen(model: torch.nn.Module, size: int = 1000) -> tuple[str, float]:
        sample = torch.zeros(2, dtype=torch.float64)
        request = comparison.Request(
            graph="g.pt2",
            device="cpu",
            program=b"",
            package=b"",
            hints=(),
            batches=(size,),
            tolerance=1e-10,
            isa=None,
            march="native",
        )
        shape = comparison._Shape([size])
        (_, spec) = torch.utils._pytree.tree_flatten(((sample,), {}))
        return comparison._best_kind(request, [sample], [shape], [size], model, spec)

    kind, moved = chosen(Is())
    assert kind.name == "between 0.1 and 1" and 0 < moved < 1e-15
    kind, moved = chosen(Loses())
    assert kind.name == "within 0.0001 of zero" and 0 < moved <= 1e-11


@pytest.mark.real
def test_neighbours_are_the_next_numbers() -> None:
    import torch

    values = [torch.full((1000,), 0.5, dtype=torch.float64), torch.arange(3)]
    moved, whole = comparison._neighbours(values)
    assert set(moved.tolist()) == {math.nextafter(0.5, 0), math.nextafter(0.5, 1)}
    assert whole is values[1]


@pytest.mark.real
def test_differences_of_tensors() -> None:
    import torch

    nan, inf = math.nan, math.inf
    one = torch.tensor([1.0, 200.0], dtype=torch.float64)
    assert comparison.difference(one, one.clone()) == (0.0, 0.0)
    assert comparison.difference(one, one + torch.tensor([0.0, 2.0])) == (2.0, 0.01)
    special = torch.tensor([nan, inf, -inf, 1.0])
    assert comparison.difference(special, special.clone()) == (0.0, 0.0)
    assert comparison.difference(special, torch.tensor([nan, inf, inf, 1.0]))[0] == inf
    assert comparison.difference(special, torch.tensor([1.0, inf, -inf, 1.0]))[0] == inf
    assert comparison.difference(one, one[:1])[0] == inf
    assert comparison.difference(one, one.float())[0] == inf
    assert comparison.difference(torch.tensor([1, 2]), torch.tensor([1, 4])) == (2.0, 2.0)
    assert comparison.difference(torch.zeros(0), torch.zeros(0)) == (0.0, 0.0)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`rates`, and the three graphs of an implicit update, compiled for real and published."""
    root = tmp_path_factory.mktemp("real")
    for name in ("rates.i", "implicit.i"):
        (root / name).write_bytes((MODELS / name).read_bytes())
    store = os.environ.get("NEML2_BUILD_TEST_CACHE") or str(root / "cache")
    models = [Model(input="rates.i", model="eq", name="rates"), Model(input="implicit.i", model="model", name="implicit")]
    build = Build(Manifest(models=models, root=root, cache=store))
    try:
        execute(build, build.select(), keep_going=False)
        assert not build.failures
        yield build
    finally:
        build.close()


@pytest.mark.real
def test_real_graphs_agree(real: Build) -> None:
    for name, count in (("rates", 1), ("implicit", 3)):
        found = verify.check_graphs(real, real.runs[name])
        assert len(found) == count
        assert all(one.ok and one.batches == (1, 2, 7, 1000) and one.finite == 1.0 for one in found), found
    (solve,) = (one for one in found if "solve" in one.graph)
    assert solve.inputs.endswith("matrices near the identity")


def with_another_constant(saved: bytes) -> bytes:
    """The saved program with a reference stress of 121 in the place of 120."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(saved)) as old, zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as new:
        for info in old.infolist():
            data = old.read(info)
            new.writestr(info.filename, struct.pack("<d", 121.0) if data == struct.pack("<d", 120.0) else data)
    return out.getvalue()


@pytest.mark.real
def test_code_with_another_constant_differs(real: Build) -> None:
    (residual,) = (one for one in verify._graphs(real.runs["implicit"]) if one[0] == "model_residual.pt2")
    name, _, saved, packages = residual
    request = comparison.Request(
        graph=name,
        device="cpu",
        program=with_another_constant(real.store.read(saved)),
        package=real.store.read(packages["cpu"]),
        hints=(),
        batches=(2, 7),
        tolerance=1e-10,
        isa=real.isa(),
        march="native",
    )
    found = real.compiler.run(comparison.job, request).result().value
    assert found.ok is False
    assert found.relative > 1e-10


@pytest.mark.real
def test_the_whole_model_agrees_with_the_eager_one(real: Build) -> None:
    for name in ("rates", "implicit"):
        found = verify._whole(real, real.runs[name], (1, 7), None)
        assert found.ok, found


@pytest.mark.real
def test_the_command_in_words(real: Build, capsys: pytest.CaptureFixture[str]) -> None:
    verify._table([verify._verify(real, real.runs["rates"], (1, 2), None, False, None)])
    assert "agrees" in capsys.readouterr().out
    record = json.loads((real.records.folder / "rates" / "verify.json").read_text())
    assert record["info"]["ok"] is True
