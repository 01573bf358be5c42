"""What the compiler made of a graph, read from its package: generated code without the boilerplate, and what it shows.

A ``.pt2`` keeps the sources that it was compiled from: ``model.kernel.cpp`` with the loops that do the arithmetic, and
``model.wrapper.cpp``, 1,000 lines of checks and buffers around a few calls (for a GPU it holds the Triton sources as comments).
Inductor writes one statement an operation (``auto tmp6 = tmp2 / tmp5;``), so statements can be counted and compared with the
captured graph: what was computed three times and now is once, what was fused, what is a call of ATen.

A loop comes twice, for whole vectors and for the rest; the second says nothing new and is left out. Nothing is compiled or
run here, and torch is not needed.
"""

from __future__ import annotations

import io
import json
import re
import textwrap
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from neml2_build.errors import TaskError
from neml2_build.graphs import Graph, number_text

#: Macro that inductor defines for a vector ISA → name for people, bits of a register.
_ISAS = {
    "AVX512": ("AVX-512", 512),
    "AVX2": ("AVX2", 256),
    "NEON": ("NEON", 128),
    "SVE128": ("SVE", 128),
    "SVE256": ("SVE", 256),
    "ZVECTOR": ("z/Architecture vectors", 128),
    "VSX": ("VSX", 128),
}
_BITS = {"double": 64, "float": 32, "int64_t": 64, "int32_t": 32, "half": 16, "bfloat16": 16}
_SYMBOLS = {"+": "add", "-": "sub", "*": "mul", "/": "div", "%": "mod", "&": "and", "|": "or", "^": "xor"}
_SYMBOLS |= {"<": "lt", "<=": "le", ">": "gt", ">=": "ge", "==": "eq", "!=": "ne", "&&": "and", "||": "or"}


@dataclass(frozen=True)
class Statement:
    """One assignment of a kernel: ``load``, ``constant``, ``cast`` or ``operation``, and the name of an operation."""

    variable: str
    text: str
    kind: str
    name: str = ""


@dataclass(frozen=True)
class Kernel:
    """One generated kernel.

    Attributes
    ----------
    name
        As inductor calls it, after the operations that were fused in it.
    language
        ``cpp`` or ``triton``.
    source
        As it was compiled.
    code
        Without casts, without the loop for what is left over of whole vectors.
    statements
        Of *code*.
    arguments
        Name in the kernel → name in the model, where it is known.
    lanes, registers
        Values a step, and in how many registers; 1 and 1 is scalar code.
    threads
        Threads that the loop is split over.
    strided
        Whether it reads or writes other than one value after the other.
    filled
        Where a loop is shorter than a vector: how many values of it are used; else 0.
    launch
        Of a GPU kernel: settings by name.
    """

    name: str
    language: str
    source: str
    code: str
    statements: tuple[Statement, ...] = ()
    arguments: dict[str, str] = field(default_factory=dict)
    lanes: int = 1
    registers: int = 1
    threads: int = 1
    strided: bool = False
    filled: int = 0
    launch: dict[str, str] = field(default_factory=dict)

    def counts(self) -> Counter[str]:
        """Operations by name."""
        return Counter(statement.name for statement in self.statements if statement.kind == "operation")

    def expressions(self) -> list[str]:
        """Its operations, with the model's names in the place of what was loaded: ``t - t~1``."""
        names: dict[str, str] = {}
        found = []
        for statement in self.statements:
            if statement.kind == "load":
                pointer = re.search(r"\bin_ptr\d+", statement.text)
                index = re.search(r"\[([^\]]*)\]", statement.text)
                if pointer and pointer[0] in self.arguments:
                    offset = f"[{index[1]}]" if index and not re.fullmatch(r"x\d+", index[1]) else ""
                    names[statement.variable] = self.arguments[pointer[0]] + offset
            elif statement.kind == "constant":
                names[statement.variable] = statement.text
            elif statement.kind == "cast" and (source := re.search(r"\btmp\w+", statement.text)):
                names[statement.variable] = names.get(source[0], source[0])
            else:
                found.append(re.sub(r"\btmp\w+", lambda match: names.get(match[0], match[0]), _bare(statement.text)))
        return found


@dataclass(frozen=True)
class Package:
    """A ``.pt2`` as far as it can be read without loading it.

    Attributes
    ----------
    sources
        File name → text of each source.
    calls
        Names of what is called outside the kernels, as often as it is called.
    constants
        Names of the tensors that the library holds; with whether each was computed when it was compiled.
    isa, bits
        Vector instructions that the code was written for, and their width; 0 for none.
    about
        What the package says of itself: device, machine.
    binaries
        Machine code for GPUs that lies in the package by itself, as a machine with a GPU leaves it.
    """

    name: str
    sources: dict[str, str]
    kernels: tuple[Kernel, ...]
    calls: Counter[str]
    constants: dict[str, bool]
    isa: str
    bits: int
    about: dict[str, str]
    binaries: tuple[bytes, ...] = ()

    def counts(self) -> Counter[str]:
        """Operations of all kernels by name."""
        return sum((kernel.counts() for kernel in self.kernels), Counter())


# ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def read(data: bytes, name: str, graph: Graph | None = None) -> Package:
    """The package *data*.

    Parameters
    ----------
    name
        Its file name.
    graph
        The graph that it was made of: gives the variables' names to what kernels read and write.

    Raises
    ------
    TaskError
        If *data* is not a package of AOTInductor.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            texts = {
                member.rpartition("/")[2]: archive.read(member).decode(errors="replace")
                for member in archive.namelist()
                if member.endswith((".cpp", ".json", ".h")) and "/aotinductor/" in member
            }
            binaries = tuple(archive.read(member) for member in archive.namelist() if member.endswith(".cubin"))
    except zipfile.BadZipFile:
        raise TaskError(f"{name} is not a package of AOTInductor", remedy="build again with --force") from None
    sources = {member: text for member, text in texts.items() if not member.endswith(".json")}
    whole = "\n".join(sources.values())
    wrapper = next((text for text in sources.values() if "::run_impl(" in text), "")
    body = _body(wrapper, re.search(r"::run_impl\(", wrapper))
    constants = _constants(wrapper)
    values = _values(body, graph, list(constants))
    calls = _calls(body, texts)
    macro = re.search(r"\bCPU_CAPABILITY_(\w+)", whole)
    isa, bits = _ISAS.get(macro[1], ("", 0)) if macro else ("", 0)
    kernels = [_cpp_kernel(*found, body, values, bits) for text in sources.values() for found in _functions(text)]
    about: dict[str, str] = {}
    for member, text in texts.items():
        if member.endswith("_metadata.json"):
            about.update({str(key): str(value) for key, value in json.loads(text).items()})
    return Package(
        name=name,
        sources=sources,
        kernels=(*kernels, *_triton_kernels(wrapper)),
        calls=calls,
        constants=constants,
        isa=isa,
        bits=bits,
        about=about,
        binaries=binaries,
    )


def _body(text: str, match: re.Match[str] | None) -> str:
    """From the first brace after *match* to the one that closes it."""
    if match is None:
        return ""
    start = text.find("{", match.end())
    return text[start : _closing(text, start)] if start >= 0 else ""


def _closing(text: str, start: int) -> int:
    """Index after the bracket that closes the one at *start*."""
    pairs = {"{": "}", "(": ")"}
    opening, closing = text[start], pairs[text[start]]
    depth = 0
    for match in re.finditer(re.escape(opening) + "|" + re.escape(closing), text[start:]):
        depth += 1 if match[0] == opening else -1
        if depth == 0:
            return start + match.end()
    return len(text)


def _functions(text: str) -> Iterator[tuple[str, str, str]]:
    """Name, parameters and whole source of every C++ kernel in *text*."""
    for match in re.finditer(r'extern "C"\s+void\s+(cpp_\w+)\(', text):
        end = _closing(text, match.end() - 1)
        brace = text.find("{", end)
        if brace >= 0 and not text[end:brace].strip():
            yield match[1], text[match.end() : end - 1], text[match.start() : _closing(text, brace)]


def _constants(wrapper: str) -> dict[str, bool]:
    names = re.findall(r'constants_info_\[(\d+)\]\.name = "([^"]*)"', wrapper)
    folded = dict(re.findall(r"constants_info_\[(\d+)\]\.from_folded = (\w+)", wrapper))
    return {name: folded.get(number) == "true" for number, name in names}


def _values(body: str, graph: Graph | None, constants: Sequence[str]) -> dict[str, str]:
    """Handle in the wrapper → name in the model."""
    names: dict[str, str] = {}
    if graph is not None:
        for handle, number in re.findall(r"auto (\w+) = std::move\(inputs\[(\d+)\]\)", body):
            if int(number) < len(graph.inputs):
                names[handle] = graph.inputs[int(number)].name
        aliases: dict[str, str] = {}
        for handle, source, rest in re.findall(
            r"auto (\w+) = wrap_with_raii_handle_if_needed\(reinterpret_tensor_wrapper\((\w+),([^\n]*)", body
        ):
            if "// reuse" not in rest:  # the same memory for another value
                aliases[handle] = source
        for number, handle in re.findall(r"output_handles\[(\d+)\] = (\w+)\.release\(\)", body):
            if int(number) < len(graph.outputs):
                name = graph.outputs[int(number)][0]
                names.setdefault(handle, name)
                while handle in aliases:
                    handle = aliases.pop(handle)
                    names.setdefault(handle, name)
    for handle, number in re.findall(r"auto& (\w+) = constants_->at\((\d+)\)", body):
        if int(number) < len(constants):
            names[handle] = constants[int(number)]
    return names


_HOUSEKEEPING = frozenset({"empty_strided", "new_uninitialized_tensor", "copy_", "clone", "reinterpret_tensor", "as_strided"})


def _calls(body: str, texts: Mapping[str, str]) -> Counter[str]:
    """What the wrapper calls instead of a kernel: C functions of ATen, and operators through the proxy executor."""
    found: Counter[str] = Counter()
    for name in re.findall(r"\baoti_torch_(?:cpu|cuda|mps|xpu)_(\w+)\(", body):
        if name not in _HOUSEKEEPING:
            found[f"aten::{name.strip('_')}" if not name.startswith("_") else f"aten::{name}"] += 1
    proxies: list[str] = []
    for member, text in texts.items():
        if member.endswith(".json") and not member.endswith("_metadata.json"):
            proxies += [node["node"]["target"] for node in json.loads(text).get("nodes", ())]
    used = re.findall(r"aoti_torch_proxy_executor_call_function\(proxy_executor,\s*(\d+)", body)
    for number in used:
        found[proxies[int(number)] if int(number) < len(proxies) else "an operator"] += 1
    return found


# ── one C++ kernel ───────────────────────────────────────────────────────────────────────────────────────────────────


def _cpp_kernel(name: str, parameters: str, source: str, body: str, values: Mapping[str, str], bits: int) -> Kernel:
    whole = _without_tails(source)
    code = _plain(whole)
    statements = tuple(_statements(code[code.find("{") :]))
    vectors = re.findall(r"Vectorized(N?)<([\w:]+)(?:,\s*(\d+))?>", whole)
    registers = max((int(count or 1) for _, _, count in vectors), default=1)
    element = next((kind for _, kind, _ in vectors), "")
    steps = [int(step) for step in re.findall(r"\bx\d+\s*\+=\s*(\d+)", code)]
    lanes = max(steps, default=1)
    if vectors and lanes == 1 and bits:
        lanes = registers * bits // _BITS.get(element.rpartition("::")[2], 64)
    threads = [int(count) for count in re.findall(r"#pragma omp parallel num_threads\((\d+)\)", source)]
    return Kernel(
        name=name,
        language="cpp",
        source=source,
        code=code,
        statements=statements,
        arguments=_arguments(name, parameters, body, values),
        lanes=lanes if vectors else 1,
        registers=registers if vectors else 1,
        threads=max(threads, default=1),
        filled=min((int(end) for end, step in _SHORT.findall(code) if int(end) < int(step)), default=0),
        strided=bool(re.search(r"ptr\d+\[[^\]]*\d+\s*\*", code)),
    )


_SHORT = re.compile(r"x\d+\s*<\s*(\d+); x\d+\s*\+=\s*(\d+)")


def _arguments(name: str, parameters: str, body: str, values: Mapping[str, str]) -> dict[str, str]:
    match = re.search(rf"\b{re.escape(name)}\(", body)
    if match is None:
        return {}
    given = _split(body[match.end() : _closing(body, match.end() - 1) - 1])
    named: dict[str, str] = {}
    for parameter, argument in zip(_split(parameters), given, strict=False):
        handle = re.search(r"\b(\w+)\.data_ptr\(\)", argument)
        pointer = parameter.split()[-1].lstrip("*")
        if handle and handle[1] in values:
            named[pointer] = values[handle[1]]
    return named


def _split(text: str) -> list[str]:
    """*text* at its outer commas."""
    parts, depth, start = [], 0, 0
    for place, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            parts.append(text[start:place].strip())
            start = place + 1
    return [part for part in [*parts, text[start:].strip()] if part]


def _without_tails(source: str) -> str:
    """*source* without the branches that compute what whole vectors leave over."""
    while (match := re.search(r"if\s*\(C10_UNLIKELY\(", source)) is not None:
        condition = _closing(source, source.find("(", match.start()))
        start = source.find("{", condition)
        if start < 0:
            break
        line = source.rfind("\n", 0, match.start()) + 1
        source = source[:line] + source[_closing(source, start) :].lstrip("\n")
    return source


_CAST = re.compile(r"static_cast<int(?:64|32)_t>\(")


def _plain(source: str) -> str:
    """*source* as one would write it: without casts of indices, suffixes, and braces around one loop body."""
    while (match := _CAST.search(source)) is not None:
        end = _closing(source, match.end() - 1)
        inside = source[match.end() : end - 1]
        bare = re.fullmatch(r"[\w.]+", inside) or not _operator_near(source, match.start(), end)
        source = source[: match.start()] + (inside if bare else f"({inside})") + source[end:]
    source = re.sub(r"\b(\d+)L\b", r"\1", source)
    source = re.sub(r"\bat::vec::", "", source)
    source = re.sub(r"c10::div_floor_integer\((\w+), (\w+)\)", r"\1 / \2", source)
    source = re.sub(r"if\(C10_LIKELY\((.*)\)\)\n", r"if(\1)\n", source)
    source = re.sub(r"static_cast<(?:double|float)>\((-?[\d.e+-]+)f?\)", r"\1", source)
    source = re.sub(r"=\s*\n\s*(?=sign\()", "= ", _SIGN.sub(r"sign(\1);", source))
    source = re.sub(r'extern "C"\s+void\s+', "void ", source)
    source = _flat(source)
    return source.strip() + "\n"


_SIGN = re.compile(r"\[&\]\(\)\s*\{\s*auto left = (\w+) > [^;]*;\s*auto right = [^;]*;\s*return left - right;\s*\}\s*\(\)\s*;")


def _operator_near(source: str, start: int, end: int) -> bool:
    return bool(re.search(r"[*/%+-]\s*$", source[:start]) or re.match(r"\s*[*/%+-]", source[end:]))


def _flat(source: str) -> str:
    """*source* without blocks that hold nothing but a block, indented anew."""
    lines = [line.strip() for line in source.splitlines() if line.strip()]
    kept: list[str] = []
    stack: list[bool] = []
    for number, line in enumerate(lines):
        if line == "{":
            before = kept[-1] if kept else ""
            needed = before.startswith(("for(", "for (", "if(", "if (", "else", "#pragma", "[")) or before.endswith(")")
            stack.append(needed)
            if needed:
                kept.append(line)
        elif line == "}" and stack:
            if stack.pop():
                kept.append(line)
        else:
            if line.startswith("if(x") and not any("else" in one for one in lines[number:]):
                stack_condition = re.fullmatch(r"if\(x\d+ >= 0 && x\d+ < .*\)", line)
                if stack_condition and number + 1 < len(lines) and lines[number + 1] == "{":
                    continue  # whole vectors: always so, now that the rest is left out
            kept.append(line)
    depth = 0
    out = []
    for line in kept:
        depth -= line.startswith(("}", ")"))
        head = depth == 0 and out and not any("{" in one for one in out)
        out.append("    " * (2 if head and line != "{" else max(depth, 0)) + line)
        depth += line.count("{") - line.count("}") + line.startswith("}")
    return "\n".join(out)


_ASSIGNMENT = re.compile(
    r"(?:^|[;{}\n])\s*(?:auto|[\w:]+(?:<[^;=<>]*>)?)\s+(tmp\w+)\s*=\s*|(?:^|[;{}\n])\s*(tmp_acc\w*)\s*=\s*", re.M
)


def _statements(code: str) -> Iterator[Statement]:
    place = 0
    while (match := _ASSIGNMENT.search(code, place)) is not None:
        end = _end_of_statement(code, match.end())
        text = " ".join(code[match.end() : end].split())
        place = end
        variable = match[1] or match[2]
        if match[1] and match[1].startswith("tmp_acc"):
            continue  # its first value
        kind, name = _classify(text)
        yield Statement(variable, text, kind, "sum" if match[2] and name == "add" else name)


def _end_of_statement(code: str, start: int) -> int:
    depth = 0
    for place in range(start, len(code)):
        letter = code[place]
        depth += (letter in "([{") - (letter in ")]}")
        if letter == ";" and depth == 0:
            return place
    return len(code)


def _bare(text: str) -> str:
    """*text* without a cast around the whole of it."""
    while found := re.fullmatch(r"(?:double|float|bool|decltype\(\w+\)|VecMask<[^()]*>)\((.*)\)", text):
        text = found[1]
    return text


#: A number, a loop's index, numbers in a row.
_CONSTANT = r"(?:static_cast<[\w:]+>\()?-?[\d.e+-]+f?\)?|true|false|x\d+|Vectorized\w*<[^()]*>::arange\(.*\)|.*numeric_limits.*"


def _classify(text: str) -> tuple[str, str]:
    """Kind of the expression *text*, and the name of what it computes."""
    inner = _bare(text)
    if re.search(r"\b(?:in_ptr|in_out_ptr|out_ptr)\d+\b", inner) and not re.search(r"\btmp", inner):
        return "load", ""
    if re.fullmatch(_CONSTANT, inner):
        return "constant", ""
    if re.fullmatch(r"(?:static_cast|c10::convert|convert)<[^()]*>\(tmp\w+\)|Vectorized\w*<[^()]*>\([^()]*\)|tmp\w+", inner):
        return "cast", ""
    if inner.startswith("[&]"):
        return "operation", "sign" if "left - right" in inner else "masked" if "tmp" in inner else "load"
    if found := re.fullmatch(r"-\s*tmp\w+|tmp\w+\.neg\(\)", inner):
        return "operation", "neg"
    if found := re.fullmatch(r"\(?[\w.:<>]+\)?\s*(<=|>=|==|!=|&&|\|\||[-+*/%<>&|^])\s*\(?[\w.:<>]+\)?", inner):
        return "operation", _SYMBOLS[found[1]]
    if found := re.fullmatch(r"tmp\w+\.(\w+)\(.*\)", inner):
        return "operation", found[1]
    if "blendv" in inner or " ? " in inner:
        return "operation", "where"
    if found := re.match(r"(?:std::|::|at::|c10::)?(?:\w+::)*(\w+)(?:<[^()]*>)?\(", inner):
        return "operation", found[1].removeprefix("calc_")
    return "operation", "other"


# ── Triton ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _triton_kernels(wrapper: str) -> Iterator[Kernel]:
    """Triton kernels of a wrapper for a GPU: sources as comments, launches as calls."""
    launches = {found[1]: found for found in re.finditer(r"launchKernel\((?:\w+\.)?(\w+),\s*([^;]*)\);", wrapper)}
    seen: set[str] = set()
    for match in re.finditer(r"async_compile\.triton\('(\w+)',\s*'''(.*?)'''", wrapper, re.DOTALL):
        name, source = match[1], match[2].replace("\\n", "\n") if "\n" not in match[2] else match[2]
        if name in seen:
            continue
        seen.add(name)
        launch: dict[str, str] = {}
        found = launches.get(name) or next(
            (one for key, one in launches.items() if key.startswith(name) or name.startswith(key)), None
        )
        if found is not None:
            grid = re.findall(r"uint32_t grid_\d = ([^;]*);", wrapper[: found.start()])[-3:]
            arguments = _split(found[2])
            launch = {"grid": ", ".join(_index(part) for part in grid)}
            if len(arguments) >= 5:
                launch |= {"warps": arguments[3], "shared memory": f"{arguments[4]} bytes"}
        start = source.find("@triton.jit")
        code = textwrap.dedent(source[source.rfind("\n", 0, start) + 1 :] if start >= 0 else source)
        statements = tuple(
            Statement(variable, text.strip(), *_classify_triton(text.strip()))
            for variable, text in re.findall(r"^\s+(tmp\d+) = (.*)$", code, re.MULTILINE)
        )
        yield Kernel(
            name=name,
            language="triton",
            source=source.strip() + "\n",
            code=code.strip() + "\n",
            statements=statements,
            launch=launch,
        )


def _classify_triton(text: str) -> tuple[str, str]:
    if text.startswith("(") and _closing(text, 0) == len(text):
        text = text[1:-1].strip()
    if text.startswith("tl.load("):
        return "load", ""
    if re.fullmatch(r"tl\.full\(.*\)|-?[\d.e+-]+", text):
        return "constant", ""
    if re.fullmatch(r"tmp\d+\.to\(.*\)|tl\.broadcast_to\(.*\)|tmp\d+\[.*\]", text):
        return "cast", ""
    if re.fullmatch(r"-\s*tmp\d+", text):
        return "operation", "neg"
    if found := re.fullmatch(r"[\w.]+ (<=|>=|==|!=|[-+*/%<>&|^]) [\w.]+", text):
        return "operation", _SYMBOLS[found[1]]
    if found := re.match(r"(?:[\w]+\.)*(\w+)\(", text):
        return "operation", found[1]
    return "operation", "other"


def _index(text: str) -> str:
    return re.sub(r"static_cast<\w+>\((.*?)\)", r"\1", text).replace("L", "")


# ── what it shows ────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Summary:
    """A graph and what became of it, in numbers. *words* says the same in sentences."""

    graph: str
    device: str
    captured: dict[str, int]
    left: dict[str, int]
    repeated: dict[str, int]
    kernels: int
    lanes: list[int]
    isa: str
    bits: int
    threads: int
    folded: dict[str, str]
    kept: list[str]
    calls: dict[str, int]
    words: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "graph": self.graph,
            "device": self.device,
            "operations": {
                "captured": sum(self.captured.values()),
                "left": sum(self.left.values()),
                "captured_by_name": self.captured,
                "left_by_name": self.left,
            },
            "repeated": self.repeated,
            "repeated_removed": sum(count - 1 for count in self.repeated.values()),
            "kernels": self.kernels,
            "vector": {
                "isa": self.isa,
                "bits": self.bits,
                "lanes": self.lanes,
                "vectorized": any(one > 1 for one in self.lanes),
            },
            "threads": self.threads,
            "constants_folded": self.folded,
            "constants_kept": self.kept,
            "aten_calls": self.calls,
            "words": list(self.words),
        }


def summarize(graph: Graph, package: Package, device: str = "cpu") -> Summary:
    """Compare the captured *graph* with the *package* that was made of it."""
    captured, left = graph.counts(), package.counts()
    repeated = graph.repeated()
    read = {name for operation in graph.operations for name in operation.reads}
    used = [constant for constant in graph.constants if constant.tensor.name in read]
    held = len(package.constants)
    literals = _literals(package)
    folded = {
        constant.tensor.name: number_text(constant.value)
        for constant in used
        if isinstance(constant.value, (int, float)) and float(constant.value) in literals
    }
    if not held:
        folded = {one.tensor.name: number_text(one.value) if one.value is not None else one.tensor.type for one in used}
    threads = max((kernel.threads for kernel in package.kernels), default=1)
    summary = Summary(
        graph=graph.name,
        device=device,
        captured=dict(captured),
        left=dict(left),
        repeated=repeated,
        kernels=len(package.kernels),
        lanes=[kernel.lanes for kernel in package.kernels],
        isa=package.isa,
        bits=package.bits,
        threads=threads,
        folded=folded,
        kept=list(package.constants),
        calls=dict(package.calls),
        words=(),
    )
    words = (
        _operations(summary),
        *_repeated(summary),
        _fusion(package),
        *_vectors(package),
        *_threads(package),
        *_folding(summary),
        _aten(summary),
    )
    return Summary(**{**{name: getattr(summary, name) for name in summary.__dataclass_fields__}, "words": words})


def _literals(package: Package) -> set[float]:
    found: set[float] = set()
    for kernel in package.kernels:
        for statement in kernel.statements:
            if statement.kind == "constant":
                for number in re.findall(r"-?\d[\d.]*(?:e[+-]?\d+)?", statement.text):
                    found.add(float(number))
    return found


def _operations(summary: Summary) -> str:
    captured, left, called = sum(summary.captured.values()), sum(summary.left.values()), sum(summary.calls.values())
    plural = "s" * (captured != 1)
    text = f"{captured} operation{plural} captured{_by_name(summary.captured)}, {left} left in the code{_by_name(summary.left)}"
    if called:
        text += f", {called} left to ATen"
    removed = captured - left - called - sum(count - 1 for count in summary.repeated.values())
    if removed > 0:
        text += f"; {removed} more are simplified away or part of another"
    elif removed < 0:
        text += f"; {-removed} come of loops that compute the same, and of tables written as comparisons"
    return text


def _by_name(counts: Mapping[str, int]) -> str:
    return (
        f" ({', '.join(f'{count} {name}' for name, count in sorted(counts.items(), key=lambda one: -one[1]))})"
        if counts
        else ""
    )


def _repeated(summary: Summary) -> Iterator[str]:
    if not summary.repeated:
        yield "no operation is captured twice"
        return
    removed = sum(count - 1 for count in summary.repeated.values())
    texts = [f"'{text}' ({count} times)" for text, count in summary.repeated.items()]
    more = f" and {len(texts) - 5} others" if len(texts) > 5 else ""
    left = sum(summary.left.values()) + sum(summary.calls.values())
    once = left <= sum(summary.captured.values()) - removed
    what = f"{removed} removed; captured more than once and computed once" if once else f"{removed}; captured more than once"
    yield f"repeated subexpressions: {what}: {', '.join(texts[:5])}{more}"


def _fusion(package: Package) -> str:
    count = len(package.kernels)
    if not count:
        return "no kernel: nothing is computed outside the calls"
    if count == 1:
        loops = len(re.findall(r"^    for\s*\(", package.kernels[0].code, re.MULTILINE))
        passes = "one pass over the data" if loops < 2 else f"one function of {loops} loops"
        return f"1 kernel: everything that it computes is fused into {passes}"
    return f"{count} kernels: {', '.join(kernel.name for kernel in package.kernels)}"


def _vectors(package: Package) -> Iterator[str]:
    kernels = [kernel for kernel in package.kernels if kernel.language == "cpp"]
    for kernel in kernels:
        where = f"{kernel.name}: " if len(kernels) > 1 else ""
        if kernel.lanes > 1:
            width = f"{kernel.registers} x {package.bits} bits" if package.bits else f"{kernel.registers} registers"
            used = f", of which a short loop uses {kernel.filled}" if kernel.filled else ""
            yield f"{where}vectorized: {kernel.lanes} values a step in {width} ({package.isa or 'unknown ISA'}){used}"
        else:
            why = ": it reads or writes with a stride" if kernel.strided else ""
            yield f"{where}not vectorized{why}; one value a step"
    for kernel in package.kernels:
        if kernel.language == "triton":
            settings = ", ".join(f"{name} {value}" for name, value in kernel.launch.items())
            yield f"{kernel.name}: launched with {settings or 'settings that the package does not tell'}"


def _threads(package: Package) -> Iterator[str]:
    kernels = [kernel for kernel in package.kernels if kernel.language == "cpp"]
    if kernels:
        many = max(kernel.threads for kernel in kernels)
        yield f"threads: {many}" if many > 1 else "threads: 1 (no parallel loop in the code)"


def _folding(summary: Summary) -> Iterator[str]:
    if summary.folded:
        yield f"constants folded into the code: {', '.join(f'{name} = {value}' for name, value in summary.folded.items())}"
    else:
        yield "constants folded into the code: none"
    if summary.kept:
        yield f"constants kept as tensors: {len(summary.kept)}"


def _aten(summary: Summary) -> str:
    if not summary.calls:
        return "calls of ATen: none"
    calls = [name if count == 1 else f"{name} ({count} times)" for name, count in summary.calls.items()]
    return f"calls of ATen: {', '.join(calls)}"
