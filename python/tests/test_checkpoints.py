"""Checkpoints, and the program in the package."""

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import contents, read_safetensors, sharded, write_safetensors

import microscale

PROGRAM = [sys.executable, "-m", "microscale"]


@pytest.fixture
def interruptible():
    """Lets SIGINT end this process and its children, even if a shell in the background ignores
    it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_the_program_and_the_function_write_the_same(sample, tmp_path):
    seen = []
    facts = microscale.checkpoint.quantize(
        sample, tmp_path / "a", format="nvfp4", device="cpu", progress=lambda *at: seen.append(at)
    )
    done = subprocess.run(
        [*PROGRAM, "quantize", sample, "--format", "nvfp4", "--device", "cpu", "--out", tmp_path / "b"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "quantized       21" in done.stdout
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert sum(tensor.get("outcome", tensor).get("copied") is None for tensor in facts["tensors"]) >= 21
    names = [name for name, _, _ in seen if name]
    assert len(names) == len(set(names)) == len(facts["tensors"])
    assert seen[-1][1] == seen[-1][2] > 0


def test_tensors_are_those_of_quantize(sample, tmp_path):
    microscale.checkpoint.quantize(sample, tmp_path / "out", recipe="nvfp4", device="cpu")
    before, _ = read_safetensors(next(sample.glob("*.safetensors")))
    listed = {entry["name"]: entry for entry in microscale.checkpoint.inspect(tmp_path / "out")}
    name = "model.layers.0.mlp.down_proj.weight"
    assert listed[name]["format"] == "nvfp4" and listed[name]["shape"] == list(before[name].shape)
    q = microscale.quantize(before[name], "nvfp4")
    assert listed[name]["global_scale"] == pytest.approx(q.global_scale.value) and listed[name]["direction"] == "divisor"
    assert listed[name]["blocks"] == q.scales.size
    assert listed["model.norm.weight"]["dtype"] == "BF16"


def test_a_plan_writes_nothing(sample, tmp_path):
    plan = microscale.checkpoint.quantize(sample, None, exclude=["*down_proj*"])
    assert any("down_proj" in tensor["name"] for tensor in plan["tensors"])
    assert any("SGLang" in note for note in plan["notes"])
    assert not list(tmp_path.iterdir())


def test_parts_are_merged(sample, tmp_path):
    for index in (1, 2):
        facts = microscale.checkpoint.quantize(sample, tmp_path / "out", device="cpu", part=(index, 2))
        assert facts["part"]["made"] + facts["part"]["kept"] <= facts["part"]["of"]
    merged = microscale.checkpoint.merge(sample, tmp_path / "out")
    microscale.checkpoint.quantize(sample, tmp_path / "whole", device="cpu")
    assert merged["shards"] == 2 and contents(tmp_path / "out") == contents(tmp_path / "whole")
    with pytest.raises(microscale.Error, match="9/2"):
        microscale.checkpoint.quantize(sample, tmp_path / "other", part=(9, 2))


def test_converting_and_examining(sample, tmp_path):
    microscale.checkpoint.quantize(sample, tmp_path / "out", format="nvfp4", device="cpu")
    facts = microscale.checkpoint.convert(tmp_path / "out", tmp_path / "modelopt", to="modelopt", device="cpu")
    assert facts["converted"]["tensors"] == 21 and facts["to"] == "modelopt"
    for path in ("out", "modelopt"):
        found = microscale.checkpoint.doctor(tmp_path / path, against=sample, device="cpu")
        assert found["quantized_tensors"] == 21
        assert [finding for finding in found["findings"] if finding["defect"] == "unreadable"] == []
    weights = next((tmp_path / "out").glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(microscale.CheckpointError) as caught:
        microscale.checkpoint.doctor(tmp_path / "out")
    assert caught.value.file == str(weights)


def test_what_is_in_files_is_taken_as_the_program_takes_it(sample, tmp_path):
    shards = [read_safetensors(path)[0] for path in sample.glob("*.safetensors")]
    layers = {name: values for shard in shards for name, values in shard.items() if name.endswith("_proj.weight")}
    rng = np.random.default_rng(3)
    write_safetensors(tmp_path / "scales.safetensors", {name: np.full(1, 300, np.float32) for name in layers})
    importance = {name: rng.random(values.shape[1], np.float32) for name, values in layers.items()}
    importance["no.such"] = np.ones(1, np.float32)
    write_safetensors(tmp_path / "importance.safetensors", importance)
    (tmp_path / "inputs.json").write_text(json.dumps(dict.fromkeys(layers, 12.5)))
    microscale.checkpoint.quantize(sample, tmp_path / "mxfp4", format="mxfp4", device="cpu")
    files = {name: tmp_path / name for name in ("scales.safetensors", "importance.safetensors", "inputs.json")}
    nvfp4 = {"format": "nvfp4", "device": "cpu"}
    cases = [
        (sample, {**nvfp4, "global_scale": files["scales.safetensors"], "input_scale": files["inputs.json"]}),
        (sample, {**nvfp4, "search": "full", "importance": files["importance.safetensors"], "input_scale": 20.0}),
        (tmp_path / "mxfp4", {**nvfp4, "requantize": True}),
    ]
    for number, (model, options) in enumerate(cases):
        given = contextlib.nullcontext() if "importance" not in options else pytest.warns(UserWarning, match="no.such")
        with given:
            microscale.checkpoint.quantize(model, tmp_path / f"{number}-a", **options)
        words = [(f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])) for name, value in options.items()]
        out = tmp_path / f"{number}-b"
        subprocess.run([*PROGRAM, "quantize", model, "--out", out, *sum(words, ())], check=True, capture_output=True)
        assert contents(tmp_path / f"{number}-a") == contents(out)
        assert any(b"input_global_scale" in data for data in contents(out).values()) == ("input_scale" in options)
    with pytest.raises(microscale.Error, match="requantize"):
        microscale.checkpoint.quantize(tmp_path / "mxfp4", None, **nvfp4)
    with pytest.raises(FileNotFoundError) as caught:
        microscale.checkpoint.quantize(sample, None, **nvfp4, global_scale=tmp_path / "missing.safetensors")
    assert caught.value.filename == str(tmp_path / "missing.safetensors")


def test_errors_name_file_and_tensor(sample, tmp_path):
    with pytest.raises(FileNotFoundError, match="no-such") as caught:
        microscale.checkpoint.quantize(tmp_path / "no-such", tmp_path / "out")
    assert caught.value.filename == str(tmp_path / "no-such") and caught.value.errno == errno.ENOENT
    tensors, _ = read_safetensors(next(sample.glob("*.safetensors")))
    path = tmp_path / "bad.safetensors"
    values = np.full((64, 64), np.nan, np.float32)
    header = {"model.layers.0.mlp.up_proj.weight": {"dtype": "F32", "shape": [64, 64], "data_offsets": [0, values.nbytes]}}
    header = json.dumps(header).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + values.tobytes())
    with pytest.raises(microscale.CheckpointError, match="4096 NaN") as caught:
        microscale.checkpoint.quantize(path, tmp_path / "out.safetensors", device="cpu")
    assert caught.value.tensor == "model.layers.0.mlp.up_proj.weight" and caught.value.file == str(path)
    with pytest.raises(microscale.CheckpointError, match="no-preset"):
        microscale.checkpoint.quantize(sample, tmp_path / "out", recipe="no-preset")
    with pytest.raises(microscale.Error, match="cuda:N"):
        microscale.checkpoint.quantize(sample, tmp_path / "out", device="gpu")
    assert sorted(tmp_path.iterdir()) == [path]


def test_what_progress_raises_stops_and_leaves_nothing(sample, tmp_path):
    calls = []

    def progress(tensor, done, total):
        calls.append(tensor)
        if len(calls) == 5:
            raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        microscale.checkpoint.quantize(sample, tmp_path / "out", device="cpu", progress=progress)
    assert len(calls) == 5 and not list(tmp_path.iterdir())


@pytest.mark.skipif(sys.platform == "win32", reason="sends signals")
def test_ctrl_c_stops_and_leaves_nothing(sample, tmp_path, interruptible):
    calls = []

    def progress(tensor, done, total):
        calls.append(tensor)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        microscale.checkpoint.quantize(sample, tmp_path / "out", device="cpu", progress=progress)
    assert len(calls) == 3 and not list(tmp_path.iterdir())


def big_checkpoint(path, tensors, side, times=1):
    """A file whose tensors take a while: `[times * side, side]`."""
    values = np.tile(np.random.default_rng(1).standard_normal((side, side), np.float32), (times, 1))
    write_safetensors(path, {f"model.layers.{i}.mlp.up_proj.weight": values for i in range(tensors)})


@pytest.mark.skipif(sys.platform == "win32", reason="sends signals")
def test_ctrl_c_takes_effect_in_the_middle_of_a_tensor(tmp_path, interruptible):
    big_checkpoint(tmp_path / "big.safetensors", 1, 4096, times=3)
    program = (
        "import microscale, sys\n"
        "try: microscale.checkpoint.quantize('big.safetensors', 'out.safetensors', format='nvfp4', search='window', device='cpu')\n"
        "except KeyboardInterrupt: sys.exit(7)"
    )
    # Slowly: each of three bands takes more than a second.
    slow = {"MICROSCALE_CPU": "portable", "RAYON_NUM_THREADS": "1"}
    child = subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path, env=os.environ | slow)
    sizes, asked = [0], False
    while child.poll() is None:
        for path in tmp_path.glob(".out*/*"):
            with contextlib.suppress(FileNotFoundError):
                sizes.append(path.stat().st_size)
        if max(sizes) > 4096 * 4096 / 2 and not asked:
            # The codes of the first band are written.
            child.send_signal(signal.SIGINT)
            asked = True
        time.sleep(0.005)
    assert asked and child.returncode == 7
    assert max(sizes) < 2.5 * 4096 * 4096 / 2, "the third band was never made"
    assert [path.name for path in tmp_path.iterdir()] == ["big.safetensors"]


@pytest.mark.skipif(sys.platform == "win32", reason="sends signals")
@pytest.mark.parametrize("asked", [signal.SIGINT, signal.SIGTERM])
def test_the_program_ends_by_the_signal_that_asks_it_to(tmp_path, asked, interruptible):
    big_checkpoint(tmp_path / "big.safetensors", 30, 1024)
    command = [*PROGRAM, "quantize", tmp_path / "big.safetensors", "--search", "full", "--device", "cpu"]
    child = subprocess.Popen([*command, "--out", tmp_path / "out.safetensors"], stderr=subprocess.PIPE)
    while len(list(tmp_path.iterdir())) < 2:
        assert child.poll() is None, child.stderr.read()
        time.sleep(0.01)
    child.send_signal(asked)
    _, told = child.communicate(timeout=30)
    assert child.returncode == -asked and b"interrupted: nothing was written" in told
    assert [path.name for path in tmp_path.iterdir()] == ["big.safetensors"]


def test_exit_codes_and_streams(sample, tmp_path):
    def run(*arguments):
        return subprocess.run([*PROGRAM, *arguments], capture_output=True, text=True)

    assert run("--version").stdout.strip() == f"microscale {microscale.__version__}"
    wrong = run("quantize", "--no-such-option")
    assert wrong.returncode == 2 and "Usage: microscale quantize" in wrong.stderr and not wrong.stdout
    failed = run("inspect", tmp_path / "nothing")
    assert failed.returncode == 1 and failed.stderr.startswith("error: ")
    script = Path(sysconfig.get_path("scripts")) / "microscale"
    assert subprocess.run([script, "recipes"], capture_output=True, text=True, check=True).stdout


def test_what_is_kept_is_a_choice_of_gguf(sample):
    with pytest.raises(microscale.CheckpointError, match="gguf|GGUF"):
        microscale.checkpoint.quantize(sample, None, recipe="nvfp4", kept="q8_0")
    with pytest.raises(microscale.Error, match="unknown way to keep tensors"):
        microscale.checkpoint.quantize(sample, None, recipe="nvfp4", kept="q9")
    assert microscale.checkpoint.quantize(sample, None, recipe="nvfp4", kept="unchanged")["tensors"]


def test_other_weights_may_be_left_out(tmp_path):
    source = sharded(tmp_path / "in", 64)
    (source / "pytorch_model.bin").write_bytes(b"other weights")
    (source / "notes.txt").write_text("no weights")

    def has(out):
        assert (tmp_path / out / "notes.txt").exists()
        return (tmp_path / out / "pytorch_model.bin").exists()

    for skip_others in (False, True):
        options = {"skip_others": skip_others}
        facts = microscale.checkpoint.quantize(source, tmp_path / f"q{skip_others}", recipe="mxfp4", device="cpu", **options)
        assert has(f"q{skip_others}") is not skip_others
        assert any("pytorch_model.bin" in entry.values() for entry in facts["skipped"]) is skip_others
        microscale.checkpoint.quantize(source, tmp_path / f"p{skip_others}", recipe="mxfp4", device="cpu", part=(1, 1))
        microscale.checkpoint.merge(source, tmp_path / f"p{skip_others}", **options)
        assert has(f"p{skip_others}") is not skip_others
        microscale.checkpoint.convert(tmp_path / "qFalse", tmp_path / f"c{skip_others}", to="compressed-tensors", format="nvfp4", device="cpu", **options)
        assert has(f"c{skip_others}") is not skip_others


def test_kept_tensors_are_ggufs_own_q8_0(tmp_path, rng):
    gguf = pytest.importorskip("gguf")
    values = {
        "token_embd.weight": rng.standard_normal((64, 96), np.float32),
        "blk.0.attn_q.weight": rng.standard_normal((96, 96), np.float32),
        "blk.0.attn_norm.weight": rng.standard_normal(96, np.float32),
        "output.weight": rng.standard_normal((64, 96), np.float32) * 100,
    }
    writer = gguf.GGUFWriter(tmp_path / "in.gguf", "llama")
    for name, tensor in values.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    microscale.checkpoint.quantize(tmp_path / "in.gguf", tmp_path / "out.gguf", recipe="mxfp4", kept="q8_0", device="cpu")
    types = gguf.GGMLQuantizationType
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "out.gguf").tensors}
    kept = {name: found[name].tensor_type for name in values}
    assert kept == {
        "token_embd.weight": types.Q8_0,
        "blk.0.attn_q.weight": types.MXFP4,
        "blk.0.attn_norm.weight": types.F32,
        "output.weight": types.Q8_0,
    }
    for name, tensor in values.items():
        if kept[name] == types.Q8_0:
            assert np.array_equal(found[name].data, gguf.quants.quantize(tensor, types.Q8_0)), name
        elif kept[name] == types.F32:
            assert np.array_equal(found[name].data, tensor)


def test_fused_experts_are_split(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    values = np.random.default_rng(3).normal(size=(2, 64, 32)).astype(np.float32)
    fused = {"x.experts.gate_up_proj": values, "x.experts.down_proj": values[:, :32].copy()}
    write_safetensors(source / "model.safetensors", fused)
    (source / "config.json").write_text(json.dumps({"hidden_size": 32}))
    options = {"recipe": "mxfp4", "device": "cpu"}
    whole = microscale.checkpoint.quantize(source, tmp_path / "whole", split_experts=True, **options)
    assert {tensor["name"] for tensor in whole["tensors"]} == {
        f"x.experts.{number}.{matrix}.weight" for number in range(2) for matrix in ("gate_proj", "up_proj", "down_proj")
    }
    microscale.checkpoint.quantize(source, tmp_path / "parts", split_experts=True, part=(1, 1), **options)
    with pytest.raises(microscale.CheckpointError, match="split experts"):
        microscale.checkpoint.merge(source, tmp_path / "parts")
    microscale.checkpoint.merge(source, tmp_path / "parts", split_experts=True)
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")
    with pytest.raises(microscale.CheckpointError, match="no hidden_size"):
        (source / "config.json").write_text("{}")
        microscale.checkpoint.quantize(source, None, split_experts=True, **options)
