//! Clusters of thread blocks: their barrier and distributed shared memory.
//!
//! The barrier is `barrier.cluster` (ISA 9.7.13).
//!
//! The blocks of a cluster run together, like one block with all their warps. Each block has its
//! own range of shared memory addresses.

use super::grid::{Grid, WARP};
use super::under_way::Cluster;
use super::warp::Warp;
use crate::fault::{FaultKind, Step, trap};
use crate::memory::{OFFSET_BITS, Shared, shared_of};
use crate::program::{Address, Program, Slot, Space};

/// Maximum number of blocks in a cluster.
pub(super) const MOST: u32 = 16;

impl Grid<'_> {
    /// Returns a block's index and a thread's index in it.
    ///
    /// `warp` counts the warps of all blocks of the cluster.
    pub(super) fn block_and_thread(&self, cluster: u32, warp: u32, lane: u32) -> (u32, u32) {
        let warps = self.launch.threads.div_ceil(WARP);
        (cluster * self.launch.cluster + warp / warps, warp % warps * WARP + lane)
    }

    /// Ends the phase if all warps that have not ended have arrived.
    fn end_phase(&mut self) {
        let Cluster { alive, arrived, told, phase, complete } = &mut self.cluster;
        if *arrived > 0 && *arrived == alive.iter().sum() {
            (*complete, *arrived) = (std::mem::take(told), 0);
            *phase += 1;
            self.note_event();
        }
    }
}

impl Warp {
    /// Returns an access's address in the memory of all blocks.
    ///
    /// Instructions without a cluster address reach the block's own memory.
    #[inline(always)]
    pub(super) fn in_cluster(&self, address: Address, at: u64) -> u64 {
        match (address.space, address.base) {
            (Space::Global, _) => at,
            (Space::Shared, None) => Shared::address(self.rank.into(), at),
            (Space::Shared, Some(_)) => {
                let (rank, offset) = (at >> OFFSET_BITS, at & ((1 << OFFSET_BITS) - 1));
                let own = address.of_cluster || rank == u64::from(self.rank);
                Shared::address(rank, if own { offset } else { at })
            }
        }
    }

    /// Checks that the accessed block has not ended.
    pub(super) fn check_cluster(&self, grid: &Grid, active: u32, address: Address) -> Step {
        if !address.of_cluster {
            return Ok(());
        }
        for lane in (0..WARP).filter(|lane| active >> lane & 1 == 1) {
            let at = self.address(address, lane);
            let rank = Shared::rank(at) as u32;
            if rank >= grid.launch.cluster || grid.cluster.ended(rank) {
                return trap(lane, FaultKind::NoSuchBlock { rank });
            }
        }
        Ok(())
    }

    /// `mapa.shared::cluster`
    pub(super) fn map_address(
        &mut self,
        program: &Program,
        active: u32,
        blocks: u32,
        [to, from, rank]: [Slot; 3],
    ) -> Step {
        let from = *self.registers.word(program, from, active)?;
        let ranks = *self.registers.word(program, rank, active)?;
        let missing = |lane: &u32| active >> lane & 1 == 1 && ranks[*lane as usize] >= blocks;
        if let Some(lane) = (0..WARP).find(missing) {
            return trap(lane, FaultKind::NoSuchBlock { rank: ranks[lane as usize] });
        }
        let mapped = |lane: usize| shared_of(ranks[lane], from[lane] & ((1 << OFFSET_BITS) - 1));
        self.registers.set_word(to, active, &std::array::from_fn(mapped));
        Ok(())
    }

    /// `barrier.cluster.arrive` of all lanes that have not exited.
    pub(super) fn arrive_in_cluster(&mut self, grid: &mut Grid, active: u32) -> Step {
        if active != self.alive || self.arrival.is_some() {
            return trap(active.trailing_zeros(), FaultKind::NotUniform("arriving at the cluster's barrier"));
        }
        self.arrival = Some(grid.cluster.phase);
        if let Some(races) = &mut grid.races {
            races.clocks.release(self.index, active, &mut grid.cluster.told);
        }
        grid.cluster.arrived += 1;
        grid.end_phase();
        Ok(())
    }

    /// `barrier.cluster.wait`. Returns false if the lanes must wait.
    pub(super) fn wait_in_cluster(&mut self, grid: &mut Grid, active: u32) -> Step<bool> {
        let Some(phase) = self.arrival.filter(|_| active == self.alive) else {
            return trap(active.trailing_zeros(), FaultKind::NotUniform("waiting at the cluster's barrier"));
        };
        if grid.cluster.phase == phase {
            return Ok(false);
        }
        self.arrival = None;
        if let Some(races) = &mut grid.races {
            races.clocks.acquire(self.index, active, &grid.cluster.complete);
        }
        Ok(true)
    }

    /// Removes a warp from the cluster's barrier once all its lanes have exited.
    pub(super) fn leave_cluster(&mut self, grid: &mut Grid) {
        if self.done() {
            if self.arrival.take() == Some(grid.cluster.phase) {
                grid.cluster.arrived -= 1;
            }
            grid.cluster.alive[self.rank as usize] -= 1;
            grid.end_phase();
        }
    }
}
