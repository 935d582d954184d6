//! Faults: invalid actions of a running kernel.

use std::fmt;

/// A fault, with its instruction and thread.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The kernel.
    pub kernel: String,
    /// The instruction's line in the PTX, from 1, or 0 before the first instruction.
    pub line: u32,
    /// The instruction.
    pub instruction: String,
    /// The thread block.
    pub block: u32,
    /// The thread in its block. For a deadlock, the first thread that waits.
    pub thread: u32,
    /// The kind of fault.
    pub kind: Box<FaultKind>,
}

/// Kinds of faults.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FaultKind {
    /// The grid, shared memory or arguments do not match the kernel.
    Launch(String),
    /// No buffer holds all bytes of the access.
    OutOfBounds(Access),
    /// The address is not a multiple of the access's size.
    Misaligned(Access),
    /// A byte was read that was never written.
    Uninitialised(Access),
    /// A byte was written in this launch and read by `ld.global.nc` or as part of a tensor map,
    /// which must be in constant memory.
    NotConstant(Access),
    /// A copy to the byte is in flight.
    ///
    /// No thread may access it before the thread that issued the copy has waited for it.
    InFlight(Access),
    /// A thread exited without waiting for a copy. The fault's instruction is the copy.
    NeverAwaited(Access),
    /// A copy would read more bytes than it writes.
    CopySize {
        /// The number of bytes to read.
        read: usize,
        /// The number of bytes to write.
        bytes: usize,
    },
    /// Two threads accessed the same byte, at least one wrote it, and nothing ordered the accesses.
    Race {
        /// The later access, by the fault's thread.
        access: Access,
        /// The earlier access's block.
        block: u32,
        /// The earlier access's thread in its block.
        thread: u32,
        /// The earlier access's line.
        line: u32,
        /// The earlier access's instruction.
        instruction: String,
    },
    /// An asynchronous product or bulk copy accessed a byte without a proxy fence.
    ///
    /// Another instruction wrote the byte. The writing thread did not execute `fence.proxy.async`
    /// before the synchronization that orders the two.
    Unfenced {
        /// The access, by the fault's thread.
        access: Access,
        /// The write's thread in its block.
        thread: u32,
        /// The write's line.
        line: u32,
        /// The write's instruction.
        instruction: String,
    },
    /// An access to tensor memory without `tcgen05.fence`.
    ///
    /// An instruction of another thread accessed the same word. Synchronization orders the two, but
    /// the first thread did not execute `tcgen05.fence::before_thread_sync` before it, or the
    /// second did not execute `tcgen05.fence::after_thread_sync` after it.
    UnfencedTensor {
        /// The access, by the fault's thread.
        access: Access,
        /// The earlier access's thread in its block.
        thread: u32,
        /// The earlier access's line.
        line: u32,
        /// The earlier access's instruction.
        instruction: String,
    },
    /// Tensor memory was misused.
    TensorMemory(&'static str),
    /// The instruction descriptor of `tcgen05.mma` is invalid.
    InstructionDescriptor(u32, &'static str),
    /// An mbarrier was misused, or another instruction accessed its bytes.
    Mbarrier(Access, &'static str),
    /// The size of a bulk copy is not a multiple of 16.
    BulkSize(usize),
    /// The tensor map at this generic address is invalid for this instruction.
    TensorMap(u64, &'static str),
    /// A matrix descriptor is invalid for this instruction.
    Descriptor(u64, &'static str),
    /// A selector of block scales does not exist for this instruction.
    ScaleSelector {
        /// The first byte of the words.
        byte: u32,
        /// The lane or the pair of lanes among four.
        thread: u32,
    },
    /// A register of an asynchronous product was accessed before the wait for the product.
    PendingRegister(String),
    /// A register of an asynchronous product was accessed after the last `wgmma.fence`.
    UnfencedRegister(String),
    /// Threads that must execute the same action differ.
    NotUniform(&'static str),
    /// A thread exited without waiting for a product. The fault's instruction is the product.
    ProductNeverAwaited,
    /// A register was read before it was written.
    UnwrittenRegister(String),
    /// The cluster has no such block, or the block has ended and its shared memory is gone.
    NoSuchBlock {
        /// Its number in the cluster.
        rank: u32,
    },
    /// No thread of the block can continue.
    Deadlock(String),
    /// A shuffle's source lane does not execute the shuffle.
    InactiveSource {
        /// The source lane.
        lane: u32,
    },
    /// Some lanes do not execute an instruction that the whole warp must execute.
    IncompleteWarp {
        /// Lanes that exited or were never launched.
        missing: u32,
    },
    /// A lane executes an instruction whose member mask excludes it.
    NotAMember {
        /// The mask.
        mask: u32,
    },
    /// A jump table has no such entry.
    JumpTable {
        /// The index.
        index: u32,
        /// The number of entries.
        entries: usize,
    },
    /// `trap` was executed.
    Trap,
    /// The launch reached [`crate::Launch::limit`].
    Hanging,
}

/// An access to memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Access {
    /// The state space.
    pub space: Space,
    /// The first byte's address.
    pub address: u64,
    /// The number of bytes.
    pub bytes: usize,
    /// The buffer that contains the access, or the nearest one.
    pub buffer: Option<String>,
    /// The offset of the access in that buffer, or of the first faulty byte if single bytes are
    /// faulty.
    pub offset: i64,
    /// The length of that buffer.
    pub len: usize,
}

/// A state space (ISA 5.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Space {
    /// Global memory.
    Global,
    /// A block's shared memory.
    Shared,
    /// A block's tensor memory.
    Tensor,
}

impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { space, address, bytes, buffer, offset, len } = self;
        let space = match space {
            Space::Global => "global",
            Space::Shared => "shared",
            Space::Tensor => "tensor",
        };
        write!(f, "{bytes} bytes at {space} address {address:#x}")?;
        match buffer {
            Some(buffer) => write!(f, ", offset {offset} of `{buffer}` with its {len} bytes"),
            None => f.write_str(", which is in no buffer"),
        }
    }
}

impl fmt::Display for FaultKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Launch(message) => f.write_str(message),
            Self::OutOfBounds(access) => write!(f, "out of bounds: {access}"),
            Self::Misaligned(access) => write!(f, "misaligned: {access}"),
            Self::Uninitialised(access) => write!(f, "read of unwritten bytes: {access}"),
            Self::NotConstant(access) => {
                write!(f, "written in this launch and read as constant memory: {access}")
            }
            Self::InFlight(access) => write!(f, "access to the destination of a copy in flight: {access}"),
            Self::NeverAwaited(access) => write!(f, "a copy that its thread never waited for: {access}"),
            Self::CopySize { read, bytes } => write!(f, "{read} bytes to read for a copy of {bytes}"),
            Self::Race { access, block, thread, line, instruction } => write!(
                f,
                "race with thread {thread} of block {block} at line {line}, `{instruction}`: {access}"
            ),
            Self::Unfenced { access, thread, line, instruction } => write!(
                f,
                "no fence.proxy.async after thread {thread}'s line {line}, `{instruction}`: {access}"
            ),
            Self::UnfencedTensor { access, thread, line, instruction } => {
                write!(f, "no tcgen05.fence after thread {thread}'s line {line}, `{instruction}`: {access}")
            }
            Self::TensorMemory(problem) => write!(f, "tensor memory: {problem}"),
            Self::InstructionDescriptor(descriptor, problem) => {
                write!(f, "the instruction descriptor {descriptor:#010x}: {problem}")
            }
            Self::Mbarrier(access, problem) => write!(f, "{problem}: {access}"),
            Self::BulkSize(bytes) => write!(f, "a bulk copy of {bytes} bytes, which is not a multiple of 16"),
            Self::TensorMap(address, problem) => write!(f, "the tensor map at {address:#x}: {problem}"),
            Self::Descriptor(descriptor, problem) => {
                write!(f, "the matrix descriptor {descriptor:#018x}: {problem}")
            }
            Self::ScaleSelector { byte, thread } => {
                write!(f, "the block scales have no selector {{{byte}, {thread}}}")
            }
            Self::PendingRegister(name) => {
                write!(f, "register {name} belongs to an asynchronous product without a wait")
            }
            Self::UnfencedRegister(name) => {
                write!(f, "no wgmma.fence between an access to register {name} and the product")
            }
            Self::NotUniform(what) => write!(f, "threads that must agree differ: {what}"),
            Self::ProductNeverAwaited => f.write_str("a product that its threads never waited for"),
            Self::UnwrittenRegister(name) => write!(f, "register {name} is read before it is written"),
            Self::NoSuchBlock { rank } => {
                write!(f, "the cluster has no running block {rank}")
            }
            Self::Deadlock(message) => write!(f, "deadlock: {message}"),
            Self::InactiveSource { lane } => write!(f, "the source lane {lane} does not execute the shuffle"),
            Self::IncompleteWarp { missing } => {
                write!(f, "all lanes of the warp must execute it, but {missing:#010x} do not")
            }
            Self::NotAMember { mask } => write!(f, "the lane is not in its member mask {mask:#010x}"),
            Self::JumpTable { index, entries } => write!(f, "index {index} into a table of {entries}"),
            Self::Trap => f.write_str("trap"),
            Self::Hanging => f.write_str("the limit of instructions was reached"),
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kernel, line, instruction, block, thread, kind } = self;
        if *line == 0 {
            return write!(f, "{kernel}: {kind}");
        }
        write!(f, "{kernel}, line {line}, `{instruction}`, block {block}, thread {thread}: {kind}")
    }
}

impl std::error::Error for Fault {}

/// A fault of a lane, before its instruction and block are known.
#[derive(Debug)]
pub(crate) struct Trap {
    pub(crate) lane: u32,
    pub(crate) kind: Box<FaultKind>,
}

/// The result of a step, or a lane's fault.
pub(crate) type Step<T = ()> = Result<T, Trap>;

/// Returns a fault of this lane.
#[cold]
pub(crate) fn trap<T>(lane: u32, kind: impl Into<Box<FaultKind>>) -> Step<T> {
    Err(Trap { lane, kind: kind.into() })
}
