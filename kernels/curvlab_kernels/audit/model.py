"""How many bytes a launch moves to and from memory, and how many are on their way at once.

Every tensor that a launch reads or writes is counted once per launch: what programs of one launch
share they read from the L2 cache after the first. Tests count the interpreter's accesses against
this model.
"""

from dataclasses import dataclass
from typing import Any

from curvlab_kernels._triton.launch import Launch

# Memory bandwidth in GB/s, SMs, and registers and threads of an SM: A100 80 GB, H100 SXM, B200.
BANDWIDTH = {80: 2039.0, 90: 3350.0, 100: 8000.0}
_REGISTERS, _THREADS = 65536, 2048
_SHARED = {80: 164 * 1024, 90: 228 * 1024, 100: 228 * 1024}


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of one launch by what they belong to."""

    basis: int = 0
    vectors: int = 0
    sums: int = 0

    def total(self) -> int:
        return self.basis + self.vectors + self.sums


def traffic(launch: Launch) -> Traffic:
    """Bytes moved by a recorded launch."""
    given = named(launch)
    if given.get("share"):
        return Traffic()  # a pass that is rarely needed, and else returns at once
    return _TRAFFIC[launch.kernel.__name__](given)


def named(launch: Launch) -> dict[str, Any]:
    """Every argument and constant of a launch by its name."""
    names = [name for name in launch.kernel.arg_names if name not in launch.constants]
    return dict(zip(names, launch.arguments, strict=True)) | launch.constants


def in_flight(launch: Launch, registers: int, shared: int, architecture: int) -> int:
    """Bytes of the basis that the resident programs of one SM can have asked for at once.

    Little's law asks for bandwidth times latency: about 11 KB per SM on an A100, 15 KB on an H100,
    40 KB on a B200 at 0.6 to 0.7 microseconds.
    """
    threads = 32 * launch.options["num_warps"]
    rounded = -(-registers // 8) * 8
    resident = min(_REGISTERS // (rounded * threads), _THREADS // threads)
    if shared:
        resident = min(resident, _SHARED[architecture] // (shared + 1024))
    constants = launch.constants
    if "ROWS" not in constants:
        return 0
    rows = launch.arguments[0]
    tile = min(constants["ROWS"], rows.shape[0]) * constants["BLOCK"] * rows.element_size()
    return int(resident * tile)


def _basis(given: dict[str, Any]) -> int:
    rows, n = given["rows"], given["n"]
    m = rows.shape[0]
    scales = m * -(-n // 64) * 4 if given.get("SCALED", False) else 0
    return int(m * n * rows.element_size() + scales)


def _bytes(tensor: Any) -> int:
    return int(tensor.numel()) * int(tensor.element_size())


def _partials(given: dict[str, Any]) -> Traffic:
    # A Gram matrix takes the rows themselves for vectors.
    other = given["vectors"] is not given["rows"]
    vectors = other * given["count"] * given["n"] * given["vectors"].element_size()
    return Traffic(_basis(given), vectors, _bytes(given["partials"]))


def _apply(given: dict[str, Any]) -> Traffic:
    passes = 1 if given["MIX"] else 2
    vectors = passes * given["count"] * given["n"] * given["vectors"].element_size()
    sums = _bytes(given["coefficients"])
    sums += _bytes(given["squares"]) if given["SQUARES"] else 0
    return Traffic(_basis(given), vectors, sums)


def _element(given: dict[str, Any]) -> int:
    return int(given["ELEMENT"].primitive_bitwidth) // 8


def _list_partials(given: dict[str, Any]) -> Traffic:
    vectors = (2 if given["DECAY"] else 1) * given["n"] * _element(given)
    return Traffic(_basis(given), vectors, _bytes(given["partials"]))


def _list_apply(given: dict[str, Any]) -> Traffic:
    return Traffic(_basis(given), 2 * given["n"] * _element(given), _bytes(given["coefficients"]))


def _sgd(given: dict[str, Any]) -> Traffic:
    passes = 5 if given["LISTS"] == 3 else 3
    return Traffic(
        _basis(given), passes * given["n"] * _element(given), _bytes(given["coefficients"])
    )


def _middle(given: dict[str, Any]) -> Traffic:
    return Traffic(_basis(given), 2 * _bytes(given["vector"]), _bytes(given["partials"]))


def _sum(given: dict[str, Any]) -> Traffic:
    return Traffic(sums=_bytes(given["partials"]) + _bytes(given["sums"]))


def _squares(given: dict[str, Any]) -> Traffic:
    vectors = given["count"] * given["n"] * given["vectors"].element_size()
    return Traffic(vectors=vectors, sums=_bytes(given["partials"]))


def _scale(given: dict[str, Any]) -> Traffic:
    return Traffic(vectors=2 * _bytes(given["source"]), sums=_bytes(given["norms"]))


def _normalise(given: dict[str, Any]) -> Traffic:
    return Traffic(vectors=2 * _bytes(given["vector"]))


def _quantise(given: dict[str, Any]) -> Traffic:
    stored = _bytes(given["rows"]) + _bytes(given["scales"])
    return Traffic(stored, _bytes(given["vectors"]))


def _dequantise(given: dict[str, Any]) -> Traffic:
    return Traffic(_basis(given | {"SCALED": True}), _bytes(given["values"]))


_TRAFFIC = {
    "partials_kernel": _partials,
    "apply_kernel": _apply,
    "list_partials_kernel": _list_partials,
    "list_apply_kernel": _list_apply,
    "sgd_kernel": _sgd,
    "middle_kernel": _middle,
    "sum_kernel": _sum,
    "squares_kernel": _squares,
    "scale_kernel": _scale,
    "normalise_kernel": _normalise,
    "quantise_kernel": _quantise,
    "dequantise_kernel": _dequantise,
}
