//! Compares 8-bit and 4-bit codes under scales with the values that libraries decode.

use std::ops::ControlFlow;

use microscale::{Device, Dtype, NonFinite};
use microscale_checkpoint::{Checkpoint, Dequantize, Difference, Logical, Values, compare, logical};
use microscale_test_support::Scratch;
use microscale_test_support::golden::{files, folder};

/// Suffix of values that a library made of a tensor.
const EXPECTED: &str = ".expected";

/// Calls a function for each file with its name.
fn each_file(mut what: impl FnMut(&str, Checkpoint)) {
    let files = files("scaled");
    assert!(!files.is_empty());
    for name in files {
        let path = folder("scaled").join(format!("{name}.safetensors"));
        let checkpoint = Checkpoint::open(&path).expect("a file that can be read");
        what(&name, checkpoint);
    }
}

/// Returns the number of tensors with a library's values.
fn expected_values(checkpoint: &Checkpoint) -> u64 {
    checkpoint.tensors().filter(|tensor| tensor.name.ends_with(EXPECTED)).count() as u64
}

#[test]
fn values_match_the_libraries() {
    each_file(|file, checkpoint| {
        let tensors = logical(&checkpoint).expect("codes and scales that fit");
        let mut compared = 0;
        for tensor in &tensors {
            let expected = format!("{}{EXPECTED}", tensor.name());
            let Some(expected) = checkpoint.tensor(&expected) else { continue };
            let values = match tensor {
                Logical::Plain(tensor) => {
                    let scaling =
                        tensor.scaling.unwrap_or_else(|| panic!("{file}: {} has no scales", tensor.name));
                    let is_scales = |other: &Logical<'_>| other.name() == scaling.name;
                    assert!(!tensors.iter().any(is_scales), "{file}: {}", scaling.name);
                    assert_eq!(tensor.values_dtype(), Some(Dtype::F32));
                    let Some(Values::F32(values)) = tensor.values() else { panic!("{file}: no values") };
                    values.into_owned()
                }
                Logical::Packed(packed) => packed.values(&Device::Cpu).expect("codes and scales that fit"),
            };
            // If scales are bf16, so are the library's values.
            let (values, expected) = match expected.values() {
                Some(Values::F32(expected)) => (values, expected.to_vec()),
                Some(Values::Bf16(expected)) => (
                    values.iter().map(|value| microscale::narrow(Dtype::Bf16, *value)).collect(),
                    expected.iter().map(|value| value.to_f32()).collect(),
                ),
                _ => panic!("{file}: {} has no values", expected.name),
            };
            assert_eq!(values.len(), expected.len());
            for (i, (value, expected)) in values.iter().zip(expected.iter()).enumerate() {
                let same = value.to_bits() == expected.to_bits() || value.is_nan() && expected.is_nan();
                assert!(same, "{file}: {}: {i}: {value} and not {expected}", tensor.name());
            }
            compared += 1;
        }
        let expected = expected_values(&checkpoint);
        assert!(compared == expected && compared > 0, "{file}: {compared} of {expected}");
    });
}

#[test]
fn dequantized_files_have_the_same_values() {
    each_file(|file, checkpoint| {
        let scratch = Scratch::new();
        let out = scratch.path("out.safetensors");
        let dequantize = Dequantize { dtype: Some(Dtype::F32), non_finite: NonFinite::Propagate };
        let done = dequantize.run(&checkpoint, &out, &Device::Cpu, &mut |_| ControlFlow::Continue(()));
        let expected = expected_values(&checkpoint);
        assert_eq!(done.map(|done| done.dequantized.tensors).expect("values"), expected, "{file}");
        let back = Checkpoint::open(&out).expect("a file of floats");
        let comparison =
            compare(&checkpoint, &back, &Device::Cpu, &mut |_| ControlFlow::Continue(())).expect("both");
        assert!(comparison.only_first.is_empty() && comparison.only_second.is_empty(), "{file}");
        for tensor in comparison.tensors {
            let Difference::Values(errors) = tensor.difference else { panic!("{file}: {}", tensor.name) };
            assert_eq!(errors.max_abs_error(), 0.0, "{file}: {}", tensor.name);
        }
    });
}
