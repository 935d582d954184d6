//! See `tests/support/src/hostile/input_scales.rs`.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| microscale_test_support::hostile::run("input_scales", bytes));
