"""Whether two compiled trees are the same thing: file names, metadata, and the numbers that the loaded models give.

Times are worth nothing if the results differ. `trees` compares names and ``metadata.json``; this file run as a program loads
pairs of models the way their users do and evaluates both on one input.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def trees(ours: Path, other: Path) -> list[str]:
    """What differs between two artifact folders in file names and metadata; empty if nothing does."""
    mine = {path.relative_to(ours).as_posix() for path in ours.rglob("*") if path.is_file()}
    theirs = {path.relative_to(other).as_posix() for path in other.rglob("*") if path.is_file()}
    found = [f"only ours has {name}" for name in sorted(mine - theirs)]
    found += [f"only the other has {name}" for name in sorted(theirs - mine)]
    if "metadata.json" in mine & theirs and not same_json(ours / "metadata.json", other / "metadata.json"):
        found.append("metadata.json differs")
    return found


def same_json(one: Path, other: Path) -> bool:
    return json.loads(one.read_bytes()) == json.loads(other.read_bytes())


def numbers(pairs: Sequence[tuple[str, Path, Path]], env: Mapping[str, str], cwd: Path) -> dict[str, Any]:
    """Evaluate pairs of models, given as (name of the model, our stub, the other stub), on one input each, in a new process.

    Returns
    -------
    dict
        ``models``: how many gave numbers; ``worst``: largest difference relative to the largest number; ``bitwise``: how many
        agree to the last bit; ``odd``: what could not be evaluated, by model, with both sides' message.
    """
    request = json.dumps([[name, str(ours), str(other)] for name, ours, other in pairs])
    done = subprocess.run(
        [sys.executable, __file__], input=request, env=dict(env), cwd=cwd, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        return {"models": 0, "worst": float("inf"), "bitwise": 0, "odd": {"all": done.stderr[-400:]}}
    return json.loads(done.stdout.strip().splitlines()[-1])


def verdict(different: Mapping[str, list[str]], found: Mapping[str, Any], count: int) -> str:
    """What `trees` and `numbers` found, in one line."""
    problems = [f"{name}: {'; '.join(what)}" for name, what in different.items() if what]
    odd = found["odd"]
    disagree = [name for name, (ours, other) in odd.items() if ours != other] if "all" not in odd else ["all"]
    if problems or disagree or found["worst"] > 1e-10:
        return "DIFFERENT: " + "; ".join([*problems, *(f"{name}: {odd[name]}" for name in disagree)])[:300]
    same = f"equal: names and metadata of {count}; numbers of {found['models']} (worst {found['worst']:.1e}, "
    return f"{same}{found['bitwise']} to the last bit)" + (f"; {len(odd)} fail alike" if odd else "")


# -- the program ------------------------------------------------------------------------------------------------------


def _evaluate(stub: str, model: str) -> tuple[list[Any] | None, str]:
    """Results of the model on one input, or what it said."""
    import neml2
    import torch

    loaded: Any = neml2.load_model(stub, model)
    said = ""
    for scale in (1.0, 1e-2, 1e-4):
        generator = torch.Generator().manual_seed(1)
        values = []
        for name, kind in loaded.input_spec.items():
            sub = tuple(loaded.input_sub_batch.get(name, ()))
            drawn = (0.1 + 0.9 * torch.rand((2, *sub, *kind.BASE_SHAPE), generator=generator, dtype=torch.float64)) * scale
            values.append(kind(drawn, sub_batch_ndim=len(sub)))
        try:
            with torch.no_grad():
                made = loaded(*values)
        except Exception as error:  # a solver that does not converge on these numbers: the next ones
            said = type(error).__name__ + ": " + " ".join(str(error).split())[:120]
            continue
        many = made if isinstance(made, (tuple, list)) else (made,)
        return [getattr(one, "data", one) for one in many], ""
    return None, said


def _main() -> None:
    import torch

    torch.set_default_dtype(torch.float64)
    models = bitwise = 0
    worst = 0.0
    odd: dict[str, list[str]] = {}
    for model, ours, other in json.load(sys.stdin):
        mine, said = _evaluate(ours, model)
        theirs, also = _evaluate(other, model)
        if mine is None or theirs is None:
            odd[f"{Path(ours).stem}:{model}"] = [said, also]
            continue
        models += 1
        same = len(mine) == len(theirs)
        worst = worst if same else float("inf")
        for one, two in zip(mine, theirs, strict=False):
            equal = bool(torch.equal(one.nan_to_num(nan=1e300), two.nan_to_num(nan=1e300)))
            same = same and equal
            if not equal:
                largest = float(two.abs().max())
                worst = max(worst, float((one - two).abs().max()) / (largest or 1.0))
        bitwise += same
    print(json.dumps({"models": models, "worst": worst, "bitwise": bitwise, "odd": odd}))


if __name__ == "__main__":
    _main()
