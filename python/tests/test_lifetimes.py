"""Memory, threads and processes."""

import gc
import multiprocessing
import resource
import sys
import threading
import weakref

import numpy as np
import pytest

import microscale


def resident():
    """Bytes of this process in memory."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_hundred_thousand_calls_leave_nothing():
    x = np.ones((4, 64), np.float32)
    weights = microscale.quantize(x, "nvfp4")
    activations = np.ones((2, 64), np.float16)

    class Pack:
        shape = x.shape
        __dlpack__, __dlpack_device__ = x.__dlpack__, x.__dlpack_device__

    pack = Pack()

    def call(times):
        for _ in range(times):
            q = microscale.quantize(pack, "nvfp4")
            q.dequantize()
            microscale.linear(activations, weights)
            microscale.amax(x)
            try:
                microscale.quantize(x, "nvfp4", global_scale=-1.0)
            except microscale.Error:
                pass

    call(2000)
    gc.collect()
    references, before = sys.getrefcount(x), resident()
    call(20_000)  # 100 000 calls of five kinds
    gc.collect()
    assert sys.getrefcount(x) == references
    assert resident() - before < 4 << 20


def test_a_result_outlives_what_it_was_made_of():
    x = np.linspace(-3, 3, 640, dtype=np.float32).reshape(10, 64)
    expected = microscale.quantize(x, "nvfp4").dequantize()
    q = microscale.quantize(x.copy(), "nvfp4")
    gone = weakref.ref(q)
    codes, scales = q.codes, q.scales
    q = microscale.Quantized(
        codes, scales, format="nvfp4", shape=x.shape, global_scale=q.global_scale
    )
    assert gone() is None
    gc.collect()
    np.testing.assert_array_equal(q.dequantize(), expected)


def test_threads_work_at_once():
    rng = np.random.default_rng(3)
    inputs = [rng.standard_normal((64, 512), np.float32) for _ in range(8)]
    expected = [microscale.quantize(x, "nvfp4") for x in inputs]
    wrong = []

    def work(x, right):
        for _ in range(50):
            q = microscale.quantize(x, "nvfp4")
            if not (np.array_equal(q.codes, right.codes) and np.array_equal(q.scales, right.scales)):
                wrong.append(q)

    threads = [threading.Thread(target=work, args=pair) for pair in zip(inputs, expected, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_other_threads_run_meanwhile():
    x = np.random.default_rng(4).standard_normal((256, 4096), np.float32)
    counted, stop = [0], threading.Event()

    def count():
        while not stop.is_set():
            counted[0] += 1

    interval = sys.getswitchinterval()
    thread = threading.Thread(target=count)
    thread.start()
    try:
        # As long as this call takes, and longer, the interpreter would not be taken from it.
        sys.setswitchinterval(3)
        before = counted[0]
        microscale.quantize(x, "nvfp4", search="full")
        assert counted[0] > before
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        thread.join()


def _quantized_in_child(x, queue):
    q = microscale.quantize(x, "nvfp4")
    queue.put((q.codes.tobytes(), q.scales.tobytes()))


@pytest.mark.skipif(not hasattr(__import__("os"), "fork"), reason="forks")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_process_works():
    x = np.random.default_rng(5).standard_normal((512, 2048), np.float32)
    q = microscale.quantize(x, "nvfp4")  # The pool of threads exists now, and the child will not have them.
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_quantized_in_child, args=(x, queue))
    child.start()
    try:
        assert queue.get(timeout=60) == (q.codes.tobytes(), q.scales.tobytes())
    finally:
        child.kill()
        child.join()
