//! The configurations of the GEMM: one value says which kernel multiplies, and one list has them
//! all.

use core::fmt;

use microscale_formats::{Dtype, Format};

use super::fp4::{self, KERNELS as FP4, TOKEN_SCALE_BYTES};
use super::fp8::{AT as FP8_AT, FP8_KERNELS, KERNELS as FP8};
use super::mainloop::{Mainloop, MainloopTraits};
use super::packing::{KERNELS as PACKING, PACKING_KERNELS};
use super::stage::{ScalePieces, Stage, StageLayout};
use super::{MOST_SHARED, PACK_COLUMNS, TILE_ROWS};
use crate::launch::{Converts, Family, Kernel, KernelId, Launch, WARP, kernel};

/// A kernel of the GEMM and how it splits K.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GemmConfig {
    /// The mainloop.
    pub mainloop: Mainloop,
    /// Rows of weights per work tile. For the GEMV, tile rows of a warp: with fewer tokens than
    /// eight, several tile rows are parts of one row.
    pub tile_m: u32,
    /// Tokens per work tile, at most.
    pub tile_n: u32,
    /// Thread blocks per cluster. They share a work tile's rows
    /// ([`Mainloop::clusters_share_rows`]), or else its K-iterations.
    pub cluster: u32,
    /// Warps of a thread block that share rows (sliced-K), a launch parameter of the GEMV; 1 for
    /// others.
    pub slices: u32,
    /// The format of the weights: NVFP4 or MXFP4.
    pub weights: Format,
    /// The dtype of the activations: f16 or bf16. Where they are quantized, of bias, residual and
    /// results instead.
    pub activations: Dtype,
}

/// Calls a macro with every tile: `name: mainloop tile_m tile_n cluster;`. Each has a kernel per
/// format of weights and dtype of activations. Names are `<mainloop>_<tile_m>x<tile_n>`, with `_c2`
/// for clusters of two.
#[macro_export]
macro_rules! gemm_tiles {
    ($callback:ident) => {
        $callback! {
            gemv_16x1: Gemv 16 1 1;
            gemv_16x8: Gemv 16 8 1;
            gemv_16x16: Gemv 16 16 1;
            gemv_32x32: Gemv 32 32 1;
            plain_16x8: GemvPlain 16 8 1;
            ragged_1x1: GemvRagged 1 1 1;
            mma_256x16: Mma 256 16 1;
            mma_256x32: Mma 256 32 1;
            mma_256x64: Mma 256 64 1;
            wgmma_128x8: Wgmma 128 8 1;
            wgmma_128x16: Wgmma 128 16 1;
            wgmma_128x24: Wgmma 128 24 1;
            wgmma_128x48: Wgmma 128 48 1;
            wgmma_128x64: Wgmma 128 64 1;
            wgmma_128x96: Wgmma 128 96 1;
            wgmma_128x104: Wgmma 128 104 1;
            wgmma_128x128: Wgmma 128 128 1;
            wgmma_128x144: Wgmma 128 144 1;
            wgmma_128x192: Wgmma 128 192 1;
            wgmma_128x224: Wgmma 128 224 1;
            wgmma_128x256: Wgmma 128 256 1;
            wgmma_192x16: Wgmma 192 16 1;
            wgmma_192x192: Wgmma 192 192 1;
            wgmma_128x32_c2: Wgmma 128 32 2;
            wgmma_128x64_c2: Wgmma 128 64 2;
            wgmma_128x128_c2: Wgmma 128 128 2;
            multicast_256x192_c2: Multicast 256 192 2;
            multicast_256x256_c2: Multicast 256 256 2;
            blockscale_256x8: BlockScale 256 8 1;
            blockscale_256x32: BlockScale 256 32 1;
            blockscale_256x64: BlockScale 256 64 1;
            blockscale_256x128: BlockScale 256 128 1;
            tcgen05_128x64: Tcgen05 128 64 1;
            tcgen05_128x128: Tcgen05 128 128 1;
            tcgen05_128x256: Tcgen05 128 256 1;
            tcgen05_256x128_c2: Tcgen05 256 128 2;
            tcgen05_256x256_c2: Tcgen05 256 256 2;
            fp8block_256x16: Fp8Block 256 16 1;
            fp8_128x32: Fp8 128 32 1;
            fp8_256x32: Fp8 256 32 1;
            fp8_128x64: Fp8 128 64 1;
            fp8_192x64: Fp8 192 64 1;
            fp8_128x128: Fp8 128 128 1;
            fp8shared_128x256: Fp8Shared 128 256 1;
            fp8shared_256x256_c2: Fp8Shared 256 256 2;
            fp8fast_128x128: Fp8Fast 128 128 1;
            fp8fast_128x256: Fp8Fast 128 256 1;
            fp8fast_256x256_c2: Fp8Fast 256 256 2;
        }
    };
}

/// Declares the tiles, and the kernels of each: NVFP4 and MXFP4, with f16 and bf16.
macro_rules! tables {
    ($($name:ident: $mainloop:ident $m:literal $n:literal $cluster:literal;)+) => {
        const TILES: &[GemmConfig] = &[$(tile(Mainloop::$mainloop, $m, $n, $cluster),)+];
        const NAMES: &[[&str; OPERANDS]] = &[$([
            concat!("nvfp4_gemm_f16_", stringify!($name)),
            concat!("nvfp4_gemm_bf16_", stringify!($name)),
            concat!("mxfp4_gemm_f16_", stringify!($name)),
            concat!("mxfp4_gemm_bf16_", stringify!($name)),
        ],)+];
    };
}
gemm_tiles!(tables);

/// Pairs of a format of weights and a dtype of activations.
const OPERANDS: usize = 4;

const fn tile(mainloop: Mainloop, tile_m: u32, tile_n: u32, cluster: u32) -> GemmConfig {
    let (weights, activations) = (Format::Nvfp4, Dtype::F16);
    GemmConfig { mainloop, tile_m, tile_n, cluster, slices: 1, weights, activations }
}

/// Kernels before the kernels that multiply.
const FIRST: usize = FP8_AT + FP8_KERNELS;
const COUNT: usize = FIRST + TILES.len() * OPERANDS;

/// The kernels: first those before and after a product, then the kernels that multiply.
pub(crate) const KERNELS: &[Kernel] = &{
    let mut all = [PACKING[0]; COUNT];
    let mut i = 0;
    while i < COUNT {
        all[i] = if i < PACKING_KERNELS {
            PACKING[i]
        } else if i < FP8_AT {
            FP4[i - PACKING_KERNELS]
        } else if i < FIRST {
            FP8[i - FP8_AT]
        } else {
            let at = i - FIRST;
            GemmConfig::nth(at).row(NAMES[at / OPERANDS][at % OPERANDS])
        };
        i += 1;
    }
    all
};

impl GemmConfig {
    /// Every configuration, with one slice of K.
    pub fn all() -> impl Iterator<Item = Self> {
        (0..TILES.len() * OPERANDS).map(Self::nth)
    }

    /// The configurations for a format of weights and a dtype of activations.
    pub fn for_operands(weights: Format, activations: Dtype) -> impl Iterator<Item = Self> {
        Self::of(weights, activations).filter(|config| config.mainloop.takes_16_bits())
    }

    /// The configurations for weights and activations in a format, and a dtype of results.
    pub fn for_fp4(format: Format, results: Dtype) -> impl Iterator<Item = Self> {
        Self::of(format, results).filter(|config| config.mainloop.takes_fp4())
    }

    /// The configurations for weights in a format, FP8 activations, and a dtype of results.
    pub fn for_fp8(weights: Format, results: Dtype) -> impl Iterator<Item = Self> {
        Self::of(weights, results).filter(|config| config.mainloop.takes_fp8())
    }

    fn of(weights: Format, activations: Dtype) -> impl Iterator<Item = Self> {
        Self::all().filter(move |config| config.weights == weights && config.activations == activations)
    }

    const fn nth(index: usize) -> Self {
        let operands = index % OPERANDS;
        let weights = if operands < 2 { Format::Nvfp4 } else { Format::Mxfp4 };
        let activations = if operands.is_multiple_of(2) { Dtype::F16 } else { Dtype::Bf16 };
        Self { weights, activations, ..TILES[index / OPERANDS] }
    }

    /// The kernel; `None` if there is none of this tile, or for these operands.
    pub const fn id(self) -> Option<KernelId> {
        let operands = match (self.weights, self.activations) {
            (Format::Nvfp4, Dtype::F16) => 0,
            (Format::Nvfp4, Dtype::Bf16) => 1,
            (Format::Mxfp4, Dtype::F16) => 2,
            (Format::Mxfp4, Dtype::Bf16) => 3,
            _ => return None,
        };
        let mut i = 0;
        while i < TILES.len() {
            let tile = TILES[i];
            if tile.mainloop as u32 == self.mainloop as u32
                && tile.tile_m == self.tile_m
                && tile.tile_n == self.tile_n
                && tile.cluster == self.cluster
            {
                return Some(KernelId::new(Family::Gemm, FIRST + i * OPERANDS + operands));
            }
            i += 1;
        }
        None
    }

    /// The row of the kernel in its family's table.
    const fn row(self, name: &'static str) -> Kernel {
        // NVFP4 and MXFP4 weights become f16 by the hardware's conversion; bf16 has none on every
        // target.
        let converts = match (self.activations, self.mainloop) {
            (Dtype::F16, Mainloop::Gemv | Mainloop::GemvPlain | Mainloop::Mma) => Converts::E2m1,
            _ => Converts::Nothing,
        };
        let row = kernel(name, Some(self.activations), self.launch(), converts);
        let traits = self.mainloop.traits();
        Kernel {
            // Persistent thread blocks take a whole multiprocessor.
            resident: if self.mainloop.is_gemv() { 0 } else { 1 },
            targets: traits.targets,
            ..row
        }
    }

    /// The launch, with as much shared memory as the GPUs with the most have.
    const fn launch(self) -> Launch {
        match self.mainloop {
            Mainloop::Gemv => (self.gemv_warps() * WARP, 0, self.gemv_warps() * self.gemv_warp_bytes()),
            Mainloop::GemvPlain => self.plain_launch(),
            Mainloop::GemvRagged => super::RAGGED,
            _ => (self.threads(), 0, self.shared_bytes(MOST_SHARED)),
        }
    }

    /// The configuration with `slices` slices of K.
    #[must_use]
    pub const fn with_slices(self, slices: u32) -> Self {
        Self { slices, ..self }
    }

    /// The numbers of slices of K for a launch: powers of two up to a thread block's warps.
    pub fn slicings(self) -> impl Iterator<Item = u32> {
        let most = match self.mainloop {
            Mainloop::Gemv => self.gemv_warps(),
            Mainloop::GemvPlain => super::PLAIN_THREADS / WARP,
            _ => 1,
        };
        (0..=most.ilog2()).map(|bits| 1 << bits)
    }

    /// The kernel that packs activations in FP4; `None` if the mainloop does not take them.
    pub const fn fp4_pack(self) -> Option<KernelId> {
        match self.mainloop {
            Mainloop::BlockScale => fp4::pack(self.weights, false),
            Mainloop::Tcgen05 => fp4::pack(self.weights, true),
            _ => None,
        }
    }

    /// Tiles of 16 rows per work tile.
    pub const fn row_tiles(self) -> u32 {
        self.tile_m / TILE_ROWS
    }

    /// Thread blocks of a cluster that share the rows of a work tile, and its activations.
    pub const fn row_sharers(self) -> u32 {
        if self.mainloop.clusters_share_rows() { self.cluster } else { 1 }
    }

    /// Thread blocks of a cluster that share the K-iterations of a work tile, and exchange
    /// accumulators.
    pub const fn k_sharers(self) -> u32 {
        self.cluster / self.row_sharers()
    }

    /// Returns whether it multiplies experts' rows. Their schedule is made on the GPU, for thread
    /// blocks or, with `tcgen05`, for clusters.
    pub const fn takes_experts(self) -> bool {
        self.cluster == 1 || matches!(self.mainloop, Mainloop::Tcgen05)
    }

    /// Rows of a work tile that a thread block has.
    pub const fn block_rows(self) -> u32 {
        self.tile_m / self.row_sharers()
    }

    /// Consumer warps of a thread block.
    pub const fn consumer_warps(self) -> u32 {
        self.block_rows() / self.mainloop.traits().consumer_rows
    }

    /// Threads of a thread block.
    pub const fn threads(self) -> u32 {
        let MainloopTraits { producer_warps, decoder_warps, issuing_warps, .. } = *self.mainloop.traits();
        (self.consumer_warps() + producer_warps + decoder_warps + issuing_warps) * WARP
    }

    /// Packs of activations per K-iteration.
    pub const fn packs(self) -> u32 {
        if self.tile_n <= self.mainloop.traits().two_packs_up_to { 2 } else { 1 }
    }

    /// Returns whether multiplications have a block of each row, whose scale multiplies their sum.
    pub const fn multiplies_blocks(self) -> bool {
        self.mainloop.loads_by_block() && matches!(self.weights, Format::Mxfp4)
    }

    /// Returns whether decoded weights are relative to the largest scale of their row.
    pub const fn has_row_bases(self) -> bool {
        self.mainloop.accumulates_fast() && matches!(self.weights, Format::Mxfp4)
    }

    /// Returns whether the kernel packs activations itself. Their rows must start on 16 bytes.
    pub const fn packs_activations(self) -> bool {
        self.tile_n <= self.mainloop.traits().packs_up_to
    }

    /// Producer warps that pack activations, one per pack of a K-iteration. The others copy.
    pub const fn packing_warps(self) -> u32 {
        if self.packs_activations() { self.packs() } else { 0 }
    }

    /// Bytes of a K-iteration's packs of activations in global memory.
    pub const fn pack_bytes(self) -> u32 {
        self.tile_n * self.packs() * self.mainloop.traits().token_bytes
    }

    /// Bytes of the accumulators of a work tile.
    pub const fn accumulator_bytes(self) -> u64 {
        self.tile_m as u64 * self.tile_n as u64 * 4
    }

    /// A stage for rows whose scales lie in such pieces.
    pub const fn stage(self, scales: ScalePieces) -> Stage {
        let token_bytes = match self.mainloop {
            // Thread blocks share the codes, and all have all scales.
            Mainloop::Tcgen05 => PACK_COLUMNS / 2 / self.row_sharers() + TOKEN_SCALE_BYTES,
            _ => self.mainloop.traits().token_bytes,
        };
        let (layout, scales) = match self.mainloop {
            // The kernel takes rows of scales apart, wherever they start.
            Mainloop::Tcgen05 => (StageLayout::Swizzled, ScalePieces::ONE),
            _ if self.mainloop.has_decoders() => (StageLayout::Decoded, scales),
            _ if self.mainloop.takes_fp8() => (StageLayout::Swizzled, scales),
            _ => (StageLayout::Copied, scales),
        };
        let (rows, tokens, packs) = (self.block_rows(), self.tile_n, self.packs());
        Stage { rows, tokens, packs, token_bytes, layout, scales }
    }

    /// Bytes of shared memory, at most `most`, for all stages that fit, for any layout of scales.
    pub const fn shared_bytes(self, most: u32) -> u32 {
        let [one, other] = [self.stage(ScalePieces::ONE), self.stage(ScalePieces::MOST)];
        let [one, other] = [one.shared_bytes(one.count(most)), other.shared_bytes(other.count(most))];
        if one > other { one } else { other }
    }

    /// Reads a word as [`Display`](fmt::Display) writes it, for a format and a dtype.
    pub fn from_word(word: &str, weights: Format, activations: Dtype) -> Option<Self> {
        let mut parts = word.split('-');
        let name = parts.next()?;
        let mainloop = Mainloop::ALL.into_iter().find(|mainloop| mainloop.traits().word == name)?;
        let (tile_m, tile_n) = parts.next()?.split_once('x')?;
        let (tile_m, tile_n) = (tile_m.parse().ok()?, tile_n.parse().ok()?);
        let (mut cluster, mut slices) = (1, 1);
        for part in parts {
            let (place, number) = match part.split_at_checked(1)? {
                ("c", number) => (&mut cluster, number),
                ("s", number) => (&mut slices, number),
                _ => return None,
            };
            *place = number.parse().ok()?;
        }
        let config = Self { mainloop, tile_m, tile_n, cluster, slices, weights, activations };
        config.id().map(|_| config)
    }
}

/// The word without the operands: `wgmma-256x64-c2`, `gemv-16x1-s8`.
impl fmt::Display for GemmConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { mainloop, tile_m, tile_n, cluster, slices, .. } = self;
        write!(f, "{}-{tile_m}x{tile_n}", mainloop.traits().word)?;
        if *cluster > 1 {
            write!(f, "-c{cluster}")?;
        }
        if *slices > 1 { write!(f, "-s{slices}") } else { Ok(()) }
    }
}

/// The exchange between the two thread blocks of a cluster has room for half of a work tile's
/// accumulators, and a word per tile of 16 rows, in place of two stages.
const _: () = {
    let mut i = 0;
    while i < TILES.len() {
        let tile = TILES[i];
        if tile.k_sharers() > 1 {
            let exchanged = tile.accumulator_bytes() / 2 + tile.row_tiles() as u64 * 4;
            assert!(exchanged <= 2 * tile.stage(ScalePieces::ONE).bytes() as u64);
        }
        i += 1;
    }
};

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gemm::stage::MOST_STAGES;
    use microscale_formats::Words;
    use std::format;
    use std::string::ToString;
    use std::vec::Vec;

    #[test]
    fn names_follow_from_the_fields() {
        for config in GemmConfig::all() {
            let id = config.id().expect("a kernel of the list");
            let tile = config.to_string().replace('-', "_");
            let (weights, activations) = (config.weights.word(), config.activations.word());
            assert_eq!(id.kernel().name, format!("{weights}_gemm_{activations}_{tile}"));
        }
    }

    #[test]
    fn words_are_read_as_they_are_written() {
        for config in GemmConfig::all() {
            for config in [config, config.with_slices(4)] {
                let word = config.to_string();
                let read = GemmConfig::from_word(&word, config.weights, config.activations);
                assert_eq!(read, Some(config), "{word}");
            }
        }
        for wrong in ["", "gemv", "gemv-16", "gemv-16x2", "gemv-16x1-x2", "wgmma-256x16-c2", "mma-1x1-s"] {
            assert_eq!(GemmConfig::from_word(wrong, Format::Nvfp4, Dtype::Bf16), None, "{wrong}");
        }
        assert_eq!(GemmConfig::from_word("mma-256x16", Format::Nvfp4, Dtype::F32), None);
    }

    #[test]
    fn stages_fit_into_any_gpu() {
        let counts = |mainloop, most: u32| -> Vec<u32> {
            let configs = GemmConfig::for_operands(Format::Nvfp4, Dtype::Bf16);
            let of_mainloop = configs.filter(|config| config.mainloop == mainloop && config.k_sharers() == 1);
            of_mainloop.map(|config| config.stage(ScalePieces::ONE).count(most)).collect()
        };
        // Compute capability 8.6, 8.0, 9.0.
        for (kib, stages) in [(99, [4, 3, 2]), (163, [6, 5, 4]), (227, [8, 8, 6])] {
            assert_eq!(counts(Mainloop::Mma, kib << 10), stages);
        }
        for mainloop in [Mainloop::Wgmma, Mainloop::Multicast] {
            let counts = counts(mainloop, MOST_SHARED);
            assert!(counts.iter().all(|stages| (3..=MOST_STAGES).contains(stages)), "{mainloop:?}");
        }
    }
}
