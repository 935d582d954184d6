//! Paged KV caches: quantizing rows of K and V into slots, and dequantizing slots.

use microscale_formats::activations::hadamard_factor;
use microscale_formats::kv::KvShape;
use microscale_formats::nvfp4::{Arithmetic, BLOCK};
use microscale_formats::plan::NvPlan;
use microscale_formats::{E4m3, GlobalScale};
use microscale_kernels_abi::activations::{KV_THREADS, KvParams};
use microscale_kernels_abi::launch::{WARP, WARP_ELEMENTS};

use super::blocks;
use super::fp8::encode_any;
use super::one_by_one::{rolled, select};
use super::output::Place;
use super::source::{column, load};
use crate::access::MOST_STEPS;
use crate::dtype::{self, Bf16, Chunk, Dtype, F16};
use crate::format::{Element, Nv};
use crate::hardware::{ptx, warp};

/// A cache of K or V, and its rows.
#[derive(Clone, Copy)]
struct Cache {
    rows: *mut u8,
    codes: *mut u8,
    /// Null in FP8.
    scales: *mut u8,
}

/// A row's piece.
struct Piece {
    /// 0 for K, 1 for V.
    which: u32,
    row: u32,
    number: u32,
    page: u32,
    /// The token's place in its page.
    place: u32,
}

/// The number in a list of slots or of pages. Numbers of 32 bits have a sign.
///
/// # Safety
/// The list has more than `index` entries in global memory, of 64 bits if they are `wide`.
#[inline(always)]
unsafe fn entry(list: *const u8, index: u64, wide: bool) -> i64 {
    // SAFETY: the entry exists.
    unsafe {
        if wide {
            *list.cast::<i64>().add(index as usize)
        } else {
            i64::from(*list.cast::<i32>().add(index as usize))
        }
    }
}

impl Piece {
    /// The warp's piece; `None` past the last, and for rows without a slot.
    ///
    /// With page tables, `slots` has a table per sequence, and `lengths` the number of its rows
    /// that exist.
    ///
    /// # Safety
    /// The contract of the kernels here.
    #[inline(always)]
    unsafe fn of_warp(params: &KvParams, slots: *const u8, lengths: *const u32) -> Option<Self> {
        let warp = warp::thread_block() * (KV_THREADS / WARP) + warp::thread() / WARP;
        let (index, number) = params.pieces.divide(warp);
        let which = u32::from(index >= params.rows);
        let row = index - which * params.rows;
        if row >= params.rows {
            return None;
        }
        let wide = params.wide != 0;
        let (page, place) = if params.table_pages == 0 {
            // SAFETY: there is a slot for each row.
            let slot = unsafe { entry(slots, u64::from(row), wide) };
            if slot < 0 || slot as u64 >= params.shape.slots() {
                return None;
            }
            // Fewer than 2^32 slots, as the launcher checks.
            params.page_size.divide(slot as u32)
        } else {
            let (sequence, position) = params.sequence.divide(row);
            let (entry_of_page, place) = params.page_size.divide(position);
            // SAFETY: there is a length for each sequence.
            if position >= unsafe { *lengths.add(sequence as usize) } || entry_of_page >= params.table_pages {
                return None;
            }
            let index = u64::from(sequence) * u64::from(params.table_pages) + u64::from(entry_of_page);
            // SAFETY: each sequence has a table of that many pages.
            let page = unsafe { entry(slots, index, wide) };
            if page < 0 || page >= i64::from(params.shape.pages) {
                return None;
            }
            (page as u32, place)
        };
        Some(Self { which, row, number, page, place })
    }

    /// The offset of an element of the row in the cache, in elements. `chunk` is its chunk of
    /// eight.
    #[inline(always)]
    fn offset(&self, params: &KvParams, chunk: u32) -> u64 {
        let (head, in_head) = params.head_chunks.divide(chunk);
        params.shape.offset(self.page, self.place, head) + u64::from(8 * in_head)
    }
}

/// The blocks of NVFP4 of a piece.
struct Blocks<'a> {
    params: &'a KvParams,
    piece: &'a Piece,
    cache: Cache,
}

impl Blocks<'_> {
    /// The offset of a block in elements; `None` past the row's end.
    #[inline(always)]
    fn offset(&self, block: u32) -> Option<usize> {
        let KvShape { heads, head_dim, .. } = self.params.shape;
        let first = block * BLOCK as u32;
        (first < heads * head_dim).then(|| self.piece.offset(self.params, first / 8) as usize)
    }
}

impl Place for Blocks<'_> {
    #[inline(always)]
    fn codes(&self, block: u32, _: u32) -> *mut u8 {
        self.offset(block).map_or(core::ptr::null_mut(), |offset| self.cache.codes.wrapping_add(offset / 2))
    }

    #[inline(always)]
    fn scale(&self, block: u32) -> *mut u8 {
        let offset = self.offset(block);
        offset.map_or(core::ptr::null_mut(), |offset| self.cache.scales.wrapping_add(offset / BLOCK))
    }
}

/// The scale of K or V: in memory, or in the parameters.
///
/// # Safety
/// `scales` is null or has two numbers in global memory.
#[inline(always)]
unsafe fn scale_of(params: &KvParams, scales: *const f32, which: u32) -> f32 {
    if scales.is_null() {
        if which == 0 { params.given[0] } else { params.given[1] }
    } else {
        // SAFETY: there are two.
        unsafe { *scales.add(which as usize) }
    }
}

/// Multiplies a piece's vectors by the Hadamard matrix, `width` elements at a time, and rounds.
#[inline(always)]
fn transform<D: Dtype>(chunks: &mut [Chunk; MOST_STEPS], width: u32) {
    let factor = match width {
        16 => hadamard_factor(16),
        32 => hadamard_factor(32),
        64 => hadamard_factor(64),
        _ => hadamard_factor(128),
    };
    for j in 0..D::STEPS as usize {
        let mut values = [0.0; 8];
        for i in 0..D::CHUNK {
            values[i as usize] = D::widen(&chunks[j], i);
        }
        let [a, b, c, d, e, f, g, h] = values;
        let [a, b, c, d, e, f, g, h] = [a + b, a - b, c + d, c - d, e + f, e - f, g + h, g - h];
        let [a, b, c, d, e, f, g, h] = [a + c, b + d, a - c, b - d, e + g, f + h, e - g, f - h];
        let mut values = [a + e, b + f, c + g, d + h, a - e, b - f, c - g, d - h];
        let mut distance = 1;
        while 8 * distance < width {
            let upper = warp::lane() & distance != 0;
            for i in 0..D::CHUNK as usize {
                let own = values[i];
                let other = f32::from_bits(warp::shuffle_xor(own.to_bits(), distance));
                values[i] = if upper { other - own } else { own + other };
            }
            distance *= 2;
        }
        for i in 0..D::CHUNK as usize {
            values[i] *= factor;
        }
        chunks[j] = D::narrow(&values);
    }
}

/// # Safety
/// The kernel's contract.
#[inline(always)]
unsafe fn append<D: Dtype, const FP8: bool>(
    caches: [Cache; 2],
    slots: *const u8,
    scales: *const f32,
    params: &KvParams,
) {
    // SAFETY: the same contract. The whole warp has one piece.
    let Some(piece) = (unsafe { Piece::of_warp(params, slots, core::ptr::null()) }) else { return };
    let cache = if piece.which == 0 { caches[0] } else { caches[1] };
    let columns = params.shape.heads * params.shape.head_dim;
    let row = cache.rows.wrapping_add((2 * u64::from(piece.row) * params.row_stride) as usize);
    let aligned = params.aligned != 0;
    let whole = aligned && (piece.number + 1) * WARP_ELEMENTS <= columns;
    // SAFETY: the row has these columns.
    let mut chunks = unsafe { load::<D>(row, piece.number, 1, columns, aligned, whole) };
    if piece.which == 0 && params.shape.hadamard != 0 {
        transform::<D>(&mut chunks, params.shape.hadamard);
    }
    // SAFETY: the same contract.
    let scale = unsafe { scale_of(params, scales, piece.which) };
    if !FP8 {
        let format = Nv::new(NvPlan::new(Arithmetic::TRANSFORMER_ENGINE, 1.0 / scale), 0);
        let place = Blocks { params, piece: &piece, cache };
        // SAFETY: each slot that exists has room for the row's blocks, and is one row's.
        unsafe { blocks::store::<D, _, _>(&chunks, piece.number, &place, &format) };
        return;
    }
    for j in 0..D::STEPS {
        let packed = encode_any::<D>(&chunks[j as usize], scale);
        let column = column::<D>(piece.number, j);
        if column < columns {
            let offset = piece.offset(params, column / 8) as usize;
            // SAFETY: as above; heads are whole chunks, so codes are on 8 bytes.
            unsafe { *cache.codes.add(offset).cast::<u64>() = packed };
        }
    }
}

/// # Safety
/// The kernel's contract.
#[inline(always)]
unsafe fn gather<D: Dtype, const FP8: bool>(
    caches: [Cache; 2],
    slots: *const u8,
    lengths: *const u32,
    scales: *const f32,
    params: &KvParams,
) {
    // SAFETY: the same contract.
    let Some(piece) = (unsafe { Piece::of_warp(params, slots, lengths) }) else { return };
    let cache = if piece.which == 0 { caches[0] } else { caches[1] };
    let columns = params.shape.heads * params.shape.head_dim;
    let row = cache.rows.wrapping_add((2 * u64::from(piece.row) * params.row_stride) as usize);
    // SAFETY: the same contract.
    let scale = unsafe { scale_of(params, scales, piece.which) };
    for j in 0..D::STEPS {
        let column = column::<D>(piece.number, j);
        if column >= columns {
            continue;
        }
        let offset = piece.offset(params, column / 8) as usize;
        let mut values = [0.0; 8];
        if FP8 {
            // SAFETY: the slot exists; heads are whole chunks, so codes are on 8 bytes.
            let codes = unsafe { *cache.codes.add(offset).cast::<u64>() };
            let decoded = E4m3::decode_chunk(codes);
            for i in 0..D::CHUNK as usize {
                values[i] = decoded[i] * scale;
            }
        } else {
            // SAFETY: the slot exists; a chunk has four bytes of codes.
            let (codes, block) =
                unsafe { (*cache.codes.add(offset / 2).cast::<u32>(), *cache.scales.add(offset / BLOCK)) };
            let factor = GlobalScale::Multiplier(scale).factor(E4m3::from_bits(block));
            let decoded = dtype::decode(codes);
            for i in 0..D::CHUNK as usize {
                values[i] = decoded[i] * factor;
            }
        }
        let mut chunk = D::narrow(&values);
        for i in 0..D::CHUNK {
            if values[i as usize].is_nan() {
                D::replace(&mut chunk, i, D::NAN_WORD);
            }
        }
        let to = row.wrapping_add(2 * column as usize);
        if params.aligned != 0 {
            // SAFETY: the row has the columns, and starts on 16 bytes.
            unsafe { ptx::store_16(to, chunk) };
        } else {
            rolled!(i below D::CHUNK => {
                let element = (select(&chunk, i / 2) >> (16 * (i % 2))) as u16;
                // SAFETY: the row has the columns.
                unsafe { *to.cast::<u16>().add(i as usize) = element };
            });
        }
    }
}

const _: () = assert!(WARP_ELEMENTS.is_multiple_of(128));

/// The entry points of a dtype: `append in FP8, in NVFP4, gather in FP8, in NVFP4`.
macro_rules! entries {
    ($($append:ident $gather:ident <$dtype:ty, $fp8:literal>)+) => {$(
        /// Quantizes rows of K and V into slots of paged caches.
        ///
        /// # Safety
        /// `params` describes the rows at `keys` and `values`, aligned to the dtype and as
        /// `aligned` says, and the caches at `*_codes`, on 8 bytes, and `*_scales` (null in FP8).
        /// `slots` has an entry per row; entries that are not slots of the cache are skipped, and
        /// others differ from each other. `scales` is null or has the scales of K and V. All in
        /// global memory; only this kernel writes the caches during the kernel, and they overlap
        /// nothing. The launch has the shape that the ABI gives.
        #[unsafe(no_mangle)]
        pub unsafe extern "ptx-kernel" fn $append(
            keys: *mut u8,
            values: *mut u8,
            key_codes: *mut u8,
            value_codes: *mut u8,
            key_scales: *mut u8,
            value_scales: *mut u8,
            slots: *const u8,
            scales: *const f32,
            params: KvParams,
        ) {
            let caches = [
                Cache { rows: keys, codes: key_codes, scales: key_scales },
                Cache { rows: values, codes: value_codes, scales: value_scales },
            ];
            // SAFETY: the same contract.
            unsafe { append::<$dtype, $fp8>(caches, slots, scales, &params) }
        }

        /// Dequantizes slots of paged caches to rows of K and V.
        ///
        /// # Safety
        /// As for the kernel that appends, with rows to write and caches to read. With page tables
        /// in the parameters, `slots` has the tables, and `lengths` a number per sequence.
        #[unsafe(no_mangle)]
        pub unsafe extern "ptx-kernel" fn $gather(
            keys: *mut u8,
            values: *mut u8,
            key_codes: *mut u8,
            value_codes: *mut u8,
            key_scales: *mut u8,
            value_scales: *mut u8,
            slots: *const u8,
            lengths: *const u32,
            scales: *const f32,
            params: KvParams,
        ) {
            let caches = [
                Cache { rows: keys, codes: key_codes, scales: key_scales },
                Cache { rows: values, codes: value_codes, scales: value_scales },
            ];
            // SAFETY: the same contract.
            unsafe { gather::<$dtype, $fp8>(caches, slots, lengths, scales, &params) }
        }
    )+};
}

entries! {
    kv_append_fp8_f16 kv_gather_fp8_f16<F16, true>
    kv_append_fp8_bf16 kv_gather_fp8_bf16<Bf16, true>
    kv_append_nvfp4_f16 kv_gather_nvfp4_f16<F16, false>
    kv_append_nvfp4_bf16 kv_gather_nvfp4_bf16<Bf16, false>
}
