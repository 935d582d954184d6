"""Makes pytorch/: dictionaries of tensors as torch.save writes them, and the same tensors in safetensors.

    python make_pytorch.py           # rewrites the files
    python make_pytorch.py --check   # fails if torch writes or reads anything different
"""

from __future__ import annotations

import argparse
import io
import sys
from collections import OrderedDict
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

GOLDEN = Path(__file__).resolve().parent / "pytorch"


def numbers(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def model() -> OrderedDict:
    """A state dict: every dtype, shared storages, strides, offsets, parameters, and metadata."""
    base = numbers(120, seed=1)
    tensors = OrderedDict()
    tensors["whole.weight"] = base
    tensors["part.weight"] = base[20:80].view(6, 10)
    tensors["transposed.weight"] = base[:40].view(5, 8).t()
    tensors["columns.weight"] = base.view(10, 12)[:, 3:7]
    tensors["permuted"] = base.view(2, 3, 4, 5).permute(3, 1, 0, 2)
    tensors["tied.weight"] = tensors["part.weight"]
    tensors["parameter"] = torch.nn.Parameter(numbers(4, 32, seed=2).to(torch.bfloat16))
    tensors["half"] = numbers(3, 5, seed=3).half()
    tensors["double"] = numbers(3, seed=4).double()
    for dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
        tensors[str(dtype).removeprefix("torch.")] = torch.arange(-3, 5).to(dtype)
    tensors["bool"] = torch.tensor([[True, False], [False, True]])
    tensors["float8"] = numbers(4, 8, seed=5).to(torch.float8_e4m3fn)
    tensors["scalar"] = torch.tensor(2.5)
    tensors["empty"] = torch.empty(0, 7)
    tensors._metadata = OrderedDict({"": {"version": 1}, "part": {"version": 2}})
    return tensors


def training() -> dict:
    """A model together with other data that a training program saves."""
    weights = {"fc.weight": numbers(8, 32, seed=6), "fc.bias": numbers(8, seed=7)}
    return {"epoch": 3, "lr": 1e-3, "names": ["a", ("b", None)], "state_dict": weights, "done": True, "big": 1 << 40}


def saved(value: object, **options: object) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, **options)
    return file.getvalue()


def tensors_of(value: dict) -> dict[str, torch.Tensor]:
    tensors = value.get("state_dict", value)
    return {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    check, wrong = parser.parse_args().check, 0
    GOLDEN.mkdir(exist_ok=True)
    newer = {"pickle_protocol": 4}
    files = {"model.pt": (model(), {}), "protocol-4.pt": (model(), newer), "training.pt": (training(), {})}
    for name, (value, options) in files.items():
        path, twin = GOLDEN / name, (GOLDEN / name).with_suffix(".safetensors")
        if not check:
            path.write_bytes(saved(value, **options))
            save_file(tensors_of(value), twin)
        # The file was just saved here. Without this option, torch reads newer pickles only by
        # running them.
        data = saved(value, **options)
        read = tensors_of(torch.load(io.BytesIO(data), weights_only=not options))
        expected = load_file(twin)
        same = path.read_bytes() == data and read.keys() == expected.keys()
        same = same and all(
            read[key].dtype == expected[key].dtype and read[key].shape == expected[key].shape
            and read[key].reshape(-1).view(torch.uint8).equal(expected[key].reshape(-1).view(torch.uint8))
            for key in read
        )  # fmt: skip
        wrong += not same
        print(f"{'same   ' if same else 'differs'}  {name}")
    # Refused files: a module with its code, and the format before 1.6.
    for name, data in {
        "module.pt": saved(torch.nn.Linear(2, 3)),
        "legacy.pt": saved(tensors_of(training()), _use_new_zipfile_serialization=False),
    }.items():
        if not check:
            (GOLDEN / name).write_bytes(data)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
