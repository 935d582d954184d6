//! A lowered kernel: its instructions in the form in which they are executed, and its registers.

use crate::lanes::LaneFunction;
use crate::semantics::Multiplicand;

/// The number of a register in its file; there is one file of words, one of longs, one of predicates.
pub(crate) type Slot = u16;
/// Instead of a register: the value is not wanted, or there is none.
pub(crate) const NONE: Slot = Slot::MAX;

/// A lowered kernel.
#[derive(Debug, Default)]
pub(crate) struct Program {
    pub(crate) code: Vec<Instruction>,
    /// The place of each instruction in the text.
    pub(crate) places: Vec<Place>,
    pub(crate) words: File<u32>,
    pub(crate) longs: File<u64>,
    pub(crate) predicates: File<bool>,
    /// Words that depend on the launch.
    pub(crate) specials: Vec<(Slot, Special)>,
    /// Longs that do.
    pub(crate) long_specials: Vec<(Slot, Special)>,
    /// Bytes of the parameter space.
    pub(crate) parameters: usize,
    /// The variables in shared memory.
    pub(crate) shared: Vec<SharedPlace>,
    /// The module's variables in global memory.
    pub(crate) global: Vec<GlobalPlace>,
    /// Threads of a block wait for some of the others, by mbarriers or barriers with a number of threads.
    pub(crate) partial: bool,
}

/// Registers of one kind.
#[derive(Debug)]
pub(crate) struct File<T> {
    /// Names by slot; empty for slots without one.
    pub(crate) names: Vec<String>,
    pub(crate) constants: Vec<(Slot, T)>,
}

impl<T> Default for File<T> {
    fn default() -> Self {
        Self { names: Vec::new(), constants: Vec::new() }
    }
}

/// A variable in shared memory, or all dynamic ones.
#[derive(Clone, Debug)]
pub(crate) struct SharedPlace {
    pub(crate) name: String,
    pub(crate) address: u32,
    /// The size in bytes; `None` if the launch says it.
    pub(crate) size: Option<u32>,
}

/// A variable of the module in global memory.
#[derive(Clone, Debug)]
pub(crate) struct GlobalPlace {
    pub(crate) name: String,
    pub(crate) address: u64,
    /// The size in bytes.
    pub(crate) size: u32,
}

/// The manner of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Manner {
    /// A plain one.
    Weak,
    /// `.relaxed`, or part of an atomic operation: not in a race with others of its kind.
    Atomic,
    /// `.acquire` or `.release` for other blocks: a relaxed one that orders others.
    Ordering,
    /// `ld.global.nc`
    Constant,
}

/// The place of an instruction in the module's text.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    pub(crate) line: u32,
    pub(crate) start: usize,
    pub(crate) end: usize,
    pub(crate) opcode: (usize, usize),
}

impl Place {
    pub(crate) fn text<'a>(&self, text: &'a str) -> &'a str {
        &text[self.start..self.end]
    }

    pub(crate) fn opcode<'a>(&self, text: &'a str) -> &'a str {
        &text[self.opcode.0..self.opcode.1]
    }
}

/// Special registers (ISA chapter 10) that are not the same number in every launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Special {
    Thread,
    Threads,
    Block,
    Blocks,
    Lane,
    /// The block's number in its cluster.
    Rank,
    /// The address of what has this address in the shared memory of the first block of a cluster.
    Shared(u32),
}

/// An instruction with its guard.
#[derive(Debug)]
pub(crate) struct Instruction {
    pub(crate) guard: Option<Guard>,
    pub(crate) op: Op,
    /// The words that it reads or writes and that are ones of asynchronous products as well.
    pub(crate) shares: Box<[Slot]>,
}

/// A predicate, and whether it must be false.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Guard {
    pub(crate) predicate: Slot,
    pub(crate) negated: bool,
}

/// A destination or source of memory accesses and vectors.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Register {
    /// A word, of which so many bits count.
    Word(Slot, u32),
    Long(Slot),
    /// `_`
    Sink(u32),
}

impl Register {
    pub(crate) fn bits(self) -> u32 {
        match self {
            Self::Word(_, bits) | Self::Sink(bits) => bits,
            Self::Long(_) => 64,
        }
    }
}

/// `[base + offset]`
#[derive(Clone, Copy, Debug)]
pub(crate) struct Address {
    pub(crate) space: Space,
    /// A register, or none: then `offset` is the address.
    pub(crate) base: Option<Register>,
    pub(crate) offset: i64,
    /// It may be in the shared memory of any thread block of the cluster.
    pub(crate) of_cluster: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Space {
    Global,
    Shared,
}

/// The operation of an instruction.
pub(crate) enum Op {
    /// Computes a word or a long.
    Compute {
        shape: LaneFunction,
        to: Slot,
        from: [Slot; 4],
    },
    /// Computes a predicate, combined with another one; `other` gets it with the comparison negated.
    Compare {
        shape: LaneFunction,
        to: Slot,
        other: Slot,
        from: [Slot; 2],
        combined: Option<(Logic, Guard)>,
    },
    SelectWord {
        to: Slot,
        from: [Slot; 2],
        by: Slot,
    },
    SelectLong {
        to: Slot,
        from: [Slot; 2],
        by: Slot,
    },
    Predicate {
        logic: Logic,
        to: Slot,
        from: [Guard; 2],
    },
    /// Addition and subtraction with the carry flag.
    Carry {
        subtract: bool,
        takes: bool,
        sets: bool,
        to: Register,
        from: [Register; 2],
    },
    /// `mov` of a vector into a register, lowest first.
    Pack {
        to: Register,
        from: Box<[Register]>,
    },
    /// `mov` of a register into a vector.
    Unpack {
        to: Box<[Register]>,
        from: Register,
    },
    /// A load from the parameter space at a known place.
    Parameter {
        to: Box<[Register]>,
        at: usize,
        bytes: usize,
        signed: bool,
    },
    Load {
        to: Box<[Register]>,
        from: Address,
        bytes: usize,
        signed: bool,
        manner: Manner,
    },
    Store {
        to: Address,
        from: Box<[Register]>,
        bytes: usize,
        manner: Manner,
    },
    Atomic {
        update: Update,
        bits: u32,
        /// It acquires and releases.
        orders: bool,
        to: Option<Register>,
        at: Address,
        from: [Register; 2],
    },
    /// Copies `bytes` on its own, from global to shared memory; a register says how many of them are read.
    Copy {
        to: Address,
        from: Address,
        bytes: usize,
        read: Slot,
    },
    /// Makes a group of a lane's copies that are in none.
    CloseGroup,
    /// Waits for all groups but the last so many, or for all copies.
    AwaitCopies {
        but: Option<u32>,
    },
    /// Has an mbarrier await all copies of a lane so far.
    ArriveAfterCopies {
        at: Address,
    },
    /// Copies as many bytes as a register says, on its own, from global to shared memory, and counts them at
    /// an mbarrier.
    BulkCopy {
        to: Address,
        from: Address,
        bytes: Slot,
        at: Address,
    },
    Mbarrier {
        action: MbarrierAction,
        at: Address,
    },
    Fence(Fence),
    /// Loads four matrices of 8 by 8 numbers of 16 bits.
    LoadMatrices {
        to: [Slot; 4],
        from: Address,
        /// All lanes.
        members: Slot,
    },
    /// An instruction of a warp group for its asynchronous products.
    WarpGroup {
        action: WarpGroupAction,
        /// All lanes of a warp.
        members: Slot,
    },
    Approximate {
        flush: bool,
        to: Slot,
        from: Slot,
    },
    Branch {
        target: u32,
    },
    Table {
        index: Slot,
        targets: Box<[u32]>,
    },
    Shuffle {
        mode: Shuffle,
        to: Slot,
        valid: Slot,
        value: Slot,
        by: Slot,
        clamp: Slot,
        members: Slot,
    },
    Vote {
        mode: Vote,
        to: Slot,
        from: Guard,
        members: Slot,
    },
    Reduce {
        reduction: Update,
        to: Slot,
        from: Slot,
        members: Slot,
    },
    Multiply {
        matrices: Box<Matrices>,
        /// All lanes.
        members: Slot,
    },
    WarpBarrier {
        members: Slot,
    },
    /// Arrives at the barrier of the cluster, or waits there.
    ClusterBarrier {
        waits: bool,
        /// All lanes.
        members: Slot,
    },
    /// The address that an address of shared memory has in that of a block of the cluster.
    MapAddress {
        to: Slot,
        from: Slot,
        rank: Slot,
    },
    Barrier {
        number: Slot,
        /// The number of threads, if it is not for all of the block.
        count: Slot,
        aligned: bool,
    },
    /// Changes nothing that can be seen here.
    Nothing,
    Exit,
    Trap,
}

impl std::fmt::Debug for Op {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Op")
    }
}

/// The registers of `mma` of 16 rows, 8 columns and 16 products, in the ISA's order: D = A·B + C.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Matrices {
    pub(crate) element: Multiplicand,
    pub(crate) d: [Slot; 4],
    pub(crate) a: [Slot; 4],
    pub(crate) b: [Slot; 2],
    pub(crate) c: [Slot; 4],
}

/// What is done to an mbarrier, each with a register.
#[derive(Clone, Copy, Debug)]
pub(crate) enum MbarrierAction {
    /// With so many arrivals a phase.
    Initialise(Slot),
    Arrive,
    /// Arrives, and so many bytes are to come.
    Expect(Slot),
    /// Sets a predicate to whether the phase of a parity is complete.
    Try {
        parity: Slot,
        to: Slot,
    },
}

/// Fences.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fence {
    /// Between what a thread wrote and asynchronous accesses.
    Proxy,
    /// The same for the beginnings of mbarriers.
    MbarrierInit,
    /// Between the blocks of a GPU.
    Device,
}

/// Instructions of `wgmma`.
#[derive(Debug)]
pub(crate) enum WarpGroupAction {
    Fence,
    Commit,
    /// Waits for all groups but the last so many.
    Await(u32),
    Multiply(Box<GroupMatrices>),
}

/// The operands of `wgmma.mma_async`, of 64 rows, 16 products, and four columns for every two registers of D.
#[derive(Clone, Debug)]
pub(crate) struct GroupMatrices {
    pub(crate) element: Multiplicand,
    pub(crate) d: Box<[Slot]>,
    pub(crate) a: [Slot; 4],
    /// B's descriptor.
    pub(crate) b: Slot,
    /// Whether D is added to.
    pub(crate) adds: Guard,
}

/// Functions of two predicates.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Logic {
    And,
    Or,
    Xor,
    /// The first one.
    First,
}

/// The function by which an atomic operation makes a new value of the old one and its operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Update {
    Add,
    MinUnsigned,
    MaxUnsigned,
    MinSigned,
    MaxSigned,
    And,
    Or,
    Xor,
    Exchange,
    /// The second operand, if the old value is the first one.
    CompareAndSwap,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Shuffle {
    Up,
    Down,
    Butterfly,
    Index,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Vote {
    All,
    Any,
    Uniform,
    Ballot,
}
