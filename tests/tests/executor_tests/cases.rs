//! Cases for every kernel with every option.

use std::collections::BTreeMap;

use half::{bf16, f16};
use microscale::{
    Batch, Element, Format, Global, NonFinite, Numerics, QuantizedShape, QuantizedTensor, Recipe,
    ScaleLayout, Scheme, Search, Shape, Words, quantize,
};
use microscale_formats::{Ties, mx};
use microscale_kernels_abi::{Mainloop, Target};
use microscale_test_support::cases::{NVFP4_NUMERICS, every_recipe, given_for, nvfp4_arithmetic};
use microscale_test_support::inputs::patterns;
use microscale_test_support::operands::{Scales, tensor};

use super::activations::activations_cases;
use super::case::Prepared;
use super::expert_parts::expert_parts_cases;
use super::experts::experts_cases;
use super::fp4::fp4_cases;
use super::fp8::fp8_cases;
use super::fp8_experts::fp8_experts_cases;
use super::gemm::gemm_cases;
use super::gptq::gptq_cases;
use super::kv::kv_cases;
use super::operations::{amax, amax_kernel, converting, dequantizer, dequantizing, errors};
use super::products::{multiplying, product_kernel};
use super::quantizing::{Access, Input, fits, quantizing};
use super::weights::weights_cases;

/// A case, which is made on demand.
pub(crate) struct Case {
    /// A description for messages.
    pub(crate) what: String,
    /// The kernel under test.
    pub(crate) kernel: String,
    /// Whether it is one of [`tails`], which are many and small.
    pub(crate) tail: bool,
    /// The mainloop that it launches, if any: targets without its kernels skip the case.
    pub(crate) mainloop: Option<Mainloop>,
    /// Whether tensor cores add, not all in the same way.
    pub(crate) by_tensor_cores: bool,
    pub(crate) make: Box<dyn Fn() -> Prepared + Send + Sync>,
}

impl Case {
    pub(crate) fn new(
        what: String,
        kernel: String,
        make: impl Fn() -> Prepared + Send + Sync + 'static,
    ) -> Self {
        Self { what, kernel, tail: false, mainloop: None, by_tensor_cores: false, make: Box::new(make) }
    }

    /// Returns whether a target has all kernels of the case.
    pub(crate) fn runs_on(&self, target: &Target) -> bool {
        self.mainloop.is_none_or(|mainloop| mainloop.traits().targets.contain(target))
    }
}

/// Shapes with partial blocks, gaps and odd rows.
///
/// Others have whole warps, several thread blocks, and whole scale tiles.
const SHAPES: [Shape; 12] = [
    Shape::new(1, 1),
    Shape::new(2, 1024),
    Shape::new(3, 33),
    Shape::new(1, 4104),
    Shape::new(33, 40).with_row_stride(48),
    Shape::new(5, 100).with_row_stride(101),
    Shape::new(2, 1056).with_row_stride(1064),
    Shape::new(128, 16),
    Shape::new(130, 24).with_row_stride(32),
    Shape::new(3, 1040),
    Shape::new(1, 15),
    Shape::new(3, 2048).with_row_stride(2056),
];

/// Whole tiles, which some kernels process in another order.
const TILES: Shape = Shape::new(128, 256).with_row_stride(264);

/// Returns values with ordinary blocks.
///
/// Most kernels have a fast path for these, and a single other block forces the whole warp onto the
/// slow path.
pub(super) fn ordinary<T: Element>(elements: usize, seed: u64) -> Vec<T> {
    let mut rng = fastrand::Rng::with_seed(seed);
    (0..elements).map(|_| T::from_f32((0..4).map(|_| rng.f32() - 0.5).sum::<f32>() * 1.7)).collect()
}

/// Returns the recipes that kernels accept, including searches.
fn recipes() -> Vec<Recipe> {
    let plain = every_recipe(&[1e-3, 7.0]).into_iter().filter(|recipe| recipe.non_finite != NonFinite::Error);
    let mut recipes: Vec<_> = plain.collect();
    for &(_, search) in &Search::WORDS[1..] {
        for (i, (_, numerics)) in microscale::Numerics::WORDS.iter().enumerate() {
            for format in Format::MULTIPLIED {
                let Ok(recipe) = Recipe::of(format, *numerics) else { continue };
                let non_finite = [NonFinite::Propagate, NonFinite::Saturate][i % 2];
                recipes.push(Recipe { search, non_finite, ..recipe });
            }
        }
        for &(_, ties) in Ties::WORDS {
            let scheme = Scheme::Mxfp4(mx::Arithmetic { ties, ..Default::default() });
            recipes.push(Recipe { scheme, search, non_finite: NonFinite::Propagate, ..Recipe::default() });
        }
        for numerics in NVFP4_NUMERICS {
            let direction = nvfp4_arithmetic(numerics).direction;
            let recipe = Recipe { search, non_finite: NonFinite::Saturate, ..Recipe::default() };
            for global in [Global::Absent, Global::Given(given_for(direction, 7.0))] {
                recipes.push(Recipe { scheme: Scheme::Nvfp4(nvfp4_arithmetic(numerics), global), ..recipe });
            }
        }
    }
    recipes
}

/// Returns the kernel that runs last for a recipe.
fn quantizer<T: Element>(recipe: &Recipe, access: Access) -> String {
    let shape = Shape::new(1, 32);
    let input = Input { values: &[T::default(); 32], shape, weights: None, scale_in_slot: false };
    quantizing(input, recipe, access).steps.pop().expect("a launch").kernel
}

fn quantizing_cases<T: Element>(cases: &mut Vec<Case>) {
    for (i, recipe) in recipes().into_iter().enumerate() {
        for &access in Access::of(&recipe) {
            let mut shapes = vec![SHAPES[i % 12], SHAPES[(i * 7 + 5) % 12]];
            if i.is_multiple_of(5) {
                shapes.push(TILES);
            }
            for (j, shape) in shapes.into_iter().enumerate().filter(|(_, shape)| fits::<T>(*shape, access)) {
                let scale_layout = [ScaleLayout::Linear, ScaleLayout::Swizzled][usize::from(j != 0)];
                let recipe = Recipe { scale_layout, ..recipe };
                let wild = (i + j).is_multiple_of(2);
                let weighted = access == Access::Search && i.is_multiple_of(2);
                let make = move || {
                    let (elements, seed) = (shape.span().unwrap(), (i * 10 + j) as u64);
                    let values = if wild {
                        patterns::<T>(elements, true, seed)
                    } else {
                        ordinary::<T>(elements, seed)
                    };
                    let weights: Vec<f32> = (0..shape.cols).map(|col| (col % 5) as f32 * 0.3).collect();
                    let weights = weighted.then_some(&weights[..]);
                    quantizing(
                        Input { values: &values, shape, weights, scale_in_slot: false },
                        &recipe,
                        access,
                    )
                };
                let what = format!(
                    "{} {shape:?} {recipe:?}, {}",
                    T::DTYPE.word(),
                    if wild { "wild" } else { "ordinary" }
                );
                cases.push(Case::new(what, quantizer::<T>(&recipe, access), make));
            }
        }
    }
}

/// Cases with a final global scale in the tensor's slot.
fn scale_in_slot_cases<T: Element>(cases: &mut Vec<Case>) {
    let is_given = |recipe: &Recipe| matches!(recipe.scheme, Scheme::Nvfp4(_, Global::Given(_)));
    for (i, recipe) in recipes().into_iter().filter(is_given).enumerate() {
        let planned = recipe.with_global(Global::FromAmax);
        for &access in Access::of(&recipe) {
            let shape = if fits::<T>(SHAPES[i % 12], access) { SHAPES[i % 12] } else { TILES };
            let make = move || {
                let values = patterns::<T>(shape.span().unwrap(), true, i as u64);
                let input = Input { values: &values, shape, weights: None, scale_in_slot: true };
                quantizing(input, &recipe, access)
            };
            let what = format!("{} {shape:?} {recipe:?}, the scale in the slot", T::DTYPE.word());
            cases.push(Case::new(what, quantizer::<T>(&planned, access), make));
        }
    }
}

/// Cases whose blocks permit tiny scales.
///
/// The largest element of such a block has no weight. The second largest, slightly above a quarter
/// of the scale, leaves slightly less than itself. The search bounds then allow scales so small
/// that the reference limits them.
fn tiny_elements_cases<T: Element>(cases: &mut Vec<Case>) {
    for recipe in recipes().into_iter().filter(|recipe| recipe.search != Search::None) {
        let shape = Shape::new(24, 64);
        let make = move || {
            let value = |i: usize| match i % 32 {
                0 => 2f32.powi(-39),
                1 => (1.0 + 1.0 / 128.0) * 2f32.powi(-43 + (i / 64) as i32 % 3),
                _ => 0.0,
            };
            let values: Vec<T> = (0..shape.elements()).map(|i| T::from_f32(value(i))).collect();
            let weights: Vec<f32> =
                (0..shape.cols).map(|col| if col % 32 == 0 { 0.0 } else { 1.0 }).collect();
            let input = Input { values: &values, shape, weights: Some(&weights), scale_in_slot: false };
            quantizing(input, &recipe, Access::Search)
        };
        let what = format!("{} {shape:?} {recipe:?}, tiny elements", T::DTYPE.word());
        cases.push(Case::new(what, quantizer::<T>(&recipe, Access::Search), make));
    }
}

/// Returns two rows of every length up to two NVFP4 blocks, and values for them.
///
/// A row's largest magnitude is its last element, so a kernel that omits it fails. The gap between
/// rows contains larger values, so a kernel that reads too much fails too.
fn tails<T: Element>() -> impl Iterator<Item = (Shape, Vec<T>)> {
    (1..=32usize).map(|cols| {
        let shape = Shape::new(2, cols).with_row_stride(cols.next_multiple_of(8) + 8);
        let mut values = ordinary::<T>(shape.span().unwrap(), cols as u64);
        for (i, value) in values.iter_mut().enumerate().filter(|(i, _)| i % shape.row_stride + 1 >= cols) {
            *value = T::from_f32(if i % shape.row_stride + 1 == cols { -7.25 } else { 100.0 });
        }
        (shape, values)
    })
}

fn tail_cases<T: Element>(cases: &mut Vec<Case>) {
    let mut push = |kernel: String, shape: Shape, make: Box<dyn Fn() -> Prepared + Send + Sync>| {
        cases.push(Case { tail: true, ..Case::new(format!("{kernel} {shape:?}, a tail"), kernel, make) });
    };
    // Each kernel once, by each access.
    let mut quantizers = BTreeMap::new();
    for recipe in recipes() {
        for &access in Access::of(&recipe) {
            let kernel = quantizer::<T>(&recipe, access);
            quantizers.entry(kernel).or_insert((recipe, access));
        }
    }
    for (shape, values) in tails::<T>() {
        for (kernel, &(recipe, access)) in &quantizers {
            let values = values.clone();
            let make = move || {
                let input = Input { values: &values, shape, weights: None, scale_in_slot: false };
                quantizing(input, &recipe, access)
            };
            push(kernel.clone(), shape, Box::new(make));
        }
        for access in Access::BOTH {
            for format in Format::WITH_KERNELS {
                let recipe = Recipe::of(format, Numerics::Torchao).expect("torchao has every format");
                let values = values.clone();
                let make = move || {
                    let tensor = quantize(&values, shape, &recipe).expect("the CPU quantizes").tensor;
                    dequantizing::<T>(&tensor, shape.row_stride, access)
                };
                push(dequantizer::<T>(format, access), shape, Box::new(make));
            }
            let values = values.clone();
            let make = move || amax(&values, shape, access);
            push(amax_kernel::<T>(access), shape, Box::new(make));
        }
    }
}

fn dequantizing_cases<T: Element>(cases: &mut Vec<Case>) {
    for format in &Format::WITH_KERNELS {
        for (i, shape) in SHAPES.into_iter().enumerate() {
            for access in Access::BOTH {
                let row_stride = shape.row_stride;
                if !fits::<T>(shape, access) {
                    continue;
                }
                for (j, scale_layout) in [ScaleLayout::Linear, ScaleLayout::Swizzled].into_iter().enumerate()
                {
                    let make = move || {
                        let shape = QuantizedShape::new(*format, shape.rows, shape.cols)
                            .with_scale_layout(scale_layout);
                        let mut rng = fastrand::Rng::with_seed((i * 2 + j) as u64);
                        let (codes, scales) = shape.bytes().unwrap();
                        // Every scale byte, including NaN.
                        let most = if *format == Format::Nvfp4 { 0x7F } else { 0xFF };
                        let codes = (0..codes).map(|_| rng.u8(..)).collect();
                        let scales = (0..scales).map(|_| rng.u8(..=most)).collect();
                        let mut tensor = QuantizedTensor::from_parts(shape, codes, scales).unwrap();
                        if *format == Format::Nvfp4 && i % 3 != 0 {
                            let direction = nvfp4_arithmetic(NVFP4_NUMERICS[i % 2]).direction;
                            tensor = tensor.with_global_scale(given_for(direction, 3.0)).unwrap();
                        }
                        dequantizing::<T>(&tensor, row_stride, access)
                    };
                    let kernel = dequantizer::<T>(*format, access);
                    let what = format!("{kernel} {shape:?} {scale_layout:?}");
                    cases.push(Case::new(what, kernel, make));
                }
            }
        }
    }
}

fn other_cases<T: Element>(cases: &mut Vec<Case>) {
    for (i, shape) in SHAPES.into_iter().enumerate() {
        for access in Access::BOTH.into_iter().filter(|access| fits::<T>(shape, *access)) {
            for non_finite in [false, true] {
                let make =
                    move || amax(&patterns::<T>(shape.span().unwrap(), non_finite, i as u64), shape, access);
                let kernel = amax_kernel::<T>(access);
                cases.push(Case::new(format!("{kernel} {shape:?}"), kernel, make));
            }
        }
        for non_finite in [false, true] {
            let make = move || {
                let values = patterns::<T>(shape.span().unwrap(), non_finite, i as u64);
                let mut back = patterns::<f32>(shape.elements(), non_finite, 50 + i as u64);
                // Most dequantized values are close to the originals.
                for (place, back) in back.iter_mut().enumerate().filter(|(place, _)| place % 7 != 0) {
                    let (row, col) = (place / shape.cols, place % shape.cols);
                    *back = values[row * shape.row_stride + col].to_f32() * 0.9;
                }
                errors(&values, shape, &back)
            };
            let kernel = format!("errors_{}", T::DTYPE.word());
            cases.push(Case::new(format!("{kernel} {shape:?}"), kernel, make));
        }
    }
}

/// Shapes (M, K, L).
///
/// They have one or several k-iterations, rows that end within a k-iteration, and rows that do not
/// fill the last warp.
const PRODUCTS: [(usize, usize, usize); 9] = [
    (1, 16, 1),
    (5, 32, 1),
    (3, 48, 2),
    (9, 1024, 1),
    (2, 1040, 1),
    (6, 2048 + 96, 2),
    (4, 3072, 1),
    (1, 4096 + 32, 3),
    (5, 7 * 1024, 1),
];

fn product_cases<T: Element>(cases: &mut Vec<Case>) {
    for (i, (m, k, l)) in (0..).zip(PRODUCTS) {
        for format in Format::MULTIPLIED {
            let ragged = format == Format::Nvfp4 && k % 32 != 0;
            let kernels = if ragged { &["ragged"][..] } else { &["rows1", "rows2", "rows4"] };
            for (j, &kernel) in (0..).zip(kernels) {
                // Includes common scales, because the low halves of sums matter under them.
                let kinds = [Scales::Common, Scales::Numbers, Scales::Any, Scales::Largest];
                let scales = kinds[(i + j) as usize % 4];
                let batch = Batch::of(l).with_vector_stride(1 + j as usize);
                let make = move || {
                    let matrix = tensor(format, l * m, k, scales, i + j);
                    let vectors = tensor(format, (l - 1) * batch.vector_stride + 1, k, scales, i + 2 * j + 1);
                    multiplying::<T>(kernel, &matrix, &vectors, batch)
                };
                let what = format!("{} {m}x{k}x{l}, {scales:?}, {batch:?}", T::DTYPE.word());
                cases.push(Case::new(what, product_kernel(format, kernel), make));
            }
        }
    }
}

/// Returns every case.
pub(crate) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    quantizing_cases::<f32>(&mut cases);
    quantizing_cases::<f16>(&mut cases);
    quantizing_cases::<bf16>(&mut cases);
    scale_in_slot_cases::<f32>(&mut cases);
    scale_in_slot_cases::<f16>(&mut cases);
    scale_in_slot_cases::<bf16>(&mut cases);
    tiny_elements_cases::<f32>(&mut cases);
    tiny_elements_cases::<bf16>(&mut cases);
    tail_cases::<f32>(&mut cases);
    tail_cases::<f16>(&mut cases);
    tail_cases::<bf16>(&mut cases);
    dequantizing_cases::<f32>(&mut cases);
    dequantizing_cases::<f16>(&mut cases);
    dequantizing_cases::<bf16>(&mut cases);
    other_cases::<f32>(&mut cases);
    other_cases::<f16>(&mut cases);
    other_cases::<bf16>(&mut cases);
    product_cases::<f32>(&mut cases);
    product_cases::<f16>(&mut cases);
    product_cases::<bf16>(&mut cases);
    activations_cases(&mut cases);
    kv_cases(&mut cases);
    weights_cases(&mut cases);
    fp4_cases(&mut cases);
    fp8_cases(&mut cases);
    fp8_experts_cases(&mut cases);
    gemm_cases(&mut cases);
    gptq_cases(&mut cases);
    experts_cases(&mut cases);
    expert_parts_cases(&mut cases);
    for (rows, blocks) in [(1, 1), (3, 4), (128, 7), (130, 8), (300, 33)] {
        for (name, to) in
            [("scales_to_swizzled", ScaleLayout::Swizzled), ("scales_to_linear", ScaleLayout::Linear)]
        {
            let make = move || converting(rows, blocks, to, rows as u64);
            cases.push(Case::new(format!("{name} {rows}x{blocks}"), name.into(), make));
        }
    }
    cases
}
