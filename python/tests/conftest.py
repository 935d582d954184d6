"""What the tests share: the repository's files, and a reader of safetensors that is not the library's own."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
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


@pytest.fixture(scope="session")
def sample():
    """The checkpoint that is kept in the repository."""
    return ROOT / "sample" / "tiny-llama"


@pytest.fixture
def rng():
    return np.random.default_rng(7)
