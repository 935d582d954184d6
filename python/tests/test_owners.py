"""Owners of memory that let go of it during a call, capsules of DLPack, and interpreters."""

import ctypes
import subprocess
import sys
import textwrap

import numpy as np
import pytest

import microscale

#: Objects whose property `__array_interface__` is the only access to their memory, and objects that
#: free the memory of others.
OWNERS = """
import sys
import numpy as np
import microscale

class Holder:
    def __init__(self, x):
        self.x, self.shape, self.dtype = x, x.shape, x.dtype

    @property
    def __array_interface__(self):
        return self.x.__array_interface__

class Dropper(Holder):
    def __init__(self, x, drop):
        super().__init__(x)
        self.drop = drop

    @property
    def __array_interface__(self):
        # The extension module reads it, called by one of these functions. Its arguments before this
        # one were read already.
        if sys._getframe(1).f_code.co_name in ("quantize", "dequantize", "linear", "compare"):
            self.drop()
        return self.x.__array_interface__

def same(a, b):
    assert np.array_equal(np.asarray(a), np.asarray(b))

# 64 MiB, which a C library unmaps when they are freed.
x = np.random.default_rng(1).standard_normal((4096, 4096), np.float32)
one = np.ones(4096, np.float32)
"""

CALLS = {
    "x": """
        holder = Holder(x.copy())
        importance = Dropper(one, lambda: setattr(holder, "x", None))
        q = microscale.quantize(holder, search="four-six", importance=importance)
        expected = microscale.quantize(x, search="four-six", importance=one)
        same(q.codes, expected.codes)
        same(q.scales, expected.scales)
    """,
    "codes": """
        expected = microscale.quantize(x[:, :2048], "mxfp8-e4m3")
        holder = Holder(expected.codes.copy())
        scales = Dropper(expected.scales, lambda: setattr(holder, "x", None))
        q = microscale.Quantized(holder, scales, format="mxfp8-e4m3", shape=(4096, 2048))
        same(q.dequantize(), expected.dequantize())
    """,
    "activations": """
        weights = microscale.quantize(x[:16])
        holder = Holder(x.copy())
        bias = Dropper(one[:16], lambda: setattr(holder, "x", None))
        same(microscale.linear(holder, weights, bias=bias), microscale.linear(x, weights, bias=one[:16]))
    """,
    "original": """
        holder = Holder(x.copy())
        other = Dropper(2 * x, lambda: setattr(holder, "x", None))
        assert microscale.compare(holder, other) == microscale.compare(x, 2 * x)
    """,
    "data": """
        torch = __import__("torch")
        tensor = torch.from_numpy(x).clone()
        importance = Dropper(one, lambda: setattr(tensor, "data", torch.empty(0)))
        q = microscale.quantize(tensor, search="four-six", importance=importance, out=microscale.quantize(x))
        same(q.codes, microscale.quantize(x, search="four-six", importance=one).codes)
    """,
    "set_": """
        torch = __import__("torch")
        weights = microscale.quantize(x[:16])
        tensor = torch.from_numpy(x).clone()
        bias = Dropper(one[:16], lambda: tensor.set_(torch.empty(0)))
        same(microscale.linear(tensor, weights, bias=bias), microscale.linear(x, weights, bias=one[:16]))
    """,
}


@pytest.mark.parametrize("name", CALLS)
def test_memory_that_its_owner_drops_stays_for_the_call(name):
    if "torch" in CALLS[name]:
        pytest.importorskip("torch")
    done = subprocess.run([sys.executable, "-c", OWNERS + textwrap.dedent(CALLS[name])], capture_output=True, text=True)
    assert done.returncode == 0, (done.returncode, done.stderr)


class Holder:
    """An object with an array interface only."""

    def __init__(self, x, **changed):
        self.x, self.changed = x, changed

    @property
    def __array_interface__(self):
        return self.x.__array_interface__ | self.changed


def test_an_address_is_read_and_not_written(rng):
    x = rng.standard_normal((4, 64), np.float32)
    q = microscale.quantize(Holder(x), "nvfp4")
    np.testing.assert_array_equal(q.codes, microscale.quantize(x, "nvfp4").codes)
    np.testing.assert_array_equal(microscale.quantize(Holder(x[::2]), "nvfp4").codes, microscale.quantize(x[::2], "nvfp4").codes)
    with pytest.raises(microscale.Error, match="out cannot be written to; pass an array of numpy"):
        microscale.dequantize(q, out=Holder(np.empty((4, 64), np.float32)))
    # A scalar gives the address of a temporary array.
    with pytest.raises(microscale.Error, match="out has no dimensions"):
        microscale.dequantize(microscale.quantize(x[0, :1], "nvfp4"), out=np.float32(0))


class Subclass(np.ndarray):
    pass


class Lying(np.ndarray):
    @property
    def __array_interface__(self):
        return Holder(np.asarray(self)).__array_interface__


def test_subclasses_of_numpys_arrays_are_written_to(rng):
    q = microscale.quantize(rng.standard_normal((4, 64), np.float32), "nvfp4")
    out = np.empty((4, 64), np.float32)
    assert isinstance(microscale.dequantize(q, out=out.view(Subclass)), Subclass)
    np.testing.assert_array_equal(out, microscale.dequantize(q))
    with pytest.raises(microscale.Error, match="out cannot be written to"):
        microscale.dequantize(q, out=out.view(Lying))


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"typestr": 4}, TypeError, "the array has a typestr in its array interface that is not read"),
        ({"shape": (4, -64)}, TypeError, "the array has a shape in its array interface"),
        ({"strides": "ab"}, TypeError, "the array has a strides in its array interface"),
        ({"data": b"1234"}, TypeError, "the array has a data in its array interface"),
        ({"data": (0, False)}, TypeError, "the array has no memory that can be read"),
        ({"shape": (2**40, 2**40)}, TypeError, "beyond the memory of this machine"),
        ({"shape": (2, 2), "strides": (2**63 - 4, 4)}, TypeError, "beyond the memory of this machine"),
    ],
)
def test_interfaces_that_are_refused(rng, changed, error, message):
    with pytest.raises(error, match=message):
        microscale.quantize(Holder(rng.standard_normal((4, 64), np.float32), **changed), "nvfp4")


class Pack:
    """An object with DLPack only, without `shape` and `dtype`."""

    def __init__(self, x):
        self.x = x

    def __dlpack_device__(self):
        return self.x.__dlpack_device__()

    def __dlpack__(self, **options):
        return self.x.__dlpack__(**options)


def test_objects_with_dlpack_only_go_everywhere(rng):
    x, bias = rng.standard_normal((6, 64), np.float32), np.ones(6, np.float32)
    q = microscale.quantize(x, "nvfp4")
    given = microscale.quantize(Pack(x), "nvfp4")
    np.testing.assert_array_equal(given.codes, q.codes)
    assert given.shape == q.shape and microscale.amax(Pack(x)) == microscale.amax(x)
    assert microscale.compare(Pack(x), Pack(2 * x)) == microscale.compare(x, 2 * x)
    packed = microscale.Quantized(
        Pack(q.codes), Pack(q.scales), format="nvfp4", global_scale=q.global_scale
    )
    assert packed.shape == (6, 64) and packed.nbytes == q.nbytes and "6x64" in repr(packed)
    np.testing.assert_array_equal(packed.dequantize(), q.dequantize())
    np.testing.assert_array_equal(microscale.swizzle(packed).scales, microscale.swizzle(q).scales)
    np.testing.assert_array_equal(microscale.linear(Pack(x), packed, bias=Pack(bias)), microscale.linear(x, q, bias=bias))
    with pytest.raises(TypeError, match="a Pack has no views"):
        packed.typed  # noqa: B018
    weights = microscale.quantize_experts(x[None], "mxfp4")
    again = microscale.Experts(Pack(weights.codes), Pack(weights.scales), format="mxfp4")
    chosen = np.zeros((6, 1), np.int32)
    y = microscale.linear_experts(Pack(x), again, Pack(chosen), bias=Pack(bias[None]))
    np.testing.assert_array_equal(y, microscale.linear_experts(x, weights, chosen, bias=bias[None]))
    with pytest.raises(TypeError, match="x is a Pack without a length"):
        microscale.quantize_experts(Pack(x[None]), "nvfp4")


class Fixed:
    """An object whose `__dlpack__` and `__dlpack_device__` return the same values on each call."""

    def __init__(self, capsule, device=(1, 0)):
        self.capsule, self.device = capsule, device

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **options):
        return self.capsule


def test_a_capsule_is_taken_once(rng):
    x = rng.standard_normal((6, 64), np.float32)
    before = sys.getrefcount(x)
    for version in (None, (1, 0)):
        capsule = x.__dlpack__(max_version=version)
        assert microscale.amax(Fixed(capsule)) == microscale.amax(x)
        # Its memory was given back once: neither kept, nor given back by the capsule again.
        assert sys.getrefcount(x) == before
        with pytest.raises(TypeError, match="returned a capsule whose tensor was taken already"):
            microscale.amax(Fixed(capsule))
        del capsule
        assert sys.getrefcount(x) == before


def test_capsules_that_are_no_tensors():
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    with pytest.raises(TypeError, match="x has a __dlpack__ that returned a capsule without a tensor"):
        microscale.amax(Fixed(new(1, b"another", None)))
    with pytest.raises(TypeError, match="x has a __dlpack__ that returned a int; return a capsule of DLPack"):
        microscale.amax(Fixed(3))
    with pytest.raises(TypeError, match=r"__dlpack_device__ that returned cpu; return two integers"):
        microscale.amax(Fixed(3, "cpu"))


SUB_INTERPRETER = """
import os, sys
try:
    import _interpreters as interpreters
    new = interpreters.create("legacy")
except ImportError:
    import _xxsubinterpreters as interpreters
    new = interpreters.create()
if sys.argv[1] == "main first":
    import microscale
interpreters.run_string(new, '''
import os
for _ in range(2):
    try:
        import microscale
    except ImportError as error:
        os.write(1, f"{error}\\\\n".encode())
''')
interpreters.destroy(new)
import microscale
try:
    microscale._microscale.Recipe("mxfp5", None, None, None, None, None, "linear", "error")
except microscale.Error:
    os.write(1, b"caught")
"""


@pytest.mark.skipif(sys.implementation.name != "cpython", reason="CPython has sub-interpreters")
@pytest.mark.parametrize("order", ["main first", "sub-interpreter first"])
def test_a_sub_interpreter_is_refused_and_breaks_nothing(order):
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", SUB_INTERPRETER, order], capture_output=True, text=True)
    first, second, caught = done.stdout.split("\n")
    # CPython refuses the import itself where the sub-interpreter has its own lock.
    messages = "microscale works in the main interpreter only, and this is sub-interpreter", "does not support loading in subinterpreters"
    assert first == second and any(message in first for message in messages), done
    assert (done.returncode, caught) == (0, "caught"), done
