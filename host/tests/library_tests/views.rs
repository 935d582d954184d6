//! Tests views of quantized matrices in borrowed memory.

use half::bf16;
use microscale::{
    Batch, Error, Format, GlobalScale, Numerics, QuantizeOptions, QuantizedShape, QuantizedTensor,
    QuantizedView, Recipe, ScaleLayout, Shape, Strided, amax, dequantize, dequantize_into, gemv,
    gemv_weights, quantize, quantize_into_parts,
};

/// The bytes of a tensor in one buffer, as in a file: scales, then codes, at odd addresses.
struct File {
    bytes: Vec<u8>,
    codes: usize,
    shape: QuantizedShape,
    global_scale: Option<GlobalScale>,
}

impl File {
    fn of(tensor: &QuantizedTensor) -> Self {
        let bytes = [&[0], tensor.scales(), tensor.codes()].concat();
        let codes = 1 + tensor.scales().len();
        Self { bytes, codes, shape: tensor.shape(), global_scale: tensor.global_scale() }
    }

    fn view(&self) -> QuantizedView<'_> {
        let (scales, codes) = self.bytes.split_at(self.codes);
        let view = QuantizedView::from_parts(self.shape, codes, &scales[1..]).expect("a tensor's parts");
        self.global_scale.map_or(view, |global| view.with_global_scale(global).expect("a tensor's"))
    }
}

fn tensor(format: Format, scale_layout: ScaleLayout, rows: usize, cols: usize) -> QuantizedTensor {
    let values: Vec<f32> = (0..rows * cols).map(|i| (i as f32 * 0.37).sin() * (i % 13) as f32).collect();
    let recipe = Recipe::of(format, Numerics::default_for(format)).expect("its own numerics");
    let recipe = Recipe { scale_layout, ..recipe };
    quantize(&values, Shape::new(rows, cols), &recipe).expect("finite values").tensor
}

#[test]
fn are_read_like_tensors() {
    for format in Format::WITH_KERNELS {
        for scale_layout in [ScaleLayout::Linear, ScaleLayout::Swizzled] {
            let tensor = tensor(format, scale_layout, 5, 90);
            let file = File::of(&tensor);
            let view = file.view();
            assert_eq!(view, QuantizedView::from(&tensor));
            assert_eq!(view.to_tensor(), tensor);
            assert_eq!((view.linear_scales(), view.bytes()), (tensor.linear_scales(), tensor.bytes()));
            assert_eq!(
                view.convert_layout(ScaleLayout::Swizzled),
                tensor.convert_layout(ScaleLayout::Swizzled)
            );
            assert_eq!(dequantize::<f32>(view), dequantize::<f32>(&tensor));
            let mut apart = [vec![bf16::ZERO; 5 * 100], vec![bf16::ZERO; 5 * 100]];
            dequantize_into(view, &mut apart[0], 100).expect("room");
            dequantize_into(&tensor, &mut apart[1], 100).expect("room");
            assert_eq!(apart[0], apart[1]);
        }
    }
}

#[test]
fn are_multiplied_like_tensors() {
    for format in [Format::Nvfp4, Format::Mxfp4] {
        let (matrix, vectors) =
            (tensor(format, ScaleLayout::Linear, 24, 256), tensor(format, ScaleLayout::Linear, 1, 256));
        let (of_matrix, of_vectors) = (File::of(&matrix), File::of(&vectors));
        let mut out = [[0f32; 24]; 2];
        gemv(of_matrix.view(), of_vectors.view(), Batch::default(), &mut out[0]).expect("they fit");
        gemv(&matrix, &vectors, Batch::default(), &mut out[1]).expect("they fit");
        assert_eq!(out[0], out[1]);
        assert!(out[0].iter().any(|sum| *sum != 0.0));

        let activations: Vec<bf16> = (0..3 * 256).map(|i| bf16::from_f32((i as f32).cos())).collect();
        let mut out = [vec![bf16::ZERO; 3 * 24], vec![bf16::ZERO; 3 * 24]];
        gemv_weights(of_matrix.view(), &activations, 3, &mut out[0]).expect("they fit");
        gemv_weights(&matrix, &activations, 3, &mut out[1]).expect("they fit");
        assert_eq!(out[0], out[1]);
    }
}

#[test]
fn refuse_the_same_operands_as_tensors() {
    let shape = QuantizedShape::new(Format::Nvfp4, 2, 32);
    let (codes, scales) = ([0u8; 32], [0u8, 0, 0, 0x80]);
    let short = QuantizedView::from_parts(shape, &codes[1..], &scales);
    assert!(matches!(short, Err(Error::QuantizedLength { found: 31, .. })), "{short:?}");
    let signed = QuantizedView::from_parts(shape, &codes, &scales);
    assert!(matches!(signed, Err(Error::SignedScale { index: 3, .. })), "{signed:?}");
    let view = QuantizedView::from_parts(shape, &codes, &[0; 4]).expect("bytes of a tensor");
    let zero = view.with_global_scale(GlobalScale::Multiplier(0.0));
    assert!(matches!(zero, Err(Error::GlobalScale { .. })), "{zero:?}");
    let mxfp4 = QuantizedShape::new(Format::Mxfp4, 2, 32);
    let view = QuantizedView::from_parts(mxfp4, &codes, &[0; 2]).expect("bytes of a tensor");
    let none = view.with_global_scale(GlobalScale::Multiplier(1.0));
    assert!(matches!(none, Err(Error::NoGlobalScale { .. })), "{none:?}");
}

#[test]
fn quantizing_writes_to_borrowed_memory() {
    let strided = Strided::along(&[70, 6], 0).expect("an axis");
    let values: Vec<f32> = (0..70 * 6).map(|i| (i as f32 * 0.37).sin() * (i % 13) as f32).collect();
    for format in Format::ALL {
        for scale_layout in [ScaleLayout::Linear, ScaleLayout::Swizzled] {
            let recipe = Recipe::of(format, Numerics::default_for(format)).expect("its own numerics");
            let recipe = Recipe { scale_layout, ..recipe };
            let expected = quantize(&values, strided, &recipe).expect("finite values");
            let lengths = (expected.tensor.codes().len(), expected.tensor.scales().len());
            let into = |codes: &mut [u8], scales: &mut [u8]| {
                quantize_into_parts(&values, strided, &recipe, QuantizeOptions::new(), codes, scales)
            };
            let (mut codes, mut scales) = (vec![0xA5; lengths.0], vec![0x5A; lengths.1]);
            let (global_scale, report) = into(&mut codes, &mut scales).expect("room");
            assert_eq!((&codes[..], &scales[..]), (expected.tensor.codes(), expected.tensor.scales()));
            assert_eq!((global_scale, report), (expected.tensor.global_scale(), expected.report));

            for (fewer, what) in [((1, 0), "codes"), ((0, 1), "scales")] {
                let refused = into(&mut codes[fewer.0..], &mut scales[fewer.1..]);
                let Err(Error::QuantizedLength { what: found, .. }) = refused else { panic!("{refused:?}") };
                assert_eq!(found, what);
            }
        }
    }
}

#[test]
fn the_amax_of_strided_values_ignores_gaps() {
    let mut values = vec![f32::NAN; 400];
    let strided = Strided { outer: 2, outer_stride: 190, rows: 3, row_stride: 60, cols: 5, col_stride: 7 };
    let place = |o: usize, r: usize, k: usize| o * 190 + r * 60 + k * 7;
    for (o, r, k) in (0..30).map(|i| (i / 15, i / 5 % 3, i % 5)) {
        values[place(o, r, k)] = 0.5;
    }
    values[place(1, 2, 4)] = -8.0;
    let found = amax(&values, strided).expect("it fits");
    assert_eq!((found.finite, found.nan, found.infinite), (8.0, false, false));
    assert!(matches!(amax(&values[..300], strided), Err(Error::StridedLength { .. })));
}
