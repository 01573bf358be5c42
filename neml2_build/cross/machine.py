"""A machine that has the GPUs asked for, as far as torch and Triton can tell: one context manager, nothing left behind.

PyTorch says that AOTInductor compiles natively only. What keeps it from compiling for a GPU that is not there is where it
asks the device: which one it is, what it can do, how long a kernel takes. `pretended` answers the first two from `cards` and
the third by what is known without running (`binaries.best`). Each patch names the line that it stands for (torch 2.12.1,
Triton 3.7.1) and what breaks without it; without them torch raises, save where `_constants` says otherwise. Code generation
itself is torch's and Triton's own.

Not covered, because no graph of NEML2's has needed it: literal tensors of more than eight elements made inside a lowering
(``torch/_inductor/lowering.py``, ``tensor``), templates of ``max_autotune_gemm``, random numbers, control-flow subgraphs. These
end in an exception.
"""

from __future__ import annotations

import contextlib
import functools
import os
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from neml2_build.cross import binaries
from neml2_build.cross.cards import REGISTERS, WARP, Card, plain
from neml2_build.cross.program import real, stand_in
from neml2_build.digest import digest

#: Inductor options that the patches rely on.
OPTIONS = {
    # one pass, in which kernels are compiled in a block of their own (wrapper.py); else torch runs the graph to tune it
    "triton.autotune_at_compile_time": True,
    # the other launcher loads machine code into the driver without Triton's, which is the one that is replaced
    "use_static_triton_launcher": False,
    # kernels are compiled in this process, where the patches are
    "compile_threads": 1,
    # machine code lies in the library, under names that hold no folder
    "aot_inductor.embed_kernel_binary": True,
    # would time paddings of matrix products on the device (fx_passes/pad_mm.py)
    "shape_padding": False,
}
#: Options that mean "measure on the device", and what stands for them.
MEASURING = {
    "max_autotune": {"max_autotune_pointwise": True},
    "max_autotune_gemm": {},
    "coordinate_descent_tuning": {},
    "benchmark_combo_kernel": {},
}


@dataclass
class Machine:
    """The pretended machine.

    Attributes
    ----------
    cards
        Lowest first; kernels are made for the first, and their PTX assembled for the rest.
    archs
        As asked for: ``sm_90a`` where the card of ``sm_90`` is meant with what only it can do.
    toolkit
        Folder of CUDA's headers, libraries and programs.
    kernels
        What was compiled, in order.
    """

    cards: Sequence[Card]
    archs: Sequence[str]
    toolkit: Path
    kernels: list[binaries.Kernel] = field(default_factory=list)

    @property
    def card(self) -> Card:
        """The card that torch believes to have."""
        return self.cards[0]

    @property
    def base(self) -> str:
        """The architecture that Triton makes code for."""
        number = self.card.arch.removeprefix("sm_")
        return self.card.arch + ("a" if int(number) >= 90 else "")  # triton's sm_arch_from_capability

    @property
    def others(self) -> list[str]:
        """The architectures, as asked for, that are not the first card's."""
        return [arch for arch in self.archs if plain(arch) != self.card.arch]

    def properties(self) -> types.SimpleNamespace:
        """As ``torch.cuda.get_device_properties`` gives them."""
        card = self.card
        major, minor = card.capability
        return types.SimpleNamespace(
            name=card.name,
            major=major,
            minor=minor,
            warp_size=WARP,
            multi_processor_count=card.processors,
            regs_per_multiprocessor=REGISTERS,
            max_threads_per_multi_processor=card.threads,
            max_threads_per_block=1024,
            shared_memory_per_block=48 * 1024,
            shared_memory_per_block_optin=self.shared_block,
            shared_memory_per_multiprocessor=card.shared,
            L2_cache_size=card.l2,
            total_memory=card.memory,
            gcnArchName="",
            is_integrated=0,
            is_multi_gpu_board=0,
        )

    @functools.cached_property
    def tools(self) -> binaries.Tools:
        """Programs that make machine code."""
        return binaries.tools(self.toolkit)

    @property
    def shared_block(self) -> int:
        """Bytes of shared memory that a block may have on every card."""
        return min(card.shared_block for card in self.cards)


@contextlib.contextmanager
def pretended(machine: Machine, libraries: Path | None) -> Iterator[Machine]:
    """While open, torch and Triton have the GPU ``machine.card``.

    Parameters
    ----------
    libraries
        Folder with a ``libcuda.so`` to link with; None where the system has one.
    """
    with contextlib.ExitStack() as stack:
        patch = _Patch(stack)
        _device(patch, machine)
        _triton(patch, machine)
        _tuning(patch, machine)
        _constants(patch)
        _folding(patch)
        _scalars(patch)
        _places(patch, machine.toolkit, libraries)
        _forget_answers()
        stack.callback(_forget_answers)
        yield machine


class _Patch:
    """Sets attributes, entries and environment variables, and puts all of them back."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack

    def attribute(self, owner: Any, name: str, value: Any) -> None:
        """Set ``owner.name``; AttributeError where there is none, since a patch of nothing would go unnoticed."""
        stock = vars(owner)[name] if name in vars(owner) else getattr(owner, name)
        inherited = name not in vars(owner)
        setattr(owner, name, value)
        if inherited:
            self._stack.callback(delattr, owner, name)
        else:
            self._stack.callback(setattr, owner, name, stock)

    def entry(self, mapping: Any, name: str, value: Any) -> None:
        before = {name: mapping[name]} if name in mapping else {}
        mapping[name] = value

        def restore() -> None:
            mapping.pop(name, None)
            mapping.update(before)

        self._stack.callback(restore)

    def keep(self, mapping: Any, name: str) -> None:
        """Put the entry *name* back as it is now, whatever is done to it."""
        if name in mapping:
            self.entry(mapping, name, mapping[name])
        else:
            self._stack.callback(mapping.pop, name, None)

    def enter(self, manager: contextlib.AbstractContextManager[Any]) -> Any:
        return self._stack.enter_context(manager)


# -- the device -------------------------------------------------------------------------------------------------------


def _device(patch: _Patch, machine: Machine) -> None:
    import torch
    import torch._inductor.config as config
    from torch._dynamo.device_interface import CudaInterface, caching_worker_device_properties
    from torch._subclasses.fake_tensor import FakeTensorMode

    properties = machine.properties()
    # torch/_inductor/codegen/triton.py, raise_if_unavailable -> torch/utils/_triton.py, has_triton: without a device
    # inductor refuses the graph (TritonMissing).
    patch.attribute(torch.cuda, "is_available", lambda: True)
    # torch/cuda/__init__.py: each of these begins with _lazy_init(), which asks the driver: "Found no NVIDIA driver".
    # They are asked by guards, by the graph's partitioning and by fork_rng.
    patch.attribute(torch.cuda, "device_count", lambda: 1)
    patch.attribute(torch.cuda, "current_device", lambda: 0)
    patch.attribute(torch.cuda, "device", lambda device=None: contextlib.nullcontext())
    patch.attribute(torch.cuda, "get_device_properties", lambda device=None: properties)
    patch.attribute(torch.cuda, "get_device_capability", lambda device=None: machine.card.capability)
    patch.attribute(torch.cuda, "get_rng_state", lambda device="cuda": torch.zeros(16, dtype=torch.uint8))
    patch.attribute(torch.cuda, "set_rng_state", lambda state, device="cuda": None)
    patch.attribute(torch.cuda, "synchronize", lambda device=None: None)
    # torch/_dynamo/device_interface.py, class CudaInterface, copies the functions above when it is imported.
    patch.attribute(CudaInterface, "current_device", staticmethod(lambda: 0))
    patch.attribute(CudaInterface, "device_count", staticmethod(lambda: 1))
    patch.attribute(CudaInterface, "get_device_properties", staticmethod(lambda device=None: properties))
    patch.attribute(CudaInterface, "exchange_device", staticmethod(lambda device: 0))
    patch.attribute(CudaInterface, "maybe_exchange_device", staticmethod(lambda device: 0))
    patch.attribute(CudaInterface, "synchronize", staticmethod(lambda device=None: None))
    # the same file, class CudaInterface.Worker: where DeviceProperties.create (runtime/hints.py) reads from.
    patch.entry(caching_worker_device_properties, "cuda", [properties])
    # torch/_subclasses/fake_tensor.py, FakeTensorMode.avoid_device_init: with a device that is said to be there, a fake
    # tensor is made by way of a real one on it.
    patch.attribute(FakeTensorMode, "avoid_device_init", property(lambda mode: True))
    # torch/_inductor/codegen/cuda/cuda_env.py, get_cuda_arch: the compute capability in the package's metadata.
    patch.enter(config.patch({"cuda.arch": machine.card.arch.removeprefix("sm_")}))


def _triton(patch: _Patch, machine: Machine) -> None:
    """triton/runtime/driver.py, ``driver.active``: without a device "0 active drivers"; with one, kernels are loaded."""
    from triton import knobs, runtime
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.driver import CudaDriver

    number = int(machine.card.arch.removeprefix("sm_"))

    class Utils:
        """Stands for ``CudaUtils``, which compiles a C extension against libcuda."""

        @staticmethod
        def load_binary(name: str, kernel: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
            # module, function, registers, spilled registers, threads of a block: as the driver would say. inductor halves
            # the blocks of a reduction that uses many registers by this answer (_dynamic_scale_rblock).
            registers, spills = binaries.usage(machine.tools.cuobjdump, kernel)
            return 0, 0, registers, spills // 4, 1024

        @staticmethod
        def unload_module(module: int) -> None:
            """Nothing was loaded."""

        @staticmethod
        def get_device_properties(device: int) -> dict[str, int]:
            return {
                "max_shared_mem": machine.shared_block,
                "max_num_regs": REGISTERS,
                "multiprocessor_count": machine.card.processors,
                "warpSize": WARP,
            }

    class Launcher:
        def __init__(self, src: Any, metadata: Any) -> None:
            """Kernels are compiled, never launched."""

        def __call__(self, *args: Any, **kwargs: Any) -> None:
            raise RuntimeError("a kernel for a GPU that is not here cannot be run")

    class Driver(CudaDriver):
        def __init__(self) -> None:
            self.utils = Utils()
            self.launcher_cls = Launcher

        def get_current_target(self) -> Any:
            return GPUTarget("cuda", number, WARP)

        def get_current_device(self) -> int:
            return 0

        def set_current_device(self, device: int) -> None:
            del device

        def get_device_capability(self, device: int = 0) -> tuple[int, int]:
            del device
            return machine.card.capability

        def get_current_stream(self, device: int = 0) -> int:
            del device
            return 0

    patch.attribute(runtime.driver, "_active", Driver())
    # triton/backends/nvidia/compiler.py, make_cubin: line tables name the folder of inductor's cache.
    patch.keep(os.environ, "TRITON_DISABLE_LINE_INFO")  # which a knob that is set writes
    patch.attribute(knobs.compilation, "disable_line_info", True)
    # torch/_inductor/runtime/triton_heuristics.py, CachingAutotuner.__init__, sets this for good, to a folder that goes.
    patch.keep(os.environ, "TRITON_CACHE_DIR")
    # torch/_inductor/runtime/compile_tasks.py, _set_triton_ptxas_path, sets this for good, once a process: torch's wheel brings
    # a newer ptxas than Triton's, and their versions of PTX differ.
    ptxas = binaries.torch_ptxas()
    if "TRITON_PTXAS_PATH" not in os.environ and ptxas is not None:
        patch.entry(os.environ, "TRITON_PTXAS_PATH", ptxas)


# -- instead of measuring ---------------------------------------------------------------------------------------------


def _tuning(patch: _Patch, machine: Machine) -> None:
    """torch/_inductor/codegen/wrapper.py, ``PythonWrapperCodegen.generate_and_run_autotune_block``: defines the graph's
    kernels, then runs each of them on sample data, and saves the fastest candidate's machine code. The first run fails."""
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    def compile_only(self: Any) -> None:
        self.kernel_autotune_defs.splice("async_compile.wait(globals())\ndel async_compile\n")
        scope: dict[str, Any] = {}
        exec(self.kernel_autotune_defs.getvalue(), scope)
        for kernel in scope.values():
            if isinstance(kernel, CachingAutotuner):
                if not kernel.launchers:
                    kernel.precompile()
                _save(machine, kernel)

    patch.attribute(PythonWrapperCodegen, "generate_and_run_autotune_block", compile_only)


def _save(machine: Machine, kernel: Any) -> None:
    """Give inductor the machine code of the best candidate of *kernel*, for all architectures in one file."""
    candidates = []
    for launcher in kernel.launchers:
        asm, metadata = launcher.bin.asm, launcher.bin.metadata
        codes = binaries.assembled(machine.tools, asm["ptx"], machine.base, asm["cubin"], machine.others)
        uses = binaries.used(machine.tools, codes, machine.cards, metadata.shared, metadata.num_warps)
        candidates.append((launcher, codes, uses))
    launcher, codes, uses = candidates[binaries.best([uses for _, _, uses in candidates])]
    ptx = launcher.bin.asm["ptx"]
    launcher.bin.asm = {"ptx": ptx, "cubin": binaries.fat(machine.tools, ptx, machine.card.arch, codes)}
    kernel.save_gpu_kernel(stream="stream", launcher=launcher)
    machine.kernels.append(
        binaries.Kernel(
            name=kernel.inductor_meta["kernel_name"],
            code=digest(kernel.fn.src),
            config=str(launcher.config),
            candidates=len(candidates),
            warps=launcher.bin.metadata.num_warps,
            usage=uses,
        )
    )


# -- constants --------------------------------------------------------------------------------------------------------


def _constants(patch: _Patch) -> None:
    from importlib import import_module

    import torch
    from torch._inductor import ir, lowering
    from torch._subclasses.fake_tensor import FakeTensor

    graph: Any = import_module("torch._inductor.graph")

    lowered = graph.GraphLowering
    stock_get, stock_value, stock_same = lowered.get_attr, lowered.get_original_value_of_constant, graph.is_same_tensor

    class OnDevice(torch.Tensor):
        """A tensor on the CPU that says it is on the device: what writes constants into the library asks both."""

        is_cuda = property(lambda tensor: True)  # type: ignore[assignment]
        device = property(lambda tensor: torch.device("cuda", 0))  # type: ignore[assignment]

    # torch/_inductor/graph.py, GraphLowering.get_attr, reads small constants with .item() and .tolist(): a fake tensor has no
    # values ("Cannot copy out of meta tensor").
    def get_attr(self: Any, target: str, args: Any, kwargs: Any) -> Any:
        value = graph.getattr_recursive(self.module, target)
        bytes_of = real(value)
        if bytes_of is None:
            return stock_get(self, target, args, kwargs)
        if bytes_of.shape == ():
            return ir.Constant(value=bytes_of.item(), dtype=bytes_of.dtype, device=value.device)
        if self.can_inline_constant(bytes_of):
            return lowering.tensor(bytes_of.tolist(), dtype=bytes_of.dtype, device=value.device)
        return self.add_tensor_constant(value, target)

    # the same class: what is written into the library. The copy that torch keeps of a constant has lost its bytes.
    def get_original_value_of_constant(self: Any, name: str) -> Any:
        bytes_of = real(self.constants[name])
        return stock_value(self, name) if bytes_of is None else bytes_of.as_subclass(OnDevice)

    # torch/_inductor/utils.py, is_same_tensor: constants of one address are one. Fake tensors all have address 0, so that two
    # constants of the same shape would become one: wrong code, and the only place where that was found to be possible.
    def is_same_tensor(one: Any, other: Any) -> bool:
        if isinstance(one, FakeTensor) or isinstance(other, FakeTensor):
            return one is other
        return stock_same(one, other)

    patch.attribute(lowered, "get_attr", get_attr)
    patch.attribute(lowered, "get_original_value_of_constant", get_original_value_of_constant)
    patch.attribute(graph, "is_same_tensor", is_same_tensor)


def _folding(patch: _Patch) -> None:
    """torch/_inductor/fx_passes/joint_graph.py,
    ``UniformValueConstantFolder``: runs what makes a uniform tensor, on the device,
    and reads the value back ("Found no NVIDIA driver"). Here it runs on the CPU."""
    import torch
    from torch._inductor.fx_passes.joint_graph import UniformValueConstantFolder as Folder
    from torch.overrides import TorchFunctionMode

    stock_fetch, stock_deduce, stock_patterns = Folder.fetch_attr, Folder._deduce_value, Folder._add_peephole_patterns

    class OnCpu(TorchFunctionMode):
        """Tensors that are made while it is active are made on the CPU."""

        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = dict(kwargs or {})
            if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda":
                kwargs["device"] = torch.device("cpu")
            return function(*args, **kwargs)

    def fetch_attr(self: Any, target: str) -> Any:
        value = stock_fetch(self, target)
        bytes_of = real(value)
        return value if bytes_of is None else bytes_of

    def _deduce_value(self: Any, node: Any) -> Any:
        stock, device = node.kwargs, node.kwargs.get("device")
        if device is None or torch.device(device).type != "cuda":
            return stock_deduce(self, node)
        node.kwargs = {**stock, "device": torch.device("cpu")}
        try:
            return stock_deduce(self, node)
        finally:
            node.kwargs = stock

    def _add_peephole_patterns(self: Any) -> None:
        with OnCpu():
            stock_patterns(self)

    patch.attribute(Folder, "fetch_attr", fetch_attr)
    patch.attribute(Folder, "_deduce_value", _deduce_value)
    patch.attribute(Folder, "_add_peephole_patterns", _add_peephole_patterns)


def _scalars(patch: _Patch) -> None:
    """torch/_inductor/ir.py, ``ExternKernel.realize_input``: a number handed to an operator that is not inductor's (NEML2's
    ``neml2::opaque_pow``) becomes a tensor on the device ("Found no NVIDIA driver")."""
    import torch
    from torch._inductor import ir
    from torch._inductor.virtualized import V
    from torch.utils._python_dispatch import _disable_current_modes

    stock: Callable[..., Any] = ir.ExternKernel.__dict__["realize_input"].__func__

    def realize_input(cls: Any, node: Any) -> Any:
        device = node.get_device() if isinstance(node, ir.Constant) else None
        if device is None or device.type != "cuda":
            return stock(cls, node)
        with _disable_current_modes():
            number = torch.tensor(node.value, dtype=node.get_dtype())
            return V.graph.add_tensor_constant(stand_in(number, V.fake_mode, device))

    patch.attribute(ir.ExternKernel, "realize_input", classmethod(realize_input))


# -- places -----------------------------------------------------------------------------------------------------------


def _places(patch: _Patch, toolkit: Path, libraries: Path | None) -> None:
    from torch.utils import cpp_extension

    # torch/utils/cpp_extension.py, CUDA_HOME, is found when the module is imported; without it no header is ("cuda.h: No such
    # file").
    patch.attribute(cpp_extension, "CUDA_HOME", str(toolkit))
    patch.entry(os.environ, "CUDA_HOME", str(toolkit))
    # torch/_inductor/cpp_builder.py links with -lcuda, which comes with a driver ("cannot find -lcuda").
    if libraries is not None:
        before = os.environ.get("LIBRARY_PATH")
        patch.entry(os.environ, "LIBRARY_PATH", f"{libraries}:{before}" if before else str(libraries))


def _forget_answers() -> None:
    """Forget what torch remembers of the machine: the real answers on entering, the pretended ones on leaving."""
    import torch.utils._triton as triton_utils
    from torch._inductor.codecache import CacheBase
    from torch._inductor.codegen.cuda import cuda_env
    from torch._inductor.runtime import hints

    remembered = (
        (triton_utils, ("has_triton", "triton_backend", "triton_hash_with_backend", "_device_supports_tensor_descriptor")),
        (cuda_env, ("get_cuda_arch", "is_datacenter_blackwell_arch")),
        (CacheBase, ("get_system",)),
        (hints.DeviceProperties, ("create",)),
    )
    for owner, names in remembered:
        for name in names:
            forget = getattr(getattr(owner, name, None), "cache_clear", None)
            if forget is not None:
                forget()
