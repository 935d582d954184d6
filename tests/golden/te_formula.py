"""Transformer Engine's NVFP4 formula in correctly rounded float32 steps.

Transformer Engine needs a GPU, so this emulation replaces it. It follows `core_nvfp4.cuh`:
`compute_global_encode_scaling_factor_FP4`, `quantization_SF::compute_decoding_scaling_factor` and
`compute_scaling_coefficient<float>`. ml_dtypes rounds E4M3 after clamping to 448, like the saturating
conversion. It also rounds E2M1 to nearest, ties to even, saturating, and preserves signs.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

FLT_MAX = np.finfo(np.float32).max
ONE_SIXTH = np.float32(1.0) / np.float32(6.0)


def encode_scale(rows: np.ndarray) -> np.float32:
    """Returns the global scale S_enc of a float32 tensor, a divisor."""
    amax = np.fmax.reduce(np.abs(rows), axis=None)  # fmaxf ignores NaN
    scale = np.fmin(np.float32(2688.0) / amax, FLT_MAX)
    return np.float32(1.0) if amax == 0.0 or scale == 0.0 else scale


def quantize(rows: np.ndarray, scale: np.float32) -> tuple[np.ndarray, np.ndarray]:
    """Returns packed codes [rows, columns / 2] and E4M3 bytes [rows, columns / 16] of a tensor."""
    groups = rows.reshape(len(rows), -1, 16)
    decode = np.fmax.reduce(np.abs(groups), axis=-1) * (scale * ONE_SIXTH)
    scales = np.fmin(decode, np.float32(448.0)).astype(ml_dtypes.float8_e4m3fn)
    factor = np.fmin(np.float32(1.0) / (scales.astype(np.float32) * (np.float32(1.0) / scale)), FLT_MAX)
    codes = (groups * factor[:, :, None]).astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 0x0F
    codes = codes.reshape(len(rows), -1)
    return codes[:, 0::2] | codes[:, 1::2] << 4, scales.view(np.uint8)
