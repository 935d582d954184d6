//! The searches for block scales against brute force in f64, which knows nothing of their bounds and shares
//! no code with them; and against all scales by the search's own arithmetic, where no skipped scale may win.
//!
//! With `--nocapture` the tables of `docs/search.md` are printed. `MICROSCALE_WEIGHTS=FILE` takes the weights
//! of another safetensors file than the sample's, up to `inputs::BLOCKS` blocks.

mod search_tests {
    mod agreement;
    mod brute_force;
    mod inputs;
    mod least_error;
    mod skipped;
}
