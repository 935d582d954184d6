//! Searches for scales: options, output, importance by column, and searched global scales.

use half::bf16;
use microscale::{
    ErrorStats, Format, Global, GlobalScale, Numerics, QuantizeOptions, QuantizedTensor, Recipe, Search,
    Shape, Words, search_global,
};
use microscale_test_support::{Scratch, TensorData, sample};
use safetensors::tensor::Dtype;
use serde_json::Value;

use super::{bf16s, floats, noise, quantizable, quantize, read_json, tensors};

const COLS: usize = 64;

/// Returns a weight of 8 rows. Seeds give different values.
fn weight(name: &'static str, seed: usize) -> TensorData {
    let values = noise(8 * COLS + seed).split_off(seed);
    (name, Dtype::F32, vec![8, COLS], floats(&values))
}

/// Returns the library's bytes and errors for a result of [`weight`].
fn of_library(seed: usize, recipe: &Recipe, importance: Option<&[f32]>) -> (QuantizedTensor, ErrorStats) {
    let values = noise(8 * COLS + seed).split_off(seed);
    let shape = Shape::new(8, COLS);
    let tensor = match importance {
        None => microscale::quantize(&values, shape, recipe),
        Some(importance) => {
            microscale::quantize_with(&values, shape, recipe, QuantizeOptions::new().importance(importance))
        }
    };
    let tensor = tensor.unwrap().tensor;
    let errors = ErrorStats::of_quantized(&values, shape, &tensor).unwrap();
    (tensor, errors)
}

/// MXFP4, and NVFP4 with numerics whose global scale is stored unchanged.
fn recipe(format: Format, search: Search) -> Recipe {
    let mut recipe = Recipe::of(format, Numerics::default_for(format)).unwrap();
    recipe.search = search;
    recipe
}

fn error_of(facts: &Value, name: &str) -> f64 {
    facts["loss"][name].as_f64().unwrap()
}

#[test]
fn every_word_says_what_it_found_in_the_table_and_in_json() {
    let scratch = Scratch::new();
    let facts_path = scratch.path("facts.json");
    for (format, blocks) in [("mxfp4", 17_280), ("nvfp4", 34_560)] {
        let mut errors = Vec::new();
        for (word, search) in Search::WORDS {
            let out = format!("{format}-{word}");
            let more = ["--format", format, "--search", word, "--json", facts_path.to_str().unwrap()];
            let text = quantize(&scratch, &sample(), &out, &more).ok();
            let facts = read_json(facts_path.clone());
            assert_eq!(facts["search"], *word);
            errors.push(error_of(&facts, "relative_squared_error"));
            if *search == Search::None {
                assert!(!text.contains("search") && !text.contains("candidates"), "{text}");
                let json = facts.to_string();
                assert!(!json.contains("plain") && !json.contains("tried_scales"), "{json}");
                assert!(!json.contains("rescaled_blocks"), "{json}");
                continue;
            }
            assert_eq!(error_of(&facts, "plain_relative_squared_error"), errors[0], "{format} {word}");
            let tried = facts["loss"]["tried_scales"].as_u64().unwrap();
            let changed = facts["loss"]["rescaled_blocks"].as_u64().unwrap();
            assert!(changed > 0 && changed < blocks && tried >= blocks, "{changed} {tried}");
            let average = format!("{:.1}", tried as f64 / blocks as f64);
            let rows: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
            let has = |row: &[&str]| assert!(rows.iter().any(|found| found == row), "{row:?} in {text}");
            let [before, after] = [errors[0], *errors.last().unwrap()]
                .map(|error| format!("{error:.*}", (3 - error.log10().floor() as i32) as usize));
            has(&["error", "before", &before, "relative", "squared", "error"]);
            has(&["error", "after", &after, "relative", "squared", "error"]);
            let grouped =
                |n: u64| if n < 1000 { n.to_string() } else { format!("{},{:03}", n / 1000, n % 1000) };
            has(&["blocks", "changed", &grouped(changed), "of", &grouped(blocks)]);
            has(&["candidates", "tried", "a", "block", &average]);
            assert!(text.contains(&format!(", scales searched: {word}\n")), "{text}");

            let quantized = facts["tensors"].as_array().unwrap().iter();
            let quantized: Vec<_> = quantized.filter(|tensor| tensor["copied"].is_null()).collect();
            let sum = |name| quantized.iter().map(|tensor| tensor["loss"][name].as_u64().unwrap()).sum();
            assert_eq!((sum("tried_scales"), sum("rescaled_blocks")), (tried, changed));
            for tensor in quantized {
                let plain = error_of(tensor, "plain_relative_squared_error");
                assert!(error_of(tensor, "relative_squared_error") <= plain, "{tensor}");
            }
        }
        // None, four-six, window, full. In MXFP4 the latter three have the same result.
        assert!(errors[0] > errors[1] && errors[1] >= errors[2] && errors[2] >= errors[3], "{errors:?}");
    }
}

#[test]
fn searched_bytes_equal_the_librarys() {
    let scratch = Scratch::new();
    let before = tensors(&sample());
    for (format, search) in [(Format::Mxfp4, Search::Full), (Format::Nvfp4, Search::FourSix)] {
        // A given global scale, so that layers share none.
        let global = Global::Given(GlobalScale::Divisor(1500.0));
        let recipe = recipe(format, search).with_global(global);
        let mut more = vec!["--format", format.word(), "--search", search.word(), "--device", "cpu"];
        if format == Format::Nvfp4 {
            more.extend(["--global-scale", "1500"]);
        }
        quantize(&scratch, &sample(), format.word(), &more).ok();
        let after = tensors(&scratch.path(format.word()));
        for (name, (_, shape, data, _)) in before.iter().filter(|(name, _)| quantizable(name)) {
            let values: Vec<bf16> = bf16s(data);
            let tensor =
                microscale::quantize(&values, Shape::new(shape[0], shape[1]), &recipe).unwrap().tensor;
            assert_eq!(after[&format!("{name}_packed")].2, tensor.codes(), "{name}");
            assert_eq!(after[&format!("{name}_scale")].2, tensor.scales(), "{name}");
        }
    }
}

#[test]
fn importance_weights_the_columns() {
    let scratch = Scratch::new();
    let names = ["a.weight", "b.weight", "c.weight", "d.weight"];
    let weights: Vec<_> = names.iter().enumerate().map(|(seed, name)| weight(name, seed)).collect();
    let input = scratch.write_tensors("x.safetensors", &weights);
    let importance: Vec<f32> = (0..COLS).map(|i| if i % 5 == 0 { 64.0 } else { (i % 3) as f32 }).collect();
    let narrow = importance.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect();
    let file = scratch.write_tensors(
        "importance.safetensors",
        &[
            ("a.weight.importance", Dtype::F32, vec![COLS], floats(&importance)),
            ("b.weight_importance", Dtype::BF16, vec![COLS], narrow),
            ("c.weight", Dtype::F32, vec![COLS], floats(&importance)),
            ("e.weight", Dtype::F32, vec![1], floats(&[-1.0])),
        ],
    );
    let (file, facts) = (file.to_str().unwrap(), scratch.path("facts.json"));
    for format in [Format::Mxfp4, Format::Nvfp4] {
        let more = ["--format", format.word(), "--search", "full", "--importance", file];
        let more = [&more[..], &["--json", facts.to_str().unwrap()]].concat();
        let run = quantize(&scratch, &input, format.word(), &more);
        let warnings = [
            "importance.safetensors: e.weight: no tensor to quantize is called so",
            "importance.safetensors: d.weight: 1 of 4 tensors to quantize have no importance and are searched unweighted",
        ];
        for warning in warnings {
            assert!(run.stderr.contains(warning), "{run:#?}");
        }
        let text = run.ok();
        assert!(text.contains(&format!(", errors weighted by importance from {file}\n")), "{text}");
        assert_eq!(read_json(facts.clone())["importance"], format!("from {file}"));
        let after = tensors(&scratch.path(format.word()));
        let recipe = recipe(format, Search::Full);
        for (seed, name) in names.iter().enumerate() {
            let (expected, _) = of_library(seed, &recipe, (seed < 3).then_some(&importance[..]));
            assert_eq!(after[&format!("{name}_scale")].2, expected.scales(), "{name}");
            assert_eq!(after[&format!("{name}_packed")].2, expected.codes(), "{name}");
            let (unweighted, _) = of_library(seed, &recipe, None);
            assert_eq!(seed < 3, unweighted.scales() != expected.scales(), "{name}");
        }
    }
}

#[test]
fn importance_that_does_not_fit_is_refused() {
    let scratch = Scratch::new();
    let input = scratch.write_tensors("x.safetensors", &[weight("a.weight", 0)]);
    let vector = |name, values: &[f32]| (name, Dtype::F32, vec![values.len()], floats(values));
    let mut negative = vec![1.0; COLS];
    negative[7] = -2.5;
    let mut infinite = vec![1.0; COLS];
    infinite[9] = f32::INFINITY;
    let ones = vec![1.0; COLS];
    let cases: [(Vec<TensorData>, &[&str]); 6] = [
        (
            vec![vector("a.weight.importance", &ones[1..])],
            &["tensor a.weight.importance", "64 numbers", "each column of a.weight", "F32 of shape [63]"],
        ),
        (vec![("a.weight", Dtype::F32, vec![1, COLS], floats(&ones))], &["tensor a.weight", "shape [1, 64]"]),
        (vec![("a.weight", Dtype::I8, vec![COLS], vec![1; COLS])], &["F32, F16 or BF16", "I8 of shape [64]"]),
        (
            vec![vector("a.weight_importance", &negative)],
            &["tensor a.weight_importance", "-2.5 for column 7 of a.weight", "finite and not negative"],
        ),
        (vec![vector("a.weight", &infinite)], &["inf for column 9 of a.weight"]),
        (
            vec![vector("a.weight.importance", &ones), vector("a.weight_importance", &ones)],
            &["two vectors of importance for tensor a.weight, a.weight.importance and a.weight_importance"],
        ),
    ];
    for (tensors, parts) in cases {
        let file = scratch.write_tensors("importance.safetensors", &tensors);
        let before = scratch.contents();
        let more = ["--search", "window", "--importance", file.to_str().unwrap()];
        quantize(&scratch, &input, "OUT", &more).fails_with(&[&["importance.safetensors"], parts].concat());
        assert_eq!(before, scratch.contents());
    }
    let nowhere = quantize(&scratch, &input, "OUT", &["--search", "full", "--importance", "nowhere"]);
    nowhere.fails_with(&["cannot take importance from nowhere", "cannot open"]);
}

#[test]
fn a_searched_global_scale_is_the_best_of_those_tried_and_shared_by_fused_layers() {
    let scratch = Scratch::new();
    let names = ["x.down_proj.weight", "x.gate_proj.weight", "x.up_proj.weight"];
    let weights: Vec<_> = names.iter().enumerate().map(|(seed, name)| weight(name, seed)).collect();
    let input = scratch.write_tensors("x.safetensors", &weights);
    let facts = scratch.path("facts.json");
    let more = ["--format", "nvfp4", "--numerics", "transformer-engine", "--search", "full"];
    let more = [&more[..], &["--search-global", "--json", facts.to_str().unwrap()]].concat();
    let text = quantize(&scratch, &input, "OUT", &more).ok();
    let facts = read_json(facts);
    let tried = "2688, 2304, 2048, 1792, 1536";
    assert!(text.contains(&format!(", global scale searched: amax to {tried}\n")), "{text}");
    assert_eq!(facts["search_global"], tried);

    let arithmetic = Numerics::TransformerEngine.nvfp4().unwrap();
    let mut recipe = Recipe::of(Format::Nvfp4, Numerics::TransformerEngine).unwrap();
    recipe.search = Search::Full;
    let mut changed = 0;
    for group in [&[0usize][..], &[1, 2]] {
        let values = group.iter().flat_map(|seed| noise(8 * COLS + seed).split_off(*seed));
        let amax = values.fold(0.0f32, |most, x| most.max(x.abs()));
        let errors_under = |scale| {
            let recipe = recipe.with_global(Global::Given(scale));
            let mut errors = ErrorStats::default();
            for seed in group {
                errors += of_library(*seed, &recipe, None).1;
            }
            errors.relative_squared_error()
        };
        let scales = search_global::global_scales(&arithmetic, amax, |x| x);
        assert_eq!(scales.len(), search_global::TRIED.len());
        let mut best = scales[0];
        for scale in scales.iter() {
            if errors_under(*scale) < errors_under(best) {
                best = *scale;
            }
        }
        changed += if best == scales[0] { 0 } else { group.len() };
        let after = tensors(&scratch.path("OUT"));
        for seed in group {
            let name = names[*seed];
            assert_eq!(after[&format!("{name}_global_scale")].2, best.value().to_le_bytes(), "{name}");
            let (expected, _) = of_library(*seed, &recipe.with_global(Global::Given(best)), None);
            assert_eq!(after[&format!("{name}_packed")].2, expected.codes(), "{name}");
        }
    }
    let row = format!("{changed} of 3");
    let line = text.lines().find(|line| line.starts_with("global scales changed")).unwrap();
    assert!(changed > 0 && line.ends_with(&row), "{line} {changed}");
}

#[test]
fn searching_global_scales_lowers_the_error_of_the_sample() {
    let scratch = Scratch::new();
    let facts = scratch.path("facts.json");
    for numerics in ["compressed-tensors", "torchao", "modelopt", "transformer-engine"] {
        let errors = [&[][..], &["--search-global"]].map(|global: &[&str]| {
            let more = ["--format", "nvfp4", "--numerics", numerics, "--search", "full"];
            let more = [&more[..], global, &["--json", facts.to_str().unwrap()]].concat();
            quantize(&scratch, &sample(), &format!("{numerics}{}", global.len()), &more).ok();
            let facts = read_json(facts.clone());
            let plain = error_of(&facts, "plain_relative_squared_error");
            (error_of(&facts, "relative_squared_error"), plain)
        });
        assert!(errors[1].0 < errors[0].0, "{numerics} {errors:?}");
        // Plain scales use the library's own global scale.
        assert_eq!(errors[0].1, errors[1].1, "{numerics}");
    }
}

#[test]
fn a_search_can_be_checked() {
    let scratch = Scratch::new();
    let facts = scratch.path("facts.json");
    for (format, blocks) in [("mxfp4", "17,280"), ("nvfp4", "34,560")] {
        let more = ["--format", format, "--search", "full", "--check-search"];
        let more = [&more[..], &["--json", facts.to_str().unwrap()]].concat();
        let text = quantize(&scratch, &sample(), format, &more).ok();
        let line = text.lines().find(|line| line.starts_with("scales that no other beats")).unwrap();
        assert!(line.ends_with(&format!("{blocks} of {blocks}")), "{line}");
        assert_eq!(read_json(facts.clone())["checked_blocks"].to_string(), blocks.replace(',', ""));
    }
}

#[test]
fn options_that_do_not_go_together() {
    let scratch = Scratch::new();
    let input = scratch.write_tensors("x.safetensors", &[weight("a.weight", 0)]);
    let scale = ("a.weight", Dtype::F32, vec![1], floats(&[1.0]));
    let scales = scratch.write_tensors("scales.safetensors", &[scale]);
    let scales = scales.to_str().unwrap();
    let before = scratch.contents();
    let cases: [(&[&str], &[&str]); 9] = [
        (&["--format", "mxfp8-e4m3", "--search", "full"], &["mxfp8-e4m3 cannot be searched"]),
        (&["--importance", scales], &["importance weights the errors of a search", "--search four-six"]),
        (&["--check-search", "--search", "window"], &["this is window", "choose --search full"]),
        (&["--search-global"], &["the format is mxfp4", "--format nvfp4"]),
        (&["--search-global", "--search", "full"], &["the format is mxfp4"]),
        (&["--search-global", "--format", "nvfp4"], &["block scales are not searched", "--search four-six"]),
        (
            &["--search-global", "--format", "nvfp4", "--search", "full", "--global-scale", "none"],
            &["there is none (--global-scale none)"],
        ),
        (
            &["--search-global", "--format", "nvfp4", "--search", "full", "--global-scale", "3"],
            &["it is given (--global-scale)", "leave out --search-global"],
        ),
        (
            &["--search-global", "--format", "nvfp4", "--search", "full", "--global-scale", scales],
            &["it is given (--global-scale)"],
        ),
    ];
    for (more, parts) in cases {
        let run = quantize(&scratch, &input, "OUT", more);
        assert_eq!(run.code, Some(2), "{run:#?}");
        for part in [parts, &["--help"]].concat() {
            assert!(run.stderr.contains(part), "{part} in {run:#?}");
        }
    }
    assert_eq!(before, scratch.contents());
}
