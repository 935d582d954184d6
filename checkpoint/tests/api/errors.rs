//! Operations that fail: the errors they return, and that no files remain.

use std::collections::BTreeMap;
use std::fs;

use half::f16;
use microscale::{Device, Dtype, Error as Cause, Format, NonFinite, Position, Recipe, Report, Words};
use microscale_checkpoint::{
    Checkpoint, CheckpointFormat, Convert, Dequantize, Error, FormatError, Outcome, OutputError, Quantize,
    Settings, Summary,
};
use microscale_test_support::Scratch;

use crate::input::{Tensor, noise, write_file, write_model};
use crate::quantize::matrix;
use crate::threads::{COUNTS, with_threads};
use crate::{BAND, files, going_on, paths, quantize, request, tensors, with_plan};

/// Rows of a tensor that takes three bands and a bit.
const ROWS: usize = 3 * BAND / 1024 + 9;

/// Returns a tensor of `ROWS` rows with NaN and infinities at some positions.
fn with(name: &str, wrong: &[(usize, usize, f32)]) -> Tensor {
    let mut values: Vec<f32> = noise(ROWS * 1024, 11);
    wrong.iter().for_each(|(row, col, value)| values[row * 1024 + col] = *value);
    Tensor::of(name, &[ROWS, 1024], &values)
}

/// Checks that quantizing fails because of the values in a tensor, at `first`, and returns counts.
#[track_caller]
fn non_finite(result: Result<Summary, Error>, name: &str, first: (usize, usize)) -> Report {
    let Err(Error::Tensor { file, tensor, source }) = result else { panic!("{result:?}") };
    let Cause::NonFinite { first: found, report } = *source else { panic!("{source:?}") };
    assert_eq!(tensor, name);
    assert_eq!(found, Position { row: first.0, col: first.1 }, "{name} in {}", file.display());
    report
}

#[test]
fn a_nan_in_a_late_band_is_refused_with_its_position_and_the_counts_of_all_bands() {
    let scratch = Scratch::new();
    let (nan, infinity) = (f32::NAN, f32::INFINITY);
    let last = ROWS - 1;
    let wrong = [
        (600, 17, nan),
        (600, 1023, -infinity),
        (BAND / 512, 3, infinity),
        (700, 0, nan),
        (last, 1022, nan),
        (last, 1023, infinity),
    ];
    let one = write_file(&scratch, "in.safetensors", &[with("a.fc.weight", &wrong)]);
    let model = [
        ("a.safetensors", vec![with("model.layers.0.self_attn.q_proj.weight", &[])]),
        ("b.safetensors", vec![with("model.layers.0.self_attn.k_proj.weight", &wrong)]),
    ];
    let fused = write_model(&scratch, "IN", &model);
    let (before, mut reports) = (paths(&scratch), BTreeMap::new());
    for format in [Format::Mxfp4, Format::Nvfp4, Format::Mxfp8E4m3] {
        for threads in COUNTS {
            for (input, name) in [(&one, "a.fc.weight"), (&fused, "model.layers.0.self_attn.k_proj.weight")] {
                let result = with_threads(threads, || {
                    quantize(&request(format), input, &scratch.path("OUT.safetensors"))
                });
                let report = non_finite(result, name, (BAND / 512, 3));
                assert_eq!((report.nan, report.infinite), (3, 3), "{format}, {threads} threads");
                let first = reports.entry((format.word(), name)).or_insert(report);
                assert_eq!(report, *first, "{format}, {threads} threads");
                assert_eq!(paths(&scratch), before);
            }
        }
    }
}

/// Quantizes a tensor with values that are not finite in late bands, by two policies, and returns
/// each report with the report of the whole tensor.
fn propagated_and_saturated() -> Vec<(Report, Report)> {
    let scratch = Scratch::new();
    let tensor = with("a.fc.weight", &[(600, 17, f32::NAN), (BAND / 512, 900, f32::INFINITY)]);
    let input = write_file(&scratch, "in.safetensors", std::slice::from_ref(&tensor));
    let values = tensor.values::<f32>();
    let report = |non_finite: NonFinite| {
        let settings = Settings { non_finite: Some(non_finite), ..Settings::default() };
        let out = scratch.path(format!("{}.safetensors", non_finite.word()));
        let summary = quantize(&Quantize::new(settings), &input, &out).unwrap();
        let recipe = Recipe { non_finite, ..Recipe::default() };
        let expected = microscale::quantize(&values, matrix(&tensor.shape), &recipe).unwrap();
        assert!(tensors(&out)["a.fc.weight_packed"].2 == expected.tensor.codes());
        assert!(tensors(&out)["a.fc.weight_scale"].2 == expected.tensor.scales());
        let Outcome::Quantized { report, .. } = summary.tensors[0].outcome else { panic!() };
        (report, expected.report)
    };
    [NonFinite::Propagate, NonFinite::Saturate].map(report).into()
}

#[test]
fn the_report_of_a_tensor_has_the_position_of_its_first_value_that_is_not_finite() {
    for (found, expected) in propagated_and_saturated() {
        assert_eq!((found.nan, found.infinite), (1, 1));
        assert_eq!(found.first_non_finite, Some(Position { row: BAND / 512, col: 900 }));
        assert_eq!(found, expected);
    }
}

#[test]
fn positions_in_a_tensor_whose_transpose_is_stored_are_of_the_tensor() {
    let scratch = Scratch::new();
    let (shape, name) = ([2, 64, 96], "model.layers.0.mlp.experts.down_proj");
    let mut values = noise::<f32>(shape.iter().product(), 5);
    let at = Position { row: 64 + 40, col: 7 };
    values[at.row * 96 + at.col] = f32::NAN;
    let input = write_file(&scratch, "in.safetensors", &[Tensor::of(name, &shape, &values)]);
    let with = |non_finite: NonFinite, out: &str| {
        let settings = Settings { non_finite: Some(non_finite), ..Settings::default() };
        let format = Some(CheckpointFormat::GptOss);
        quantize(&Quantize { format, ..Quantize::new(settings) }, &input, &scratch.path(out))
    };
    let refused = non_finite(with(NonFinite::Error, "refused.safetensors"), name, (at.row, at.col));
    assert_eq!(refused.first_non_finite, Some(at));
    let summary = with(NonFinite::Propagate, "out.safetensors").unwrap();
    let Outcome::Quantized { report, .. } = &summary.tensors[0].outcome else { panic!("{summary:?}") };
    assert_eq!((report.nan, report.first_non_finite), (1, Some(at)));
}

#[test]
fn the_report_of_a_refused_tensor_has_the_position_of_its_first_nan() {
    let scratch = Scratch::new();
    let tensor = with("a.fc.weight", &[(600, 17, f32::NAN)]);
    let input = write_file(&scratch, "in.safetensors", std::slice::from_ref(&tensor));
    let whole = microscale::quantize(&tensor.values::<f32>(), matrix(&tensor.shape), &Recipe::default());
    let Err(Cause::NonFinite { report: expected, .. }) = whole else { panic!("{whole:?}") };
    let result = quantize(&request(Format::Mxfp4), &input, &scratch.path("out.safetensors"));
    let report = non_finite(result, "a.fc.weight", (600, 17));
    assert_eq!(report.first_non_finite, expected.first_non_finite);
    assert_eq!((report.nan, report.infinite), (expected.nan, expected.infinite));
}

#[test]
fn the_first_tensor_of_the_files_with_an_error_is_named_whichever_is_noticed_first() {
    let scratch = Scratch::new();
    // The first one is noticed last: its NaN is the last value of a large tensor.
    let early = |shard: usize| Tensor::of(format!("z.{shard}.fc.weight"), &[1, 32], &[f32::NAN; 32]);
    let model = [
        ("a.safetensors", vec![Tensor::noise::<f32>("y.fc.weight", &[2, 32], 1)]),
        ("b.safetensors", vec![with("x.fc.weight", &[(ROWS - 1, 1023, f32::NAN)])]),
        ("c.safetensors", vec![early(1), early(2), early(3)]),
        ("d.safetensors", vec![early(4)]),
    ];
    let model = write_model(&scratch, "IN", &model);
    for format in [Format::Mxfp4, Format::Nvfp4] {
        for threads in COUNTS {
            let result = with_threads(threads, || quantize(&request(format), &model, &scratch.path("OUT")));
            let report = non_finite(result, "x.fc.weight", (ROWS - 1, 1023));
            assert_eq!((report.nan, report.infinite), (1, 0));
        }
    }
}

#[test]
fn values_beyond_f16_in_a_late_band_are_refused_with_the_counts_of_all_bands() {
    let scratch = Scratch::new();
    // Blocks of zeros, but for two blocks whose codes are 6 under 2^14 and one under 2^13.
    let blocks = ROWS * 32;
    let (mut codes, mut scales) = (vec![0; blocks * 16], vec![127; blocks]);
    for (row, block, scale) in [(300, 2, 127 + 14), (500, 0, 127 + 13), (ROWS - 1, 31, 127 + 14)] {
        codes[(row * 32 + block) * 16..][..16].fill(0x77);
        scales[row * 32 + block] = scale;
    }
    let stored = [
        Tensor::of_bytes("a.weight_packed", safetensors::Dtype::U8, &[ROWS, 512], &codes),
        Tensor::of_bytes("a.weight_scale", safetensors::Dtype::U8, &[ROWS, 32], &scales),
    ];
    let input = write_file(&scratch, "in.safetensors", &stored);
    let checkpoint = Checkpoint::open(&input).unwrap();
    let (before, out) = (paths(&scratch), scratch.path("out.safetensors"));
    let run = |non_finite| {
        Dequantize { dtype: Some(Dtype::F16), non_finite }.run(&checkpoint, &out, &Device::Cpu, going_on())
    };
    for threads in COUNTS {
        let error = with_threads(threads, || run(NonFinite::Error)).unwrap_err();
        let Error::Format(FormatError::NotFinite { tensor, first, infinite, nan, .. }) = error else {
            panic!("{error:?}")
        };
        assert_eq!(tensor, "a.weight");
        assert_eq!((first, infinite, nan), (Position { row: 300, col: 64 }, 64, 0));
        assert_eq!(paths(&scratch), before);
    }
    for (policy, large) in [(NonFinite::Propagate, f16::INFINITY), (NonFinite::Saturate, f16::MAX)] {
        let done = run(policy).unwrap();
        assert_eq!((done.report.infinite, done.report.nan), (64, 0));
        let values: Vec<f16> = bytemuck::pod_collect_to_vec(&tensors(&out)["a.weight"].2);
        let at = |row: usize, col: usize| values[row * 1024 + col];
        assert_eq!([at(300, 64), at(300, 95), at(ROWS - 1, 1023)], [large; 3]);
        assert_eq!([at(300, 63), at(300, 96), at(500, 0)], [0.0, 0.0, 49152.0].map(f16::from_f32));
        fs::remove_file(&out).unwrap();
    }
}

#[test]
fn an_output_that_exists_is_refused_and_kept() {
    let scratch = Scratch::new();
    let input = write_file(&scratch, "in.safetensors", &[Tensor::noise::<f32>("a.fc.weight", &[2, 32], 1)]);
    let (quantized, taken) = (scratch.path("quantized.safetensors"), scratch.path("taken.safetensors"));
    quantize(&request(Format::Mxfp4), &input, &quantized).unwrap();
    fs::write(&taken, "mine").unwrap();
    let (checkpoint, before) = (Checkpoint::open(&quantized).unwrap(), scratch.contents());
    let convert = Convert::new(CheckpointFormat::CompressedTensors);
    for result in [
        quantize(&request(Format::Mxfp4), &input, &taken).map(drop),
        Dequantize::default().run(&checkpoint, &taken, &Device::Cpu, going_on()).map(drop),
        convert.run(&checkpoint, &taken, &Device::Cpu, going_on()).map(drop),
    ] {
        let Err(Error::Output(OutputError::Exists { path })) = &result else { panic!("{result:?}") };
        assert_eq!(path, &taken);
        assert_eq!(scratch.contents(), before);
    }
    // The input itself is such an output. So is a directory with files in it.
    let result = quantize(&request(Format::Mxfp4), &input, &input);
    assert!(matches!(result, Err(Error::Output(OutputError::Overlap { .. }))), "{result:?}");
    let model = write_model(&scratch, "IN", &[("a.safetensors", vec![])]);
    scratch.write("OUT/mine", "mine");
    let result = quantize(&request(Format::Mxfp4), &model, &scratch.path("OUT"));
    assert!(matches!(result, Err(Error::Output(_) | Error::Plan(_))), "{result:?}");
    assert_eq!(files(&scratch.path("OUT")).len(), 1);
}

#[test]
fn an_input_that_is_replaced_after_opening_is_read_as_it_was() {
    let scratch = Scratch::new();
    // The copied tensors are large too: they may be copied from file to file.
    let of_seed = |seed| {
        [
            Tensor::noise::<f32>("model.embed_tokens.weight", &[ROWS, 1024], seed),
            Tensor::noise::<f32>("model.layers.0.fc.weight", &[ROWS, 1024], seed + 1),
            Tensor::noise::<f32>("model.norm.weight", &[1024], seed + 2),
        ]
    };
    let input = write_file(&scratch, "in.safetensors", &of_seed(1));
    let expected = scratch.path("expected.safetensors");
    let settings = Settings { format: Some(Format::Nvfp4), ..Settings::default() };
    let request = Quantize::new(settings);
    quantize(&request, &input, &expected).unwrap();
    let other = write_file(&scratch, "other.safetensors", &of_seed(10));
    let out = scratch.path("out.safetensors");
    with_plan(&request, &input, |plan| {
        fs::rename(&other, &input).unwrap();
        plan.run(&out, &Device::Cpu, going_on())
    })
    .unwrap();
    assert!(fs::read(&out).unwrap() == fs::read(&expected).unwrap());
}
