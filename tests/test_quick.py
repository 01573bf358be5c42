"""What inductor no longer repeats: each answer is the stock one, and nothing is left behind."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from neml2_build.toolchain.quick import quick

pytestmark = pytest.mark.real


def test_nothing_is_left_behind() -> None:
    from torch._inductor.codegen import cpp
    from torch._inductor.dtype_propagation import DtypePropagationOpsHandler
    from torch.fx import config
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
    ]

    def now() -> list[Any]:
        return [getattr(owner, name) for owner, name in places]

    before = now()
    with pytest.raises(ZeroDivisionError), quick() as notes:
        assert notes == []
        assert all(one is not other for one, other in zip(before, now(), strict=True))
        raise ZeroDivisionError
    assert now() == before


def test_what_torch_does_not_have_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.codegen import cpp
    from torch.utils._ordered_set import OrderedSet

    stock = OrderedSet.__and__
    monkeypatch.setattr(cpp, "stride_at", lambda index, var: index)
    with quick() as notes:
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
    with quick():
        assert results() == stock


def test_a_union_is_another_set() -> None:
    from torch.utils._ordered_set import OrderedSet

    with quick():
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
    with quick():
        assert results() == stock == results()


def test_rules_of_dtypes_are_made_when_there_are_more(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    import torch._inductor.lowering  # adds the rules
    from torch._inductor import utils
    from torch._inductor.dtype_propagation import DtypePropagationOpsHandler as Handler

    made = []
    stock = Handler.__init__
    monkeypatch.setattr(Handler, "__init__", lambda self: (made.append(1), stock(self))[1])
    with quick():
        assert Handler() is Handler() and len(made) == 1
        assert Handler().lt() is torch.bool
        rules = dict(utils.op_dtype_propagation_rules)
        rules["new_rule"] = rules[next(iter(rules))]
        monkeypatch.setattr(utils, "op_dtype_propagation_rules", rules)
        assert hasattr(Handler(), "new_rule") and len(made) == 2
