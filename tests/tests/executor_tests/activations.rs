//! Cases of quantizing activations, fused with every operation.

use half::{bf16, f16};
use microscale::formats::activations::{LEAST_TOKEN_SCALE, RmsNorm};
use microscale::formats::nvfp4::Direction;
use microscale::formats::{E2m1, E4m3, ScaleRule};
use microscale::{
    ActivationExperts, ActivationFormat, ActivationInput, ActivationLayout, ActivationRecipe,
    ActivationScale, Dtype, Element, Fp8Scale, Gate, Glu, GluOrder, RowOperation, Shape, Words,
    quantize_activations,
};
use microscale_executor::Argument;
use microscale_kernels_abi::ActivationParams;
use microscale_kernels_abi::activations::{self, Output, RowOrder, RowScale};
use microscale_test_support::inputs::patterns;

use super::case::{Prepared, argument};
use super::cases::{Case, ordinary};

/// The rows of a case.
#[derive(Clone, Copy, Debug)]
enum Rows {
    Dense(usize),
    /// Rows sorted by expert: the number of each expert's. One has none.
    Sorted(&'static [u32]),
    /// Experts with room for a number of rows, and the number of each that exist.
    Masked(usize, &'static [u32]),
}

impl Rows {
    /// Rows of values.
    fn count(self) -> usize {
        match self {
            Self::Dense(rows) => rows,
            Self::Sorted(counts) => counts.iter().sum::<u32>() as usize,
            Self::Masked(rows, counts) => rows * counts.len(),
        }
    }
}

/// A case: everything that differs.
#[derive(Clone, Copy, Debug)]
struct Activations {
    rows: Rows,
    columns: usize,
    /// Elements between the rows of the input.
    gap: usize,
    recipe: ActivationRecipe,
    residual: bool,
    weights: bool,
    wild: bool,
    seed: u64,
}

const OPERATIONS: [RowOperation; 9] = [
    RowOperation::None,
    RowOperation::Glu(Glu::SILU, GluOrder::Halves),
    RowOperation::RmsNorm(RmsNorm::llama(1e-6)),
    RowOperation::Glu(Glu::Sigmoid(Gate::GPT_OSS), GluOrder::Interleaved),
    RowOperation::RmsNorm(RmsNorm::gemma(1e-5)),
    RowOperation::None,
    RowOperation::Glu(Glu::GeluTanh, GluOrder::Halves),
    RowOperation::RmsNorm(RmsNorm::flashinfer(1e-3)),
    RowOperation::Glu(Glu::Gelu, GluOrder::Halves),
];

const FORMATS: [ActivationFormat; 13] = [
    ActivationFormat::Nvfp4(ActivationScale::PerToken),
    ActivationFormat::Fp8(Fp8Scale::PerToken),
    ActivationFormat::Mxfp4(ScaleRule::Floor),
    ActivationFormat::Mxfp8(ScaleRule::Rceil),
    ActivationFormat::Nvfp4(ActivationScale::Given(Direction::Divisor)),
    ActivationFormat::Fp8(Fp8Scale::PerGroup { power_of_two: false }),
    ActivationFormat::Mxfp4(ScaleRule::Even),
    ActivationFormat::Mxfp8(ScaleRule::Floor),
    ActivationFormat::Nvfp4(ActivationScale::Given(Direction::Multiplier)),
    ActivationFormat::Fp8(Fp8Scale::Given),
    ActivationFormat::Fp8(Fp8Scale::PerGroup { power_of_two: true }),
    ActivationFormat::Mxfp4(ScaleRule::Rceil),
    ActivationFormat::Fp8(Fp8Scale::PerTensor),
];

const PER_TENSOR: ActivationFormat = ActivationFormat::Fp8(Fp8Scale::PerTensor);

const LAYOUTS: [ActivationLayout; 3] =
    [ActivationLayout::Linear, ActivationLayout::Swizzled128x4, ActivationLayout::Swizzled8x4];

/// Rows and columns: whole pieces, parts of one, rows that are not aligned, more pieces than warps.
const SHAPES: [(Rows, usize, usize); 10] = [
    (Rows::Dense(3), 1024, 0),
    (Rows::Dense(1), 2880, 8),
    (Rows::Dense(9), 33, 0),
    (Rows::Sorted(&[3, 0, 9, 1]), 96, 0),
    (Rows::Dense(1), 17_000, 0),
    (Rows::Masked(5, &[2, 5, 0]), 128, 0),
    (Rows::Dense(2), 4096, 0),
    (Rows::Dense(6), 200, 1),
    (Rows::Dense(10), 64, 0),
    (Rows::Sorted(&[0, 130, 2]), 40, 0),
];

fn operation_of(recipe: &ActivationRecipe) -> activations::RowOperation {
    match recipe.operation {
        RowOperation::None => activations::RowOperation::Plain,
        RowOperation::Glu(..) => activations::RowOperation::Glu,
        RowOperation::RmsNorm(_) => activations::RowOperation::Norm,
    }
}

fn kernel_of(recipe: &ActivationRecipe, dtype: Dtype) -> (Output, &'static str) {
    let output = match recipe.format {
        ActivationFormat::Fp8(_) => Output::Fp8,
        ActivationFormat::Mxfp8(_) => Output::Mxfp8,
        ActivationFormat::Mxfp4(_) => Output::Mxfp4,
        ActivationFormat::Nvfp4(_) => Output::Nvfp4,
    };
    let id = activations::kernel(operation_of(recipe), output, dtype).expect("a kernel of 16-bit values");
    (output, id.kernel().name)
}

/// Adds the cases of every operation, format, layout and order of rows.
pub(crate) fn activations_cases(cases: &mut Vec<Case>) {
    of_dtype::<f16>(cases);
    of_dtype::<bf16>(cases);
}

fn of_dtype<T: Element>(cases: &mut Vec<Case>) {
    for (i, format) in FORMATS.into_iter().enumerate() {
        for (j, operation) in OPERATIONS.into_iter().enumerate() {
            for k in 0..2 {
                let n = i * 18 + j * 2 + k;
                let (mut rows, columns, gap) = SHAPES[(n + i) % SHAPES.len()];
                if format == PER_TENSOR && !matches!(rows, Rows::Dense(_)) {
                    rows = Rows::Dense(rows.count());
                }
                let normalizes = matches!(operation, RowOperation::RmsNorm(_));
                let case = Activations {
                    rows,
                    columns,
                    gap,
                    recipe: ActivationRecipe { operation, format, layout: LAYOUTS[(n / 2 + i) % 3] },
                    residual: normalizes && n.is_multiple_of(2),
                    weights: normalizes && !n.is_multiple_of(3),
                    wild: n % 4 == 3,
                    seed: n as u64,
                };
                let (_, kernel) = kernel_of(&case.recipe, T::DTYPE);
                let what = format!("{} {case:?}", T::DTYPE.word());
                cases.push(Case::new(what, kernel.into(), move || quantizing::<T>(&case)));
            }
        }
    }
}

/// Values, some of them in rows of zeros, or so large that quotients by a given scale overflow.
fn values<T: Element>(count: usize, columns: usize, wild: bool, seed: u64) -> Vec<T> {
    if wild {
        return patterns::<T>(count, true, seed);
    }
    let mut values = ordinary::<T>(count, seed);
    for (i, value) in values.iter_mut().enumerate() {
        let zero = (i / columns.max(1)) % 4 == 3 || i % 256 < 40 && seed.is_multiple_of(2);
        if zero {
            *value = T::default();
        } else if seed % 3 == 1 && i % 997 == 5 {
            *value = T::from_f32(if T::DTYPE == Dtype::F16 { 65504.0 } else { 3.3e38 });
        }
    }
    values
}

/// Launches a kernel as the library does, and expects the CPU's result.
fn quantizing<T: Element>(of: &Activations) -> Prepared {
    let Activations { rows, columns, gap, recipe, wild, seed, .. } = *of;
    let input_columns = if matches!(recipe.operation, RowOperation::Glu(..)) { 2 * columns } else { columns };
    let count = rows.count();
    let shape = Shape::new(count, input_columns).with_row_stride(input_columns + gap);
    let values = values::<T>(shape.span().expect("a small matrix"), shape.row_stride, wild, seed);
    let residual = of.residual.then(|| ordinary::<T>(count * columns, seed + 1));
    let weights = of.weights.then(|| ordinary::<T>(columns, seed + 2));
    let tile_rows = if recipe.format.block() == 1 { 1 } else { recipe.layout.tile_rows() as u32 };
    let (mut offsets, mut scale_offsets) = (vec![0], vec![0]);
    let experts = match rows {
        Rows::Dense(_) => None,
        Rows::Sorted(counts) => {
            for count in counts {
                offsets.push(offsets.last().unwrap() + count);
                scale_offsets.push(scale_offsets.last().unwrap() + count.next_multiple_of(tile_rows));
            }
            Some(ActivationExperts::Sorted { offsets: &offsets, scale_offsets: &scale_offsets })
        }
        Rows::Masked(_, counts) => Some(ActivationExperts::Masked { counts }),
    };
    let experts_count = match rows {
        Rows::Dense(_) => 1,
        Rows::Sorted(counts) | Rows::Masked(_, counts) => counts.len(),
    };
    let given = match recipe.format {
        ActivationFormat::Fp8(Fp8Scale::Given) => Some(0.037),
        ActivationFormat::Nvfp4(ActivationScale::Given(Direction::Divisor)) => Some(900.0),
        ActivationFormat::Nvfp4(ActivationScale::Given(Direction::Multiplier)) => Some(0.0013),
        _ => None,
    };
    let given: Vec<f32> =
        given.map_or(Vec::new(), |scale| (0..experts_count).map(|i| scale * (1.0 + i as f32)).collect());
    let mut sums = residual.clone();
    let input = ActivationInput {
        values: &values,
        shape,
        residual: sums.as_deref_mut(),
        weights: weights.as_deref(),
        scales: &given,
        experts,
    };
    let expected = quantize_activations(input, &recipe).expect("the CPU quantizes");

    let mut case = Prepared::new();
    let (output, kernel) = kernel_of(&recipe, T::DTYPE);
    let masked = matches!(rows, Rows::Masked(..));
    // Rows that do not exist are not written.
    let mut out = |name: &str, bytes: &[u8]| match masked {
        true => case.memory.allocate_from(name, &vec![0; bytes.len()]),
        false => case.memory.allocate(name, bytes.len()),
    };
    let f32_scales: Vec<u8> = expected.f32_scales.iter().flat_map(|scale| scale.to_le_bytes()).collect();
    let (codes, scales) = (out("codes", &expected.codes), out("scales", &expected.scales));
    let computed = if recipe.format == PER_TENSOR {
        case.memory.allocate_from("f32 scales", &LEAST_TOKEN_SCALE.to_le_bytes())
    } else {
        out("f32 scales", &f32_scales)
    };
    let odd = !(shape.row_stride * 2).is_multiple_of(16) || !columns.is_multiple_of(8);
    let given_values = case.values(&values, odd);
    let null = Argument::from(0u64);
    let residual = residual.map(|residual| {
        let bytes = bytemuck::cast_slice(&residual);
        if odd {
            case.memory.allocate_from_aligned("residual", bytes, 2)
        } else {
            case.memory.allocate_from("residual", bytes)
        }
    });
    let weights = weights.map(|weights| case.values(&weights, odd));
    let words = |numbers: &[u32]| numbers.iter().flat_map(|number| number.to_le_bytes()).collect::<Vec<u8>>();
    let [offsets, scale_offsets] = match rows {
        Rows::Dense(_) => [null.clone(), null.clone()],
        Rows::Sorted(_) => [
            case.memory.allocate_from("offsets", &words(&offsets)).into(),
            case.memory.allocate_from("scale offsets", &words(&scale_offsets)).into(),
        ],
        Rows::Masked(_, counts) => [case.memory.allocate_from("counts", &words(counts)).into(), null.clone()],
    };

    let scale_rows = match rows {
        Rows::Dense(rows) | Rows::Masked(rows, _) => rows,
        Rows::Sorted(counts) => {
            counts.iter().map(|count| count.next_multiple_of(tile_rows)).sum::<u32>() as usize
        }
    };
    let layout = if output == Output::Fp8 { ActivationLayout::Linear } else { recipe.layout };
    let mut params = ActivationParams::new(output, scale_rows as u32, columns as u32, layout);
    params.input_stride = shape.row_stride as u64;
    params.residual_stride = columns as u64;
    params.code_stride = recipe.format.row_bytes(columns) as u64;
    params.aligned = u32::from(!odd);
    params.experts = experts_count as u32;
    params.order = match rows {
        Rows::Dense(_) => RowOrder::Dense,
        Rows::Sorted(_) => RowOrder::Sorted,
        Rows::Masked(..) => RowOrder::Masked,
    } as u32;
    match rows {
        Rows::Dense(_) => {}
        Rows::Sorted(_) => params.rows = count as u32,
        Rows::Masked(..) => params.scale_rows *= experts_count as u32,
    }
    let mut row_scales = null.clone();
    let mut block_scales = scales;
    let in_memory = given.len() > 1 || seed.is_multiple_of(2);
    let row_scale = match recipe.format {
        ActivationFormat::Fp8(Fp8Scale::PerGroup { power_of_two }) => {
            let groups = columns.div_ceil(128) as u64;
            (params.scale_stride, params.group_stride) = (groups, 1);
            block_scales = computed;
            if power_of_two { RowScale::PowerOfTwoPerGroup } else { RowScale::PerGroup }
        }
        ActivationFormat::Fp8(Fp8Scale::PerToken) | ActivationFormat::Nvfp4(ActivationScale::PerToken) => {
            row_scales = computed.into();
            RowScale::PerToken
        }
        PER_TENSOR => {
            row_scales = computed.into();
            RowScale::AmaxOfTensor
        }
        ActivationFormat::Fp8(Fp8Scale::Given) | ActivationFormat::Nvfp4(_) if in_memory => {
            row_scales = case.memory.allocate_from("given", bytemuck::cast_slice(&given)).into();
            RowScale::InMemory
        }
        _ => RowScale::Given,
    };
    params.row_scale = row_scale as u32;
    params.given = given.first().copied().unwrap_or(1.0);
    match recipe.format {
        ActivationFormat::Nvfp4(ActivationScale::Given(direction)) => {
            params.multiplies = u32::from(direction == Direction::Multiplier);
        }
        ActivationFormat::Mxfp8(rule) => params.mantissa_addend = rule.mantissa_addend::<E4m3>(),
        ActivationFormat::Mxfp4(rule) => params.mantissa_addend = rule.mantissa_addend::<E2m1>(),
        ActivationFormat::Nvfp4(_) | ActivationFormat::Fp8(_) => {}
    }
    match recipe.operation {
        RowOperation::None => {}
        RowOperation::Glu(glu, order) => {
            params.interleaved = u32::from(order == GluOrder::Interleaved);
            match glu {
                Glu::Sigmoid(gate) => params.gate = gate,
                Glu::GeluTanh => params.gelu = ActivationParams::GELU_TANH,
                Glu::Gelu => params.gelu = ActivationParams::GELU,
            }
        }
        RowOperation::RmsNorm(norm) => params.norm = norm,
    }
    // As in the library, and in some cases with whole rows in a thread block.
    if !seed.is_multiple_of(4) {
        params.spread_rows(operation_of(&recipe));
    }
    let launch = params.launch();
    let mut arguments = vec![
        given_values,
        residual.map_or(null.clone(), Argument::from),
        weights.unwrap_or(null.clone()),
        codes.into(),
        block_scales.into(),
        row_scales,
        offsets,
        scale_offsets,
        argument(&params),
    ];
    if recipe.format == PER_TENSOR {
        case.step(kernel, u64::from(launch.thread_blocks), arguments.clone());
        case.shaped((launch.threads, launch.shared));
        params.row_scale = RowScale::InMemory as u32;
        if let Some(residual) = residual {
            // The sums are there.
            (arguments[0], arguments[1]) = (residual.into(), null.clone());
            params.input_stride = params.residual_stride;
        }
        arguments[8] = argument(&params);
    }
    case.step(kernel, u64::from(launch.thread_blocks), arguments);
    case.shaped((launch.threads, launch.shared));
    case.expect("codes", codes, expected.codes);
    case.expect("scales", scales, expected.scales);
    case.expect("f32 scales", computed, f32_scales);
    if let (Some(buffer), Some(sums)) = (residual, sums) {
        case.checks.push(Box::new(move |memory| {
            let bytes = memory.bytes(buffer).map_err(|error| error.to_string())?;
            let found: Vec<T> = bytemuck::pod_collect_to_vec(&bytes);
            let same = |(a, b): (&T, &T)| {
                let (a, b) = (a.to_f32(), b.to_f32());
                a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan()
            };
            found.iter().zip(&sums).all(same).then_some(()).ok_or("residual: wrong sums".to_owned())
        }));
    }
    case
}
