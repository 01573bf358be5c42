"""What inductor's Python does over and over, done once: the same answers, hence the same bytes, in two thirds of the time.

Measured on a captured graph of 5,400 operations, torch 2.12.1: 71 s of Python became 48. Each item below is a pure function
whose answers are kept, or work whose result nobody reads; where torch does not have it, it is left out.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from neml2_build.toolchain.isa import replaced

Change = Callable[[contextlib.ExitStack], None]


@contextlib.contextmanager
def quick(*changes: Change) -> Iterator[list[str]]:
    """While open, torch does not repeat itself: by *changes* of this module, by default all of them.

    Yields
    ------
    list of str
        Notes: what was not as expected, and is done as torch does it.
    """
    notes: list[str] = []
    with contextlib.ExitStack() as stack:
        for change in changes or (without_traces, _all_strides, _dtype_rules_once, _ranges_once, _plain_sets):
            try:
                change(stack)
            except (AttributeError, ImportError) as error:
                notes.append(f"torch does {change.__name__.strip('_').replace('_', ' ')} in another way: {error}")
        yield notes


def without_traces(stack: contextlib.ExitStack) -> None:
    """Note no Python stack for each operation that is traced: nothing of it reaches the code, or a saved program."""
    # torch/fx/config.py, do_not_emit_stack_traces. Stacks are noted and symbolized: 17 % of a lowering, 10 % of a capture.
    from torch.fx import config

    stack.enter_context(replaced(config, "do_not_emit_stack_traces", True))


def _all_strides(stack: contextlib.ExitStack) -> None:
    # torch/_inductor/codegen/cpp.py, each `@functools.lru_cache`, which keeps 128 answers; a large graph asks for 450
    # different ones again and again, and one takes 10 ms of sympy. 7 %.
    from torch._inductor.codegen import cpp

    for name in ("stride_at", "simplify_index_in_vec_range", "stride_at_vec_range"):
        stack.enter_context(replaced(cpp, name, functools.cache(getattr(cpp, name).__wrapped__)))


def _dtype_rules_once(stack: contextlib.ExitStack) -> None:
    # torch/_inductor/dtype_propagation.py, DtypePropagationOpsHandler: `__new__` gives the one instance, but `__init__` runs at
    # each of the 17,000 calls and sets the same 200 rules again. 8 %.
    from torch._inductor import utils
    from torch._inductor.codegen import common
    from torch._inductor.dtype_propagation import DtypePropagationOpsHandler as Handler

    stock = Handler.__init__
    if not hasattr(Handler, "_instance"):
        raise AttributeError("its handler is not one instance")
    made_of: tuple[int, ...] = ()

    def once(self: Any) -> None:
        nonlocal made_of
        tables = (utils.op_dtype_propagation_rules, common.pointwise_overrides_data, utils.boolean_ops())
        sizes = tuple(map(len, tables))  # rules are only ever added
        if made_of != sizes:
            stock(self)
            made_of = sizes

    stack.enter_context(replaced(Handler, "__init__", once))


def _ranges_once(stack: contextlib.ExitStack) -> None:
    # torch/utils/_sympy/value_ranges.py, ValueRanges.__and__: of two frozen values, by sympy.Max and Min. A graph of 1,600
    # operations asks 22,000 times for 38 different ones. 10 %.
    from torch.utils._sympy.value_ranges import ValueRanges

    if ValueRanges.__hash__ is None:
        raise AttributeError("ranges have no hash")
    stack.enter_context(replaced(ValueRanges, "__and__", functools.cache(ValueRanges.__and__)))


def _plain_sets(stack: contextlib.ExitStack) -> None:
    # torch/utils/_ordered_set.py, OrderedSet: an ordered set is a dict, but `&` and `|` go through the generators of
    # collections.abc, element by element. The order of a result is that of the stock ones: `&` has that of the smaller
    # operand, and of the right one if they are equally large; `|` that of the left, then what the right adds. 4 %.
    from torch.utils._ordered_set import OrderedSet

    stock_and, stock_or = OrderedSet.__and__, OrderedSet.__or__
    plain = OrderedSet._from_dict

    def intersection(self: Any, other: Any) -> Any:
        if type(self) is not OrderedSet or type(other) is not OrderedSet:
            return stock_and(self, other)
        few, many = (self._dict, other._dict) if len(self) < len(other) else (other._dict, self._dict)
        return plain({element: None for element in few if element in many})

    def union(self: Any, other: Any) -> Any:
        if type(self) is not OrderedSet or type(other) is not OrderedSet:
            return stock_or(self, other)
        return plain({**self._dict, **other._dict})

    stack.enter_context(replaced(OrderedSet, "__and__", intersection))
    stack.enter_context(replaced(OrderedSet, "__or__", union))
