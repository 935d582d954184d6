//! Exact casts between formats that replace only the scales.
//!
//! MXFP4 and NVFP4 have the same elements, and MXFP8's are finer ([`to_mxfp8`]). A block of MXFP4
//! is two blocks of NVFP4. Its scale is a power of two. It is exact in E4M3 under a global scale
//! that is a power of two too, provided that the scales of all nonzero blocks are close enough.

use microscale_formats::nvfp4::Direction;
use microscale_formats::plan::power_of_two;
use microscale_formats::{E2m1, E4m3, E8m0, Format, GlobalScale};
use rayon::prelude::*;

use crate::cpu::exact_cast::Factors;
use crate::cpu::{self, Isa};
use crate::error::{Error, Result};
use crate::shape::QuantizedShape;
use crate::tensor::QuantizedTensor;
use crate::view::QuantizedView;

/// Exponents of E4M3's smallest and largest power of two.
const POWERS: [i32; 2] = [-9, 8];
/// Exponent range of a global scale whose inverse is a normal number too.
const GLOBAL: [i32; 2] = [-126, 126];

/// An exact cast of MXFP4 tensors to NVFP4 with a common global scale.
///
/// vLLM needs a common global scale for layers that it fuses. First [look](Self::look_at) at all
/// tensors, then [cast](Self::cast) each. Values are bit-exact.
///
/// # Examples
/// ```
/// use microscale::cast::Mxfp4ToNvfp4;
/// use microscale::{Numerics, Format, Recipe, Shape, cpu, quantize};
///
/// let recipe = Recipe::of(Format::Mxfp4, Numerics::Ocp)?;
/// let tensor = quantize(&[1.5f32; 64], Shape::new(2, 32), &recipe)?.tensor;
/// let cast = Mxfp4ToNvfp4::default().look_at(&tensor)?.cast(&tensor)?;
/// assert_eq!(cast.format(), Format::Nvfp4);
/// assert_eq!(cpu::dequantize::<f32>(&cast), cpu::dequantize::<f32>(&tensor));
/// # Ok::<(), microscale::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Mxfp4ToNvfp4 {
    /// Smallest and largest scale of blocks that are not zero.
    scales: Option<[u8; 2]>,
}

impl Mxfp4ToNvfp4 {
    /// Takes the scales of a tensor into account.
    ///
    /// # Errors
    /// [`Error::NotCast`] unless the tensor is MXFP4.
    pub fn look_at<'a>(self, tensor: impl Into<QuantizedView<'a>>) -> Result<Self> {
        let tensor = tensor.into();
        check(tensor.shape().format)?;
        let scales = tensor.linear_scales();
        let blocks = tensor.codes().chunks(Format::Mxfp4.block_bytes()).zip(&*scales);
        Ok(blocks.fold(self, |cast, (codes, scale)| {
            // Most scales are within the range so far, so their codes need not be read.
            let between = cast.scales.is_some_and(|[least, most]| (least..=most).contains(scale));
            let ignored = || E8m0::from_bits(*scale).is_nan() || codes.iter().all(|pair| pair & 0x77 == 0);
            if between || ignored() { cast } else { cast.and(Self { scales: Some([*scale; 2]) }) }
        }))
    }

    /// Combines the scales of two casts.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        let scales = match (self.scales, other.scales) {
            (Some([a, b]), Some([c, d])) => Some([a.min(c), b.max(d)]),
            (one, other) => one.or(other),
        };
        Self { scales }
    }

    /// Returns the powers of two from the smallest to the largest scale, inclusive.
    ///
    /// 0 if all blocks are zero.
    pub fn span(self) -> u32 {
        self.scales.map_or(0, |[least, most]| u32::from(most - least) + 1)
    }

    /// Returns whether E4M3 has enough powers of two for an exact cast.
    pub fn is_exact(self) -> bool {
        let least = self.scales.map_or(0, |[least, _]| exponent(least) - self.global_exponent());
        least >= POWERS[0]
    }

    /// Returns the common global scale, a power of two.
    pub fn global_scale(self, direction: Direction) -> GlobalScale {
        let multiplier = power_of_two(self.global_exponent());
        GlobalScale::Multiplier(multiplier).toward(direction)
    }

    /// Returns the exponent of the global scale. It maps the largest scale to E4M3's largest power
    /// of two.
    fn global_exponent(self) -> i32 {
        let most = self.scales.map_or(0, |[_, most]| exponent(most) - POWERS[1]);
        most.clamp(GLOBAL[0], GLOBAL[1])
    }

    /// Casts a tensor: its codes, each block's scale twice, and [`Self::global_scale`] as a
    /// divisor.
    ///
    /// # Errors
    /// [`Error::NotExact`] if the scales span more powers of two than E4M3 has, [`Error::NotCast`]
    /// unless the tensor is MXFP4, and [`Error::TooLarge`].
    pub fn cast<'a>(self, tensor: impl Into<QuantizedView<'a>>) -> Result<QuantizedTensor> {
        let tensor = tensor.into();
        let from = tensor.shape();
        check(from.format)?;
        if !self.is_exact() {
            return Err(Error::NotExact { span: self.span() });
        }
        let shape = QuantizedShape::new(Format::Nvfp4, from.rows, from.cols);
        let scales = tensor.linear_scales();
        // Blocks per row. A tensor without columns has none.
        let blocks = from.blocks_per_row().max(1);
        // Rows that end in the first half of a block have no second half.
        let kept = shape.blocks_per_row();
        let rows = tensor.codes().chunks(blocks * Format::Mxfp4.block_bytes());
        let codes = rows.map(|row| &row[..kept * Format::Nvfp4.block_bytes()]).collect::<Vec<_>>().concat();
        let twice: [[u8; 2]; 256] = std::array::from_fn(|scale| [self.scale(scale as u8); 2]);
        let mut of_halves = Vec::with_capacity(2 * scales.len());
        for row in scales.chunks(blocks) {
            let end = of_halves.len() + kept;
            of_halves.extend(row.iter().flat_map(|scale| twice[usize::from(*scale)]));
            of_halves.truncate(end);
        }
        QuantizedTensor::from_parts(shape, codes, of_halves)?
            .with_global_scale(self.global_scale(Direction::Divisor))
    }

    /// Returns a block's new scale. The scale of a zero block may be out of range, which changes
    /// nothing.
    fn scale(self, scale: u8) -> u8 {
        if E8m0::from_bits(scale).is_nan() {
            return E4m3::NAN.to_bits();
        }
        let power = (exponent(scale) - self.global_exponent()).clamp(POWERS[0], POWERS[1]);
        E4m3::from_f32(power_of_two(power)).to_bits()
    }
}

/// Elements of an MXFP8 block.
const BLOCK: usize = 32;

/// Minimum number of MXFP8 blocks per thread.
const BLOCKS_TOGETHER: usize = 1 << 9;

/// Casts MXFP4 or NVFP4 to MXFP8 with E4M3 elements, if every value is exact. NaN stay NaN.
///
/// The cast takes the smallest scale that fits a block's largest value. If a block is not
/// exact under this scale, it is not exact under any. Doubling the scale only removes numbers up to
/// that value: normal numbers keep their significands, and subnormal numbers get twice as far
/// apart. MXFP4 is always exact, because its codes are numbers of E4M3 too, under the same scales.
/// NVFP4 is exact if block and global scales are near powers of two: a product of two significands
/// needs six bits, and E4M3 has four.
///
/// # Errors
/// [`Error::NotExactBlock`] for the first block that is not exact, and for rows that are not whole
/// blocks of 32. [`Error::NotCast`] for other formats, and [`Error::TooLarge`].
///
/// # Examples
/// ```
/// use microscale::cast::to_mxfp8;
/// use microscale::{Numerics, Format, Recipe, Shape, cpu, quantize};
///
/// let recipe = Recipe::of(Format::Mxfp4, Numerics::Ocp)?;
/// let tensor = quantize(&[1.5f32; 64], Shape::new(2, 32), &recipe)?.tensor;
/// let cast = to_mxfp8(&tensor)?;
/// assert_eq!(cast.format(), Format::Mxfp8E4m3);
/// assert_eq!(cpu::dequantize::<f32>(&cast), cpu::dequantize::<f32>(&tensor));
/// # Ok::<(), microscale::Error>(())
/// ```
pub fn to_mxfp8<'a>(tensor: impl Into<QuantizedView<'a>>) -> Result<QuantizedTensor> {
    let tensor = tensor.into();
    let (from, to) = (tensor.shape(), Format::Mxfp8E4m3);
    if !matches!(from.format, Format::Mxfp4 | Format::Nvfp4) {
        return Err(Error::NotCast { from: from.format, to });
    }
    let not_exact = |block| Error::NotExactBlock { to, block, columns: from.cols };
    if from.cols % BLOCK != 0 {
        return Err(not_exact(0));
    }
    let shape = QuantizedShape::new(to, from.rows, from.cols);
    if from.format == Format::Mxfp4 {
        let element = |code: u8| E4m3::from_f32(E2m1::from_bits(code & 0xF).to_f32()).to_bits();
        let pairs: [[u8; 2]; 256] =
            std::array::from_fn(|pair| [element(pair as u8), element(pair as u8 >> 4)]);
        let codes = tensor.codes().iter().flat_map(|pair| pairs[usize::from(*pair)]).collect();
        return QuantizedTensor::from_parts(shape, codes, tensor.linear_scales().into_owned());
    }
    let values: Vec<f32> = cpu::dequantize(tensor);
    let (mut codes, mut scales) = (vec![0; values.len()], vec![0; values.len() / BLOCK]);
    let blocks = codes.par_chunks_mut(BLOCK).zip(scales.par_iter_mut()).zip(values.par_chunks(BLOCK));
    let blocks = blocks.enumerate().with_min_len(BLOCKS_TOGETHER);
    let inexact = blocks.filter_map(|(number, ((codes, scale), values))| {
        let power = e4m3_exponent(largest(values)).map_or(-127, |power| power.max(-127));
        *scale = (power + 127) as u8;
        (!to_e4m3(values, power, codes)).then_some(number)
    });
    match inexact.min() {
        Some(number) => Err(not_exact(number)),
        None => QuantizedTensor::from_parts(shape, codes, scales),
    }
}

/// Returns the largest magnitude of values that are numbers, or 0.
#[doc(hidden)]
pub fn largest(values: &[f32]) -> f32 {
    // Magnitudes order like their bits, and NaN is above infinity.
    let magnitudes = values.iter().map(|value| (value.to_bits() & 0x7FFF_FFFF) as i32);
    let numbers = magnitudes.map(|bits| if bits > f32::INFINITY.to_bits() as i32 { 0 } else { bits });
    f32::from_bits(numbers.fold(0, i32::max) as u32)
}

/// Returns the exponent of the smallest power of two that brings a magnitude into E4M3's range.
///
/// 0 and infinity have none.
#[doc(hidden)]
pub fn e4m3_exponent(largest: f32) -> Option<i32> {
    if largest == 0.0 || !largest.is_finite() {
        return None;
    }
    // In f64 every f32 except 0 is a normal number, and its bits hold its exponent.
    let least = (f64::from(largest).to_bits() >> 52) as i32 - 1023 - POWERS[1];
    let fits = f64::from(largest) <= f64::from(E4m3::MAX) * f64::from_bits(((least + 1023) as u64) << 52);
    Some(if fits { least } else { least + 1 })
}

/// Encodes values as E4M3 under the scale 2^`power`. Returns whether all values are exact.
///
/// `power` is from -127 to 127, and `codes` has the length of `values`. All NaN get the same code.
#[doc(hidden)]
pub fn to_e4m3(values: &[f32], power: i32, codes: &mut [u8]) -> bool {
    Isa::best().to_e4m3(values, Factors::of(power), codes)
}

/// Returns the exponent of an E8M0 scale that is a number.
fn exponent(scale: u8) -> i32 {
    i32::from(scale) - 127
}

fn check(from: Format) -> Result<()> {
    let there = from == Format::Mxfp4;
    if there { Ok(()) } else { Err(Error::NotCast { from, to: Format::Nvfp4 }) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu;

    fn tensor(rows: usize, cols: usize, scale: impl FnMut() -> u8, seed: u64) -> QuantizedTensor {
        let shape = QuantizedShape::new(Format::Mxfp4, rows, cols);
        let (codes, scales) = shape.bytes().unwrap();
        let mut random = fastrand::Rng::with_seed(seed);
        let codes: Vec<u8> = (0..codes).map(|_| random.u8(..)).collect();
        let mut scale = scale;
        QuantizedTensor::from_parts(shape, codes, (0..scales).map(|_| scale()).collect()).unwrap()
    }

    fn assert_same(tensor: &QuantizedTensor, cast: &QuantizedTensor, what: &str) {
        let [before, after]: [Vec<f32>; 2] = [cpu::dequantize(tensor), cpu::dequantize(cast)];
        assert_eq!(before.len(), after.len());
        for (i, (a, b)) in before.iter().zip(&after).enumerate() {
            assert_eq!(a.to_bits(), b.to_bits(), "{what}: {i}: {a} became {b}");
        }
    }

    #[test]
    fn casts_are_bit_exact_within_the_range_of_e4m3() {
        for (rows, cols) in [(3, 32), (5, 96), (4, 40), (2, 48), (7, 17), (1, 1)] {
            for least in [0, 1, 20, 110, 127, 200, 237] {
                let mut random = fastrand::Rng::with_seed(u64::from(least) + cols as u64);
                let tensor = tensor(rows, cols, || random.u8(least..least + 18), 3);
                let look = Mxfp4ToNvfp4::default().look_at(&tensor).unwrap();
                assert!(look.span() <= 18);
                assert_same(&tensor, &look.cast(&tensor).unwrap(), &format!("{rows}x{cols} from {least}"));
            }
        }
    }

    #[test]
    fn mxfp4_casts_to_mxfp8_with_equal_values() {
        for (rows, cols) in [(3, 32), (5, 96), (1, 1024)] {
            let mut random = fastrand::Rng::with_seed(cols as u64);
            let tensor = tensor(rows, cols, || random.u8(..255), 4);
            assert_same(&tensor, &to_mxfp8(&tensor).unwrap(), &format!("{rows}x{cols}"));
        }
        let odd = tensor(1, 48, || 120, 5);
        assert!(matches!(to_mxfp8(&odd), Err(Error::NotExactBlock { columns: 48, .. })));
        let twice = to_mxfp8(&tensor(1, 32, || 120, 5)).unwrap();
        assert!(matches!(to_mxfp8(&twice), Err(Error::NotCast { .. })));
    }

    /// Makes an NVFP4 tensor with one block scale and all codes.
    fn nvfp4(scale: E4m3, global_scale: f32) -> QuantizedTensor {
        let shape = QuantizedShape::new(Format::Nvfp4, 1, 32);
        let codes: Vec<u8> = (0..16).map(|pair: u8| pair | ((pair + 1) % 16) << 4).collect();
        let tensor = QuantizedTensor::from_parts(shape, codes, vec![scale.to_bits(); 2]).unwrap();
        tensor.with_global_scale(GlobalScale::Multiplier(global_scale)).unwrap()
    }

    #[test]
    fn nvfp4_casts_to_mxfp8_exactly_if_some_scale_fits_all_values() {
        let mut exact = 0;
        for bits in 0..=0x7F {
            for global_scale in [1.0, 0.25, 2f32.powi(-40), 0.75, 1.0 / 3.0] {
                let tensor = nvfp4(E4m3::from_bits(bits), global_scale);
                let values: Vec<f32> = cpu::dequantize(&tensor);
                // By definition, any scale may be used.
                let fits = |scale: u8| {
                    values.iter().all(|value| {
                        let quotient = f64::from(*value) / 2f64.powi(exponent(scale));
                        let back = f64::from(E4m3::from_f32(quotient as f32).to_f32());
                        value.is_nan() || back * 2f64.powi(exponent(scale)) == f64::from(*value)
                    })
                };
                let any = (0..=254).any(fits);
                match to_mxfp8(&tensor) {
                    Ok(cast) if bits < 0x7F => {
                        assert_same(&tensor, &cast, &format!("{bits} {global_scale}"));
                        assert!(any);
                        exact += 1;
                    }
                    Ok(cast) => assert!(cpu::dequantize::<f32>(&cast).iter().all(|value| value.is_nan())),
                    Err(error) => {
                        assert!(!any, "{bits} {global_scale}: {error}");
                        assert!(matches!(error, Error::NotExactBlock { block: 0, .. }));
                    }
                }
            }
        }
        assert!(exact > 127, "{exact}");
    }

    #[test]
    fn a_scale_range_one_power_too_wide_is_refused() {
        let mut scales = [100, 118].into_iter();
        let wide = tensor(2, 32, || scales.next().unwrap(), 1);
        let look = Mxfp4ToNvfp4::default().look_at(&wide).unwrap();
        assert_eq!(look.span(), 19);
        assert!(matches!(look.cast(&wide), Err(Error::NotExact { span: 19 })));
    }

    #[test]
    fn zeros_and_nan_may_have_any_scale() {
        let shape = QuantizedShape::new(Format::Mxfp4, 1, 128);
        let mut codes = vec![0x80; 64];
        codes[..16].fill(0x2F);
        codes[48..].fill(0x31);
        // Numbers, zeros under a large and under a small scale, and NaN.
        let tensor = QuantizedTensor::from_parts(shape, codes, vec![100, 254, 0, 255]).unwrap();
        let look = Mxfp4ToNvfp4::default().look_at(&tensor).unwrap();
        assert_eq!(look.span(), 1);
        assert_same(&tensor, &look.cast(&tensor).unwrap(), "zeros and NaN");
    }

    #[test]
    fn tensors_may_share_a_global_scale() {
        let [low, high] = [105, 112].map(|scale| tensor(2, 64, || scale, 9));
        let alone = Mxfp4ToNvfp4::default().look_at(&low).unwrap();
        let both = alone.look_at(&high).unwrap();
        assert_eq!(both, alone.and(Mxfp4ToNvfp4::default().look_at(&high).unwrap()));
        assert_eq!(both.span(), 8);
        for tensor in [&low, &high] {
            let cast = both.cast(tensor).unwrap();
            assert_eq!(cast.global_scale(), Some(both.global_scale(Direction::Divisor)));
            assert_same(tensor, &cast, "both");
        }
        assert!(matches!(both.cast(&both.cast(&low).unwrap()), Err(Error::NotCast { .. })));
    }
}
