"""Arrays of every origin, and arrays that are refused."""

import array
import copy
import os
import pickle
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

import microscale


class DLPackOnly:
    """An array that has only DLPack, in its old form or in the form with versions."""

    def __init__(self, x, *, versioned):
        self.x, self.versioned, self.shape = x, versioned, x.shape

    def __dlpack_device__(self):
        return self.x.__dlpack_device__()

    def __dlpack__(self, **options):
        if options and not self.versioned:
            raise TypeError("unexpected keyword argument")
        return self.x.__dlpack__(**options)


class OnGpu:
    shape = (1, 32)

    def __dlpack_device__(self):
        return (2, 0)

    def __dlpack__(self, **options):
        raise AssertionError("memory of a GPU is not asked for")


@pytest.fixture
def x(rng):
    return rng.standard_normal((6, 80), np.float32)


def same(a, b):
    np.testing.assert_array_equal(a.codes, b.codes)
    np.testing.assert_array_equal(a.scales, b.scales)
    assert (a.global_scale, a.direction, a.shape) == (b.global_scale, b.direction, b.shape)


@pytest.mark.parametrize("versioned", [False, True])
def test_dlpack(x, versioned):
    same(microscale.quantize(DLPackOnly(x, versioned=versioned), "nvfp4"), microscale.quantize(x, "nvfp4"))
    same(microscale.quantize(DLPackOnly(x[:, ::2], versioned=versioned), "nvfp4"), microscale.quantize(x[:, ::2].copy(), "nvfp4"))


def test_the_buffer_protocol(x):
    values = array.array("f", x[0].tolist())
    same(microscale.quantize(values, "nvfp4"), microscale.quantize(x[0], "nvfp4"))
    same(microscale.quantize(memoryview(x), "nvfp4"), microscale.quantize(x, "nvfp4"))


def test_read_only_and_empty_arrays(x):
    frozen = x.copy()
    frozen.flags.writeable = False
    same(microscale.quantize(frozen, "nvfp4"), microscale.quantize(x, "nvfp4"))
    for shape in [(0, 32), (3, 0), (0,), (2, 0, 5)]:
        q = microscale.quantize(np.zeros(shape, np.float32), "nvfp4")
        assert q.shape == shape and q.codes.size == q.scales.size == 0 and q.global_scale is None
        assert microscale.dequantize(q).shape == shape
    one = microscale.quantize(np.float32([3.0]), "mxfp4")
    assert one.codes.shape == (16,) and one.scales.shape == (1,)


def test_nothing_is_copied_and_nothing_is_written(x):
    before = x.copy()
    q = microscale.quantize(x, "nvfp4")
    np.testing.assert_array_equal(x, before)
    again = microscale.Quantized(
        q.codes, q.scales, format="nvfp4", shape=x.shape, global_scale=q.global_scale
    )
    assert again.codes is q.codes and again.scales is q.scales
    np.testing.assert_array_equal(again.dequantize(), q.dequantize())


def test_outputs_that_exist_are_written_to(x):
    q = microscale.quantize(x, "mxfp4")
    codes = q.codes
    out = microscale.quantize(2 * x, "mxfp4", out=q)
    assert out is q and q.codes is codes
    same(q, microscale.quantize(2 * x, "mxfp4"))
    values = np.empty((6, 80), ml_dtypes.bfloat16)
    assert microscale.dequantize(q, out=values) is values
    np.testing.assert_array_equal(values, microscale.dequantize(q, "bfloat16"))
    with pytest.raises(microscale.Error, match=r"must be \(5, 80\) in mxfp4"):
        microscale.quantize(x[:5], "mxfp4", out=q)
    with pytest.raises(microscale.Error, match="out has 10 elements and must have 480"):
        microscale.dequantize(q, out=np.empty(10, np.float32))
    values.flags.writeable = False
    with pytest.raises(microscale.Error, match="cannot be written to"):
        microscale.dequantize(q, out=values)
    # Other arrays may be read-only: the arrays of JAX are.
    with pytest.raises(microscale.Error, match="cannot be written to"):
        microscale.dequantize(q, out=DLPackOnly(np.empty((6, 80), np.float32), versioned=True))
    shared = microscale.Quantized(x.view(np.uint8).ravel()[: 6 * 48].reshape(6, 48), q.scales, format="mxfp4", shape=(6, 80))
    with pytest.raises(microscale.Error, match="shares memory with x"):
        microscale.quantize(x, "mxfp4", out=shared)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda x: x.astype(np.float64), TypeError, "x has dtype float64; pass float32"),
        (lambda x: x.astype(">f4"), TypeError, "byte order"),
        (lambda x: x.astype(np.int8), TypeError, "int8"),
        (lambda x: x.astype(ml_dtypes.float8_e4m3fn), TypeError, "x is float8_e4m3fn; pass float32"),
        (lambda x: x.view(ml_dtypes.float8_e8m0fnu), TypeError, "x is float8_e8m0fnu; pass float32"),
        (lambda x: x[:, ::-1], microscale.Error, "goes backwards"),
        (lambda x: np.broadcast_to(x[:1], (6, 80)), microscale.Error, "stride is 0"),
        (lambda x: np.float32(3), microscale.Error, "no dimensions"),
        (lambda x: x.tolist(), TypeError, "numpy.asarray"),
        (lambda x: object(), TypeError, "x is of type object; pass an array"),
        (lambda x: OnGpu(), TypeError, "memory of a library that is not known here"),
        (lambda x: x.view(np.uint8).ravel()[1 : 1 + 4 * 32].view(np.float32), TypeError, "multiple of 4 bytes"),
        (lambda x: np.lib.stride_tricks.as_strided(x, (2, 32), (130, 4)), microscale.Error, "no multiples"),
        (lambda x: x.reshape(3, 2, 10, 8).transpose(2, 0, 3, 1)[::2], microscale.Error, "do not describe rows"),
    ],
)
def test_arrays_that_are_refused(x, make, error, message):
    with pytest.raises(error, match=message):
        microscale.quantize(make(x), "nvfp4")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "mxfp5"}, "'mxfp5': unknown format; there are mxfp4|\"mxfp5\": unknown format; there are mxfp4"),
        ({"numerics": "ggml"}, "nvfp4 has no numerics ggml; it has torchao"),
        ({"scale_rule": "floor"}, "nvfp4 has no scale_rule"),
        ({"ties": "away"}, "nvfp4 has no ties"),
        ({"format": "mxfp4", "scale_rule": "up"}, "unknown scale rule"),
        ({"format": "mxfp8-e4m3", "search": "full"}, "cannot be searched"),
        ({"format": "mxfp4", "global_scale": 2.0}, "mxfp4 has no global scale"),
        ({"global_scale": 0.0}, "out of range"),
        ({"global_scale": microscale.GlobalScale(2.0, "multiplier")}, "is a multiplier and the numerics take a divisor"),
        ({"global_scale": "auto"}, "pass a number"),
        ({"layout": "tiled"}, "unknown"),
        ({"non_finite": "skip"}, "unknown"),
        ({"search": "full", "importance": np.ones(79, np.float32)}, "each of 80 columns"),
    ],
)
def test_choices_that_are_refused(x, options, message):
    with pytest.raises(microscale.Error, match=message):
        microscale.quantize(x, **{"format": "nvfp4", **options})


def test_values_that_are_refused(x):
    x[4, 7] = np.nan
    x[5, 0] = -np.inf
    with pytest.raises(microscale.NonFiniteError, match="1 NaN and 1 infinite") as caught:
        microscale.quantize(x, "nvfp4")
    for error in (caught.value, pickle.loads(pickle.dumps(caught.value))):
        assert (error.first, error.nan, error.infinite) == ((4, 7), 1, 1)
    report = microscale.quantize(x, "nvfp4", non_finite="saturate").report
    assert (report.nan, report.infinite, report.first_non_finite) == (1, 1, (4, 7))
    assert microscale.amax(x)[1:] == (True, True)


def test_parts_that_are_no_tensor(x):
    q = microscale.quantize(x, "nvfp4")

    def make(**changed):
        parts = {"codes": q.codes, "scales": q.scales, "format": "nvfp4", "shape": (6, 80)}
        return microscale.Quantized(**(parts | changed))

    with pytest.raises(microscale.Error, match="codes have 200 bytes"):
        make(codes=q.codes[:5]).dequantize()
    with pytest.raises(microscale.Error, match="sign bit"):
        make(scales=q.scales | 128).dequantize()
    with pytest.raises(microscale.Error, match="contiguous"):
        make(codes=np.asfortranarray(q.codes)).dequantize()
    with pytest.raises(TypeError, match="codes is float32 and must be uint8"):
        make(codes=x).dequantize()
    with pytest.raises(TypeError, match="pass a GlobalScale, which has a direction"):
        make(global_scale=2.0)
    with pytest.raises(microscale.Error, match="'divisor' or 'multiplier'"):
        make(global_scale=microscale.GlobalScale(2.0, "up"))
    with pytest.raises(microscale.Error, match="swizzled"):
        microscale.linear(x.astype(np.float16), microscale.swizzle(q))
    with pytest.raises(TypeError, match="uint8; choose float32"):
        microscale.linear(x.view(np.uint8), q)
    with pytest.raises(microscale.Error, match="in the memory of the CPU, where products need no workspace"):
        microscale.workspace(q, 16)
    with pytest.raises(TypeError, match="choose float32"):
        q.dequantize("float64")


def test_views_of_the_scales_as_floats(x):
    codes, scales = microscale.quantize(x, "nvfp4").typed
    assert codes.dtype == np.uint8 and scales.dtype == ml_dtypes.float8_e4m3fn
    q = microscale.quantize(x, "mxfp8-e4m3")
    codes, scales = q.typed
    assert codes.dtype == ml_dtypes.float8_e4m3fn and scales.dtype == ml_dtypes.float8_e8m0fnu
    typed = microscale.Quantized(q.codes, scales, format="mxfp8-e4m3", shape=x.shape)
    np.testing.assert_array_equal(typed.dequantize(), q.dequantize())


def test_objects_tell_what_they_are(x):
    q = microscale.quantize(x, "nvfp4")
    assert repr(q) == f"Quantized(6x80 in nvfp4, linear scales, divisor {q.global_scale.value:g}, {6 * 45 + 4} bytes)"
    same(copy.copy(q), q)
    same(pickle.loads(pickle.dumps(q)), q)


@pytest.mark.parametrize("numerics", ["compressed-tensors", "torchao", "modelopt", "transformer-engine"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_layers_share_the_global_scale_of_one_amax(rng, numerics, dtype):
    whole = (rng.standard_normal((48, 64)) * 3).astype(dtype)
    layers = np.split(whole, [16, 20])
    shared = None
    for layer in layers:
        shared = microscale.amax(layer, out=shared)
    assert shared == microscale.amax(whole)
    expected = microscale.quantize(whole, "nvfp4", numerics=numerics)
    parts = [microscale.quantize(layer, "nvfp4", numerics=numerics, amax=shared) for layer in layers]
    assert {(q.global_scale, q.direction) for q in parts} == {(expected.global_scale, expected.direction)}
    np.testing.assert_array_equal(np.concatenate([q.codes for q in parts]), expected.codes)
    np.testing.assert_array_equal(np.concatenate([q.scales for q in parts]), expected.scales)


def test_an_amax_that_cannot_be(rng):
    x = rng.standard_normal((2, 32), np.float32)
    found = microscale.amax(x)
    with pytest.raises(microscale.Error, match="amax is for nvfp4"):
        microscale.quantize(x, "mxfp4", amax=found)
    with pytest.raises(microscale.Error, match="leave amax or global_scale out"):
        microscale.quantize(x, "nvfp4", amax=found, global_scale=1.0)
    with pytest.raises(TypeError, match="memory of the CPU; pass the result of microscale.amax"):
        microscale.quantize(x, "nvfp4", amax=microscale.DeviceAmax(x))
    with pytest.raises(TypeError, match="memory of the CPU; pass the result of microscale.amax"):
        microscale.quantize(x, "nvfp4", amax=3.5)
    with pytest.raises(TypeError, match="pass an Amax"):
        microscale.amax(x, out=microscale.DeviceAmax(x))


@pytest.mark.parametrize("finite", [np.nan, np.inf, -np.inf, -1.0, -1e-45, 1e39])
def test_an_amax_is_a_finite_magnitude(rng, finite):
    x = rng.standard_normal((2, 32), np.float32)
    given = microscale.Amax(finite, False, False)
    for call in (lambda: microscale.quantize(x, "nvfp4", amax=given), lambda: microscale.amax(x, out=given)):
        with pytest.raises(microscale.Error, match=r"finite is .* and must be a finite float32 of 0 or more"):
            call()
    largest = microscale.Amax(float(np.finfo(np.float32).max), False, False)
    assert microscale.amax(x, out=largest) == largest and microscale.quantize(x, "nvfp4", amax=largest).global_scale.value > 0


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_bias_has_a_number_for_each_row_of_the_weights(rng, dtype):
    dtype = getattr(ml_dtypes, dtype, None) or np.dtype(dtype)
    weights = microscale.quantize(rng.standard_normal((6, 64), np.float32), "nvfp4")
    x, bias = rng.standard_normal((6, 64)).astype(dtype), rng.standard_normal(6).astype(dtype)
    np.testing.assert_array_equal(microscale.linear(x, weights, bias=bias), microscale.linear(x, weights) + bias)
    out = np.empty((6, 6), dtype)
    assert microscale.linear(x, weights, bias=bias, out=out) is out
    np.testing.assert_array_equal(out, microscale.linear(x, weights) + bias)
    assert microscale.linear(x[:0], weights, bias=bias).shape == (0, 6)
    # Shapes that numpy would broadcast along tokens, or to all rows.
    for shape in [(6, 1), (1, 6), (1,), (), (6, 6), (3, 2), (5,)]:
        with pytest.raises(microscale.Error, match=r"bias has shape \[.*\] and must have \[6\]"):
            microscale.linear(x, weights, bias=np.zeros(shape, dtype))
    with pytest.raises(microscale.Error, match="bias must be contiguous"):
        microscale.linear(x, weights, bias=np.zeros(12, dtype)[::2])
    with pytest.raises(TypeError, match="bias is uint8 and must be"):
        microscale.linear(x, weights, bias=np.zeros(6, np.uint8))
    with pytest.raises(microscale.Error, match="out shares memory with bias"):
        microscale.linear(x[:1], weights, bias=out[0], out=out[:1])


@pytest.mark.parametrize("dtype", ["float32", "float16", ml_dtypes.bfloat16])
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_int8_rounds_activations(rng, format, dtype):
    weights = microscale.quantize(rng.standard_normal((40, 320), "f4"), format)
    x = rng.standard_normal((3, 320), "f4").astype(dtype)
    exact = microscale.linear(x, weights).astype("f4")
    y = microscale.linear(x, weights, activations="int8")
    assert y.dtype == x.dtype
    # Half a step of each activation, times its weight, and the rounding of both results.
    blocks = np.abs(x.astype("f4")).reshape(3, 10, 32)
    steps = np.repeat(blocks.max(-1) / 127 * 0.5001, 32, -1)
    most = steps @ np.abs(weights.dequantize()).T + 2 * np.abs(exact) * 2.0**-8
    assert (np.abs(y.astype("f4") - exact) <= most).all() and (y.astype("f4") != exact).any()
    with pytest.raises(microscale.Error, match="int4"):
        microscale.linear(x, weights, activations="int4")


def test_int8_gives_nan_for_what_is_not_finite(rng):
    weights = microscale.quantize(rng.standard_normal((40, 320), "f4"), "mxfp4")
    x = rng.standard_normal((3, 320), "f4")
    x[1, 7] = np.inf
    y = microscale.linear(x, weights, activations="int8")
    assert np.isnan(y[1]).all() and np.isfinite(y[[0, 2]]).all()



@pytest.mark.parametrize(
    ("ties", "expected"),
    [
        (None, [0, 1, 1, 2, 2, 4, 4, 6]),
        ("even", [0, 1, 1, 2, 2, 4, 4, 6]),
        ("away", [0.5, 1, 1.5, 2, 3, 4, 6, 6]),
        ("zero", [0, 0.5, 1, 1.5, 2, 3, 4, 6]),
    ],
)
def test_ties_are_rounded_as_chosen(ties, expected):
    x = np.zeros((1, 32), "f4")
    x[0, :8] = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6]
    q = microscale.quantize(x, "mxfp4", scale_rule="floor", ties=ties)
    np.testing.assert_array_equal(q.dequantize()[0, :8], expected)


def test_a_million_threads_are_capped() -> None:
    """Starting them would take minutes."""
    program = "import microscale, numpy; microscale.quantize(numpy.ones((4, 64), numpy.float32))"
    environment = {**os.environ, "RAYON_NUM_THREADS": "1000000"}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=30)


#: Calls a function in a process whose variable is set before, or after a first computation.
CALL = """
import os, sys
import numpy, microscale

word, name, sample = sys.argv[1:4]
x = numpy.ones((2, 32), "f4")
calls = {
    "quantize": lambda: microscale.quantize(x),
    "amax": lambda: microscale.amax(x),
    "quantize_experts": lambda: microscale.quantize_experts([x]),
    "compare": lambda: microscale.compare(x, x),
    "inspect": lambda: microscale.checkpoint.inspect(sample),
    "quantize_checkpoint": lambda: microscale.checkpoint.quantize(sample, None, format="nvfp4"),
}
if len(sys.argv) > 4:
    microscale.amax(x)
os.environ["MICROSCALE_CPU"] = word
try:
    calls[name]()
except Exception as error:
    print(f"{type(error).__name__}: {error}")
"""


@pytest.mark.parametrize("word", ["nonsense", "avx1024", ""])
def test_an_instruction_set_that_is_not_there_is_an_error(word, sample):
    def call(*arguments):
        return subprocess.run([sys.executable, "-c", CALL, *arguments], capture_output=True, text=True, check=True).stdout

    for name in ("quantize", "amax", "quantize_experts", "compare", "inspect", "quantize_checkpoint"):
        out = call(word, name, str(sample))
        assert out.startswith(f"Error: MICROSCALE_CPU is {word}; this machine has reference, portable"), (name, out)
    # The first computation chooses, and later values of the variable change nothing.
    assert call(word, "quantize", str(sample), "late") == ""
    environment = {**os.environ, "MICROSCALE_CPU": word}
    done = subprocess.run([sys.executable, "-m", "microscale", "devices"], env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: MICROSCALE_CPU is {word}\nhint: this machine has reference, portable")


@pytest.mark.parametrize("word", ["reference", "portable"])
def test_an_instruction_set_can_be_chosen(word, sample):
    done = subprocess.run([sys.executable, "-c", CALL, word, "quantize", str(sample)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")
