//! Cases of quantization with every option.

use microscale::{
    Element, Format, Global, NonFinite, QuantizeOptions, QuantizedShape, Recipe, ScaleLayout, Scheme, Search,
    Shape, Words, amax, quantize, quantize_with,
};
use microscale_executor::Argument;
use microscale_formats::plan::NvPlan;
use microscale_formats::shortcut::NvShortcut;
use microscale_formats::{E2m1, E4m3, E5m2, ScaleRule, Ties, mx};
use microscale_kernels_abi::{BlockGrid, GlobalSlot, MxOptions, NvOptions, ScaleGrid};

use super::case::{Prepared, argument, nv_options};
use super::operations::amax_kernel;

/// How a kernel accesses values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Access {
    /// Every row starts at a multiple of 16 bytes.
    Aligned,
    /// Rows start anywhere.
    Unaligned,
    /// The search kernels' access.
    Search,
}

impl Access {
    /// The two accesses that all operations other than searches have.
    pub(crate) const BOTH: [Self; 2] = [Self::Aligned, Self::Unaligned];

    /// Returns the accesses of a recipe's quantizers.
    pub(crate) fn of(recipe: &Recipe) -> &'static [Self] {
        if recipe.search == Search::None { &Self::BOTH } else { &[Self::Search] }
    }

    /// Returns its name in kernel names.
    pub(crate) fn word(self) -> &'static str {
        match self {
            Self::Aligned => "aligned",
            Self::Unaligned => "unaligned",
            Self::Search => "search",
        }
    }
}

/// Returns whether kernels with this access accept the matrix.
pub(crate) fn fits<T: Element>(shape: Shape, access: Access) -> bool {
    access != Access::Aligned || shape.rows == 1 || (shape.row_stride * size_of::<T>()).is_multiple_of(16)
}

/// Returns the name of a format in kernel names.
pub(crate) fn word(format: Format) -> String {
    format.word().replace('-', "_")
}

/// Returns the grid of blocks that the library would make: one long row if there are no gaps.
pub(crate) fn grid(shape: Shape, block: usize, flat: bool) -> BlockGrid {
    let Shape { rows, cols, row_stride } = shape;
    let flat = flat && row_stride == cols && cols.is_multiple_of(block);
    let (r, c, s) = if flat { (1, rows * cols, rows * cols) } else { (rows, cols, row_stride) };
    BlockGrid::new(r as u64, c as u64, s as u64, block as u64).expect("a small matrix")
}

/// Returns the layout of scales.
pub(crate) fn scale_grid(shape: QuantizedShape) -> ScaleGrid {
    let blocks = shape.blocks_per_row() as u64;
    match shape.scale_layout {
        ScaleLayout::Linear => ScaleGrid::linear(blocks),
        ScaleLayout::Swizzled => ScaleGrid::swizzled(blocks),
    }
}

/// Returns the options of an MX recipe, and the variant in the kernel's name.
pub(crate) fn mx_options(recipe: &Recipe) -> (MxOptions, &'static str) {
    let saturate_non_finite = u32::from(recipe.non_finite == NonFinite::Saturate);
    let of = |arithmetic: mx::Arithmetic, mantissa_addend| {
        let negative_zero = arithmetic.negative_zero as u32;
        let ties = arithmetic.ties as u32;
        let variant = if arithmetic.ties == Ties::Even { "_even" } else { "_other_ties" };
        (MxOptions { mantissa_addend, ties, negative_zero, saturate_non_finite }, variant)
    };
    let with = |scale_rule: ScaleRule| mx::Arithmetic { scale_rule, ..Default::default() };
    match recipe.scheme {
        Scheme::Mxfp4(arithmetic) => of(arithmetic, arithmetic.scale_rule.mantissa_addend::<E2m1>()),
        Scheme::Mxfp8E4m3(rule) => of(with(rule), rule.mantissa_addend::<E4m3>()),
        Scheme::Mxfp8E5m2(rule) => of(with(rule), rule.mantissa_addend::<E5m2>()),
        Scheme::Nvfp4(..) | Scheme::Comparison(_) => panic!("not an MX format with kernels"),
    }
}

/// A matrix to quantize.
#[derive(Clone, Copy)]
pub(crate) struct Input<'a, T> {
    pub(crate) values: &'a [T],
    pub(crate) shape: Shape,
    pub(crate) weights: Option<&'a [f32]>,
    /// Whether a given global scale is in the tensor's slot.
    pub(crate) scale_in_slot: bool,
}

/// Quantizes with the launches that the library would make, and expects the CPU's result.
pub(crate) fn quantizing<T: Element>(input: Input<'_, T>, recipe: &Recipe, access: Access) -> Prepared {
    let Input { values, shape, weights, scale_in_slot } = input;
    let expected = match weights {
        Some(weights) => quantize_with(values, shape, recipe, QuantizeOptions::new().importance(weights)),
        None => quantize(values, shape, recipe),
    };
    let expected = expected.expect("the CPU quantizes");
    let mut case = Prepared::new();
    let format = recipe.format();
    let quantized = expected.tensor.shape();
    let codes = case.memory.allocate("codes", expected.tensor.codes().len());
    let scales = if quantized.scale_layout == ScaleLayout::Swizzled {
        // Padding is cleared beforehand.
        case.memory.allocate_from("scales", &vec![0; expected.tensor.scales().len()])
    } else {
        case.memory.allocate("scales", expected.tensor.scales().len())
    };
    let given = case.values(&values[..shape.span().unwrap()], access == Access::Unaligned);
    let report = case.report(shape, format, expected.report);
    let mut scale_grid = scale_grid(quantized);
    let mut by_blocks = grid(shape, format.block(), weights.is_none());
    let by_rows = grid(shape, format.block(), false);
    if access == Access::Aligned
        && quantized.scale_layout == ScaleLayout::Swizzled
        && ScaleGrid::can_go_by_tiles(shape.rows as u64, shape.cols as u64, by_rows.blocks)
    {
        scale_grid.by_tiles = 1;
        by_blocks = by_rows;
    }
    let elements = by_blocks.blocks * format.block() as u64;
    let mut arguments = vec![given.clone(), codes.into(), scales.into()];
    let (options, variant) = match recipe.scheme {
        Scheme::Nvfp4(arithmetic, global) => {
            let mut before = [0; size_of::<GlobalSlot>()];
            let scale = match global {
                Global::Given(given) if scale_in_slot => {
                    // Kernels must read only the scale.
                    before.fill(0x7F);
                    before[..4].copy_from_slice(&given.value().to_le_bytes());
                    1.0
                }
                Global::Given(given) => given.value(),
                Global::FromAmax | Global::Absent => 1.0,
            };
            let slot = case.memory.allocate_from("global", &before);
            arguments.push(slot.into());
            let mut plan = NvPlan::new(arithmetic, scale);
            plan.shortcut = NvShortcut::new(&plan.quantizer, T::SIGNIFICAND);
            let saturate_non_finite = u32::from(recipe.non_finite == NonFinite::Saturate);
            let options = nv_options(&NvOptions { plan, saturate_non_finite });
            let dtype = T::DTYPE.word();
            if global == Global::FromAmax {
                let amax_access = if access == Access::Search { Access::Unaligned } else { access };
                let amax_grid = grid(shape, mx::BLOCK, true);
                let covered = amax_grid.blocks * mx::BLOCK as u64;
                let amax_arguments = vec![given, slot.into(), argument(&amax_grid)];
                case.step(amax_kernel::<T>(amax_access), covered, amax_arguments);
            }
            let planned = global == Global::FromAmax || scale_in_slot;
            if planned {
                let plan_arguments = vec![slot.into(), options.clone(), u32::from(scale_in_slot).into()];
                case.step(format!("nvfp4_plan_{dtype}"), 1, plan_arguments);
            }
            let variant = if planned { "_planned" } else { "_given" };
            let stored = expected.tensor.global_scale().map_or(1.0, |scale| scale.value());
            case.expect_scale(slot, stored);
            (options, variant)
        }
        _ => {
            let (options, variant) = mx_options(recipe);
            (argument(&options), variant)
        }
    };
    arguments.extend([report, argument(&by_blocks), argument(&scale_grid), options]);
    // MXFP8 rounds ties to even.
    let variant = if matches!(format, Format::Mxfp8E4m3 | Format::Mxfp8E5m2) { "" } else { variant };
    let name = if access == Access::Search {
        let importance = weights.map(|weights| {
            Argument::from(case.memory.allocate_from("importance", bytemuck::cast_slice(weights)))
        });
        arguments.extend([importance.unwrap_or_else(|| 0u64.into()), (recipe.search as u32).into()]);
        assert_ne!(recipe.search, Search::None);
        format!("{}_search_{}{variant}", word(format), T::DTYPE.word())
    } else {
        format!("{}_quantize_{}{variant}_{}", word(format), T::DTYPE.word(), access.word())
    };
    case.step(name, elements, arguments);
    case.expect("codes", codes, expected.tensor.codes().to_vec());
    case.expect("scales", scales, expected.tensor.scales().to_vec());
    case
}

impl Prepared {
    /// Expects a global scale in a slot.
    fn expect_scale(&mut self, slot: microscale_executor::Buffer, scale: f32) {
        self.checks.push(Box::new(move |memory| {
            let bytes = memory.bytes_or(slot, 0);
            let found = f32::from_le_bytes(*bytes.first_chunk().unwrap());
            if found == scale { Ok(()) } else { Err(format!("global scale: {found:e} instead of {scale:e}")) }
        }));
    }
}

/// Returns amax as the slot's words: the magnitude's bits, and whether a NaN or an infinity occurs.
pub(crate) fn amax_words<T: Element>(values: &[T], shape: Shape) -> [u32; 3] {
    let found = amax(values, shape).expect("the CPU finds it");
    [found.finite.to_bits(), u32::from(found.nan), u32::from(found.infinite)]
}
