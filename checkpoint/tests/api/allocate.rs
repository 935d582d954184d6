//! Allocations: their losses and bytes are what quantizing by their recipes gives, and no simpler
//! recipe of the same size loses less.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use half::bf16;
use microscale::{Device, Format, QuantizeOptions, Search, Words, dequantize, quantize_with};
use microscale_checkpoint::{
    Allocate, Allocation, Budget, CheckpointFormat, Choice, Error, Outcome, PlanError, Quantize, Recipes,
    Result, Selection, Summary,
};
use microscale_test_support::Scratch;

use crate::going_on;
use crate::input::{Tensor, noise, write_file, write_model};
use crate::quantize::{amax, global_scale, matrix, recipe};

/// The samples of a checkout.
fn samples() -> [PathBuf; 2] {
    let sample = microscale_test_support::sample();
    [sample.clone(), sample.with_file_name("tiny-story")]
}

fn allocate(request: &Allocate, input: &Path) -> Result<Allocation> {
    let checkpoint = request.open(input)?;
    request.run(&checkpoint, &Device::Cpu, going_on())
}

/// Quantizes by the recipe of an allocation.
fn by_recipe(allocation: &Allocation, input: &Path, out: &Path) -> Summary {
    let text = allocation.recipe("a test");
    let recipes = Recipes::parse(&text, "plan.toml").unwrap_or_else(|why| panic!("{why}\n{text}"));
    let importance = allocation.importance.clone().filter(|_| allocation.search != Search::None);
    let request = Quantize { recipes, importance, ..Quantize::default() };
    crate::quantize(&request, input, out).unwrap_or_else(|why| panic!("{why}\n{text}"))
}

/// Checks that quantizing by the recipe gives the formats, the bytes and the losses of an
/// allocation.
fn check_round_trip(allocation: &Allocation, input: &Path) {
    let scratch = Scratch::new();
    let summary = by_recipe(allocation, input, &scratch.path("OUT"));
    let outcomes: BTreeMap<_, _> = summary.tensors.iter().map(|tensor| (&tensor.name, tensor)).collect();
    let mut bytes = 0;
    for tensor in &allocation.tensors {
        let (found, point) = (outcomes[&tensor.name], tensor.points[tensor.choice]);
        assert_eq!(found.bytes_after, point.bytes, "{}", tensor.name);
        bytes += point.bytes;
        match &found.outcome {
            Outcome::Copied(_) => {
                assert_eq!((allocation.format_of(tensor), point.loss), (None, 0.0), "{}", tensor.name);
            }
            Outcome::Quantized { format, errors, .. } => {
                assert_eq!(allocation.format_of(tensor), Some(*format), "{}", tensor.name);
                if allocation.importance.is_none() {
                    let loss = errors.relative_squared_error() * tensor.elements as f64;
                    assert_eq!(point.loss, loss, "{}", tensor.name);
                }
            }
        }
    }
    assert_eq!(bytes, allocation.chosen.bytes);
    let all: u64 = summary.tensors.iter().map(|tensor| tensor.bytes_after).sum();
    assert_eq!(all, allocation.chosen.bytes + allocation.others);
}

#[test]
fn recipes_quantize_the_samples_as_allocated() {
    for sample in samples() {
        for (bits, search) in
            [(4.5, Search::None), (5.0, Search::FourSix), (6.0, Search::None), (9.0, Search::Full)]
        {
            let request = Allocate { search, ..Allocate::new(Budget::Bits(bits)) };
            let allocation = allocate(&request, &sample).unwrap();
            assert!(allocation.bits(allocation.chosen.bytes) <= bits && allocation.is_optimal());
            check_round_trip(&allocation, &sample);
        }
    }
}

#[test]
fn no_simpler_recipe_of_the_same_size_loses_less() {
    for sample in samples() {
        let mut before = f64::INFINITY;
        for bits in [4.5, 4.51, 5.0, 6.0, 8.25, 10.3, 12.2, 13.5, 16.0] {
            let allocation = allocate(&Allocate::new(Budget::Bits(bits)), &sample).unwrap();
            let chosen = allocation.chosen;
            assert!(allocation.relaxed <= allocation.bound && allocation.bound <= chosen.loss);
            assert!(chosen.loss <= before, "{bits} bits lose more than fewer bits");
            before = chosen.loss;
            let others =
                allocation.alternatives.iter().filter(|other| other.point.bytes <= allocation.budget);
            for other in others {
                assert!(chosen.loss <= other.point.loss, "{bits} bits: {} is better", other.name());
            }
        }
        assert_eq!(before, 0.0, "16 bits lose nothing");
    }
    // Each format with and without its ends.
    let allocation = allocate(&Allocate::new(Budget::Bits(5.0)), &samples()[0]).unwrap();
    let names: Vec<_> = allocation.alternatives.iter().map(|other| other.name()).collect();
    let formats =
        ["mxfp8-e4m3", "nvfp4", "mxfp4"].map(|format| [format.into(), format!("{format}-keep-ends")]);
    assert_eq!(names, formats.as_flattened());
    // The built-in recipe has the same bytes.
    let scratch = Scratch::new();
    for other in allocation.alternatives.iter().filter(|other| other.format != Format::Mxfp8E4m3) {
        let recipes = Recipes::named(&other.name()).unwrap();
        let request = Quantize { recipes, ..Quantize::default() };
        let summary = crate::quantize(&request, &samples()[0], &scratch.path(other.name())).unwrap();
        let of_summary: u64 = summary.tensors.iter().map(|tensor| tensor.bytes_after).sum();
        assert_eq!(of_summary, other.point.bytes + allocation.others, "{}", other.name());
    }
}

/// Two layers: fused parts, experts, tensors that only NVFP4 can hold, and others.
fn mixture(scratch: &Scratch) -> PathBuf {
    let of_layer = |layer: u64| {
        let name = |part: &str| format!("model.layers.{layer}.{part}.weight");
        let attention =
            ["q_proj", "k_proj", "v_proj", "o_proj"].map(|part| name(&format!("self_attn.{part}")));
        let experts = (0..3).flat_map(|expert| {
            ["gate_proj", "up_proj", "down_proj"].map(|part| format!("mlp.experts.{expert}.{part}"))
        });
        let experts: Vec<_> = experts.map(|part| name(&part)).collect();
        let names = attention.into_iter().chain(experts).enumerate();
        let mut tensors: Vec<_> =
            names.map(|(i, name)| Tensor::noise::<bf16>(name, &[16, 64], layer * 100 + i as u64)).collect();
        tensors.push(Tensor::noise::<bf16>(name("mlp.shared_expert.down_proj"), &[8, 48], layer + 7));
        tensors.push(Tensor::noise::<bf16>(name("mlp.gate"), &[3, 64], layer));
        tensors.push(Tensor::noise::<bf16>(name("input_layernorm"), &[64], layer));
        tensors
    };
    let shards = [("a.safetensors", of_layer(0)), ("b.safetensors", of_layer(1))];
    write_model(scratch, "MIXTURE", &shards)
}

#[test]
fn fused_parts_and_experts_of_a_layer_get_one_format() {
    let scratch = Scratch::new();
    let input = mixture(&scratch);
    let mut seen = BTreeMap::new();
    for bits in [4.4, 4.6, 5.0, 5.5, 6.0, 7.0, 8.0, 9.0, 12.0, 15.9] {
        let allocation = allocate(&Allocate::new(Budget::Bits(bits)), &input).unwrap();
        check_round_trip(&allocation, &input);
        let mut formats = BTreeMap::new();
        for tensor in &allocation.tensors {
            let (layer, part) = tensor.name["model.layers.".len()..].split_once('.').unwrap();
            let part = match part {
                _ if part.contains(".experts.") => "experts",
                _ if part.contains("self_attn") && !part.contains("o_proj") => "qkv",
                part => part,
            };
            let format = allocation.format_of(tensor);
            assert_eq!(*formats.entry((layer, part)).or_insert(format), format, "{}", tensor.name);
            *seen.entry(format.map_or("unquantized", Words::word)).or_insert(0) += 1;
        }
        assert_eq!((formats.len(), allocation.tensors.len()), (8, 28));
    }
    assert_eq!(seen.len(), 4, "{seen:?}");
    // MXFP4 and MXFP8 cannot hold rows of 48: as these, such tensors stay unquantized.
    let only = Allocate { choices: vec![Choice::Format(Format::Mxfp4)], ..Allocate::new(Budget::Bits(4.25)) };
    let allocation = allocate(&only, &input).unwrap();
    assert_eq!(allocation.tensors.len(), 26);
    check_round_trip(&allocation, &input);
    let both = [Format::Nvfp4, Format::Mxfp4].map(Choice::Format).to_vec();
    let allocation =
        allocate(&Allocate { choices: both, ..Allocate::new(Budget::Bits(16.0)) }, &input).unwrap();
    assert!(allocation.tensors.iter().all(|tensor| allocation.choices.len() == tensor.points.len()));
    check_round_trip(&allocation, &input);
}

#[test]
fn selections_and_checkpoint_formats_are_in_the_recipe() {
    let sample = &samples()[0];
    let request = Allocate {
        selection: Selection::new(&["lm_head.weight"], &["*.layers.1.*"]).unwrap(),
        format: Some(CheckpointFormat::Modelopt),
        ..Allocate::new(Budget::Bits(7.0))
    };
    let allocation = allocate(&request, sample).unwrap();
    let names: Vec<_> = allocation.tensors.iter().map(|tensor| tensor.name.as_str()).collect();
    assert!(names.contains(&"lm_head.weight") && !names.iter().any(|name| name.contains(".layers.1.")));
    assert_eq!(allocation.choices, [Choice::Unquantized, Choice::Format(Format::Nvfp4)]);
    let held = [CheckpointFormat::CompressedTensors, CheckpointFormat::Modelopt, CheckpointFormat::Comfyui];
    assert_eq!(allocation.held_by, held);
    check_round_trip(&allocation, sample);
}

#[test]
fn sizes_count_all_tensors() {
    let sample = &samples()[0];
    let bits = allocate(&Allocate::new(Budget::Bits(5.0)), sample).unwrap();
    let size = bits.chosen.bytes + bits.others;
    let exact = allocate(&Allocate::new(Budget::Bytes(size)), sample).unwrap();
    assert_eq!((exact.chosen, exact.budget), (bits.chosen, bits.chosen.bytes));
    let refused = |budget| match allocate(&Allocate::new(budget), sample).unwrap_err() {
        Error::Plan(PlanError::Budget { least, .. }) => least,
        other => panic!("{other}"),
    };
    assert_eq!(refused(Budget::Bits(4.2)), "4.25 bits per weight");
    let least = refused(Budget::Bytes(bits.others - 1));
    assert_eq!(least, refused(Budget::Bytes(0)));
    let least: u64 = least.strip_suffix(" bytes").unwrap().parse().unwrap();
    assert!(allocate(&Allocate::new(Budget::Bytes(least)), sample).is_ok());
    refused(Budget::Bytes(least - 1));
    let none = Allocate { choices: vec![Choice::Unquantized], ..Allocate::new(Budget::Bits(5.0)) };
    assert!(matches!(allocate(&none, sample), Err(Error::Plan(PlanError::NoFormat))));
}

/// The weighted squared error of a tensor, in one sum.
fn weighted(values: &[bf16], back: &[f32], weight: impl Fn(usize) -> f32) -> f64 {
    let square = |(i, (value, back)): (usize, (&bf16, &f32))| {
        f64::from(weight(i)) * (f64::from(value.to_f32()) - f64::from(*back)).powi(2)
    };
    values.iter().zip(back).enumerate().map(square).sum()
}

#[test]
fn importance_weights_the_loss_by_column() {
    let scratch = Scratch::new();
    // Several bands.
    let (rows, cols) = (1000, 1056);
    let of = |seed| noise::<bf16>(rows * cols, seed);
    let (a, b) = (of(1), of(2));
    let importance: Vec<f32> = (0..cols).map(|col| (col % 7) as f32 * 0.25).collect();
    let shape = [rows, cols];
    let tensors = [Tensor::of("a.weight", &shape, &a), Tensor::of("b.weight", &shape, &b)];
    let input = write_file(&scratch, "in.safetensors", &tensors);
    let file =
        write_file(&scratch, "i.safetensors", &[Tensor::of("a.weight.importance", &[cols], &importance)]);
    for search in [Search::None, Search::FourSix] {
        let request = Allocate { search, importance: Some(file.clone()), ..Allocate::new(Budget::Bits(6.5)) };
        let allocation = allocate(&request, &input).unwrap();
        // Tensors without importance weigh as much as the others on average.
        let mean = importance.iter().sum::<f32>() / cols as f32;
        let weights: [&dyn Fn(usize) -> f32; 2] = [&|i| importance[i % cols], &|_| mean];
        let mut signal = 0.0;
        for ((tensor, values), weight) in allocation.tensors.iter().zip([&a, &b]).zip(weights) {
            signal += weighted(values, &vec![0.0; values.len()], weight);
            for (choice, point) in allocation.choices.iter().zip(&tensor.points) {
                let Some(format) = choice.format() else { continue };
                let searches = search != Search::None && format.is_searched();
                let amax = amax(values);
                let mut recipe = recipe(format, global_scale::<bf16>(amax));
                recipe.search = if searches { search } else { Search::None };
                let options = QuantizeOptions::new();
                let given = searches && tensor.name == "a.weight";
                let options = if given { options.importance(&importance) } else { options };
                let quantized = quantize_with(values, matrix(&shape), &recipe, options).unwrap().tensor;
                let back: Vec<f32> = dequantize(&quantized);
                let expected = weighted(values, &back, weight);
                assert!(
                    (point.loss - expected).abs() <= 1e-9 * expected,
                    "{} {choice}: {} {expected}",
                    tensor.name,
                    point.loss
                );
            }
        }
        assert!((allocation.signal - signal).abs() <= 1e-9 * signal);
        assert_eq!(allocation.warnings.len(), 1, "{:?}", allocation.warnings);
        check_round_trip(&allocation, &input);
    }
}

#[test]
fn plans_do_not_depend_on_threads_or_order() {
    let sample = &samples()[1];
    let json = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let allocation = pool.install(|| allocate(&Allocate::new(Budget::Bits(5.3)), sample).unwrap());
        allocation.to_json().to_string()
    };
    assert_eq!(json(1), json(3));
}
