//! Global memory as named buffers and shared memory as named variables, with a state for every
//! byte.

use std::ops::Range;

use crate::declared::Parameter;
use crate::error::{Error, Result};
use crate::fault::{Access, FaultKind, Space};
use crate::program::{GlobalPlace, Manner, SharedPlace};
use crate::race::{Cells, Id, Races};

/// Address bits of a buffer's region.
///
/// Each buffer has its own region, so an address identifies its buffer.
const REGION_BITS: u32 = 36;
/// The start of the first region.
const FIRST_REGION: u64 = 1 << 40;
/// Unmapped addresses before a buffer in its region.
const GAP: u64 = 1 << 24;
/// The start of the regions of module variables, far from the addresses that GPUs give.
const FIRST_VARIABLE: u64 = 1 << 60;
/// The parameter space is above this generic address, where no buffer is.
const PARAMETERS: u64 = 1 << 59;
/// Address bits of a block's shared memory within its cluster: the full width of a register.
const SHARED_BITS: u32 = 32;
/// Address bits of the offset within a block's shared memory.
///
/// The bits above hold the block's rank in its cluster, as in the addresses of NVIDIA's assembler.
pub(crate) const OFFSET_BITS: u32 = 24;
/// The alignment of `cudaMalloc`.
const ALIGNMENT: u64 = 256;

/// The byte was written, by the host or by a kernel.
const WRITTEN: u8 = 1;
/// The byte was written in this launch.
const WRITTEN_NOW: u8 = 2;
/// The byte was read by `ld.global.nc` or as part of a tensor map in this launch.
const READ_AS_CONSTANT: u8 = 4;
/// A copy to the byte is in flight. The byte counts as not written.
const IN_FLIGHT: u8 = 8;
/// The byte belongs to an mbarrier. It counts as not written.
const MBARRIER: u8 = 16;

/// Global memory: buffers at artificial addresses, far from each other.
#[derive(Debug, Default)]
pub struct Memory {
    buffers: Vec<Store>,
    /// The variables of the running module. Each launch starts with zeros.
    variables: Vec<Store>,
    /// The caller has placed buffers, so an address does not identify its buffer.
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
    /// Returns whether the store contains all bytes of an access.
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
    /// Returns the address of its first byte.
    pub fn address(self) -> u64 {
        self.address
    }
}

impl Memory {
    /// Makes a memory without buffers.
    pub fn new() -> Self {
        Self::default()
    }

    /// Allocates a buffer of unwritten bytes, aligned to 256.
    pub fn allocate(&mut self, name: &str, len: usize) -> Buffer {
        self.allocate_aligned(name, len, ALIGNMENT)
    }

    /// Allocates a buffer of unwritten bytes at an odd multiple of `alignment`, a power of two.
    ///
    /// The buffer therefore has exactly this alignment and no more.
    pub fn allocate_aligned(&mut self, name: &str, len: usize, alignment: u64) -> Buffer {
        assert!(alignment.is_power_of_two() && alignment < GAP, "an alignment of {alignment}");
        let index = self.buffers.len();
        let address = FIRST_REGION + ((index as u64) << REGION_BITS) + GAP + alignment;
        self.buffers.push(Store { name: name.into(), address, bytes: Bytes::new(len) });
        Buffer { index, address }
    }

    /// Allocates a buffer with these bytes, aligned to 256.
    pub fn allocate_from(&mut self, name: &str, bytes: &[u8]) -> Buffer {
        self.allocate_from_aligned(name, bytes, ALIGNMENT)
    }

    /// Allocates a buffer with these bytes at an odd multiple of `alignment`, a power of two.
    pub fn allocate_from_aligned(&mut self, name: &str, bytes: &[u8], alignment: u64) -> Buffer {
        let buffer = self.allocate_aligned(name, bytes.len(), alignment);
        self.write(buffer, 0, bytes);
        buffer
    }

    /// Writes bytes between launches, as the host does.
    pub fn write(&mut self, buffer: Buffer, offset: usize, bytes: &[u8]) {
        let store = &mut self.buffers[buffer.index].bytes;
        store.data[offset..][..bytes.len()].copy_from_slice(bytes);
        store.state[offset..][..bytes.len()].fill(WRITTEN);
    }

    /// Returns a buffer's bytes.
    ///
    /// # Errors
    ///
    /// [`Error::NeverWritten`] if some bytes were never written.
    pub fn bytes(&self, buffer: Buffer) -> Result<Vec<u8>> {
        let Store { name, bytes, .. } = &self.buffers[buffer.index];
        let missing = bytes.state.iter().filter(|&state| state & WRITTEN == 0).count();
        match bytes.state.iter().position(|state| state & WRITTEN == 0) {
            Some(offset) => Err(Error::NeverWritten { buffer: name.clone(), offset, bytes: missing }),
            None => Ok(bytes.data.clone()),
        }
    }

    /// Returns a buffer's bytes, with `fill` for unwritten ones.
    pub fn bytes_or(&self, buffer: Buffer, fill: u8) -> Vec<u8> {
        let store = &self.buffers[buffer.index].bytes;
        let byte = |(&byte, &state): (&u8, &u8)| if state & WRITTEN == 0 { fill } else { byte };
        store.data.iter().zip(&store.state).map(byte).collect()
    }

    /// Returns the buffers in the order of their allocation.
    pub fn buffers(&self) -> impl Iterator<Item = Buffer> {
        self.buffers.iter().enumerate().map(|(index, store)| Buffer { index, address: store.address })
    }

    /// Returns the first buffer of this name.
    pub fn named(&self, name: &str) -> Option<Buffer> {
        self.buffers().find(|buffer| self.buffers[buffer.index].name == name)
    }

    /// Moves a buffer to an address of the caller's choice, for example the one that a GPU gave.
    ///
    /// Buffers must not overlap.
    pub fn place(&mut self, buffer: Buffer, address: u64) {
        self.placed = true;
        self.buffers[buffer.index].address = address;
    }

    /// Returns the index of the buffer at or near an address.
    #[inline]
    fn index(&self, address: u64) -> usize {
        if self.placed {
            let inside = |store: &Store| address.wrapping_sub(store.address) < store.bytes.data.len() as u64;
            return self.buffers.iter().position(inside).unwrap_or(usize::MAX);
        }
        (address.wrapping_sub(FIRST_REGION) >> REGION_BITS) as usize
    }

    /// Returns which bytes of a buffer were written, by the host or by a kernel.
    pub fn written(&self, buffer: Buffer) -> Vec<bool> {
        self.buffers[buffer.index].bytes.state.iter().map(|state| state & WRITTEN != 0).collect()
    }

    /// Forgets the accesses of the last launch, and allocates the variables of the next one.
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

    /// Returns the bytes that contain an access and its range in them.
    ///
    /// Checks bounds and alignment first.
    #[inline]
    pub(crate) fn locate(
        &mut self,
        address: u64,
        bytes: usize,
    ) -> Result<(&mut Bytes, usize), Box<FaultKind>> {
        self.locate_first(address, bytes, bytes)
    }

    /// [`Self::locate`] for an access that uses only its first `bytes` bytes, with its full
    /// alignment.
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

    /// Describes an access. `at` is the index of the faulty byte in it.
    #[cold]
    pub(crate) fn access(&self, address: u64, bytes: usize, at: usize) -> Access {
        let variable = (address.wrapping_sub(FIRST_VARIABLE) >> REGION_BITS) as usize;
        let store = self.buffers.get(self.index(address)).or(self.variables.get(variable));
        described(Space::Global, store, address, bytes, at)
    }
}

/// Returns the address of a module variable, with exactly its alignment and no more.
///
/// `None` if the alignment or index is too large.
pub(crate) fn address_of_variable(index: usize, align: u32) -> Option<u64> {
    let align = u64::from(align);
    let can = align.is_power_of_two() && align < GAP && index < 1 << 20;
    can.then(|| FIRST_VARIABLE + ((index as u64) << REGION_BITS) + GAP + align)
}

/// Returns the generic address of the parameter space. Its alignment is exactly the largest one of
/// the parameters.
pub(crate) fn address_of_parameters(parameters: &[Parameter]) -> u64 {
    PARAMETERS + parameters.iter().map(|parameter| parameter.align as u64).max().unwrap_or(1)
}

/// Returns the shared address in the block of this rank that corresponds to one in the first block.
pub(crate) fn shared_of(rank: u32, address: u32) -> u32 {
    rank << OFFSET_BITS | address
}

/// The shared memory of a cluster's blocks. Addresses in the first block are unchanged.
#[derive(Debug, Default)]
pub(crate) struct Shared {
    /// The variables, sorted by address.
    variables: Vec<Store>,
}

impl Shared {
    /// Makes unwritten shared memory for `blocks` blocks, each with `dynamic` bytes of dynamic
    /// memory.
    pub(crate) fn new(variables: &[SharedPlace], dynamic: u32, blocks: u32) -> Self {
        let store = |rank: u32, variable: &SharedPlace| Store {
            name: variable.name.clone(),
            address: Self::address(rank.into(), variable.address.into()),
            bytes: Bytes { shared: true, ..Bytes::new(variable.size.unwrap_or(dynamic) as usize) },
        };
        let of_block = |rank: u32| variables.iter().map(move |variable| store(rank, variable));
        Self { variables: (0..blocks).flat_map(of_block).collect() }
    }

    /// Returns the cluster-wide address of a block's own address, given the block's rank.
    pub(crate) fn address(rank: u64, of_block: u64) -> u64 {
        of_block.wrapping_add(rank << SHARED_BITS)
    }

    /// Returns a block's own address, given a cluster-wide one.
    pub(crate) fn of_block(address: u64) -> u64 {
        address & ((1 << SHARED_BITS) - 1)
    }

    /// Returns the rank of the block whose memory contains an address.
    pub(crate) fn rank(address: u64) -> u64 {
        address >> SHARED_BITS
    }

    /// Returns the index of the variable at or before an address.
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

    /// [`Self::locate`] for an access whose alignment differs from its size.
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
        // Before the first variable, the first one is the nearest.
        let store = self.variables.get(self.index(address)).or(self.variables.first());
        described(Space::Shared, store, address, bytes, at)
    }
}

/// Describes an access in or near a store. `at` is the index of the faulty byte in it.
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

/// Bytes with their states and accesses.
#[derive(Debug, Default)]
pub(crate) struct Bytes {
    data: Vec<u8>,
    state: Vec<u8>,
    cells: Cells,
    /// The bytes are in shared memory.
    shared: bool,
}

/// The defect of an access, with the index of the faulty byte.
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

    /// Checks that an access of the asynchronous proxy touches only fenced writes.
    fn check_fences(&self, range: Range<usize>, races: &Races, id: Id) -> Result<(), Wrong> {
        if !races.record(id).0.asynchronous {
            return Ok(());
        }
        match self.cells.unfenced(range, races, id, !self.shared) {
            Some((at, write)) => Err(Wrong::Unfenced(at, write)),
            None => Ok(()),
        }
    }

    /// Returns the bytes of a located load.
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

    /// Returns the bytes of a located store, for overwriting.
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

    /// Initializes an mbarrier in located bytes.
    pub(crate) fn reserve(&mut self, range: Range<usize>, races: Option<(&Races, Id)>) -> Result<(), Wrong> {
        self.store(range.clone(), races)?;
        self.state[range].fill(MBARRIER);
        Ok(())
    }

    /// Ends an mbarrier in located bytes.
    pub(crate) fn release(&mut self, range: Range<usize>, races: Option<(&Races, Id)>) -> Result<(), Wrong> {
        self.state[range.clone()].fill(0);
        self.store(range.clone(), races)?;
        self.state[range].fill(0);
        Ok(())
    }

    /// Starts a copy to located bytes: a write whose result is hidden until the copy lands.
    pub(crate) fn depart(&mut self, range: Range<usize>, races: Option<(&Races, Id)>) -> Result<(), Wrong> {
        self.store(range.clone(), races)?;
        self.state[range].fill(IN_FLIGHT);
        Ok(())
    }

    /// Completes a copy with these bytes.
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

/// Returns why a byte in this state may not be accessed.
#[cold]
fn refused(state: &[u8], at: usize) -> Wrong {
    match state[at] {
        state if state & IN_FLIGHT != 0 => Wrong::InFlight(at),
        state if state & MBARRIER != 0 => Wrong::Mbarrier(at),
        state if state & WRITTEN == 0 => Wrong::Uninitialised(at),
        _ => Wrong::NotConstant(at),
    }
}
