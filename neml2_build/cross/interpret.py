"""Does the code for a GPU compute the right thing? Run it on the CPU, in Triton's interpreter, and see.

inductor writes a graph's calls either in C++ (what is compiled) or in Python. `python_of` has it write Python, from the same
lowered graph, for the same pretended card, with the same kernels; `Run` executes that with every kernel interpreted, each of
its candidate configurations in turn. What is found this way: wrong indices and masks, reads and writes past the end of a
buffer (Triton's interpreter would read them; here they are errors), reads of what was never written (buffers start as NaN),
wrong constants. What is not: what ``ptxas`` makes of a kernel, and races between its threads.

The interpreter knows nothing of libdevice, which CUDA's mathematical functions come from: `Libdevice` answers from torch's.

``triton.jit`` decides when a module is imported whether its functions are compiled or interpreted, so the two halves are two
processes; the second is this file as a script::

    TRITON_INTERPRET=1 python -m neml2_build.cross.interpret FILE...

where each FILE is what `saved` wrote. It prints one JSON object a file.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import io
import json
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from neml2_build.cross.cards import chosen
from neml2_build.digest import digest

BATCHES = (1, 2, 7, 33)


# -- first process: what inductor writes ------------------------------------------------------------------------------


class _Enough(Exception):
    """The Python code is written; nothing is to be compiled."""


def python_of(program: Any, architectures: Sequence[str], inductor: dict[str, Any], toolkit: Path) -> dict[str, Any]:
    """Code and constants of *program* (changed) as inductor writes them for ``call(args)`` in Python.

    Nothing is compiled, and no compiler is needed. torch/_inductor/graph.py, ``codegen_with_cpp_wrapper``, writes Python first
    where kernels are not tuned in a block of their own, in order to run it; there this stops.
    """
    import os

    import torch
    from torch._inductor.graph import GraphLowering

    from neml2_build import cross, toolchain
    from neml2_build.cross.machine import Machine, pretended
    from neml2_build.cross.program import move, real

    found: dict[str, Any] = {}

    def write(self: Any) -> None:
        code, _ = self.codegen()
        constants = {name: real(value) for name, value in self.constants.items()}
        found.update(code=code.value, constants={name: value.clone() for name, value in constants.items() if value is not None})
        raise _Enough

    options, _ = cross._options(inductor)
    options["triton.autotune_at_compile_time"] = False
    toolchain.forget(program)
    stock = GraphLowering._compile_to_module
    machine = Machine(cards=chosen(architectures), archs=list(architectures), toolkit=toolkit)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="neml2-build-"))
        stack.enter_context(toolchain._variables(TORCHINDUCTOR_CACHE_DIR=folder))
        stack.enter_context(toolchain.prime(toolchain.silent(), "x86-64"))
        stack.enter_context(pretended(machine, Path(folder)))
        stack.callback(setattr, GraphLowering, "_compile_to_module", stock)
        GraphLowering._compile_to_module = write  # type: ignore[method-assign]
        move(program)
        try:
            torch._inductor.aoti_compile_and_package(
                program, package_path=os.path.join(folder, "x.pt2"), inductor_configs=options
            )
        except Exception:
            if not found:
                raise
    return found


def saved(file: Path, program: bytes, architectures: Sequence[str], inductor: dict[str, Any], toolkit: Path) -> None:
    """Write to *file* what the second process needs for the graph saved in *program*."""
    import torch

    from neml2_build.stages.lower import load

    found = python_of(load(program), architectures, inductor, toolkit)
    torch.save({"program": program, **found}, file)


# -- second process: run it -------------------------------------------------------------------------------------------


class OutOfBounds(Exception):
    """A kernel reads or writes where no buffer of its is."""


#: What libdevice calls otherwise than torch.
_OTHER_NAMES = {"fabs": "abs", "nearbyint": "round", "rint": "round", "llrint": "round", "isinfd": "isinf"}


class Libdevice:
    """CUDA's mathematical functions on the interpreter's tensors, answered by torch."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        import torch

        if name.startswith("__"):
            raise AttributeError(name)
        plain = _OTHER_NAMES.get(name, name)
        function = getattr(torch, plain, None) or getattr(torch.special, plain, None)
        if function is None:
            raise NotImplementedError(f"libdevice.{name} has no counterpart on the CPU")

        def call(*arguments: Any) -> Any:
            return _elementwise(function, arguments)

        return call


def _elementwise(function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    import numpy as np
    import torch
    from triton.language import core
    from triton.runtime.interpreter import TensorHandle

    first: Any = next(one for one in arguments if isinstance(one, core.tensor))
    arrays = [
        torch.from_numpy(np.array(one.handle.data))
        if isinstance(one, core.tensor)
        else torch.tensor(getattr(one, "value", one))
        for one in arguments
    ]
    result = function(*arrays).numpy()
    if result.dtype == bool:
        scalar: Any = core.int1
    elif result.dtype == first.handle.data.dtype:
        scalar = first.dtype
    else:
        scalar = {"float64": core.float64, "float32": core.float32, "int64": core.int64, "int32": core.int32}[str(result.dtype)]
    shape = list(result.shape)
    kind = core.block_type(scalar, shape) if first.type.is_block() else scalar
    return core.tensor(TensorHandle(result, scalar), kind)


class Kernel:
    """Stands for ``CachingAutotuner``: the kernel *fn*, run by the interpreter with each of *configs*."""

    def __init__(self, fn: Any, *, triton_meta: Any, inductor_meta: Any, configs: Sequence[Any], **_: Any) -> None:
        self.fn, self.triton_meta, self.inductor_meta, self.configs = fn, triton_meta, inductor_meta, list(configs)

    @property
    def source(self) -> str:
        """The function alone, as ``triton.JITFunction.src`` has it."""
        text = textwrap.dedent(inspect.getsource(self.fn.fn))
        return text[text.index("def ") :]

    def run(self, *arguments: Any, **_: Any) -> None:
        """Run every configuration from the same buffers; `AssertionError` where two disagree."""
        import torch

        tensors = [one for one in arguments if isinstance(one, torch.Tensor)]
        before = [one.clone() for one in tensors] if len(self.configs) > 1 else []
        results: list[list[Any]] = []
        for config in self.configs:
            for one, value in zip(tensors, before, strict=False):
                one.copy_(value)
            self._run(config, arguments, tensors)
            results.append([one.clone() for one in tensors])
            for one, other in zip(results[0], results[-1], strict=True):
                same = torch.allclose(one, other, rtol=1e-12, atol=1e-12, equal_nan=True)
                assert same, f"{self.fn.__name__}: configurations disagree"

    def _run(self, config: Any, arguments: Sequence[Any], tensors: Sequence[Any]) -> None:
        from torch._inductor.runtime.triton_heuristics import GridExpr

        names = [name for name in self.fn.arg_names if name not in config.kwargs]
        if len(names) != len(arguments):
            raise TypeError(f"{self.fn.__name__} takes {names}, and is given {len(arguments)} arguments")
        values = {**dict(zip(names, arguments, strict=True)), **config.kwargs}
        grid = GridExpr.from_meta(self.inductor_meta, config).eval_slow(values)
        values = {name: value for name, value in values.items() if name in self.fn.arg_names}
        if 0 in grid:
            return
        with _bounds([(one.untyped_storage().data_ptr(), one.untyped_storage().nbytes()) for one in tensors]):
            self.fn.run(grid=tuple(grid), warmup=False, **values)


@contextlib.contextmanager
def _bounds(ranges: Sequence[tuple[int, int]]) -> Iterator[None]:
    """While open, loads and stores of the interpreter lie in *ranges* (address, bytes), or `OutOfBounds` is raised."""
    import numpy as np
    from triton.runtime import interpreter

    builder: Any = interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store

    def check(pointers: Any, mask: Any, what: str) -> None:
        addresses, used = np.broadcast_arrays(pointers.data, mask.data)
        addresses = addresses[used.astype(bool)].astype(np.uint64)
        inside = np.zeros(addresses.shape, dtype=bool)
        for start, size in ranges:
            inside |= (addresses >= np.uint64(start)) & (addresses < np.uint64(start + size))
        if not inside.all():
            raise OutOfBounds(f"{what} {int((~inside).sum())} of {inside.size} elements out of bounds")

    def checked_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        check(pointers, mask, "reads")
        return load(self, pointers, mask, *rest)

    def checked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        check(pointers, mask, "writes")
        return store(self, pointers, value, mask, *rest)

    builder.create_masked_load = checked_load
    builder.create_masked_store = checked_store
    try:
        yield
    finally:
        builder.create_masked_load = load
        builder.create_masked_store = store


class Run:
    """The Python code of a graph, on the CPU.

    Parameters
    ----------
    code, constants
        As `python_of` gives them.
    folder
        Where sources of kernels are written: the interpreter reads them from files.
    """

    def __init__(self, code: str, constants: dict[str, Any], folder: Path) -> None:
        self.kernels: dict[str, Kernel] = {}
        self._folder = folder
        scope: dict[str, Any] = {"__name__": "graph", **constants, "_kernel": self._kernel, "_empty": _empty}
        exec(compile(_on_cpu(code), "<graph>", "exec"), scope)
        self._call = scope["call"]

    def __call__(self, arguments: Sequence[Any]) -> list[Any]:
        """Outputs for *arguments*, both flat lists of tensors on the CPU."""
        return list(self._call(list(arguments)))

    def _kernel(self, name: str, source: str, **_: Any) -> Kernel:
        from importlib import import_module
        from importlib.util import module_from_spec, spec_from_file_location

        helpers: Any = import_module("torch._inductor.runtime.triton_helpers")
        heuristics: Any = import_module("torch._inductor.runtime.triton_heuristics")

        helpers.libdevice = Libdevice()
        helpers.set_driver_to_gpu = lambda: None  # asks for a GPU, as each kernel's module begins
        # torch/_inductor/runtime/triton_heuristics.py, cached_autotune: the class that it makes is a default argument
        defaults = heuristics.cached_autotune.__defaults__ or ()
        heuristics.cached_autotune.__defaults__ = tuple(
            Kernel if value is heuristics.CachingAutotuner else value for value in defaults
        )
        file = self._folder / f"{name}.py"
        file.write_text(source)
        spec = spec_from_file_location(f"kernel_{name}", file)
        assert spec is not None and spec.loader is not None
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        vars(module)["libdevice"] = Libdevice()
        kernel = getattr(module, name)
        self.kernels[name] = kernel
        return kernel


def _empty(size: Sequence[int], stride: Sequence[int], dtype: Any) -> Any:
    """A buffer of which nothing was written: NaN, or numbers that stand out."""
    import torch

    fresh = torch.empty_strided(tuple(size), tuple(stride), dtype=dtype)
    return fresh.fill_(float("nan")) if dtype.is_floating_point else fresh.fill_(1 if dtype is torch.bool else 113)


_HEADER = {
    "empty_strided_cuda": "_empty",
    "empty_strided_cpu": "_empty",
    "assert_alignment": "(lambda *_: None)",
}


def _on_cpu(code: str) -> str:
    """*code* with the device taken out: buffers, guards, streams, and where kernels come from."""
    tree = ast.parse(code)
    kept = [node for node in tree.body if not (isinstance(node, ast.If) and "__main__" in ast.unparse(node.test))]
    tree.body = kept
    return ast.unparse(_Rewriter().visit(tree))


class _Rewriter(ast.NodeTransformer):
    def visit_Assign(self, node: ast.Assign) -> Any:
        target = node.targets[0]
        name = target.id if isinstance(target, ast.Name) else ""
        if name in _HEADER:
            node.value = ast.parse(_HEADER[name], mode="eval").body
            return node
        if name == "async_compile":
            return None
        return self.generic_visit(node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> Any:
        kept = [alias for alias in node.names if alias.name not in ("AsyncCompile", "_cuda_getCurrentRawStream")]
        node.names = kept
        return node if kept else None

    def visit_Expr(self, node: ast.Expr) -> Any:
        if ast.unparse(node).startswith(("async_compile.wait", "torch.cuda.set_device")):
            return ast.Pass()
        return self.generic_visit(node)

    def visit_Delete(self, node: ast.Delete) -> Any:
        kept = [target for target in node.targets if ast.unparse(target) != "async_compile"]
        node.targets = kept
        return node if kept else ast.Pass()

    def visit_With(self, node: ast.With) -> Any:
        self.generic_visit(node)
        for item in node.items:
            if ast.unparse(item.context_expr).startswith("torch.cuda."):
                item.context_expr = ast.parse("__import__('contextlib').nullcontext()", mode="eval").body
        return node

    def visit_Constant(self, node: ast.Constant) -> Any:
        return ast.Constant("cpu") if node.value in ("cuda", "cuda:0") else node

    def visit_Call(self, node: ast.Call) -> Any:
        called = ast.unparse(node.func)
        if called == "async_compile.triton":
            node.func = ast.Name("_kernel", ast.Load())
            return node
        if called == "get_raw_stream":
            return ast.Constant(0)
        self.generic_visit(node)
        if called in ("device", "torch.device"):
            node.keywords = [keyword for keyword in node.keywords if keyword.arg != "index"]
        return node


# -- comparison -------------------------------------------------------------------------------------------------------


def inputs_of(program: Any, batch: int) -> tuple[list[Any], bool]:
    """Sample inputs of *program* in the order of its graph, every free size being *batch*; and whether a size is free."""
    import torch

    kinds = program.graph_signature.user_inputs
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    generator = torch.Generator().manual_seed(batch)
    free = False
    values = []
    for name in kinds:
        value = nodes[name].meta["val"]
        sizes = []
        for size in value.shape:
            if isinstance(size, torch.SymInt):
                free = True
                expression = size.node.expr
                sizes.append(int(expression.subs(dict.fromkeys(expression.free_symbols, batch))))
            else:
                sizes.append(size)
        values.append(torch.rand(sizes, generator=generator, dtype=value.dtype) + 0.5)
    return values, free


def compared(file: Path, batches: Sequence[int] = BATCHES) -> dict[str, Any]:
    """Run what `saved` wrote to *file* at each batch and compare with the exported program.

    Returns
    -------
    dict
        ``kernels`` (count), ``codes`` (digest of each kernel's source, as in the record of a lowering), ``configurations``
        (count), ``batches`` (largest relative difference by batch).
    """
    import torch
    from torch.utils import _pytree

    from neml2_build.stages.lower import load

    found = torch.load(file, weights_only=True)
    program = load(found["program"])
    with tempfile.TemporaryDirectory(prefix="neml2-build-") as folder:
        run = Run(found["code"], found["constants"], Path(folder))
        eager = program.module()
        template = program.example_inputs[0]
        _, spec = _pytree.tree_flatten(template)
        differences: dict[str, float] = {}
        for batch in batches:
            values, free = inputs_of(program, batch)
            expected = _pytree.tree_leaves(eager(*_pytree.tree_unflatten([one.clone() for one in values], spec)))
            got = run(values)
            assert len(expected) == len(got), f"{len(got)} outputs instead of {len(expected)}"
            worst = 0.0
            for one, other in zip(expected, got, strict=True):
                assert one.shape == other.shape and one.dtype == other.dtype, (one.shape, other.shape)
                assert torch.equal(torch.isnan(one), torch.isnan(other)), "NaN where the exported program has none, or none"
                difference = (torch.nan_to_num(one) - torch.nan_to_num(other)).abs() / (1 + torch.nan_to_num(one).abs())
                worst = max(worst, float(difference.max()) if difference.numel() else 0.0)
            differences[str(batch)] = worst
            if not free:
                break
        configurations = sum(len(kernel.configs) for kernel in run.kernels.values())
        codes = {name: digest(kernel.source) for name, kernel in run.kernels.items()}
        return {"kernels": len(run.kernels), "codes": codes, "configurations": configurations, "batches": differences}


def main(files: Sequence[str]) -> None:
    """Compare each of *files*; one JSON object a line."""
    import logging

    logging.disable(logging.WARNING)
    for file in files:
        out = io.StringIO()
        try:
            with contextlib.redirect_stdout(out):
                result = compared(Path(file))
        except Exception as error:
            last: BaseException = error
            while last.__cause__ is not None:
                last = last.__cause__
            result = {"error": f"{type(error).__name__}: {error}"[:400], "cause": f"{type(last).__name__}: {last}"[:400]}
        print(json.dumps({"file": Path(file).stem, **result}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
