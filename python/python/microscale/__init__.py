"""Quantize arrays, tensors and checkpoints to the 4-bit microscaling formats MXFP4 and NVFP4, and to MXFP8.

    q = microscale.quantize(x)              # x: an array of numpy or a tensor of PyTorch, [..., K]
    q.codes, q.scales, q.global_scale       # in the library that x is from
    back = microscale.dequantize(q)

Arrays are read where they lie, on a CPU or an NVIDIA GPU, where work is enqueued on the current stream. Other threads of Python run
meanwhile, so that nothing may write to an argument before its function returns.
"""

from microscale._checkpoints import convert, doctor, inspect, merge, quantize_checkpoint
from microscale._errors import CheckpointError, Error, NonFiniteError
from microscale._experts import Experts, experts_workspace, linear_experts, quantize_experts
from microscale._figures import Amax, DeviceAmax, Loss, Report
from microscale._microscale import __version__
from microscale._products import gemv, linear, workspace
from microscale._tensors import Quantized, amax, compare, dequantize, quantize, swizzle

__all__ = [
    "Amax",
    "CheckpointError",
    "DeviceAmax",
    "Error",
    "Experts",
    "Loss",
    "NonFiniteError",
    "Quantized",
    "Report",
    "__version__",
    "amax",
    "compare",
    "convert",
    "dequantize",
    "doctor",
    "experts_workspace",
    "gemv",
    "inspect",
    "linear",
    "linear_experts",
    "merge",
    "quantize",
    "quantize_checkpoint",
    "quantize_experts",
    "swizzle",
    "workspace",
]
