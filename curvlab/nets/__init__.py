"""The paper's networks: an MLP, a slim ResNet18 and a ViT for CIFAR; and a small GPT. All seeded.

Every builder takes ``seed=`` (an int or a CPU ``torch.Generator``), ``dtype=`` and ``device=``. The
global generators are not touched, and weights do not depend on device or dtype: they are drawn in
float32 on the CPU, then converted.
"""

from curvlab.nets.gpt import gpt
from curvlab.nets.heads import MultiHead
from curvlab.nets.kwinners import kwinners_mlp
from curvlab.nets.mlp import mlp
from curvlab.nets.powerprop import powerpropagate
from curvlab.nets.progressive import progressive_mlp
from curvlab.nets.resnet import slim_resnet18
from curvlab.nets.vit import vit_cifar

__all__ = [
    "MultiHead",
    "gpt",
    "kwinners_mlp",
    "mlp",
    "powerpropagate",
    "progressive_mlp",
    "slim_resnet18",
    "vit_cifar",
]
