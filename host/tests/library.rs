//! Tests that need the instances of instruction sets, which the library contains.
//!
//! As unit tests they would compile the instances again.

mod library_tests {
    mod error_stats;
    mod instruction_sets;
    mod search_global;
    mod views;
    mod worst_blocks;
}
