//! State of asynchronous operations: bulk copies, mbarriers, products, tensor memory, cluster
//! barriers.
//!
//! The modules with the corresponding names implement the operations.

use std::collections::{HashMap, HashSet, VecDeque};

use microscale_formats::Format;

use crate::clock::{Known, Member};
use crate::program::{CopyShape, Slot};
use crate::race::Id;
use crate::semantics::{Counts, Factors, TensorProduct};
use crate::tensor_map::{Run, Swizzle};

/// A bulk copy in flight.
pub(super) struct Bulk {
    pub(super) warp: u32,
    pub(super) lane: u32,
    pub(super) pc: u32,
    pub(super) to: u64,
    pub(super) source: Source,
    /// The address of the mbarrier.
    pub(super) at: u64,
    pub(super) access: Option<Id>,
    /// The clock of the issuing thread.
    pub(super) known: Known,
    /// The source bytes, if they were read at the start.
    pub(super) found: Option<Vec<u8>>,
}

/// The bytes that a bulk copy writes, and where it reads them.
#[derive(Clone)]
pub(super) struct Source {
    /// The bytes that are read. The others are zeros.
    pub(super) runs: Vec<Run>,
    /// The number of bytes that are written.
    pub(super) bytes: usize,
    /// Required alignment of the destination, and of each run.
    pub(super) aligns: [usize; 2],
    pub(super) swizzle: Swizzle,
}

/// An mbarrier.
pub(super) struct Mbarrier {
    pub(super) counts: Counts,
    /// The member that writes for the copies that the mbarrier counts.
    pub(super) member: Member,
    /// The instruction that initialized it.
    pub(super) init: Option<Id>,
    /// Clocks released in the current phase, and in the completed phases.
    pub(super) told: Known,
    pub(super) complete: Known,
    /// Number of copies in flight that it counts. All belong to the current phase.
    pub(super) copies: usize,
    /// The last phase with copies, and the warp, lane and instruction of one of them.
    pub(super) last: Option<(u32, (u32, u32, u32))>,
    /// Highest number of completed phases that a thread has observed.
    pub(super) found: u32,
}

/// The products of a warp group, from the first one that some warp has not waited for.
#[derive(Default)]
pub(super) struct Products {
    pub(super) first: u64,
    pub(super) all: VecDeque<Product>,
}

/// A product.
pub(super) struct Product {
    pub(super) pc: u32,
    /// The descriptors of A, if it is in shared memory, and of B.
    pub(super) descriptors: [Option<u64>; 2],
    pub(super) adds: bool,
    /// Masks of the warps that have reached it, and of the warps that have waited for it.
    pub(super) came: u8,
    pub(super) waited: u8,
    /// The rows of A, if it is in shared memory, and the columns of B, once read.
    pub(super) matrices: Option<[Vec<Factors>; 2]>,
}

/// A warp's part in its warp group's products.
#[derive(Default)]
pub(super) struct Share {
    /// Number of products that it has reached, and that it has waited for.
    pub(super) came: u64,
    pub(super) waited: u64,
    /// For each pending group, the number of products before its end.
    pub(super) groups: VecDeque<u64>,
    /// Registers of pending products, each with the last such product and its instruction.
    pub(super) pending: HashMap<Slot, (u64, u32)>,
    /// Registers accessed since the last fence.
    pub(super) accessed: HashSet<Slot>,
    pub(super) fenced: bool,
}

/// The asynchronous instructions of one thread for tensor memory.
///
/// They happen in their order. A member of the race detector acts for them. The member after it has
/// the times at which `tcgen05.commit` made them known: it implies the fence before a
/// synchronization.
pub(super) struct Pipe {
    pub(super) warp: u32,
    pub(super) lane: u32,
    pub(super) member: Member,
    /// Number of instructions issued.
    pub(super) issued: u32,
    /// The last instruction that is not a commit: its number and place.
    pub(super) last: Option<(u32, u32)>,
    /// Instructions that have not happened.
    pub(super) waiting: VecDeque<Issued>,
}

/// An arrival of a `tcgen05.commit` that has happened.
pub(super) struct Committed {
    pub(super) warp: u32,
    pub(super) lane: u32,
    pub(super) pc: u32,
    /// The address of the mbarrier.
    pub(super) at: u64,
    /// The knowledge that a thread gets by observing the phase.
    pub(super) known: Known,
}

/// An asynchronous instruction for tensor memory that has not happened.
pub(super) struct Issued {
    pub(super) pc: u32,
    pub(super) number: u32,
    /// The block's rank, and the number of blocks that it is for.
    pub(super) rank: u32,
    pub(super) blocks: u32,
    pub(super) work: Work,
}

/// The operands of an asynchronous instruction for tensor memory.
pub(super) enum Work {
    Multiply {
        of: TensorProduct,
        format: Format,
        d: u32,
        descriptors: [u64; 2],
        scales: [u32; 2],
        adds: bool,
    },
    Copy {
        to: u32,
        from: u64,
        shape: CopyShape,
    },
    Commit {
        /// The mbarriers.
        at: Vec<u64>,
        /// The other threads' accesses that the thread knows.
        known: Known,
    },
}

/// A warp's loads from tensor memory, or its stores.
#[derive(Default)]
pub(super) struct Moves {
    /// The member of the race detector that acts for them. The member after it has the times that
    /// `tcgen05.fence::before_thread_sync` made known.
    pub(super) member: Option<Member>,
    /// Number of instructions, and number of instructions that the warp has waited for.
    pub(super) issued: u32,
    pub(super) waited: u32,
}

/// A warp's part in tensor memory.
#[derive(Default)]
pub(super) struct Tensors {
    pub(super) loads: Moves,
    pub(super) stores: Moves,
    /// Destinations of loads without a wait.
    pub(super) pending: HashSet<Slot>,
}

/// The current cluster.
#[derive(Default)]
pub(super) struct Cluster {
    /// Warps of each block that have not ended.
    pub(super) alive: Vec<u32>,
    /// Warps that have arrived at the barrier in this phase, and their released clocks.
    pub(super) arrived: u32,
    pub(super) told: Known,
    /// The phase number, and the clocks released in the previous phase.
    pub(super) phase: u64,
    pub(super) complete: Known,
}

impl Cluster {
    /// Starts a cluster of `blocks` blocks with `warps` warps each.
    pub(super) fn new(blocks: u32, warps: u32) -> Self {
        Self { alive: vec![warps; blocks as usize], ..Self::default() }
    }

    /// Returns whether all warps of a block have ended.
    pub(super) fn ended(&self, rank: u32) -> bool {
        self.alive[rank as usize] == 0
    }
}
