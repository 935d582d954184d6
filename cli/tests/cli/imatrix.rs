//! Importance matrices of llama.cpp: one per expert, with errors or warnings on mismatches.

use microscale::{Format, Numerics, QuantizeOptions, Recipe, Search, Shape, quantize_with};
use microscale_test_support::{Scratch, sample};

use super::gguf::{F32, Stored, blocks, entry, file, parse, text};
use super::{floats, noise, quantize};

const COLS: usize = 64;
const ROWS: usize = 4;
const EXPERTS: usize = 3;
const LAYER: &str = "blk.0.attn_q.weight";
const OF_EXPERTS: &str = "blk.0.ffn_up_exps.weight";

/// Writes a model of one layer and the experts of one layer.
fn model(scratch: &Scratch) -> std::path::PathBuf {
    let mut architecture = Vec::new();
    text(&mut architecture, "llama");
    let tensor = |name: &str, shape: &[u64], data| (name.to_string(), shape.to_vec(), F32, data);
    let experts = noise(EXPERTS * ROWS * COLS + 5).split_off(5);
    let tensors = [
        tensor(LAYER, &[ROWS as u64, COLS as u64], floats(&noise(ROWS * COLS))),
        tensor(OF_EXPERTS, &[EXPERTS as u64, ROWS as u64, COLS as u64], floats(&experts)),
    ];
    scratch.write("in.gguf", file(&[entry("general.architecture", 8, &architecture)], &tensors))
}

/// Returns the importance of a column of an expert.
fn weight(expert: usize, column: usize) -> f32 {
    ((column * (expert + 3)) % 11) as f32 * 0.75
}

/// Returns sums and counts of a weight.
fn entries(name: &str, counts: &[f32], columns: usize) -> [Stored; 2] {
    let sums = counts.iter().enumerate();
    let sums: Vec<f32> = sums
        .flat_map(|(expert, count)| (0..columns).map(move |column| weight(expert, column) * count))
        .collect();
    let shape = |columns: usize| vec![counts.len() as u64, columns as u64];
    [
        (format!("{name}.in_sum2"), shape(columns), F32, floats(&sums)),
        (format!("{name}.counts"), shape(1), F32, floats(counts)),
    ]
}

fn imatrix(scratch: &Scratch, tensors: &[Stored]) -> std::path::PathBuf {
    let mut kind = Vec::new();
    text(&mut kind, "imatrix");
    scratch.write("imatrix.gguf", file(&[entry("general.type", 8, &kind)], tensors))
}

/// Returns a file in the format before GGUF, of one chunk.
fn older(scratch: &Scratch, tensors: &[(&str, Vec<f32>)]) -> std::path::PathBuf {
    let mut bytes = (tensors.len() as i32).to_le_bytes().to_vec();
    for (name, numbers) in tensors {
        bytes.extend((name.len() as i32).to_le_bytes());
        bytes.extend(name.as_bytes());
        bytes.extend(1i32.to_le_bytes());
        bytes.extend((numbers.len() as i32).to_le_bytes());
        bytes.extend(floats(numbers));
    }
    scratch.write("imatrix.dat", bytes)
}

/// Returns the blocks that the library computes for some rows.
fn of_library(values: &[f32], importance: Option<&[f32]>) -> Vec<u8> {
    let mut recipe = Recipe::of(Format::Mxfp4, Numerics::Ocp).unwrap();
    recipe.search = Search::Full;
    let options =
        importance.map_or(QuantizeOptions::new(), |columns| QuantizeOptions::new().importance(columns));
    let made = quantize_with(values, Shape::new(ROWS, COLS), &recipe, options).unwrap().tensor;
    blocks(made.codes(), made.scales(), 39)
}

#[test]
fn each_expert_is_searched_by_the_activations_it_met() {
    let scratch = Scratch::new();
    let input = model(&scratch);
    // The second expert received no token.
    let counts = [3.0, 0.0, 8.0];
    let new = [
        entries(LAYER, &[2.0], COLS),
        entries(OF_EXPERTS, &counts, COLS),
        entries("blk.9.x.weight", &[1.0], 7),
    ];
    let columns = |expert: usize| (0..COLS).map(|column| weight(expert, column)).collect::<Vec<_>>();
    let all = [columns(0), vec![1.0; COLS], columns(2)];
    let old = [(LAYER, columns(0)), (OF_EXPERTS, all.concat())];
    for (given, warnings) in [
        (
            imatrix(&scratch, new.as_flattened()),
            &[
                "imatrix.gguf: blk.9.x.weight: no tensor to quantize is called so",
                "imatrix.gguf: blk.0.ffn_up_exps.weight: no token has come to some of the experts",
            ][..],
        ),
        (older(&scratch, &old), &[]),
    ] {
        let out = format!("{}.out", given.file_name().unwrap().display());
        let given = given.to_str().unwrap();
        let run =
            quantize(&scratch, &input, &out, &["--search", "full", "--importance", given, "--check-search"]);
        let (told, text) = (run.stderr.clone(), run.ok());
        assert!(text.contains(&format!("errors weighted by importance from {given}")), "{text}");
        assert!(warnings.iter().all(|warning| told.contains(warning)), "{told}");
        assert_eq!(told.matches("warning").count(), warnings.len(), "{told}");

        let (_, tensors) = parse(&std::fs::read(scratch.path(&out)).unwrap());
        let experts = noise(EXPERTS * ROWS * COLS + 5).split_off(5);
        let expected: Vec<u8> = experts
            .chunks(ROWS * COLS)
            .zip(&all)
            .flat_map(|(values, columns)| of_library(values, Some(columns)))
            .collect();
        assert!(tensors[0].3 == of_library(&noise(ROWS * COLS), Some(&columns(0))));
        assert!(tensors[1].3 == expected, "{out}");
        let unweighted: Vec<u8> =
            experts.chunks(ROWS * COLS).flat_map(|values| of_library(values, None)).collect();
        assert_ne!(tensors[1].3, unweighted, "importance matters here");
    }
}

#[test]
fn matrices_that_do_not_fit_are_refused() {
    let scratch = Scratch::new();
    let input = model(&scratch);
    let refused = |given: &std::path::Path, parts: &[&str]| {
        let more = ["--search", "full", "--importance", given.to_str().unwrap()];
        quantize(&scratch, &input, "OUT", &more).fails_with(parts);
    };
    let made = |tensors: &[Stored]| imatrix(&scratch, tensors);
    let [sums, counts] = entries(LAYER, &[2.0], COLS);
    refused(
        &made(std::slice::from_ref(&sums)),
        &["imatrix.gguf: tensor blk.0.attn_q.weight has sums and no counts"],
    );
    refused(
        &made(&entries(LAYER, &[2.0], 63)),
        &["has 63 numbers of F32, and must have 64 of F32;", "the same model"],
    );
    refused(
        &made(&entries(OF_EXPERTS, &[2.0, 1.0], COLS)),
        &["blk.0.ffn_up_exps.weight has 128 numbers of F32, and must have 64 of F32 in each of 3 experts"],
    );
    let two = (counts.0.clone(), vec![2, 1], F32, floats(&[1.0, 1.0]));
    refused(&made(&[sums.clone(), two]), &["has 2 counts, and must have 1"]);
    let negative = (counts.0.clone(), vec![1, 1], F32, floats(&[-1.0]));
    refused(&made(&[sums, negative]), &["has a count of -1"]);
    let (name, shape, kind, mut data) = entries(LAYER, &[2.0], COLS)[0].clone();
    data[8..12].copy_from_slice(&f32::NAN.to_le_bytes());
    refused(
        &made(&[(name, shape, kind, data), counts]),
        &["the number NaN for column 2 of blk.0.attn_q.weight"],
    );
    refused(
        &made(&entries("model.layers.0.mlp.up_proj.weight", &[2.0], COLS)),
        &["imatrix.gguf is for none of the tensors", "it has model.layers.0.mlp.up_proj.weight", LAYER],
    );
    refused(&older(&scratch, &[(LAYER, vec![1.0; 5])]), &["imatrix.dat: tensor", "has 5 numbers"]);
    refused(&scratch.write("x.dat", b"nonsense"), &["x.dat is not a valid importance matrix of llama.cpp's"]);
    // safetensors files have other names.
    let given = made(&entries(LAYER, &[2.0], COLS));
    let more = ["--search", "full", "--importance", given.to_str().unwrap()];
    quantize(&scratch, &sample(), "OUT", &more).fails_with(&["is for none of the tensors", "quantize that"]);
}
