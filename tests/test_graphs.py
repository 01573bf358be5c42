from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree

import pytest
from samples import BATCH, VARIABLES, node, program, rates_metadata, rates_program, stack

from neml2_build import drawing, graphs
from neml2_build.errors import TaskError

IMPLICIT = {
    "segments": [
        {"kind": "forward", "package": "other.pt2"},
        {
            "kind": "implicit",
            "residual_package": "m_residual.pt2",
            "solve_package": "m_solve.pt2",
            "matvec_package": "m_matvec.pt2",
            "param_inputs": ["E"],
            "unknown_group_infos": [
                {"structure": "dense", "var_names": ["s"], "per_var_info": [{"name": "s", "var_size": 1}]},
            ],
            "given_group_infos": [
                {
                    "structure": "dense",
                    "var_names": ["s~1", "strain", "t"],
                    "per_var_info": [{"name": "s~1"}, {"name": "strain", "var_size": 6}, {"name": "t", "var_size": 1}],
                },
            ],
            "residual_group_infos": [{"structure": "dense", "var_names": ["r"], "per_var_info": [{"name": "r"}]}],
        },
    ]
}


def rates() -> graphs.Graph:
    return graphs.read(rates_program(), "eq.pt2", rates_metadata())


def test_inputs_have_the_names_of_the_variables() -> None:
    assert tuple(tensor.name for tensor in rates().inputs) == VARIABLES


def test_the_denominator_is_captured_three_times() -> None:
    graph = rates()
    assert [operation.text for operation in graph.operations].count("t - t~1") == 3
    assert graph.repeated() == {"t - t~1": 3}
    assert graph.removable == 2


def test_operations_are_counted_by_name() -> None:
    assert rates().counts() == {"sub": 6, "div": 3}


def test_each_operation_names_the_leaf_that_it_came_from() -> None:
    assert [operation.leaf for operation in rates().operations] == ["eq1"] * 3 + ["eq2"] * 3 + ["eq3"] * 3
    assert {operation.leaf_type for operation in rates().operations} == {"ScalarVariableRate"}


def test_outputs_have_the_names_of_the_variables() -> None:
    graph = rates()
    assert [name for name, _ in graph.outputs] == ["a_rate", "b_rate", "c_rate"]
    assert graph.operations[2].outputs == ("a_rate",)
    assert graph.operations[2].text == "sub_1 / sub"


def test_the_one_symbol_is_the_batch() -> None:
    graph = rates()
    assert graph.sizes == {"batch": (1, 1048576)}
    assert {operation.type for operation in graph.operations} == {"f64[batch]"}


def test_without_metadata_torchs_names_stay() -> None:
    graph = graphs.read(rates_program(), "eq.pt2")
    assert graph.operations[0].text == "inputs_2_data - inputs_3_data"


def test_a_package_that_the_metadata_does_not_know() -> None:
    graph = graphs.read(rates_program(), "new.pt2", rates_metadata())
    assert graph.role == ""
    assert [tensor.name for tensor in graph.inputs] == [f"inputs_{number}_data" for number in range(8)]


def test_what_is_no_saved_program() -> None:
    with pytest.raises(TaskError, match="not a saved graph"):
        graphs.read(b"nothing", "eq.pt2")


def test_parts_of_a_group_are_named_after_its_variables() -> None:
    nodes = [
        node("aten.slice.Tensor", "slice_1", self="args_1", dim=1, start=1, end=7),
        node("aten.slice.Tensor", "slice_2", self="args_1", dim=1, start=7, end=8),
        node("aten.slice.Tensor", "slice_3", self="args_1", dim=1, start=0, end=3),
        node("aten.reshape.default", "reshape", self="slice_2", shape={"as_sym_ints": [{"as_int": 2}]}),
        node("aten.mul.Tensor", "mul", self="reshape", other="args_2"),
    ]
    shapes = {"args_0": [BATCH, {"as_int": 1}], "args_1": [BATCH, {"as_int": 8}]}
    graph = graphs.read(program(["args_0", "args_1", "args_2"], nodes, ["mul"], shapes=shapes), "m_residual.pt2", IMPLICIT)
    assert [tensor.name for tensor in graph.inputs] == ["[s]", "[s~1 strain t]", "E"]
    assert [operation.outputs[0] for operation in graph.operations] == ["strain", "t", "slice_3", "t'", "b"]
    assert graph.operations[-1].text == "t' * E"
    assert graph.role == "residual of the solve, with its sign changed of segment 1"


@pytest.mark.parametrize(
    ("package", "count", "names"),
    [("m_solve.pt2", 2, ["A", "b"]), ("m_matvec.pt2", 4, ["[s]", "[s~1 strain t]", "E", "v"])],
)
def test_inputs_of_the_graphs_of_a_solve(package: str, count: int, names: list[str]) -> None:
    graph = graphs.read(program([f"args_{number}" for number in range(count)], [], ["args_0"]), package, IMPLICIT)
    assert [tensor.name for tensor in graph.inputs] == names


def test_constants_have_values_and_only_those_that_are_read_are_shown() -> None:
    nodes = [node("aten.mul.Tensor", "mul", self="x", other="b_creep.n")]
    graph = graphs.read(program(["x"], nodes, ["mul"], constants={"b_creep.n": 3.5, "b_unused": 1.0}), "g.pt2")
    assert [(constant.tensor.name, constant.value) for constant in graph.constants] == [("creep.n", 3.5), ("unused", 1.0)]
    assert ("creep.n", "constant 3.5", "f64[]", "creep") in graphs.lines(graph)
    assert not any(row[0] == "unused" for row in graphs.lines(graph))


def test_views_and_creations_are_no_arithmetic() -> None:
    nodes = [
        node("aten.unsqueeze.default", "u", self="x", dim=0),
        node("aten.ones.default", "o", size={"as_ints": [2]}),
        node("aten.mul.Tensor", "m", self="u", other="o"),
        node("neml2.opaque_pow.default", "p", base="m", exponent="x"),
    ]
    graph = graphs.read(program(["x"], nodes, ["p"]), "g.pt2")
    assert [operation.kind for operation in graph.operations] == ["view", "creation", "arithmetic", "arithmetic"]
    assert graph.counts() == {"mul": 1, "opaque_pow": 1}


def test_repetition_looks_through_repeated_operands() -> None:
    nodes = [
        node("aten.add.Tensor", "p", self="x", other="y"),
        node("aten.add.Tensor", "q", self="y", other="x"),
        node("aten.exp.default", "r", self="p"),
        node("aten.exp.default", "s", self="q"),
        node("aten.sub.Tensor", "d", self="x", other="y"),
        node("aten.sub.Tensor", "e", self="y", other="x"),
        node("aten.mul.Tensor", "f", self="x", other=2.0),
        node("aten.mul.Tensor", "g", self="x", other=3.0),
    ]
    graph = graphs.read(program(["x", "y"], nodes, ["r", "s"]), "g.pt2")
    assert graph.removable == 2
    assert graph.repeated() == {"x + y": 2, "exp(p)": 2}


def test_repetition_in_a_long_chain() -> None:
    """Written out, the meaning of the last of these operations would have 2**200 names."""
    nodes = [node("aten.mul.Tensor", f"x{number + 1}", self=f"x{number}", other=f"x{number}") for number in range(200)]
    assert graphs.read(program(["x0"], nodes, ["x200"]), "g.pt2").removable == 0


def test_a_leaf_below_a_wrapper_has_its_own_name() -> None:
    wrapper = "neml2.es.implicit.RHS"
    text = f"L__self__,,{wrapper};L__self__model,model,neml2.X;L__self__model.creep,model.creep,neml2.models.Perzyna"
    assert graphs.leaf_of(text) == ("creep", "Perzyna")
    assert graphs.leaf_of(f"L__self__,,{wrapper}") == ("", "RHS")
    assert graphs.leaf_of(stack("model.eq", "A.B")) == ("model.eq", "B")
    assert graphs.leaf_of("_empty_nn_module_stack_from_metadata_hook,a,b") == ("", "")


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("Symbol('s0', positive=True, integer=True)", "s0"),
        ("Mul(Integer(6), Symbol('s0', positive=True))", "6*s0"),
        ("Add(Symbol('a'), Integer(-1))", "a + -1"),
        ("Mul(Integer(2), Add(Symbol('a'), Integer(1)))", "2*(a + 1)"),
        ("FloorDiv(Symbol('a'), Integer(2))", "FloorDiv(a, 2)"),
        ("not python (", "not python ("),
    ],
)
def test_sizes_as_people_write_them(text: str, plain: str) -> None:
    assert graphs.expression(text) == plain


def test_json_holds_everything() -> None:
    told = json.loads(json.dumps(graphs.as_json(rates())))
    assert len(told["operations"]) == 9
    assert told["operations"][0] == {
        "outputs": ["sub"],
        "target": "aten.sub.Tensor",
        "reads": ["t", "t~1"],
        "text": "t - t~1",
        "dtype": "f64",
        "shape": ["batch"],
        "leaf": "eq1",
        "leaf_type": "ScalarVariableRate",
        "kind": "arithmetic",
        "torch_name": "sub",
    }
    assert told["repeated"] == {"t - t~1": 3}


def test_dot_has_a_node_for_everything_and_an_edge_for_every_read() -> None:
    text = drawing.as_dot(rates())
    assert text.count("[label=") == 8 + 9 + 3
    assert text.count(" -> ") == 9 * 2 + 3


def test_the_picture_is_well_formed_and_says_it_all() -> None:
    root = ElementTree.fromstring(drawing.as_svg(rates()))
    space = "{http://www.w3.org/2000/svg}"
    texts = [element.text for element in root.iter(f"{space}text")]
    assert texts.count("t - t~1") == 3
    assert {"a_rate", "b_rate", "c_rate", "eq1", "eq2", "eq3", *VARIABLES} <= set(texts)
    assert len(list(root.iter(f"{space}path"))) == 9 * 2 + 3


def test_boxes_of_the_picture_do_not_overlap() -> None:
    root = ElementTree.fromstring(drawing.as_svg(rates()))
    space = "{http://www.w3.org/2000/svg}"
    boxes = [
        tuple(float(rect.get(name) or 0) for name in ("x", "y", "width", "height"))
        for group in root.iter(f"{space}g")
        for rect in group.iter(f"{space}rect")
    ]
    for number, (x, y, width, height) in enumerate(boxes):
        for x2, y2, width2, height2 in boxes[number + 1 :]:
            assert x + width <= x2 or x2 + width2 <= x or y + height <= y2 or y2 + height2 <= y


def test_marks_of_a_file_name_are_escaped_in_the_picture() -> None:
    graph = graphs.read(program(["x"], [node("aten.lt.Tensor", "m", self="x", other=2)], ["m"]), 'a<"b&.pt2')
    assert "x &lt; 2" in drawing.as_svg(graph)
    ElementTree.fromstring(drawing.as_svg(graph))
