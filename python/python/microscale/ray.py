"""Checkpoints over the machines of a Ray cluster, whose storage they share.

    facts = microscale.ray.quantize_checkpoint("/shared/model", "/shared/out", recipe="nvfp4")

Each part of the checkpoint is a task, which Ray gives to another machine if one dies. The caller merges what they made: the bytes are
those of :func:`microscale.quantize_checkpoint`. This module imports Ray, and nothing else of the package does.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import ray

from microscale import _checkpoints
from microscale._checkpoints import Path
from microscale._errors import CheckpointError

#: Called before each part that is done is counted, with its name `I/N`, the parts that are done, and all parts.
Progress = Callable[[str, int, int], Any]
#: Options that are paths, which workers know by other working directories than the caller's.
_PATHS = ("global_scale", "importance", "input_scale")


def _absolute(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options whose paths mean the same in any working directory. A recipe without a separator is the name of one that comes with the
    package, and a global scale may be the word `none`."""
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
    """The processors that each machine with any has, so that a part takes a whole one of them."""
    counts = [node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]]
    return max(1, int(min((count for count in counts if count), default=1)))


# A worker ends with its part: the next may have other threads.
@ray.remote(max_calls=1)
def _part(path: str, out: str, part: tuple[int, int], threads: int, options: dict[str, Any]) -> dict[str, Any]:
    """Does a part on some machine."""
    os.environ.setdefault("RAYON_NUM_THREADS", str(threads))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # The caller's plan has told them.
        done = _checkpoints.quantize_checkpoint(path, out, part=part, **options)
    return {**done["part"], "part": part[0], "node": ray.get_runtime_context().get_node_id()}


def quantize_checkpoint(
    path: Path,
    out: Path,
    *,
    parts: int | None = None,
    retries: int = 3,
    remote: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Quantizes a checkpoint in parts, each a task of Ray, and merges them.

    Ray is initialized if it is not, by its own rules: `RAY_ADDRESS` names a cluster. Every machine has this version of the package, and
    `path` and `out` at the same place of a storage that all share with the caller. Finished shards lie in `OUT.parts`, and are kept if a
    part or the caller fails: the same call goes on with them. `out` appears complete or not at all.

    Args:
        path: a checkpoint, a directory of many shards in the main.
        out: what to write.
        parts: tasks; by default one for each shard, of which no task can do less.
        retries: how often a part is done again that failed, or whose machine died.
        remote: options of Ray for each task, such as `num_cpus`, `num_gpus`, `resources` or `scheduling_strategy`. By default a part
            takes as many processors as the smallest machine has.
        progress: is called after each part with its name `I/N`, the parts that are done and all parts. What it raises stops the others.
        options: those of :func:`microscale.quantize_checkpoint`, but `part`.

    Returns:
        What :func:`microscale.merge` returns, and `parts`: of each the shards that were `made` and `kept`, and the `node` that did it.

    Raises:
        CheckpointError: with the file and the tensor that it is about. Options that cannot be are refused before there is any task.
            `ray.exceptions.RayError`: a part whose machines died more often than `retries`.
    """
    path, out, options = os.path.abspath(path), os.path.abspath(out), _absolute(options)
    if os.path.lexists(out) and not (os.path.isdir(out) and not os.listdir(out)):
        raise CheckpointError(f"{out} exists already; name another output or remove it", out)
    plan = _checkpoints.quantize_checkpoint(path, None, **options)
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
    facts = _checkpoints.merge(path, out, **like_parts)
    return {**facts, "parts": sorted(done, key=lambda part: part["part"])}


def _stop(tasks: Mapping[Any, int]) -> None:
    """Interrupts tasks and waits until they have ended, so that nobody writes any more."""
    for task in tasks:
        ray.cancel(task)
    if tasks:
        ray.wait(list(tasks), num_returns=len(tasks), timeout=60)
