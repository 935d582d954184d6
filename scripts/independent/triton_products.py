"""Makes products of FP4 with block scales by Triton, for the executor's test `triton`.

Compiles a kernel with `tl.dot_scaled` for sm_120 and sm_100 with several tiles, for NVFP4 and
MXFP4, and writes a folder for each tile and set of operands:

    kernel.ptx                     Triton's PTX
    launch                         kernel, blocks, threads, bytes of shared memory, and K
    a, b                           codes, two per byte, row by row of K
    scales_a, scales_b             a byte per block
    product                        the expected product, f32

Operands `exact` have small sums, which f64 gets exactly. Operands `wide` have scales of many
magnitudes, and some that are zero, subnormal or NaN. Their product follows the published arithmetic
of tensor cores (MMA-Sim, arXiv 2511.10909), written here in numpy from its description.

Needs `triton_products_requirements.txt` and no GPU.
"""

import argparse
import collections
import os
import pathlib
import re
import sys

import numpy as np

# M and N of a tile, K per iteration, and warps, for each compute capability. For 10.0, Triton uses
# FP4 of tensor cores only if M is a multiple of 128; tiles with M = 64 become products of BF16.
TILES = {
    120: [(16, 8, 64, 1), (64, 32, 64, 4), (32, 64, 128, 2), (64, 64, 128, 1), (128, 128, 128, 4), (128, 64, 256, 8)],
    100: [(128, 32, 128, 4), (128, 64, 256, 4), (128, 128, 128, 4), (128, 128, 256, 8), (128, 256, 256, 4),
          (256, 128, 256, 8)],
}
# What an instruction of tensor cores contains.
INSTRUCTIONS = {120: "mma.sync.aligned", 100: "tcgen05.mma"}
# Tiles of the product along M and N, and iterations along K.
GRID, ITERATIONS = (2, 2), 3
BLOCKS = {"nvfp4": 16, "mxfp4": 32}
E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int64)  # halves


def compiled(capability, block, tile):
    """Returns Triton's kernel for a tile."""
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    @triton.jit
    def product(a, scales_a, b, scales_b, d, K, M: tl.constexpr, N: tl.constexpr, KT: tl.constexpr,
                BLOCK: tl.constexpr, TILES_N: tl.constexpr):
        m = tl.program_id(0) // TILES_N * M + tl.arange(0, M)
        n = tl.program_id(0) % TILES_N * N + tl.arange(0, N)
        sums = tl.zeros((M, N), tl.float32)
        for k in range(0, K, KT):
            codes = k // 2 + tl.arange(0, KT // 2)
            blocks = k // BLOCK + tl.arange(0, KT // BLOCK)
            x = tl.load(a + m[:, None] * (K // 2) + codes[None, :])
            y = tl.load(b + n[None, :] * (K // 2) + codes[:, None])
            s = tl.load(scales_a + m[:, None] * (K // BLOCK) + blocks[None, :])
            t = tl.load(scales_b + n[:, None] * (K // BLOCK) + blocks[None, :])
            sums = tl.dot_scaled(x, s, "e2m1", y, t, "e2m1", sums)
        tl.store(d + m[:, None] * (N * TILES_N) + n[None, :], sums)

    scale = "*fp8e4nv" if block == 16 else "*u8"
    constants = dict(zip(("M", "N", "KT"), tile)) | {"BLOCK": block, "TILES_N": GRID[1]}
    types = {"a": "*u8", "scales_a": scale, "b": "*u8", "scales_b": scale, "d": "*fp32", "K": "i32"}
    # K and the addresses are multiples of 16.
    source = ASTSource(product, types | dict.fromkeys(constants, "constexpr"), constants,
                       {(i,): [["tt.divisibility", 16]] for i in range(6)})
    options = {"num_warps": tile[3], "num_stages": 2}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def defined(ptx):
    """Returns the PTX with a number for every register that is read but never written.

    Triton pads some shuffles of scales by them. Any value is right.
    """
    uses = collections.Counter(re.findall(r"%r\d+", ptx))
    value = lambda register: register if uses[register] > 1 else "0x5A3C9617"
    return re.sub(r"(prmt\.b32\s+%r\d+), (%r\d+), (%r\d+)",
                  lambda found: f"{found[1]}, {value(found[2])}, {value(found[3])}", ptx)


def operand(random, rows, columns, block, wide):
    """Returns codes, one per byte, and scale bytes."""
    codes = random.integers(0, 16, (rows, columns), np.uint8)
    shape = (rows, columns // block)
    if not wide:
        # Powers of two from 1/4 to 4.
        exponents = random.integers(-2, 3, shape)
        return codes, ((7 + exponents) * 8 if block == 16 else 127 + exponents).astype(np.uint8)
    scales = random.integers(0, 0x7F, shape) if block == 16 else random.integers(107, 148, shape)
    rare = random.integers(0, 400, shape)
    scales = np.where(rare < 40, random.integers(0, 8, shape), scales)
    scales[1, -1] = 0x7F if block == 16 else 0xFF
    return codes, scales.astype(np.uint8)


def split(scales, block):
    """Returns eight times the significands, the exponents, and which are NaN. These become zero."""
    scales = scales.astype(np.int64)
    if block == 32:
        nan = scales == 0xFF
        return np.where(nan, 0, 8), np.where(nan, 0, scales - 127), nan
    nan = scales & 0x7F == 0x7F
    field, fraction = scales >> 3 & 15, scales & 7
    exponents = np.where(field == 0, np.where(fraction == 0, -126, -6), field - 7)
    return np.where(nan, 0, np.where(field == 0, fraction, 8 + fraction)), np.where(nan, 0, exponents), nan


def by_tensor_cores(a, b, block):
    """Returns the product in steps of 64, as tensor cores add."""
    (codes_a, scales_a), (codes_b, scales_b) = a, b
    groups_a, groups_b = (E2M1[codes].reshape(len(codes), -1, 16) for codes in (codes_a, codes_b))
    # MXFP4 has a scale per two groups.
    (sa, ea, na), (sb, eb, nb) = (
        [np.repeat(part, block // 16, axis=1) for part in split(scales, block)] for scales in (scales_a, scales_b))
    sums = np.zeros((len(codes_a), len(codes_b)), np.float32)
    nan = np.zeros(sums.shape, bool)
    for step in range(0, groups_a.shape[1], 4):
        fraction, exponent = np.frexp(sums.astype(np.float64))
        exponents = [np.maximum(np.where(sums == 0, -126, exponent - 1), -126)]
        # In units of 2^(exponent - 23), and of 2^(exponent - 8) for the groups.
        terms = [(np.ldexp(sums.astype(np.float64), 23 - exponents[0]).astype(np.int64), 23)]
        for g in range(step, step + 4):
            exact = groups_a[:, g] @ groups_b[:, g].T * sa[:, g, None] * sb[None, :, g]
            terms.append((exact, 8))
            exponents.append(ea[:, g, None] + eb[None, :, g])
            nan |= na[:, g, None] | nb[None, :, g]
        largest = np.max(exponents, axis=0)
        total = np.zeros(sums.shape, np.int64)
        for (significand, bits), exponent in zip(terms, exponents):
            shift = 35 - bits + exponent - largest
            magnitude = np.abs(significand)
            magnitude = np.where(shift >= 0, magnitude << np.maximum(shift, 0), magnitude >> np.clip(-shift, 0, 62))
            total += np.where(significand < 0, -magnitude, magnitude)
        wide = np.ldexp(total.astype(np.float64), largest - 35)
        near = wide.astype(np.float32)
        sums = np.where(np.abs(near) > np.abs(wide), np.nextafter(near, np.float32(0)), near) + np.float32(0)
        assert np.isfinite(sums).all()
    sums.view(np.uint32)[nan] = 0x7FFFFFFF
    return sums


def plain(a, b, block):
    """Returns the exact product."""
    values = []
    for codes, scales in (a, b):
        significands, exponents, _ = split(scales, block)
        scales = np.ldexp(significands / 8, exponents)
        values.append(E2M1[codes] / 2 * np.repeat(scales, block, axis=1))
    product = values[0] @ values[1].T + 0.0
    assert (product.astype(np.float32) == product).all()
    return product.astype(np.float32)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=pathlib.Path, help="a new folder")
    out = parser.parse_args().out
    os.environ |= {"TRITON_DISABLE_LINE_INFO": "1", "TRITON_CACHE_DIR": str(out / "cache")}
    out.mkdir(parents=True)
    random = np.random.default_rng(1)
    for name, block in BLOCKS.items():
        for capability, tile in ((capability, tile) for capability, tiles in TILES.items() for tile in tiles):
            kernel = compiled(capability, block, tile)
            ptx, shared = defined(kernel.asm["ptx"]), kernel.metadata.shared
            lines = [line for line in ptx.splitlines() if INSTRUCTIONS[capability] in line]
            count = sum("block_scale" in line for line in lines)
            if count == 0 or count != len(lines):
                sys.exit(f"sm_{capability}, {name}, tile {tile}: Triton emits other products than block-scaled ones")
            rows, columns, inner = tile[0] * GRID[0], tile[1] * GRID[1], tile[2] * ITERATIONS
            for operands in ("exact", "wide"):
                a, b = (operand(random, rows, inner, block, operands == "wide") for rows in (rows, columns))
                product = by_tensor_cores(a, b, block)
                if operands == "exact":
                    assert (product == plain(a, b, block)).all()
                folder = out / "cases" / f"sm_{capability}-{name}-{'x'.join(map(str, tile[:3]))}-{operands}"
                folder.mkdir(parents=True)
                (folder / "kernel.ptx").write_text(ptx)
                threads = tile[3] * 32
                (folder / "launch").write_text(f"product {GRID[0] * GRID[1]} {threads} {shared} {inner}\n")
                for part, (codes, scales) in (("a", a), ("b", b)):
                    (codes[:, ::2] | codes[:, 1::2] << 4).tofile(folder / part)
                    scales.tofile(folder / f"scales_{part}")
                product.tofile(folder / "product")
            print(f"sm_{capability}, {name}, tile {tile}: {count} block-scaled mma, {shared} bytes of shared memory")


if __name__ == "__main__":
    main()
