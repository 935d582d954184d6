"""Measures what products with FP8 activations do to 4-bit weights.

For each checkpoint that `quantize` wrote, in MXFP4 or NVFP4:

- NVFP4: the SQNR of weights that are rounded to E4M3 (`round_weights`), against the NVFP4 weights,
  and of the NVFP4 weights against the original, if it is given. Weights of a layer are weighted by
  their squares. E4M3 activations with a scale per token have about 31.5 dB (docs/activations.md).
- MXFP4: blocks whose scale is more than 2^11 below the largest one within 128 columns. Kernels for
  more than 16 tokens add their products separately. Blocks of zeros count only as "empty".

Rules: formats/src/fp8_dot.rs. They are written again here in numpy.

Needs numpy, ml_dtypes, safetensors and torch.
"""

import argparse
import pathlib

import ml_dtypes
import numpy as np
import torch
from safetensors import safe_open

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
# Columns that share the exponent of a product, and the farthest scale that E4M3 spans.
PACK, WIDEST = 128, 11
NVFP4_FACTOR = 8


def files(directory):
    """Yields the open safetensors files of a checkpoint."""
    for path in sorted(pathlib.Path(directory).glob("*.safetensors")):
        yield safe_open(path, "pt")


def elements(packed):
    """Returns the E2M1 values of packed codes, the first of a byte in its low half."""
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)
    return np.where(codes & 8, -1, 1).astype(np.float32) * E2M1[codes & 7]


def decibels(signal, noise):
    return 10 * np.log10(signal / noise)


def nvfp4(directory, original):
    """Prints the SQNR of rounded weights."""
    sums = np.zeros(4)
    lowest = (np.inf, "")
    sources = {name: file for file in files(original) for name in file.keys()} if original else {}
    for file in files(directory):
        for name in file.keys():
            if not name.endswith(".weight_packed"):
                continue
            layer = name.removesuffix("_packed")
            scale = file.get_tensor(layer + "_scale").float().numpy()
            inverse = file.get_tensor(layer + "_global_scale").float().numpy()
            values = elements(file.get_tensor(name).numpy()) * scale.repeat(16, axis=1)
            rounded = (values / NVFP4_FACTOR).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * NVFP4_FACTOR
            signal, noise = np.square(values, dtype=np.float64).sum(), np.square(rounded - values, dtype=np.float64).sum()
            sums[:2] += np.array([signal, noise]) / inverse.item() ** 2
            lowest = min(lowest, (decibels(signal, noise), layer))
            if layer in sources:
                weights = sources[layer].get_tensor(layer).to(torch.float64).numpy()
                values = values.astype(np.float64)[:, : weights.shape[1]] / inverse.item()
                sums[2:] += np.square(weights).sum(), np.square(values - weights).sum()
    print(f"  rounded to E4M3 against NVFP4: {decibels(*sums[:2]):.1f} dB; least {lowest[0]:.1f} dB, {lowest[1]}")
    if sums[2]:
        print(f"  NVFP4 against the original: {decibels(*sums[2:]):.1f} dB")


def mxfp4(directory):
    """Prints the number of blocks that are left out of the tensor cores' products."""
    blocks = far = empty = layers = 0
    for file in files(directory):
        for name in file.keys():
            if not name.endswith(".weight_packed"):
                continue
            scales = file.get_tensor(name.removesuffix("_packed") + "_scale").numpy().astype(np.int32)
            codes = elements(file.get_tensor(name).numpy()).reshape(*scales.shape, 32)
            zero = (codes == 0).all(axis=-1)
            padded = np.pad(scales, ((0, 0), (0, -scales.shape[1] % (PACK // 32))))
            largest = padded.reshape(len(scales), -1, PACK // 32).max(axis=-1).repeat(PACK // 32, axis=1)
            wide = largest[:, : scales.shape[1]] - scales > WIDEST
            layers += 1
            blocks += scales.size
            far += (wide & ~zero).sum()
            empty += (wide & zero).sum()
    print(f"  {far} of {blocks} blocks of {layers} layers are left out, and {empty} empty ones")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints", nargs="+", help="directories that `quantize` wrote")
    parser.add_argument("--original", help="the directory that they were quantized from")
    arguments = parser.parse_args()
    for checkpoint in arguments.checkpoints:
        print(checkpoint)
        names = [name for file in files(checkpoint) for name in file.keys()]
        if any(name.endswith(".weight_global_scale") for name in names):
            nvfp4(checkpoint, arguments.original)
        else:
            mxfp4(checkpoint)


if __name__ == "__main__":
    main()
