"""Types, the stub and the options of Python, compared with the extension module and the program."""

import ast
import inspect
import re
import subprocess
import sys
import typing
from pathlib import Path

import pytest
from conftest import ROOT

import microscale
from microscale import _facts, _microscale, _types

PACKAGE = Path(microscale.__file__).parent
#: Commands of the program, with their function.
COMMANDS = {
    "quantize": microscale.checkpoint.quantize,
    "plan": microscale.checkpoint.plan,
    "eval": microscale.checkpoint.evaluate,
    "calibrate": microscale.checkpoint.calibrate,
    "dequantize": microscale.checkpoint.dequantize,
    "convert": microscale.checkpoint.convert,
    "merge": microscale.checkpoint.merge,
    "doctor": microscale.checkpoint.doctor,
    "compare": microscale.checkpoint.compare,
    "inspect": microscale.checkpoint.inspect,
}
#: Options that only the program has, and why.
PROGRAM_ONLY = {
    "output": "a positional argument in Python",
    "json": "the result",
    "report": "the page is for people",
    "plot": "the picture is for people",
    "quiet": "warnings are Python's",
    "verbose": "warnings are Python's",
    "color": "for terminals",
    "help": "for terminals",
    "version": "microscale.__version__",
    "threads": "RAYON_NUM_THREADS, once for the process",
    "dry-run": "out=None",
    "follow-links": "functions do not warn about links",
    "check-search": "for developers of searches",
}
#: Commands that run models. The extension is built without their kernels for GPUs.
ON_CPUS = ("eval", "calibrate")


def options(command):
    """The long options in the help of a command. Aliases are hidden."""
    done = subprocess.run([sys.executable, "-m", "microscale", command, "--help"], capture_output=True, text=True, check=True)
    return set(re.findall(r"^ +(?:-\w, +)?--([a-z-]+)", done.stdout, re.M))


@pytest.mark.parametrize("command", COMMANDS)
def test_python_has_the_options_of_the_program(command):
    parameters = inspect.signature(COMMANDS[command]).parameters
    python = {name.replace("_", "-") for name in parameters} - {"path", "out", "other", "quantized", "progress"}
    program = options(command)
    assert program, command
    if command in ON_CPUS:
        program -= {"device"}
    # The output was an option with another name once.
    assert program - PROGRAM_ONLY.keys() - {"out"} - python == set(), "options that Python lacks"
    assert python - program == set(), "options that the program lacks"


def test_words_are_those_of_the_library():
    words = dict(_microscale.words())
    formats = set(typing.get_args(_types.Format)) | set(typing.get_args(_types.ComparedFormat))
    assert formats == set(words.pop("AnyFormat"))
    numerics = set(typing.get_args(_types.Numerics)) | set(typing.get_args(_types.ComparedNumerics))
    assert numerics == set(words.pop("Numerics"))
    for name, expected in words.items():
        assert set(typing.get_args(getattr(_types, name))) == set(expected), name


def test_the_stub_has_the_names_of_the_extension():
    stub = ast.parse((PACKAGE / "_microscale.pyi").read_text())
    names = set()
    for node in stub.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    names = {name for name in names if not re.match(r"_[A-Za-z]", name)}
    hidden = {"__all__", "__doc__", "__file__", "__loader__", "__name__", "__package__", "__spec__"}
    assert names == set(dir(_microscale)) - hidden
    recipe = next(node for node in stub.body if isinstance(node, ast.ClassDef) and node.name == "Recipe")
    members = {node.name for node in recipe.body if isinstance(node, ast.FunctionDef)} - {"__init__"}
    assert members == {name for name in dir(_microscale.Recipe) if name[0] != "_"}


def test_the_stub_has_the_parameters_of_the_extension():
    stub = ast.parse((PACKAGE / "_microscale.pyi").read_text())
    for node in stub.body:
        if isinstance(node, ast.FunctionDef):
            expected = list(inspect.signature(getattr(_microscale, node.name)).parameters)
            assert [argument.arg for argument in node.args.args] == expected, node.name


def keys(facts, types, where):
    """Checks that a result has the keys of its type, as deep as both go."""
    assert types.__required_keys__ <= facts.keys(), where
    assert facts.keys() <= types.__annotations__.keys(), (where, facts.keys() - types.__annotations__.keys())
    for name, inner in typing.get_type_hints(types).items():
        of = typing.get_args(inner)[0] if typing.get_origin(inner) is list else inner
        values = facts.get(name) if typing.get_origin(inner) is list else [facts.get(name)]
        if typing.is_typeddict(of):
            for value in values or []:
                if value is not None:
                    keys(value, of, f"{where}.{name}")


def test_results_have_the_keys_of_their_types(sample, tmp_path):
    out, bf16 = tmp_path / "out", tmp_path / "bf16"
    keys(microscale.checkpoint.quantize(sample, None), _facts.QuantizeFacts, "plan")
    facts = microscale.checkpoint.quantize(sample, out, format="nvfp4", search="window", device="cpu")
    keys(facts, _facts.QuantizeFacts, "quantize")
    keys(microscale.checkpoint.quantize(sample, None, recipe="nvfp4-mxfp4-experts"), _facts.QuantizeFacts, "recipe")
    options = {"format": "nvfp4", "input_scale": 8.0, "search": "full", "search_global": True}
    facts = microscale.checkpoint.quantize(sample, tmp_path / "inputs", device="cpu", **options)
    keys(facts, _facts.QuantizeFacts, "inputs")
    microscale.checkpoint.quantize(sample, tmp_path / "parts", device="cpu", part=(1, 1))
    keys(microscale.checkpoint.merge(sample, tmp_path / "parts"), _facts.MergeFacts, "merge")
    keys(microscale.checkpoint.convert(out, tmp_path / "modelopt", to="modelopt"), _facts.ConvertFacts, "convert")
    found = microscale.checkpoint.doctor(out, against=sample)
    keys(found, _facts.DoctorFacts, "doctor")
    dequantized = microscale.checkpoint.dequantize(out, bf16, dtype="bf16")
    keys(dequantized, _facts.DequantizeFacts, "dequantize")
    assert dequantized["dequantized"]["tensors"] == 21
    compared = microscale.checkpoint.compare(sample, bf16)
    keys(compared, _facts.CompareFacts, "compare")
    exact = microscale.checkpoint.compare(sample, out)["total"]
    assert compared["total"]["sqnr_db"] == pytest.approx(exact["sqnr_db"], abs=0.1)
    planned = microscale.checkpoint.compare(sample, format="nvfp4", device="cpu")
    keys(planned, _facts.CompareFacts, "compare")
    assert len(planned["tensors"]) == 21
    for tensor in microscale.checkpoint.inspect(out):
        keys(tensor, _facts.TensorListed, "inspect")


def all_keys(of):
    """The keys of a type and of the types in it."""
    if not typing.is_typeddict(of):
        return set().union(*map(all_keys, typing.get_args(of)))
    hints = typing.get_type_hints(of)
    return hints.keys() | set().union(*map(all_keys, hints.values()))


def test_types_have_the_keys_that_are_documented():
    sections = re.split(r"^## `(\w+)`$", (ROOT / "docs" / "json.md").read_text(), flags=re.M)
    page = dict(zip(sections[1::2], sections[2::2], strict=True))
    words = set(re.findall(r"`(\w+)`", " ".join(page.values())))
    results = {command: typing.get_type_hints(function)["return"] for command, function in COMMANDS.items()}
    for command, of in results.items():
        documented = set()
        for cell in re.findall(r"^\| (`.*?) \|", page[command], re.M):
            documented |= set(re.findall(r"`(\w+)`", cell))
        # Only the program has `--check-search`.
        assert documented - all_keys(of) <= {"checked_blocks"}, command
        assert all_keys(of) <= words, command


def test_compare_takes_a_checkpoint_or_a_format(sample):
    for options in ({}, {"other": sample, "format": "nvfp4"}, {"other": sample, "numerics": "ocp"}):
        with pytest.raises(microscale.Error, match="another checkpoint, or a format"):
            microscale.checkpoint.compare(sample, **options)


@pytest.mark.skipif(sys.platform == "win32", reason="permissions of POSIX")
def test_errors_of_the_system_are_os_errors(sample, tmp_path):
    for call in (
        lambda path: microscale.checkpoint.inspect(path),
        lambda path: microscale.checkpoint.doctor(path),
        lambda path: microscale.checkpoint.convert(path, tmp_path / "out", to="modelopt"),
        lambda path: microscale.checkpoint.quantize(sample, None, recipe=path / "recipe.toml"),
    ):
        with pytest.raises(FileNotFoundError) as caught:
            call(tmp_path / "missing")
        assert caught.value.filename.startswith(str(tmp_path / "missing"))
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError):
        microscale.checkpoint.inspect(tmp_path / "file" / "model.safetensors")


def test_progress_is_a_line_by_tqdm(sample, tmp_path, monkeypatch, capsys):
    pytest.importorskip("tqdm")
    microscale.checkpoint.quantize(sample, tmp_path / "out", device="cpu", progress=True)
    assert "quantizing: 100%" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    with pytest.raises(ImportError, match="progress=True needs tqdm"):
        microscale.checkpoint.doctor(tmp_path / "out", progress=True)


def test_a_global_scale_knows_its_direction():
    assert microscale.GlobalScale(4.0, "divisor").factor == 0.25
    assert microscale.GlobalScale(4.0, "multiplier").factor == 4.0


def test_all_lists_public_names():
    for module in (microscale, microscale.checkpoint):
        for name in module.__all__:
            assert hasattr(module, name) and (name[0] != "_" or name == "__version__")
