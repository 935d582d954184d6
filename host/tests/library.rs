//! Tests that need the instruction sets' instances, which are compiled with the library. A unit test that did
//! would have them compiled once more.

mod library_tests {
    mod error_stats;
    mod instruction_sets;
    mod search_global;
    mod views;
    mod worst_blocks;
}
