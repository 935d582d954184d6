//! See `tests/support/src/hostile/imatrix.rs`.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| microscale_test_support::hostile::run("imatrix", bytes));
