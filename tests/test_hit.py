"""Reading, slicing and comparing HIT files; nmhit and NEML2's rule for look-ups are the oracle."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import nmhit
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from neml2_build import hit
from neml2_build.errors import BuildError, RequestError, TaskError

SUITE = Path(os.environ.get("NEML2_BUILD_SUITE", Path(__file__).parents[2] / "shared" / "suite"))
needs_suite = pytest.mark.skipif(not (SUITE / "targets.json").is_file(), reason="no folder of real inputs")

RATES = """# three rates
[Models]
  [eq1]
    type = ScalarVariableRate
    variable = 'a'
  []
  [eq2] # the second
    type = ScalarVariableRate
    variable = 'b'
  []
  [eq]
    type = ComposedModel
    models = 'eq1 eq2'
  []
  [alone]
    type = LinearIsotropicElasticity
    coefficients = 'E 0.3'
  []
[]

[Tensors]
  [E]
    type = Python
    expr = 'Scalar(base * 2.0)'
  []
  [base]
    type = Python
    expr = 'Scalar(1.0)'
  []
[]

[Drivers]
  [driver]
    type = TransientDriver
    model = 'eq'
    prescribed_time = 'base'
  []
  [regression]
    type = TransientRegression
    driver = 'driver'
  []
[]
"""


def write(folder: Path, **files: str) -> Path:
    """Write ``name=text`` as ``name.i`` (``sub__name`` as ``sub/name.i``); the path of the first."""
    paths = []
    for name, text in files.items():
        path = folder / (name.replace("__", "/") + ".i")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        paths.append(path)
    return paths[0]


def sliced(path: Path, model: str = "eq", **options) -> str:
    document = hit.read(path, **options)
    return hit.slice_text(document, hit.reach(document, model))


def failure(kind: type[BuildError], call: Callable[[], object]) -> BuildError:
    with pytest.raises(BuildError) as caught:
        call()
    assert type(caught.value) is kind, caught.value
    assert caught.value.remedy
    return caught.value


# ── the slice ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_slice_holds_what_the_model_reaches_and_nothing_else(tmp_path):
    document = hit.read(write(tmp_path, a=RATES))
    assert hit.reach(document, "eq") == {("Models", "eq"), ("Models", "eq1"), ("Models", "eq2")}
    assert hit.reach(document, "alone") == {("Models", "alone"), ("Tensors", "E"), ("Tensors", "base")}
    assert hit.slice_text(document, hit.reach(document, "eq")) == (
        "[Models]\n"
        "  [eq]\n    type = 'ComposedModel'\n    models = 'eq1 eq2'\n  []\n"
        "  [eq1]\n    type = 'ScalarVariableRate'\n    variable = 'a'\n  []\n"
        "  [eq2]\n    type = 'ScalarVariableRate'\n    variable = 'b'\n  []\n"
        "[]\n"
    )


@pytest.mark.parametrize(
    "edit",
    [
        ("# three rates", "# four rates\n\n"),
        ("[eq2] # the second", "[eq2]"),
        ("coefficients = 'E 0.3'", "coefficients = 'E 0.4'"),
        ("prescribed_time = 'base'", "prescribed_time = 'E'"),
        ("variable = 'b'", "variable = b"),
        ("variable = 'b'", 'variable = "b"'),
        ("    type = ComposedModel\n", "        type   =   ComposedModel   \n"),
        ("[Models]\n  [eq1]\n    type = ScalarVariableRate\n    variable = 'a'\n  []\n", "[Models/eq1]\n    type = "
         "ScalarVariableRate\n    variable = 'a'\n[]\n[Models]\n"),
        ("\n", "\r\n"),
    ],
)  # fmt: skip
def test_slice_does_not_see(tmp_path, edit):
    before = sliced(write(tmp_path, a=RATES))
    assert edit[0] in RATES
    path = tmp_path / "elsewhere" / "b.i"
    path.parent.mkdir()
    path.write_bytes(RATES.replace(*edit).encode())
    assert sliced(path) == before


@pytest.mark.parametrize(
    "edit",
    [
        ("variable = 'b'", "variable = 'c'"),
        ("models = 'eq1 eq2'", "models = 'eq2 eq1'"),
        ("models = 'eq1 eq2'", "models = 'eq1  eq2'"),
        ("# three rates", "[Settings]\n  dynamic_batch = false\n[]"),
        ("variable = 'b'", "variable = 'b'\n    flag = true"),
    ],
)
def test_slice_sees(tmp_path, edit):
    before = sliced(write(tmp_path, a=RATES))
    assert edit[0] in RATES
    assert sliced(write(tmp_path, b=RATES.replace(*edit))) != before


def test_of_repeated_sections_the_first_that_holds_the_name_counts(tmp_path):
    text = (
        "[Models]\n[x]\ntype=A\n[]\n[]\n[Models]\n[eq]\ntype=B\n[]\n[x]\ntype=C\n[]\n[]\n[Models]\n[eq]\ntype=D\nm=x\n[]\n[]\n"
    )
    document = hit.read(write(tmp_path, a=text))
    assert hit.fields(hit.slice_text(document, hit.reach(document, "eq"))) == {"Models/eq/type": "B"}
    assert [warning.partition(" is ignored")[0] for warning in document.warnings] == ["a.i:10: Models/x", "a.i:15: Models/eq"]


def test_only_the_first_settings_count(tmp_path):
    first = "[Settings]\n[example_batch_shape]\nb='(2; 3)'\na='(2,)'\n[]\n[]\n"
    text = first + "[Settings]\ndynamic_batch=false\n[]\n[Models/eq]\ntype=A\n[]\n"
    assert hit.fields(sliced(write(tmp_path, a=text))) == {
        "Settings/example_batch_shape/b": "(2; 3)",
        "Settings/example_batch_shape/a": "(2,)",
        "Models/eq/type": "A",
    }


@pytest.mark.parametrize(
    "value",
    [
        "x", "'y x z'", "x.stress", "'a; x'", "'f(x)'", "'torch.stack([x, 1])'", "'''\n  result = x\n'''",
        "${raw x}", "${v}", "x/part",
    ],
)  # fmt: skip
def test_a_name_counts_wherever_it_stands(tmp_path, value):
    others = "".join(f"[{section}/x]\ntype=B\n[]\n" for section in ("Tensors", "Solvers", "Drivers"))
    text = f"v = x\n[Models/eq]\ntype = A\np = {value}\n[]\n{others}"
    document = hit.read(write(tmp_path, a=text))
    assert hit.reach(document, "eq") == {("Models", "eq"), ("Tensors", "x"), ("Solvers", "x")}


@pytest.mark.parametrize("value", ["xy", "'y_x'", "ax", "1x"])
def test_a_part_of_a_word_is_no_name(tmp_path, value):
    document = hit.read(write(tmp_path, a=f"[Models/eq]\np = {value}\n[]\n[Tensors/x]\ntype=B\n[]\n"))
    assert hit.reach(document, "eq") == {("Models", "eq")}


@pytest.mark.parametrize("name", ["a.b", "a-b", "λ", "x~1", "a:b"])
def test_names_that_are_no_identifiers_are_found(tmp_path, name):
    document = hit.read(write(tmp_path, a=f"[Models/eq]\np = '1 {name} 2'\n[]\n[Tensors/{name}]\ntype=B\n[]\n"))
    assert ("Tensors", name) in hit.reach(document, "eq")


def test_the_default_of_crystal_plasticity_and_what_was_asked_for(tmp_path):
    data = "[Data/crystal_geometry]\na=lattice\n[]\n[Data/other]\na=deep\n[]\n"
    text = f"[Models/eq]\ntype=A\n[]\n{data}[Tensors]\n[lattice]\n[]\n[deep]\n[]\n[]\n"
    document = hit.read(write(tmp_path, a=text))
    least = {("Models", "eq"), ("Data", "crystal_geometry"), ("Tensors", "lattice")}
    assert hit.reach(document, "eq") == least
    assert hit.reach(document, "eq", [("Data", "other"), ("Data", "nowhere")]) == least | {
        ("Data", "other"),
        ("Tensors", "deep"),
    }


ODD = [
    "it's", 'a "b" c', "'''", '"""', "'''\"\"\"", "${x}", "$", "$ {", " leading", "trailing ", "a # b", "[1, 2]", "a\n b\n",
    "é λ", "a;b", "a ; b", "", "  ", "'", '"', "x'''\"\"\"${y}'", "\\", "{}", "a\tb", "a\r\nb", "!include x", "#",
]  # fmt: skip


@pytest.mark.parametrize("value", ODD)
@pytest.mark.parametrize("form", ["p = ${env ODD}", "p = '${env ODD}'", "p = '''${env ODD}'''", "p = 'a ${env ODD} b'"])
def test_any_value_can_be_written(tmp_path, monkeypatch, value, form):
    monkeypatch.setenv("ODD", value)
    path = write(tmp_path, a=f"[Models/eq]\n{form}\n[]\n")
    text = sliced(path)
    before, after = nmhit.parse_file(path).find("Models/eq/p"), nmhit.parse_text(text).find("Models/eq/p")
    assert readings(after) == readings(before)
    assert sliced(write(tmp_path, b=text)) == text


def readings(node: nmhit.Node) -> list[object]:
    """Everything that nmhit can make of a field."""
    found: list[object] = []
    for reader in (
        "param_str", "param_bool", "param_int", "param_float", "param_list_str", "param_list_int", "param_list_bool",
        "param_list_float", "param_list_list_str", "param_list_list_int", "param_list_list_float",
    ):  # fmt: skip
        try:
            found.append(repr(getattr(node, reader)()))
        except nmhit.Error:
            found.append(nmhit.Error)
    return found


# ── variables, the environment, overrides ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("value", ["2", "1e-3", "a b", "(2; 3)", "it's", "a # b", "", "é"])
def test_variables_resolve(tmp_path, value):
    document = hit.read(write(tmp_path, a="[Models/eq]\np = '${n}'\n[]\n"), variables={"n": value})
    assert hit.fields(hit.slice_text(document, hit.reach(document, "eq"))) == {"Models/eq/p": value}
    assert document.warnings == ()
    assert document.root.param_str("n") == value


def test_a_variable_that_nothing_uses_is_a_warning(tmp_path):
    document = hit.read(write(tmp_path, a="[Models/eq]\np = '${n}'\n[]\n"), variables={"n": "1", "m": "2"})
    assert [warning for warning in document.warnings if "'m'" in warning] == list(document.warnings)
    assert len(document.warnings) == 1


def test_a_variable_that_the_input_defines_is_an_error(tmp_path):
    path = write(tmp_path, a="\nn = 3\n[Models/eq]\np = '${n}'\n[]\n")
    error = failure(RequestError, lambda: hit.read(path, variables={"n": "1"}))
    assert (error.line, error.file) == (2, str(path))


@pytest.mark.parametrize(
    "variables", [{"a b": "1"}, {"A/b": "1"}, {"n": "${x}"}, {"n": "'''\"\"\""}, {"": "1"}, {"n=1 m": "1"}]
)
def test_variables_that_hit_cannot_hold(tmp_path, variables):
    failure(RequestError, lambda: hit.read(write(tmp_path, a="x=1\n"), variables=variables))


def test_an_undefined_name_is_an_error_with_its_line_where_it_is_reached(tmp_path):
    path = write(tmp_path, a="nbatch = 2\n[Models]\n[eq]\np = 1\n[]\n[other]\n\np = ${nbatsh}\n[]\n[]\n")
    assert hit.fields(sliced(path)) == {"Models/eq/p": "1"}
    error = failure(TaskError, lambda: sliced(path, "other"))
    assert error.line == 8
    assert "nearest: nbatch" in error.message


def test_environment(tmp_path):
    path = write(tmp_path, a="[Models]\n[eq]\np = '${env A} ${env ${which}}'\n[]\n[o]\np = ${env C}\n[]\n[]\nwhich=B\n")
    document = hit.read(path, environ={"A": "1", "B": "2", "D": "4"})
    assert document.environment == {"A": "1", "B": "2"}
    assert hit.fields(hit.slice_text(document, hit.reach(document, "eq"))) == {"Models/eq/p": "1 2"}
    assert len(document.warnings) == 1
    assert "'C' is not set" in document.warnings[0]
    error = failure(TaskError, lambda: hit.reach(document, "o"))
    assert (error.file, error.line) == (str(path), 6)
    assert "'C'" in error.message


@pytest.mark.parametrize("text", ["a = ${a}", "a = ${b}\nb = 'x ${c}'\nc = ${raw ${b}}"])
def test_a_value_that_refers_to_itself(tmp_path, text):
    path = write(tmp_path, a=f"{text}\n[Models/eq]\np = ${{a}}\n[]\n")
    assert "refers to itself" in failure(TaskError, lambda: sliced(path)).message


BASE = "[Solvers]\n  [newton]\n    type = Newton\n    abs_tol = 1e-8\n  []\n[]\n"
USER = "!include base.i\n[Models]\n  [eq]\n    type = ImplicitUpdate\n    solver = newton\n  []\n[]\n"


def test_overrides_reach_included_fields(tmp_path):
    path = write(tmp_path, a=USER, base=BASE)
    text = sliced(path, overrides=["Solvers/newton/abs_tol:=1e-10", "Models/eq/extra='1 2'", " Solvers/newton/type := 'Other'"])
    assert hit.fields(text) == {
        "Models/eq/type": "ImplicitUpdate",
        "Models/eq/solver": "newton",
        "Models/eq/extra": "1 2",
        "Solvers/newton/type": "Other",
        "Solvers/newton/abs_tol": "1e-10",
    }
    # what nmhit makes of it: the very thing that this is for
    lost = nmhit.parse_file(path, [], ["Solvers/newton/abs_tol:=1e-10"])
    assert lost.param_str("Solvers/newton/abs_tol") == "1e-8"


def test_an_override_finds_the_block_that_neml2_finds(tmp_path):
    path = write(
        tmp_path, a="[Models/a]\np=1\n[]\n[Solvers]\n[s]\n[]\n[]\n[Models]\n[eq]\np=1\n[]\n[]\n[Settings]\nx=1\n[]\nn=1\n"
    )
    text = sliced(path, overrides=["Models/eq/p:=${n}", "n:=5", "Settings/dynamic_batch=false"])
    assert hit.fields(text) == {"Settings/x": "1", "Settings/dynamic_batch": "false", "Models/eq/p": "5"}


def test_an_override_leaves_the_order_and_the_comments(tmp_path):
    path = write(tmp_path, a="# head\n[Tensors]\n  a = 1\n  # about b\n  b = '''1'''\n  c = 3\n[]\n")
    root = hit.read(path, overrides=["Tensors/b:=2"]).root
    assert root.render() == "# head\n[Tensors]\n  a = 1\n  # about b\n  b = 2\n  c = 3\n[]\n"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("Solvers/newton/abs_tl:=1", "nearest: Solvers/newton/abs_tol"),
        ("Models/modle/x:=1", "no section [Models/modle]"),
        ("Models/modle/x=1", "no section [Models/modle]"),
        ("Solver/newton/abs_tol:=1", "nearest: Solvers/newton"),
        ("Solvers/newton:=1", "no field Solvers/newton"),
        ("Solvers/newton=1", "no field Solvers/newton"),
        ("Solvers/newton/abs_tol=1", "there already"),
        ("Solvers/newton/abs_tol", "is not PATH:=VALUE"),
        ("Solvers/newton/abs_tol:=1 2", "is not PATH:=VALUE"),
        ("Solvers/newton/abs_tol:=", "is not PATH:=VALUE"),
        ("a:=1\nb:=2", "is not PATH:=VALUE"),
        ("[Models]\nx:=1\n[]", "is not PATH:=VALUE"),
        (":=1", "is not PATH:=VALUE"),
        ("", "is not PATH:=VALUE"),
        ("é:=1", "is not PATH:=VALUE"),
        ("--derivatve=a:b", None),
    ],
)
def test_overrides_that_name_nothing(tmp_path, override, message):
    path = write(tmp_path, a=USER, base=BASE)
    if message is None:
        # a field of the top level, which nothing uses: harmless, and what NEML2 makes of a mistyped option
        assert sliced(path, overrides=[override]) == sliced(path)
        return
    assert message in failure(RequestError, lambda: hit.read(path, overrides=[override])).message


# ── includes ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_includes_are_relative_to_the_file_that_holds_them(tmp_path):
    path = write(
        tmp_path,
        a="[Models]\n  !include parts/one.i # the first\n[]\n!include parts/rest.i\n",
        parts__one="[eq]\n  type = A\n  !include deep/values.i\n[]\n",
        parts__deep__values="p = '1 2' # here\nsolver = newton\n",
        parts__rest="!include ../base.i",
        base=BASE,
    )
    document = hit.read(path)
    names = [os.path.relpath(source.path, tmp_path) for source in document.files]
    assert names == ["a.i", "parts/one.i", "parts/deep/values.i", "parts/rest.i", "base.i"]
    assert hit.reach(document, "eq") == {("Models", "eq"), ("Solvers", "newton")}
    # the merged document is the one that nmhit merges
    assert document.root.render() == nmhit.parse_file(path).render()


@pytest.mark.parametrize(
    "text",
    [
        "!include x.i",
        "  !include x.i  \n",
        "[A] !include x.i\n[]",
        "a=1 !include x.i\n",
        "[B]\n[]!include x.i\n",
        "!include\tx.i\r\n",
        "a = '!include y.i'\n# !include y.i\nb = a!include\n!include x.i # it's\n",
        "a='''\n!include y.i\n'''\n!include x.i\n",
        "#include 0 \n!include x.i\n",
    ],
)
def test_what_is_an_include_and_what_is_not(tmp_path, text):
    path = tmp_path / "a.i"
    path.write_bytes(text.encode())
    write(tmp_path, x="p = 1\n")
    document = hit.read(path)
    assert len(document.files) == 2
    assert document.root.render() == nmhit.parse_file(path).render()


def test_a_file_with_a_space_and_one_included_twice(tmp_path):
    path = write(tmp_path, a="[A]\n!include my file.i\n[]\n[B]\n!include my file.i\n[]\n")
    (tmp_path / "my file.i").write_text("p = 1\n")
    document = hit.read(path)
    assert [source.path.name for source in document.files] == ["a.i", "my file.i"]
    assert document.root.render() == nmhit.parse_file(path).render()


def test_a_cycle_of_includes_names_its_files(tmp_path):
    path = write(tmp_path, a="!include sub/b.i\n", sub__b="\n!include c.i\n", sub__c="x=1\n\n!include b.i\n")
    error = failure(TaskError, lambda: hit.read(path))
    assert "sub/b.i -> sub/c.i -> sub/b.i" in error.message
    assert (error.file, error.line) == (str(tmp_path / "sub/c.i"), 3)
    itself = write(tmp_path, d="!include d.i\n")
    assert "d.i -> d.i" in failure(TaskError, lambda: hit.read(itself)).message


def test_a_missing_include_names_the_line_that_asks_for_it(tmp_path):
    path = write(tmp_path, a="x=1\n!include b.i\n", b="\n\n  !include nowhere.i\n")
    error = failure(TaskError, lambda: hit.read(path))
    assert (error.file, error.line) == (str(tmp_path / "b.i"), 3)
    assert "nowhere.i" in error.message


def test_an_include_through_a_link_to_a_folder_goes_where_the_system_goes(tmp_path):
    write(tmp_path, real__deep__part="!include ../x.i\n", real__x="p = real\n", x="p = wrong\n")
    (tmp_path / "link").symlink_to(tmp_path / "real" / "deep")
    path = write(tmp_path, a="[Models/eq]\n!include link/part.i\n[]\n")
    assert hit.fields(sliced(path)) == {"Models/eq/p": "real"}
    assert nmhit.parse_file(path).param_str("Models/eq/p") == "real"


# ── wrong files ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("data", "line", "message"),
    [
        (b"[Models]\n[eq]\n", None, "end of file"),
        (b"x = 1\ny = 'it's'\n", 2, "unexpected character"),
        (b"x = 1\nx = 2\n", 2, "duplicate field 'x'"),
        (b"x = 1\ny = \xff\n", 2, "not UTF-8: byte 0xff"),
        (b"\xef\xbb\xbfx = 1\n", 1, "byte order mark"),
        (b"x = 1\n\xc3\xa9 = 2\n", 2, "unexpected character 'é'"),
        (b"x = \n", None, "syntax error"),
        (b"x = ${a\n", None, "end of file"),
    ],
)
def test_a_broken_file_is_one_message_with_its_line(tmp_path, data, line, message):
    path = tmp_path / "a.i"
    path.write_bytes(data)
    error = failure(TaskError, lambda: hit.read(path))
    assert error.file == str(path)
    assert message in error.message
    assert line is None or error.line == line
    outer = write(tmp_path, outer="\n\n!include a.i\n")
    error = failure(TaskError, lambda: hit.read(outer, variables={"v": "a\nb"}))
    assert error.file == str(path)
    assert line is None or error.line == line


def test_files_that_cannot_be_read(tmp_path, monkeypatch):
    assert "does not exist" in failure(RequestError, lambda: hit.read(tmp_path / "a.i")).message
    assert "directory" in failure(RequestError, lambda: hit.read(tmp_path)).message
    path = write(tmp_path, b="x=1\n")

    def refuse(self):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert "permission denied" in failure(TaskError, lambda: hit.read(path)).message


def test_sections_nested_without_end(tmp_path):
    path = write(tmp_path, a="[a]\n" * 1200 + "[]\n" * 1200)
    failure(TaskError, lambda: hit.read(path))


# ── models and drivers ───────────────────────────────────────────────────────────────────────────────────────────────


def test_models_and_drivers(tmp_path):
    document = hit.read(write(tmp_path, a=RATES))
    assert hit.model_names(document) == ("eq1", "eq2", "eq", "alone")
    assert hit.top_models(document) == ("eq", "alone")
    assert hit.driver_model(document, "driver") == "eq"
    assert ("Drivers", "driver") in hit.block_names(document)
    error = failure(RequestError, lambda: hit.driver_model(document, "regression"))
    assert "wraps the driver 'driver'" in error.message
    error = failure(RequestError, lambda: hit.driver_model(document, "drivr"))
    assert "nearest: driver" in error.message
    assert "driver, regression" in str(error.remedy)
    error = failure(RequestError, lambda: hit.reach(document, "eq11"))
    assert "nearest: eq1" in error.message
    assert "eq1, eq2, eq, alone" in str(error.remedy)


def test_no_model_is_at_the_top(tmp_path):
    failure(RequestError, lambda: hit.top_models(hit.read(write(tmp_path, a="x=1\n"))))
    loop = write(tmp_path, b="[Models]\n[a]\nm=b\n[]\n[b]\nm=a\n[]\n[]\n")
    failure(RequestError, lambda: hit.top_models(hit.read(loop)))


def test_a_model_used_through_an_equation_system_is_not_at_the_top(tmp_path):
    text = "[Models]\n[res]\n[]\n[eq]\nequation_system=sys\n[]\n[]\n[EquationSystems/sys]\nmodel=res\n[]\n"
    assert hit.top_models(hit.read(write(tmp_path, a=text))) == ("eq",)


def test_data_files_are_relative_to_the_main_input(tmp_path):
    tensors = "[Tensors]\n[t]\ncsv_file=data/t.csv\n[]\n[u]\ncsv_file='/abs/u.csv'\n[]\n[v]\ncsv_file=v.csv\n[]\n[]\n"
    path = write(tmp_path, a="!include sub/b.i\n[Models/eq]\np='t u'\n[]\n", sub__b=tensors)
    document = hit.read(path)
    blocks = hit.reach(document, "eq")
    assert hit.data_files(document, blocks) == (tmp_path.resolve() / "data/t.csv", Path("/abs/u.csv"))
    (tmp_path / "data").mkdir()
    (tmp_path / "data/t.csv").write_text("")
    assert hit.missing_data_files(document, blocks) == (f"{tmp_path}/sub/b.i:6: the data file '/abs/u.csv' does not exist",)


def test_what_changed(tmp_path):
    before = sliced(write(tmp_path, a=RATES))
    after = sliced(write(tmp_path, b=RATES.replace("variable = 'b'", "variable = 'c'").replace("'eq1 eq2'", "'eq1 eq2 alone'")))
    assert hit.diff_fields(before, after) == [
        "Models/eq/models: 'eq1 eq2' -> 'eq1 eq2 alone'",
        "Models/eq2/variable: 'b' -> 'c'",
        "Models/alone/type: 'LinearIsotropicElasticity' added",
        "Models/alone/coefficients: 'E 0.3' added",
        "Tensors/E/type: 'Python' added",
        "Tensors/E/expr: 'Scalar(base * 2.0)' added",
        "Tensors/base/type: 'Python' added",
        "Tensors/base/expr: 'Scalar(1.0)' added",
    ]
    assert hit.diff_fields(before, before) == []
    assert "Models/eq2/variable: 'b' removed" in hit.diff_fields(before, before.replace("    variable = 'b'\n", ""))


# ── any document ─────────────────────────────────────────────────────────────────────────────────────────────────────

NAMES = ["eq", "a", "b", "x.y", "λ", "stress", "a-b"]
SECTIONS = ["Models", "Tensors", "Solvers", "EquationSystems", "Data", "Drivers", "Settings", "Other"]
WORDS = [
    *NAMES,
    "1",
    "2.5e-3",
    "true",
    "a.stress",
    "f(a,b)",
    "[eq]",
    "${one}",
    "${two}",
    "${raw a ${one} _}",
    "${env HIT_ODD}",
    "é",
]

words = st.lists(st.sampled_from(WORDS), min_size=1, max_size=4)
gaps = st.sampled_from([" ", "  ", "\n   ", "; "])
free = st.text(st.sampled_from("ab \n'\"#[]=;\\é!"), max_size=8).filter(
    lambda text: "'''" not in text and not text.endswith("'")
)


@st.composite
def values(draw) -> str:
    kind = draw(st.integers(0, 5))
    if kind == 0:
        return draw(st.sampled_from(["1", "a", "eq", "1e-8", "${one}", "a.stress", "pre${two}post"]))
    if kind == 5:
        text = draw(free)
        return f"'''{text}'''" if '"""' in text or text.endswith('"') or draw(st.booleans()) else f'"""{text}"""'
    quote = draw(st.sampled_from(["'", '"', "'''"]))
    return quote + draw(gaps).join(draw(words)) + quote


@st.composite
def bodies(draw, depth: int, files: dict[str, str]) -> str:
    lines = []
    for name in draw(st.lists(st.sampled_from(["p", "q", "type", "models", "z~1"]), unique=True, max_size=3)):
        lines.append(
            f"{name} {draw(st.sampled_from(['=', ':=']))} {draw(values())}{draw(st.sampled_from(['', ' # c', '   ']))}"
        )
    if depth:
        for name in draw(st.lists(st.sampled_from(NAMES), max_size=2)):
            lines.append(f"[{name}]\n{draw(bodies(depth - 1, files))}\n[]")
        lines = draw(st.permutations(lines))
    remarks = st.sampled_from([[], [""], ["# it's a comment"]])
    text = "\n".join(part for line in lines for part in (line, *draw(remarks)))
    if depth and draw(st.integers(0, 4)) == 0:
        name = f"part{len(files)}.i"
        files[name] = text
        return f"!include {name}"
    return text


@st.composite
def documents(draw) -> dict[str, str]:
    files: dict[str, str] = {"main.i": ""}
    parts = ["one = 1", "two = 'b ${one}'"]
    parts += [f"[{draw(st.sampled_from(SECTIONS))}]\n{draw(bodies(2, files))}\n[]" for _ in range(draw(st.integers(0, 5)))]
    parts.append(f"[Models]\n[eq]\n{draw(bodies(1, files))}\n[]\n[]")
    files["main.i"] = "\n".join(draw(st.permutations(parts))) + "\n"
    return files


def look_up(root: nmhit.Node, section: str, name: str) -> nmhit.Node | None:
    """NEML2's ``_find_in_section``."""
    for top in root.children(nmhit.NodeType.Section):
        if top.path() == section and (node := top.find(name)) is not None:
            return node
    return None


def tree(node: nmhit.Node) -> list[object]:
    """All that can be read from a block: fields by name, as a look-up finds them, and the sections in their order."""
    if node.type() == nmhit.NodeType.Field:
        return readings(node)
    found: list[object] = [node.path()]
    fields = {child.path() for child in node.children(nmhit.NodeType.Field)}
    found += [
        (name, readings(next(c for c in node.children(nmhit.NodeType.Field) if c.path() == name))) for name in sorted(fields)
    ]
    found += [tree(child) for child in node.children(nmhit.NodeType.Section)]
    return found


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(files=documents(), odd=st.sampled_from(ODD))
def test_a_slice_reads_as_the_file_does_and_is_its_own_slice(tmp_path, monkeypatch, files, odd):
    monkeypatch.setenv("HIT_ODD", odd)
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    path = tmp_path / "main.i"
    original = nmhit.parse_file(path)
    document = hit.read(path)
    assert document.root.render() == original.render()

    blocks = hit.reach(document, "eq")
    text = hit.slice_text(document, blocks)
    part = nmhit.parse_text(text)
    for section, name in blocks:
        there, here = look_up(original, section, name), look_up(part, section, name)
        assert there is not None
        assert here is not None
        assert tree(here) == tree(there)
    first = [top for top in original.children(nmhit.NodeType.Section) if top.path() == "Settings"][:1]
    kept = [top for top in part.children(nmhit.NodeType.Section) if top.path() == "Settings"]
    assert [tree(top) for top in kept] == [tree(top) for top in first]

    # nothing that a reached block names is missing
    for section, name in hit.block_names(document) - blocks - {block for block in blocks if block[0] == "Drivers"}:
        if section != "Drivers":
            for block in blocks:
                node = look_up(part, *block)
                assert node is not None
                assert not any(name in str(value).split() for value in leaf_values(node))

    (tmp_path / "slice.i").write_text(text, encoding="utf-8")
    again = hit.read(tmp_path / "slice.i")
    assert hit.reach(again, "eq") == blocks
    assert hit.slice_text(again, blocks) == text
    assert hit.diff_fields(text, text) == []


def leaf_values(node: nmhit.Node) -> list[str]:
    if node.type() == nmhit.NodeType.Field:
        return [node.param_str()]
    kinds = (nmhit.NodeType.Field, nmhit.NodeType.Section)
    return [value for child in node.children() if child.type() in kinds for value in leaf_values(child)]


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(files=documents(), value=values(), index=st.integers(0, 50))
def test_an_override_changes_that_field_and_no_other(tmp_path, monkeypatch, files, value, index):
    monkeypatch.setenv("HIT_ODD", "odd")
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    document = hit.read(tmp_path / "main.i")
    everything = hit.block_names(document)
    text = hit.slice_text(document, everything)
    before, root = hit.fields(text), nmhit.parse_text(text)
    paths = [path for path in before if path.count("/") == 2 and root.find(path) is not None]
    if not paths:
        return
    path = paths[index % len(paths)]
    changed = hit.read(tmp_path / "main.i", overrides=[f"{path}:={value}"])
    after = hit.fields(hit.slice_text(changed, everything))
    expected = nmhit.parse_text(f"one = 1\ntwo = 'b ${{one}}'\nv = {value}\n").param_str("v")
    assert after == before | {path: expected}


# ── real inputs ──────────────────────────────────────────────────────────────────────────────────────────────────────


@needs_suite
@pytest.mark.suite
def test_every_real_input_slices_and_its_slice_is_its_own_slice(tmp_path):
    targets = json.loads((SUITE / "targets.json").read_text())
    assert len(targets) == 79
    seconds = []
    for target in targets:
        began = time.perf_counter()
        document = hit.read(SUITE / target["input"], variables=target["variables"])
        blocks = hit.reach(document, target["model"])
        text = hit.slice_text(document, blocks)
        seconds.append(time.perf_counter() - began)
        original = nmhit.parse_file(SUITE / target["input"], [f"{key}={value}" for key, value in target["variables"].items()])
        part = nmhit.parse_text(text)
        for block in blocks:
            there, here = look_up(original, *block), look_up(part, *block)
            assert there is not None
            assert here is not None
            assert tree(here) == tree(there)
        path = tmp_path / "slice.i"
        path.write_text(text, encoding="utf-8")
        again = hit.read(path)
        assert hit.slice_text(again, hit.reach(again, target["model"])) == text, target["name"]
        assert all(data.is_file() for data in hit.data_files(document, blocks))
    assert sorted(seconds)[len(seconds) // 2] < 0.05
