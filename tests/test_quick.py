"""What inductor no longer repeats: each answer is the stock one, and nothing is left behind."""

from __future__ import annotations

import contextlib
import itertools
import random
from typing import Any

import pytest

from neml2_build.toolchain.quick import CAPTURE, LOWERING, applied

pytestmark = pytest.mark.real


def test_nothing_is_left_behind() -> None:
    import sympy
    from torch._inductor.codegen import cpp
    from torch._inductor.dependencies import MemoryDep
    from torch._inductor.dtype_propagation import DtypePropagationOpsHandler
    from torch._inductor.scheduler import Scheduler
    from torch.fx import Interpreter, config
    from torch.fx.experimental.sym_node import SymNode
    from torch.utils import _pytree
    from torch.utils._config_module import ConfigModule
    from torch.utils._ordered_set import OrderedSet
    from torch.utils._sympy.value_ranges import ValueRanges

    places = [
        (config, "do_not_emit_stack_traces"),
        (cpp, "stride_at"),
        (cpp, "simplify_index_in_vec_range"),
        (cpp, "stride_at_vec_range"),
        (DtypePropagationOpsHandler, "__init__"),
        (ValueRanges, "__and__"),
        (OrderedSet, "__and__"),
        (OrderedSet, "__or__"),
        (sympy, "simplify"),
        (SymNode, "expr"),
        (SymNode, "_add"),
        (SymNode, "_ge"),
        (Scheduler, "can_fusion_increase_peak_memory"),
        (Scheduler, "get_possible_fusions"),
        (Interpreter, "run_node"),
        (_pytree, "tree_map"),
        (MemoryDep, "__hash__"),
        (ConfigModule, "__getattr__"),
    ]

    def now() -> list[Any]:
        return [getattr(owner, name) for owner, name in places]

    before = now()
    with pytest.raises(ZeroDivisionError), applied(LOWERING) as notes:
        assert notes == []
        assert all(one is not other for one, other in zip(before, now(), strict=True))
        raise ZeroDivisionError
    assert now() == before


def test_what_torch_does_not_have_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.codegen import cpp
    from torch.utils._ordered_set import OrderedSet

    stock = OrderedSet.__and__
    monkeypatch.setattr(cpp, "stride_at", lambda index, var: index)
    with applied(LOWERING) as notes:
        assert len(notes) == 1 and "all strides" in notes[0]
        assert OrderedSet.__and__ is not stock


def test_sets_have_the_order_of_the_stock_ones() -> None:
    from torch.utils._ordered_set import OrderedSet

    class Other(OrderedSet):
        pass

    draw = random.Random(0)
    pairs = [
        [kind(draw.sample(range(12), draw.randrange(9))) for kind in kinds]
        for kinds in [*itertools.product((OrderedSet, Other, set), repeat=2)] * 60
        if OrderedSet in kinds
    ]

    def results() -> list[Any]:
        found = [(one & other, one | other) for one, other in pairs]
        return [[(type(made), list(made)) for made in both] for both in found]

    stock = results()
    with applied(LOWERING):
        assert results() == stock


def test_a_union_is_another_set() -> None:
    from torch.utils._ordered_set import OrderedSet

    with applied(LOWERING):
        one, other = OrderedSet([1]), OrderedSet([2])
        both = one | other
        both.add(3)
        assert list(one) == [1] and list(other) == [2]
        assert list(one & one) == [1] and one & one is not one


def test_ranges_and_strides_are_the_stock_ones() -> None:
    import sympy
    from torch._inductor.codegen import cpp
    from torch.utils._sympy.functions import FloorDiv, ModularIndexing
    from torch.utils._sympy.value_ranges import ValueRanges

    x, y, size = sympy.symbols("x0 x1 s0", integer=True)
    indices = [
        x,
        6 * x + y,
        size * x + 3 * y + 2,
        FloorDiv(x, 8),
        ModularIndexing(x, 1, 16) + y,
        ModularIndexing(x, 4, 3),
        x * x,
    ]
    ends = [(0, 5), (0.5, 2.0), (2, 9), (False, True), (-3, sympy.oo)]
    ranges = [ValueRanges(*pair) for pair in ends]

    def results() -> list[Any]:
        strides = [
            cpp.stride_at_vec_range(index, var, length) for index in indices for var in (x, y) for length in (None, 4, 8)
        ]
        met = []
        for one, other in itertools.product(ranges, repeat=2):
            try:
                met.append(one & other)
            except (AssertionError, TypeError) as error:
                met.append(type(error))
        return [strides, met]

    stock = results()
    with applied(LOWERING):
        assert results() == stock == results()


def test_rules_of_dtypes_are_made_when_there_are_more(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    import torch._inductor.lowering  # adds the rules
    from torch._inductor import utils
    from torch._inductor.dtype_propagation import DtypePropagationOpsHandler as Handler

    made = []
    stock = Handler.__init__
    monkeypatch.setattr(Handler, "__init__", lambda self: (made.append(1), stock(self))[1])
    with applied(LOWERING):
        assert Handler() is Handler() and len(made) == 1
        assert Handler().lt() is torch.bool
        rules = dict(utils.op_dtype_propagation_rules)
        rules["new_rule"] = rules[next(iter(rules))]
        monkeypatch.setattr(utils, "op_dtype_propagation_rules", rules)
        assert hasattr(Handler(), "new_rule") and len(made) == 2


def test_trees_are_the_stock_ones() -> None:
    from collections import OrderedDict, namedtuple

    from torch import Size
    from torch.utils import _pytree

    Pair = namedtuple("Pair", "one other")
    trees = [
        3,
        (),
        [1, (2, [3]), {"b": 4, "a": (5,)}],
        Pair([1], (2, 3)),
        OrderedDict(b=[1], a=2),
        Size([2, 3]),
        {"n": None},
        "ab",
    ]

    def results() -> list[Any]:
        seen: list[Any] = []
        made = [_pytree.tree_map(lambda leaf: (seen.append(leaf), str(leaf))[1], tree) for tree in trees]
        made.append(
            _pytree.tree_map(lambda leaf: (seen.append(leaf), len(leaf))[1], [(1, 2), (3,)], is_leaf=lambda x: type(x) is tuple)
        )
        made.append(_pytree.tree_map(lambda one, other: one + other, [1, (2, 3)], [4, (5, 6)]))
        only = _pytree.tree_map_only(int, lambda leaf: -leaf, trees)
        return [repr((kind, [type(one) for one in kind])) for kind in (made, only)] + seen

    stock = results()
    with applied(LOWERING):
        assert results() == stock


def test_sizes_are_the_stock_ones() -> None:
    import torch
    from torch.export import Dim, export
    from torch.fx.experimental.sym_node import SymNode

    class Sizes(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    def results() -> list[Any]:
        example = torch.ones(6, 5)
        program = export(Sizes(), (example,), dynamic_shapes=({0: Dim("a", min=2), 1: Dim("b", min=3)},))
        value = next(node.meta["val"] for node in program.graph.nodes if node.op == "placeholder")
        one, other = (size.node for size in value.shape)
        nodes = [
            one,
            other,
            one.wrap_int(1),
            one.wrap_int(2),
            one.mul(other),
            one.sym_float(),
            one.wrap_float(2.0),
            one.eq(other),
        ]
        made = []
        for name in ("add", "sub", "mul", "eq", "ne", "lt", "le", "gt", "ge"):
            for left, right in itertools.product(nodes[:-1], repeat=2):
                node = getattr(left, name)(right)
                assert type(node) is SymNode and node.shape_env is one.shape_env
                made.append(
                    (str(node.expr), type(node.expr), node.pytype, node.hint, type(node.hint), node.constant, node.fx_node)
                )
        return made

    stock = results()
    with applied(LOWERING):
        assert results() == stock == results()


def test_an_expression_follows_what_is_learned_of_it() -> None:
    import sympy
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    def results() -> list[str]:
        env = ShapeEnv()
        size = env.create_unbacked_symint().node
        node = size.mul(size.wrap_int(2))
        found = [str(node.expr)]
        env._set_replacement(size._expr, sympy.Integer(11), "known")
        return [*found, str(node.expr), str(node.expr), str(size.add(size).expr)]

    stock = results()
    assert stock == ["2*u0", "22", "22", "22"]
    with applied(LOWERING):
        assert results() == stock


def test_dependencies_hash_as_before() -> None:
    import dataclasses

    import sympy
    from torch._inductor.dependencies import MemoryDep

    x, size = sympy.symbols("d0 s0", integer=True)

    def make() -> Any:
        return MemoryDep("buf0", 3 * x, (x,), (size,))

    stock = hash(make())
    with applied(LOWERING):
        one = make()
        assert hash(one) == hash(one) == hash(make()) == stock
        assert one == make() and repr(one) == repr(make())
        assert hash(dataclasses.replace(one, name="buf1")) != stock
    assert hash(one) == stock


def test_settings_are_the_stock_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._inductor.config
    from torch.utils._config_module import ConfigModule

    config: Any = torch._inductor.config
    names = [name for name, entry in config._config.items() if entry.alias is None and not entry.deprecated]

    def results() -> list[Any]:
        return [repr(ConfigModule.__getattr__(config, name)) for name in names]

    stock = results()
    with applied(LOWERING):
        assert results() == stock and len(stock) > 100
        with config.patch({"max_fusion_size": 7, "cpp.threads": 3}):
            assert config.max_fusion_size == 7 and config.cpp.threads == 3
        assert results() == stock
        with pytest.raises(AttributeError):
            _ = config.no_such_setting
        monkeypatch.setattr(config._config["max_fusion_size"], "env_value_force", 5)
        assert config.max_fusion_size == 5
        with pytest.raises(AttributeError):
            monkeypatch.setattr(config._config["max_fusion_size"], "hide", True)
            _ = config.max_fusion_size


def test_nodes_are_run_as_before_where_their_meta_is_preserved() -> None:
    import torch
    from torch.fx import Interpreter, symbolic_trace, traceback

    module = symbolic_trace(lambda x: torch.relu(x) + 1)
    for node in module.graph.nodes:
        node.meta["custom"] = node.name
    seen: list[Any] = []

    class Watch(Interpreter):
        def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
            seen.append(traceback.get_current_meta().get("custom"))
            return super().call_function(target, args, kwargs)

    def results() -> list[Any]:
        seen.clear()
        made = [Watch(module).run(torch.ones(2)).tolist()]
        with traceback.preserve_node_meta():
            made.append(Watch(module).run(torch.ones(2)).tolist())
        return [*made, *seen]

    stock = results()
    assert stock[2:] == [None, None, "relu", "add"]
    with applied(LOWERING):
        assert results() == stock


def test_simplified_once() -> None:
    import sympy

    x, y = sympy.symbols("x0 s0", integer=True)
    asked = [6 * x + y, y * (x + 1) - y * x, sympy.Integer(3), x * x + 2 * x + 1]

    def results() -> list[Any]:
        simplify: Any = sympy.simplify
        return [(made, type(made)) for made in map(simplify, (*asked, 3, "x + x"))]

    stock = results()
    with applied(LOWERING):
        assert results() == stock == results()
        assert sympy.simplify(asked[0], ratio=1) == asked[0]


@pytest.mark.parametrize("sizes", [("8", "8*s0"), ("8", "8"), ("8*s0", "8*s0"), ("0", "0"), ("4096", "4096")])
def test_pairs_of_nodes_are_judged_as_before(sizes: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace as Made

    from torch._inductor.codegen import wrapper
    from torch._inductor.scheduler import Scheduler
    from torch._inductor.virtualized import V

    asked: list[Any] = []
    monkeypatch.setattr(wrapper, "buffer_reuse_key", lambda node: (asked.append(node), ("cpu", "f64", node.size))[1])
    buffers = {
        name: Made(users=[1], node=Made(size=size, has_tensor_output=lambda: True))
        for name, size in zip(("one", "other"), sizes, strict=True)
    }
    buffers["shared"] = Made(users=[1, 2], node=Made(size="8", has_tensor_output=lambda: True))
    nodes = [
        Made(read_writes=Made(reads=[Made(name=name), Made(name="shared"), Made(name="input")])) for name in ("one", "other")
    ]
    graph = Made(sizevars=Made(statically_known_gt=lambda left, right: left > right))

    def results(score: int) -> tuple[bool, ...]:
        def check(self: Any, *_: Any) -> tuple[bool, ...]:
            one, other = nodes
            pairs: list[Any] = [(one, other), (one, one), (other, one), (one, other)]
            return tuple(Scheduler.can_fusion_increase_peak_memory(self, *pair) for pair in pairs)

        scheduler = Made(name_to_buf=buffers, score_fusion_memory=lambda *_: score)
        with V.set_graph_handler(graph):  # type: ignore[arg-type]
            return run(check, scheduler)

    def run(check: Any, scheduler: Any) -> tuple[bool, ...]:
        monkeypatch.setattr(Scheduler, "get_possible_fusions", check)
        with applied(LOWERING) if fast else contextlib.nullcontext():
            return Scheduler.get_possible_fusions(scheduler, [], False)  # type: ignore[return-value]

    fast = False
    stock = [results(score) for score in (0, 1, 10)]
    fast, often = True, len(asked)
    asked.clear()
    assert [results(score) for score in (0, 1, 10)] == stock
    assert 0 < len(asked) < often


def test_a_program_is_saved_as_the_stock_way_saves_it() -> None:
    import io
    import zipfile

    import torch
    from torch._export.serde import serialize

    class Model(torch.nn.Module):
        def forward(self, x: Any, y: Any) -> Any:
            return torch.linalg.solve(x @ y + self.one, y).sum(-1), torch.cat([x, y * x.shape[0]])

        one = torch.eye(3, dtype=torch.float64)

    def saved() -> dict[str, bytes]:
        x = torch.ones(2, 3, 3, dtype=torch.float64)
        batch = torch.export.Dim("batch", min=2, max=1 << 20)
        made = io.BytesIO()
        torch.export.save(torch.export.export(Model(), (x, 2 * x), dynamic_shapes=({0: batch}, {0: batch})), made)
        with zipfile.ZipFile(made) as archive:
            return {name: archive.read(name) for name in archive.namelist() if "serialization_id" not in name}

    stock, canonical = saved(), serialize.canonicalize
    traces, *others = CAPTURE  # the notes of where an operation was written are in the file
    assert "traces" in traces.__name__
    with applied(others) as notes:
        assert notes == []
        assert serialize.canonicalize is not canonical
        assert saved() == stock
    assert serialize.canonicalize is canonical


def test_a_canonical_form_that_is_used_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._export.serde import serialize

    def serialize_(self: Any, program: Any) -> Any:
        return serialize.canonicalize(program)

    canonical = serialize.canonicalize
    monkeypatch.setattr(serialize.ExportedProgramSerializer, "serialize", serialize_)
    with applied(CAPTURE) as notes:
        assert serialize.canonicalize is canonical
    assert len(notes) == 1 and "canonical form" in notes[0]
