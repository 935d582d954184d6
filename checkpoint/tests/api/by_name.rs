//! One quantized tensor by the name that the model knows.

use half::bf16;
use microscale::{Device, Format};
use microscale_checkpoint::{Checkpoint, CheckpointFormat, Convert, Error, FormatError, Logical, logical};
use microscale_test_support::Scratch;

use crate::input::{Tensor, write_model};
use crate::{going_on, quantize, request};

const WEIGHT: &str = "model.layers.0.mlp.down_proj.weight";
const NORM: &str = "model.norm.weight";

/// Writes checkpoints of one model in several checkpoint formats and formats.
fn checkpoints(scratch: &Scratch) -> Vec<Checkpoint> {
    let weight = Tensor::noise::<bf16>(WEIGHT, &[96, 64], 1);
    let other = Tensor::noise::<bf16>("model.layers.1.mlp.down_proj.weight", &[96, 64], 2);
    let norm = Tensor::noise::<bf16>(NORM, &[64], 3);
    scratch.write("IN/config.json", r#"{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}"#);
    let input =
        write_model(scratch, "IN", &[("a.safetensors", vec![weight, norm]), ("b.safetensors", vec![other])]);
    let mut outputs = Vec::new();
    for format in [Format::Mxfp4, Format::Nvfp4, Format::Mxfp8E4m3] {
        let out = scratch.path(format.to_string());
        quantize(&request(format), &input, &out).unwrap();
        outputs.push(out);
    }
    let modelopt = scratch.path("modelopt");
    let nvfp4 = Checkpoint::open(&outputs[1]).unwrap();
    Convert::new(CheckpointFormat::Modelopt).run(&nvfp4, &modelopt, &Device::Cpu, going_on()).unwrap();
    outputs.push(modelopt);
    outputs.iter().map(|path| Checkpoint::open(path).unwrap()).collect()
}

#[test]
fn quantized_finds_the_tensors_that_logical_lists() {
    let scratch = Scratch::new();
    for checkpoint in checkpoints(&scratch) {
        let mut found = 0;
        for tensor in logical(&checkpoint).unwrap() {
            let Logical::Packed(packed) = tensor else { continue };
            let by_name = checkpoint.quantized(packed.name).unwrap();
            assert_eq!(
                (by_name.name, by_name.format, &by_name.shape),
                (packed.name, packed.format, &packed.shape)
            );
            assert_eq!(by_name.checkpoint_format(), packed.checkpoint_format());
            assert!(by_name.read().unwrap() == packed.read().unwrap(), "{}", packed.name);
            found += 1;
        }
        assert_eq!(found, 2);
    }
}

#[test]
fn quantized_names_what_is_wrong() {
    let scratch = Scratch::new();
    let checkpoints = checkpoints(&scratch);
    for checkpoint in &checkpoints {
        let error = |name| checkpoint.quantized(name).expect_err(name);
        let norm = error(NORM);
        assert!(matches!(norm, Error::Format(FormatError::NotQuantized { .. })), "{norm}");
        assert!(norm.to_string().contains("but is BF16 of shape [64]"), "{norm}");
        assert!(error("nothing").to_string().contains("`logical` and `microscale inspect` list the names"));
        let short = error("layers.0.mlp.down_proj.weight").to_string();
        assert!(short.ends_with(&format!("did you mean {WEIGHT}?")), "{short}");
        let scales = error(&format!("{WEIGHT}_scale"));
        assert!(
            scales.to_string().ends_with(&format!("is a part of tensor {WEIGHT}; pass {WEIGHT}")),
            "{scales}"
        );
        assert_eq!(scales.place().1, Some(&*format!("{WEIGHT}_scale")));
    }
    let codes = checkpoints[0].quantized(&format!("{WEIGHT}_packed")).expect_err("codes");
    assert!(matches!(codes, Error::Format(FormatError::PartOf { .. })), "{codes}");
}

/// A `main` that returns an error prints its `Debug` form.
#[test]
fn debug_prints_the_message_and_its_cause() {
    let error = Checkpoint::open("no such folder".as_ref()).expect_err("there is none");
    let cause = std::error::Error::source(&error).expect("the system's error");
    assert_eq!(format!("{error:?}"), format!("{error}: {cause}"));
    assert!(error.to_string().contains("no such folder"), "{error}");
}
