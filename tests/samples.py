"""A captured graph, its metadata and its package, as small as they can be and in the forms that torch and NEML2 write.

The model is `eq` of ``models/rates.i``: three rates with one denominator. Real ones are looked at in tests marked ``real``.
"""

from __future__ import annotations

import io
import json
import struct
import zipfile
from typing import Any

BATCH = {"as_expr": {"expr_str": "Symbol('s11', positive=True, integer=True)", "hint": {"as_int": 2}}}


def tensor(name: str) -> dict[str, Any]:
    return {"as_tensor": {"name": name}}


def node(target: str, made: str, stack: str = "", **arguments: Any) -> dict[str, Any]:
    """One operation; a text among *arguments* names a tensor, a number is a number, anything else is as it is."""

    def argument(value: Any) -> Any:
        if isinstance(value, str):
            return tensor(value)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return value
        return {"as_int": value} if isinstance(value, int) else {"as_float": value}

    return {
        "target": f"torch.ops.{target}",
        "inputs": [{"name": name, "arg": argument(value), "kind": 1} for name, value in arguments.items()],
        "outputs": [tensor(made)],
        "metadata": {"nn_module_stack": stack} if stack else {},
        "name": made,
    }


def stack(leaf: str, kind: str, wrapper: str = "neml2.models.common.ComposedModel.ComposedModel") -> str:
    return f"L__self__,,{wrapper};L__self__{leaf},{leaf},neml2.models.common.{kind}"


def program(
    inputs: list[str],
    nodes: list[dict[str, Any]],
    outputs: list[str],
    *,
    constants: dict[str, float] | None = None,
    shapes: dict[str, list[Any]] | None = None,
    ranges: dict[str, dict[str, int]] | None = None,
) -> bytes:
    """The bytes of a saved program; *constants* are buffers of one float64."""
    constants = constants or {}
    names = [*inputs, *constants, *(output["as_tensor"]["name"] for one in nodes for output in one["outputs"])]
    values = {
        name: {"dtype": 8, "sizes": (shapes or {}).get(name, [] if name in constants else [BATCH]), "device": {"type": "cpu"}}
        for name in names
    }
    specs = [{"buffer": {"arg": {"name": name}, "buffer_name": f"model.{name[2:]}"}} for name in constants]
    specs += [{"user_input": {"arg": tensor(name)}} for name in inputs]
    model = {
        "graph_module": {
            "graph": {"inputs": [], "outputs": [], "nodes": nodes, "tensor_values": values, "sym_int_values": {}},
            "signature": {"input_specs": specs, "output_specs": [{"user_output": {"arg": tensor(name)}} for name in outputs]},
        },
        "range_constraints": {"s11": {"min_val": 1, "max_val": 1048576}} if ranges is None else ranges,
    }
    config = {
        f"model.{name[2:]}": {"path_name": f"weight_{number}", "use_pickle": False} for number, name in enumerate(constants)
    }
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("archive/models/model.json", json.dumps(model))
        archive.writestr("archive/data/weights/model_weights_config.json", json.dumps({"config": config}))
        for number, value in enumerate(constants.values()):
            archive.writestr(f"archive/data/weights/weight_{number}", struct.pack("<d", value))
    return out.getvalue()


VARIABLES = ("a", "a~1", "t", "t~1", "b", "b~1", "c", "c~1")


def rates_program() -> bytes:
    nodes = []
    for number, first in enumerate((0, 4, 6)):
        where = stack(f"eq{number + 1}", "VariableRate.ScalarVariableRate")
        suffix = ["", "_2", "_4"][number], ["_1", "_3", "_5"][number], ["", "_1", "_2"][number]
        nodes.append(node("aten.sub.Tensor", f"sub{suffix[0]}", where, self="inputs_2_data", other="inputs_3_data"))
        nodes.append(
            node("aten.sub.Tensor", f"sub{suffix[1]}", where, self=f"inputs_{first}_data", other=f"inputs_{first + 1}_data")
        )
        nodes.append(node("aten.div.Tensor", f"div{suffix[2]}", where, self=f"sub{suffix[1]}", other=f"sub{suffix[0]}"))
    return program([f"inputs_{number}_data" for number in range(8)], nodes, ["div", "div_1", "div_2"])


def rates_metadata(package: str = "eq.pt2") -> dict[str, Any]:
    outputs = [{"name": name} for name in ("a_rate", "b_rate", "c_rate")]
    segment = {"kind": "forward", "package": package, "inputs": [{"name": name} for name in VARIABLES], "outputs": outputs}
    return {"schema_version": 14, "segments": [{**segment, "param_inputs": []}]}


_LOAD = "at::vec::VectorizedN<double,2>::loadu(in_ptr{} + static_cast<int64_t>(x0), static_cast<int64_t>({}))"
_WHOLE = "static_cast<int64_t>(16L*(c10::div_floor_integer(static_cast<int64_t>(ks0), static_cast<int64_t>(16L))))"


def _branch(width: str) -> str:
    lines = [f"auto tmp{tmp} = {_LOAD.format(number, width)};" for number, tmp in enumerate((0, 1, 3, 4, 7, 8, 11, 12))]
    arithmetic = ("2 = tmp0 - tmp1", "5 = tmp3 - tmp4", "6 = tmp2 / tmp5", "9 = tmp7 - tmp8", "10 = tmp9 / tmp5")
    lines += [f"auto tmp{one};" for one in (*arithmetic, "13 = tmp11 - tmp12", "14 = tmp13 / tmp5")]
    lines += [f"tmp{tmp}.store(out_ptr{number} + static_cast<int64_t>(x0), {width});" for number, tmp in enumerate((6, 10, 14))]
    return "\n".join(lines)


def rates_kernel() -> str:
    """A loop over whole vectors, and the same again for the rest."""
    parameters = [f"const double* in_ptr{number}" for number in range(8)] + [f"double* out_ptr{number}" for number in range(3)]
    return f"""
#include <torch/csrc/inductor/cpp_prefix.h>
extern "C"  void  cpp_fused_div_sub_0({", ".join(parameters)},
                       const int64_t ks0)
{{
    {{
        for(int64_t x0=static_cast<int64_t>(0L); x0<static_cast<int64_t>(ks0); x0+=static_cast<int64_t>(16L))
        {{
            {{
                if(C10_LIKELY(x0 >= static_cast<int64_t>(0) && x0 < {_WHOLE}))
                {{
{_branch("16")}
                }}
                if(C10_UNLIKELY(x0 >= {_WHOLE} && x0 < static_cast<int64_t>(ks0)))
                {{
{_branch("static_cast<int64_t>(ks0 + (-16L))")}
                }}
            }}
        }}
    }}
}}
// Compile cmd
// g++ model.kernel.cpp -D CPU_CAPABILITY_AVX512 -O3
"""


def wrapper(body: str, constants: str = "") -> str:
    """The part of a wrapper that is read: what it holds, and the function that calls kernels."""
    return f"{constants}\nvoid AOTInductorModel::run_impl(\n    AtenTensorHandle* input_handles\n) {{\n{body}\n}} // run_impl\n"


def rates_wrapper() -> str:
    lines = [f"    auto arg{number}_1 = std::move(inputs[{number}]);" for number in range(8)]
    given = [f"(const double*)(arg{number}_1.data_ptr())" for number in range(8)]
    given += [f"(double*)(buf{number}.data_ptr())" for number in range(3)]
    lines.append(f"    cpp_fused_div_sub_0({', '.join(given)}, s11);")
    lines += [f"    output_handles[{number}] = buf{number}.release();" for number in range(3)]
    return wrapper("\n".join(lines))


def package(kernel: str, wrapper_text: str, calls: list[str] | None = None) -> bytes:
    """A ``.pt2``; *calls* are the operators that the proxy executor is told of."""
    folder = "model/data/aotinductor/model/model"
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr(f"{folder}.kernel.cpp", kernel)
        archive.writestr(f"{folder}.wrapper.cpp", wrapper_text)
        archive.writestr(f"{folder}.wrapper_metadata.json", json.dumps({"AOTI_DEVICE_KEY": "cpu"}))
        archive.writestr(f"{folder}.wrapper.so", b"\x7fELF")
        if calls is not None:
            nodes = [{"name": "buf", "node": {"target": target}} for target in calls]
            archive.writestr(f"{folder}.wrapper.json", json.dumps({"nodes": nodes}))
    return out.getvalue()


def rates_package() -> bytes:
    return package(rates_kernel(), rates_wrapper())
