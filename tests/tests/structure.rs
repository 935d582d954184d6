//! The house as ARCHITECTURE.md draws it: no crate imports one above it, and no modules import each other in
//! a circle.
//!
//! A file imports another if it names an item that is defined there, in a `use` or in the middle of its code.
//! `mod` lines and `pub use` are lists of contents and import nothing; a name that is found through them
//! counts for the file that defines it. Code that is compiled for tests alone is left out. The output of
//! macros is read as far as its words go.

mod structure_tests {
    mod arrows;
    mod floors;
    mod house;
    mod made_up;
    mod modules;
    mod names;
    mod resolve;
}
