//! A lane's fragment of the weights: codes and scales from a stage, decoded to operands of the
//! tensor cores.

use core::marker::PhantomData;

#[cfg(microscale_wgmma)]
use microscale_kernels_abi::gemm::stage::ScalePieces;
use microscale_kernels_abi::gemm::stage::Stage;
use microscale_kernels_abi::gemm::{QUAD, TILE_ROWS};

use super::tile::Tile;
use super::tile_scheduler::KRange;
use super::weight_loader::{last_row, scales_per_k_iteration, swizzled};
use crate::hardware::warp::pin_in_register;
use crate::hardware::{shared, warp};
use crate::product::operand::{CHUNK_BYTES, Codes};
use crate::product::problem::Problem;
use crate::product::tensor_cores::{Activations, WeightFormat, is_in_range};

/// Rows of a matrix that lanes load together.
const MATRIX_ROWS: u32 = 8;

/// A lane's codes and scales of two rows, eight apart, in one pack: a chunk of each.
#[derive(Clone, Copy, Default)]
pub(super) struct Fragment {
    pub(super) rows: [Codes; 2],
    pub(super) scales: [u32; 2],
    /// The lane's chunk is not past the end of a row.
    #[cfg(microscale_wgmma)]
    pub(super) exists: bool,
}

impl Fragment {
    /// The factors of both halves of each chunk.
    #[inline(always)]
    pub(super) fn factors<F: WeightFormat, D: Activations>(&self) -> [[u32; 2]; 2] {
        self.scales.map(F::factors::<D>)
    }

    /// The larger [offset](WeightFormat::scale_offset) of the two scales.
    #[inline(always)]
    pub(super) fn scale_offset<F: WeightFormat, D: Activations>(&self) -> u32 {
        F::scale_offset::<D>(self.scales[0]).max(F::scale_offset::<D>(self.scales[1]))
    }

    /// Decodes and scales word `I` of both rows: the first operands of two multiplications.
    #[inline(always)]
    pub(super) fn decode<D: Activations, const I: usize>(
        &self,
        factors: &[[u32; 2]; 2],
        table: u32,
    ) -> [[u32; 4]; 2] {
        let weights = |row: usize| {
            D::weights(self.rows[row][I], table).map(|pair| D::scaled(pair, factors[row][I / 2]))
        };
        let ([a, b, c, d], [e, f, g, h]) = (weights(0), weights(1));
        [[a, e, b, f], [c, g, d, h]]
    }
}

/// A lane's codes and scales of two rows, eight apart, in one pack, where a multiplication has a
/// block of each row: a word of each of the four blocks, and their scales.
#[cfg(microscale_wgmma)]
pub(super) struct BlockFragment {
    pub(super) rows: [Codes; 2],
    /// A byte per block, of each row. As an array, LLVM would join them in 64 bits.
    pub(super) scales: (u32, u32),
}

/// Reads a lane's fragments from stages, K-iteration by K-iteration.
pub(super) struct FragmentLoader<F, T> {
    /// Offset in a stage of the codes of the first row.
    stage_codes: u32,
    /// Offset in a stage of the first row's scales, without `lead`.
    stage_scales: u32,
    /// Bytes of the scales of eight rows in a stage.
    eight_rows: u32,
    /// Scales in a piece that precede the next K-iteration's.
    lead: u32,
    /// The mask of a piece's bytes.
    piece_mask: u32,
    /// Difference, in bits, between the leads of rows that are eight apart.
    lead_difference: u32,
    /// Chunks of a row from the lane's first chunk in the next pack to the end; not positive past
    /// the end.
    chunks_left: i32,
    /// Every pack has four scales, which start on 4 bytes in a stage.
    #[cfg(microscale_wgmma)]
    pub(super) scale_words: bool,
    types: PhantomData<(F, T)>,
}

impl<F: WeightFormat, T: Tile> FragmentLoader<F, T> {
    /// Bytes of the codes of eight rows in a stage.
    const EIGHT_ROWS: u32 = TILE_ROWS / 2 * T::CHUNKS * CHUNK_BYTES;
    /// True if a K-iteration's scales of a row fill a piece, and the leads of rows eight apart are
    /// equal.
    const WHOLE_PIECES: bool = F::BLOCKS > 1 && scales_per_k_iteration::<F, T>() == 16;
    /// True if [`Self::load_blocks`] loads fragments. Chunks are blocks then.
    pub(super) const BY_BLOCK: bool = F::BLOCKS == 1 && T::CONFIG.mainloop.loads_by_block();

    /// The loader for tile `tile` of 16 rows of the work tile, from K-iteration `start` on.
    #[inline(always)]
    pub(super) fn new(problem: &Problem, stage: &Stage, tile: u32, start: u32) -> Self {
        // A shuffle stays where it is. Without it, LLVM computes the offsets before the loop over
        // work tiles and keeps them in registers.
        let lane = pin_in_register(warp::lane());
        let of_eight = lane / QUAD;
        let blocks = problem.shape.blocks as u32;
        let row = tile * TILE_ROWS + of_eight;
        // By block, the lane has the address of a row of a matrix, and the scales of all chunks.
        let (row_of_codes, chunk, quarter) = if Self::BY_BLOCK {
            (tile * TILE_ROWS + lane % MATRIX_ROWS, lane / MATRIX_ROWS, 0)
        } else {
            (row, lane % QUAD, lane % QUAD)
        };
        let codes = (row_of_codes * T::CHUNKS + swizzled::<T>(row_of_codes, chunk)) * CHUNK_BYTES;
        let scales = row * stage.scales.all() + quarter * F::BLOCKS;
        // The first scales of all row tiles are at the same offset in their pieces. Past the last
        // row, any value does.
        let first = problem.weights.scales.addr() as u32
            + row * blocks
            + start * const { scales_per_k_iteration::<F, T>() };
        let lead = first % stage.scales.bytes;
        // With whole pieces, the lead stays the same.
        let (scales, lead) = if Self::WHOLE_PIECES { (scales + lead, 0) } else { (scales, lead) };
        let chunks = (blocks * F::BLOCK_BYTES as u32 / CHUNK_BYTES) as i32;
        Self {
            stage_codes: pin_in_register(codes),
            stage_scales: pin_in_register(stage.scales_offset() + scales),
            eight_rows: TILE_ROWS / 2 * stage.scales.all(),
            lead,
            piece_mask: stage.scales.bytes - 1,
            lead_difference: if F::BLOCKS == 1 { TILE_ROWS / 2 * blocks % stage.scales.bytes } else { 0 },
            chunks_left: chunks - (start * T::CHUNKS + quarter) as i32,
            #[cfg(microscale_wgmma)]
            scale_words: (problem.weights.scales.addr() as u32 | blocks).is_multiple_of(QUAD),
            types: PhantomData,
        }
    }

    /// Loads the fragments of pack `pack` of the stage at `stage`, of `TILES` tiles from the lane's
    /// first on. Chunks past the end of a row are zeros, with scale `past_end`.
    ///
    /// # Safety
    /// The stage holds the next K-iteration, and `pack` is its next pack.
    #[inline(always)]
    pub(super) unsafe fn load<const TILES: usize>(
        &mut self,
        stage: u32,
        pack: u32,
        past_end: u32,
    ) -> [Fragment; TILES] {
        let mut fragments = [Fragment::default(); TILES];
        for i in 0..TILES {
            #[cfg(microscale_wgmma)]
            {
                fragments[i].exists = self.exists();
            }
            for half in 0..2 {
                let eight = (2 * i + half) as u32;
                // SAFETY: the same contract.
                unsafe {
                    fragments[i].rows[half] = self.load_codes(stage, pack, eight);
                    fragments[i].scales[half] = self.load_scales(stage, pack, eight, past_end);
                }
            }
        }
        self.advance(pack);
        fragments
    }

    /// Loads the fragment of pack `pack` of the stage at `stage`. Blocks past the end of a row are
    /// zeros, with scale 0. `WORDS` says that scales are words: [`Self::scale_words`].
    ///
    /// # Safety
    /// As for [`Self::load`]. [`Self::BY_BLOCK`] is true. `WORDS` is false unless
    /// [`Self::scale_words`] is true. All lanes of the warp call it.
    #[cfg(microscale_wgmma)]
    #[inline(always)]
    pub(super) unsafe fn load_blocks<const WORDS: bool>(&mut self, stage: u32, pack: u32) -> BlockFragment {
        let codes = stage + (self.stage_codes ^ pack * (QUAD * CHUNK_BYTES));
        let [first, second] = [0, 1].map(|eight| self.scales_address(stage, pack, eight));
        // SAFETY: the offsets are inside the stage, of codes on 16 bytes. With `WORDS`, the caller
        // promises scales on 4 bytes. A K-iteration has eight scales of a row, so its pieces have
        // 16 bytes, and rows eight apart have the same lead.
        let fragment = unsafe {
            let rows = [0, 1].map(|eight| shared::load_matrices(codes + eight * Self::EIGHT_ROWS));
            let scales = if WORDS {
                let second = first + const { TILE_ROWS / 2 * ScalePieces::ONE.all() };
                (shared::load(first), shared::load(second))
            } else {
                (self.bytes(first), self.bytes(second))
            };
            BlockFragment { rows, scales }
        };
        self.advance(pack);
        fragment
    }

    /// Loads the scales of a pack's blocks that exist, one after the other, to the bytes of a word.
    ///
    /// # Safety
    /// As for [`Self::load_blocks`]; the scales are at `address`.
    #[cfg(microscale_wgmma)]
    #[inline(always)]
    unsafe fn bytes(&self, address: u32) -> u32 {
        let mut bytes = 0;
        for block in 0..QUAD {
            if self.chunks_left > block as i32 {
                // SAFETY: the scale is there.
                bytes |= unsafe { shared::load_u8(address + block) } << (8 * block);
            }
        }
        bytes
    }

    /// Returns whether the lane's chunk in the next pack is not past the end of a row.
    #[inline(always)]
    pub(super) fn exists(&self) -> bool {
        self.chunks_left > 0
    }

    /// Loads the lane's codes in pack `pack` of the stage at `stage`, of the row that is `eight`
    /// eights after its first one. [`Self::advance`] must follow.
    ///
    /// # Safety
    /// As for [`Self::load`].
    #[inline(always)]
    pub(super) unsafe fn load_codes(&self, stage: u32, pack: u32, eight: u32) -> Codes {
        let codes = stage + (self.stage_codes ^ pack * (QUAD * CHUNK_BYTES));
        // SAFETY: the offset is inside the stage, on 16 bytes.
        unsafe { shared::load_16(codes + eight * Self::EIGHT_ROWS) }
    }

    /// Loads the scales of [`Self::load_codes`]; `past_end` past the end of a row.
    ///
    /// # Safety
    /// As for [`Self::load`].
    #[inline(always)]
    pub(super) unsafe fn load_scales(&self, stage: u32, pack: u32, eight: u32, past_end: u32) -> u32 {
        let scales = self.scales_address(stage, pack, eight);
        // SAFETY: the offset is inside the stage, on the bytes of a chunk's scales.
        let scales = unsafe {
            match F::BLOCKS {
                1 => shared::load_u8(scales),
                _ => shared::load_u16(scales),
            }
        };
        // Scales past the end of a row belong to another row.
        if self.exists() { scales } else { past_end }
    }

    /// The address of the lane's first scale in pack `pack` of the stage at `stage`, of the row
    /// that is `eight` eights after its first one.
    #[inline(always)]
    fn scales_address(&self, stage: u32, pack: u32, eight: u32) -> u32 {
        let scales = stage + self.stage_scales + pack * QUAD * F::BLOCKS;
        let lead = if eight.is_multiple_of(2) { self.lead } else { self.lead ^ self.lead_difference };
        scales + eight * self.eight_rows + lead
    }

    /// Advances from pack `pack` of a stage to the next pack.
    #[inline(always)]
    pub(super) fn advance(&mut self, pack: u32) {
        self.chunks_left -= QUAD as i32;
        if !Self::WHOLE_PIECES && pack + 1 == T::PACKS {
            self.lead = (self.lead + const { scales_per_k_iteration::<F, T>() }) & self.piece_mask;
        }
    }
}

/// Returns whether every chunk of the lane whose scale is out of range is all zeros, in the
/// K-iterations of a work tile.
///
/// # Safety
/// The kernel's contract.
#[inline(always)]
pub(super) unsafe fn out_of_range_is_zero<F: WeightFormat, D: Activations, T: Tile>(
    problem: &Problem,
    row_tile: u32,
    tile: u32,
    k_range: &KRange,
) -> bool {
    let (of_eight, quarter) = (warp::lane() / QUAD, warp::lane() % QUAD);
    let blocks = problem.shape.blocks;
    let end = (k_range.end * T::CHUNKS).min((blocks * F::BLOCK_BYTES / u64::from(CHUNK_BYTES)) as u32);
    let mut in_range = true;
    let mut half = 0;
    while half < 2 {
        let in_tile =
            (tile * TILE_ROWS + half * (TILE_ROWS / 2) + of_eight).min(last_row::<T>(problem, row_tile));
        let row = problem.weights.row::<F>(u64::from(row_tile * T::M + in_tile), blocks);
        let mut chunk = k_range.start * T::CHUNKS + quarter;
        while chunk < end {
            // SAFETY: `in_tile` is at most the last row and `chunk` is before the row's end.
            in_range &= unsafe { is_in_range::<F, D>(&row.load_once::<F>(chunk)) };
            chunk += QUAD;
        }
        half += 1;
    }
    in_range
}
