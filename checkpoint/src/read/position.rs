//! The position of a stored tensor.

/// The position of a stored tensor in a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Position {
    /// The number of the shard.
    pub(crate) shard: usize,
    /// The number of the tensor in the shard.
    pub(crate) tensor: usize,
}
