//! See `tests/support/src/hostile/pytorch.rs`.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| microscale_test_support::hostile::run("pytorch", bytes));
