"""Shared by the peers' scripts: times of CUDA graphs."""

from __future__ import annotations

import torch

WARM_UP = 3


def replay_seconds(graph: torch.cuda.CUDAGraph, replays: int) -> list[float]:
    """Returns the seconds of each replay of a graph, after some to warm up."""
    seconds = []
    for replay in range(WARM_UP + replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if replay >= WARM_UP:
            seconds.append(start.elapsed_time(end) * 1e-3)
    return seconds
