//! The state of what goes on beside a block's threads: bulk copies, mbarriers, products of warp groups, and the cluster's barrier. The modules of
//! these names have what happens to it.

use std::collections::{HashMap, HashSet, VecDeque};

use crate::clock::{Known, Member};
use crate::program::Slot;
use crate::race::Id;
use crate::semantics::{Counts, DEPTH};

/// A bulk copy under way.
pub(super) struct Bulk {
    pub(super) warp: u32,
    pub(super) lane: u32,
    pub(super) pc: u32,
    pub(super) to: u64,
    pub(super) from: u64,
    pub(super) bytes: usize,
    /// The address of the mbarrier.
    pub(super) at: u64,
    pub(super) access: Option<Id>,
    /// What the thread knew that began it.
    pub(super) known: Known,
    /// The bytes that were read at the beginning, unless that is left for the end.
    pub(super) found: Option<Vec<u8>>,
}

/// An mbarrier.
pub(super) struct Mbarrier {
    pub(super) counts: Counts,
    /// Who writes for the copies that it counts.
    pub(super) member: Member,
    /// The instruction that initialised it.
    pub(super) init: Option<Id>,
    /// What was told in the phase so far, and in those that are complete.
    pub(super) told: Known,
    pub(super) complete: Known,
    /// The number of copies under way that it counts, all of the current phase.
    pub(super) copies: usize,
    /// The last phase with copies, and the warp, lane and instruction of one of them.
    pub(super) last: Option<(u32, (u32, u32, u32))>,
    /// The most phases that somebody found complete.
    pub(super) found: u32,
}

/// The products of a warp group, from the first that not all warps have waited for.
#[derive(Default)]
pub(super) struct Products {
    pub(super) first: u64,
    pub(super) all: VecDeque<Product>,
}

/// A product.
pub(super) struct Product {
    pub(super) pc: u32,
    pub(super) descriptor: u64,
    pub(super) adds: bool,
    /// The warps that have come to it, and those that have waited for it.
    pub(super) came: u8,
    pub(super) waited: u8,
    /// The columns of B, once they are read.
    pub(super) columns: Option<Vec<[f64; DEPTH]>>,
}

/// A warp's part in its warp group's products.
#[derive(Default)]
pub(super) struct Share {
    /// The number of products that it came to, and that it waited for.
    pub(super) came: u64,
    pub(super) waited: u64,
    /// The number of products before the end of each group that it has not waited for.
    pub(super) groups: VecDeque<u64>,
    /// The registers of products that it has not waited for, and the last such product and its instruction.
    pub(super) pending: HashMap<Slot, (u64, u32)>,
    /// The registers that were accessed since its last fence.
    pub(super) accessed: HashSet<Slot>,
    pub(super) fenced: bool,
}

/// The cluster at hand.
#[derive(Default)]
pub(super) struct Cluster {
    /// Warps of each block that have not ended.
    pub(super) alive: Vec<u32>,
    /// Warps that have arrived at the barrier in this phase, and what they told.
    pub(super) arrived: u32,
    pub(super) told: Known,
    /// The number of the phase, and what was told in the one before.
    pub(super) phase: u64,
    pub(super) complete: Known,
}

impl Cluster {
    /// A cluster of so many blocks begins, with so many warps each.
    pub(super) fn new(blocks: u32, warps: u32) -> Self {
        Self { alive: vec![warps; blocks as usize], ..Self::default() }
    }

    /// Returns whether all warps of a block have ended.
    pub(super) fn ended(&self, rank: u32) -> bool {
        self.alive[rank as usize] == 0
    }
}
