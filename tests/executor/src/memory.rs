//! Global memory as named buffers and shared memory as named variables, with a state for every byte.

use std::ops::Range;

use crate::error::{Error, Result};
use crate::fault::{Access, FaultKind, Space};
use crate::program::{GlobalPlace, Manner, SharedPlace};
use crate::race::{Cells, Id, Races};

/// Every buffer has a region of its own of so many addresses, so that an address tells its buffer, and
/// none lies near another.
const REGION_BITS: u32 = 36;
/// The start of the first region.
const FIRST_REGION: u64 = 1 << 40;
/// Unmapped addresses in front of a buffer, in its region.
const GAP: u64 = 1 << 24;
/// The start of the first region of a module's variable, far from the addresses that a GPU gives.
const FIRST_VARIABLE: u64 = 1 << 60;
/// Every block of a cluster has so many addresses of shared memory: all that a register has.
const SHARED_BITS: u32 = 32;
/// The bits of an address that say where it is in a block's shared memory; those above have the block's number in its cluster. NVIDIA's
/// assembler has such addresses, too.
pub(crate) const OFFSET_BITS: u32 = 24;
/// The alignment of `cudaMalloc`.
const ALIGNMENT: u64 = 256;

/// The byte was written, by the host or by a kernel.
const WRITTEN: u8 = 1;
/// The byte was written in this launch.
const WRITTEN_NOW: u8 = 2;
/// The byte was read by `ld.global.nc` in this launch.
const READ_AS_CONSTANT: u8 = 4;
/// A copy to it is under way; then it counts as not written.
const IN_FLIGHT: u8 = 8;
/// The byte is one of an mbarrier; then it counts as not written.
const MBARRIER: u8 = 16;

/// Global memory: buffers at made-up addresses, far from each other.
#[derive(Debug, Default)]
pub struct Memory {
    buffers: Vec<Store>,
    /// The variables of the module that runs; each launch finds zeros.
    variables: Vec<Store>,
    /// Buffers have been placed, so that an address does not tell its buffer.
    placed: bool,
}

/// A buffer, or a variable in shared memory.
#[derive(Debug)]
struct Store {
    name: String,
    address: u64,
    bytes: Bytes,
}

impl Store {
    /// Returns whether all bytes of an access lie in it.
    #[inline]
    fn holds(&self, address: u64, bytes: usize) -> bool {
        let (offset, len) = (address.wrapping_sub(self.address), self.bytes.data.len() as u64);
        offset <= len && bytes as u64 <= len - offset
    }
}

/// A buffer of a [`Memory`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Buffer {
    index: usize,
    address: u64,
}

impl Buffer {
    /// The address of its first byte.
    pub fn address(self) -> u64 {
        self.address
    }
}

impl Memory {
    /// Makes a memory without buffers.
    pub fn new() -> Self {
        Self::default()
    }

    /// A buffer of bytes that nobody wrote, at a multiple of 256.
    pub fn allocate(&mut self, name: &str, len: usize) -> Buffer {
        self.allocate_aligned(name, len, ALIGNMENT)
    }

    /// A buffer of bytes that nobody wrote, at an odd multiple of `alignment`, a power of two: aligned
    /// so far and no further.
    pub fn allocate_aligned(&mut self, name: &str, len: usize, alignment: u64) -> Buffer {
        assert!(alignment.is_power_of_two() && alignment < GAP, "an alignment of {alignment}");
        let index = self.buffers.len();
        let address = FIRST_REGION + ((index as u64) << REGION_BITS) + GAP + alignment;
        self.buffers.push(Store { name: name.into(), address, bytes: Bytes::new(len) });
        Buffer { index, address }
    }

    /// A buffer with these bytes, at a multiple of 256.
    pub fn allocate_from(&mut self, name: &str, bytes: &[u8]) -> Buffer {
        self.allocate_from_aligned(name, bytes, ALIGNMENT)
    }

    /// A buffer with these bytes, at an odd multiple of `alignment`, a power of two.
    pub fn allocate_from_aligned(&mut self, name: &str, bytes: &[u8], alignment: u64) -> Buffer {
        let buffer = self.allocate_aligned(name, bytes.len(), alignment);
        self.write(buffer, 0, bytes);
        buffer
    }

    /// Writes bytes as the host does, between launches.
    pub fn write(&mut self, buffer: Buffer, offset: usize, bytes: &[u8]) {
        let store = &mut self.buffers[buffer.index].bytes;
        store.data[offset..][..bytes.len()].copy_from_slice(bytes);
        store.state[offset..][..bytes.len()].fill(WRITTEN);
    }

    /// A buffer's bytes.
    ///
    /// # Errors
    ///
    /// [`Error::NeverWritten`] if there are bytes that nobody wrote.
    pub fn bytes(&self, buffer: Buffer) -> Result<Vec<u8>> {
        let Store { name, bytes, .. } = &self.buffers[buffer.index];
        let missing = bytes.state.iter().filter(|&state| state & WRITTEN == 0).count();
        match bytes.state.iter().position(|state| state & WRITTEN == 0) {
            Some(offset) => Err(Error::NeverWritten { buffer: name.clone(), offset, bytes: missing }),
            None => Ok(bytes.data.clone()),
        }
    }

    /// A buffer's bytes, with `fill` for those that nobody wrote.
    pub fn bytes_or(&self, buffer: Buffer, fill: u8) -> Vec<u8> {
        let store = &self.buffers[buffer.index].bytes;
        let byte = |(&byte, &state): (&u8, &u8)| if state & WRITTEN == 0 { fill } else { byte };
        store.data.iter().zip(&store.state).map(byte).collect()
    }

    /// The buffers, in the order in which they were allocated.
    pub fn buffers(&self) -> impl Iterator<Item = Buffer> {
        self.buffers.iter().enumerate().map(|(index, store)| Buffer { index, address: store.address })
    }

    /// Moves a buffer to an address of the caller's choice, such as a GPU gave to one like it. Buffers must
    /// not overlap.
    pub fn place(&mut self, buffer: Buffer, address: u64) {
        self.placed = true;
        self.buffers[buffer.index].address = address;
    }

    /// The number of the buffer that an address is in, or near.
    #[inline]
    fn index(&self, address: u64) -> usize {
        if self.placed {
            let inside = |store: &Store| address.wrapping_sub(store.address) < store.bytes.data.len() as u64;
            return self.buffers.iter().position(inside).unwrap_or(usize::MAX);
        }
        (address.wrapping_sub(FIRST_REGION) >> REGION_BITS) as usize
    }

    /// The bytes of a buffer that were written, by the host or by a kernel.
    pub fn written(&self, buffer: Buffer) -> Vec<bool> {
        self.buffers[buffer.index].bytes.state.iter().map(|state| state & WRITTEN != 0).collect()
    }

    /// Forgets what the last launch did. The next one has these variables.
    pub(crate) fn begin_launch(&mut self, variables: &[GlobalPlace]) {
        self.variables.clear();
        for GlobalPlace { name, address, size } in variables {
            let mut bytes = Bytes::new(*size as usize);
            bytes.state.fill(WRITTEN);
            self.variables.push(Store { name: name.clone(), address: *address, bytes });
        }
        for store in &mut self.buffers {
            for state in &mut store.bytes.state {
                *state &= WRITTEN;
            }
            store.bytes.cells = Cells::default();
        }
    }

    /// The bytes that an access is in, and where in them; checked for bounds and alignment.
    #[inline]
    pub(crate) fn locate(
        &mut self,
        address: u64,
        bytes: usize,
    ) -> Result<(&mut Bytes, usize), Box<FaultKind>> {
        self.locate_first(address, bytes, bytes)
    }

    /// The same of an access of which only the first `bytes` count, but for its alignment.
    #[inline]
    pub(crate) fn locate_first(
        &mut self,
        address: u64,
        bytes: usize,
        all: usize,
    ) -> Result<(&mut Bytes, usize), Box<FaultKind>> {
        let index = self.index(address);
        let in_buffer = self.buffers.get(index).is_some_and(|store| store.holds(address, bytes));
        let of_variable = || self.variables.iter().position(|store| store.holds(address, bytes));
        let variable = if in_buffer { None } else { of_variable() };
        if !in_buffer && variable.is_none() {
            return Err(Box::new(FaultKind::OutOfBounds(self.access(address, bytes, 0))));
        }
        if !address.is_multiple_of(all as u64) {
            return Err(Box::new(FaultKind::Misaligned(self.access(address, all, 0))));
        }
        let store = match variable {
            Some(variable) => &mut self.variables[variable],
            None => &mut self.buffers[index],
        };
        Ok((&mut store.bytes, (address - store.address) as usize))
    }

    /// An access, described. `at` is the byte of it that is bad.
    #[cold]
    pub(crate) fn access(&self, address: u64, bytes: usize, at: usize) -> Access {
        let variable = (address.wrapping_sub(FIRST_VARIABLE) >> REGION_BITS) as usize;
        let store = self.buffers.get(self.index(address)).or(self.variables.get(variable));
        described(Space::Global, store, address, bytes, at)
    }
}

/// The address of a module's variable: aligned so far and no further. `None` if it cannot be.
pub(crate) fn address_of_variable(index: usize, align: u32) -> Option<u64> {
    let align = u64::from(align);
    let can = align.is_power_of_two() && align < GAP && index < 1 << 20;
    can.then(|| FIRST_VARIABLE + ((index as u64) << REGION_BITS) + GAP + align)
}

/// The address in shared memory of a block with this number in its cluster, given that in the first one's.
pub(crate) fn shared_of(rank: u32, address: u32) -> u32 {
    rank << OFFSET_BITS | address
}

/// The shared memory of a cluster's blocks: variables at addresses of their own, those of the first block as it has them.
#[derive(Debug, Default)]
pub(crate) struct Shared {
    /// The variables in the order of addresses.
    variables: Vec<Store>,
}

impl Shared {
    /// Makes shared memory as at the start of so many blocks: nobody wrote anything. So many bytes of each are dynamic.
    pub(crate) fn new(variables: &[SharedPlace], dynamic: u32, blocks: u32) -> Self {
        let store = |rank: u32, variable: &SharedPlace| Store {
            name: variable.name.clone(),
            address: Self::address(rank.into(), variable.address.into()),
            bytes: Bytes { shared: true, ..Bytes::new(variable.size.unwrap_or(dynamic) as usize) },
        };
        let of_block = |rank: u32| variables.iter().map(move |variable| store(rank, variable));
        Self { variables: (0..blocks).flat_map(of_block).collect() }
    }

    /// The address here of an address in a block's own memory, given its number in the cluster.
    pub(crate) fn address(rank: u64, of_block: u64) -> u64 {
        of_block.wrapping_add(rank << SHARED_BITS)
    }

    /// The number in its cluster of the block in whose memory an address is.
    pub(crate) fn rank(address: u64) -> u64 {
        address >> SHARED_BITS
    }

    /// The number of the variable that an address is in, or behind.
    fn index(&self, address: u64) -> usize {
        self.variables.partition_point(|variable| variable.address <= address).wrapping_sub(1)
    }

    pub(crate) fn locate(
        &mut self,
        address: u64,
        bytes: usize,
    ) -> Result<(&mut Bytes, usize), Box<FaultKind>> {
        self.locate_aligned(address, bytes, bytes)
    }

    /// The same of an access whose alignment is not its size.
    pub(crate) fn locate_aligned(
        &mut self,
        address: u64,
        bytes: usize,
        align: usize,
    ) -> Result<(&mut Bytes, usize), Box<FaultKind>> {
        let index = self.index(address);
        if !self.variables.get(index).is_some_and(|variable| variable.holds(address, bytes)) {
            return Err(Box::new(FaultKind::OutOfBounds(self.access(address, bytes, 0))));
        }
        if !address.is_multiple_of(align as u64) {
            return Err(Box::new(FaultKind::Misaligned(self.access(address, align, 0))));
        }
        let variable = &mut self.variables[index];
        Ok((&mut variable.bytes, (address - variable.address) as usize))
    }

    #[cold]
    pub(crate) fn access(&self, address: u64, bytes: usize, at: usize) -> Access {
        // In front of the first one, that is the nearest.
        let store = self.variables.get(self.index(address)).or(self.variables.first());
        described(Space::Shared, store, address, bytes, at)
    }
}

/// An access in or near a store. `at` is the byte of it that is bad.
fn described(space: Space, store: Option<&Store>, address: u64, bytes: usize, at: usize) -> Access {
    Access {
        space,
        address,
        bytes,
        buffer: store.map(|store| store.name.clone()),
        offset: store.map_or(0, |store| address.wrapping_sub(store.address) as i64 + at as i64),
        len: store.map_or(0, |store| store.bytes.data.len()),
    }
}

/// Bytes with their states, and who accessed them.
#[derive(Debug, Default)]
pub(crate) struct Bytes {
    data: Vec<u8>,
    state: Vec<u8>,
    cells: Cells,
    /// They are in shared memory.
    shared: bool,
}

/// The defect of an access, and at which of its bytes.
pub(crate) enum Wrong {
    Uninitialised(usize),
    NotConstant(usize),
    InFlight(usize),
    Mbarrier(usize),
    Race(usize, Id),
    Unfenced(usize, Id),
}

impl Bytes {
    fn new(len: usize) -> Self {
        Self { data: vec![0; len], state: vec![0; len], cells: Cells::default(), shared: false }
    }

    /// An access of the asynchronous proxy meets only what was fenced for it.
    fn check_fences(&self, range: Range<usize>, races: &Races, id: Id) -> Result<(), Wrong> {
        if !races.record(id).0.asynchronous {
            return Ok(());
        }
        match self.cells.unfenced(range, races, id, !self.shared) {
            Some((at, write)) => Err(Wrong::Unfenced(at, write)),
            None => Ok(()),
        }
    }

    /// The bytes of a load that was located.
    #[inline]
    pub(crate) fn load(
        &mut self,
        range: Range<usize>,
        manner: Manner,
        races: Option<(&Races, Id)>,
    ) -> Result<&[u8], Wrong> {
        let state = &mut self.state[range.clone()];
        if let Some(at) = state.iter().position(|state| state & WRITTEN == 0) {
            return Err(refused(state, at));
        }
        if manner == Manner::Constant {
            if let Some(at) = state.iter().position(|state| state & WRITTEN_NOW != 0) {
                return Err(Wrong::NotConstant(at));
            }
            state.iter_mut().for_each(|state| *state |= READ_AS_CONSTANT);
        }
        if let Some((races, id)) = races {
            self.cells.fit(self.data.len());
            let all = self.shared && races.partial;
            let read = self.cells.read(range.clone(), races, id, all);
            read.map_err(|(at, other)| Wrong::Race(at, other))?;
            self.check_fences(range.clone(), races, id)?;
        }
        Ok(&self.data[range])
    }

    /// The bytes of a store that was located, to be overwritten.
    #[inline]
    pub(crate) fn store(
        &mut self,
        range: Range<usize>,
        races: Option<(&Races, Id)>,
    ) -> Result<&mut [u8], Wrong> {
        let state = &self.state[range.clone()];
        let taken = READ_AS_CONSTANT | IN_FLIGHT | MBARRIER;
        if let Some(at) = state.iter().position(|state| state & taken != 0) {
            return Err(refused(state, at));
        }
        if let Some((races, id)) = races {
            self.cells.fit(self.data.len());
            let unfenced = self.check_fences(range.clone(), races, id);
            self.cells.write(range.clone(), races, id).map_err(|(at, other)| Wrong::Race(at, other))?;
            unfenced?;
        }
        self.state[range.clone()].fill(WRITTEN | WRITTEN_NOW);
        Ok(&mut self.data[range])
    }

    /// An mbarrier begins to live in bytes that were located.
    pub(crate) fn reserve(&mut self, range: Range<usize>, races: Option<(&Races, Id)>) -> Result<(), Wrong> {
        self.store(range.clone(), races)?;
        self.state[range].fill(MBARRIER);
        Ok(())
    }

    /// A copy to bytes that were located begins: a write of which nobody sees the result before it lands.
    pub(crate) fn depart(&mut self, range: Range<usize>, races: Option<(&Races, Id)>) -> Result<(), Wrong> {
        self.store(range.clone(), races)?;
        self.state[range].fill(IN_FLIGHT);
        Ok(())
    }

    /// A copy ends, with these bytes.
    pub(crate) fn land(
        &mut self,
        range: Range<usize>,
        bytes: &[u8],
        races: Option<(&Races, Id)>,
    ) -> Result<(), Wrong> {
        self.state[range.clone()].fill(0);
        self.store(range, races)?.copy_from_slice(bytes);
        Ok(())
    }
}

/// The reason why a byte in this state may not be accessed.
#[cold]
fn refused(state: &[u8], at: usize) -> Wrong {
    match state[at] {
        state if state & IN_FLIGHT != 0 => Wrong::InFlight(at),
        state if state & MBARRIER != 0 => Wrong::Mbarrier(at),
        state if state & WRITTEN == 0 => Wrong::Uninitialised(at),
        _ => Wrong::NotConstant(at),
    }
}
