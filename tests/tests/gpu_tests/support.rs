//! Inputs and comparisons.

use microscale::gpu::Gpu;
use microscale::{
    Element, Format, NonFinite, Numerics, Quantized, Recipe, ScaleLayout, Shape, Words, quantize,
};
use microscale_kernels_abi::TARGETS;
use microscale_test_support::cases::every_recipe;
pub(crate) use microscale_test_support::inputs::patterns;

/// Returns every recipe that cannot refuse its input, of every format, in one layout.
///
/// Global scales are computed, absent, and given for these amaxes.
pub(crate) fn recipes(amaxes: &[f32], scale_layout: ScaleLayout) -> Vec<Recipe> {
    let accepting = every_recipe(amaxes).into_iter().filter(|recipe| recipe.non_finite != NonFinite::Error);
    accepting.map(|recipe| Recipe { scale_layout, ..recipe }).collect()
}

/// Returns each format's default recipe in one layout, with non-finite values propagated.
pub(crate) fn default_recipes(scale_layout: ScaleLayout) -> Vec<Recipe> {
    let of = |format: Format| Recipe::of(format, Numerics::default_for(format)).expect("the default");
    let recipes = Format::WITH_KERNELS.iter().map(|format| of(*format));
    recipes.map(|recipe| Recipe { scale_layout, non_finite: NonFinite::Propagate, ..recipe }).collect()
}

/// Asserts that a result equals the CPU's. The message names the first different block.
pub(crate) fn assert_is_cpus<T: Element>(found: &Quantized, values: &[T], shape: Shape, recipe: &Recipe) {
    let expected = quantize(values, shape, recipe).expect("the CPU quantizes");
    if *found == expected {
        return;
    }
    let what = format!("{} {shape:?} {recipe:?}", T::DTYPE.word());
    let (ours, cpus) = (&found.tensor, &expected.tensor);
    assert_eq!(ours.shape(), cpus.shape(), "{what}");
    assert_eq!(ours.global_scale(), cpus.global_scale(), "{what}");
    let in_row = cpus.blocks_per_row();
    let linear = [ours, cpus].map(|tensor| tensor.convert_layout(ScaleLayout::Linear));
    for (block, (ours, cpus)) in linear[0].scales().iter().zip(linear[1].scales()).enumerate() {
        assert_eq!(ours, cpus, "scale of row {}, block {}: {what}", block / in_row, block % in_row);
    }
    assert_eq!(ours.scales(), cpus.scales(), "padding of the scales: {what}");
    let block_bytes = cpus.format().block_bytes();
    let blocks = ours.codes().chunks(block_bytes).zip(cpus.codes().chunks(block_bytes));
    for (block, (ours, cpus)) in blocks.enumerate() {
        assert_eq!(ours, cpus, "codes of row {}, block {}: {what}", block / in_row, block % in_row);
    }
    assert_eq!(found.report, expected.report, "{what}");
    panic!("the GPU's result is not the CPU's: {what}");
}

/// Quantizes on the GPU from host memory and compares with the CPU.
pub(crate) fn check<T: Element>(gpu: &Gpu, values: &[T], shape: Shape, recipe: &Recipe) {
    let found = gpu.quantize(values, shape, recipe).expect("the GPU quantizes");
    assert_is_cpus(&found, values, shape, recipe);
}

/// Shapes with whole and partial blocks, aligned and odd rows, gaps, and more than one thread
/// block.
pub(crate) const SHAPES: [Shape; 20] = [
    Shape::new(1, 1),
    Shape::new(1, 31),
    Shape::new(3, 32),
    Shape::new(2, 33),
    Shape::new(5, 64),
    Shape::new(7, 100),
    Shape::new(4, 104),
    Shape::new(1000, 8),
    Shape::new(333, 40).with_row_stride(48),
    Shape::new(65, 96).with_row_stride(97),
    Shape::new(129, 256).with_row_stride(272),
    Shape::new(3, 4096),
    Shape::new(2, 4097),
    Shape::new(17, 1056),
    // For blocks of 16 and for tiles of 128 rows by 4 blocks.
    Shape::new(2, 15),
    Shape::new(3, 17),
    Shape::new(128, 64),
    Shape::new(127, 80),
    Shape::new(130, 144).with_row_stride(152),
    Shape::new(260, 132),
];

/// A GPU that multiplies by `wgmma`, opened with the PTX of the oldest target, which has `mma` kernels. `None` for
/// other GPUs, whose own PTX has them.
pub(crate) fn with_mma(gpu: &Gpu) -> Option<Gpu> {
    let target = TARGETS.iter().find(|target| Some(target.name) == gpu.info().target)?;
    target.wgmma.then(|| Gpu::with_target(gpu.info().ordinal, TARGETS[0].name).expect("older PTX runs"))
}
