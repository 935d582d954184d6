"""The documents' commands and programs run as they stand."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

PAGES = [ROOT / "docs" / "python.md", ROOT / "python" / "README.md"]


def blocks(language):
    for page in PAGES:
        for number, text in enumerate(re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.M | re.S)):
            yield pytest.param(text, id=f"{page.stem}-{language}-{number}")


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "sample").symlink_to(ROOT / "sample")
    return tmp_path


@pytest.mark.parametrize("text", list(blocks("python")))
def test_programs(text, folder):
    if "torch" in text and "import torch" in text:
        pytest.importorskip("torch")
    if "to_torchao" in text:
        pytest.importorskip("torchao")
    if "transformers" in text:
        pytest.importorskip("transformers")
    done = subprocess.run([sys.executable, "-c", text], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="a shell")
@pytest.mark.parametrize("text", list(blocks("sh")))
def test_commands(text, folder):
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(["sh", "-e", "-c", text], cwd=folder, capture_output=True, text=True, env=os.environ | {"PATH": path})
    assert done.returncode == 0, done.stderr
    assert (folder / "OUT").is_dir()


def test_every_function_is_in_the_page():
    import microscale

    page = PAGES[0].read_text()
    functions = [name for name in microscale.__all__ if callable(getattr(microscale, name)) and name[0].islower()]
    functions += [f"checkpoint.{name}" for name in microscale.checkpoint.__all__]
    assert len(functions) > 15
    for name in functions:
        assert re.search(rf"`{name}[`(]", page), name
    if "torch" in sys.modules:
        import microscale.torch

        for name in microscale.torch.__all__:
            assert re.search(rf"`torch\.{name}[`(]", page), name
