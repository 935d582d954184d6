//! AMX and its emulation against the definition in Intel's manual.

use super::*;
#[cfg(target_arch = "x86_64")]
use crate::cpu::isa::Isa;
use crate::cpu::simd::Portable;
#[cfg(target_arch = "x86_64")]
use crate::cpu::simd::{Avx2, Avx512};

/// Random operands of a segment, with exponents in a range.
struct Operands {
    x: Vec<Tile>,
    parts: usize,
    weights: Vec<Lines>,
}

/// Widens the even and the odd element of a word, and flushes subnormal numbers.
fn widened(line: &Lanes<f32>, index: usize) -> [f32; 2] {
    let bits = line[index].to_bits();
    [bits << 16, bits & 0xFFFF_0000].map(|bits| flushed(f32::from_bits(bits)))
}

fn flushed(x: f32) -> f32 {
    if x.is_subnormal() { 0f32.copysign(x) } else { x }
}

impl Operands {
    fn of(parts: usize, steps: usize, exponents: [u16; 2], random: &mut fastrand::Rng) -> Self {
        let [first, last] = exponents;
        let mut value = || u32::from(random.u16(..) & 0x807F | random.u16(first..last) << 7);
        let mut line = || std::array::from_fn(|_| f32::from_bits(value() | value() << 16));
        let x = std::iter::repeat_with(|| std::array::from_fn(|_| line())).take(steps * parts).collect();
        let weights = std::iter::repeat_with(|| std::array::from_fn(|_| Aligned(line())));
        Self { x, parts, weights: weights.take(steps).collect() }
    }

    fn multiplied(&self, tiles: &impl TileUnit) -> Lines {
        let mut sums = [Aligned([f32::NAN; LANES]); ROWS];
        tiles.multiply(&self.x, self.parts, &self.weights, &mut sums);
        sums
    }

    /// The sum of a token and a row of weights, by Intel's manual.
    fn definition(&self, row: usize, token: usize) -> f32 {
        let mut sum = 0.0;
        for (weights, x) in self.weights.iter().zip(self.x.chunks(self.parts)) {
            for x in x {
                let [mut even, mut odd] = [0.0; 2];
                for (pair, x) in x.iter().enumerate() {
                    let [low, high] = widened(&weights[row].0, pair);
                    let [low_x, high_x] = widened(x, token);
                    even = flushed(low.mul_add(low_x, even));
                    odd = flushed(high.mul_add(high_x, odd));
                }
                sum = flushed(flushed(even + odd) + sum);
            }
        }
        sum
    }
}

/// Compares a tile unit with the definition. NaN equals NaN.
fn check(tiles: &impl TileUnit) {
    let mut random = fastrand::Rng::with_seed(11);
    // Products near 1; products that partly vanish; all finite values but the largest; all finite
    // values; overflow, infinities and NaN.
    for exponents in [[118, 134], [48, 72], [0, 130], [0, 255], [200, 256]] {
        for (parts, steps) in [(1, 1), (1, 8), (2, 3), (3, 8)] {
            for _ in 0..if cfg!(miri) { 1 } else { 8 } {
                let operands = Operands::of(parts, steps, exponents, &mut random);
                for (row, found) in operands.multiplied(tiles).iter().enumerate() {
                    for (token, found) in found.0.iter().enumerate() {
                        let expected = operands.definition(row, token);
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

#[test]
fn portable_tiles() {
    check(&EmulatedAmx(Portable));
}

#[cfg(target_arch = "aarch64")]
#[test]
fn neon_tiles() {
    check(&EmulatedAmx(crate::cpu::simd::Neon));
}

#[cfg(target_arch = "x86_64")]
#[test]
fn avx2_tiles() {
    if let Some(simd) = Avx2::detect() {
        check(&EmulatedAmx(simd));
    }
}

#[cfg(target_arch = "x86_64")]
#[test]
fn avx512_tiles() {
    if let Some(simd) = Avx512::detect() {
        check(&EmulatedAmx(simd));
    }
}

/// Returns whether this machine has AMX. Prints that tests are skipped if not.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
fn has_amx() -> bool {
    use std::io::Write;
    let has = Isa::available().any(|isa| isa == Isa::AmxBf16);
    if !has {
        // The harness captures `eprintln!` of passing tests, but not this.
        let _ =
            writeln!(std::io::stderr(), "skipped: this machine has no AMX with BF16, or does not permit it");
    }
    has
}

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
#[test]
fn amx_tiles() {
    if has_amx() {
        // SAFETY: `has_amx` found that this process may use tiles, and this thread has no other
        // `Amx`.
        check(&unsafe { Amx::configure() });
    }
}

/// Products by AMX have the bits of products by the emulation.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
#[test]
fn amx_products() {
    use half::{bf16, f16};
    use microscale_formats::Format;

    use crate::cpu::products::panels::{self, Panel, Scratch};
    use crate::cpu::products::rows::Row;
    use crate::elements::Elements;
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
            let row_codes = bytes.chunks(cols / 2).zip(scales.chunks(blocks));
            let all: Vec<_> = row_codes.map(|(codes, scales)| Row { codes, scales }).collect();
            let panels: Vec<_> = all.chunks(ROWS).map(Panel::of).collect();
            let x: Vec<f32> = std::iter::repeat_with(|| random.f32() - 0.5).take(tokens * cols).collect();
            let half: Vec<_> = x.iter().map(|x| f16::from_f32(*x)).collect();
            let brain: Vec<_> = x.iter().map(|x| bf16::from_f32(*x)).collect();
            for x in [Elements::F32(&x), Elements::F16(&half), Elements::Bf16(&brain)] {
                let x = Isa::AmxBf16.pack_activations(x, cols, tokens);
                let mut sums = vec![[0.0; ROWS]; panels.len() * tokens];
                let (mut emulated, mut scratch) = (sums.clone(), Scratch::new());
                let operands = panels::Operands { format, panels: &panels, x: &x, first_tile: 0 };
                Isa::AmxBf16.multiply(&operands, &mut sums, &mut scratch);
                let products = TileMicrokernel { tiles: &EmulatedAmx(Portable), parts: x.parts() };
                panels::multiply(Portable, &products, &operands, &mut emulated, &mut scratch);
                let bits = |sums: &[panels::TokenSums]| -> Vec<_> {
                    sums.as_flattened().iter().map(|sum| sum.to_bits()).collect()
                };
                assert!(bits(&sums) == bits(&emulated), "{format}, {rows}×{cols}, {tokens}, {}", x.parts());
            }
        }
    }
}
