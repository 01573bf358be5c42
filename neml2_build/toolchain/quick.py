"""What torch's Python does over and over, done once: the same answers, hence the same bytes, in three fifths of the time.

Measured with torch 2.12.1 on a captured graph of 5,400 operations: lowering it took 71 s of Python and takes 42, capturing it
and three others of its model took 20.5 s and takes 15. Each item below is a pure function whose answers are kept, or work whose
result nobody reads; where torch does not have it, it is left out.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from neml2_build.toolchain.isa import replaced

Change = Callable[[contextlib.ExitStack], None]


@contextlib.contextmanager
def applied(changes: Sequence[Change]) -> Iterator[list[str]]:
    """While open, torch does not repeat itself, by *changes*: `CAPTURE` or `LOWERING`.

    Yields
    ------
    list of str
        Notes: what was not as expected, and is done as torch does it.
    """
    notes: list[str] = []
    with contextlib.ExitStack() as stack:
        for change in changes:
            try:
                change(stack)
            except (AttributeError, ImportError) as error:
                notes.append(f"torch does {change.__name__.strip('_').replace('_', ' ')} in another way: {error}")
        yield notes


def _without_traces(stack: contextlib.ExitStack) -> None:
    """Note no Python stack for each operation that is traced: nothing of it reaches the code, or a saved program."""
    # torch/fx/config.py, do_not_emit_stack_traces. Stacks are noted and symbolized: 17 % of a lowering, 10 % of a capture.
    from torch.fx import config

    stack.enter_context(replaced(config, "do_not_emit_stack_traces", True))


def _without_canonical_form(stack: contextlib.ExitStack) -> None:
    """Save programs without bringing a copy of each into canonical form first: torch makes it as a test and drops it."""
    # torch/_export/serde/serialize.py, ExportedProgramSerializer.serialize: a statement of its own; what is saved is as it was.
    # It copies the whole program and sorts it: 17 % of a capture.
    from torch._export.serde import serialize

    source = inspect.getsource(serialize.ExportedProgramSerializer.serialize)
    if re.findall(r"^.*\bcanonicalize\(", source, re.MULTILINE) != ["        canonicalize("]:
        raise AttributeError("the result is used")
    stack.enter_context(replaced(serialize, "canonicalize", lambda program, constants=None: program))


def _all_strides(stack: contextlib.ExitStack) -> None:
    # torch/_inductor/codegen/cpp.py, each `@functools.lru_cache`, which keeps 128 answers; a large graph asks for 450
    # different ones again and again, and one takes 10 ms of sympy. 7 %.
    from torch._inductor.codegen import cpp

    for name in ("stride_at", "simplify_index_in_vec_range", "stride_at_vec_range"):
        stack.enter_context(replaced(cpp, name, functools.cache(getattr(cpp, name).__wrapped__)))


def _simplified_once(stack: contextlib.ExitStack) -> None:
    # sympy.simplify, which torch/_inductor/codegen/cpp.py asks for the strides of an index by each of its variables: the same
    # index, and the same few differences, again. 4 % of a graph of 1,600 operations.
    import sympy

    stock = sympy.simplify
    kept = functools.cache(stock)

    def simplify(expr: Any, *how: Any, **options: Any) -> Any:
        return kept(expr) if isinstance(expr, sympy.Expr) and not (how or options) else stock(expr, *how, **options)

    stack.enter_context(replaced(sympy, "simplify", simplify))


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
        if few.keys().isdisjoint(many.keys()):  # goes through the smaller
            return plain({})
        return plain({element: None for element in few if element in many})

    def union(self: Any, other: Any) -> Any:
        if type(self) is not OrderedSet or type(other) is not OrderedSet:
            return stock_or(self, other)
        return plain({**self._dict, **other._dict})

    stack.enter_context(replaced(OrderedSet, "__and__", intersection))
    stack.enter_context(replaced(OrderedSet, "__or__", union))


def _sizes_once(stack: contextlib.ExitStack) -> None:
    # torch/fx/experimental/sym_node.py, SymNode: what `binary_magic_impl` makes of two sizes is a function of their
    # expressions, types and hints, as long as nobody traces them; a graph of 5,400 operations asks 310,000 times. And `expr`
    # is what it was until the environment learns of a replacement, which it counts. 5 %.
    from torch.fx.experimental import sym_node
    from torch.fx.experimental.proxy_tensor import get_proxy_mode
    from torch.fx.experimental.sym_node import SymNode

    stock_expr: Any = SymNode.expr.fget
    _reads(stock_expr, "_expr", "shape_env", "_replacements_version_counter", "_expr_ver", "_expr_cache")
    _reads(SymNode.__init__, "_hint", "hint", "pytype", "_optimized_summation", "_translation_validation_enabled")
    plain, no_hint = (int, bool, float, type(None)), sym_node._NO_HINT

    def once(stock: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        kept: dict[tuple[Any, ...], tuple[Any, ...]] = {}

        def answer(self: Any, other: Any) -> Any:
            env = self.shape_env
            if type(other) is not SymNode or env is None or env._translation_validation_enabled or get_proxy_mode():
                return stock(self, other)
            one, two, kinds = self.expr, other.expr, (type(self._hint), type(other._hint))
            if type(one) is int or type(two) is int or kinds[0] not in plain or kinds[1] not in plain:
                return stock(self, other)
            summed = self._optimized_summation, other._optimized_summation
            asked = (one, two, self.pytype, other.pytype, self._hint, other._hint, kinds, summed)
            found = kept.get(asked)
            if found is None:
                made = stock(self, other)
                hint = no_hint if made._hint is None else made._hint
                kept[asked] = (made._expr, made.pytype, hint, made._optimized_summation)
                return made
            expr, pytype, hint, optimized = found
            return SymNode(expr, env, pytype, hint, optimized_summation=optimized)

        return answer

    def expr(self: Any) -> Any:
        env = self.shape_env
        if env is not None:
            version = env._replacements_version_counter
            if version == 0:
                return self._expr
            if version == self._expr_ver and self._expr_cache is not None:
                return self._expr_cache
        return stock_expr(self)

    stack.enter_context(replaced(SymNode, "expr", property(expr)))
    for name in ("_add", "_sub", "_mul", "_eq", "_ne", "_lt", "_le", "_gt", "_ge"):
        stack.enter_context(replaced(SymNode, name, once(getattr(SymNode, name))))


def _reuse_keys_once(stack: contextlib.ExitStack) -> None:
    # torch/_inductor/scheduler.py, Scheduler.can_fusion_increase_peak_memory: asks for the same keys at each pair of nodes, and
    # scores the pair, to compare with 0 in most cases. `get_possible_fusions` only looks: while it runs, the keys of a node
    # change with its `read_writes`, which are replaced, not changed. 8 % of a large graph, 1 % of a small one.
    from torch._inductor.codegen import wrapper
    from torch._inductor.scheduler import Scheduler

    stock_round, stock_check = Scheduler.get_possible_fusions, Scheduler.can_fusion_increase_peak_memory
    stock_key = wrapper.buffer_reuse_key
    _reads(stock_check, "buffer_reuse_key", "read_writes", "reads", "name_to_buf", "users", "node", "has_tensor_output")
    rounds: list[dict[int, tuple[Any, dict[Any, None]]]] = []

    def keys(scheduler: Any, node: Any) -> dict[Any, None]:
        deps = node.read_writes
        found = rounds[-1].get(id(deps))
        if found is None:
            read = [scheduler.name_to_buf.get(dep.name) for dep in deps.reads]
            reused = [buf.node for buf in read if buf and len(buf.users) == 1 and buf.node.has_tensor_output()]
            found = rounds[-1][id(deps)] = (deps, dict.fromkeys(map(wrapper.buffer_reuse_key, reused)))
        return found[1]

    def check(self: Any, node1: Any, node2: Any) -> bool:
        if not rounds:
            return stock_check(self, node1, node2)
        few, many = keys(self, node1), keys(self, node2)
        try:
            overhead = [int(key[2]) for key in few if key in many]
        except ValueError:  # a size with symbols
            return False
        return stock_check(self, node1, node2) if any(overhead) else False

    def one_round(self: Any, *args: Any, **options: Any) -> Any:
        known: dict[int, tuple[Any, Any]] = {}

        def key(buffer: Any) -> Any:
            found = known.get(id(buffer))
            if found is None:
                found = known[id(buffer)] = (buffer, stock_key(buffer))
            return found[1]

        rounds.append({})
        try:
            with replaced(wrapper, "buffer_reuse_key", key):
                return stock_round(self, *args, **options)
        finally:
            rounds.pop()

    stack.enter_context(replaced(Scheduler, "can_fusion_increase_peak_memory", check))
    stack.enter_context(replaced(Scheduler, "get_possible_fusions", one_round))


def _plain_runs(stack: contextlib.ExitStack) -> None:
    # torch/fx/interpreter.py, Interpreter.run_node: two context managers and a log line around each node, which do something
    # only where the meta of nodes is to be preserved, or the log is read. 5,400 operations run 300,000 nodes. 2 %.
    from torch.fx import interpreter, traceback
    from torch.fx.interpreter import Interpreter

    stock, note = Interpreter.run_node, Interpreter._set_current_node
    _reads(stock, "_set_current_node", "log", "fetch_args_kwargs_from_env", "op", "target")
    _reads(traceback.set_current_meta, "should_preserve_node_meta")

    def plain(self: Any, node: Any) -> Any:
        noted = traceback.should_preserve_node_meta or type(self)._set_current_node is not note
        if noted or interpreter.log.isEnabledFor(logging.DEBUG):
            return stock(self, node)
        args, kwargs = self.fetch_args_kwargs_from_env(node)
        return getattr(self, node.op)(node.target, args, kwargs)

    stack.enter_context(replaced(Interpreter, "run_node", plain))


def _plain_trees(stack: contextlib.ExitStack) -> None:
    # torch/utils/_pytree.py, tree_map: of a leaf, or of plain tuples, lists and dicts, without noting their structure. 2 %.
    from torch.utils import _pytree

    stock, nodes = _pytree.tree_map, _pytree.SUPPORTED_NODES

    def mapped(func: Callable[[Any], Any], tree: Any) -> Any:
        kind = type(tree)
        if kind is tuple:
            return tuple([mapped(func, part) for part in tree])
        if kind is list:
            return [mapped(func, part) for part in tree]
        if kind is dict:
            return {name: mapped(func, part) for name, part in tree.items()}
        if kind in nodes or issubclass(kind, tuple):
            return stock(func, tree)
        return func(tree)

    def tree_map(func: Any, tree: Any, *rests: Any, is_leaf: Any = None) -> Any:
        return stock(func, tree, *rests, is_leaf=is_leaf) if rests or is_leaf is not None else mapped(func, tree)

    stack.enter_context(replaced(_pytree, "tree_map", tree_map))


def _hashes_once(stack: contextlib.ExitStack) -> None:
    # torch/_inductor/dependencies.py, MemoryDep: frozen, and in many sets; its hash is that of five fields. The hash is kept
    # with the fields, hence for as long as they live. 1 %.
    from torch._inductor.dependencies import MemoryDep

    stock = MemoryDep.__hash__

    def once(self: Any) -> int:
        fields = self.__dict__
        if "_hash" not in fields:
            fields["_hash"] = stock(self)
        return fields["_hash"]

    stack.enter_context(replaced(MemoryDep, "__hash__", once))


def _settings_at_once(stack: contextlib.ExitStack) -> None:
    # torch/utils/_config_module.py, ConfigModule.__getattr__: the value that was set, or the default, of a setting that is no
    # alias and that no variable or knob decides. A graph of 5,400 operations asks 1,400,000 times. 2 %.
    from torch.utils import _config_module
    from torch.utils._config_module import ConfigModule

    stock, unset, fixed = ConfigModule.__getattr__, _config_module._UNSET_SENTINEL, _config_module._IMMUTABLE_CONFIG_TYPES
    _reads(_config_module._ConfigEntry.__init__, "deprecated", "alias")
    _reads(stock, "_config", "hide", "env_value_force", "user_override", "env_value_default", "justknob", "default")

    def at_once(self: Any, name: str) -> Any:
        entry = self._config.get(name)
        if entry is None or entry.hide or entry.deprecated or entry.alias or entry.env_value_force is not unset:
            return stock(self, name)
        value = entry.user_override.get()
        if value is not unset:
            return value
        if entry.env_value_default is unset and entry.justknob is None and isinstance(entry.default, fixed):
            return entry.default
        return stock(self, name)

    stack.enter_context(replaced(ConfigModule, "__getattr__", at_once))


def _reads(function: Any, *names: str) -> None:
    """Raise ``AttributeError`` unless the Python *function* mentions all of *names*."""
    codes, known = [inspect.unwrap(function).__code__], set[str]()
    for code in codes:
        known |= {*code.co_names, *code.co_varnames, *code.co_cellvars}
        codes += [part for part in code.co_consts if inspect.iscode(part)]
    if missing := sorted(set(names) - known):
        raise AttributeError(f"no {missing[0]}")


#: What is changed while NEML2 captures graphs and saves them.
CAPTURE: tuple[Change, ...] = (_without_traces, _without_canonical_form, _sizes_once)

#: What is changed while a graph is lowered.
LOWERING: tuple[Change, ...] = (
    _without_traces,
    _all_strides,
    _simplified_once,
    _dtype_rules_once,
    _ranges_once,
    _plain_sets,
    _sizes_once,
    _reuse_keys_once,
    _plain_runs,
    _plain_trees,
    _hashes_once,
    _settings_at_once,
)
