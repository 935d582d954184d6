//! The kernels by name, with their launch shapes.

/// Lanes in a warp.
pub const WARP: u32 = 32;
/// Threads in a thread block of the product kernels.
pub const THREADS: u32 = 128;
/// Elements that a warp handles: as many blocks of 32 as it has lanes, so that each lane owns the scales of one such
/// block, or of two of 16, and a warp stores 32 scale bytes, one sector, at once.
pub const WARP_ELEMENTS: u32 = 32 * WARP;
/// Chunks of 16 bytes that a lane writes in the dequantizers' vector variants. The fewer a warp writes, the more of
/// an H200's bandwidth f32 output reaches: 94 % with 8, 95 with 4, 96 with 2.
pub const DEQUANTIZE_CHUNKS: u32 = 2;
/// Pieces of [`WARP_ELEMENTS`] that a warp of the amax kernels goes through.
pub const AMAX_PIECES: u32 = 4;
/// Elements that a lane of the search kernels has.
pub const SEARCH_EACH: u32 = 16;
/// Elements of a row whose errors are summed by themselves.
pub const ERROR_PART: u32 = 1024;
/// Running sums of such a part, kept side by side: element i belongs to sum i % 8.
pub const ERROR_LANES: u32 = 8;
/// Threads in a thread block of the ladder's baselines.
pub const LADDER_THREADS: u32 = 256;
/// Places of rows in a tile of weights: what one instruction of tensor cores multiplies.
pub const ROW_PLACES: u32 = 16;
/// Places of tokens that it is multiplied with.
pub const TOKEN_PLACES: u32 = 8;
/// Lanes that share a place: each has a chunk of a step.
pub const QUAD: u32 = 4;
/// Threads in a thread block of the kernels that multiply weights.
pub const WEIGHTS_THREADS: u32 = 256;

/// Bytes of shared memory that a thread block of the kernels that multiply weights needs, if a warp has so many
/// tiles: their sums, and a flag for each warp.
const fn weights_shared_bytes(tiles: u32) -> u32 {
    WEIGHTS_THREADS / WARP * (tiles * ROW_PLACES * TOKEN_PLACES + 1) * 4
}

/// Warps of a thread block of the kernels that copy ahead, at most: what keeps an H200's multiprocessor busy.
pub const AHEAD_WARPS: u32 = 16;

/// A kernel for weights that copies what it needs next to shared memory, and how it uses that. Thread blocks stay for as
/// long as there are rows; the rows of which they have some warps multiply at once are a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ahead {
    /// Whether it is for one token, or for a lot of up to eight.
    pub one: bool,
    /// Tiles of a warp.
    pub tiles: u32,
}

impl Ahead {
    /// The exponent of the segments of rows and tokens, given that of the tokens of a lot.
    #[inline(always)]
    pub const fn segment_bits(self, lot_bits: u32) -> u32 {
        if self.one { 1 } else { TOKEN_PLACES.ilog2() - lot_bits }
    }

    /// Steps of a warp that are in shared memory at once, or on their way to it: three, or two of many bytes, so that
    /// there is room for all warps.
    pub const fn slots(self) -> u32 {
        if self.tiles > if self.one { 2 } else { 1 } { 2 } else { 3 }
    }

    /// Bytes of a step's activations: of one token, eight chunks of 64 and zeros; of a lot, a chunk for each lane.
    pub const fn activation_bytes(self) -> u32 {
        64 * if self.one { 9 } else { WARP }
    }

    /// Bytes of a step: codes of two rows a lane and tile, a word of scales, and activations.
    pub const fn slot_bytes(self) -> u32 {
        self.tiles * WARP * (2 * 16 + 4) + self.activation_bytes()
    }

    /// Bytes of all steps of a warp.
    pub const fn slots_bytes(self) -> u32 {
        self.slots() * self.slot_bytes()
    }

    /// Turns of a warp, at most.
    pub const fn turns(self) -> u32 {
        if self.one { 8 } else { 4 }
    }

    /// Bytes of the sums that a warp keeps of a turn: one token's of each row, or a lot's, as tensor cores have them.
    pub const fn sums_bytes(self) -> u32 {
        let sums = if self.one { ROW_PLACES >> self.segment_bits(0) } else { ROW_PLACES * TOKEN_PLACES };
        self.tiles * sums * 4
    }

    /// Bytes that a warp keeps of a turn: sums, and of a lot a flag behind them, on 16 bytes.
    pub const fn turn_bytes(self) -> u32 {
        self.sums_bytes() + if self.one { 0 } else { 16 }
    }

    /// Bytes of a warp.
    pub const fn warp_bytes(self) -> u32 {
        self.slots_bytes() + self.turns() * self.turn_bytes()
    }
}

/// The conversion that a kernel is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Converts {
    /// None in hardware.
    Nothing,
    /// To or from E2M1.
    E2m1,
    /// To or from E4M3.
    E4m3,
    /// To or from E5M2.
    E5m2,
}

/// A kernel that every PTX contains.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kernel {
    /// The entry point.
    pub name: &'static str,
    /// Threads in a thread block; of the kernels that copy ahead, the most.
    pub threads: u32,
    /// Elements that a thread block handles, scale bytes in the layout kernels, rows in the products; 0 where the grid
    /// says how many thread blocks there are, and for the empty kernel.
    pub elements: u32,
    /// Bytes of shared memory that a launch gives to so many threads.
    pub shared: u32,
    /// Must use the hardware's instruction for it where the target has one.
    pub converts: Converts,
}

impl Kernel {
    /// The kernel as it is launched where thread blocks have so many bytes of shared memory at most. Those that may need
    /// more share it between their warps, and take as many as there is room for, a power of two.
    pub const fn within(mut self, shared: u32) -> Self {
        while self.shared > shared && self.threads > WARP {
            self.threads /= 2;
            self.shared /= 2;
        }
        self
    }

    /// Elements that a thread handles, as a fraction (numerator, denominator).
    pub const fn elements_per_thread(&self) -> (u32, u32) {
        (self.elements, self.threads)
    }

    /// Elements that a warp handles; rows in the products.
    pub const fn elements_per_warp(&self) -> u32 {
        self.elements / (self.threads / WARP)
    }
}

/// How a kind of kernel is launched: threads in a thread block, elements for each, and bytes of shared memory.
type Launch = (u32, u32, u32);

const PRODUCT: Launch = (THREADS, THREADS / WARP * WARP_ELEMENTS, 0);
const AMAX: Launch = (THREADS, THREADS / WARP * WARP_ELEMENTS * AMAX_PIECES, 0);
const SEARCH: Launch = (THREADS, THREADS * SEARCH_EACH, 0);
const ERRORS: Launch = (THREADS, THREADS / ERROR_LANES * ERROR_PART, 0);
const DEQUANTIZE_F32: Launch = (THREADS, THREADS * DEQUANTIZE_CHUNKS * 4, 0);
const DEQUANTIZE_16: Launch = (THREADS, THREADS * DEQUANTIZE_CHUNKS * 8, 0);
const THREAD_A_BLOCK: Launch = (LADDER_THREADS, LADDER_THREADS * 32, 0);
const WARP_A_BLOCK: Launch = (LADDER_THREADS, LADDER_THREADS, 0);
const SCALES: Launch = (THREADS, THREADS * 4, 0);
const ONE_ROW: Launch = (THREADS, THREADS / WARP, 0);
const TWO_ROWS: Launch = (THREADS, 2 * THREADS / WARP, 0);
const FOUR_ROWS: Launch = (THREADS, 4 * THREADS / WARP, 0);
const CUT_WEIGHTS: Launch = (WEIGHTS_THREADS, WEIGHTS_THREADS / WARP, 0);
const EMPTY: Launch = (WARP, 0, 0);
const SINGLE: Launch = (WARP, WARP, 0);

/// Kernels for weights, of so many tiles a warp: their grid says how many thread blocks there are.
const fn weights(tiles: u32) -> Launch {
    (WEIGHTS_THREADS, 0, weights_shared_bytes(tiles))
}

/// The same, for those that copy ahead: with as many warps as a thread block may have.
const fn ahead(one: bool, tiles: u32) -> Launch {
    (AHEAD_WARPS * WARP, 0, AHEAD_WARPS * Ahead { one, tiles }.warp_bytes())
}

const fn kernel(name: &'static str, launch: Launch, converts: Converts) -> Kernel {
    Kernel { name, threads: launch.0, elements: launch.1, shared: launch.2, converts }
}

/// The table. Of a row in `dtypes`, `<prefix> <suffix> launches converts`, there is a kernel for f32, f16 and bf16
/// each; of one in `weights`, one for NVFP4 and MXFP4 with f16 and bf16 each, of which those with f16 convert.
///
/// Names are `<format>_<operation>_<dtype>[_<variant>]_<access>`. Variants of quantization are the ties of the MX
/// formats, and for NVFP4 whether the global scale is given or planned on the device. Access is `vector` where every
/// row starts on 16 bytes, so that a lane moves 16 at once, and `element` where it does not. The ladder's baselines
/// end in what handles a block. Products end in the rows of a warp, or its tiles, those that copy ahead for one token
/// or a lot of them; or in `cut`, where rows are not whole chunks.
macro_rules! kernels {
    (
        dtypes { $($prefix:literal $suffix:literal $f32:expr, $f16:expr, $converts:ident;)+ }
        weights { $($variant:literal $launch:expr, $weights_convert:ident;)+ }
        others { $($name:literal $other:expr, $other_converts:ident;)+ }
    ) => {
        &[
            $(
                kernel(concat!($prefix, "_f32", $suffix), $f32, Converts::$converts),
                kernel(concat!($prefix, "_f16", $suffix), $f16, Converts::$converts),
                kernel(concat!($prefix, "_bf16", $suffix), $f16, Converts::$converts),
            )+
            $(
                kernel(concat!("nvfp4_gemv_weights_f16_", $variant), $launch, Converts::$weights_convert),
                kernel(concat!("nvfp4_gemv_weights_bf16_", $variant), $launch, Converts::Nothing),
                kernel(concat!("mxfp4_gemv_weights_f16_", $variant), $launch, Converts::$weights_convert),
                kernel(concat!("mxfp4_gemv_weights_bf16_", $variant), $launch, Converts::Nothing),
            )+
            $(kernel($name, $other, Converts::$other_converts),)+
        ]
    };
}

const KERNELS: &[Kernel] = kernels! {
    dtypes {
        "mxfp4_quantize" "_even_vector" PRODUCT, PRODUCT, E2m1;
        "mxfp4_quantize" "_even_element" PRODUCT, PRODUCT, E2m1;
        "mxfp4_quantize" "_away_vector" PRODUCT, PRODUCT, Nothing;
        "mxfp4_quantize" "_away_element" PRODUCT, PRODUCT, Nothing;
        "mxfp4_quantize" "_zero_vector" PRODUCT, PRODUCT, Nothing;
        "mxfp4_quantize" "_zero_element" PRODUCT, PRODUCT, Nothing;
        "mxfp4_dequantize" "_vector" DEQUANTIZE_F32, DEQUANTIZE_16, E2m1;
        "mxfp4_dequantize" "_element" PRODUCT, PRODUCT, E2m1;
        "nvfp4_quantize" "_given_vector" PRODUCT, PRODUCT, E2m1;
        "nvfp4_quantize" "_given_element" PRODUCT, PRODUCT, E2m1;
        "nvfp4_quantize" "_planned_vector" PRODUCT, PRODUCT, E2m1;
        "nvfp4_quantize" "_planned_element" PRODUCT, PRODUCT, E2m1;
        "nvfp4_dequantize" "_vector" DEQUANTIZE_F32, DEQUANTIZE_16, E2m1;
        "nvfp4_dequantize" "_element" PRODUCT, PRODUCT, E2m1;
        "mxfp8_e4m3_quantize" "_even_vector" PRODUCT, PRODUCT, E4m3;
        "mxfp8_e4m3_quantize" "_even_element" PRODUCT, PRODUCT, E4m3;
        "mxfp8_e4m3_dequantize" "_vector" DEQUANTIZE_F32, DEQUANTIZE_16, E4m3;
        "mxfp8_e4m3_dequantize" "_element" PRODUCT, PRODUCT, E4m3;
        "mxfp8_e5m2_quantize" "_even_vector" PRODUCT, PRODUCT, E5m2;
        "mxfp8_e5m2_quantize" "_even_element" PRODUCT, PRODUCT, E5m2;
        "mxfp8_e5m2_dequantize" "_vector" DEQUANTIZE_F32, DEQUANTIZE_16, E5m2;
        "mxfp8_e5m2_dequantize" "_element" PRODUCT, PRODUCT, E5m2;
        "mxfp4_search" "_even" SEARCH, SEARCH, Nothing;
        "mxfp4_search" "_away" SEARCH, SEARCH, Nothing;
        "mxfp4_search" "_zero" SEARCH, SEARCH, Nothing;
        "nvfp4_search" "_given" SEARCH, SEARCH, Nothing;
        "nvfp4_search" "_planned" SEARCH, SEARCH, Nothing;
        "nvfp4_plan" "" SINGLE, SINGLE, Nothing;
        "amax" "_vector" AMAX, AMAX, Nothing;
        "amax" "_element" AMAX, AMAX, Nothing;
        "errors" "" ERRORS, ERRORS, Nothing;
        "mxfp4_quantize" "_thread_a_block" THREAD_A_BLOCK, THREAD_A_BLOCK, Nothing;
        "mxfp4_quantize" "_warp_a_block" WARP_A_BLOCK, WARP_A_BLOCK, Nothing;
    }
    weights {
        "one_tiles1" ahead(true, 1), E2m1;
        "one_tiles2" ahead(true, 2), E2m1;
        "one_tiles4" ahead(true, 4), E2m1;
        "lot_tiles1" ahead(false, 1), E2m1;
        "lot_tiles2" ahead(false, 2), E2m1;
        "tiles1" weights(1), E2m1;
        "tiles2" weights(2), E2m1;
        "cut" CUT_WEIGHTS, Nothing;
    }
    others {
        "nvfp4_gemv_rows1" ONE_ROW, E2m1;
        "nvfp4_gemv_rows2" TWO_ROWS, E2m1;
        "nvfp4_gemv_rows4" FOUR_ROWS, E2m1;
        "nvfp4_gemv_cut" ONE_ROW, E2m1;
        "mxfp4_gemv_rows1" ONE_ROW, E2m1;
        "mxfp4_gemv_rows2" TWO_ROWS, E2m1;
        "mxfp4_gemv_rows4" FOUR_ROWS, E2m1;
        "scales_to_swizzled" SCALES, Nothing;
        "scales_to_linear" SCALES, Nothing;
        "empty" EMPTY, Nothing;
    }
};

/// Every kernel, in no particular order.
pub const fn kernels() -> &'static [Kernel] {
    KERNELS
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn launches_fit_into_any_gpu() {
        let ahead = |one: bool, tiles| (if one { "one" } else { "lot" }, Ahead { one, tiles });
        let ahead = [ahead(true, 1), ahead(true, 2), ahead(true, 4), ahead(false, 1), ahead(false, 2)];
        // KiB of shared memory that a thread block may have: before one asks, on compute capability 8.6, 8.0 and 9.0.
        let warps = [(48, [8, 4, 4, 4, 2]), (99, [16, 8, 8, 8, 4]), (163, [16, 16, 8, 8, 8]), (227, [16; 5])];
        for (kib, warps) in warps {
            for kernel in kernels() {
                let within = kernel.within(kib << 10);
                assert!(within.shared <= kib << 10, "{} with {kib} KiB", kernel.name);
                assert!(within == *kernel || kernel.elements == 0 && within.threads >= WARP);
                for ((kind, ahead), warps) in ahead.into_iter().zip(warps) {
                    let [kind, tiles] = [kind, ["tiles1", "tiles2", "tiles4"][ahead.tiles.ilog2() as usize]];
                    if kernel.name.contains(kind) && kernel.name.ends_with(tiles) {
                        assert_eq!(
                            (within.threads, within.shared),
                            (warps * WARP, warps * ahead.warp_bytes())
                        );
                    }
                }
            }
        }
    }
}
