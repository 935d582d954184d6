//! A lowered kernel: executable instructions and registers.

use microscale_formats::Format;

use crate::lanes::LaneFunction;
use crate::semantics::{Fragment, Multiplicand};

/// The index of a register in its file. Words, longs and predicates have a file each.
pub(crate) type Slot = u16;
/// Stands for no register: the value is not wanted, or there is none.
pub(crate) const NONE: Slot = Slot::MAX;

/// A lowered kernel.
#[derive(Debug, Default)]
pub(crate) struct Program {
    pub(crate) code: Vec<Instruction>,
    /// The position of each instruction in the text.
    pub(crate) places: Vec<Place>,
    pub(crate) words: File<u32>,
    pub(crate) longs: File<u64>,
    pub(crate) predicates: File<bool>,
    /// Words that depend on the launch.
    pub(crate) specials: Vec<(Slot, Special)>,
    /// Longs that depend on the launch.
    pub(crate) long_specials: Vec<(Slot, Special)>,
    /// Size of the parameter space in bytes.
    pub(crate) parameters: usize,
    /// Variables in shared memory.
    pub(crate) shared: Vec<SharedPlace>,
    /// The module's variables in global memory.
    pub(crate) global: Vec<GlobalPlace>,
    /// Some threads of a block wait for only some of the others, by mbarriers or partial barriers.
    pub(crate) partial: bool,
    /// Whether its tcgen05 instructions are for pairs of blocks, if it has any.
    pub(crate) pairs: Option<bool>,
}

/// Registers of one kind.
#[derive(Debug)]
pub(crate) struct File<T> {
    /// Names by slot. Slots without a name have an empty one.
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
    /// The size in bytes, or `None` if the launch gives it.
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

/// The memory ordering of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Manner {
    /// A plain access.
    Weak,
    /// `.relaxed`, or part of an atomic operation. It does not race with its own kind.
    Atomic,
    /// `.acquire` or `.release` for other blocks: a relaxed access that also orders other accesses.
    Ordering,
    /// `ld.global.nc`, or the read of a tensor map.
    Constant,
}

/// The position of an instruction in the module's text.
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

/// Special registers (ISA chapter 10) whose value depends on the launch, block or thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Special {
    Thread,
    Threads,
    Block,
    Blocks,
    Lane,
    /// The block's rank in its cluster.
    Rank,
    /// The block's own address of a shared variable, given its address in the cluster's first
    /// block.
    Shared(u32),
}

/// An instruction with its guard.
#[derive(Debug)]
pub(crate) struct Instruction {
    pub(crate) guard: Option<Guard>,
    pub(crate) op: Op,
    /// The words that it reads or writes and that asynchronous products and loads also use.
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
    /// A word, and its number of significant bits.
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
    /// A register. Without one, `offset` is the address.
    pub(crate) base: Option<Register>,
    pub(crate) offset: i64,
    /// The address may be in the shared memory of any block of the cluster.
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
    /// Computes a predicate combined with another one. `other` receives it with the comparison
    /// negated.
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
    /// Adds or subtracts with the carry flag.
    Carry {
        subtract: bool,
        takes: bool,
        sets: bool,
        to: Register,
        from: [Register; 2],
    },
    /// `mov` of a vector into a register, lowest part first.
    Pack {
        to: Register,
        from: Box<[Register]>,
    },
    /// `mov` of a register into a vector.
    Unpack {
        to: Box<[Register]>,
        from: Register,
    },
    /// Loads from a constant offset of the parameter space.
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
        /// The operation acquires and releases.
        orders: bool,
        to: Option<Register>,
        at: Address,
        from: [Register; 2],
    },
    /// Copies `bytes` bytes asynchronously from global to shared memory. `read` holds the number to
    /// read.
    Copy {
        to: Address,
        from: Address,
        bytes: usize,
        read: Slot,
    },
    /// Closes a group of a lane's copies that are not yet in one.
    CloseGroup,
    /// Waits for all groups except the last `but`, or for all copies.
    AwaitCopies {
        but: Option<u32>,
    },
    /// Makes an mbarrier wait for all earlier copies of a lane.
    ArriveAfterCopies {
        at: Address,
        /// The arrival is one more than the mbarrier expects.
        counted: bool,
    },
    /// Copies bytes asynchronously from global to shared memory, counted by an mbarrier.
    BulkCopy {
        to: Address,
        from: BulkSource,
        at: Address,
        /// The mask of the cluster's blocks that the copy writes to (multicast).
        blocks: Option<Slot>,
    },
    Mbarrier {
        action: MbarrierAction,
        at: Address,
    },
    Fence(Fence),
    /// Loads one, two or four matrices of 8 by 8 16-bit numbers.
    LoadMatrices {
        to: Box<[Slot]>,
        from: Address,
        transposed: bool,
        /// All lanes.
        members: Slot,
    },
    /// Stores one, two or four matrices of 8 by 8 16-bit numbers.
    StoreMatrices {
        to: Address,
        from: Box<[Slot]>,
        transposed: bool,
        /// All lanes.
        members: Slot,
    },
    /// An instruction of a warp group for its asynchronous products.
    WarpGroup {
        action: WarpGroupAction,
        /// All lanes of a warp.
        members: Slot,
    },
    /// An instruction of a warp for tensor memory.
    Tensor {
        action: TensorAction,
        /// All lanes of a warp.
        members: Slot,
    },
    /// An asynchronous instruction of one thread for tensor memory.
    Pipe {
        action: PipeAction,
        /// The instruction is for a pair of blocks.
        pair: bool,
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
    /// Elects a lane, the same one for every election with the same member mask.
    Elect {
        /// Receives the lane.
        to: Slot,
        /// Is true in the elected lane.
        elected: Slot,
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
    /// A product with block scales.
    MultiplyScaled {
        matrices: Box<ScaledMatrices>,
        /// All lanes.
        members: Slot,
    },
    WarpBarrier {
        members: Slot,
    },
    /// Arrives at the cluster's barrier, or waits there.
    ClusterBarrier {
        waits: bool,
        /// All lanes.
        members: Slot,
    },
    /// Maps an address of shared memory to the corresponding one in a block of the cluster.
    MapAddress {
        to: Slot,
        from: Slot,
        rank: Slot,
    },
    Barrier {
        number: Slot,
        /// The number of threads, or [`NONE`] for the whole block.
        count: Slot,
        aligned: bool,
    },
    /// Has no effect in the executor.
    Nothing,
    Exit,
    Trap,
}

impl std::fmt::Debug for Op {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Op")
    }
}

/// The registers of `mma` with 16 rows, 8 columns and 16 products, in the ISA's order: D = A·B + C.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Matrices {
    pub(crate) element: Multiplicand,
    pub(crate) d: [Slot; 4],
    pub(crate) a: [Slot; 4],
    pub(crate) b: [Slot; 2],
    pub(crate) c: [Slot; 4],
}

/// The registers of `mma` with block scales, 16 rows, 8 columns and 64 products: D = A·B + C.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ScaledMatrices {
    /// NVFP4, with four scales per row, or MXFP4, with two.
    pub(crate) format: Format,
    pub(crate) d: [Slot; 4],
    pub(crate) a: [Slot; 4],
    pub(crate) b: [Slot; 2],
    pub(crate) c: [Slot; 4],
    pub(crate) scales_a: Scales,
    pub(crate) scales_b: Scales,
}

/// The block scales of a matrix.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scales {
    pub(crate) word: Slot,
    /// The first byte to use of each word.
    pub(crate) byte: Slot,
    /// Selects the lanes whose words are used.
    pub(crate) thread: Slot,
}

/// The source of a bulk copy.
#[derive(Clone, Debug)]
pub(crate) enum BulkSource {
    Bytes {
        from: Address,
        bytes: Slot,
    },
    /// A box of a tensor.
    Tensor {
        /// The address of the tensor map, which is generic.
        map: Address,
        /// The coordinates of the box, innermost first.
        corner: Box<[Slot]>,
    },
}

/// An operation on an mbarrier, with its register operands.
#[derive(Clone, Copy, Debug)]
pub(crate) enum MbarrierAction {
    /// Initializes the mbarrier with this number of arrivals per phase.
    Initialise(Slot),
    /// Ends the mbarrier.
    Invalidate,
    Arrive,
    /// Arrives and expects this number of bytes.
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
    /// Orders a thread's writes before asynchronous accesses.
    Proxy,
    /// Orders mbarrier initializations before asynchronous accesses.
    MbarrierInit,
    /// Orders accesses between the blocks of a GPU.
    Device,
    /// Orders a thread's accesses to tensor memory before a later synchronization.
    TensorBefore,
    /// Orders a thread's accesses to tensor memory after an earlier synchronization.
    TensorAfter,
}

/// Instructions of `wgmma`.
#[derive(Debug)]
pub(crate) enum WarpGroupAction {
    Fence,
    Commit,
    /// Waits for all groups except the last ones of this number.
    Await(u32),
    Multiply(Box<GroupMatrices>),
}

/// The operands of `wgmma.mma_async`: 64 rows, 32 bytes of factors, and four columns per two
/// registers of D.
#[derive(Clone, Debug)]
pub(crate) struct GroupMatrices {
    pub(crate) element: Multiplicand,
    pub(crate) d: Box<[Slot]>,
    pub(crate) a: FirstMatrix,
    /// The descriptor of B.
    pub(crate) b: Slot,
    /// Whether the product is added to D.
    pub(crate) adds: Guard,
}

/// An address in tensor memory: the lane in the upper half, the column in the lower one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TensorAddress {
    pub(crate) base: Slot,
    pub(crate) offset: u32,
}

/// Instructions for tensor memory that a whole warp executes.
#[derive(Debug)]
pub(crate) enum TensorAction {
    /// Allocates columns and stores their address in shared memory.
    Allocate {
        to: Address,
        columns: Slot,
        pair: bool,
    },
    /// Promises that the block allocates no more.
    Relinquish,
    Free {
        at: TensorAddress,
        columns: Slot,
        pair: bool,
    },
    Load {
        shape: Fragment,
        to: Box<[Slot]>,
        from: TensorAddress,
    },
    Store {
        shape: Fragment,
        to: TensorAddress,
        from: Box<[Slot]>,
    },
    AwaitLoads,
    AwaitStores,
}

/// Asynchronous instructions for tensor memory that one thread executes.
#[derive(Debug)]
pub(crate) enum PipeAction {
    Multiply(TensorMatrices),
    /// Copies rows from shared memory.
    Copy {
        to: TensorAddress,
        /// The descriptor of the rows.
        from: Slot,
        shape: CopyShape,
    },
    /// Arrives at an mbarrier once all earlier instructions are complete.
    Commit {
        at: Address,
        /// The mask of the cluster's blocks whose mbarriers receive an arrival.
        blocks: Option<Slot>,
    },
}

/// The rows that `tcgen05.cp` copies.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CopyShape {
    pub(crate) rows: usize,
    /// Pieces of 16 bytes per row.
    pub(crate) pieces: usize,
}

/// The operands of `tcgen05.mma` with block scales.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TensorMatrices {
    pub(crate) format: Format,
    pub(crate) d: TensorAddress,
    /// The descriptors of A and B in shared memory.
    pub(crate) a: Slot,
    pub(crate) b: Slot,
    /// The instruction descriptor.
    pub(crate) kind: Slot,
    pub(crate) scales_a: TensorAddress,
    pub(crate) scales_b: TensorAddress,
    /// Whether the product is added to D.
    pub(crate) adds: Guard,
}

/// Where the rows of a product of a warp group are.
#[derive(Clone, Copy, Debug)]
pub(crate) enum FirstMatrix {
    Registers([Slot; 4]),
    /// In shared memory, by a descriptor.
    Shared(Slot),
}

impl FirstMatrix {
    /// The registers of the rows.
    pub(crate) fn registers(&self) -> &[Slot] {
        match self {
            Self::Registers(slots) => slots,
            Self::Shared(_) => &[],
        }
    }
}

/// Functions of two predicates.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Logic {
    And,
    Or,
    Xor,
    /// Returns the first predicate.
    First,
}

/// The function that computes an atomic operation's new value from the old value and the operand.
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
    /// Gives the second operand if the old value equals the first one.
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
