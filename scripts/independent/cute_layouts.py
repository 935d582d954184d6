"""Compares the fragments of `mma` with block scales with the layouts of NVIDIA's CuTe.

CuTe's layouts of an atom map a lane and a value to a row or column and an index along K. They must
be the ones that `tests/executor/src/run/matrices.rs` describes, with the selector {0, 0}.

Needs `cute_layouts_requirements.txt` and no GPU.
"""

import ast
import itertools
import os

os.environ["CUTE_DSL_ARCH"] = "sm_120f"

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warp
from cutlass.utils import blackwell_helpers as helpers

# Row or column, and index along K or column of C, of value `v` of lane 4g + t.
EXPECTED = {
    "A": (16, lambda g, t, v: (g + v // 8 % 2 * 8, t * 8 + v % 8 + v // 16 * 32), 32),
    "B": (8, lambda g, t, v: (g, t * 8 + v % 8 + v // 8 * 32), 16),
    "C": (16, lambda g, t, v: (g + v // 2 * 8, t * 2 + v % 2), 4),
    # A value per index along K. Lanes that the selector does not choose have the scales of others.
    "scales of A": (16, lambda g, t, v: (g + t % 2 * 8, v), 64),
    "scales of B": (8, lambda g, t, v: (g, v), 64),
}


@cute.jit
def trace(found: cutlass.Constexpr):
    types = cutlass.Float4E2M1FN, cutlass.Float32
    for name, operation in (
        ("nvfp4", warp.MmaMXF4NVF4Op(*types, cutlass.Float8E4M3FN)),
        ("mxfp4", warp.MmaMXF4Op(*types, cutlass.Float8E8M0FNU)),
    ):
        atom = cute.make_mma_atom(operation)
        tiled = cute.make_tiled_mma(operation, cute.make_layout((1, 1, 1)), permutation_mnk=(16, 8, 64))
        scales = helpers.get_layoutSFA_TV(tiled), helpers.get_layoutSFB_TV(tiled)
        found[name] = [str(layout) for layout in (atom.tv_layout_A, atom.tv_layout_B, atom.tv_layout_C, *scales)]


def images(layout):
    """Returns the images of a layout `(lanes, values):(strides, strides)`, by lane and value."""

    def flat(part):
        return [part] if isinstance(part, int) else [leaf for inner in part for leaf in flat(inner)]

    shape, stride = (ast.literal_eval(part) for part in layout.split(":"))
    modes = []
    for sizes, steps in zip(shape, stride):
        # The first coordinate varies fastest.
        ranges = [[i * step for i in range(size)] for size, step in zip(flat(sizes), flat(steps))]
        modes.append([sum(place) for place in itertools.product(*reversed(ranges))])
    return [[lane + value for value in modes[1]] for lane in modes[0]]


def main():
    found = {}
    trace(found)
    for name, layouts in found.items():
        for (matrix, (rows, expected, values)), layout in zip(EXPECTED.items(), layouts, strict=True):
            places = [[(image % rows, image // rows) for image in lane] for lane in images(layout)]
            for lane in range(32):
                wanted = [expected(lane // 4, lane % 4, value) for value in range(values)]
                assert places[lane] == wanted, f"{name}, {matrix}, lane {lane}: {layout}"
            print(f"{name}, {matrix}: {layout}")


if __name__ == "__main__":
    main()
