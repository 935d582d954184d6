"""Shared by the tests: the repository's files, and a reader of safetensors independent of the
library."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
#: Shards of the checkpoints that are made.
SHARDS = 5
DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "U8": np.uint8}


def read_safetensors(path):
    """The tensors of a file by name, and its metadata."""
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    metadata = header.pop("__metadata__", {})
    tensors = {}
    for name, entry in header.items():
        first, last = entry["data_offsets"]
        values = np.frombuffer(data[end + first : end + last], DTYPES[entry["dtype"]])
        tensors[name] = values.reshape(entry["shape"])
    return tensors, metadata


def write_safetensors(path, tensors):
    """Writes tensors of float32 to a file, one after the other."""
    header, end = {}, 0
    for name, values in tensors.items():
        assert values.dtype == np.float32
        header[name] = {"dtype": "F32", "shape": values.shape, "data_offsets": (end, end := end + values.nbytes)}
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for values in tensors.values():
            file.write(values.tobytes())


def sharded(folder, side, wrong=None):
    """A checkpoint of several shards; the shard `wrong` has a NaN."""
    folder.mkdir()
    values = np.random.default_rng(2).standard_normal((side, side), np.float32)
    weight_map = {}
    for shard in range(SHARDS):
        name, file = f"model.layers.{shard}.mlp.up_proj.weight", f"model-{shard + 1:05}-of-{SHARDS:05}.safetensors"
        tensor = values * np.float32(shard + 1)
        if shard == wrong:
            tensor[3, 5] = np.nan
        write_safetensors(folder / file, {name: tensor})
        weight_map[name] = file
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def contents(folder):
    """The bytes of each file below a folder."""
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="session")
def sample():
    """The checkpoint that is kept in the repository."""
    return ROOT / "sample" / "tiny-llama"


@pytest.fixture
def rng():
    return np.random.default_rng(7)
