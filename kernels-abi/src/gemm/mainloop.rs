//! The mainloops of the GEMM and their traits: one row each.

use super::PACK_COLUMNS;
use super::fp4::TOKEN_BYTES as FP4_TOKEN_BYTES;
use super::fp8::TOKEN_BYTES as FP8_TOKEN_BYTES;
use crate::launch::Targets;

/// A mainloop: how a kernel loads, decodes and multiplies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mainloop {
    /// Up to 32 tokens per pass over the weights. Each warp copies its own K-iterations ahead.
    Gemv,
    /// Up to eight tokens per pass, by plain loads to registers. Takes rows of any number of whole
    /// chunks.
    GemvPlain,
    /// Rows that are not whole chunks, by the reference.
    GemvRagged,
    /// Warps that copy ahead, decode and multiply by `mma.sync`.
    Mma,
    /// Producer warps copy and, for few tokens, pack; consumer warp groups decode and multiply by
    /// `wgmma`.
    Wgmma,
    /// `Wgmma` in clusters of two thread blocks. Each has half of a work tile's rows. Each copies
    /// half of the activations, and the copies write to both (multicast).
    Multicast,
    /// Warps that copy ahead and multiply 4-bit weights by 4-bit activations, both as they are
    /// stored, by `mma.sync` with block scales.
    BlockScale,
    /// Producer warps copy; one thread issues products of 4-bit weights and 4-bit activations with
    /// block scales (`tcgen05`), whose sums lie in tensor memory. In clusters of two thread blocks,
    /// each has half of a work tile's rows, and both share the activations' codes: each has the
    /// codes of half of the tokens. The first one issues the products of both.
    Tcgen05,
    /// `Wgmma` of E4M3: weights decoded to E4M3, times E4M3 activations under f32 scales.
    Fp8,
    /// `Fp8` for few tokens and MXFP4 weights: weights are decoded without scales, and the sum of
    /// each block is multiplied by its scale. NVFP4 weights are multiplied as by `Fp8`.
    Fp8Block,
    /// `Fp8` for many tokens: decoder warps decode weights to shared memory. Two consumer warp
    /// groups multiply all of them, each by half of the tokens. In clusters of two thread blocks,
    /// as `Multicast`.
    Fp8Shared,
    /// `Fp8` with fast accumulation: tensor cores add the products of all of K. In clusters of two
    /// thread blocks, as `Multicast`.
    Fp8Fast,
}

/// The facts of a mainloop that launchers, kernels, build tool and tests share.
#[derive(Clone, Copy, Debug)]
pub struct MainloopTraits {
    /// The word in kernel names and in `bench`.
    pub word: &'static str,
    /// Rows of weights per consumer warp; 0 for the GEMV, whose configurations say it.
    pub consumer_rows: u32,
    /// Producer warps per thread block. Without any, consumer warps copy for themselves.
    pub producer_warps: u32,
    /// Warps per thread block that decode weights for the consumer warps.
    pub decoder_warps: u32,
    /// Warps per thread block that issue products for the consumer warps.
    pub issuing_warps: u32,
    /// The largest `tile_n` whose K-iterations have two packs of [`PACK_COLUMNS`] columns: copies
    /// then move whole cache lines. Others have one.
    pub two_packs_up_to: u32,
    /// Bytes of a token's activations in a pack.
    pub token_bytes: u32,
    /// Launched programmatically on [targets that can](crate::Target::since_sm90): thread blocks
    /// may start before the previous kernel has ended, and wait for it.
    pub programmatic: bool,
    /// The largest `tile_n` whose kernels read activations where they lie, on 16 bytes, and pack
    /// them in shared memory. Others read the output of a packing kernel.
    pub packs_up_to: u32,
    /// Codes of weights come by tensor copies, whose map is the kernel's last parameter.
    pub copies_boxes: bool,
    /// The targets that have its kernels.
    pub targets: Targets,
}

const GEMV: MainloopTraits = MainloopTraits {
    word: "gemv",
    consumer_rows: 0,
    producer_warps: 0,
    decoder_warps: 0,
    issuing_warps: 0,
    two_packs_up_to: 0,
    token_bytes: PACK_COLUMNS * 2,
    programmatic: true,
    packs_up_to: 0,
    copies_boxes: false,
    targets: Targets::All,
};

const WGMMA: MainloopTraits = MainloopTraits {
    word: "wgmma",
    consumer_rows: 16,
    producer_warps: 4,
    two_packs_up_to: 64,
    packs_up_to: 24,
    targets: Targets::WithWgmma,
    ..GEMV
};

const FP8: MainloopTraits = MainloopTraits { token_bytes: FP8_TOKEN_BYTES, packs_up_to: 0, ..WGMMA };

/// The traits, in the order of [`Mainloop`].
const MAINLOOPS: [MainloopTraits; 12] = [
    GEMV,
    MainloopTraits { word: "plain", ..GEMV },
    MainloopTraits { word: "ragged", ..GEMV },
    MainloopTraits {
        word: "mma",
        consumer_rows: 32,
        programmatic: false,
        targets: Targets::WithoutWgmma,
        ..GEMV
    },
    WGMMA,
    MainloopTraits { word: "multicast", ..WGMMA },
    MainloopTraits {
        word: "blockscale",
        consumer_rows: 32,
        token_bytes: FP4_TOKEN_BYTES,
        targets: Targets::WithBlockScale,
        ..GEMV
    },
    MainloopTraits {
        word: "tcgen05",
        consumer_rows: 32,
        // With more, a quarter of the multiprocessor has three warps, and its lanes have too few
        // registers for 256 tokens' sums.
        producer_warps: 2,
        issuing_warps: 1,
        two_packs_up_to: 256,
        token_bytes: FP4_TOKEN_BYTES,
        copies_boxes: true,
        targets: Targets::WithTcgen05,
        ..GEMV
    },
    MainloopTraits { word: "fp8", two_packs_up_to: 128, ..FP8 },
    MainloopTraits { word: "fp8block", two_packs_up_to: 128, ..FP8 },
    MainloopTraits { word: "fp8shared", decoder_warps: 4, two_packs_up_to: 0, ..FP8 },
    MainloopTraits { word: "fp8fast", two_packs_up_to: 0, ..FP8 },
];

impl Mainloop {
    /// Every mainloop, in the order of the table.
    pub const ALL: [Self; 12] = [
        Self::Gemv,
        Self::GemvPlain,
        Self::GemvRagged,
        Self::Mma,
        Self::Wgmma,
        Self::Multicast,
        Self::BlockScale,
        Self::Tcgen05,
        Self::Fp8,
        Self::Fp8Block,
        Self::Fp8Shared,
        Self::Fp8Fast,
    ];

    /// The traits.
    pub const fn traits(self) -> &'static MainloopTraits {
        &MAINLOOPS[self as usize]
    }

    /// Returns whether it multiplies by `wgmma`, which reads packed activations as core matrices.
    pub const fn is_wgmma(self) -> bool {
        matches!(self, Self::Wgmma | Self::Multicast)
    }

    /// Returns whether activations are quantized to the format of the weights.
    pub const fn takes_fp4(self) -> bool {
        matches!(self, Self::BlockScale | Self::Tcgen05)
    }

    /// Returns whether activations are quantized to E4M3.
    pub const fn takes_fp8(self) -> bool {
        matches!(self, Self::Fp8 | Self::Fp8Block | Self::Fp8Shared | Self::Fp8Fast)
    }

    /// Returns whether tensor cores add the products of all of K in FP8 (fast accumulation).
    pub const fn accumulates_fast(self) -> bool {
        matches!(self, Self::Fp8Fast)
    }

    /// Returns whether multiplications of MXFP4 weights have a block of each row.
    pub const fn loads_by_block(self) -> bool {
        matches!(self, Self::Fp8Block)
    }

    /// Returns whether consumer warps share weights that decoder warps decode.
    pub const fn has_decoders(self) -> bool {
        self.traits().decoder_warps > 0
    }

    /// Returns whether activations are f16 or bf16.
    pub const fn takes_16_bits(self) -> bool {
        !self.takes_fp4() && !self.takes_fp8()
    }

    /// Returns whether the thread blocks of a cluster share a work tile's rows, not its
    /// K-iterations.
    pub const fn clusters_share_rows(self) -> bool {
        matches!(self, Self::Multicast | Self::Tcgen05 | Self::Fp8Shared | Self::Fp8Fast)
    }

    /// Returns whether it reads activations where they lie, without packing kernel and workspace.
    pub const fn is_gemv(self) -> bool {
        self.traits().consumer_rows == 0
    }
}
