"""Measure the cycles of `wgmma` without other work: `python wgmma_rate.py`.

Needs a GPU of compute capability 9.0 and nvcc. Two warp groups per multiprocessor multiply 2000
times four products each, A in registers or in shared memory, B without swizzling or with the
128-byte pattern. Prints the cycles of one product, which takes N / 2 at the tensor cores' rate.
"""

import itertools

import cuda_program

ROUNDS = 2000
TYPES = {"e4m3": ("k32.f32.e4m3.e4m3", 0), "bf16": ("k16.f32.bf16.bf16", 1)}


def kernel(name: str, tokens: int, type_: str, in_registers: bool, swizzled: bool) -> str:
    """Return a kernel that times its products."""
    shape, transposes = TYPES[type_]
    sums = tokens // 2
    stride = 64 if swizzled or type_ == "e4m3" else 128
    upper = f"({stride}ull << 32) | " + ("(1ull << 16) | (1ull << 62)" if swizzled else "(8ull << 16)")
    step = 2 if swizzled else 16
    d = ", ".join(f"%{i}" for i in range(sums))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(sums))
    flags = ", 0" * transposes * (1 if in_registers else 2)
    products = ""
    for i in range(4):
        if in_registers:
            a = "{" + ", ".join(f"%{sums + j}" for j in range(4)) + "}"
            inputs = ", ".join(f'"r"(a[{4 * i + j}])' for j in range(4))
            b = f"%{sums + 4}"
        else:
            a, inputs, b = f"%{sums}", f'"l"(first + {i * step})', f"%{sums + 1}"
        products += (
            f'asm volatile("{{ .reg .pred p; setp.ne.b32 p, 1, 0; wgmma.mma_async.sync.aligned.m64n{tokens}{shape}'
            f' {{{d}}}, {a}, {b}, p, 1, 1{flags}; }}" : {outputs} : {inputs}, "l"(first + {i * step}));\n'
        )
    return f"""
__global__ void __launch_bounds__(256) {name}(float *out, long long *cycles) {{
    extern __shared__ __align__(1024) char memory[];
    for (int i = threadIdx.x; i < 16384; i += 256) ((int *)memory)[i] = 0x38383838;
    asm volatile("fence.proxy.async;");
    __syncthreads();
    float d[{sums}] = {{}};
    unsigned a[16];
    for (int i = 0; i < 16; i++) a[i] = 0x38383838;
    unsigned base = (unsigned)__cvta_generic_to_shared(memory);
    unsigned long long first = ((base & 0x3FFFF) >> 4) | {upper};
    long long start = clock64();
    for (int i = 0; i < {ROUNDS}; i++) {{
        asm volatile("wgmma.fence.sync.aligned;");
        {products}
        asm volatile("wgmma.commit_group.sync.aligned;");
        asm volatile("wgmma.wait_group.sync.aligned 0;");
    }}
    long long taken = clock64() - start;
    float sum = 0;
    for (int i = 0; i < {sums}; i++) sum += d[i];
    out[blockIdx.x * 256 + threadIdx.x] = sum;
    if (threadIdx.x == 0) cycles[blockIdx.x] = taken;
}}
"""


def main() -> None:
    """Compile and run all variants."""
    variants = list(itertools.product(TYPES, (64, 128, 256), (True, False), (False, True)))
    source, calls = "", ""
    for type_, tokens, in_registers, swizzled in variants:
        name = f"{type_}_n{tokens}_{'registers' if in_registers else 'shared'}_{'swizzled' if swizzled else 'plain'}"
        source += kernel(name, tokens, type_, in_registers, swizzled)
        calls += f"""
    cudaFuncSetAttribute({name}, cudaFuncAttributeMaxDynamicSharedMemorySize, 1 << 17);
    for (int i = 0; i < 2; i++) {name}<<<132, 256, 1 << 17>>>(out, cycles);
    status = cudaDeviceSynchronize();
    cudaMemcpy(&taken, cycles, sizeof taken, cudaMemcpyDeviceToHost);
    printf("%-32s %6.1f cycles, %d at the full rate, %s\\n", "{name}", taken / {8.0 * ROUNDS}, {tokens // 2},
           cudaGetErrorString(status));"""
    cuda_program.run(source, calls)


if __name__ == "__main__":
    main()
