"""Parts of a checkpoint over a Ray cluster of two machines, and one of them dies. Skipped where Ray
is not installed."""

import threading
import time

import pytest
from conftest import SHARDS, contents, sharded

import microscale

ray = pytest.importorskip("ray")
import microscale.ray  # noqa: E402


@pytest.fixture(scope="module")
def cluster():
    """Two machines of one processor each, so that each has one part at a time, and a slow one, so
    that parts take a while: the cluster, and the machine that may die. A process may have one
    cluster in its life, and lose a machine of it only at the end."""
    from ray.cluster_utils import Cluster

    environment = pytest.MonkeyPatch()
    environment.setenv("MICROSCALE_CPU", "portable")
    machine = {"num_cpus": 1, "object_store_memory": 80 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={**machine, "include_dashboard": False})
    try:
        other = cluster.add_node(**machine)
        ray.init(address=cluster.address, log_to_driver=False)
        yield cluster, other
    finally:
        ray.shutdown()
        cluster.shutdown()
        environment.undo()


def test_what_fails_is_told(cluster, tmp_path):
    model, out = sharded(tmp_path / "model", 64, wrong=2), tmp_path / "out"
    with pytest.raises(microscale.CheckpointError, match="NaN") as caught:
        microscale.ray.quantize_checkpoint(model, out, format="mxfp4", device="cpu", retries=1)
    assert caught.value.tensor == "model.layers.2.mlp.up_proj.weight"
    assert not out.exists()
    # Impossible options are refused before there are tasks.
    with pytest.raises(microscale.Error, match="mxfp4"):
        microscale.ray.quantize_checkpoint(model, tmp_path / "other", format="fp3")
    (tmp_path / "taken").write_text("")
    with pytest.raises(microscale.CheckpointError, match="exists already"):
        microscale.ray.quantize_checkpoint(model, tmp_path / "taken", format="mxfp4")
    options = {"format": "mxfp4", "device": "cpu", "non_finite": "saturate"}
    facts = microscale.ray.quantize_checkpoint(model, out, parts=2, remote={"num_cpus": 1}, **options)
    assert len(facts["parts"]) == 2 and facts["shards"] == SHARDS
    microscale.checkpoint.quantize(model, tmp_path / "one", **options)
    assert contents(out) == contents(tmp_path / "one")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "one", "out", "taken"]

    def stop(part, done, of):
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        microscale.ray.quantize_checkpoint(model, tmp_path / "stopped", progress=stop, **options)
    assert not (tmp_path / "stopped").exists()


def test_a_machine_dies_and_the_bytes_are_those_of_one(cluster, tmp_path, monkeypatch):
    cluster, other = cluster
    model = sharded(tmp_path / "model", 2048)
    options = {"format": "nvfp4", "search": "full", "search_global": True, "device": "cpu"}
    microscale.checkpoint.quantize(model, tmp_path / "one", **options)
    seen, told = [], []

    def kill():
        """Once two parts are being made, kills the machine of one of them."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            making = list((tmp_path / "out.parts").glob(".*part-*"))
            if len(making) == 2:
                seen.extend(making)
                return cluster.remove_node(other, allow_graceful=False)
            time.sleep(0.01)

    killer = threading.Thread(target=kill)
    killer.start()
    # Paths that are relative mean the caller's directory, not the workers'.
    monkeypatch.chdir(tmp_path)
    facts = microscale.ray.quantize_checkpoint("model", "out", progress=lambda *at: told.append(at), **options)
    killer.join()
    assert len(seen) == 2, "a machine was killed while both worked"
    assert contents(tmp_path / "out") == contents(tmp_path / "one")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "one", "out"]
    # The dead machine's part was done by the other one, as all the rest.
    assert [part["made"] for part in facts["parts"]] == [1] * SHARDS
    assert {part["node"] for part in facts["parts"]} == {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    assert [(done, of) for _, done, of in told] == [(done, SHARDS) for done in range(1, SHARDS + 1)]
    assert {name for name, _, _ in told} == {f"{part}/{SHARDS}" for part in range(1, SHARDS + 1)}
