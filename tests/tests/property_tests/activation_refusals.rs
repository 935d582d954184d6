//! Tests that activations whose parts do not match are refused.

use half::bf16;
use microscale::formats::activations::RmsNorm;
use microscale::{
    ActivationExperts, ActivationFormat, ActivationRecipe, ActivationScale, Error, Fp8Scale, GlobalScale,
    Glu, GluOrder, QuantizedActivations, RowOperation, Shape,
};
use microscale_test_support::activations::{Parts, fp8, quantized};
use proptest::prelude::*;

use super::activations::{PER_TENSOR, given, recipe};
use super::inputs::runs;

/// Rows by expert, valid or not.
#[derive(Clone, Debug)]
enum Experts {
    Dense,
    Sorted(Vec<u32>, Vec<u32>),
    Masked(Vec<u32>),
}

/// An input whose parts may not match.
#[derive(Clone, Debug)]
struct Loose {
    recipe: ActivationRecipe,
    shape: Shape,
    values: usize,
    residual: Option<usize>,
    weights: Option<usize>,
    scales: Vec<f32>,
    experts: Experts,
}

impl Loose {
    /// Returns whether the documentation allows the input.
    fn is_valid(&self) -> bool {
        let Shape { rows, cols, row_stride } = self.shape;
        let gated = matches!(self.recipe.operation, RowOperation::Glu(..));
        let columns = if gated { cols / 2 } else { cols };
        let spans =
            rows == 0 || cols == 0 || row_stride >= cols && (rows - 1) * row_stride + cols <= self.values;
        let operation = match self.recipe.operation {
            RowOperation::Glu(..) => cols % 2 == 0 && self.residual.is_none() && self.weights.is_none(),
            RowOperation::None => self.residual.is_none() && self.weights.is_none(),
            RowOperation::RmsNorm(norm) => {
                norm.epsilon >= f32::MIN_POSITIVE
                    && norm.epsilon < f32::INFINITY
                    && self.residual.is_none_or(|count| count == rows * columns)
                    && self.weights.is_none_or(|count| count == columns)
            }
        };
        let experts = match &self.experts {
            Experts::Dense => Some(1),
            Experts::Masked(counts) => {
                let count = counts.len();
                let fits =
                    count > 0 && rows % count == 0 && counts.iter().all(|of| *of as usize <= rows / count);
                fits.then_some(count)
            }
            Experts::Sorted(offsets, scale_offsets) => self.experts_of(offsets, scale_offsets),
        };
        let scale_fits = |scale: &f32| match self.recipe.format {
            ActivationFormat::Nvfp4(ActivationScale::Given(direction)) => {
                GlobalScale::of(direction, *scale).in_range()
            }
            _ => *scale >= f32::MIN_POSITIVE && *scale < f32::INFINITY,
        };
        let takes = matches!(
            self.recipe.format,
            ActivationFormat::Fp8(Fp8Scale::Given) | ActivationFormat::Nvfp4(ActivationScale::Given(_))
        );
        let scales = |experts| self.scales.len() == if takes { experts } else { 0 };
        let shares = self.recipe.format != PER_TENSOR || matches!(self.experts, Experts::Dense);
        spans && shares && operation && self.scales.iter().all(scale_fits) && experts.is_some_and(scales)
    }

    /// Returns the rows of scales that the experts ask for.
    fn scale_rows(&self) -> usize {
        match &self.experts {
            Experts::Dense => self.shape.rows,
            Experts::Sorted(_, scale_offsets) => scale_offsets.last().map_or(0, |last| *last as usize),
            Experts::Masked(counts) => {
                self.recipe.layout.padded_rows(self.shape.rows / counts.len()) * counts.len()
            }
        }
    }

    /// Returns the number of experts, if their rows are sorted as documented.
    fn experts_of(&self, offsets: &[u32], scale_offsets: &[u32]) -> Option<usize> {
        let fp8 = matches!(self.recipe.format, ActivationFormat::Fp8(_));
        let tile = if fp8 { 1 } else { self.recipe.layout.tile_rows() as u32 };
        let last = offsets.last()?;
        let starts = offsets[0] == 0 && *scale_offsets.first()? == 0;
        let ends = *last as usize == self.shape.rows && offsets.len() == scale_offsets.len();
        let fits = || {
            offsets.windows(2).zip(scale_offsets.windows(2)).all(|(rows, room)| {
                rows[0] <= rows[1]
                    && room[0] <= room[1]
                    && (room[1] - room[0]) % tile == 0
                    && room[1] - room[0] >= rows[1] - rows[0]
            })
        };
        (starts && ends && fits()).then(|| offsets.len() - 1)
    }

    fn run(&self) -> Result<QuantizedActivations, Error> {
        let values = vec![bf16::from_f32(0.75); self.values];
        let residual = self.residual.map(|count| vec![bf16::from_f32(0.5); count]);
        let weights = self.weights.map(|count| vec![bf16::from_f32(2.0); count]);
        let experts = match &self.experts {
            Experts::Dense => None,
            Experts::Sorted(offsets, scale_offsets) => {
                Some(ActivationExperts::Sorted { offsets, scale_offsets })
            }
            Experts::Masked(counts) => Some(ActivationExperts::Masked { counts }),
        };
        let parts = Parts {
            residual: residual.as_deref(),
            weights: weights.as_deref(),
            scales: &self.scales,
            experts,
        };
        quantized(&values, self.shape, &self.recipe, &parts).map(|(result, _)| result)
    }
}

/// Returns a valid input with up to two parts replaced.
fn loose() -> impl Strategy<Value = Loose> {
    (recipe(), 0..7usize, 0..70usize, any::<u64>()).prop_map(|(recipe, rows, columns, seed)| {
        let mut rng = fastrand::Rng::with_seed(seed);
        let gated = matches!(recipe.operation, RowOperation::Glu(..));
        let normalizes = matches!(recipe.operation, RowOperation::RmsNorm(_));
        let cols = if gated { 2 * columns } else { columns };
        let shape = Shape::new(rows, cols).with_row_stride(cols + rng.usize(..3));
        let tile = if matches!(recipe.format, ActivationFormat::Fp8(_)) {
            1
        } else {
            recipe.layout.tile_rows() as u32
        };
        let (experts, count) = match rng.u8(..3) {
            0 => (Experts::Dense, 1),
            1 if rows > 0 => (Experts::Masked(vec![rng.u32(..2); rows]), rows),
            _ => {
                let middle = rng.u32(..=rows as u32);
                let offsets = vec![0, middle, middle, rows as u32];
                let rooms = [middle, 0, rows as u32 - middle].map(|rows| rows.next_multiple_of(tile));
                (Experts::Sorted(offsets, vec![0, rooms[0], rooms[0], rooms[0] + rooms[2]]), 3)
            }
        };
        let mut loose = Loose {
            recipe,
            shape,
            values: rows * shape.row_stride,
            residual: (normalizes && rng.bool()).then_some(rows * columns),
            weights: (normalizes && rng.bool()).then_some(columns),
            scales: (0..count).filter_map(|_| given(recipe.format, &mut rng)).collect(),
            experts,
        };
        for _ in 0..rng.usize(..3) {
            loose.replace_a_part(&mut rng);
        }
        loose
    })
}

impl Loose {
    fn replace_a_part(&mut self, rng: &mut fastrand::Rng) {
        let odd_scales =
            [0.0, -0.0, -1.0, f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1e-40, 1e-38, 3e38, f32::MAX, 1.0];
        match rng.u8(..9) {
            0 => self.shape.cols = rng.usize(..80),
            1 => self.shape.rows = rng.usize(..9),
            2 => self.shape.row_stride = rng.usize(..90),
            3 => self.values = rng.usize(..=self.values + 20),
            4 => self.residual = rng.bool().then(|| rng.usize(..200)),
            5 => self.weights = rng.bool().then(|| rng.usize(..80)),
            6 => match rng.bool() {
                true => self.scales = (0..rng.usize(..4)).map(|_| 1.0).collect(),
                false => self
                    .scales
                    .iter_mut()
                    .for_each(|scale| *scale = odd_scales[rng.usize(..odd_scales.len())]),
            },
            7 => {
                if let RowOperation::RmsNorm(norm) = &mut self.recipe.operation {
                    norm.epsilon = odd_scales[rng.usize(..odd_scales.len())];
                }
            }
            _ => {
                let mut any = |most: u32| -> Vec<u32> {
                    let wild = rng.u8(..6) == 0;
                    (0..rng.usize(..5)).map(|_| if wild { rng.u32(..) } else { rng.u32(..most) }).collect()
                };
                let [a, b] = [any(9), any(20)];
                self.experts = if rng.bool() { Experts::Masked(a) } else { Experts::Sorted(a, b) };
                if let (Experts::Sorted(offsets, scale_offsets), true) = (&mut self.experts, rng.bool()) {
                    // More of these are nearly right.
                    offsets.insert(0, 0);
                    scale_offsets.insert(0, 0);
                    offsets.push(self.shape.rows as u32);
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(runs(20_000))]

    #[test]
    fn inputs_that_do_not_match_are_refused(loose in loose()) {
        // Offsets may ask for gigabytes of padding, which is allowed.
        prop_assume!(!loose.is_valid() || loose.scale_rows() < 1 << 16);
        match (loose.run(), loose.is_valid()) {
            (Ok(found), true) => {
                let gated = matches!(loose.recipe.operation, RowOperation::Glu(..));
                let columns = if gated { loose.shape.cols / 2 } else { loose.shape.cols };
                let right = loose.recipe.lengths(loose.shape.rows, loose.scale_rows(), columns).expect("small");
                prop_assert_eq!([found.codes.len(), found.scales.len(), found.f32_scales.len()], right);
            }
            (Err(Error::Activations(_) | Error::Length { .. } | Error::RowStride { .. }), false) => {}
            (result, valid) => prop_assert!(false, "valid: {}, but {:?}", valid, result),
        }
    }
}

/// Each refusal in the smallest input.
#[test]
fn refusals_name_the_fault() {
    let message = |change: &dyn Fn(&mut Loose)| {
        let mut loose = Loose {
            recipe: fp8(Fp8Scale::PerToken),
            shape: Shape::new(2, 4),
            values: 8,
            residual: None,
            weights: None,
            scales: Vec::new(),
            experts: Experts::Dense,
        };
        assert!(loose.run().is_ok() && loose.is_valid());
        change(&mut loose);
        assert!(!loose.is_valid());
        loose.run().expect_err("a refusal").to_string()
    };
    let norm = |epsilon| RowOperation::RmsNorm(RmsNorm::llama(epsilon));
    let glu = RowOperation::Glu(Glu::SILU, GluOrder::Halves);
    let odd = message(&|loose| (loose.recipe.operation, loose.shape) = (glu, Shape::new(2, 3)));
    assert!(odd.contains("3 columns"), "{odd}");
    for epsilon in [0.0, -1e-6, f32::NAN, f32::INFINITY, 1e-40] {
        let text = message(&|loose| loose.recipe.operation = norm(epsilon));
        assert!(text.contains("epsilon"), "{text}");
    }
    let residual = message(&|loose| loose.residual = Some(8));
    assert!(residual.contains("RMSNorm"), "{residual}");
    let weights = message(&|loose| (loose.recipe.operation, loose.weights) = (norm(1e-6), Some(3)));
    assert!(weights.contains("3 weights"), "{weights}");
    let short = message(&|loose| (loose.recipe.operation, loose.residual) = (norm(1e-6), Some(7)));
    assert!(short.contains("7 residuals"), "{short}");
    let extra = message(&|loose| loose.scales = vec![1.0]);
    assert!(extra.contains("1 given scales"), "{extra}");
    for scale in [0.0, -1.0, f32::NAN, f32::INFINITY, 1e-40] {
        let text = message(&|loose| (loose.recipe, loose.scales) = (fp8(Fp8Scale::Given), vec![scale]));
        assert!(text.contains("given scale 0"), "{text}");
    }
    for experts in [
        Experts::Masked(vec![]),
        Experts::Masked(vec![1, 1, 0]),
        Experts::Masked(vec![2, 0]),
        Experts::Sorted(vec![], vec![]),
        Experts::Sorted(vec![0, 2], vec![0]),
        Experts::Sorted(vec![1, 2], vec![0, 2]),
        Experts::Sorted(vec![0, 1], vec![0, 2]),
        Experts::Sorted(vec![0, 3, 2], vec![0, 4, 8]),
        Experts::Sorted(vec![0, 2], vec![0, 1]),
        Experts::Sorted(vec![0, 1, 2], vec![0, 2, 1]),
        Experts::Sorted(vec![0, u32::MAX, 2], vec![0, u32::MAX, u32::MAX]),
    ] {
        let text = message(&|loose| loose.experts = experts.clone());
        assert!(text.contains("expert"), "{experts:?}: {text}");
    }
}
