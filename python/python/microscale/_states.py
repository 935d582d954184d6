"""Checks that quantized modules share: of states to load, and before saving."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor

#: Dtypes that a state may have for codes, and for scales by format.
_CODES = ("uint8", "int8", "float4_e2m1fn_x2")
_SCALES = {"nvfp4": ("uint8", "float8_e4m3fn"), "mxfp4": ("uint8", "float8_e8m0fnu")}


def refusal(name: str, given: Tensor, format: str) -> str | None:
    """The message for a tensor of a state whose dtype its part cannot have, `name` ending in the
    part; None if it can.

    Codes and scales are bytes, which a conversion of numbers would change. Global scales and biases
    are numbers."""
    found, part = str(given.dtype).removeprefix("torch."), name.rpartition(".")[2]
    if part in ("weight_packed", "weight_scale"):
        dtypes = _CODES if part == "weight_packed" else _SCALES[format]
        if found not in dtypes:
            return f"{name} is {found} and must be {' or '.join(dtypes)}; pass the bytes as they were saved"
    elif not given.is_floating_point():
        return f"{name} is {found} and must be float32; pass the numbers, not their bytes"
    return None


def transformers_facts() -> Any:
    """Returns the module `_transformers`, or None if transformers was not imported."""
    if "transformers" not in sys.modules:
        return None
    from microscale import _transformers

    return _transformers


def require_described() -> None:
    """Raises an error if transformers saves a model whose config does not name quantized layers."""
    facts = transformers_facts()
    if facts is not None:
        facts.require_described()
