//! Compares the searches for block scales with brute force in f64, which shares no code with them.
//!
//! A second test compares all scales in the search's own arithmetic: no skipped scale may win. With
//! `--nocapture` the tests print the tables of `docs/search.md`. `MICROSCALE_WEIGHTS=FILE` takes
//! the weights of another safetensors file than the sample's, up to `inputs::BLOCKS` blocks.

mod search_tests {
    mod agreement;
    mod brute_force;
    mod inputs;
    mod least_error;
    mod skipped;
}
