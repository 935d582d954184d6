"""Evaluating, calibrating and planning: the same as the program, from the same code."""

import json
import subprocess
import sys

import pytest
from conftest import ROOT, contents
from test_types import keys

import microscale
from microscale import _facts, checkpoint

STORY = ROOT / "sample" / "tiny-story"
#: Few short windows of the sample's text.
READING = {"text": STORY / "heldout.txt", "window": 64, "windows": 4, "documents": True}
OPTIONS = ["--text", STORY / "heldout.txt", "--window", "64", "--windows", "4", "--documents"]


def program(*arguments):
    """Runs the program, and returns its JSON."""
    done = subprocess.run(
        [sys.executable, "-m", "microscale", *arguments, "--json", "-"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def statistics(tmp_path_factory):
    out = tmp_path_factory.mktemp("calibrated") / "stats"
    facts = checkpoint.calibrate(STORY, out, **READING)
    keys(facts, _facts.CalibrateFacts, "calibrate")
    assert facts["complete"] and facts["layers"] == 4
    return out


def test_calibrate_writes_the_files_of_the_program(statistics, tmp_path):
    facts = program("calibrate", STORY, tmp_path / "stats", *OPTIONS)
    assert contents(tmp_path / "stats") == contents(statistics)
    # A complete calibration is not made again.
    assert checkpoint.calibrate(STORY, statistics, **READING) == facts


def test_an_interrupted_calibration_continues(statistics, tmp_path):
    class Stop(Exception):
        pass

    def stop(layer, done, total):
        if layer == "layer 2":
            raise Stop

    stats = tmp_path / "stats"
    with pytest.raises(Stop):
        checkpoint.calibrate(STORY, stats, progress=stop, **READING)
    for options in ({"gptq": True}, {"search": "full"}):
        with pytest.raises(microscale.CheckpointError, match="to continue it, run `microscale calibrate"):
            checkpoint.quantize(STORY, tmp_path / "out", format="nvfp4", calibration=stats, **options)
    checkpoint.calibrate(STORY, stats, **READING)
    assert contents(stats) == contents(statistics)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"search": "full"}, ["--search", "full"]),
        ({"gptq": True}, ["--gptq"]),
        ({"gptq": True, "gptq_static_scales": True, "gptq_damping": 0.02},
         ["--gptq", "--gptq-static-scales", "--gptq-damping", "0.02"]),
        ({"gptq": True, "gptq_order": "columns"}, ["--gptq", "--gptq-order", "columns"]),
        ({"search": "full", "hadamard": 32}, ["--search", "full", "--hadamard", "32"]),
        ({"gptq": True, "hadamard": 128}, ["--gptq", "--hadamard", "128"]),
    ],
)
def test_quantize_takes_a_calibration(statistics, tmp_path, options, words):
    facts = checkpoint.quantize(
        STORY, tmp_path / "a", format="mxfp4", calibration=statistics, device="cpu", **options
    )
    keys(facts, _facts.QuantizeFacts, "quantize")
    program(
        "quantize", STORY, tmp_path / "b", "-f", "mxfp4", "--calibration", statistics, "--device", "cpu", *words
    )
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gptq": True}, "gptq without calibration"),
        ({"gptq_order": "columns"}, "options of GPTQ without gptq"),
        ({"gptq": True, "calibration": "x", "search_global": True}, "gptq and search_global"),
        ({"importance": "x", "calibration": "x"}, "importance and calibration"),
        ({"gptq": True, "calibration": "x", "gptq_order": "rows"}, "blocks, columns or natural"),
    ],
)
def test_options_of_gptq_that_do_not_fit_are_refused(options, message):
    with pytest.raises(microscale.Error, match=message):
        checkpoint.quantize(STORY, None, format="nvfp4", **options)


def test_evaluate_has_the_results_of_the_program(statistics, tmp_path):
    plain, gptq = tmp_path / "plain", tmp_path / "gptq"
    checkpoint.quantize(STORY, plain, format="nvfp4", device="cpu")
    checkpoint.quantize(STORY, gptq, format="nvfp4", calibration=statistics, gptq=True, device="cpu")
    seen = []
    facts = checkpoint.evaluate(
        STORY, [plain, gptq], activations=["nvfp4"], progress=lambda *at: seen.append(at), **READING
    )
    keys(facts, _facts.EvaluateFacts, "evaluate")
    assert facts == program("eval", STORY, plain, gptq, "--activations", "nvfp4", *OPTIONS)
    rows = facts["quantized"]
    assert [row["activations"] for row in rows] == [None, "nvfp4", None, "nvfp4"]
    assert rows[2]["divergence"]["mean"] < rows[0]["divergence"]["mean"]
    assert [layer for layer, _, _ in seen] == [f"layer {n}" for n in range(4)]
    alone = checkpoint.evaluate(STORY, plain, skip_layers=True, **READING)
    assert alone["quantized"][0] == {**rows[0], "layers": []}


def test_texts_that_cannot_be_read_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        checkpoint.evaluate(STORY, [], text=tmp_path / "missing")
    assert caught.value.filename == str(tmp_path / "missing")
    with pytest.raises(microscale.CheckpointError, match="tokenizer.json"):
        checkpoint.calibrate(ROOT / "sample" / "tiny-llama", tmp_path / "stats", **READING)
    for options in ({"window": 1}, {"windows": 0}, {"dtype": "f16"}):
        with pytest.raises(microscale.Error, match="window|dtype"):
            checkpoint.evaluate(STORY, [], **{**READING, **options})


def test_plan_writes_the_recipe_of_the_program(tmp_path):
    recipe, other = tmp_path / "a.toml", tmp_path / "b.toml"
    facts = checkpoint.plan(STORY, recipe, bits=5, formats=["nvfp4", "mxfp8-e4m3"], search="four-six", device="cpu")
    keys(facts, _facts.PlanFacts, "plan")
    words = ["--bits", "5", "--formats", "nvfp4,mxfp8-e4m3", "--search", "four-six", "--device", "cpu"]
    assert facts == program("plan", STORY, "-o", other, *words)
    assert facts["optimal"] and facts["bits"] <= 5

    def rules(file):
        return [line for line in file.read_text().splitlines() if not line.startswith("#")]

    assert rules(recipe) == rules(other)
    assert "microscale.checkpoint.plan(" in recipe.read_text()
    quantized = checkpoint.quantize(STORY, None, recipe=recipe)
    assert {entry["format"] for entry in facts["formats"]} == {"nvfp4", "mxfp8-e4m3"}
    assert len(quantized["tensors"]) >= len(facts["tensors"])
    for budget in ({}, {"bits": 5, "size": 1000}, {"bits": 0}):
        with pytest.raises(microscale.Error, match="a plan takes bits"):
            checkpoint.plan(STORY, **budget)
    with pytest.raises(microscale.CheckpointError):
        checkpoint.plan(STORY, STORY / "model.safetensors", bits=5)
