//! Tiles of every kind against the definition, and activations against their parts.

use half::{bf16, f16};

use super::*;
#[cfg(target_arch = "x86_64")]
use crate::cpu::isa::Isa;
use crate::cpu::vector::Portable;
#[cfg(target_arch = "x86_64")]
use crate::cpu::vector::{Avx2, Avx512};
use crate::element::Element;
use crate::elements::Elements;

/// Operands of a segment, with exponents from one on.
struct Operands {
    x: Vec<Tile>,
    parts: usize,
    weights: Vec<[Aligned; PANELS]>,
}

impl Operands {
    fn of(parts: usize, steps: usize, exponents: [u16; 2], random: &mut fastrand::Rng) -> Self {
        let [first, last] = exponents;
        let mut value = || random.u16(..) & 0x807F | random.u16(first..last) << 7;
        let mut tile = || std::array::from_fn(|_| std::array::from_fn(|_| value()));
        let x = std::iter::repeat_with(&mut tile).take(steps * parts).collect();
        let mut pair = || f32::from_bits(u32::from(value()) | u32::from(value()) << 16);
        let mut words = || std::array::from_fn(|_| Aligned(std::array::from_fn(|_| pair())));
        Self { x, parts, weights: std::iter::repeat_with(&mut words).take(steps * PAIRS).collect() }
    }

    fn multiplied(&self, tiles: &impl TileProducts) -> [TokenSums; TOKENS] {
        let mut sums = [[Aligned([f32::NAN; LANES]); PANELS]; TOKENS];
        tiles.multiply(&self.x, self.parts, &self.weights, &mut sums);
        sums
    }

    /// The sum of a token and a row of weights, as Intel's manual has it.
    fn definition(&self, token: usize, panel: usize, lane: usize) -> f32 {
        let flushed = |x: f32| if x.is_subnormal() { 0f32.copysign(x) } else { x };
        let widened = |bits: u32| flushed(f32::from_bits(bits << 16));
        let mut sum = 0.0;
        for (step, x) in self.x.chunks(self.parts).enumerate() {
            for x in x {
                let [mut even, mut odd] = [0.0; 2];
                for pair in 0..PAIRS {
                    let weights = self.weights[step * PAIRS + pair][panel].0[lane].to_bits();
                    let [low, high] = [x[token][2 * pair], x[token][2 * pair + 1]].map(u32::from);
                    even = flushed(widened(weights & 0xFFFF).mul_add(widened(low), even));
                    odd = flushed(widened(weights >> 16).mul_add(widened(high), odd));
                }
                sum = flushed(flushed(even + odd) + sum);
            }
        }
        sum
    }
}

/// Compares tiles with the definition: of sums that overflow only that they are no numbers.
fn check(tiles: &impl TileProducts) {
    let mut random = fastrand::Rng::with_seed(11);
    // Products around 1, from those that vanish to those that do not, all but infinities and NaN, and all.
    for exponents in [[118, 134], [48, 72], [0, 130], [0, 255], [200, 256]] {
        for (parts, steps) in [(1, 1), (1, 8), (2, 3), (3, 8)] {
            for _ in 0..if cfg!(miri) { 1 } else { 8 } {
                let operands = Operands::of(parts, steps, exponents, &mut random);
                let found = operands.multiplied(tiles);
                for (token, found) in found.iter().enumerate() {
                    for (panel, found) in found.iter().enumerate() {
                        for (lane, found) in found.0.iter().enumerate() {
                            let expected = operands.definition(token, panel, lane);
                            let same =
                                found.to_bits() == expected.to_bits() || found.is_nan() && expected.is_nan();
                            assert!(
                                same,
                                "{found} is not {expected}: {exponents:?}, {parts} parts, {steps} steps"
                            );
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn portable_tiles() {
    check(&Emulated::<Portable>::new());
}

#[cfg(target_arch = "aarch64")]
#[test]
fn neon_tiles() {
    check(&Emulated::<crate::cpu::vector::Neon>::new());
}

#[cfg(target_arch = "x86_64")]
#[test]
fn avx2_tiles() {
    if Isa::available().any(|isa| isa == Isa::Avx2) {
        check(&Emulated::<Avx2>::new());
    }
}

#[cfg(target_arch = "x86_64")]
#[test]
fn avx512_tiles() {
    if Isa::available().any(|isa| isa == Isa::Avx512) {
        check(&Emulated::<Avx512>::new());
    }
}

/// Returns whether this machine has AMX, or says that it has none.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
fn has_amx() -> bool {
    use std::io::Write;
    let has = Isa::available().any(|isa| isa == Isa::AmxBf16);
    if !has {
        // Past what the harness keeps of tests that pass.
        let _ =
            writeln!(std::io::stderr(), "skipped: this machine has no AMX with BF16, or does not permit it");
    }
    has
}

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
#[test]
fn amx_tiles() {
    if has_amx() {
        // SAFETY: tiles were found to be permitted, and no others are configured on this thread.
        check(&unsafe { Amx::configure() });
    }
}

/// Whole products by AMX have the bits that the emulation has.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
#[test]
fn amx_products() {
    use crate::cpu::rows::Row;
    if !has_amx() {
        return;
    }
    let mut random = fastrand::Rng::with_seed(12);
    for format in [Format::Nvfp4, Format::Mxfp4] {
        for (rows, cols, tokens) in
            [(1, 32, 9), (48, 256, 16), (50, 288, 33), (130, 4128, 130), (200, 800, 17)]
        {
            let bytes: Vec<u8> = std::iter::repeat_with(|| random.u8(..)).take(rows * cols / 2).collect();
            let blocks = cols / format.block();
            let scales: Vec<u8> = std::iter::repeat_with(|| random.u8(90..127)).take(rows * blocks).collect();
            let of_row = bytes.chunks(cols / 2).zip(scales.chunks(blocks));
            let all: Vec<_> = of_row.map(|(codes, scales)| Row { codes, scales }).collect();
            let groups: Vec<_> = all.chunks(panels::ROWS).map(|rows| PanelRows::of(format, rows)).collect();
            let x: Vec<f32> = std::iter::repeat_with(|| random.f32() - 0.5).take(tokens * cols).collect();
            let half: Vec<_> = x.iter().map(|x| f16::from_f32(*x)).collect();
            let brain: Vec<_> = x.iter().map(|x| bf16::from_f32(*x)).collect();
            for x in [Elements::F32(&x), Elements::F16(&half), Elements::Bf16(&brain)] {
                let x = Isa::AmxBf16.tiles(x, cols, tokens);
                let mut sums = vec![[Aligned([0.0; LANES]); PANELS]; groups.len() * tokens];
                let (mut emulated, mut scratch) = (sums.clone(), Scratch::new(groups.len()));
                let operands = TileOperands { format, groups: &groups, x: &x, first_tile: 0 };
                Isa::AmxBf16.multiply_tiles(&operands, &mut sums, &mut scratch);
                let tiles = Emulated::<Portable>::new();
                multiply::<Portable, _>(&tiles, &operands, &mut emulated, &mut scratch);
                let bits = |sums: &[TokenSums]| -> Vec<_> {
                    sums.as_flattened().iter().map(|sums| sums.0.map(f32::to_bits)).collect()
                };
                assert!(bits(&sums) == bits(&emulated), "{format}, {rows}×{cols}, {tokens}, {}", x.parts());
            }
        }
    }
}

/// Checks that the parts of each activation come to it, at its place, and that there are zeros elsewhere.
fn check_parts<T: Element>(wrap: impl Fn(&[T]) -> Elements<'_>, exponents: std::ops::Range<u32>) {
    let mut random = fastrand::Rng::with_seed(13);
    for (cols, tokens) in [(1, 9), (33, 16), (256, 17), (300, 40), (800, 3)] {
        let mut one = || {
            T::from_f32(f32::from_bits(random.u32(..) & 0x807F_FFFF | random.u32(exponents.clone()) << 23))
        };
        let values: Vec<T> = std::iter::repeat_with(&mut one).take(cols * tokens).collect();
        for isa in Isa::available() {
            let tiled = isa.tiles(wrap(&values), cols, tokens);
            let parts = tiled.parts();
            for (segment, elements) in tiled.segments().enumerate() {
                for tile in 0..tokens.div_ceil(TOKENS) {
                    let tiles = tiled.part(tile, segment);
                    assert_eq!(tiles.len(), elements / CHUNK * parts);
                    for (i, place) in (0..TOKENS * elements).map(|i| (i / elements, i % elements)).enumerate()
                    {
                        let (token, column) = (tile * TOKENS + place.0, segment * 256 + place.1);
                        let exists = token < tokens && column < cols;
                        let expected = if exists { values[token * cols + column].to_f32() } else { 0.0 };
                        let of_chunk = &tiles[place.1 / CHUNK * parts..][..parts];
                        let of_part =
                            |tile: &Tile| f32::from_bits(u32::from(tile[place.0][place.1 % CHUNK]) << 16);
                        let sum: f64 = of_chunk.iter().map(|tile| f64::from(of_part(tile))).sum();
                        assert_eq!(sum, f64::from(expected), "{isa:?}, {cols}, {tokens}, {i}");
                    }
                }
            }
        }
    }
}

#[test]
fn parts_come_to_the_activations() {
    // f32 from where the lowest bits are normal numbers.
    check_parts::<f32>(|values| Elements::F32(values), 24..255);
    check_parts::<f16>(|values| Elements::F16(values), 90..143);
    check_parts::<bf16>(|values| Elements::Bf16(values), 1..255);
}
