"""Measure `wgmma` next to other instructions: `python wgmma_with_instructions.py`.

Needs a GPU of compute capability 9.0 and nvcc. Two warp groups per multiprocessor multiply bf16
(m64nNk16), with A in registers or in shared memory, in groups of products. After each group, the
same warps run a number of other instructions and wait for the group before. Or two more warp groups
run them, without waiting. The instructions are PRMT, LOP3 and HMUL2, a third each. Prints the
cycles of one product, which takes N / 2 at the tensor cores' rate.
"""

import cuda_program

ROUNDS = 300
KINDS = (
    "prmt.b32 r{0}, r{0}, s0, 0x5241;",
    "lop3.b32 r{0}, r{0}, s0, s1, 0x96;",
    "mul.rn.bf16x2 r{0}, r{0}, s0;",
)
FENCE = 'asm volatile("wgmma.fence.sync.aligned;");\n'
COMMIT = 'asm volatile("wgmma.commit_group.sync.aligned;");\n'
# Tokens, A in registers, instructions for each four products, products of a group; 0: the
# instructions are computed by other warp groups.
CASES = [
    (tokens, in_registers, count, group)
    for tokens, counts in ((128, (64, 128)), (256, (128, 256)))
    for in_registers in (True, False)
    for count in counts
    for group in (2, 4, 8)
] + [(128, False, count, 0) for count in (64, 128)]


def wait(groups: int) -> str:
    """Return a wait for all groups of products but the last ones."""
    return f'asm volatile("wgmma.wait_group.sync.aligned {groups};");\n'


def instructions(count: int) -> str:
    """Return instructions on eight registers."""
    load = "".join(f"mov.b32 r{i}, %{i};" for i in range(8))
    compute = "".join(KINDS[i % 3].format(i % 8) for i in range(count))
    store = "".join(f"mov.b32 %{i}, r{i};" for i in range(8))
    outputs = ", ".join(f'"+r"(x[{i}])' for i in range(8))
    return (
        'asm volatile("{ .reg .b32 r<8>; .reg .b32 s0, s1; mov.b32 s0, %8; mov.b32 s1, %9; '
        f'{load}{compute}{store} }}" : {outputs} : "r"(s0), "r"(s1));\n'
    )


def product(tokens: int, in_registers: bool, number: int) -> str:
    """Return a product of 64 rows and 16 columns."""
    sums = tokens // 2
    d = ", ".join(f"%{i}" for i in range(sums))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(sums))
    offset = number % 8 * 16
    if in_registers:
        a = "{" + ", ".join(f"%{sums + i}" for i in range(4)) + "}"
        inputs = ", ".join(f'"r"(a[{4 * (number % 4) + i}])' for i in range(4))
        b, flags = f"%{sums + 4}", ", 0"
    else:
        a, inputs, b, flags = f"%{sums}", f'"l"(first+{offset})', f"%{sums + 1}", ", 0, 0"
    return (
        f'asm volatile("{{ .reg .pred p; setp.ne.b32 p, 1, 0; wgmma.mma_async.sync.aligned.m64n{tokens}'
        f'k16.f32.bf16.bf16 {{{d}}}, {a}, {b}, p, 1, 1{flags}; }}" : {outputs} : {inputs}, "l"(first+{offset}));\n'
    )


def kernel(name: str, tokens: int, in_registers: bool, count: int, group: int) -> str:
    """Return a kernel that times rounds of eight products."""
    sums, threads, body = tokens // 2, 256, ""
    each = group or 8
    for first in range(0, 8, each):
        body += FENCE + "".join(product(tokens, in_registers, first + i) for i in range(each)) + COMMIT
        body += (instructions(count * group // 4) if group else "") + wait(1)
    if not group:
        threads = 512
        body = f"if (threadIdx.x < 256) {{ {body} }} else {{ {instructions(count * 2)} }}"
    return f"""
__global__ void __launch_bounds__({threads}) {name}(float *out, long long *cycles, unsigned s0, unsigned s1) {{
    extern __shared__ __align__(1024) char memory[];
    for (int i = threadIdx.x; i < 16384; i += {threads}) ((int *)memory)[i] = 0x38383838;
    asm volatile("fence.proxy.async;");
    __syncthreads();
    float d[{sums}] = {{}};
    unsigned a[16], x[8];
    for (int i = 0; i < 16; i++) a[i] = 0x38383838 + s0;
    for (int i = 0; i < 8; i++) x[i] = threadIdx.x + i;
    unsigned base = (unsigned)__cvta_generic_to_shared(memory);
    unsigned long long first = ((base & 0x3FFFF) >> 4) | (128ull << 32) | (8ull << 16);
    __syncthreads();
    long long start = clock64();
    #pragma unroll 1
    for (int i = 0; i < {ROUNDS}; i++) {{
        {body}
    }}
    {wait(0)}
    __syncthreads();
    long long taken = clock64() - start;
    float sum = 0;
    for (int i = 0; i < {sums}; i++) sum += d[i];
    for (int i = 0; i < 8; i++) sum += x[i];
    out[blockIdx.x * 256 + threadIdx.x % 256] = sum;
    if (threadIdx.x == 0) cycles[blockIdx.x] = taken;
}}
"""


def main() -> None:
    """Compile and run all cases."""
    source, calls = "", ""
    for tokens, in_registers, count, group in CASES:
        name = f"n{tokens}_{'registers' if in_registers else 'shared'}_{count}_{group}"
        source += kernel(name, tokens, in_registers, count, group)
        where = f"after groups of {group}" if group else "in other warps"
        calls += f"""
    cudaFuncSetAttribute({name}, cudaFuncAttributeMaxDynamicSharedMemorySize, 1 << 17);
    for (int i = 0; i < 2; i++) {name}<<<132, {256 if group else 512}, 1 << 17>>>(out, cycles, 0, 0);
    status = cudaDeviceSynchronize();
    cudaMemcpy(&taken, cycles, sizeof taken, cudaMemcpyDeviceToHost);
    printf("n{tokens}, A in {"registers" if in_registers else "shared memory"}, {count} instructions {where}: "
           "%.1f cycles, {tokens // 2} at the full rate, %s\\n", taken / (16.0 * {ROUNDS}), cudaGetErrorString(status));"""
    cuda_program.run(source, calls)


if __name__ == "__main__":
    main()
