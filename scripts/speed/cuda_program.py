"""Compiles and runs a CUDA program for compute capability 9.0."""

import os
import subprocess
import tempfile


def run(kernels: str, calls: str) -> None:
    """Run kernels by `calls`, which have `out`, `cycles` (both on the GPU), `taken` and `status`."""
    source = f"""#include <cstdio>
{kernels}
int main() {{
    float *out;
    long long *cycles, taken;
    cudaError_t status;
    cudaMalloc(&out, 132 * 256 * 4);
    cudaMalloc(&cycles, 132 * 8);{calls}
}}
"""
    # nvcc takes further flags from the environment, which may name another architecture.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("NVCC_")}
    with tempfile.TemporaryDirectory() as directory:
        file, program = os.path.join(directory, "program.cu"), os.path.join(directory, "program")
        with open(file, "w", encoding="utf-8") as out:
            out.write(source)
        nvcc = ["nvcc", "-O3", "-gencode", "arch=compute_90a,code=sm_90a", "-o", program, file]
        subprocess.run(nvcc, check=True, env=environment)
        subprocess.run([program], check=True)
