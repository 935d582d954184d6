//! Faults: actions of a kernel that it must not take.

use std::fmt;

/// A fault: where, who, and what.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The kernel.
    pub kernel: String,
    /// The instruction's line in the PTX, from 1; 0 before the first.
    pub line: u32,
    /// The instruction.
    pub instruction: String,
    /// The thread block.
    pub block: u32,
    /// The thread in its block; for a deadlock the first that waits.
    pub thread: u32,
    /// The kind of fault.
    pub kind: Box<FaultKind>,
}

/// Kinds of faults.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FaultKind {
    /// The launch does not fit the kernel.
    Launch(String),
    /// No buffer holds all bytes of the access.
    OutOfBounds(Access),
    /// The address is not a multiple of the access' size.
    Misaligned(Access),
    /// A byte was read that nobody wrote.
    Uninitialised(Access),
    /// A byte was both written in this launch and read by `ld.global.nc`, which may only read what does not
    /// change.
    NotConstant(Access),
    /// A copy to the byte is under way: nobody may access it before the thread that began the copy has waited
    /// for it.
    InFlight(Access),
    /// A thread exited without having waited for a copy, whose instruction is that of the fault.
    NeverAwaited(Access),
    /// A copy was to read more bytes than it writes.
    CopySize {
        /// The number of bytes to read.
        read: usize,
        /// The number of bytes to write.
        bytes: usize,
    },
    /// Two threads accessed the same byte, one at least wrote it, and nothing ordered them.
    Race {
        /// The later access, by the thread of the fault.
        access: Access,
        /// The earlier one's block.
        block: u32,
        /// The earlier one's thread in its block.
        thread: u32,
        /// The earlier one's line.
        line: u32,
        /// The earlier one's instruction.
        instruction: String,
    },
    /// An asynchronous product or a bulk copy touched what another instruction wrote, and the thread that
    /// wrote it did not execute `fence.proxy.async` before what orders the two.
    Unfenced {
        /// The access, by the thread of the fault.
        access: Access,
        /// The write's thread in its block.
        thread: u32,
        /// The write's line.
        line: u32,
        /// The write's instruction.
        instruction: String,
    },
    /// An mbarrier was used in a way that it does not allow, or its bytes by an instruction that is not for
    /// mbarriers.
    Mbarrier(Access, &'static str),
    /// A bulk copy is of a number of bytes that is no multiple of 16.
    BulkSize(usize),
    /// A matrix descriptor does not describe a matrix as this instruction takes it.
    Descriptor(u64, &'static str),
    /// A register of an asynchronous product was touched before a thread waited for the product.
    PendingRegister(String),
    /// A register was accessed since the last `wgmma.fence`, and is one of an asynchronous product now.
    UnfencedRegister(String),
    /// Threads that must do the same do not.
    NotUniform(&'static str),
    /// A thread exited without having waited for a product, whose instruction is that of the fault.
    ProductNeverAwaited,
    /// A register was read before it was written.
    UnwrittenRegister(String),
    /// The cluster has no such block, or it has ended, and its shared memory with it.
    NoSuchBlock {
        /// Its number in the cluster.
        rank: u32,
    },
    /// No thread of the block can go on.
    Deadlock(String),
    /// A shuffle's source lane takes no part in it.
    InactiveSource {
        /// The source lane.
        lane: u32,
    },
    /// Some lanes of the warp do not execute an instruction that all must execute.
    IncompleteWarp {
        /// Lanes that exited, or that the launch does not have.
        missing: u32,
    },
    /// A lane is not in the member mask of the instruction that it executes.
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
    /// The limit of [`crate::Launch::limit`] was reached.
    Hanging,
}

/// An access to memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Access {
    /// The memory.
    pub space: Space,
    /// The first byte's address.
    pub address: u64,
    /// The number of bytes.
    pub bytes: usize,
    /// The buffer in or nearest to which it lies.
    pub buffer: Option<String>,
    /// The first byte from that buffer's start, or the first bad one where single bytes are.
    pub offset: i64,
    /// The length of that buffer.
    pub len: usize,
}

/// A memory (ISA 5.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Space {
    /// Global memory.
    Global,
    /// A block's shared memory.
    Shared,
}

impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { space, address, bytes, buffer, offset, len } = self;
        let space = match space {
            Space::Global => "global",
            Space::Shared => "shared",
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
            Self::Uninitialised(access) => write!(f, "nobody wrote what is read: {access}"),
            Self::NotConstant(access) => {
                write!(f, "written in this launch and read by ld.global.nc: {access}")
            }
            Self::InFlight(access) => write!(f, "a copy to what is accessed is under way: {access}"),
            Self::NeverAwaited(access) => write!(f, "a copy that its thread never waited for: {access}"),
            Self::CopySize { read, bytes } => write!(f, "{read} bytes to read for a copy of {bytes}"),
            Self::Race { access, block, thread, line, instruction } => write!(
                f,
                "race with thread {thread} of block {block} at line {line}, `{instruction}`: {access}"
            ),
            Self::Unfenced { access, thread, line, instruction } => write!(
                f,
                "no fence.proxy.async behind thread {thread}'s line {line}, `{instruction}`: {access}"
            ),
            Self::Mbarrier(access, problem) => write!(f, "{problem}: {access}"),
            Self::BulkSize(bytes) => write!(f, "a bulk copy of {bytes} bytes, which is no multiple of 16"),
            Self::Descriptor(descriptor, problem) => {
                write!(f, "the matrix descriptor {descriptor:#018x}: {problem}")
            }
            Self::PendingRegister(name) => {
                write!(f, "register {name} is of an asynchronous product that nobody waited for")
            }
            Self::UnfencedRegister(name) => {
                write!(f, "no wgmma.fence between an access to register {name} and the product")
            }
            Self::NotUniform(what) => write!(f, "threads that must agree do not: {what}"),
            Self::ProductNeverAwaited => f.write_str("a product that its threads never waited for"),
            Self::UnwrittenRegister(name) => write!(f, "register {name} is read before it is written"),
            Self::NoSuchBlock { rank } => {
                write!(f, "the cluster has no block {rank} at work, whose shared memory it could be")
            }
            Self::Deadlock(message) => write!(f, "deadlock: {message}"),
            Self::InactiveSource { lane } => write!(f, "the source, lane {lane}, takes no part"),
            Self::IncompleteWarp { missing } => {
                write!(f, "all lanes of the warp must take part, and {missing:#010x} do not")
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

/// A fault of a lane, before it is known where.
#[derive(Debug)]
pub(crate) struct Trap {
    pub(crate) lane: u32,
    pub(crate) kind: Box<FaultKind>,
}

/// The result of a step, or a lane's fault.
pub(crate) type Step<T = ()> = Result<T, Trap>;

/// A fault of this lane.
#[cold]
pub(crate) fn trap<T>(lane: u32, kind: impl Into<Box<FaultKind>>) -> Step<T> {
    Err(Trap { lane, kind: kind.into() })
}
