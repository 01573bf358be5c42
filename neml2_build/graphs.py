"""A captured graph as people read it: one operation a line, in the names of the model's own variables.

A saved program (``torch.export.save``) is a zip whose ``models/model.json`` holds the whole graph: operations, shapes, types,
the modules that operations came from. Reading that takes a millisecond and needs no torch; loading the program would take
seconds. What torch calls ``inputs_0_data`` is named here by what ``metadata.json`` says that the graph is given and gives:
variables, groups of variables (NEML2 hands the unknowns of a solve over in one tensor), parameters, matrices.
"""

from __future__ import annotations

import ast
import io
import json
import re
import struct
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from neml2_build.errors import TaskError

#: torch/_export/serde/schema.py, ScalarType.
_DTYPES = {
    1: "u8", 2: "i8", 3: "i16", 4: "i32", 5: "i64", 6: "f16", 7: "f32", 8: "f64",
    9: "c32", 10: "c64", 11: "c128", 12: "bool", 13: "bf16", 28: "u16", 34: "u32", 35: "u64",
}  # fmt: skip

_FORMATS = {"f64": "d", "f32": "f", "i64": "q", "i32": "i", "u8": "B", "bool": "?"}

#: Operations that move no numbers: another view, another shape, the size of something.
VIEWS = frozenset(
    {"alias", "as_strided", "broadcast_to", "chunk", "clone", "contiguous", "detach", "expand", "expand_as", "flatten"}
    | {"getitem", "lift_fresh_copy", "mT", "movedim", "narrow", "numpy_T", "permute", "reshape", "select", "slice", "split"}
    | {"squeeze", "swapaxes", "sym_size", "t", "to", "transpose", "unbind", "unflatten", "unsqueeze", "view", "view_as"}
    | {"_to_copy"}
)
#: Operations that make numbers of nothing.
CREATIONS = frozenset(
    {"arange", "empty", "eye", "full", "full_like", "new_ones", "new_zeros", "ones", "ones_like", "scalar_tensor"}
    | {"zeros", "zeros_like"}
)

_INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/", "pow": "**", "matmul": "@", "mm": "@", "bmm": "@"}
_COMPARISONS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
_COMMUTATIVE = frozenset({"add", "mul"})


@dataclass(frozen=True)
class Tensor:
    """A value: its name for people, dtype, and shape, in which text stands for sizes known at run time."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]

    @property
    def type(self) -> str:
        """``f64[batch, 6]``."""
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


Value: TypeAlias = "float | int | bool | list[float | int | bool]"


@dataclass(frozen=True)
class Constant:
    """A parameter, a buffer, or a tensor that the graph holds, with its value where that is a few numbers in a row."""

    tensor: Tensor
    source: str
    value: Value | None


@dataclass(frozen=True)
class Operation:
    """One operation.

    Attributes
    ----------
    target
        ``aten.sub.Tensor``.
    outputs
        Names as shown; the operation's own name is the first.
    reads
        Names of the tensors and sizes that it reads.
    text
        The right-hand side as people write it: ``t - t~1``, ``linalg_solve(A, b)``.
    dtype, shape
        Of the first output.
    leaf, leaf_type
        Path and type of the innermost model that it came from: ``eq1``, ``ScalarVariableRate``.
    form
        `text` with a mark in the place of each of `reads`.
    raw
        The name that torch gave it.
    """

    target: str
    outputs: tuple[str, ...]
    reads: tuple[str, ...]
    text: str
    dtype: str
    shape: tuple[int | str, ...]
    leaf: str
    leaf_type: str
    form: str
    raw: str

    @property
    def name(self) -> str:
        """``sub`` of ``aten.sub.Tensor``."""
        parts = self.target.split(".")
        return parts[1] if len(parts) > 1 else parts[0]

    @property
    def kind(self) -> str:
        """``view``, ``creation`` or ``arithmetic``."""
        return (
            "view"
            if self.name in VIEWS or self.name.rstrip("_") in VIEWS
            else "creation"
            if self.name in CREATIONS
            else "arithmetic"
        )

    @property
    def type(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Graph:
    """A captured graph.

    Attributes
    ----------
    name
        File name of its package.
    role
        What ``metadata.json`` uses it for, or an empty text.
    inputs, outputs
        As the package is called; outputs are names of values.
    sizes
        Symbol → smallest and largest value that the graph is valid for.
    """

    name: str
    role: str
    inputs: tuple[Tensor, ...]
    constants: tuple[Constant, ...]
    operations: tuple[Operation, ...]
    outputs: tuple[tuple[str, str], ...]
    sizes: dict[str, tuple[int | None, int | None]] = field(default_factory=dict)

    @property
    def arithmetic(self) -> tuple[Operation, ...]:
        """Without views, and without tensors of ones and zeros."""
        return tuple(operation for operation in self.operations if operation.kind == "arithmetic")

    def counts(self) -> Counter[str]:
        """Arithmetic operations by name."""
        return Counter(operation.name for operation in self.arithmetic)

    def repeated(self) -> dict[str, int]:
        """Arithmetic that is written more than once with the same meaning: its text → how often."""
        numbers: dict[tuple[str, ...], int] = {}
        known: dict[str, str] = {}
        found: Counter[int] = Counter()
        texts: dict[int, str] = {}
        for operation in self.operations:
            reads = [known.get(name, name) for name in operation.reads]
            if operation.name in _COMMUTATIVE:
                reads.sort()
            # A number stands for a meaning: written out, the meaning of the last operation would hold that of all others.
            meaning = numbers.setdefault((operation.target, operation.form, *reads), len(numbers))
            for place, name in enumerate(operation.outputs):
                known[name] = f"#{meaning}.{place}"
            if operation.kind == "arithmetic":
                found[meaning] += 1
                texts.setdefault(meaning, operation.text)
        repeated: Counter[str] = Counter()
        for meaning, count in found.items():
            if count > 1:
                repeated[texts[meaning]] += count
        return dict(repeated)

    @property
    def removable(self) -> int:
        """How many operations are repetitions of an earlier one."""
        return sum(count - 1 for count in self.repeated().values())


# ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def read(program: bytes, name: str, metadata: Mapping[str, Any] | None = None) -> Graph:
    """The graph in the saved *program*.

    Parameters
    ----------
    name
        File name of its package, by which *metadata* knows it.
    metadata
        The decoded ``metadata.json``; without it torch's names stay.

    Raises
    ------
    TaskError
        If *program* is not a saved program.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(program)) as archive:
            members = {info.partition("/")[2]: info for info in archive.namelist()}
            model = json.loads(archive.read(members["models/model.json"]))
            contents = {
                short: archive.read(full)
                for short, full in members.items()
                if short.startswith(("data/weights/", "data/constants/"))
            }
    except (zipfile.BadZipFile, KeyError, ValueError) as error:
        raise TaskError(f"{name} is not a saved graph: {error}", remedy="build again with --force") from None
    return _Reader(model, contents, name).graph(metadata)


class _Reader:
    def __init__(self, model: dict[str, Any], contents: dict[str, bytes], name: str) -> None:
        self.model = model
        self.contents = contents
        self.name = name
        module = model["graph_module"]
        self.data = module["graph"]
        self.signature = module["signature"]
        self.symbols = _symbols(model, self.data)
        self.names: dict[str, str] = {}

    def graph(self, metadata: Mapping[str, Any] | None) -> Graph:
        inputs, constants = self._inputs()
        outputs = [_reference(spec) for spec in self.signature["output_specs"]]
        role = role_of(metadata, self.name) if metadata else Role("", (), (), {})
        given = role.names(inputs)
        gives = role.gives(len(outputs))
        self._name_inputs(inputs, given, constants)
        spans = {raw: role.groups[shown] for raw, shown in zip(inputs, given, strict=False) if shown in role.groups}
        for raw, shown in zip(outputs, gives, strict=False):
            if raw is not None and raw not in self.names and shown and shown not in self.names.values():
                self.names[raw] = shown
        self._name_slices(spans)
        operations = tuple(operation for node in self.data["nodes"] if (operation := self._operation(node)) is not None)
        shown = tuple(
            (name or self._shown(raw or "none"), self._shown(raw or "none"))
            for raw, name in zip(outputs, [*gives, *[""] * (len(outputs) - len(gives))], strict=False)
        )
        sizes: dict[str, tuple[int | None, int | None]] = {
            str(self.symbols.get(name, name)): (bound.get("min_val"), bound.get("max_val"))
            for name, bound in self.model.get("range_constraints", {}).items()
        }
        return Graph(
            name=self.name,
            role=role.text,
            inputs=tuple(self._tensor(raw) for raw in inputs),
            constants=tuple(self._constant(*constant) for constant in constants),
            operations=operations,
            outputs=shown,
            sizes=sizes,
        )

    # -- names --------------------------------------------------------------------------------------------------------

    def _inputs(self) -> tuple[list[str], list[tuple[str, str]]]:
        """Names of what the caller gives; name and source of what the graph holds."""
        inputs: list[str] = []
        constants: list[tuple[str, str]] = []
        for spec in self.signature["input_specs"]:
            kind, content = next(iter(spec.items()))
            if kind == "user_input":
                found = _reference(spec)
                if found is not None:
                    inputs.append(found)
            elif kind in ("parameter", "buffer", "tensor_constant"):
                constants.append((content["arg"]["name"], content[f"{kind}_name"]))
        return inputs, constants

    def _name_inputs(self, inputs: Sequence[str], given: Sequence[str], constants: Sequence[tuple[str, str]]) -> None:
        for raw, shown in zip(inputs, given, strict=False):
            self.names[raw] = shown
        for raw, source in constants:
            self.names[raw] = source.removeprefix("model.")

    def _name_slices(self, spans: Mapping[str, Sequence[tuple[str, int]]]) -> None:
        """Name the parts that are cut out of a group of variables after these."""
        for node in self.data["nodes"]:
            arguments = {item["name"]: item["arg"] for item in node["inputs"]}
            source = (arguments.get("self") or {}).get("as_tensor", {}).get("name")
            if not node["target"].startswith("torch.ops.aten."):
                continue
            made = node["outputs"][0].get("as_tensor", {}).get("name") if node["outputs"] else None
            if made is None or made in self.names:
                continue
            name = node["target"].split(".")[3]
            if source in spans and name == "slice" and self._last_dimension(source, arguments):
                start, end = arguments.get("start", {}).get("as_int", 0), arguments.get("end", {}).get("as_int")
                offset = 0
                for variable, size in spans[source]:
                    if (offset, offset + size) == (start, end):
                        self._take(made, variable)
                    offset += size
            elif source in spans and len(spans[source]) == 1 and name in ("alias", "reshape", "view"):
                self._take(made, spans[source][0][0])
            elif source in self.names and name in ("reshape", "view", "alias") and source in self._variables:
                self._take(made, self._variables[source])

    @property
    def _variables(self) -> dict[str, str]:
        return self.__dict__.setdefault("_taken", {})

    def _take(self, raw: str, variable: str) -> None:
        """Let *raw* be a part of the inputs that holds *variable*: ``t'``, ``t''``, each the same numbers in another shape."""
        self._variables[raw] = variable
        name = variable
        while name in self.names.values():
            name += "'"
        self.names[raw] = name

    def _last_dimension(self, source: str, arguments: Mapping[str, Any]) -> bool:
        rank = len(self.data["tensor_values"][source]["sizes"])
        return arguments.get("dim", {}).get("as_int", 0) in (-1, rank - 1)

    def _shown(self, raw: str) -> str:
        return self.names.get(raw, raw)

    # -- values -------------------------------------------------------------------------------------------------------

    def _tensor(self, raw: str) -> Tensor:
        value = self.data["tensor_values"].get(raw)
        if value is None:
            return Tensor(self._shown(raw), "int", ())
        return Tensor(
            self._shown(raw),
            _DTYPES.get(value["dtype"], f"dtype{value['dtype']}"),
            tuple(self._size(size) for size in value["sizes"]),
        )

    def _size(self, size: dict[str, Any]) -> int | str:
        if "as_int" in size:
            return size["as_int"]
        if "as_expr" in size:
            return expression(size["as_expr"]["expr_str"], self.symbols)
        return str(size.get("as_name", "?"))

    def _constant(self, raw: str, source: str) -> Constant:
        tensor = self._tensor(raw)
        return Constant(tensor, source, self._value(source, tensor))

    def _value(self, source: str, tensor: Tensor) -> Value | None:
        count = tensor.shape[0] if len(tensor.shape) == 1 else 1
        if len(tensor.shape) > 1 or not isinstance(count, int) or count > 9:
            return None
        for kind in ("weights", "constants"):
            config = self.contents.get(f"data/{kind}/model_{kind}_config.json")
            about = json.loads(config).get("config", {}).get(source) if config else None
            if about and (letter := _FORMATS.get(tensor.dtype)) and not about.get("use_pickle"):
                data = self.contents.get(f"data/{kind}/{about['path_name']}", b"")
                if len(data) == struct.calcsize(f"<{count}{letter}"):
                    numbers = list(struct.unpack(f"<{count}{letter}", data))
                    return numbers if tensor.shape else numbers[0]
        return None

    # -- operations ---------------------------------------------------------------------------------------------------

    def _operation(self, node: dict[str, Any]) -> Operation | None:
        target = node["target"].removeprefix("torch.ops.")
        made = [raw for output in node["outputs"] for raw in _tensors_of(output)]
        if not made:
            if not node["outputs"]:
                return None
            made = [node.get("name") or "none"]
        first = self._tensor(made[0])
        reads: list[str] = []
        arguments: list[tuple[str, str]] = []
        forms: list[tuple[str, str]] = []
        for item in node["inputs"]:
            raws = list(_tensors_of(item["arg"]))
            reads += [self._shown(raw) for raw in raws]
            arguments.append((item["name"], self._argument(item["arg"], self._shown)))
            forms.append((item["name"], self._argument(item["arg"], lambda _: "?")))
        leaf, kind = leaf_of(node.get("metadata", {}).get("nn_module_stack", ""))
        return Operation(
            target=target,
            outputs=tuple(self._shown(raw) for raw in made),
            reads=tuple(reads),
            text=_text(target, arguments),
            dtype=first.dtype,
            shape=first.shape,
            leaf=leaf,
            leaf_type=kind,
            form=_text(target, forms),
            raw=made[0],
        )

    def _argument(self, value: Any, shown: Callable[[str], str]) -> str:
        """An argument as people write it; *shown* names tensors."""
        if isinstance(value, list):
            return f"[{', '.join(self._argument(item, shown) for item in value)}]"
        if not isinstance(value, dict):
            return number_text(value)
        if isinstance(value.get("name"), str):
            return shown(value["name"])
        kind, content = next(iter(value.items()))
        if kind == "as_name":
            size = self.data.get("sym_int_values", {}).get(content, {})
            return str(self._size(size)) if "as_expr" in size else shown(content)
        if kind == "as_scalar_type":
            return _DTYPES.get(content, str(content))
        if kind == "as_device":
            return content["type"]
        if kind == "as_graph":
            return f"<{content['name']}>"
        return "None" if kind == "as_none" else self._argument(content, shown)


def _reference(spec: dict[str, Any]) -> str | None:
    """Name of the value that a signature's entry speaks of; None for numbers."""
    content = next(iter(spec.values()))
    argument = content["arg"]
    return argument["name"] if "name" in argument else next(_tensors_of(argument), None)


def _tensors_of(value: Any) -> Iterator[str]:
    """Names of tensors and sizes in an argument or output."""
    if isinstance(value, dict):
        for kind, content in value.items():
            if kind in ("as_tensor", "as_name") or (kind == "name" and isinstance(content, str)):
                yield content["name"] if isinstance(content, dict) else content
            elif kind == "as_graph":
                continue
            else:
                yield from _tensors_of(content)
    elif isinstance(value, list):
        for item in value:
            yield from _tensors_of(item)


def _symbols(model: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, str]:
    """Symbol → name for people: the one symbol of a graph is its batch size."""
    found = dict.fromkeys(re.findall(r"Symbol\('(\w+)'", json.dumps([data.get("tensor_values"), data.get("sym_int_values")])))
    found.update(dict.fromkeys(model.get("range_constraints", {})))
    return {next(iter(found)): "batch"} if len(found) == 1 else {}


def expression(text: str, symbols: Mapping[str, str] | None = None) -> str:
    """A size as people write it: ``Mul(Integer(6), Symbol('s0', positive=True))`` → ``6*s0``."""
    try:
        return _plain(ast.parse(text, mode="eval").body, symbols or {})
    except (SyntaxError, ValueError):
        return text


def _plain(node: ast.AST, symbols: Mapping[str, str]) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return f"-{_plain(node.operand, symbols)}"
    if isinstance(node, ast.Call) and isinstance(node.func, (ast.Name, ast.Attribute)):
        name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
        arguments = [_plain(argument, symbols) for argument in node.args]
        if name == "Symbol":
            return symbols.get(arguments[0], arguments[0])
        if name == "Integer":
            return arguments[0]
        if name == "Mul":
            return "*".join(f"({part})" if "+" in part else part for part in arguments)
        if name == "Add":
            return " + ".join(arguments)
        return f"{name}({', '.join(arguments)})"
    return ast.unparse(node)


def leaf_of(stack: str) -> tuple[str, str]:
    """Path and type of the innermost module in an ``nn_module_stack``: ``("eq1", "ScalarVariableRate")``.

    NEML2 wraps the model for some graphs (residual, Jacobian, derivatives); the wrapper's name for it, ``model``, is left out.
    """
    entries = [entry.split(",") for entry in stack.split(";") if entry and not entry.startswith("_empty_nn_module_stack")]
    if not entries:
        return "", ""
    _, path, kind = (*entries[-1], "", "")[:3]
    wrapped = len(entries) > 1 and entries[0][-1].startswith(_WRAPPERS) and path.partition(".")[0] == entries[1][1]
    return path.partition(".")[2] if wrapped else path, kind.rpartition(".")[2]


_WRAPPERS = ("neml2.es.", "neml2.cli.")


def _text(target: str, arguments: Sequence[tuple[str, str]]) -> str:
    parts = target.split(".")
    name = parts[1] if len(parts) > 1 else parts[0]
    values = [value for _, value in arguments]
    if name in {**_INFIX, **_COMPARISONS} and len(values) == 2:
        return f"{values[0]} {_INFIX.get(name) or _COMPARISONS[name]} {values[1]}"
    if name == "rsub" and len(values) == 2:
        return f"{values[1]} - {values[0]}"
    if name == "neg" and len(values) == 1:
        return f"-{values[0]}"
    shown = [
        value if keyword in _PLAIN or not _optional(value) else f"{keyword}={value}"
        for keyword, value in arguments
        if keyword != "pin_memory"
    ]
    return f"{name}({', '.join(shown)})"


_PLAIN = (
    "self",
    "input",
    "other",
    "dim",
    "size",
    "shape",
    "A",
    "B",
    "base",
    "exponent",
    "start",
    "end",
    "tensors",
    "mat2",
    "equation",
)


def _optional(value: str) -> bool:
    return (
        value in ("True", "False", "None", "cpu", "cuda")
        or value in _DTYPES.values()
        or bool(re.fullmatch(r"-?[\d.e+-]+", value))
    )


def number_text(value: Any) -> str:
    """A number as short as it can be without losing a digit."""
    if isinstance(value, list):
        return f"[{', '.join(map(number_text, value))}]"
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)


# ── what metadata.json says ──────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Role:
    """What a graph is for, and the names of what it is given and gives as far as the metadata knows them.

    Attributes
    ----------
    groups
        Shown name of an input that holds several variables in one tensor → its variables with their sizes.
    """

    text: str
    given: tuple[str, ...]
    given_back: tuple[str, ...]
    groups: dict[str, tuple[tuple[str, int], ...]]
    tail: str = ""

    def names(self, raw: Sequence[str]) -> list[str]:
        """Names for the inputs *raw*; those that the metadata does not name keep theirs, or have `tail` and a number."""
        rest = list(raw[len(self.given) :])
        if self.tail:
            rest = [self.tail if len(rest) == 1 else f"{self.tail}_{number}" for number in range(len(rest))]
        return [*self.given, *rest][: len(raw)]

    def gives(self, count: int) -> list[str]:
        """Names of the outputs; an empty text for those without."""
        return [*self.given_back, *[""] * (count - len(self.given_back))][:count]


def role_of(metadata: Mapping[str, Any] | None, package: str) -> Role:
    """The role of the graph of *package* in the model that *metadata* describes."""
    segments = (metadata or {}).get("segments", ())
    for number, segment in enumerate(segments):
        for key, value in segment.items():
            if value == package and (key == "package" or key.endswith("_package")):
                role = _forward_role(segment, key) if segment.get("kind") == "forward" else _implicit_role(segment, key)
                where = f" of segment {number}" if len(segments) > 1 else ""
                return replace(role, text=f"{role.text}{where}")
    return Role("", (), (), {})


def _names(items: Iterable[Any]) -> list[str]:
    return [item["name"] if isinstance(item, dict) else str(item) for item in items]


def _forward_role(segment: Mapping[str, Any], key: str) -> Role:
    given = [*_names(segment.get("inputs", ())), *_names(segment.get("param_inputs", ()))]
    outputs = _names(segment.get("outputs", ()))
    if key == "package":
        return Role("forward", tuple(given), tuple(outputs), {})
    if key == "jvp_package":
        return Role("outputs and their derivatives", tuple(given), (*outputs, *_pairs(segment.get("jacobian_pairs", ()))), {})
    if key == "param_jacobian_package":
        return Role("derivatives by parameters", tuple(given), tuple(_pairs(segment.get("param_jacobian_pairs", ()))), {})
    if key == "param_vjp_package":
        cotangents = [f"bar({name})" for name in _names(segment.get("param_vjp_outputs", outputs))]
        gradients = [f"d/d{name}" for name in _names(segment.get("param_vjp_params", ()))]
        return Role("adjoint by parameters", (*given, *cotangents), tuple(gradients), {})
    return Role(_words(key), tuple(given), (), {})


def _pairs(pairs: Iterable[Any]) -> list[str]:
    names = []
    for pair in pairs:
        if isinstance(pair, Mapping):
            of = pair.get("out") or pair.get("output") or pair.get("unknown") or pair.get("out_var")
            by = pair.get("in") or pair.get("input") or pair.get("given") or pair.get("param") or pair.get("in_var")
            names.append(f"d{of}/d{by}" if of and by else "")
        elif isinstance(pair, Sequence) and len(pair) >= 2:
            names.append(f"d{pair[0]}/d{pair[1]}")
        else:
            names.append("")
    return names


def _implicit_role(segment: Mapping[str, Any], key: str) -> Role:
    unknowns, given_groups = _groups(segment, "unknown"), _groups(segment, "given")
    residuals = _groups(segment, "residual")
    parameters = _names(segment.get("param_inputs", ()))
    state = [*unknowns, *given_groups]
    groups = {name: variables for name, variables in state if variables}
    given = tuple([name for name, _ in state] + parameters)
    matrix = ["A"] if len(unknowns) == len(residuals) == 1 else [f"A[{r},{u}]" for r, _ in residuals for u, _ in unknowns]
    right = ["b"] if len(residuals) == 1 else [f"b[{name}]" for name, _ in residuals]
    steps = ["step"] if len(unknowns) == 1 else [f"step[{name}]" for name, _ in unknowns]
    if key == "residual_package":
        return Role("residual of the solve, with its sign changed", given, tuple(right), groups)
    if key == "jacobian_package":
        return Role("Jacobian A and residual b of the solve", given, (*matrix, *right), groups)
    if key == "solve_package":
        return Role("linear solve of A step = b", (*matrix, *right), tuple(steps), {})
    if key == "matvec_package":
        return Role("product of the Jacobian with a direction", given, ("Jv",) if len(residuals) == 1 else (), groups, "v")
    if key == "jacobian_given_package":
        return Role("Jacobian by what the solve is given", given, (), groups)
    if key == "dr_dparam_package":
        return Role("Jacobian by parameters", given, (), groups)
    if key == "predictor_package":
        inputs = _names(segment.get("predictor_inputs", ()))
        return Role("predictor of the solve", tuple(inputs), tuple(_names(segment.get("predictor_outputs", ()))), {})
    if key in ("solve_ift_package", "solve_param_package"):
        what = "what the solve is given" if key == "solve_ift_package" else "parameters"
        pairs = segment.get("jacobian_pairs" if key == "solve_ift_package" else "param_jacobian_pairs", ())
        return Role(f"derivatives of the solution by {what}", tuple(matrix), tuple(_pairs(pairs)), {}, "B")
    return Role(_words(key), given if "setup" in key else (), (), groups if "setup" in key else {})


def _words(key: str) -> str:
    return key.removesuffix("_package").replace("_", " ")


def _groups(segment: Mapping[str, Any], side: str) -> list[tuple[str, tuple[tuple[str, int], ...]]]:
    """Shown name and variables (with sizes) of each group of the *side* of a solve."""
    groups = []
    for info in segment.get(f"{side}_group_infos", ()):
        names = list(info.get("var_names", ()))
        sizes = {var["name"]: int(var.get("var_size", 1)) for var in info.get("per_var_info", ())}
        dense = info.get("structure") == "dense"
        groups.append((f"[{' '.join(names)}]", tuple((name, sizes.get(name, 1)) for name in names) if dense else ()))
    return groups


# ── writing ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def lines(graph: Graph) -> list[tuple[str, str, str, str]]:
    """Rows for people: name, what it is, type, leaf. Inputs first, then what the graph holds, operations, outputs."""
    rows: list[tuple[str, str, str, str]] = [(tensor.name, "input", tensor.type, "") for tensor in graph.inputs]
    read = {name for operation in graph.operations for name in operation.reads}
    for constant in graph.constants:
        value = f"constant {number_text(constant.value)}" if constant.value is not None else "constant"
        if constant.tensor.name in read:
            rows.append(
                (constant.tensor.name, value, constant.tensor.type, constant.source.rpartition(".")[0].removeprefix("model."))
            )
    for operation in graph.operations:
        leaf = f"{operation.leaf} ({operation.leaf_type})" if operation.leaf else operation.leaf_type
        rows.append((", ".join(operation.outputs), operation.text, operation.type, leaf))
    return rows


def as_json(graph: Graph) -> dict[str, Any]:
    """The graph for programs."""
    return {
        "name": graph.name,
        "role": graph.role,
        "sizes": {name: list(bounds) for name, bounds in graph.sizes.items()},
        "inputs": [{"name": tensor.name, "dtype": tensor.dtype, "shape": list(tensor.shape)} for tensor in graph.inputs],
        "constants": [
            {
                "name": one.tensor.name,
                "source": one.source,
                "dtype": one.tensor.dtype,
                "shape": list(one.tensor.shape),
                "value": one.value,
            }
            for one in graph.constants
        ],
        "operations": [
            {
                "outputs": list(operation.outputs),
                "target": operation.target,
                "reads": list(operation.reads),
                "text": operation.text,
                "dtype": operation.dtype,
                "shape": list(operation.shape),
                "leaf": operation.leaf,
                "leaf_type": operation.leaf_type,
                "kind": operation.kind,
                "torch_name": operation.raw,
            }
            for operation in graph.operations
        ],
        "outputs": [{"name": name, "value": value} for name, value in graph.outputs],
        "arithmetic": dict(graph.counts()),
        "repeated": graph.repeated(),
    }
