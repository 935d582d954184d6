"""Golden vectors of MXFP8: torchao's bytes. make_golden.py writes the files."""

from __future__ import annotations

import json
from importlib.metadata import version

import torch
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_mx

from check_mxfp8 import find_mxfp8_slips
from golden_common import File, as_torch
from inputs import BLOCK
from mxfp8_inputs import mxfp8_input

ELEMENTS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def torchao_file(element: str, rule: str, type_name: str) -> File:
    golden = mxfp8_input(element, type_name)
    rows = as_torch(golden.rows)
    scales, codes = to_mx(rows.clone(), ELEMENTS[element], BLOCK, ScaleCalculationMode[rule.upper()])
    made = {"codes": codes.view(torch.uint8).contiguous(), "scales": scales.view(torch.uint8).contiguous()}
    slips, nonfinite = find_mxfp8_slips(golden.rows, made["codes"].numpy(), made["scales"].numpy(), element, rule)
    metadata = {
        "library": "torchao",
        "version": version("torchao"),
        "torch": torch.__version__.split("+")[0],
        "function": "torchao.prototype.mx_formats.mx_tensor.to_mx",
        "element": element,
        "rule": rule,
        "ties": "even",
        "zero_sign": "keep",
        "groups": json.dumps(golden.groups),
        "slips": json.dumps(slips),
        "nonfinite": json.dumps(nonfinite),
    }
    return {"input": rows, **made}, metadata


def mxfp8_files() -> dict[str, File]:
    """Returns every file's tensors and metadata, by file name."""
    return {
        f"torchao-{version('torchao')}-{element}-{rule}-{type_name}.safetensors": torchao_file(element, rule, type_name)
        for element in ELEMENTS
        for rule in ("floor", "rceil")
        for type_name in ("f32", "bf16")
    }
