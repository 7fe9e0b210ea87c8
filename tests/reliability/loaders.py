"""Every reader of files, given damaged ones: an error that names the file, or the right data.

Bytes are flipped, cut out, doubled and overwritten. Where a checksum would see that, facts and
tensors are changed and the checksum is made right again, as another program could: such a file may
hold other numbers, but what it holds must have been looked at before it is used.
"""

import copy
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from curvlab import LayerBases, layer_bases
from curvlab.basis import Basis
from curvlab.cli.load import load_weights
from curvlab.cli.parser import UsageError
from curvlab.distributed import Shards, join
from curvlab.distributed.operators import Sharded
from curvlab.eigen import Checkpoint, Density, Eigenpairs, Room, lanczos
from curvlab.learners import SGDDagger
from curvlab.nets import mlp
from curvlab.operators import Dense
from curvlab.probe import OperatorError
from curvlab.storage import StorageError, load_tensors, read_manifest, save_tensors
from curvlab.tasks import DataError
from curvlab.training import Run, Schedule, learn
from experiments.store import Store, StoreError, make_result
from tests.small_problems import make_tasks
from tests.test_eigen_resume import COMPUTATIONS, matrix
from tests.test_experiments_command import TINY
from tests.test_readers_hostile import FORMS

CLEAN = (StorageError, DataError, StoreError, UsageError)
STRANGE = [None, True, -1, 0, 0.5, 1e400, 10**30, "", "x", [], [[]], {}, {"a": 1}, [1, "x"]]


@dataclass(frozen=True)
class Reader:
    """One kind of file.

    Attributes:
        make: Writes a good one below a folder; returns the path whose bytes are damaged.
        read: What the reader gives for it, in a form that can be compared.
        checked: Whether the format has a checksum: damage may then never give other data.
        resumes: Whether reading is going on with a computation, where a file that fits its
            arguments is used as it is.
    """

    make: Callable[[Path], Path]
    read: Callable[[Path], Any]
    checked: bool = True
    resumes: bool = False


def _pairs() -> Eigenpairs:
    return lanczos(Dense(matrix()), 4, tol=1e-6)


def _fields(thing: Any, *names: str) -> list[Any]:
    found = [getattr(thing, name) for name in names]
    return [one.tolist() if isinstance(one, torch.Tensor) else one for one in found]


def _run(path: Path) -> Path:
    [run] = learn(
        mlp((6, 8, 3), seed=1), make_tasks(1, train=20), SGDDagger(k=2, samples=10),
        Schedule(0.1, epochs=1), seeds=1,
    )  # fmt: skip
    return run.save(path / "run.safetensors")


def _learn(path: Path) -> str:
    [run] = learn(
        mlp((6, 8, 3), seed=1), make_tasks(2, train=20), SGDDagger(k=2, samples=10),
        Schedule(0.1, epochs=1), seeds=1, checkpoint=path,
    )  # fmt: skip
    return str(run.snapshots.tolist())


def _made_by(read: Callable[[Path], Any]) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        path = folder / "state.safetensors"
        read(path)
        return path

    return make


def _solve(path: Path) -> Any:
    keeping = Checkpoint(path, every=5)
    found = lanczos(Dense(matrix()), 3, tol=1e-6, room=Room(rows=18), dense=False,
                    checkpoint=keeping)  # fmt: skip
    return _fields(found, "values", "residuals")


def _computed(name: str) -> Callable[[Path], Any]:
    def read(path: Path) -> str:
        return repr(COMPUTATIONS[name](Dense(matrix()), checkpoint=path))

    return read


def _basis(folder: Path) -> Path:
    basis = Basis(60, 6)
    basis.extend(_pairs().vectors.float(), task="a", values=[1.0] * 4)
    return basis.save(folder / "basis.safetensors")


def _layer_bases(folder: Path) -> Path:
    model, inputs = (
        mlp((4, 5, 2), seed=3),
        torch.randn(20, 4, generator=torch.Generator().manual_seed(0)),
    )
    return layer_bases(model, inputs, energy=0.9).save(folder / "bases.safetensors")


def _spans(path: Path) -> Any:
    found = LayerBases.load(path).layers
    return [(name, None if b.into is None else b.into.rows().tolist()) for name, b in found.items()]


def _shards(folder: Path) -> Path:
    with join():
        lanczos(Sharded(Dense(matrix())), 3).save(folder / "shards")
    return next((folder / "shards").rglob("shard-*"))


def _sharded(path: Path) -> Any:
    with join():
        folder = path.parent.parent
        found = Eigenpairs.load(folder, space=Shards.saved(folder))
        return _fields(found, "values", "vectors")


def _current(folder: Path) -> Path:
    return _shards(folder).parent.parent / "current.json"


def _line(folder: Path) -> Path:
    result = make_result("tab:x", "demo", 1, TINY, {"x": 1.0}, 1.0, "1", "made")
    Store(folder).append([result, result])
    return Store(folder).file


def _weights(folder: Path) -> Path:
    from safetensors.torch import save_file

    save_file(mlp((4, 5, 2), seed=3).state_dict(), folder / "weights.safetensors")
    return folder / "weights.safetensors"


def _loaded_weights(path: Path) -> Any:
    model = mlp((4, 5, 2), seed=0)
    load_weights(model, path)
    return [p.tolist() for p in model.parameters()]


def _data(form: str) -> Reader:
    make, read = FORMS[form]

    def images(path: Path) -> Any:
        folder = path.parent.parent if path.name.startswith("data_batch") else path.parent
        found = read(folder)
        return _fields(found, "train_images", "train_labels", "test_images", "test_labels")

    return Reader(make, images, checked=form in ("idx.gz", "npz", "tar.gz"))


READERS: dict[str, Reader] = {
    "eigenpairs": Reader(
        lambda folder: _pairs().save(folder / "pairs.safetensors"),
        lambda path: _fields(Eigenpairs.load(path), "values", "vectors", "reason"),
    ),
    "density": Reader(
        lambda folder: COMPUTATIONS["density"](Dense(matrix())).save(folder / "d.safetensors"),
        lambda path: _fields(Density.load(path), "nodes", "weights", "n"),
    ),
    "basis": Reader(_basis, lambda path: Basis.load(path).rows().tolist()),
    "layer bases": Reader(_layer_bases, _spans),
    "run": Reader(_run, lambda path: _fields(Run.load(path), "snapshots", "tasks", "seed")),
    "shards": Reader(_shards, _sharded),
    "shards' index": Reader(_current, lambda path: _sharded(path.parent / "state" / "file")),
    "eigensolve's checkpoint": Reader(_made_by(_solve), _solve, resumes=True),
    **{
        f"{name}'s checkpoint": Reader(_made_by(_computed(name)), _computed(name), resumes=True)
        for name in ("density", "trace", "diagonal", "power", "solve")
    },
    "learn's checkpoint": Reader(_made_by(_learn), _learn, resumes=True),
    "results.jsonl": Reader(
        _line, lambda path: [r.metrics for r in Store(path.parent).results()], checked=False
    ),
    "weights": Reader(_weights, _loaded_weights, checked=False),
    **{f"data, {form}": _data(form) for form in FORMS},
}


def damaged(content: bytes, draw: random.Random) -> bytes:
    """Other bytes, made in one of five ways; two of three near an end, where sizes are."""
    changed, edge = bytearray(content), min(300, len(content))
    near = draw.randrange(edge)
    at = draw.choice([draw.randrange(len(content)), near, len(content) - 1 - near])
    how, length = draw.randrange(5), draw.randrange(1, 40)
    if how == 0:
        changed[at] ^= 1 << draw.randrange(8)
    elif how == 1:
        del changed[at : at + length]
    elif how == 2:
        changed[at:at] = changed[at : at + length]
    elif how == 3:
        size = draw.choice([2, 4, 8])
        value = draw.choice([0, 1, 2**15, 2**31 - 1, 2**32 - 1, 2**63 - 1]) % 256**size
        changed[at : at + size] = value.to_bytes(size, draw.choice(["little", "big"]))
    else:
        del changed[at:]
    return bytes(changed)


def altered(path: Path) -> Iterator[Callable[[], None]]:
    """Ways to write the file again with one fact or tensor changed, and a right checksum."""
    if path.suffix == ".json":
        whole = json.loads(path.read_text())

        def rewrite(facts: Any) -> None:
            path.write_text(json.dumps(facts))

        for place in _places(whole):
            for value in STRANGE:
                yield lambda v=value, p=place: rewrite(_with(whole, p, v))
        return
    try:
        manifest = read_manifest(path)
    except StorageError:
        return  # not a file of ours
    tensors = load_tensors(path, manifest["kind"])[0]

    def write(facts: dict[str, Any], stored: dict[str, torch.Tensor]) -> None:
        save_tensors(path, manifest["kind"], stored, facts)

    for place in _places(manifest):
        for value in STRANGE:
            yield lambda v=value, p=place: write(_with(manifest, p, v), tensors)
    for name, tensor in tensors.items():
        others = [tensor[:0], tensor[None], tensor.reshape(-1), tensor.to(torch.int32)]
        for other in others:
            yield lambda n=name, o=other: write(manifest, {**tensors, n: o.contiguous().clone()})
        yield lambda n=name: write(manifest, {k: t for k, t in tensors.items() if k != n})
        if tensor.is_floating_point() and tensor.numel():
            holed = tensor.clone()
            holed.view(-1)[-1] = float("nan")
            yield lambda n=name, o=holed: write(manifest, {**tensors, n: o})


def _places(facts: Any, depth: int = 3) -> Iterator[tuple[Any, ...]]:
    items: Any = facts.items() if isinstance(facts, dict) else enumerate(facts)
    for key, value in list(items)[: 12 if isinstance(facts, list) else None]:
        yield (key,)
        if depth and isinstance(value, dict | list):
            yield from ((key, *rest) for rest in _places(value, depth - 1))


def _with(facts: Any, place: tuple[Any, ...], value: Any) -> Any:
    changed = copy.deepcopy(facts)
    target = changed
    for key in place[:-1]:
        target = target[key]
    target[place[-1]] = value
    return changed


def fuzz(reader: Reader, folder: Path, mutants: int, seed: int = 0) -> Counter[str]:
    """What ``mutants`` damaged files and as many altered ones came to, counted."""
    path = reader.make(folder)
    good = path.read_bytes()
    wanted, found, draw = reader.read(path), Counter[str](), random.Random(seed)
    good = path.read_bytes() if reader.resumes else good
    for _ in range(mutants):
        path.write_bytes(damaged(good, draw))
        found[_outcome(reader, path, wanted if reader.checked else None)] += 1
    path.write_bytes(good)
    ways = list(altered(path))
    for write in draw.sample(ways, min(mutants, len(ways))):
        path.write_bytes(good)
        write()
        found[_outcome(reader, path, None)] += 1
    return found


def _outcome(reader: Reader, path: Path, wanted: Any) -> str:
    try:
        got = reader.read(path)
    except CLEAN as error:
        # a folder of shards is named as a whole, and a missing file by what is there in its place
        named = any(part in str(error) for part in (*path.parts[-3:], "lacks"))
        return "said" if named else f"said without a name: {error}"
    except (ValueError, OperatorError) as error:
        # it is another computation's, or the computation itself finds its state contradictory
        known = reader.resumes and wanted is None and isinstance(error, OperatorError)
        known = known or "is a checkpoint of another" in str(error)
        return "said" if known else f"raw error {error!r}"
    except BaseException as error:
        return f"raw error {error!r}"
    return "right" if wanted is None or got == wanted else "wrong"
