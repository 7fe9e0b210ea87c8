"""Flows: bases in every tier and dtype, and optimizers that are protected by them."""

import tempfile
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

import curvlab
from curvlab.basis import MappedFile, PinnedHost
from curvlab.rows import tiers
from tests import pretend_device
from tests.pretend_device.flow import FLOWS, HERE, both, data, flow, random
from tests.small_problems import small


def memory(device, dtype, tier=None):
    n = 300
    extra = {} if tier is None else {"tier": tier}
    basis = curvlab.Basis(n, 8, dtype=dtype, device=device, **extra)
    basis.extend(random(5, n).to(device))
    gradient = random(n, seed=1).to(device)
    basis.project_out_(gradient)
    pieces = [random(100, seed=2).to(device), random(200, seed=3).to(device)]
    basis.project_out_(pieces)
    with tempfile.TemporaryDirectory() as folder:
        basis.save(Path(folder) / "basis.safetensors")
        again = curvlab.Basis.load(Path(folder) / "basis.safetensors", device=device)
    coefficients = again.coefficients(random(n, seed=4).to(device))
    condition = basis.orthogonality(recompute=True).condition
    return [gradient, *pieces, coefficients, condition]


for _dtype in (torch.float32, torch.float16, torch.int8, torch.float8_e5m2):
    FLOWS[f"basis of {str(_dtype)[6:]}"] = lambda dtype=_dtype: both(
        lambda device: memory(device, dtype)
    )


@flow
def basis_in_host_memory():
    return both(lambda device: memory(device, torch.float32, PinnedHost()))


@flow
def basis_in_host_memory_after_an_error_in_mid_stream():
    """Whoever stops between two pieces disturbs nobody: the next reading gets all of them."""

    def run(device):
        basis = curvlab.Basis(300, 8, device=device, tier=PinnedHost())
        basis.extend(random(5, 300).to(device))
        kept, tiers.PIECE_BYTES = tiers.PIECE_BYTES, 2 * 4 * basis.store.ld
        try:
            for index, _rows, _scales in basis.store.pieces():
                if index:
                    raise KeyboardInterrupt
        except KeyboardInterrupt:
            gradient = random(300, seed=1).to(device)
            basis.project_out_(gradient)
        finally:
            tiers.PIECE_BYTES = kept
        return [gradient]

    return both(run)


@flow
def basis_in_a_mapped_file():
    def run(device):
        with tempfile.TemporaryDirectory() as folder:
            return memory(device, torch.float32, MappedFile(folder))

    return both(run)


@flow
def protected_optimizer():
    def run(device):
        model = small(0).to(device)
        n = curvlab.parameter_count(model)
        basis = curvlab.Basis(n, 4, device=device)
        basis.extend(random(3, n).to(device))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
        curvlab.protect(optimizer, basis, model)
        inputs, targets = data(device)
        for step in range(3):
            if step == 1 and device.type != "cpu":
                pretend_device.reset()
            optimizer.zero_grad()
            cross_entropy(model(inputs), targets).backward()
            optimizer.step()
        return [curvlab.parameter_vector(model)]

    return both(run) | {"steps": 2}


class Calls(TorchDispatchMode):
    """Counts operations that a GPU would launch; one on a list of tensors counts once."""

    def __enter__(self):
        self.count = -len(HERE.kernels)
        return super().__enter__()

    def __exit__(self, *error):
        self.count += len(HERE.kernels)
        return super().__exit__(*error)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        self.count += not name.startswith(("empty", "new_empty", "detach", "lift_fresh", "slice"))
        self.count -= name in ("view", "split_with_sizes", "select", "unsqueeze", "as_strided")
        return function(*args, **(kwargs or {}))


@flow
def protected_optimizer_of_many_tensors():
    """Launches of a step beyond the optimizer's own, with 150 tensors."""
    extra, waits = [], 0

    def run(device):
        nonlocal waits
        parameters = [torch.nn.Parameter(torch.ones(5, device=device)) for _ in range(150)]
        for seed, parameter in enumerate(parameters):
            parameter.grad = random(5, seed=seed).to(device)
        optimizer = torch.optim.AdamW(parameters, lr=1e-3, foreach=True)
        optimizer.step()
        with Calls() as alone:
            optimizer.step()
        basis = curvlab.Basis(750, 4, device=device)
        basis.extend(random(2, 750).to(device))
        curvlab.protect(optimizer, basis)
        optimizer.step()
        if device.type != "cpu":
            pretend_device.reset()
        with Calls() as protected:
            optimizer.step()
        if device.type != "cpu":
            waits = sum(pretend_device.waits().values())
        extra.append(protected.count - alone.count)
        return [torch.cat([parameter.detach() for parameter in parameters])]

    return both(run) | {"extra": extra[-1], "waits": waits}
