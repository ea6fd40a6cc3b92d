"""Fused mixed-precision kernels for PyTorch whose accumulators are explicit.

Importing the package needs no GPU and makes no CUDA context.
"""

from . import functional, nn, reference
from ._build import build_info
from ._ops import ACTIVATIONS
from .accumulate import Accumulate, accumulate
from .explain import Explanation, explain
from .functional import gated_linear, layer_norm, linear, log_softmax, mlp, rms_norm, softmax
from .fuse import FusionReport, fuse, unfuse
from .nn import FusedGatedLinear, FusedLayerNorm, FusedLinear, FusedMLP, FusedRMSNorm, FusedSoftmax

__all__ = [
    "ACTIVATIONS",
    "Accumulate",
    "Explanation",
    "FusedGatedLinear",
    "FusedLayerNorm",
    "FusedLinear",
    "FusedMLP",
    "FusedRMSNorm",
    "FusedSoftmax",
    "FusionReport",
    "accumulate",
    "build_info",
    "explain",
    "functional",
    "fuse",
    "gated_linear",
    "layer_norm",
    "linear",
    "log_softmax",
    "mlp",
    "nn",
    "reference",
    "rms_norm",
    "softmax",
    "unfuse",
]
