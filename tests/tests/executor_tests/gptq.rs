//! Cases of GPTQ.

use half::{bf16, f16};
use microscale::cpu::{FactorOperands, ScaleFactors};
use microscale::{
    Dtype, Element, Format, Global, GptqFactor, GptqOptions, GptqOrder, GptqScales, NonFinite, Recipe,
    Report, Scheme, Search, Shape, Words, quantize, quantize_gptq,
};
use microscale_executor::{Argument, Buffer};
use microscale_formats::plan::NvPlan;
use microscale_formats::shortcut::NvShortcut;
use microscale_kernels_abi::gptq::{BatchParams, GPTQ_BATCH, GptqLoad, LoadParams, UPDATE_TILE};
use microscale_kernels_abi::launch::WARP;
use microscale_kernels_abi::{Divider, NvOptions};
use microscale_test_support::hessians::{ALL_INPUTS, Inputs, hessian, matrix, recipes};
use microscale_test_support::inputs::Numbers;

use super::case::{Prepared, argument, nv_options};
use super::cases::Case;
use super::quantizing::{mx_options, word};

/// A matrix and a factor in the executor's memory.
struct Pass {
    case: Prepared,
    shape: Shape,
    format: Format,
    pitch: usize,
    operands: FactorOperands,
    position_of: Argument,
    feedback: Argument,
    pivots: Argument,
    weights: Argument,
    updated: Argument,
}

impl Pass {
    fn new(shape: Shape, factor: &GptqFactor) -> Self {
        let mut case = Prepared::new();
        let operands = factor.operands();
        let tile = UPDATE_TILE as usize;
        let pitch = operands.pivots.len().next_multiple_of(tile);
        let zeros = vec![0; shape.rows.next_multiple_of(tile) * pitch * 4];
        let position_of =
            case.memory.allocate_from("positions", bytemuck::cast_slice(&operands.position_of)).into();
        let feedback = case.memory.allocate_from("factor", bytemuck::cast_slice(&operands.feedback)).into();
        let pivots = case.memory.allocate_from("pivots", bytemuck::cast_slice(&operands.pivots)).into();
        let weights = case.memory.allocate_from("weights", &zeros).into();
        let updated = case.memory.allocate_from("updated", &zeros).into();
        let format = factor.format();
        Self { case, shape, format, pitch, operands, position_of, feedback, pivots, weights, updated }
    }

    fn positions(&self) -> usize {
        self.operands.pivots.len()
    }

    fn load_params(&self, shape: Shape, to: GptqLoad, policy: NonFinite) -> LoadParams {
        let positions = self.positions() as u32;
        LoadParams {
            row_warps: Divider::new(u64::from(positions.div_ceil(WARP))),
            row_stride: shape.row_stride as u64,
            first_row: 0,
            rows: shape.rows as u32,
            cols: shape.cols as u32,
            positions,
            pitch: self.pitch as u32,
            block: self.format.block() as u32,
            to: to as u32,
            saturate_non_finite: u32::from(policy == NonFinite::Saturate),
            padding: 0,
        }
    }

    /// The threads of a kernel with one element each.
    fn threads(&self) -> u64 {
        self.shape.rows as u64 * u64::from(self.positions().div_ceil(WARP as usize) as u32 * WARP)
    }

    fn load<T: Element>(
        &mut self,
        values: &[T],
        shape: Shape,
        (to, policy): (GptqLoad, NonFinite),
        report: Argument,
    ) {
        let params = argument(&self.load_params(shape, to, policy));
        let values = self.case.values(&values[..shape.span().unwrap()], true);
        let (weights, updated) = (self.weights.clone(), self.updated.clone());
        let arguments = vec![values, self.position_of.clone(), weights, updated, report, params];
        self.case.step(load_kernel::<T>(), self.threads(), arguments);
    }

    fn batch(&self, start: usize) -> BatchParams {
        let positions = self.positions();
        BatchParams {
            rows: self.shape.rows as u32,
            pitch: self.pitch as u32,
            start: start as u32,
            count: (positions - start).min(GPTQ_BATCH as usize) as u32,
            positions: positions as u32,
            row_blocks: (positions / self.format.block()) as u32,
            search: 0,
            fixed: 0,
            divides: 0,
            row_tiles: self.shape.rows.div_ceil(UPDATE_TILE as usize) as u32,
        }
    }

    fn update(&mut self, start: usize) {
        let params = self.batch(start);
        let later = self.positions().saturating_sub(start + GPTQ_BATCH as usize);
        let tiles = later.div_ceil(UPDATE_TILE as usize) as u64 * u64::from(params.row_tiles);
        if tiles > 0 {
            let (weights, updated) = (self.weights.clone(), self.updated.clone());
            let arguments = vec![weights, updated, self.feedback.clone(), argument(&params)];
            self.case.step("gptq_update", tiles, arguments);
        }
    }

    /// Adds the norms of the loaded rows, and expects the sum in the factor's unit.
    fn norms(&mut self, what: &'static str, expected: f64) {
        let norms = self.case.memory.allocate_from("norms", &vec![0; self.shape.rows * 8]);
        for start in (0..self.positions()).step_by(GPTQ_BATCH as usize) {
            let (weights, updated) = (self.weights.clone(), self.updated.clone());
            let (feedback, pivots) = (self.feedback.clone(), self.pivots.clone());
            let params = argument(&self.batch(start));
            let arguments = vec![weights, updated, feedback, pivots, norms.into(), params];
            self.case.step("gptq_norms", self.shape.rows as u64, arguments);
            self.update(start);
        }
        self.expect_sum(what, norms, expected);
    }

    /// Expects the sum of a buffer of f64, times the factor's unit.
    fn expect_sum(&mut self, what: &'static str, sums: Buffer, expected: f64) {
        let unit = self.operands.unit;
        self.case.checks.push(Box::new(move |memory| {
            let bytes = memory.bytes(sums).map_err(|error| error.to_string())?;
            let sums = bytes.as_chunks::<8>().0.iter().map(|bytes| f64::from_le_bytes(*bytes));
            let found = sums.fold(0.0, |sum, one| sum + one) * unit;
            let same = found.to_bits() == expected.to_bits();
            if same { Ok(()) } else { Err(format!("{what}: {found:e} instead of {expected:e}")) }
        }));
    }
}

/// Returns the kernel that loads.
fn load_kernel<T: Element>() -> String {
    format!("gptq_load_{}", T::DTYPE.word())
}

/// Quantizes with the launches that the library would make, and expects the CPU's result.
fn quantizing<T: Element>(
    values: &[T],
    shape: Shape,
    recipe: &Recipe,
    factor: &GptqFactor,
    scales: GptqScales,
) -> Prepared {
    let expected = quantize_gptq(values, shape, recipe, factor, scales).expect("the CPU quantizes");
    let mut pass = Pass::new(shape, factor);
    let fixed = scales == GptqScales::Static;
    let mut report = expected.report;
    if fixed {
        // The plain quantizer counts them.
        let Report { saturated_scales, rescaled_blocks, tried_scales, .. } = Report::default();
        (report.saturated_scales, report.rescaled_blocks) = (saturated_scales, rescaled_blocks);
        report.tried_scales = tried_scales;
    }
    let report = pass.case.report(shape, recipe.format(), report);
    pass.load(values, shape, (GptqLoad::Weights, recipe.non_finite), report.clone());

    let global = expected.tensor.global_scale();
    let factors = ScaleFactors::of(recipe.scheme, global);
    let table = [factors.factors, factors.scalings].concat();
    let table: Argument = pass.case.memory.allocate_from("scales", bytemuck::cast_slice(&table)).into();
    let bounds: Vec<u8> =
        pass.operands.bounds.iter().flat_map(|of| [of.sum, of.slack]).flat_map(f32::to_le_bytes).collect();
    let bounds: Argument = pass.case.memory.allocate_from("bounds", &bounds).into();
    let block_at: Vec<u8> = bytemuck::cast_slice(&pass.operands.block_at).to_vec();
    let block_at: Argument = pass.case.memory.allocate_from("blocks", &block_at).into();
    let scale_bytes = if fixed {
        let plain = quantize(values, shape, recipe).expect("the CPU quantizes");
        pass.case.memory.allocate_from("scale bytes", plain.tensor.scales())
    } else {
        pass.case.memory.allocate("scale bytes", expected.tensor.scales().len())
    };
    let errors = pass.case.memory.allocate_from("errors", &vec![0; shape.rows * 8]);
    let options = match recipe.scheme {
        Scheme::Nvfp4(arithmetic, _) => {
            let mut plan = NvPlan::new(arithmetic, global.map_or(1.0, |global| global.value()));
            plan.shortcut = NvShortcut::new(&plan.quantizer, f32::SIGNIFICAND);
            nv_options(&NvOptions { plan, saturate_non_finite: 0 })
        }
        _ => argument(&mx_options(recipe).0),
    };
    let word = word(recipe.format());
    for start in (0..pass.positions()).step_by(GPTQ_BATCH as usize) {
        let params = BatchParams {
            search: recipe.search as u32,
            fixed: fixed.into(),
            divides: factors.divides.into(),
            ..pass.batch(start)
        };
        let (weights, updated) = (pass.weights.clone(), pass.updated.clone());
        let (feedback, pivots) = (pass.feedback.clone(), pass.pivots.clone());
        let mut arguments = vec![weights, updated, feedback, pivots, bounds.clone(), table.clone()];
        arguments.extend([block_at.clone(), scale_bytes.into(), errors.into(), report.clone()]);
        arguments.extend([argument(&params), options.clone()]);
        pass.case.step(format!("gptq_columns_{word}"), shape.rows as u64, arguments);
        pass.update(start);
    }
    let codes = pass.case.memory.allocate("codes", expected.tensor.codes().len());
    let params = argument(&pass.load_params(shape, GptqLoad::Weights, recipe.non_finite));
    let (updated, position_of) = (pass.updated.clone(), pass.position_of.clone());
    let arguments = vec![updated, position_of, codes.into(), scale_bytes.into(), report, params, options];
    pass.case.step(format!("gptq_encode_{word}"), pass.threads(), arguments);
    pass.case.expect("scales", scale_bytes, expected.tensor.scales().to_vec());
    pass.case.expect("codes", codes, expected.tensor.codes().to_vec());
    pass.expect_sum("output error", errors, expected.output_error);
    pass.case
}

/// Measures the output loss of a quantized matrix, and expects the CPU's result.
fn measuring<T: Element>(values: &[T], shape: Shape, recipe: &Recipe, factor: &GptqFactor) -> Prepared {
    let quantized = quantize(values, shape, recipe).expect("the CPU quantizes").tensor;
    let expected = factor.output_loss(values, shape, &quantized).expect("the CPU measures");
    let back: Vec<f32> = microscale::dequantize(&quantized);
    let mut pass = Pass::new(shape, factor);
    let report = pass.case.report(shape, recipe.format(), Report::default());
    let policy = NonFinite::Propagate;
    pass.load(values, shape, (GptqLoad::Values, policy), report.clone());
    pass.norms("energy", expected.energy);
    let dense = Shape::new(shape.rows, shape.cols);
    pass.load(&back, dense, (GptqLoad::Differences, policy), report);
    pass.norms("error", expected.error);
    pass.case
}

/// The orders of columns and the sources of scales that go together.
const REQUESTS: [(GptqOrder, GptqScales); 4] = [
    (GptqOrder::Activation, GptqScales::InLoop),
    (GptqOrder::ActivationColumns, GptqScales::Static),
    (GptqOrder::Natural, GptqScales::InLoop),
    (GptqOrder::Activation, GptqScales::Static),
];

/// Part of a block, one batch and a part of another, several batches and tiles of rows.
const SHAPES: [Shape; 4] =
    [Shape::new(3, 21), Shape::new(19, 173), Shape::new(5, 64).with_row_stride(67), Shape::new(9, 300)];

fn cases_of<T: Element>(cases: &mut Vec<Case>) {
    let dtype = T::DTYPE.word();
    for (s, search) in [Search::None, Search::FourSix, Search::Window, Search::Full].into_iter().enumerate() {
        for (r, recipe) in recipes(search).into_iter().enumerate() {
            let i = 9 * s + r;
            if T::DTYPE != Dtype::F32 && !i.is_multiple_of(6) {
                continue;
            }
            let (order, scales) = REQUESTS[(i + i / 4) % 4];
            let shape = SHAPES[(i + i / 8) % 4];
            let non_finite = [NonFinite::Propagate, NonFinite::Saturate][i / 2 % 2];
            let recipe = Recipe { non_finite, ..recipe };
            let inputs = ALL_INPUTS[(i + i / 5) % 4];
            let make = move || {
                let mut numbers = Numbers::new(i as u64);
                let entries = hessian(inputs, shape.cols, &mut numbers);
                let mut values: Vec<T> = matrix(shape.span().unwrap(), i % 5, &mut numbers);
                if i.is_multiple_of(3) {
                    values[17] = T::from_f32(f32::NAN);
                    values[shape.row_stride + 3] = T::from_f32(f32::NEG_INFINITY);
                }
                let options = GptqOptions::new().order(order);
                let factor =
                    GptqFactor::new(&entries, shape.cols, recipe.format(), options).expect("a factor");
                quantizing(&values, shape, &recipe, &factor, scales)
            };
            let kernel = match i % 4 {
                0 => load_kernel::<T>(),
                1 => format!("gptq_encode_{}", word(recipe.format())),
                _ => format!("gptq_columns_{}", word(recipe.format())),
            };
            let what = format!("{dtype} {shape:?} {order:?} {scales:?} {inputs:?} {recipe:?}");
            cases.push(Case::new(what, kernel, make));
        }
    }
}

fn loss_cases<T: Element>(cases: &mut Vec<Case>) {
    for (i, shape) in [Shape::new(130, 300), Shape::new(7, 45), Shape::new(3, 128)].into_iter().enumerate() {
        let recipe = recipes(Search::None)[[4, 1, 8][i]];
        let recipe = Recipe { non_finite: NonFinite::Propagate, ..recipe };
        let make = move || {
            let mut numbers = Numbers::new(i as u64);
            let entries = hessian(Inputs::Shared, shape.cols, &mut numbers);
            let mut values: Vec<T> = matrix(shape.elements(), i, &mut numbers);
            values[5] = T::from_f32(f32::INFINITY);
            let options = GptqOptions::new();
            let factor = GptqFactor::new(&entries, shape.cols, recipe.format(), options).expect("a factor");
            measuring(&values, shape, &recipe, &factor)
        };
        let kernel = ["gptq_update", "gptq_norms", "gptq_norms"][i];
        let what = format!("{} {shape:?}, the loss of {recipe:?}", T::DTYPE.word());
        cases.push(Case::new(what, kernel.into(), make));
    }
}

/// Blocks of zeros, blocks whose scales saturate, and global scales that are given.
fn edge_cases(cases: &mut Vec<Case>) {
    for (i, recipe) in recipes(Search::Full).into_iter().enumerate() {
        let make = move || {
            let (mut numbers, shape) = (Numbers::new(i as u64), Shape::new(4, 160));
            let entries = hessian(Inputs::Following, shape.cols, &mut numbers);
            let mut values: Vec<f32> = matrix(shape.elements(), 0, &mut numbers);
            for (at, value) in values.iter_mut().enumerate() {
                match at / 32 % 5 {
                    0 => *value = 0.0,
                    1 => *value *= 1e-38,
                    2 => *value *= 1e36,
                    3 => *value = -0.0,
                    _ => {}
                }
            }
            let recipe = match recipe.scheme {
                Scheme::Nvfp4(arithmetic, Global::FromAmax) => {
                    recipe.with_global(Global::Given(arithmetic.global_scale(4.0, |x| x)))
                }
                _ => recipe,
            };
            let factor = GptqFactor::new(&entries, shape.cols, recipe.format(), GptqOptions::new());
            quantizing(&values, shape, &recipe, &factor.expect("a factor"), GptqScales::InLoop)
        };
        let kernel = format!("gptq_columns_{}", word(recipe.format()));
        cases.push(Case::new(format!("edges, {recipe:?}"), kernel, make));
    }
}

/// Adds all cases.
pub(crate) fn gptq_cases(cases: &mut Vec<Case>) {
    cases_of::<f32>(cases);
    cases_of::<f16>(cases);
    cases_of::<bf16>(cases);
    loss_cases::<f32>(cases);
    loss_cases::<bf16>(cases);
    edge_cases(cases);
}
