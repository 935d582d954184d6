//! Plans: their jobs, reasons and warnings.

use std::fs;

use half::bf16;
use microscale::{Device, Format, Search};
use microscale_checkpoint::{
    Checkpoint, Error, FileProblem, PlanError, Quantize, Reason, Recipes, Role, Selection, Settings, Warning,
};
use microscale_test_support::Scratch;
use safetensors::SafeTensors;
use safetensors::tensor::Dtype;

use crate::input::{Tensor, write_file, write_model};
use crate::{going_on, paths, quantize, request, shards, with_plan};

/// A model with every common reason to copy a tensor, and FP8 weights with scales of their own.
fn write_input(scratch: &Scratch) -> std::path::PathBuf {
    let noise = |name: &str, shape: &[usize]| Tensor::noise::<bf16>(name, shape, 1);
    let codes = |name: &str| Tensor::of_bytes(name, Dtype::F8_E4M3, &[130, 128], &[0x38; 130 * 128]);
    let scales = |name: &str| Tensor::of(name, &[2, 1], &[0.5f32, 0.25]);
    let shards = [
        (
            "a.safetensors",
            vec![
                noise("model.embed_tokens.weight", &[32, 64]),
                noise("model.layers.0.self_attn.q_proj.weight", &[16, 64]),
                noise("model.layers.0.self_attn.q_proj.bias", &[16]),
                noise("model.layers.0.self_attn.o_proj.weight", &[16, 100]),
                codes("model.layers.0.mlp.up_proj.weight"),
            ],
        ),
        (
            "b.safetensors",
            vec![
                // The scales of codes in another shard.
                scales("model.layers.0.mlp.up_proj.weight_scale_inv"),
                codes("model.layers.1.mlp.up_proj.weight"),
                scales("model.layers.1.mlp.up_proj.weight_scale_inv"),
                noise("model.layers.1.mlp.down_proj.weight", &[16, 64]),
                noise("model.layers.1.table", &[16, 64]),
                Tensor::of_bytes("model.ids.weight", Dtype::I64, &[2, 32], &[0; 512]),
                noise("lm_head.weight", &[16, 64]),
            ],
        ),
    ];
    scratch.write(
        "IN/config.json",
        r#"{"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}"#,
    );
    write_model(scratch, "IN", &shards)
}

fn with_search() -> Settings {
    Settings { search: Some(Search::Window), ..Settings::default() }
}

#[test]
fn jobs_are_in_the_order_of_the_files_and_every_tensor_has_one() {
    let scratch = Scratch::new();
    let input = write_input(&scratch);
    let checkpoint = Checkpoint::open(&input).unwrap();
    let plan = request(Format::Mxfp4).plan(&checkpoint).unwrap();
    let mut expected = Vec::new();
    for (file, bytes) in shards(&input) {
        let (_, metadata) = SafeTensors::read_metadata(&bytes).unwrap();
        let names = metadata.offset_keys().into_iter().filter(|name| !name.ends_with("_scale_inv"));
        expected.extend(names.map(|name| (input.join(&file), name)));
    }
    let jobs: Vec<_> =
        plan.jobs.iter().map(|job| (job.tensor.file.to_path_buf(), job.tensor.name.to_owned())).collect();
    assert_eq!(jobs, expected);
    assert_eq!(jobs.len(), 10);
}

#[test]
fn copied_tensors_have_their_reasons() {
    let scratch = Scratch::new();
    let input = write_input(&scratch);
    let selection = Selection::new(&[""; 0], &["*.1.mlp.*"]).unwrap();
    let request = Quantize { recipes: Recipes::new(Settings::default(), selection), ..Quantize::default() };
    let checkpoint = request.open(&input).unwrap();
    let plan = request.plan(&checkpoint).unwrap();
    let reason = |name: &str| {
        let mut jobs = plan.jobs.iter().filter(|job| job.tensor.name == name);
        let (Some(job), None) = (jobs.next(), jobs.next()) else { panic!("{name} has not one job") };
        assert_eq!(job.plan.quantize().is_none(), job.plan.copied().is_some());
        job.plan.copied().cloned()
    };
    let excluded = || Reason::Excluded("*.1.mlp.*".into());
    for (name, expected) in [
        ("model.embed_tokens.weight", Some(Reason::Role(Role::Embedding))),
        ("model.layers.0.self_attn.q_proj.weight", None),
        ("model.layers.0.self_attn.q_proj.bias", Some(Reason::Dimensions(1))),
        ("model.layers.0.self_attn.o_proj.weight", Some(Reason::Columns { cols: 100, block: 32 })),
        ("model.layers.0.mlp.up_proj.weight", None),
        ("model.layers.1.mlp.up_proj.weight", Some(Reason::Dequantized(excluded().into()))),
        ("model.layers.1.mlp.down_proj.weight", Some(excluded())),
        ("model.layers.1.table", Some(Reason::NotAWeight)),
        ("lm_head.weight", Some(Reason::Role(Role::OutputHead))),
    ] {
        assert_eq!(reason(name), expected, "{name}");
    }
    let ids = reason("model.ids.weight");
    assert!(matches!(ids, Some(Reason::Dtype(_))), "{ids:?}");
    assert_eq!(plan.count_quantized(), 2);
}

#[test]
fn the_bytes_of_all_jobs_are_the_bytes_of_the_output() {
    let scratch = Scratch::new();
    let input = write_input(&scratch);
    for format in [Format::Mxfp4, Format::Nvfp4, Format::Mxfp8E4m3] {
        let (request, out) = (request(format), scratch.path(format!("{format:?}")));
        let planned: u64 = with_plan(&request, &input, |plan| {
            let jobs = plan.jobs.iter().map(|job| job.bytes_after());
            plan.run(&out, &Device::Cpu, going_on())?;
            Ok(jobs.sum())
        })
        .unwrap();
        let data =
            |bytes: &Vec<u8>| bytes.len() as u64 - 8 - u64::from_le_bytes(bytes[..8].try_into().unwrap());
        assert_eq!(planned, shards(&out).values().map(data).sum::<u64>(), "{format}");
    }
}

#[test]
fn warnings_are_values_that_name_files_and_tensors() {
    let scratch = Scratch::new();
    let input = write_input(&scratch);
    let vectors = ["model.layers.0.self_attn.q_proj.weight", "model.layers.9.fc.weight"];
    let vectors = vectors.map(|name| Tensor::of(format!("{name}.importance"), &[64], &[1.0f32; 64]));
    let file = write_file(&scratch, "importance.safetensors", &vectors);
    let selection = Selection::new(&["no.such.*"], &["*.up_proj.*"]).unwrap();
    let recipes = Recipes::new(with_search(), selection);
    let request = Quantize { recipes, importance: Some(file.clone()), ..Quantize::default() };
    let checkpoint = request.open(&input).unwrap();
    let warnings = request.plan(&checkpoint).unwrap().warnings;
    let recipe = warnings.iter().find(|warning| matches!(warning, Warning::Recipe(_))).unwrap();
    assert!(recipe.to_string().contains("no.such.*"), "{recipe}");
    for (problem, name) in [
        (FileProblem::Unused, "model.layers.9.fc.weight.importance"),
        (FileProblem::Unweighted { of: 2 }, "model.layers.1.mlp.down_proj.weight"),
    ] {
        let expected = Warning::File { file: file.clone(), names: vec![name.into()], problem };
        assert!(warnings.contains(&expected), "{expected:?} is not in {warnings:?}");
        let text = expected.to_string();
        assert!(text.contains(name) && text.contains(file.to_str().unwrap()), "{text}");
    }
}

#[test]
fn a_plan_without_anything_to_quantize_does_not_run() {
    let scratch = Scratch::new();
    let input = write_input(&scratch);
    let selection = Selection::new(&[""; 0], &["*"]).unwrap();
    let request = Quantize { recipes: Recipes::new(Settings::default(), selection), ..Quantize::default() };
    let before = paths(&scratch);
    let result = quantize(&request, &input, &scratch.path("OUT"));
    let Err(Error::Plan(PlanError::NothingToQuantize { path, .. })) = result else { panic!("{result:?}") };
    assert_eq!(fs::canonicalize(path).unwrap(), fs::canonicalize(&input).unwrap());
    assert_eq!(paths(&scratch), before);
}
