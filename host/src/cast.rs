//! Exact casts between formats: other scales over the same codes.
//!
//! MXFP4 and NVFP4 have the same elements. A block of MXFP4 is two of NVFP4, and its scale, a power of two, is one in E4M3 under a
//! global scale that is one too, if the scales of all blocks that are not zeros are not too far apart.

use microscale_formats::nvfp4::Direction;
use microscale_formats::plan::power_of_two;
use microscale_formats::{E4m3, E8m0, Format, GlobalScale};

use crate::error::{Error, Result};
use crate::shape::QuantizedShape;
use crate::tensor::QuantizedTensor;
use crate::view::QuantizedView;

/// The exponents of E4M3's least and largest power of two.
const POWERS: [i32; 2] = [-9, 8];
/// The exponents of a global scale, so that its inverse is a normal number too.
const GLOBAL: [i32; 2] = [-126, 126];

/// The cast of MXFP4 to NVFP4 of tensors that share a global scale, as vLLM wants it of layers that it fuses: [look](Self::look_at) at
/// all of them, then [cast](Self::cast) each. The values are the same to the bit.
///
/// # Examples
/// ```
/// use microscale::cast::Mxfp4ToNvfp4;
/// use microscale::{Convention, Format, Recipe, Shape, cpu, quantize};
///
/// let recipe = Recipe::of(Format::Mxfp4, Convention::Ocp)?;
/// let tensor = quantize(&[1.5f32; 64], Shape::new(2, 32), &recipe)?.tensor;
/// let cast = Mxfp4ToNvfp4::default().look_at(&tensor)?.cast(&tensor)?;
/// assert_eq!(cast.format(), Format::Nvfp4);
/// assert_eq!(cpu::dequantize::<f32>(&cast), cpu::dequantize::<f32>(&tensor));
/// # Ok::<(), microscale::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Mxfp4ToNvfp4 {
    /// The least and the largest scale of blocks that are not zeros.
    scales: Option<[u8; 2]>,
}

impl Mxfp4ToNvfp4 {
    /// Takes the scales of a tensor into account.
    ///
    /// # Errors
    /// [`Error::NotCast`] unless it is MXFP4.
    pub fn look_at<'a>(self, tensor: impl Into<QuantizedView<'a>>) -> Result<Self> {
        let tensor = tensor.into();
        check(tensor.shape().format)?;
        let scales = tensor.linear_scales();
        let blocks = tensor.codes().chunks(Format::Mxfp4.block_bytes()).zip(&*scales);
        let found = blocks.filter(|(codes, scale)| {
            let zeros = codes.iter().all(|pair| pair & 0x77 == 0);
            !zeros && !E8m0::from_bits(**scale).is_nan()
        });
        Ok(found.fold(self, |cast, (_, scale)| cast.and(Self { scales: Some([*scale; 2]) })))
    }

    /// The cast of the tensors of both.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        let scales = match (self.scales, other.scales) {
            (Some([a, b]), Some([c, d])) => Some([a.min(c), b.max(d)]),
            (one, other) => one.or(other),
        };
        Self { scales }
    }

    /// The powers of two from the least scale to the largest, both included; 0 if all blocks are zeros.
    pub fn span(self) -> u32 {
        self.scales.map_or(0, |[least, most]| u32::from(most - least) + 1)
    }

    /// Returns whether E4M3 has as many powers of two.
    pub fn is_exact(self) -> bool {
        let least = self.scales.map_or(0, |[least, _]| exponent(least) - self.global_exponent());
        least >= POWERS[0]
    }

    /// The global scale that the tensors share, a power of two.
    pub fn global_scale(self, direction: Direction) -> GlobalScale {
        let multiplier = power_of_two(self.global_exponent());
        GlobalScale::Multiplier(multiplier).toward(direction)
    }

    /// The exponent of the global scale: the one that makes the largest scale E4M3's largest power of two.
    fn global_exponent(self) -> i32 {
        let most = self.scales.map_or(0, |[_, most]| exponent(most) - POWERS[1]);
        most.clamp(GLOBAL[0], GLOBAL[1])
    }

    /// Casts a tensor: its codes, each block's scale twice, and [`Self::global_scale`], as a divisor.
    ///
    /// # Errors
    /// [`Error::NotExact`] if the scales span more powers of two than E4M3 has, [`Error::NotCast`] unless the tensor is MXFP4, and
    /// [`Error::TooLarge`].
    pub fn cast<'a>(self, tensor: impl Into<QuantizedView<'a>>) -> Result<QuantizedTensor> {
        let tensor = tensor.into();
        let from = tensor.shape();
        check(from.format)?;
        if !self.is_exact() {
            return Err(Error::NotExact { span: self.span() });
        }
        let shape = QuantizedShape::new(Format::Nvfp4, from.rows, from.cols);
        let scales = tensor.linear_scales();
        // Blocks of a row; a tensor without columns has none.
        let blocks = from.blocks_per_row().max(1);
        // Rows that end in the first half of a block have no second one.
        let kept = shape.blocks_per_row();
        let rows = tensor.codes().chunks(blocks * Format::Mxfp4.block_bytes());
        let codes = rows.flat_map(|row| &row[..kept * Format::Nvfp4.block_bytes()]).copied().collect();
        let rows = scales.chunks(blocks);
        let scales = rows.flat_map(|row| row.iter().flat_map(|scale| [scale; 2]).take(kept));
        let scales = scales.map(|scale| self.scale(*scale)).collect();
        QuantizedTensor::from_parts(shape, codes, scales)?
            .with_global_scale(self.global_scale(Direction::Divisor))
    }

    /// A block's scale. That of zeros may be out of range, and changes nothing.
    fn scale(self, scale: u8) -> u8 {
        if E8m0::from_bits(scale).is_nan() {
            return E4m3::NAN.to_bits();
        }
        let power = (exponent(scale) - self.global_exponent()).clamp(POWERS[0], POWERS[1]);
        E4m3::from_f32(power_of_two(power)).to_bits()
    }
}

/// The exponent of a scale in E8M0 that is a number.
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
    fn values_are_the_same_to_the_bit_as_far_as_e4m3_reaches() {
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
    fn one_power_more_is_refused() {
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
        // Numbers, zeros under a large scale and under a small one, and NaN.
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
