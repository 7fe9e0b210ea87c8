"""Losses of language models as ``loss(output, target)``, for every operator, Gauss-Newton included.

Each is a mean over tokens that count: a label of ``IGNORED`` does not, which is how padding is
marked. A mean over tokens is not one over samples where samples have different lengths, so these
losses bring their own count, which weighs batches by their tokens. A model's own loss does not::

    from curvlab.losses import next_token

    GaussNewton(model, next_token, batch)
    Hessian(model, None, batch, count=next_token.count)

Batches are dicts with ``"labels"``, or pairs of inputs and labels; a model with ``.logits`` in its
output stands for its logits.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn.functional import cross_entropy

from curvlab.operators.objective import target_of

IGNORED = -100  # torch's and Hugging Face's label of what does not count


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """The mean cross-entropy of the tokens that count.

    Args:
        shift: How many places later a token's label stands: 1 for a model that predicts the next
            token and gets its own input as labels.
    """

    shift: int

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Of logits ``(N, T, V)`` at labels ``(N, T)``."""
        if logits.dim() != 3 or labels.shape != logits.shape[:2]:
            raise ValueError(
                "a loss of tokens needs logits (samples, tokens, vocabulary) and labels (samples, "
                f"tokens); got {tuple(logits.shape)} and {tuple(labels.shape)}"
            )
        until = logits.shape[1] - self.shift
        wide = logits.float() if logits.element_size() < 4 else logits
        return cross_entropy(
            wide[:, :until].flatten(0, 1), labels[:, self.shift :].flatten(), ignore_index=IGNORED
        )

    def count(self, batch: Any) -> float:
        """How many tokens of ``batch`` count: what its mean divides by."""
        return float((target_of(batch)[:, self.shift :] != IGNORED).sum())


next_token = TokenLoss(shift=1)  # GPT-2, LLaMA: labels are the input, read one token later
sequence = TokenLoss(shift=0)  # T5, token classification: labels stand where they are predicted
