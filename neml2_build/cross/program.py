"""An exported program moved to a GPU that is not there.

On a machine with a GPU ``torch.export.passes.move_to_device_pass`` does this. Without one a tensor cannot be moved, so each
becomes a fake tensor on ``cuda:0`` that keeps its real bytes on the CPU beside it: constants end up in the library by these
bytes, and whatever asks for the tensor's values is answered from them (`neml2_build.cross.machine`).
"""

from __future__ import annotations

from typing import Any

#: The batch that block sizes are planned for, with and without a GPU. The sample's, which is 2 as a rule, gives blocks of two
#: threads.
POINTS = 65536

#: Attribute of a fake tensor that holds its real bytes, on the CPU.
REAL = "_neml2_build_real"


def stand_in(tensor: Any, mode: Any, device: Any) -> Any:
    """A fake tensor on *device* with the bytes of *tensor* beside it."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensor

    fake = FakeTensor(mode, tensor.detach().to("meta"), torch.device(device))
    setattr(fake, REAL, tensor.detach())
    return fake


def real(tensor: Any) -> Any:
    """The real bytes of a stand-in; None of any other tensor."""
    return getattr(tensor, REAL, None)


def move(program: Any, device: str = "cuda:0") -> Any:
    """Move *program* (changed) to *device*, as ``move_to_device_pass`` (``torch/export/passes/__init__.py``) would.

    Its free sizes are planned for `POINTS`, which changes no guard: what sizes are allowed stays as exported.

    Raises
    ------
    ValueError
        For a program without a tensor.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.utils import _pytree

    nodes = [node for module in program.graph_module.modules() for node in getattr(getattr(module, "graph", None), "nodes", ())]
    values = [value for node in nodes for value in _pytree.tree_leaves(node.meta.get("val")) if isinstance(value, FakeTensor)]
    if not values:
        raise ValueError("the graph computes with no tensor")
    mode = values[0].fake_mode

    def stand(tensor: Any) -> Any:
        return stand_in(tensor, mode, device)

    for name, value in list(program.state_dict.items()):
        program._state_dict[name] = stand(value)
    for name, value in list(program.constants.items()):
        if isinstance(value, torch.Tensor):
            program._constants[name] = stand(value)
    if program.example_inputs is not None:
        program._example_inputs = _pytree.tree_map_only(torch.Tensor, stand, program.example_inputs)
    for node in nodes:
        if node.kwargs.get("device") is not None:
            node.kwargs = {**node.kwargs, "device": torch.device(device)}
        if node.op == "call_function" and node.target is torch.ops.aten.to.device:
            node.args = (node.args[0], torch.device(device), *node.args[2:])
        if "val" in node.meta:
            with mode:
                node.meta["val"] = _pytree.tree_map_only(torch.Tensor, lambda value: value.to(device), node.meta["val"])
    plan(program)
    return program


def plan(program: Any) -> None:
    """Have free sizes, and what is computed of them (a loaded program has ``6*s33`` beside ``s33``), planned for `POINTS`."""
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.utils import _pytree

    values = (value for node in program.graph.nodes for value in _pytree.tree_leaves(node.meta.get("val")))
    sizes = next((value.fake_mode.shape_env for value in values if isinstance(value, FakeTensor)), None)
    if sizes is None:
        return
    hints, ranges = sizes.backed_var_to_val, sizes.var_to_range
    for symbol in hints:
        if symbol in ranges and ranges[symbol].upper >= POINTS:
            hints[symbol] = type(hints[symbol])(POINTS)
    for expression in hints:
        if expression not in ranges:
            hints[expression] = type(hints[expression])(expression.subs({one: hints[one] for one in expression.free_symbols}))
