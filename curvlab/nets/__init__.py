"""The paper's networks: an MLP, a slim ResNet18 and a ViT for CIFAR; and a small GPT. All seeded.

Every builder takes ``seed=`` (an int or a CPU ``torch.Generator``), ``dtype=`` and ``device=``. The
global generators are not touched, and weights do not depend on device or dtype: they are drawn in
float32 on the CPU, then converted.
"""

from curvlab.nets.gpt import gpt as gpt
from curvlab.nets.heads import MultiHead as MultiHead
from curvlab.nets.kwinners import kwinners_mlp as kwinners_mlp
from curvlab.nets.mlp import mlp as mlp
from curvlab.nets.powerprop import powerpropagate as powerpropagate
from curvlab.nets.progressive import progressive_mlp as progressive_mlp
from curvlab.nets.resnet import slim_resnet18 as slim_resnet18
from curvlab.nets.vit import vit_cifar as vit_cifar
