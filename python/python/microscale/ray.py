"""Quantizes checkpoints on the machines of a Ray cluster with shared storage.

    facts = microscale.ray.quantize_checkpoint("/shared/model", "/shared/out", recipe="nvfp4")

Each part of the checkpoint is a task, which Ray gives to another machine if one dies. The caller
merges the parts, with the same bytes as from :func:`microscale.checkpoint.quantize`. Only this
module imports Ray.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import ray

from microscale import checkpoint
from microscale._errors import CheckpointError
from microscale._facts import PartFacts, RayFacts
from microscale._types import Path

#: Called after each part with its name `I/N`, the number of finished parts, and of all parts.
Progress = Callable[[str, int, int], Any]
#: Options with paths. Workers have other working directories than the caller.
_PATHS = ("global_scale", "importance", "input_scale")


def _absolute(options: Mapping[str, Any]) -> dict[str, Any]:
    """Makes paths in options absolute.

    A recipe without a separator is the name of a built-in recipe, and a global scale may be `none`.
    """
    absolute = dict(options)
    for name in _PATHS:
        value = absolute.get(name)
        if isinstance(value, (str, os.PathLike)) and value != "none":
            absolute[name] = os.path.abspath(value)
    recipe = absolute.get("recipe")
    if recipe is not None and (os.path.dirname(recipe) or os.fspath(recipe).endswith(".toml")):
        absolute["recipe"] = os.path.abspath(recipe)
    return absolute


def _processors() -> int:
    """Returns the number of processors of the smallest machine that has any."""
    counts = [node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]]
    return max(1, int(min((count for count in counts if count), default=1)))


# A worker ends with its part, as the next part may have another number of threads.
@ray.remote(max_calls=1)  # type: ignore[untyped-decorator]
def _part(path: str, out: str, part: tuple[int, int], threads: int, options: dict[str, Any]) -> PartFacts:
    """Quantizes a part."""
    os.environ.setdefault("RAYON_NUM_THREADS", str(threads))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # The caller's plan has reported them.
        done = checkpoint.quantize(path, out, part=part, **options)
    node: str = ray.get_runtime_context().get_node_id()
    return {**done["part"], "part": part[0], "node": node}


def quantize_checkpoint(
    path: Path,
    out: Path,
    *,
    parts: int | None = None,
    retries: int = 3,
    remote: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> RayFacts:
    """Quantizes a checkpoint in parts, each a task of Ray, and merges them.

    Ray is initialized by its own rules if it is not: `RAY_ADDRESS` names a cluster. Every machine
    needs this version of the package, and `path` and `out` at the same place of storage that all
    share with the caller. Finished shards are in `OUT.parts`. They stay there if a part or the
    caller fails, and the same call continues with them. `out` appears complete or not at all.

    Args:
        path: a checkpoint, usually a directory of many shards.
        out: the output.
        parts: the number of tasks. By default one for each shard, the smallest possible part.
        retries: the number of times that a part is repeated if it failed or its machine died.
        remote: options of Ray for each task, such as `num_cpus`, `num_gpus`, `resources` or
            `scheduling_strategy`. By default a part takes the number of processors of the smallest
            machine.
        progress: is called after each part with its name `I/N`, the number of finished parts, and
            of all parts. An exception in it stops the other parts.
        options: options of :func:`microscale.checkpoint.quantize`, except `part`.

    Returns:
        The result of :func:`microscale.checkpoint.merge`, and `parts`: for each part the number of
        shards that were `made` and `kept`, and the `node` that ran it.

    Raises:
        CheckpointError: names the file and the tensor. Wrong options are refused before any task.
            `ray.exceptions.RayError`: a part whose machines died more often than `retries`.
    """
    path, out, options = os.path.abspath(path), os.path.abspath(out), _absolute(options)
    if os.path.lexists(out) and not (os.path.isdir(out) and not os.listdir(out)):
        raise CheckpointError(f"{out} exists already; name another output or remove it", out)
    plan = checkpoint.quantize(path, None, **options)
    if parts is None:
        parts = len({tensor["file"] for tensor in plan["tensors"]})
    if not ray.is_initialized():
        ray.init()
    remote = {"num_cpus": _processors(), **(remote or {})}
    threads = max(1, int(remote["num_cpus"]))
    task = _part.options(max_retries=retries, retry_exceptions=True, **remote)
    waiting = {task.remote(path, out, (index, parts), threads, options): index for index in range(1, parts + 1)}
    done = []
    try:
        while waiting:
            (ready,), _ = ray.wait(list(waiting))
            done.append(ray.get(ready))
            index = waiting.pop(ready)
            if progress is not None:
                progress(f"{index}/{parts}", len(done), parts)
    except BaseException as error:
        _stop(waiting)
        if isinstance(error, ray.exceptions.RayTaskError) and isinstance(error.cause, Exception):
            raise error.cause from error
        raise
    like_parts = {name: options.get(name, False) for name in ("skip_others", "split_experts")}
    facts = checkpoint.merge(path, out, **like_parts)
    return {**facts, "parts": sorted(done, key=lambda part: part["part"])}


def _stop(tasks: Mapping[Any, int]) -> None:
    """Interrupts tasks and waits until they have ended, so that no task writes any more."""
    for task in tasks:
        ray.cancel(task)
    if tasks:
        ray.wait(list(tasks), num_returns=len(tasks), timeout=60)
