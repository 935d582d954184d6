//! The program: `compare --format`, and what is refused.

use microscale_test_support::{run, sample};

#[test]
fn a_checkpoint_is_measured_in_formats_without_files() {
    let sample = sample();
    let total = |format: &str| {
        let text = run(&[&"compare", &sample, &"--format", &format]).ok();
        let total = text.lines().find(|line| line.starts_with("total")).expect("a total").to_owned();
        assert!(text.contains("down_proj") && !text.contains("norm"), "{text}");
        total.split_whitespace().nth(1).expect("an error").parse::<f64>().expect("a number")
    };
    let [e3m0, mxfp4, nf4] = ["mxfp4-e3m0", "mxfp4", "nf4"].map(total);
    assert!(0.0 < nf4 && nf4 < mxfp4 && mxfp4 < e3m0 && e3m0 < 1.0, "{nf4} {mxfp4} {e3m0}");
}

#[test]
fn files_and_two_answers_are_refused() {
    let sample = sample();
    for format in ["nf4", "mxfp4-e3m0"] {
        let refused = run(&[&"quantize", &sample, &"--format", &format, &"--out", &"/nowhere/OUT"]);
        assert_ne!(refused.code, Some(0));
        let advice = format!("compare A --format {format}");
        assert!(refused.stderr.contains("has no") && refused.stderr.contains(&advice), "{}", refused.stderr);
    }
    let refused = run(&[&"compare", &sample, &"--format", &"nf4", &"--convention", &"ocp"]);
    assert!(refused.code == Some(2) && refused.stderr.contains("bitsandbytes"), "{}", refused.stderr);
    let refused = run(&[&"compare", &sample, &sample, &"--format", &"nf4"]);
    assert_eq!(refused.code, Some(2), "{}", refused.stderr);
}
