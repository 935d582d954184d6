//! Checks the structure that ARCHITECTURE.md describes.
//!
//! No crate imports one above it, and no modules import each other in a circle. A file imports
//! another if it names an item defined there, in a `use` or in code. `mod` and `pub use` are tables
//! of contents and import nothing. A name found through them counts for the file that defines it.
//! Test code is ignored. Paths in the arguments of macros are found word by word.
//!
//! `english` limits stilted phrases, and `documents` compares the documents with the code.

mod structure_tests {
    mod arrows;
    mod documents;
    mod english;
    mod floors;
    mod house;
    mod made_up;
    mod modules;
    mod names;
    mod prose;
    mod resolve;
}
