//! Launches: the options of a launch, its arguments, and the statistics that it returns.

use crate::approximation::Approximation;
use crate::memory::Buffer;

/// A one-dimensional grid and how it is executed.
#[derive(Clone, Debug)]
pub struct Launch {
    /// Thread blocks.
    pub blocks: u32,
    /// Threads in a block, 1 to 1024.
    pub threads: u32,
    /// Thread blocks of a cluster, which divide the number of all.
    pub cluster: u32,
    /// Bytes of dynamic shared memory.
    pub shared: u32,
    /// The order in which concurrent lanes and warps run.
    pub schedule: Schedule,
    /// The results of approximate instructions.
    pub approximation: Approximation,
    /// True to look for races.
    pub races: bool,
    /// Warp instructions after which a launch counts as hanging.
    pub limit: u64,
}

impl Default for Launch {
    fn default() -> Self {
        Self {
            blocks: 1,
            threads: 32,
            cluster: 1,
            shared: 0,
            schedule: Schedule::LowestFirst,
            approximation: Approximation::Nearest,
            races: true,
            limit: 200_000_000,
        }
    }
}

impl Launch {
    /// So many blocks of so many threads, the rest by default.
    pub fn new(blocks: u32, threads: u32) -> Self {
        Self { blocks, threads, ..Self::default() }
    }

    /// Sets the thread blocks of a cluster.
    pub fn cluster(self, cluster: u32) -> Self {
        Self { cluster, ..self }
    }

    /// Sets the bytes of dynamic shared memory.
    pub fn shared(self, shared: u32) -> Self {
        Self { shared, ..self }
    }

    /// Sets the schedule.
    pub fn schedule(self, schedule: Schedule) -> Self {
        Self { schedule, ..self }
    }

    /// Sets the approximations.
    pub fn approximation(self, approximation: Approximation) -> Self {
        Self { approximation, ..self }
    }

    /// Switches the race detector on or off.
    pub fn races(self, races: bool) -> Self {
        Self { races, ..self }
    }

    /// Sets the limit of warp instructions.
    pub fn limit(self, limit: u64) -> Self {
        Self { limit, ..self }
    }
}

/// The order in which what is concurrent runs: lanes of a warp that went different ways, warps of a block,
/// blocks. A correct kernel gives the same results in every order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Schedule {
    /// The lanes that are least far in the text; warps and blocks one after the other. Branches join as early
    /// as they can.
    #[default]
    LowestFirst,
    /// The lanes that are farthest in the text; the last warp and the last block first. Branches join as late
    /// as they can.
    HighestFirst,
    /// An order by chance, from this seed, with a change every few instructions.
    Random(u64),
}

/// A kernel's argument.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Argument {
    /// The bytes of the parameter, as many as it has.
    Bytes(Vec<u8>),
}

impl Argument {
    /// An argument from the bytes of a value, a `repr(C)` structure say.
    pub fn bytes(bytes: impl Into<Vec<u8>>) -> Self {
        Self::Bytes(bytes.into())
    }

    /// An argument from a value as it lies in memory, a `repr(C)` structure of numbers without padding.
    ///
    /// # Safety
    ///
    /// Every byte of the value must be initialised.
    pub unsafe fn of<T: Copy>(value: &T) -> Self {
        // SAFETY: as promised, with nothing left out.
        unsafe { Self::of_padded(value, &[]) }
    }

    /// The argument of a value as it lies in memory, a `repr(C)` structure of numbers whose bytes at these
    /// offsets are padding. Odd bytes take their place, for a kernel may load them but must not use them.
    ///
    /// # Safety
    ///
    /// Every byte of the value outside of the padding must be initialised.
    pub unsafe fn of_padded<T: Copy>(value: &T, padding: &[usize]) -> Self {
        let start = std::ptr::from_ref(value).cast::<u8>();
        let byte = |offset: usize| {
            if padding.contains(&offset) {
                return 0xa5;
            }
            // SAFETY: `offset` is below the value's size, the value lives, and the caller promises that the
            // byte is initialised.
            unsafe { start.add(offset).read() }
        };
        Self::Bytes((0..size_of::<T>()).map(byte).collect())
    }

    pub(crate) fn as_bytes(&self) -> &[u8] {
        let Self::Bytes(bytes) = self;
        bytes
    }
}

macro_rules! arguments {
    ($($number:ty)+) => {
        $(
            impl From<$number> for Argument {
                fn from(number: $number) -> Self {
                    Self::Bytes(number.to_le_bytes().to_vec())
                }
            }
        )+
    };
}

arguments!(u32 i32 u64 i64 f32);

impl From<Buffer> for Argument {
    fn from(buffer: Buffer) -> Self {
        buffer.address().into()
    }
}

/// Counts of a launch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Statistics {
    /// Instructions, each counted once for every lane that executed it.
    pub lane_instructions: u64,
    /// Instructions, each counted once for a warp, or for its lanes that went the same way.
    pub warp_instructions: u64,
    /// The static instructions that were executed.
    pub coverage: Coverage,
}

impl Statistics {
    /// Adds another launch of the same kernel.
    pub fn merge(&mut self, other: &Self) {
        self.lane_instructions += other.lane_instructions;
        self.warp_instructions += other.warp_instructions;
        self.coverage.merge(&other.coverage);
    }
}

/// The static instructions of a kernel that were executed, by their index, which
/// [`crate::Kernel::instruction`] takes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Coverage {
    pub(crate) seen: Vec<u8>,
}

/// Some lane executed the instruction; its guard held, if it has one.
pub(crate) const EXECUTED: u8 = 1;
/// Some lane came by and its guard did not hold.
pub(crate) const SKIPPED: u8 = 2;

impl Coverage {
    /// Adds another launch of the same kernel.
    pub fn merge(&mut self, other: &Self) {
        self.seen.resize(self.seen.len().max(other.seen.len()), 0);
        for (seen, other) in self.seen.iter_mut().zip(&other.seen) {
            *seen |= other;
        }
    }

    /// Returns whether some lane executed the instruction, its guard holding.
    pub fn executed(&self, index: usize) -> bool {
        self.seen.get(index).is_some_and(|seen| seen & EXECUTED != 0)
    }

    /// Returns whether some lane came to the instruction and its guard did not hold: a branch that was not
    /// taken.
    pub fn skipped(&self, index: usize) -> bool {
        self.seen.get(index).is_some_and(|seen| seen & SKIPPED != 0)
    }

    /// The instructions that no lane executed.
    pub fn never_executed(&self) -> impl Iterator<Item = usize> {
        (0..self.seen.len()).filter(|&index| !self.executed(index))
    }
}
