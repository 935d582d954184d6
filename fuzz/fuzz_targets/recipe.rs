//! See `tests/support/src/hostile/recipe.rs`.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| microscale_test_support::hostile::run("recipe", bytes));
