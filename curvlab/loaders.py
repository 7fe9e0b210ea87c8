"""DataLoaders that shuffle: the same samples in another order are the same data.

The loader of a training loop shuffles a data set, so that every pass gives other batches of the
same samples. A mean over samples does not depend on that. Such a loader is read in the data set's
own order, which is the same in every run. Refused is what gives other samples each time: drawing
with replacement, a short last batch that is dropped, and a shuffle of batches where it matters
which samples share one.
"""

import logging
from collections.abc import Sequence
from typing import Any

from torch.utils.data import BatchSampler, DataLoader
from torch.utils.data.sampler import RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from curvlab.refusals import Refusal, Trap

log = logging.getLogger("curvlab")

FREEZE = "or take one pass of it as the data set with curvlab.freeze(loader)"
AS_GIVEN = "as given"
IN_ORDER = "a shuffling loader, read in the data set's own order"
_SHUFFLERS = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


def in_order(loader: "DataLoader[Any]", *, together: bool) -> tuple["DataLoader[Any]", str]:
    """``loader``, or one that gives the same samples unshuffled; and how data are then taken.

    Args:
        together: Whether it matters which samples share a batch.
    """
    batching = loader.batch_sampler
    drawing = loader.sampler if batching is None else getattr(batching, "sampler", None)
    if not isinstance(drawing, _SHUFFLERS):
        if loader.drop_last:
            log.info("the DataLoader has drop_last=True: a short last batch is left out")
        return loader, AS_GIVEN
    indices = _every_sample(drawing)
    name = f"the DataLoader shuffles ({type(drawing).__name__})"
    if indices is None or type(loader).__iter__ is not DataLoader.__iter__:
        raise _changing(f"{name} and may give other samples each time")
    if batching is not None and type(batching) is not BatchSampler:
        raise _changing(f"{name}, with a batch sampler of its own")
    size = None if batching is None else batching.batch_size
    if batching is not None and batching.drop_last and len(indices) % batching.batch_size:
        raise _changing(
            f"{name} and has drop_last=True, so that other samples are left out each time",
            "drop_last=False",
        )
    if together:
        raise _changing(
            f"{name}, and with this mode= or chunk= it matters which samples share a batch"
        )
    log.info("%s: it is read once, in the data set's own order, and kept", name)
    ordered: DataLoader[Any] = DataLoader(
        loader.dataset,
        batch_size=size,
        sampler=indices,
        collate_fn=loader.collate_fn,
        num_workers=loader.num_workers,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
    )
    return ordered, IN_ORDER


def _every_sample(sampler: Any) -> Sequence[int] | None:
    """The samples that each pass of ``sampler`` gives in another order; ``None`` if they differ."""
    if type(sampler) is SubsetRandomSampler:
        return list(sampler.indices)
    if type(sampler) is not RandomSampler or sampler.replacement:
        return None
    total = len(sampler.data_source)
    return range(total) if sampler.num_samples == total else None


def _changing(what: str, cure: str = "shuffle=False") -> Refusal:
    message = f"{what}: every product would be of another operator. Pass {cure}, {FREEZE}"
    return Refusal(message, Trap.CHANGING_DATA)
