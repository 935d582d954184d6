//! The kernels by name, with their launch shapes.

/// Lanes in a warp.
pub const WARP: u32 = 32;
/// Threads in a thread block of the product kernels.
pub const THREADS: u32 = 128;
/// Quantization blocks that a warp handles: one a lane, so that a warp stores 32 scale bytes, one sector, at once.
pub const BLOCKS_PER_WARP: u32 = 32;
/// Chunks of 16 bytes that a lane writes in the dequantizers' vector variants. The fewer a warp writes, the more of an H200's
/// bandwidth f32 output reaches: 94 % with 8, 95 with 4, 96 with 2.
pub const DEQUANTIZE_CHUNKS: u32 = 2;
/// Threads in a thread block of the ladder's baselines.
pub const LADDER_THREADS: u32 = 256;

/// A kernel that every PTX contains.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kernel {
    /// The entry point.
    pub name: &'static str,
    /// Threads in a thread block.
    pub threads: u32,
    /// Quantization blocks that a thread block handles; 0 for the empty kernel.
    pub blocks: u32,
    /// Must use a hardware e2m1x2 conversion where the target has one.
    pub converts_fp4: bool,
}

impl Kernel {
    /// Elements that a thread handles, as a fraction (numerator, denominator).
    pub const fn elements_per_thread(&self) -> (u32, u32) {
        (self.blocks * 32, self.threads)
    }
}

const fn product(name: &'static str, converts_fp4: bool) -> Kernel {
    Kernel { name, threads: THREADS, blocks: THREADS / WARP * BLOCKS_PER_WARP, converts_fp4 }
}

const fn dequantize_vector(name: &'static str, value_bytes: u32) -> Kernel {
    let elements = THREADS * DEQUANTIZE_CHUNKS * 16 / value_bytes;
    Kernel { name, threads: THREADS, blocks: elements / 32, converts_fp4: true }
}

const fn thread_a_block(name: &'static str) -> Kernel {
    Kernel { name, threads: LADDER_THREADS, blocks: LADDER_THREADS, converts_fp4: false }
}

const fn warp_a_block(name: &'static str) -> Kernel {
    Kernel { name, threads: LADDER_THREADS, blocks: LADDER_THREADS / WARP, converts_fp4: false }
}

/// Names are `<format>_<operation>_<dtype>[_<ties>]_<access>`. Access is `vector` where every row starts on 16 bytes, so
/// that a lane moves 16 at once, and `element` where it does not. The ladder's baselines end in what handles a block.
const KERNELS: [Kernel; 31] = [
    product("mxfp4_quantize_f32_even_vector", true),
    product("mxfp4_quantize_f16_even_vector", true),
    product("mxfp4_quantize_bf16_even_vector", true),
    product("mxfp4_quantize_f32_even_element", true),
    product("mxfp4_quantize_f16_even_element", true),
    product("mxfp4_quantize_bf16_even_element", true),
    product("mxfp4_quantize_f32_away_vector", false),
    product("mxfp4_quantize_f16_away_vector", false),
    product("mxfp4_quantize_bf16_away_vector", false),
    product("mxfp4_quantize_f32_away_element", false),
    product("mxfp4_quantize_f16_away_element", false),
    product("mxfp4_quantize_bf16_away_element", false),
    product("mxfp4_quantize_f32_zero_vector", false),
    product("mxfp4_quantize_f16_zero_vector", false),
    product("mxfp4_quantize_bf16_zero_vector", false),
    product("mxfp4_quantize_f32_zero_element", false),
    product("mxfp4_quantize_f16_zero_element", false),
    product("mxfp4_quantize_bf16_zero_element", false),
    dequantize_vector("mxfp4_dequantize_f32_vector", 4),
    dequantize_vector("mxfp4_dequantize_f16_vector", 2),
    dequantize_vector("mxfp4_dequantize_bf16_vector", 2),
    product("mxfp4_dequantize_f32_element", true),
    product("mxfp4_dequantize_f16_element", true),
    product("mxfp4_dequantize_bf16_element", true),
    thread_a_block("mxfp4_quantize_f32_thread_a_block"),
    thread_a_block("mxfp4_quantize_f16_thread_a_block"),
    thread_a_block("mxfp4_quantize_bf16_thread_a_block"),
    warp_a_block("mxfp4_quantize_f32_warp_a_block"),
    warp_a_block("mxfp4_quantize_f16_warp_a_block"),
    warp_a_block("mxfp4_quantize_bf16_warp_a_block"),
    Kernel { name: "empty", threads: 32, blocks: 0, converts_fp4: false },
];

/// Every kernel, in no particular order.
pub const fn kernels() -> &'static [Kernel] {
    &KERNELS
}
