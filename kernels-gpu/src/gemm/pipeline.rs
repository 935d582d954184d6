//! The pipeline between producer and consumer warps: a ring of stages in shared memory, each with
//! two barriers, and a third where warps decode weights or pack activations in between.
//!
//! Producers acquire an empty stage, copy to it and commit it. Consumers wait for a full stage,
//! multiply and release it.

use microscale_kernels_abi::gemm::stage::{self, FRONT_BYTES, PREPARED_BARRIERS_OFFSET, Stage};

use super::tile::Tile;
use crate::hardware::{cluster, mbarrier, shared, warp};

/// Bytes of a stage's barriers: `full`, then `empty`.
const BARRIER_PAIR_BYTES: u32 = 16;

/// The address of the front of swizzled stages.
#[inline(always)]
pub(super) fn swizzled_front() -> u32 {
    stage::swizzled_front(shared::address(warp::shared::<u128>().cast::<u8>()))
}

/// Initializes the barriers of stage `stage`, with one for `preparers` warps that prepare stages.
/// [`mbarrier::fence_init`] and a barrier of the thread block must follow.
///
/// # Safety
/// `base` is the address of the launch's shared memory. One thread calls it per stage, before any
/// use.
#[inline(always)]
pub(super) unsafe fn init(
    base: u32,
    stage: u32,
    producer_arrivals: u32,
    consumer_arrivals: u32,
    preparers: u32,
) {
    let full = base + stage * BARRIER_PAIR_BYTES;
    // SAFETY: the barriers lie before the stages, on 8 bytes, and no thread uses them yet.
    unsafe {
        mbarrier::init(full, producer_arrivals);
        mbarrier::init(full + BARRIER_PAIR_BYTES / 2, consumer_arrivals);
        if preparers > 0 {
            mbarrier::init(base + PREPARED_BARRIERS_OFFSET + stage * 8, preparers);
        }
    }
}

/// The barrier of the thread block, or of the cluster where thread blocks share rows: they use each
/// other's stages and barriers.
///
/// # Safety
/// All lanes of the warp call it.
#[inline(always)]
pub(super) unsafe fn barrier<T: Tile>() {
    if T::SHARES_ROWS {
        // SAFETY: all lanes arrive and wait.
        unsafe {
            cluster::arrive();
            cluster::wait();
        }
    } else {
        warp::barrier();
    }
}

/// A position in the ring: a stage, and the phase of its barriers.
#[derive(Clone, Copy)]
pub(super) struct PipelineState {
    stage: u32,
    stages: u32,
    stage_bytes: u32,
    /// The parity of the barriers' phase. It changes with every turn around the ring.
    phase: u32,
    /// The address of shared memory, where the barriers start.
    base: u32,
}

impl PipelineState {
    /// The first stage in the first turn, with `shared` bytes of shared memory.
    #[inline(always)]
    pub(super) fn new(stage: &Stage, shared: u32, base: u32) -> Self {
        let (stages, stage_bytes) = (stage.count(shared), stage.bytes());
        Self { stage: 0, stages, stage_bytes, phase: 0, base }
    }

    /// The barrier on which producers and their copies arrive.
    #[inline(always)]
    pub(super) fn full_barrier(&self) -> u32 {
        self.base + self.stage * BARRIER_PAIR_BYTES
    }

    /// The barrier on which consumers arrive.
    #[inline(always)]
    pub(super) fn empty_barrier(&self) -> u32 {
        self.full_barrier() + BARRIER_PAIR_BYTES / 2
    }

    /// The barrier on which warps that prepare stages arrive: decoder warps and packing warps.
    #[cfg(microscale_wgmma)]
    #[inline(always)]
    fn prepared_barrier(&self) -> u32 {
        self.base + PREPARED_BARRIERS_OFFSET + self.stage * 8
    }

    /// The stage's number.
    #[cfg(microscale_tcgen05)]
    #[inline(always)]
    pub(super) fn number(&self) -> u32 {
        self.stage
    }

    /// The address of the stage.
    #[inline(always)]
    pub(super) fn stage_address(&self) -> u32 {
        self.base + FRONT_BYTES + self.stage * self.stage_bytes
    }

    /// The number of the previous stage.
    #[cfg(microscale_wgmma)]
    #[inline(always)]
    fn previous(&self) -> u32 {
        (if self.stage == 0 { self.stages } else { self.stage }) - 1
    }

    /// The address of the previous stage.
    #[cfg(microscale_wgmma)]
    #[inline(always)]
    pub(super) fn previous_stage_address(&self) -> u32 {
        self.base + FRONT_BYTES + self.previous() * self.stage_bytes
    }

    /// Waits until all consumers have released the stage, with multicast in both thread blocks of
    /// the cluster. In the first turn no stage is taken.
    #[inline(always)]
    pub(super) fn producer_acquire(&self) {
        mbarrier::wait(self.empty_barrier(), self.phase ^ 1);
    }

    /// Commits the thread's copies to the stage: they arrive on its barrier when they have
    /// completed.
    ///
    /// # Safety
    /// The thread has acquired the stage, and calls this once per turn.
    #[cfg(microscale_wgmma)]
    #[inline(always)]
    pub(super) unsafe fn producer_commit(&self) {
        // SAFETY: the barrier expects an arrival with the copies of each thread that copies.
        unsafe { mbarrier::arrive_with_copies(self.full_barrier()) };
    }

    /// Waits until the stage is full, and returns its address.
    #[inline(always)]
    pub(super) fn consumer_wait(&self) -> u32 {
        mbarrier::wait(self.full_barrier(), self.phase);
        // Lanes may have seen the barrier one after the other.
        warp::sync();
        self.stage_address()
    }

    /// Commits the warp's part of the stage, which it has decoded or packed.
    ///
    /// # Safety
    /// All lanes of a warp that prepares stages call it, once per turn.
    #[cfg(microscale_wgmma)]
    #[inline(always)]
    pub(super) unsafe fn preparer_commit(&self) {
        shared::fence_writes();
        // The other lanes' writes come before the first lane's arrival.
        warp::sync();
        if warp::lane() == 0 {
            // SAFETY: the barrier expects an arrival of each warp that prepares stages.
            unsafe { mbarrier::arrive(self.prepared_barrier()) };
        }
    }

    /// Waits until the stage is prepared, which it is after it is full, and returns its address.
    #[cfg(microscale_wgmma)]
    #[inline(always)]
    pub(super) fn wait_until_prepared(&self) -> u32 {
        mbarrier::wait(self.prepared_barrier(), self.phase);
        // Lanes may have seen the barrier one after the other.
        warp::sync();
        self.stage_address()
    }

    /// Releases the previous stage, if `exists`, with multicast in both thread blocks of the
    /// cluster.
    ///
    /// # Safety
    /// All lanes call it. The products that read the previous stage have been computed. No thread
    /// block of the cluster has ended.
    #[cfg(microscale_wgmma)]
    #[inline(always)]
    pub(super) unsafe fn consumer_release_previous<T: Tile>(&self, exists: bool) {
        let barrier = self.base + self.previous() * BARRIER_PAIR_BYTES + BARRIER_PAIR_BYTES / 2;
        // The other lanes' reads come before the first lanes' arrivals.
        warp::sync();
        if exists && warp::lane() < const { T::CONFIG.row_sharers() } {
            // SAFETY: the barriers expect one arrival per consumer warp of the cluster.
            unsafe {
                if T::SHARES_ROWS {
                    mbarrier::arrive_in_cluster(cluster::address_of(barrier, warp::lane()));
                } else {
                    mbarrier::arrive(barrier);
                }
            }
        }
    }

    /// The next position if `exists`, else this one.
    #[cfg(microscale_wgmma)]
    #[inline(always)]
    pub(super) fn next_if(&self, exists: bool) -> Self {
        let mut next = *self;
        if exists {
            next.advance();
        }
        next
    }

    /// Advances to the next stage.
    #[inline(always)]
    pub(super) fn advance(&mut self) {
        self.stage += 1;
        if self.stage == self.stages {
            self.stage = 0;
            self.phase ^= 1;
        }
    }
}
