//! Launch options, kernel arguments and launch statistics.

use crate::approximation::Approximation;
use crate::memory::Buffer;
use crate::tensor_map::TensorMap;

/// A one-dimensional grid, and how to execute it.
#[derive(Clone, Debug)]
pub struct Launch {
    /// Number of thread blocks.
    pub blocks: u32,
    /// Threads per block, 1 to 1024.
    pub threads: u32,
    /// Thread blocks per cluster. It must divide `blocks`.
    pub cluster: u32,
    /// Bytes of dynamic shared memory.
    pub shared: u32,
    /// The order of concurrent lanes and warps.
    pub schedule: Schedule,
    /// The results of approximate instructions.
    pub approximation: Approximation,
    /// Enables the race detector.
    pub races: bool,
    /// Requires the fences around `tcgen05` instructions that the ISA requires.
    ///
    /// Triton 3.9 leaves them out.
    pub tensor_fences: bool,
    /// Number of warp instructions after which a launch counts as hanging.
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
            tensor_fences: true,
            limit: 200_000_000,
        }
    }
}

impl Launch {
    /// Makes a launch of `blocks` blocks of `threads` threads, with defaults for the rest.
    pub fn new(blocks: u32, threads: u32) -> Self {
        Self { blocks, threads, ..Self::default() }
    }

    /// Sets the thread blocks per cluster.
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

    /// Sets the approximation.
    pub fn approximation(self, approximation: Approximation) -> Self {
        Self { approximation, ..self }
    }

    /// Enables or disables the race detector.
    pub fn races(self, races: bool) -> Self {
        Self { races, ..self }
    }

    /// Requires the fences around `tcgen05` instructions, or not.
    pub fn tensor_fences(self, tensor_fences: bool) -> Self {
        Self { tensor_fences, ..self }
    }

    /// Sets the limit of warp instructions.
    pub fn limit(self, limit: u64) -> Self {
        Self { limit, ..self }
    }
}

/// The order of concurrent lanes, warps and blocks.
///
/// Lanes are concurrent after a divergent branch. A correct kernel gives the same results in every
/// order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Schedule {
    /// Runs the lanes with the lowest program counter first, and warps and blocks in order.
    ///
    /// Divergent lanes reconverge as early as possible.
    #[default]
    LowestFirst,
    /// Runs the lanes with the highest program counter first, and the last warp and block first.
    ///
    /// Divergent lanes reconverge as late as possible.
    HighestFirst,
    /// Runs in a random order from this seed, with a change every few instructions.
    Random(u64),
}

/// A kernel argument.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Argument {
    /// The bytes of the parameter. The length must match.
    Bytes(Vec<u8>),
}

impl Argument {
    /// Makes an argument from the bytes of a value, for example a `repr(C)` structure.
    pub fn bytes(bytes: impl Into<Vec<u8>>) -> Self {
        Self::Bytes(bytes.into())
    }

    /// Makes an argument from a value's memory, for example a `repr(C)` structure without padding.
    ///
    /// # Safety
    ///
    /// Every byte of the value must be initialized.
    pub unsafe fn of<T: Copy>(value: &T) -> Self {
        // SAFETY: the caller guarantees that every byte of `value` is initialized. No byte is
        // declared as padding.
        unsafe { Self::of_padded(value, &[]) }
    }

    /// Makes an argument from the memory of a value with padding at the offsets in `padding`.
    ///
    /// Padding bytes are replaced by a fixed odd value: a kernel may load them but must not use
    /// them.
    ///
    /// # Safety
    ///
    /// Every byte of the value outside `padding` must be initialized.
    pub unsafe fn of_padded<T: Copy>(value: &T, padding: &[usize]) -> Self {
        let start = std::ptr::from_ref(value).cast::<u8>();
        let byte = |offset: usize| {
            if padding.contains(&offset) {
                return 0xa5;
            }
            // SAFETY: `offset` is below the size of `value`, which is borrowed for this call. The
            // caller guarantees that the byte is initialized.
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

impl From<TensorMap> for Argument {
    fn from(map: TensorMap) -> Self {
        Self::bytes(map.encode())
    }
}

/// Counts of a launch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Statistics {
    /// Executed instructions, counted once per executing lane.
    pub lane_instructions: u64,
    /// Executed instructions, counted once per warp, or once per divergent group of lanes.
    pub warp_instructions: u64,
    /// The static instructions that were executed.
    pub coverage: Coverage,
}

impl Statistics {
    /// Adds the counts of another launch of the same kernel.
    pub fn merge(&mut self, other: &Self) {
        self.lane_instructions += other.lane_instructions;
        self.warp_instructions += other.warp_instructions;
        self.coverage.merge(&other.coverage);
    }
}

/// Which static instructions of a kernel were executed.
///
/// Indices are the same as in [`crate::Kernel::instruction`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Coverage {
    pub(crate) seen: Vec<u8>,
}

/// Some lane executed the instruction. Its guard, if any, was true.
pub(crate) const EXECUTED: u8 = 1;
/// Some lane reached the instruction while its guard was false.
pub(crate) const SKIPPED: u8 = 2;

impl Coverage {
    /// Adds the coverage of another launch of the same kernel.
    pub fn merge(&mut self, other: &Self) {
        self.seen.resize(self.seen.len().max(other.seen.len()), 0);
        for (seen, other) in self.seen.iter_mut().zip(&other.seen) {
            *seen |= other;
        }
    }

    /// Returns whether some lane executed the instruction with its guard, if any, true.
    pub fn executed(&self, index: usize) -> bool {
        self.seen.get(index).is_some_and(|seen| seen & EXECUTED != 0)
    }

    /// Returns whether some lane reached the instruction with its guard false, as at an untaken
    /// branch.
    pub fn skipped(&self, index: usize) -> bool {
        self.seen.get(index).is_some_and(|seen| seen & SKIPPED != 0)
    }

    /// Returns the instructions that no lane executed.
    pub fn never_executed(&self) -> impl Iterator<Item = usize> {
        (0..self.seen.len()).filter(|&index| !self.executed(index))
    }
}
