"""The bytes equal the bytes of other libraries: the golden vectors of the Rust library, in another
reader."""

import json

import numpy as np
import pytest
from conftest import ROOT, read_safetensors

import microscale

GOLDEN = ROOT / "tests" / "golden"
NUMERICS = {
    "torchao": "torchao",
    "compressed-tensors": "compressed-tensors",
    "nvidia-modelopt": "modelopt",
    "gguf": "ggml",
}


def files(folder, *, without=()):
    paths = sorted((GOLDEN / folder).glob("*.safetensors"))
    assert paths, folder
    return [path for path in paths if not any(word in path.name for word in ("tables", *without))]


def block_mask(shape, blocks):
    mask = np.ones(shape, bool)
    for row, block in blocks:
        mask[row, block] = False
    return mask


@pytest.mark.parametrize("path", files("mxfp4", without=("microxcaling", "qwantize")), ids=lambda path: path.stem)
def test_mxfp4(path):
    tensors, metadata = read_safetensors(path)
    rule = metadata["rule"]
    numerics = NUMERICS[metadata["library"]]
    q = microscale.quantize(tensors["input"], "mxfp4", numerics=numerics, scale_rule=rule, non_finite="propagate")
    scales, codes = tensors["scales"], tensors["codes"].reshape(*tensors["scales"].shape, 16)
    same = block_mask(scales.shape, json.loads(metadata["slips"]) + json.loads(metadata["nonfinite"]))
    assert same.mean() > 0.7
    np.testing.assert_array_equal(q.scales[same], scales[same])
    np.testing.assert_array_equal(q.codes.reshape(codes.shape)[same], codes[same])


@pytest.mark.parametrize("path", files("mxfp8"), ids=lambda path: path.stem)
def test_mxfp8(path):
    tensors, metadata = read_safetensors(path)
    format = f"mxfp8-{metadata['element']}"
    q = microscale.quantize(tensors["input"], format, scale_rule=metadata["rule"], non_finite="propagate")
    scales, codes = tensors["scales"], tensors["codes"].reshape(*tensors["scales"].shape, 32)
    same = block_mask(scales.shape, json.loads(metadata["slips"]) + json.loads(metadata["nonfinite"]))
    np.testing.assert_array_equal(q.scales[same], scales[same])
    np.testing.assert_array_equal(q.codes.reshape(codes.shape)[same], codes[same])


@pytest.mark.parametrize("path", files("nvfp4"), ids=lambda path: path.stem)
def test_nvfp4(path):
    tensors, metadata = read_safetensors(path)
    left_out = [tuple(block) for key in ("nonfinite", "degenerate", "slips") for block in json.loads(metadata[key])]
    compared = computed = 0
    for case in json.loads(metadata["cases"]):
        scales = tensors[f"{case}.scales"]
        codes = tensors[f"{case}.codes"].reshape(*scales.shape, 8)
        given = tensors.get(f"{case}.global_scale")
        number = "none" if given is None else float(given[0])
        if given is not None and not (np.isfinite(number) and number >= np.finfo(np.float32).tiny):
            continue
        try:
            q = microscale.quantize(
                tensors[f"{case}.input"], "nvfp4",
                numerics=metadata["convention"],
                global_scale=number,
                non_finite="propagate",
            )
        except microscale.Error as error:
            assert "out of range" in str(error)
            continue
        same = block_mask(scales.shape, [(row, block) for name, row, block in left_out if name == case])
        compared += int(same.sum())
        np.testing.assert_array_equal(q.scales[same], scales[same], err_msg=case)
        np.testing.assert_array_equal(q.codes.reshape(codes.shape)[same], codes[same], err_msg=case)
        if given is not None:
            assert q.direction == metadata["direction"]
            own = microscale.quantize(
                tensors[f"{case}.input"], "nvfp4", numerics=metadata["convention"], non_finite="propagate"
            )
            computed += np.float32(own.global_scale.value) == given[0]
        else:
            assert q.global_scale is None and q.direction is None
    assert compared > 100
    if "-computed-" in path.name:
        assert computed > 10


def test_swizzled_scales_are_those_of_torchao():
    tensors, _ = read_safetensors(GOLDEN / "layout" / "torchao-0.18.0-to_blocked.safetensors")
    cases = [name.removesuffix(".linear") for name in tensors if name.endswith(".linear")]
    assert len(cases) > 4
    for case in cases:
        scales = tensors[f"{case}.linear"]
        rows, blocks = scales.shape
        codes = np.zeros((rows, blocks * 16), np.uint8)
        q = microscale.Quantized(codes, np.array(scales), format="mxfp4")
        there = microscale.swizzle(q)
        np.testing.assert_array_equal(np.ravel(there.scales), tensors[f"{case}.swizzled"], err_msg=case)
        np.testing.assert_array_equal(microscale.swizzle(there, "linear").scales, scales)
