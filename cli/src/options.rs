//! Options that several subcommands have.

pub(crate) mod device;
pub(crate) mod general;
pub(crate) mod output;
pub(crate) mod recipe;
pub(crate) mod rewrite;
pub(crate) mod size;
#[cfg(feature = "models")]
pub(crate) mod text;
pub(crate) mod words;
