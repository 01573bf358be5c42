"""What of torch's texts the fast path relies on, and the check that it is there.

A wrapper that AOTInductor writes is a prefix (one include), then ``torch/_inductor/codegen/aoti_runtime/interface.cpp`` word
for word, then the model. With torch 2.12.1 and its precompiled headers g++ takes 4.1 s for it at ``-O1``; the model's own part
takes 0.65 s. Most of the rest is `interface.cpp` and ``parse_device_str`` of ``model_base.h``, which instantiates
``std::regex``: the same machine code in every graph.

So the wrapper is cut in two translation units of the same program. The first (*interface*) is prefix and interface, compiled
against torch's own headers. The second (*model*) is prefix and model, compiled against a copy of ``model_base.h`` in which
``parse_device_str`` is declared, not defined. Nothing is written anew: the function that runs is the one of torch's header,
in the interface's object. Whatever of this does not hold for a torch makes `split` or `overlay` return None, and the wrapper
is compiled as torch compiles it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from neml2_build.digest import digest

MODEL_BASE = "torch/csrc/inductor/aoti_runtime/model_base.h"
INTERFACE = "_inductor/codegen/aoti_runtime/interface.cpp"
KERNEL_PREFIX = "#include <torch/csrc/inductor/cpp_prefix.h>"

#: The only prefix that is known: a wrapper for the CPU. One for CUDA, or with stack allocation, is compiled as it is.
PREFIX = "#include <torch/csrc/inductor/aoti_include/cpu.h>"

#: How far g++ may inline in a model's part. A whole wrapper has spent its budget (40 % of its size) on the interface before it
#: comes to the last candidate, the constructor of ``std::stringstream``; a unit of the model alone would inline that too, and
#: export three destructors of ``std::stringbuf`` that torch's library does not. With 13 to 16 % every dynamic symbol, defined
#: or not, is the same in ten of twelve graphs that were compared (g++ 12.2). The other two are of the smallest kind, one
#: scalar input: there torch's library has four weak functions of the standard library more, because its budget suffices.
INLINING = ("--param", "large-unit-insns=0", "--param", "inline-unit-growth=14")

#: Names of `interface.cpp` that a model's part would use only if it were not just a model.
_OF_INTERFACE = ("AOTInductorModelContainer", "AOTINoGradGuard", "CONVERT_EXCEPTION_TO_ERROR_CODE", "AOTI_VECTOR_SIZE_CHECK")

_DEFINITION = re.compile(
    r"^inline void parse_device_str\((?P<parameters>[^()]*)\) \{\n(?P<body>.*?)^\}\n", re.MULTILINE | re.DOTALL
)
_NAMESPACE = "namespace torch::aot_inductor {"

#: Makes the compiler emit the function of torch's header although nothing in the interface calls it.
_KEEP = (
    "#include <cstdint>\n#include <string>\n"
    "namespace torch::aot_inductor {\n"
    "[[gnu::used]] inline void parse_device_str(const std::string&, int32_t&, int32_t&);\n"
    "} // namespace torch::aot_inductor\n"
)


@dataclass(frozen=True)
class Parts:
    """A wrapper in two: the text of the *interface* unit, the text of the *model* unit."""

    interface: str
    model: str


def split(wrapper: str, interface: str, name: str) -> Parts | None:
    """Cut the text *wrapper* at torch's *interface* text, or None where it is not made as known.

    Line numbers of the model's part stay those of the whole, under the file name *name*, because torch's checks print them.
    """
    prefix, found, model = wrapper.partition(interface)
    if not found or prefix.strip() != PREFIX or interface in model or any(word in model for word in _OF_INTERFACE):
        return None
    line = (prefix + interface).count("\n") + 1
    return Parts(interface=_KEEP + prefix + interface, model=f'{PREFIX}\n#line {line} "{name}"\n{model}')


def overlay(model_base: str) -> str | None:
    """The text of ``model_base.h`` with ``parse_device_str`` only declared, or None where it is not as known."""
    found = list(_DEFINITION.finditer(model_base))
    if len(found) != 1 or model_base.count("parse_device_str(") != 2 or _types(found[0]["parameters"]) != _KEEP_TYPES:
        return None
    match = found[0]
    if _NAMESPACE not in model_base[: match.start()] or "#if" in match["parameters"]:
        return None
    declared = f"void parse_device_str({match['parameters']});\n"
    declared += "\n" * (match.group(0).count("\n") - declared.count("\n"))
    text = model_base[: match.start()] + declared + model_base[match.end() :]
    return f'#line 1 "torch/include/{MODEL_BASE}"\n{text}'


_KEEP_TYPES = ["const std::string&", "int32_t&", "int32_t&"]


def _types(parameters: str) -> list[str]:
    return [" ".join(parameter.split()[:-1]) for parameter in parameters.split(",")]


def identity(torch_folder: Path | None) -> dict[str, str | None]:
    """Digests of the texts of the torch in *torch_folder* that are cut or replaced."""

    def of(path: str) -> str | None:
        try:
            return digest((torch_folder / path).read_bytes()) if torch_folder else None
        except OSError:
            return None

    return {"interface.cpp": of(INTERFACE), "model_base.h": of(f"include/{MODEL_BASE}")}
