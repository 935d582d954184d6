"""The scripts for clusters do what one run does: their command lines are carried out here, in the
place of their schedulers."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, contents, sharded

import microscale

SCRIPTS = ROOT / "scripts" / "cluster"
OPTIONS = ["--format", "nvfp4", "--search", "full"]
#: Carries out what `sbatch` is given, each job of an array after the other.
SBATCH = """#!/bin/sh
set -eu
array=
while [ $# -gt 0 ]; do
    case "$1" in
        --array) array=$2; shift ;;
        --wrap) command=$2; shift ;;
        --dependency) [ "$2" = afterok:7 ]; shift ;;
        --job-name) shift ;;
        --parsable) echo 7 ;;
        --kill-on-invalid-dep=yes) ;;
        *) exit 2 ;;
    esac
    shift
done
for SLURM_ARRAY_TASK_ID in $([ -z "$array" ] && echo 0 || seq "${array%-*}" "${array#*-}"); do
    export SLURM_ARRAY_TASK_ID
    sh -c "$command" >&2
done
"""

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="a shell")


@pytest.fixture
def folder(tmp_path):
    """A model, and what one run makes of it."""
    sharded(tmp_path / "model", 64)
    microscale.checkpoint.quantize(tmp_path / "model", tmp_path / "one", format="nvfp4", search="full")
    return tmp_path


def environment(*folders):
    paths = [*map(str, folders), str(Path(sys.executable).parent), os.environ["PATH"]]
    return os.environ | {"PATH": os.pathsep.join(paths)}


def check(folder, *others):
    assert contents(folder / "out") == contents(folder / "one")
    assert sorted(path.name for path in folder.iterdir()) == sorted(["model", "one", "out", *others])


def test_slurm(folder):
    (folder / "bin").mkdir()
    stub = folder / "bin" / "sbatch"
    stub.write_text(SBATCH)
    stub.chmod(0o755)
    command = [SCRIPTS / "slurm.sh", "model", "out", "3", *OPTIONS]
    done = subprocess.run(command, cwd=folder, env=environment(folder / "bin"), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    check(folder, "bin")


@pytest.mark.skipif(shutil.which("parallel") is None, reason="needs GNU parallel")
def test_parallel(folder):
    command = [SCRIPTS / "parallel.sh", "model", "out", "3", *OPTIONS]
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    check(folder)


def test_kubernetes(folder):
    yaml = pytest.importorskip("yaml")
    described = list(yaml.safe_load_all((SCRIPTS / "kubernetes.yaml").read_text()))
    settings, parts, merge = described
    jobs = {job["metadata"]["name"]: job["spec"] for job in (parts, merge)}
    assert (settings["kind"], list(jobs)) == ("ConfigMap", ["quantize", "merge"])
    spec = jobs["quantize"]
    assert spec["completionMode"] == "Indexed" and str(spec["completions"]) == settings["data"]["PARTS"]
    assert jobs["merge"]["suspend"] is True, "it runs once all parts have"
    given = {name: value.replace("/models", str(folder)) for name, value in settings["data"].items()}
    assert given["OUT"] == str(folder / "out")

    def carry_out(job, **more):
        (container,) = jobs[job]["template"]["spec"]["containers"]
        assert container["envFrom"] == [{"configMapRef": {"name": settings["metadata"]["name"]}}]
        (mount,), (volume,) = container["volumeMounts"], jobs[job]["template"]["spec"]["volumes"]
        assert mount["name"] == volume["name"] and given["INPUT"].startswith(str(folder))
        done = subprocess.run(container["command"], env=environment() | given | more, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    for index in range(spec["completions"]):
        carry_out("quantize", JOB_COMPLETION_INDEX=str(index))
    carry_out("merge")
    check(folder)
