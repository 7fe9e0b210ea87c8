"""Every test runs on pinned threads and with uninitialised memory poisoned."""

import signal

import pytest
import torch
from torch.utils._device import _device_constructors

THREADS = 1  # tensors are tiny here: a second thread costs more than it brings
# torch remembers which functions `with torch.device(...)` covers when it first needs to know: let
# that be before torch.empty is replaced below, or the context would no longer cover it.
_device_constructors()


# A shell starts what it puts in the background with Ctrl-C ignored, and processes inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def pinned_threads():
    torch.set_num_threads(THREADS)


@pytest.fixture(autouse=True)
def poisoned_empty(monkeypatch):
    """``torch.empty`` returns NaN (or the extreme integer), so reading it before writing shows."""

    def poison(make):
        def poisoned(*args, **kwargs):
            tensor = make(*args, **kwargs)
            if tensor.device.type != "meta":
                with torch.no_grad():
                    if tensor.is_floating_point() or tensor.is_complex():
                        tensor.fill_(float("nan"))
                    elif tensor.dtype in (torch.int8, torch.int16, torch.int32, torch.int64):
                        tensor.fill_(torch.iinfo(tensor.dtype).min)
            return tensor

        return poisoned

    monkeypatch.setattr(torch, "empty", poison(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poison(torch.empty_like))


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


@pytest.fixture(scope="module")
def wanted(request):
    """The parameter ``name`` of every selected test of the file, which may share one process."""
    return [
        item.callspec.params["name"]
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    ]


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
