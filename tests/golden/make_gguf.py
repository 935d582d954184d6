"""Makes checkpoint/golden/: a small GGUF file by gguf-py, and the values that gguf-py reads.

    python make_gguf.py             # rewrites checkpoint/golden/
    python make_gguf.py --check     # fails if either file differs from new output
    python make_gguf.py --read FILE # fails if gguf-py reads FILE differently from ours

README.md describes the files. gguf-py quantizes to Q8_0 and MXFP4, and dequantizes all formats. It
cannot quantize to NVFP4, whose tensors are random bytes. `--read` is for a file of our own writer.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf import GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import dequantize, quantize
from safetensors import safe_open
from safetensors.numpy import load_file, save

FOLDER = Path(__file__).resolve().parents[2] / "checkpoint/golden"
FILE = FOLDER / f"gguf-{version('gguf')}.gguf"
EXPECTED = FOLDER / f"gguf-{version('gguf')}-values.safetensors"
SEED = 20_260_801

PLAIN = (Type.F32, Type.F16, Type.I32)
NVFP4_SCALES = 4  # of the 36 bytes of a block


def metadata(writer: GGUFWriter) -> None:
    """Adds a value of every type, and arrays of most."""
    writer.add_uint8("test.u8", 200)
    writer.add_int8("test.i8", -100)
    writer.add_uint16("test.u16", 60_000)
    writer.add_int16("test.i16", -30_000)
    writer.add_uint32("test.u32", 4_000_000_000)
    writer.add_int32("test.i32", -2_000_000_000)
    writer.add_uint64("test.u64", 2**64 - 1)
    writer.add_int64("test.i64", -(2**63))
    writer.add_float32("test.f32", 0.1)
    writer.add_float64("test.f64", 0.1)
    writer.add_bool("test.true", True)
    writer.add_bool("test.false", False)
    writer.add_string("test.string", "größer als ASCII: 量子化")
    writer.add_array("test.strings", ["<s>", "", "▁the", "\N{PILE OF POO}"])
    writer.add_array("test.integers", [1, -2, 3])
    writer.add_array("test.floats", [0.5, -0.25])
    writer.add_array("test.bools", [True, False, True])
    writer.add_key_value("test.bytes", b"\x00\xff\x80", GGUFValueType.ARRAY, GGUFValueType.UINT8)
    writer.add_key_value("test.long", [2**40, -(2**40)], GGUFValueType.ARRAY, GGUFValueType.INT64)
    writer.add_file_type(38)
    writer.add_quantization_version(2)


def nvfp4_blocks(random: np.random.Generator, rows: int, blocks: int) -> np.ndarray:
    """Returns random codes under every scale byte that is a number without a sign bit."""
    packed = random.integers(0, 256, (rows, blocks, 36), dtype=np.uint8)
    scales = np.arange(rows * blocks * NVFP4_SCALES) % 0x7F
    packed[:, :, :NVFP4_SCALES] = scales.reshape(rows, blocks, NVFP4_SCALES)
    return packed.reshape(rows, blocks * 36)


def mxfp4_blocks(random: np.random.Generator, rows: int, blocks: int) -> np.ndarray:
    """Returns random codes under every numeric scale byte. gguf-py never writes code 8, negative zero."""
    packed = random.integers(0, 256, (rows, blocks, 17), dtype=np.uint8)
    packed[:, :, 0] = (np.arange(rows * blocks) % 0xFF).reshape(rows, blocks)
    return packed.reshape(rows, blocks * 17)


def write(path: Path) -> None:
    random = np.random.default_rng(SEED)

    def normal(*shape: int) -> np.ndarray:
        return random.standard_normal(shape, dtype=np.float32)

    def quantized(name: str, kind: Type, *shape: int) -> None:
        writer.add_tensor(name, quantize(normal(*shape), kind), raw_dtype=kind)

    writer = GGUFWriter(path, "llama")
    metadata(writer)
    writer.add_tensor("norm.weight", normal(5))
    writer.add_tensor("f16.weight", normal(3, 7).astype(np.float16))
    quantized("bf16.weight", Type.BF16, 2, 3, 4)
    writer.add_tensor("ids", random.integers(-(2**31), 2**31, (4, 3), dtype=np.int32))
    quantized("q8.weight", Type.Q8_0, 3, 64)
    quantized("mx.weight", Type.MXFP4, 6, 96)
    quantized("experts.weight", Type.MXFP4, 2, 3, 64)
    writer.add_tensor("mx_bytes.weight", mxfp4_blocks(random, 8, 32), raw_dtype=Type.MXFP4)
    writer.add_tensor("nv.weight", nvfp4_blocks(random, 5, 7), raw_dtype=Type.NVFP4)
    writer.add_tensor("nv_experts.weight", nvfp4_blocks(random, 6, 2).reshape(2, 3, 72), raw_dtype=Type.NVFP4)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def values(path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Returns gguf-py's values, and as JSON its metadata and tensor types, in the file's order."""
    reader = GGUFReader(path)
    fields = {}
    for key, field in reader.fields.items():
        if not key.startswith("GGUF."):
            contents = field.contents()
            fields[key] = [[kind.name for kind in field.types], contents]
    tensors, kinds = {}, {}
    for tensor in reader.tensors:
        kinds[tensor.name] = tensor.tensor_type.name
        data = np.asarray(tensor.data)
        with np.errstate(over="ignore"):
            found = data if tensor.tensor_type in PLAIN else dequantize(data, tensor.tensor_type)
        tensors[tensor.name] = np.ascontiguousarray(found)
    return tensors, {"metadata": json.dumps(fields), "types": json.dumps(kinds)}


def same(found: tuple[dict, dict], expected: tuple[dict, dict]) -> bool:
    if found[1] != expected[1] or found[0].keys() != expected[0].keys():
        return False
    pairs = ((found[0][name], expected[0][name]) for name in found[0])
    return all(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes() for a, b in pairs)


def committed() -> tuple[dict[str, np.ndarray], dict[str, str]]:
    with safe_open(EXPECTED, framework="np") as file:
        return load_file(EXPECTED), file.metadata()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--read", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    if arguments.read:
        good = same(values(arguments.read), committed())
        print(f"{arguments.read}: {'as gguf-py reads ours' if good else 'differs'}")
        return 0 if good else 1
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / FILE.name
        write(path)
        made, found = path.read_bytes(), values(path)
    if arguments.check:
        good = {FILE.name: made == FILE.read_bytes(), EXPECTED.name: same(found, committed())}
        for name, is_good in good.items():
            print(f"{name}: {'the same' if is_good else 'differs'}")
        return 0 if all(good.values()) else 1
    FOLDER.mkdir(exist_ok=True)
    FILE.write_bytes(made)
    # The order of keys in a safetensors header is not fixed, so unchanged files are not rewritten.
    if not EXPECTED.exists() or not same(found, committed()):
        EXPECTED.write_bytes(save(*found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
