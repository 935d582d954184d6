//! Cases of paged KV caches.

use half::{bf16, f16};
use microscale::formats::kv::{KvOrder, KvShape};
use microscale::{Element, KvCache, KvCacheMut, KvFormat, Shape, Words, append_kv, gather_kv};
use microscale_executor::{Argument, Buffer};
use microscale_kernels_abi::activations::{KV_THREADS, KvAction, KvParams, Output, kv_kernel};
use microscale_test_support::inputs::patterns;

use super::case::{Prepared, argument};
use super::cases::{Case, ordinary};

/// A cache, and the rows to append or gather.
#[derive(Clone, Copy, Debug)]
struct Kv {
    shape: KvShape,
    format: KvFormat,
    rows: usize,
    /// Elements between rows.
    gap: usize,
    wide_slots: bool,
    /// Sequences whose slots are found by page tables, for gathering.
    sequences: usize,
    wild: bool,
    seed: u64,
}

fn kernel<T: Element>(action: KvAction, format: KvFormat) -> &'static str {
    let output = match format {
        KvFormat::Nvfp4 => Output::Nvfp4,
        KvFormat::Fp8 => Output::Fp8,
    };
    kv_kernel(action, output, T::DTYPE).expect("a kernel of 16-bit values").kernel().name
}

/// Adds the cases of appending and gathering.
pub(crate) fn kv_cases(cases: &mut Vec<Case>) {
    of_dtype::<f16>(cases);
    of_dtype::<bf16>(cases);
}

fn of_dtype<T: Element>(cases: &mut Vec<Case>) {
    let shapes = [(1, 64, 0), (8, 128, 128), (3, 48, 16), (2, 256, 64), (5, 16, 0), (4, 96, 32)];
    for (i, (heads, head_dim, hadamard)) in shapes.into_iter().enumerate() {
        for (j, format) in [KvFormat::Nvfp4, KvFormat::Fp8].into_iter().enumerate() {
            let order = [KvOrder::Nhd, KvOrder::Hnd][(i + j) % 2];
            let mut shape = KvShape { hadamard, ..KvShape::new(order, 5, 4, heads, head_dim) };
            if i.is_multiple_of(2) {
                shape.page_stride *= 2;
            }
            let kv = Kv {
                shape,
                format,
                rows: [6, 1, 9][(i + j) % 3],
                gap: [0, 8, 1][i % 3],
                wide_slots: i.is_multiple_of(2),
                sequences: 0,
                wild: i == 2,
                seed: (i * 2 + j) as u64,
            };
            let what = format!("{} {kv:?}", T::DTYPE.word());
            let append = kernel::<T>(KvAction::Append, format);
            cases.push(Case::new(what.clone(), append.into(), move || appending::<T>(&kv)));
            let gather = kernel::<T>(KvAction::Gather, format);
            cases.push(Case::new(what, gather.into(), move || gathering::<T>(&kv)));
            let tables = Kv { rows: 14, sequences: 2, ..kv };
            let what = format!("{} {tables:?}", T::DTYPE.word());
            cases.push(Case::new(what, gather.into(), move || gathering::<T>(&tables)));
        }
    }
}

const SCALES: [f32; 2] = [0.013, 0.0007];

impl Kv {
    fn row_shape(&self) -> Shape {
        let columns = (self.shape.heads * self.shape.head_dim) as usize;
        Shape::new(self.rows, columns).with_row_stride(columns + self.gap)
    }

    /// Different slots, with some rows skipped.
    fn slots(&self) -> Vec<i64> {
        let slots = self.shape.slots() as i64;
        (0..self.rows as i64).map(|row| if row % 4 == 2 { -1 } else { (row * 7 + 3) % slots }).collect()
    }

    /// Whether there is a slot per row.
    const fn is_by_row(&self) -> bool {
        self.sequences == 0
    }

    fn lengths(&self) -> [usize; 2] {
        self.format.bytes(self.shape.span().expect("a small cache") as usize)
    }

    fn params(&self) -> KvParams {
        let shape = self.row_shape();
        let mut params = KvParams::new(self.shape, self.rows as u32);
        params.row_stride = shape.row_stride as u64;
        params.aligned = u32::from((shape.row_stride * 2).is_multiple_of(16));
        params.wide = u32::from(self.wide_slots);
        params.given = SCALES;
        params
    }

    fn entries(&self, numbers: &[i64]) -> Vec<u8> {
        if self.wide_slots {
            return numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
        }
        numbers.iter().flat_map(|number| (*number as i32).to_le_bytes()).collect()
    }

    fn values<T: Element>(&self, seed: u64) -> Vec<T> {
        let elements = self.row_shape().span().expect("a small matrix");
        if self.wild { patterns(elements, true, seed) } else { ordinary(elements, seed) }
    }
}

fn appending<T: Element>(kv: &Kv) -> Prepared {
    let (keys, values) = (kv.values::<T>(kv.seed), kv.values::<T>(kv.seed + 50));
    let slots = kv.slots();
    let [codes, scales] = kv.lengths();
    // Other slots keep their bytes.
    let mut expected = [vec![0xA5; codes], vec![0xA5; codes], vec![0x3C; scales], vec![0x3C; scales]];
    let mut case = Prepared::new();
    let names = ["key codes", "value codes", "key scales", "value scales"];
    let buffers: Vec<Buffer> =
        names.iter().zip(&expected).map(|(name, bytes)| case.memory.allocate_from(name, bytes)).collect();
    let [key_codes, value_codes, key_scales, value_scales] = &mut expected;
    let cache = KvCacheMut { key_codes, value_codes, key_scales, value_scales };
    append_kv(&kv.shape, kv.format, &keys, &values, kv.row_shape(), &slots, SCALES, cache)
        .expect("the CPU quantizes");
    let params = kv.params();
    let odd = params.aligned == 0;
    let (keys, values) = (case.values(&keys, odd), case.values(&values, odd));
    let slots = case.memory.allocate_from("slots", &kv.entries(&slots));
    let in_memory = kv.seed.is_multiple_of(2);
    let scales: Argument = match in_memory {
        true => case.memory.allocate_from("scales", bytemuck::cast_slice(&SCALES)).into(),
        false => 0u64.into(),
    };
    let mut arguments = vec![keys, values];
    arguments.extend(buffers.iter().map(|buffer| Argument::from(*buffer)));
    arguments.extend([slots.into(), scales, argument(&params)]);
    case.step(kernel::<T>(KvAction::Append, kv.format), params.thread_blocks(), arguments);
    case.shaped((KV_THREADS, 0));
    for ((name, buffer), expected) in names.into_iter().zip(buffers).zip(expected) {
        case.expect(name, buffer, expected);
    }
    case
}

fn gathering<T: Element>(kv: &Kv) -> Prepared {
    let [codes, scales] = kv.lengths();
    let mut rng = fastrand::Rng::with_seed(kv.seed);
    // Every code, and every scale, NaN included. A sign bit in a scale does not occur.
    let mut bytes = |count: usize, mask: u8| (0..count).map(|_| rng.u8(..) & mask).collect::<Vec<u8>>();
    let cache = [bytes(codes, 0xFF), bytes(codes, 0xFF), bytes(scales, 0x7F), bytes(scales, 0x7F)];
    let shape = kv.row_shape();
    let mut params = kv.params();
    // Rows that are not gathered keep their values.
    let before: Vec<T> = vec![T::from_f32(-7.0); shape.span().expect("a small matrix")];
    let mut case = Prepared::new();
    let (slots, lists, lengths) = if kv.is_by_row() {
        let slots = kv.slots();
        let list = kv.entries(&slots);
        (slots, list, Vec::new())
    } else {
        let rows = kv.rows / kv.sequences;
        let table_pages = rows.div_ceil(kv.shape.page_size as usize);
        let tables: Vec<i64> = (0..kv.sequences * table_pages).map(|i| (i * 3 + 1) as i64 % 5).collect();
        let lengths: Vec<u32> = (0..kv.sequences).map(|i| if i == 0 { 3 } else { rows as u32 }).collect();
        params.sequence = microscale_kernels_abi::Divider32::new(rows as u32);
        params.table_pages = table_pages as u32;
        let slot = |row: usize| {
            let (sequence, position) = (row / rows, row % rows);
            if position >= lengths[sequence] as usize {
                return -1;
            }
            let page_size = kv.shape.page_size as usize;
            let page = tables[sequence * table_pages + position / page_size];
            page * page_size as i64 + (position % page_size) as i64
        };
        ((0..kv.rows).map(slot).collect(), kv.entries(&tables), lengths)
    };
    let (mut keys, mut values) = (before.clone(), before.clone());
    let parts = KvCache {
        key_codes: &cache[0],
        value_codes: &cache[1],
        key_scales: &cache[2],
        value_scales: &cache[3],
    };
    gather_kv(&kv.shape, kv.format, parts, &slots, SCALES, &mut keys, &mut values, shape)
        .expect("the CPU dequantizes");
    let odd = params.aligned == 0;
    let mut rows = |name| {
        let bytes = bytemuck::cast_slice(&before);
        if odd {
            case.memory.allocate_from_aligned(name, bytes, 2)
        } else {
            case.memory.allocate_from(name, bytes)
        }
    };
    let (keys_at, values_at) = (rows("keys"), rows("values"));
    let mut arguments = vec![keys_at.into(), values_at.into()];
    for (name, bytes) in ["key codes", "value codes", "key scales", "value scales"].into_iter().zip(&cache) {
        arguments.push(case.memory.allocate_from(name, bytes).into());
    }
    let lengths: Vec<u8> = lengths.iter().flat_map(|length| length.to_le_bytes()).collect();
    let lengths: Argument =
        if lengths.is_empty() { 0u64.into() } else { case.memory.allocate_from("lengths", &lengths).into() };
    let scales = case.memory.allocate_from("scales", bytemuck::cast_slice(&SCALES));
    let lists = case.memory.allocate_from("slots", &lists);
    arguments.extend([lists.into(), lengths, scales.into(), argument(&params)]);
    case.step(kernel::<T>(KvAction::Gather, kv.format), params.thread_blocks(), arguments);
    case.shaped((KV_THREADS, 0));
    case.expect("keys", keys_at, bytemuck::cast_slice(&keys).to_vec());
    case.expect("values", values_at, bytemuck::cast_slice(&values).to_vec());
    case
}
