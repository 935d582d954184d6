"""Quantize arrays, tensors and checkpoints to MXFP4, NVFP4 and MXFP8.

    q = microscale.quantize(x)              # x: an array of numpy or a tensor of PyTorch, [..., K]
    q.codes, q.scales                       # in the library of x
    back = microscale.dequantize(q)

Arrays are read in place, on a CPU or an NVIDIA GPU. GPU work is enqueued on the current stream.
Other threads of Python run meanwhile, so do not write to an argument before its function returns.

:mod:`microscale.checkpoint` has the operations on checkpoints, :mod:`microscale.torch` the layers
for PyTorch, and :mod:`microscale.ops` its operators for activations.
"""

from microscale import checkpoint
from microscale._activations import QuantizedActivations, ResultFormat, quantize_activations
from microscale._errors import CheckpointError, Error, NonFiniteError
from microscale._experts import Experts, experts_workspace, linear_experts, quantize_experts
from microscale._figures import Amax, DeviceAmax, Loss, Report
from microscale._microscale import __version__
from microscale._products import gemv, linear, linear_groups, workspace
from microscale._tensors import Quantized, amax, compare, dequantize, quantize, swizzle
from microscale._types import GlobalScale

__all__ = [
    "Amax",
    "CheckpointError",
    "DeviceAmax",
    "Error",
    "Experts",
    "GlobalScale",
    "Loss",
    "NonFiniteError",
    "Quantized",
    "QuantizedActivations",
    "Report",
    "ResultFormat",
    "__version__",
    "amax",
    "checkpoint",
    "compare",
    "dequantize",
    "experts_workspace",
    "gemv",
    "linear",
    "linear_experts",
    "linear_groups",
    "quantize",
    "quantize_activations",
    "quantize_experts",
    "swizzle",
    "workspace",
]
