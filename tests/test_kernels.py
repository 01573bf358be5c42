from __future__ import annotations

import json

import pytest
from samples import node, package, program, rates_kernel, rates_metadata, rates_package, rates_program, wrapper

from neml2_build import graphs, kernels
from neml2_build.errors import TaskError


def rates() -> tuple[graphs.Graph, kernels.Package]:
    graph = graphs.read(rates_program(), "eq.pt2", rates_metadata())
    return graph, kernels.read(rates_package(), "eq.pt2", graph)


def kernel(body: str, parameters: str = "const double* in_ptr0, double* out_ptr0") -> str:
    return f'extern "C"  void  cpp_fused_0({parameters})\n{{\n{body}\n}}\n'


def operations(body: str) -> list[str]:
    found = kernels.read(package(kernel(body), ""), "g.pt2").kernels[0]
    return [statement.name for statement in found.statements if statement.kind == "operation"]


def test_nine_operations_are_captured_and_seven_left_in_one_kernel() -> None:
    graph, made = rates()
    summary = kernels.summarize(graph, made)
    assert sum(summary.captured.values()) == 9
    assert summary.left == {"sub": 4, "div": 3}
    assert summary.kernels == 1
    assert summary.repeated == {"t - t~1": 3}


def test_the_denominator_is_computed_once_in_the_models_own_names() -> None:
    _, made = rates()
    expressions = made.kernels[0].expressions()
    assert expressions.count("t - t~1") == 1
    assert expressions == ["a - a~1", "t - t~1", "tmp2 / tmp5", "b - b~1", "tmp9 / tmp5", "c - c~1", "tmp13 / tmp5"]


def test_what_is_left_over_of_whole_vectors_is_left_out() -> None:
    code = rates()[1].kernels[0].code
    assert "C10_UNLIKELY" not in code and "C10_LIKELY" not in code and "static_cast" not in code
    assert code.count("tmp5 = tmp3 - tmp4") == 1
    assert code.startswith("void cpp_fused_div_sub_0(")
    assert code.count("{") == code.count("}") == 2


def test_the_source_stays_as_it_was() -> None:
    made = rates()[1]
    assert made.sources["model.kernel.cpp"] == rates_kernel()
    assert made.kernels[0].source in rates_kernel()


def test_vectors() -> None:
    one = rates()[1].kernels[0]
    assert (one.lanes, one.registers, one.threads, one.strided) == (16, 2, 1, False)
    assert (rates()[1].isa, rates()[1].bits) == ("AVX-512", 512)


def test_words() -> None:
    graph, made = rates()
    assert list(kernels.summarize(graph, made).words) == [
        "9 operations captured (6 sub, 3 div), 7 left in the code (4 sub, 3 div)",
        "repeated subexpressions: 2 removed; captured more than once and computed once: 't - t~1' (3 times)",
        "1 kernel: everything that it computes is fused into one pass over the data",
        "vectorized: 16 values a step in 2 x 512 bits (AVX-512)",
        "threads: 1 (no parallel loop in the code)",
        "constants folded into the code: none",
        "calls of ATen: none",
    ]


def test_json() -> None:
    told = json.loads(json.dumps(kernels.summarize(*rates()).as_json()))
    assert told["operations"]["captured"] == 9 and told["operations"]["left"] == 7
    assert told["repeated_removed"] == 2
    assert told["vector"] == {"isa": "AVX-512", "bits": 512, "lanes": [16], "vectorized": True}


def test_what_is_no_package() -> None:
    with pytest.raises(TaskError, match="no"):
        kernels.read(b"fake", "eq.pt2")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("tmp0 - tmp1", "sub"),
        ("double(tmp0 * tmp1)", "mul"),
        ("decltype(tmp8)(-tmp8)", "neg"),
        ("tmp0.neg()", "neg"),
        ("tmp0.abs()", "abs"),
        ("std::exp(tmp0)", "exp"),
        ("decltype(tmp0)::blendv(tmp1, tmp2, tmp3)", "where"),
        ("tmp0 ? tmp1 : tmp2", "where"),
        ("tmp0 <= tmp1", "le"),
        ("tmp0.pow(tmp1)", "pow"),
        (
            "[&]() { auto left = tmp0 > 0 ? T(1) : T(0); auto right = tmp0 < 0; return left - right; } ()",
            "sign",
        ),
    ],
)
def test_operations_have_names(text: str, name: str) -> None:
    assert operations(f"auto tmp9 = {text};") == [name]


@pytest.mark.parametrize(
    "text",
    [
        "in_ptr0[static_cast<int64_t>(3L*x0)]",
        "static_cast<double>(120.0)",
        "at::vec::VectorizedN<double,2>(tmp2)",
        "c10::convert<double>(tmp1)",
        "at::vec::Vectorized<double>::loadu(in_ptr0 + static_cast<int64_t>(x0), static_cast<int64_t>(8))",
    ],
)
def test_loads_constants_and_casts_are_no_operations(text: str) -> None:
    assert operations(f"auto tmp9 = {text};") == []


def test_a_sum_over_a_loop() -> None:
    assert operations("double tmp_acc0 = 0;\nauto tmp0 = in_ptr0[x0];\ntmp_acc0 = tmp_acc0 + tmp0;") == ["sum"]


def test_threads_strides_and_scalar_code() -> None:
    body = (
        "#pragma omp parallel num_threads(4)\n{\nfor(int64_t x0=static_cast<int64_t>(0L); x0<8; x0+=static_cast<int64_t>(1L))\n"
        "{\nauto tmp0 = in_ptr0[static_cast<int64_t>(3L*x0)];\nout_ptr0[x0] = tmp0;\n}\n}"
    )
    one = kernels.read(package(kernel(body), ""), "g.pt2").kernels[0]
    assert (one.threads, one.lanes, one.strided) == (4, 1, True)
    assert "in_ptr0[3*x0]" in one.code


def test_calls_constants_and_folding() -> None:
    body = """
    auto arg0_1 = std::move(inputs[0]);
    [[maybe_unused]] auto& constant0 = constants_->at(0);
    aoti_torch_empty_strided(1, sizes, strides, &buf0_handle);
    cpp_fused_0((const double*)(arg0_1.data_ptr()), (double*)(buf0.data_ptr()));
    aoti_torch_proxy_executor_call_function(proxy_executor, 0, 0, nothing);
    aoti_torch_proxy_executor_call_function(proxy_executor, 1, 0, nothing);
    aoti_torch_cpu_mm_out(buf1, buf0, buf0);
    auto buf3 = wrap_with_raii_handle_if_needed(reinterpret_tensor_wrapper(buf0, 2, a, b, 0L)); buf0.reset();  // reuse
    auto var_0 = wrap_with_raii_handle_if_needed(reinterpret_tensor_wrapper(buf2, 2, a, b, 0L));
    output_handles[0] = var_0.release();
    output_handles[1] = buf3.release();
    """
    held = 'constants_info_[0].name = "constant0";\nconstants_info_[0].from_folded = false;'
    source = kernel("auto tmp0 = in_ptr0[x0];\nauto tmp1 = static_cast<double>(120.0);\nauto tmp2 = tmp0 / tmp1;")
    graph = graphs.read(
        program(
            ["x"],
            [
                node("aten.div.Tensor", "d", self="x", other="b_eta"),
                node("aten.pow.Tensor_Tensor", "p", self="d", other="b_n"),
            ],
            ["p", "d"],
            constants={"b_eta": 120.0, "b_n": 3.0},
        ),
        "g.pt2",
    )
    made = kernels.read(package(source, wrapper(body, held), ["neml2::opaque_pow", "aten::_linalg_solve_ex"]), "g.pt2", graph)
    assert made.calls == {"neml2::opaque_pow": 1, "aten::_linalg_solve_ex": 1, "aten::mm_out": 1}
    assert made.constants == {"constant0": False}
    assert made.kernels[0].arguments == {"in_ptr0": "x"}
    assert made.kernels[0].expressions() == ["x / 120.0"]
    summary = kernels.summarize(graph, made)
    assert summary.folded == {"eta": "120"}
    assert "constants kept as tensors: 1" in summary.words
    assert summary.words[-1] == "calls of ATen: aten::mm_out, neml2::opaque_pow, aten::_linalg_solve_ex"


def test_a_graph_without_a_kernel() -> None:
    graph = graphs.read(program(["x"], [], ["x"]), "g.pt2")
    summary = kernels.summarize(graph, kernels.read(package("", wrapper("")), "g.pt2", graph))
    assert summary.kernels == 0
    assert "no kernel: nothing is computed outside the calls" in summary.words


TRITON = """
/*
async_compile.triton('triton_poi_fused_add_0', '''
import triton
@triton.jit
def triton_poi_fused_add_0(in_ptr0, out_ptr0, xnumel, XBLOCK : tl.constexpr):
    tmp0 = tl.load(in_ptr0 + (x0), xmask)
    tmp1 = tl.full([1], 2.0, tl.float64)
    tmp2 = tmp0 + tmp1
    tmp3 = libdevice.exp(tmp2)
    tl.store(out_ptr0 + (x0), tmp3, xmask)
''', device_str='cuda')
*/
    uint32_t grid_0 = ((xnumel + (128 - 1)) / (128));
    uint32_t grid_1 = 1;
    uint32_t grid_2 = 1;
    launchKernel(kernels_.triton_poi_fused_add_0_0, grid_0, grid_1, grid_2, 4, 0, kernel_args_, stream_);
"""


def test_triton_kernels_with_their_launch_settings() -> None:
    (one,) = kernels.read(package("", wrapper("") + TRITON), "g.pt2").kernels
    assert (one.name, one.language) == ("triton_poi_fused_add_0", "triton")
    assert one.counts() == {"add": 1, "exp": 1}
    assert one.launch["warps"] == "4"
    assert one.launch["shared memory"] == "0 bytes"
    assert one.code.startswith("@triton.jit\ndef ")
