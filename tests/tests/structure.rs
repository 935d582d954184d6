//! The house as ARCHITECTURE.md draws it: no crate imports one above it, and no modules import each other in
//! a circle.
//!
//! A file imports another if it names something that is defined there, in a `use` or in the middle of its
//! code. `mod` lines and `pub use` are lists of contents and import nothing; what is named through them
//! counts for the file that defines it. Code that is compiled for tests alone is left out. What macros make
//! is read as far as their words go.

mod structure_tests {
    mod arrows;
    mod floors;
    mod house;
    mod made_up;
    mod modules;
    mod names;
    mod resolve;
}
