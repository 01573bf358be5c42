"""A ``libcuda.so`` to link with where there is no driver.

A library for a GPU needs the driver's library, which comes with the driver and not with any package (NVIDIA's own toolkit has a
stub of it for the same reason). The stub here has the functions that AOTInductor's code calls, each of which answers "no
device" (100, ``CUDA_ERROR_NO_DEVICE``); it only serves to link, and to load a library to see that its symbols resolve.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from neml2_build.digest import digest

#: Functions of the driver that libraries made by torch 2.12 call, and some that earlier and later ones do.
FUNCTIONS = (
    "cuCtxGetCurrent",
    "cuCtxSynchronize",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuFuncGetAttribute",
    "cuFuncSetAttribute",
    "cuGetErrorName",
    "cuGetErrorString",
    "cuInit",
    "cuLaunchKernel",
    "cuLaunchKernelEx",
    "cuModuleGetFunction",
    "cuModuleLoad",
    "cuModuleLoadData",
    "cuModuleUnload",
    "cuPointerGetAttribute",
    "cuStreamGetCaptureInfo",
    "cuTensorMapEncodeTiled",
)
SOURCE = "".join(f"int {name}(void) {{ return 100; }}\n" for name in FUNCTIONS)


def has_driver(compiler: str) -> bool:
    """Whether *compiler* finds a ``libcuda.so`` to link with."""
    said = subprocess.run([compiler, "-print-file-name=libcuda.so"], capture_output=True, text=True, check=False).stdout.strip()
    return Path(said).is_absolute() and Path(said).exists()


def stub(folder: Path, compiler: str) -> Path:
    """The folder below *folder* with the stub, made where it is missing; any number of processes may ask.

    Parameters
    ----------
    compiler
        A C++ compiler, which compiles C too.
    """
    place = folder / f"libcuda-{digest(SOURCE)[:8]}"
    library = place / "libcuda.so"
    if not library.exists():
        from tempfile import TemporaryDirectory

        place.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=place) as scratch:
            source = Path(scratch) / "libcuda.c"
            source.write_text(SOURCE)
            fresh = Path(scratch) / "libcuda.so"
            command = [compiler, "-x", "c", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(fresh), str(source)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"the stub of libcuda was not made: {done.stderr.strip()}")
            fresh.replace(library)
        (place / "libcuda.so.1").unlink(missing_ok=True)
        (place / "libcuda.so.1").symlink_to("libcuda.so")
    return place
