"""A pretend GPU in host memory: torch's device ``pretend``, on which curvlab's flows are tested.

``device.cpp`` is compiled when it is first needed and kept for the next time. Kernels of
``curvlab_kernels`` are launched on it as on a GPU and executed from their compiled PTX.
"""

import ctypes
import functools
import hashlib
import shutil
import subprocess
import sys
import tempfile
import types
from collections import Counter
from pathlib import Path

import torch

SOURCE = Path(__file__).parent / "device.cpp"
NAME = "pretend"


def compiler() -> str | None:
    """A C++ compiler, if there is one."""
    return shutil.which("g++") or shutil.which("clang++")


def build() -> Path:
    """The library, compiled from the source unless that was done before."""
    tool = compiler()
    if tool is None:
        raise RuntimeError("the pretend device needs g++ or clang++ to be built")
    identity = SOURCE.read_bytes() + f"{torch.__version__} {sys.version} {tool}".encode()
    folder = (
        Path(tempfile.gettempdir()) / f"curvlab-pretend-{hashlib.sha256(identity).hexdigest()[:16]}"
    )
    library = folder / "device.so"
    if library.exists():
        return library
    folder.mkdir(mode=0o700, exist_ok=True)
    root = Path(torch.__file__).parent
    partial = folder / f"{id(library)}.so"
    flags = ["-O0", "-std=c++20", "-fPIC", "-shared", "-w", f"-D_GLIBCXX_USE_CXX11_ABI={abi()}"]
    headers = [f"-I{root}/include", f"-I{root}/include/torch/csrc/api/include"]
    libraries = [f"-L{root}/lib", "-ltorch", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{root}/lib"]
    command = [tool, *flags, *headers, str(SOURCE), "-o", str(partial), *libraries]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the pretend device did not compile:\n{done.stderr[-3000:]}")
    partial.rename(library)  # at once, in case two processes build it
    return library


def abi() -> int:
    return int(torch.compiled_with_cxx11_abi())


@functools.cache
def device() -> torch.device:
    """Load the device into this process, once and for good."""
    library = ctypes.CDLL(str(build()), mode=ctypes.RTLD_GLOBAL)
    library.pretend_counts.restype = ctypes.c_char_p
    module = types.ModuleType(f"torch.{NAME}")
    module._library = library
    module.is_available = module.is_initialized = lambda: True
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module._is_in_bad_fork = lambda: False
    module._lazy_init = lambda: None
    module.synchronize = lambda *_: None
    module.manual_seed = module.manual_seed_all = lambda _seed: None
    module.get_rng_state = lambda *_: torch.get_rng_state()
    module.set_rng_state = lambda *_: None
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, module)
    return torch.device(NAME, 0)


def reset() -> None:
    """Start counting from zero."""
    getattr(torch, NAME)._library.pretend_reset()


def _counts(of_waits: bool) -> Counter[str]:
    text = getattr(torch, NAME)._library.pretend_counts(int(of_waits)).decode()
    return Counter({line.split("\t")[0]: int(line.split("\t")[1]) for line in text.splitlines()})


def waits() -> Counter[str]:
    """What the host waited for since the last reset."""
    found = _counts(of_waits=True)
    found.pop("copy to the host, not waited for", None)
    return found


def launches() -> Counter[str]:
    """Operators of torch that were launched on the device; Triton's are not among them."""
    return _counts(of_waits=False)


def treat_as_gpu() -> None:
    """Let curvlab_kernels take the device for a GPU: it launches its Triton kernels there."""
    from curvlab_kernels import _triton, checks, ops

    choose, check = ops.backend, checks.check_basis

    def backend(place):
        kind = place if isinstance(place, str) else place.device.type
        return _triton if kind == NAME else choose(place)

    def check_basis(rows, factor, scales):
        if rows.device.type != NAME:
            check(rows, factor, scales)

    checks.check_basis = check_basis
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("curvlab"):
            if getattr(module, "backend", None) is choose:
                module.backend = backend
            if getattr(module, "check_basis", None) is check:
                module.check_basis = check_basis
