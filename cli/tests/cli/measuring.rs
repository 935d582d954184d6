//! The output and the files of `bench`.

use approx::assert_relative_eq;
use microscale_test_support::{Arg, Scratch, run};

use super::read_json;

#[test]
fn bench_measures_against_a_copy_and_writes_it_down() {
    let scratch = Scratch::new();
    let json = scratch.path("bench.json");
    let bench: [Arg<'_>; 9] =
        [&"bench", &"--op", &"quantize", &"--device", &"cpu", &"--shape", &"64x100", &"--dtype", &"bf16"];
    let printed = run(&[&bench[..], &[&"--json", &json]].concat()).ok();
    assert!(printed.contains("64x100") && printed.contains("of copy"), "{printed}");
    assert!(!printed.contains("of read"), "{printed}");
    let records = read_json(json);
    let [record] = &records.as_array().unwrap()[..] else { panic!("one measurement: {records}") };
    let keys: Vec<_> = record.as_object().unwrap().keys().map(String::as_str).collect();
    assert_eq!(
        keys,
        [
            "op",
            "format",
            "numerics",
            "scale_layout",
            "search",
            "dtype",
            "activations",
            "rows",
            "cols",
            "batches",
            "tokens",
            "top_k",
            "device",
            "threads",
            "bytes",
            "median_seconds",
            "bytes_per_second",
            "copy_bytes_per_second",
            "ratio",
            "read_bytes_per_second",
            "read_ratio",
            "kernel",
            "operations_per_second",
            "tensor_core_ratio"
        ]
    );
    // 64 rows of 100 values, and 64 rows of four blocks with 16 bytes of codes and a scale.
    assert_eq!(record["bytes"], 64 * (100 * 2 + 4 * 17));
    let figure = |key: &str| record[key].as_f64().unwrap();
    assert!(figure("median_seconds") > 0.0);
    assert_relative_eq!(
        figure("bytes_per_second"),
        figure("bytes") / figure("median_seconds"),
        max_relative = 1e-9
    );
    assert_relative_eq!(
        figure("ratio"),
        figure("bytes_per_second") / figure("copy_bytes_per_second"),
        max_relative = 1e-9
    );
}

#[test]
fn products_of_many_tokens_are_measured_on_cpus() {
    let bench: [Arg<'_>; 7] =
        [&"bench", &"--op", &"gemm-weights", &"--device", &"cpu", &"--shape", &"50x250"];
    let more: [Arg<'_>; 10] = [
        &"--dtype",
        &"f32",
        &"--dtype",
        &"bf16",
        &"--tokens",
        &"20",
        &"--format",
        &"mxfp4",
        &"--format",
        &"nvfp4",
    ];
    let printed = run(&[&bench[..], &more].concat()).ok();
    for expected in ["gemm-weights", "50x250, 20 tokens", "f32", "bf16", "mxfp4", "nvfp4"] {
        assert!(printed.contains(expected), "{expected}: {printed}");
    }
}

#[test]
fn products_with_rounded_activations_are_measured_on_cpus() {
    let bench: [Arg<'_>; 7] =
        [&"bench", &"--op", &"gemm-weights", &"--device", &"cpu", &"--shape", &"50x250"];
    let more: [Arg<'_>; 8] =
        [&"--dtype", &"bf16", &"--tokens", &"20", &"--activations", &"int8", &"--activations", &"exact"];
    let printed = run(&[&bench[..], &more].concat()).ok();
    assert!(printed.contains("bf16, int8") && printed.contains("bf16 "), "{printed}");
    let others: [Arg<'_>; 7] =
        [&"bench", &"--op", &"gemv-weights", &"--device", &"cpu", &"--activations", &"int8"];
    let run = run(&others);
    assert_eq!(run.code, Some(2), "{run:#?}");
    assert!(run.stderr.contains("--activations"), "{run:#?}");
}

#[test]
fn operations_of_a_gpu_are_not_measured_on_a_cpu() {
    let bench: [Arg<'_>; 7] =
        [&"bench", &"--op", &"gemm-experts", &"--device", &"cpu", &"--shape", &"32x32x2"];
    let run = run(&[&bench[..], &[&"--dtype", &"bf16"]].concat());
    assert_eq!(run.code, Some(1), "{run:#?}");
    assert!(run.stderr.contains("GPU"), "{run:#?}");
}

#[test]
fn products_are_measured_in_batches() {
    let scratch = Scratch::new();
    let json = scratch.path("gemv.json");
    let bench: [Arg<'_>; 11] = [
        &"bench",
        &"--op",
        &"gemv",
        &"--device",
        &"cpu",
        &"--shape",
        &"48x256x3",
        &"--dtype",
        &"f16",
        &"--format",
        &"nvfp4",
    ];
    let printed = run(&[&bench[..], &[&"--json", &json]].concat()).ok();
    assert!(printed.contains("48x256x3") && printed.contains("of read"), "{printed}");
    let records = read_json(json);
    assert_eq!(records[0]["batches"], 3);
    // Codes and scales of the matrices.
    assert_eq!(records[0]["bytes"], 3 * 48 * (128 + 16));
    let figure = |key: &str| records[0][key].as_f64().unwrap();
    assert_relative_eq!(
        figure("read_ratio"),
        figure("bytes_per_second") / figure("read_bytes_per_second"),
        max_relative = 1e-9
    );
}

#[test]
fn products_of_weights_are_measured_by_tokens() {
    let scratch = Scratch::new();
    let json = scratch.path("weights.json");
    let bench: [Arg<'_>; 9] = [
        &"bench",
        &"--op",
        &"gemv-weights",
        &"--device",
        &"cpu",
        &"--shape",
        &"48x250",
        &"--format",
        &"nvfp4",
    ];
    let more: [Arg<'_>; 8] = [&"--dtype", &"bf16", &"--tokens", &"1", &"--tokens", &"3", &"--json", &json];
    let printed = run(&[&bench[..], &more].concat()).ok();
    for expected in ["48x250, 1 token ", "48x250, 3 tokens ", "bf16", "of copy", "of read"] {
        assert!(printed.contains(expected), "{expected}: {printed}");
    }
    let records = read_json(json);
    assert_eq!((&records[0]["tokens"], &records[1]["tokens"]), (&1.into(), &3.into()));
    for record in records.as_array().unwrap() {
        // Codes and scales of the weights, for any number of tokens.
        assert_eq!(record["bytes"], 48 * (128 + 16));
        assert!(record["read_ratio"].as_f64().unwrap() > 0.0, "{record}");
    }
}

#[test]
fn unsupported_products_of_weights_are_refused() {
    let weights: [Arg<'_>; 3] = [&"--op", &"gemv-weights", &"--shape"];
    let refused: [(&[Arg<'_>], &str); 3] = [
        (&[&"48x256x2"], "write the shape as ROWSxCOLS"),
        (&[&"48x256", &"--tokens", &"0"], "--tokens"),
        (&[&"48x256", &"--op", &"gemv", &"--tokens", &"2"], "gemv is not measured by tokens"),
    ];
    for (more, why) in refused {
        let run = run(&[&[&"bench" as Arg<'_>, &"--device", &"cpu"], &weights[..], more].concat());
        assert_eq!(run.code, Some(2), "{run:#?}");
        assert!(run.stderr.contains(why), "{why}: {run:#?}");
    }
    let run = run(&[&"bench", &"--device", &"cpu", &"--tokens", &"2", &"--shape", &"48x256"]);
    assert_eq!(run.code, Some(2), "{run:#?}");
    assert!(run.stderr.contains("quantize is not measured by tokens"), "{run:#?}");
}

#[test]
fn sizes_that_mean_nothing_are_refused() {
    for size in ["0x32", "32", "4x4x4x4", "4x", "axb"] {
        let run = run(&[&"bench", &"--device", &"cpu", &"--shape", &size]);
        assert_eq!(run.code, Some(2), "{size}: {run:#?}");
    }
    for (op, size) in [
        ("gemv", "9223372036854775807x4096x4"),
        ("gemv-weights", "9223372036854775807x4096"),
        ("quantize", "9223372036854775807x4096x4"),
    ] {
        let run = run(&[&"bench", &"--device", &"cpu", &"--op", &op, &"--shape", &size]);
        assert_eq!(run.code, Some(1), "{op}: {run:#?}");
        assert!(run.stderr.contains("more elements than can be addressed"), "{op}: {run:#?}");
    }
}

#[test]
fn sizes_beyond_memory_are_refused() {
    for (more, parts) in [
        (["--tokens", "99999999"], ["--tokens 99999999", "more than the 65536 allowed"]),
        (["--shape", "4194304x4194304"], ["4194304x4194304", "choose a smaller --shape"]),
    ] {
        let op: [Arg<'_>; 7] =
            [&"bench", &"--op", &"gemv-weights", &"--device", &"cpu", &"--format", &"nvfp4"];
        let refused = run(&[&op[..], &[&more[0], &more[1]]].concat());
        assert_eq!(refused.code, Some(2), "{refused:#?}");
        assert!(parts.iter().all(|part| refused.stderr.contains(part)), "{refused:#?}");
    }
}

#[cfg(feature = "internals")]
#[test]
fn layers_are_measured_by_products_only() {
    let refused: [(&[Arg<'_>], &str); 4] = [
        (&[&"tuned", &"--op", &"quantize"], "leave out --op quantize"),
        (&[&"tuned", &"--shape", &"32x32"], "--shape"),
        (&[&"tuned", &"--top-k", &"2"], "--top-k"),
        (&[&"half"], "held-out"),
    ];
    for (more, why) in refused {
        let bench: [Arg<'_>; 4] = [&"bench", &"--device", &"cpu", &"--layers"];
        let run = run(&[&bench[..], more].concat());
        assert_eq!(run.code, Some(2), "{run:#?}");
        assert!(run.stderr.contains(why), "{why}: {run:#?}");
    }
}
