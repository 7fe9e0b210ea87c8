"""The arguments of each verb. Nothing here imports torch: ``--help`` must be quick."""

import re
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable

CURVATURES = ("hessian", "ggn", "fisher", "empirical-fisher", "functional")
DTYPES = ("float32", "float64")
ENGINES = (
    "auto", "measure", "retained", "rebuilt", "blockwise", "linearised", "compiled", "mlp",
)  # fmt: skip
SUFFIXES = (".png", ".svg", ".pdf")
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def eig(parser: ArgumentParser) -> None:
    _model(parser)
    number = parser.add_mutually_exclusive_group()
    number.add_argument("--k", type=whole(1), default=10, help="how many pairs (10)")
    number.add_argument(
        "--above",
        type=float,
        metavar="T",
        help="all eigenvalues beyond T, for example 2 / lr, in place of a number of pairs",
    )
    _search(parser)
    parser.add_argument(
        "--max-products",
        type=whole(2),
        metavar="N",
        help="most products in one run (1000, or 50 for each pair)",
    )
    parser.add_argument("--deflate", metavar="FILE", help="leave out a saved basis or eigenpairs")
    _output(parser, "eig.safetensors")


def density(parser: ArgumentParser) -> None:
    _model(parser)
    parser.add_argument("--probes", type=whole(1), default=8, help="random vectors (8)")
    parser.add_argument("--steps", type=whole(1), default=60, help="products with each (60)")
    _seed(parser)
    parser.add_argument(
        "--log", action="store_true", help="picture over the logarithm of the magnitude"
    )
    _output(parser, "density.safetensors")


def trace(parser: ArgumentParser) -> None:
    _model(parser)
    parser.add_argument("--probes", type=whole(1), default=48, help="products (48)")
    _seed(parser)
    parser.add_argument(
        "--partial", default="trace.partial", help="file that Ctrl-C leaves (trace.partial)"
    )


def layers(parser: ArgumentParser) -> None:
    _model(parser)
    parser.add_argument("--k", type=whole(1), default=3, help="pairs per layer (3)")
    _search(parser)
    _pictures(parser)


def compare(parser: ArgumentParser) -> None:
    parser.add_argument("first", metavar="FIRST", help="a saved basis or eigenpairs")
    parser.add_argument("second", metavar="SECOND", help="another, of the same parameters")
    _pictures(parser)


def plot(parser: ArgumentParser) -> None:
    parser.add_argument("files", metavar="FILE", nargs="+", help="eigenpairs, density or runs")
    _pictures(parser, required=True)


def doctor(parser: ArgumentParser) -> None:
    _model(parser)


def plan(parser: ArgumentParser) -> None:
    _model(parser)
    parser.add_argument(
        "--k", type=whole(0), default=10, help="how many pairs (10); 0 plans one product"
    )
    _tolerance(parser)
    parser.add_argument(
        "--tasks", type=whole(1), default=1, help="tasks whose pairs the memory holds (1)"
    )
    parser.add_argument("--memory", type=size, help="bytes available, such as 8G (what is free)")
    parser.add_argument(
        "--counted",
        action="store_true",
        help="count operations on a model without weights, instead of measuring one batch",
    )
    parser.add_argument(
        "--machine",
        metavar="NAME",
        help="with --counted: a100, h100, cpu, ...; --device h100 means both",
    )
    parser.add_argument(
        "--ranks", type=whole(1), default=1, help="processes that share the work (1)"
    )
    parser.add_argument(
        "--bandwidth", type=size, help="bytes per second between ranks, such as 50G (the machine's)"
    )


def profile(parser: ArgumentParser) -> None:
    _model(parser)
    parser.add_argument(
        "--rows", type=whole(1), default=20, help="rows of the projected basis (20)"
    )
    parser.add_argument(
        "--energy", type=between(0.0, 1.0), default=0.99, help="share that layer bases hold (0.99)"
    )
    parser.add_argument(
        "--rounds", type=whole(1), default=5, help="how often each time is taken (5)"
    )


def bench_eig(parser: ArgumentParser) -> None:
    _model(parser)
    parser.add_argument("--k", type=whole(1), default=10, help="how many pairs (10)")
    parser.add_argument(
        "--tol", type=between(1e-12, 1.0), default=1e-3, help="true relative residual (1e-3)"
    )
    parser.add_argument(
        "--solver",
        action="append",
        type=factory,
        default=[],
        metavar="SPEC",
        help="file.py:function of (operator, k, tol) that returns values (k,) and vectors (k, n);"
        " may be given again",
    )
    parser.add_argument(
        "--rounds",
        type=whole(1),
        default=3,
        help="timed solves of each (3); from 2 on, short solves get more",
    )
    parser.add_argument("--only", nargs="+", default=[], help="only solvers whose names begin so")
    parser.add_argument(
        "--all", action="store_true", help="also solvers that take hundreds of products"
    )
    parser.add_argument(
        "--threads",
        nargs="+",
        type=threads,
        default=[],
        metavar="TORCH/BLAS",
        help="what every solver is tried with; its fastest counts (all/1, all/all, 1/1)",
    )
    parser.add_argument("--name", help="the problem's name in the table (what --model says)")
    parser.add_argument(
        "--out", default="leaderboard.jsonl", help="file that gets new lines (leaderboard.jsonl)"
    )
    _pictures(parser)


def bench_merge(parser: ArgumentParser) -> None:
    parser.add_argument("files", metavar="FILE", nargs="+", help="written by curvlab bench eig")
    parser.add_argument("--out", help="write the merged lines to this file")
    _pictures(parser)


def demo(parser: ArgumentParser) -> None:
    parser.add_argument("--out", default="demo", help="folder for files and pictures (demo)")
    _overwrite(parser)


def rerun(parser: ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="written by curvlab eig, density or demo")
    parser.add_argument(
        "--yes",
        action="store_true",
        help="run the code that the file names, if it is not our own",
    )
    _overwrite(parser)


def version(parser: ArgumentParser) -> None:
    """No arguments of its own."""
    del parser


def _model(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("model and data")
    spec = "module:function or file.py:function, called without arguments"
    group.add_argument("--model", required=True, type=factory, help=f"{spec}: an nn.Module")
    group.add_argument("--data", required=True, type=factory, help=f"{spec}: batches or a loader")
    group.add_argument("--checkpoint", metavar="FILE", help="its weights: a .safetensors file")
    group.add_argument(
        "--loss",
        default="cross_entropy",
        help="name in torch.nn.functional, file.py:name of a function or an Objective, "
        "next_token or sequence of curvlab.losses, or own for output.loss (cross_entropy)",
    )
    group.add_argument(
        "--count",
        type=factory,
        metavar="SPEC",
        help="file.py:function of a batch, returns what its mean divides by (its samples)",
    )
    group.add_argument(
        "--reduction", choices=("mean", "sum"), help="how the loss adds up samples (found out)"
    )
    group.add_argument(
        "--chunk",
        type=chunk,
        metavar="N",
        help="samples at a time; batch: never cut a batch, for coupled samples (by the budget)",
    )
    group.add_argument(
        "--curvature", choices=CURVATURES, default="hessian", help="which matrix (hessian)"
    )
    group.add_argument(
        "--select",
        action="append",
        metavar="PATTERN",
        help="only parameters with such names (all); may be given twice",
    )
    group.add_argument("--samples", type=whole(1), metavar="N", help="only the first N samples")
    group.add_argument(
        "--mode",
        action="append",
        choices=("eval", "frozen-masks", "batch-statistics"),
        help="eval turns dropout and batch statistics off; frozen-masks repeats the same random "
        "numbers in every product; batch-statistics keeps BatchNorm as in training; may be given "
        "twice (none: what depends on such a choice is refused)",
    )
    group.add_argument("--dtype", choices=DTYPES, help="what to compute in (the parameters' own)")
    group.add_argument(
        "--precision", choices=("exact", "tf32", "bfloat16"), default="exact",
        help="of matrix products; all but exact are faster and coarser (exact)",
    )  # fmt: skip
    group.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1 (cpu)")
    group.add_argument(
        "--budget", type=size, help="bytes the operator may take, such as 4G (half of what is free)"
    )
    group.add_argument(
        "--engine", choices=ENGINES, default="auto", help="how products are computed (auto)"
    )
    group.add_argument(
        "--no-check",
        action="store_true",
        help="do not check the products; a straight-through estimator needs that",
    )


def _tolerance(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--tol", type=between(0.0, 1.0), default=1e-3, help="relative residual of each pair (1e-3)"
    )


def _seed(parser: ArgumentParser) -> None:
    parser.add_argument("--seed", type=whole(0), default=0, help="seed of the random vectors (0)")


def _search(parser: ArgumentParser) -> None:
    _tolerance(parser)
    parser.add_argument(
        "--which",
        choices=("LM", "LA", "SA", "both"),
        default="LM",
        help="largest magnitude (LM, the default), largest, smallest, or half from both ends",
    )
    _seed(parser)


def _output(parser: ArgumentParser, name: str) -> None:
    parser.add_argument("--out", default=name, help=f"result file ({name})")
    _overwrite(parser)
    _pictures(parser)


def _overwrite(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="replace a result file of another model, request or kind",
    )


def _pictures(parser: ArgumentParser, required: bool = False) -> None:
    parser.add_argument(
        "--picture",
        nargs="+",
        type=picture,
        default=[],
        required=required,
        metavar="FILE",
        help="PNG, SVG or PDF by suffix; several are written",
    )


def whole(least: int) -> Callable[[str], int]:
    """A whole number of at least ``least``."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise ArgumentTypeError(f"a whole number of at least {least} is needed; got {text!r}")
        return value

    return parse


def between(low: float, high: float) -> Callable[[str], float]:
    """A number with ``low <= number < high``."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not low <= value < high:
            raise ArgumentTypeError(f"a number from {low:g} to below {high:g}; got {text!r}")
        return value

    return parse


def threads(text: str) -> tuple[int, int]:
    """Threads of torch and of the BLAS: ``2/1``."""
    torch_threads, _, blas = text.partition("/")
    try:
        return whole(1)(torch_threads), whole(1)(blas)
    except ArgumentTypeError as error:
        raise ArgumentTypeError(
            f"two whole numbers such as 2/1 are needed; got {text!r}"
        ) from error


def size(text: str) -> int:
    """Bytes: ``500M``, ``8G``, ``1.5e9``."""
    match = re.fullmatch(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*([KMGT]?)(?:B|iB)?\s*", text, re.I)
    try:
        value = float(match[1]) * _UNITS[match[2].upper()] if match else 0.0
    except ValueError:
        value = 0.0
    if not 1.0 <= value < 1e18:
        raise ArgumentTypeError(f"a number of bytes such as 500M or 8G is needed; got {text!r}")
    return int(value)


def chunk(text: str) -> int | str:
    """A number of samples, or ``batch``."""
    return text if text == "batch" else whole(1)(text)


def factory(text: str) -> str:
    """``module:function`` or ``file.py:function``; a name may have dots."""
    place, colon, name = text.rpartition(":")
    if not colon or not place.strip() or not all(part.isidentifier() for part in name.split(".")):
        raise ArgumentTypeError(f"module:function or file.py:function is needed; got {text!r}")
    return text


def picture(text: str) -> str:
    """A file name with a known suffix."""
    if not text.lower().endswith(SUFFIXES):
        raise ArgumentTypeError(f"a picture ends in {', '.join(SUFFIXES)}; got {text!r}")
    return text
