//! Barriers of a block or of some of its threads (ISA 9.7.13, `barrier`), and stalled blocks.

use super::grid::{Grid, WARP};
use super::warp::{State, Warp};
use crate::fault::{Fault, FaultKind, Trap};
use crate::launch::Schedule;

/// Number of times that spinning threads may retry without an event before they count as hanging.
const PATIENCE: u32 = 3;

impl Grid<'_> {
    /// Makes progress when no warp can continue.
    ///
    /// Threads pass completed barriers, copies land, and spinning threads may retry.
    pub(super) fn unblock(&mut self, warps: &mut [Warp]) -> Result<(), Fault> {
        let land_first = matches!(self.launch.schedule, Schedule::Random(_)) && self.random.below(2) == 0;
        if land_first && self.land_one(warps)? || self.release(warps)? || self.land_one(warps)? {
            return Ok(());
        }
        let waits = |warp: &Warp| warp.groups.iter().any(|group| matches!(group.state, State::Spinning(_)));
        if self.idle < PATIENCE && warps.iter().any(waits) {
            self.idle += 1;
            self.events += 1;
            return Ok(());
        }
        let Some(warp) = warps.iter().find(|warp| !warp.groups.is_empty()) else { return Ok(()) };
        let group = warp.groups[0];
        self.pc = group.pc;
        let describe = |warp: &Warp| {
            let (line, text) = self.kernel.instruction(warp.groups[0].pc as usize);
            format!("warp {} waits at line {line}, `{text}`", warp.index)
        };
        let all: Vec<String> = warps.iter().filter(|warp| !warp.groups.is_empty()).map(describe).collect();
        let (lane, kind) = (group.lanes.trailing_zeros(), FaultKind::Deadlock(all.join(", ")));
        Err(self.fault(warp.index, Trap { lane, kind: kind.into() }))
    }

    /// Lets threads of any block pass their barriers. Returns whether any did.
    fn release(&mut self, warps: &mut [Warp]) -> Result<bool, Fault> {
        let mut any = false;
        for of_block in warps.chunks_mut(self.launch.threads.div_ceil(WARP) as usize) {
            any |= self.release_block(of_block)?;
        }
        Ok(any)
    }

    /// Lets threads of a block pass the barriers that all of their members have reached.
    ///
    /// A barrier for the block is complete once all threads that have not exited are there (9.7.12,
    /// `exit`: threads that exit release a barrier that waits for them). Returns whether any thread
    /// passed.
    fn release_block(&mut self, warps: &mut [Warp]) -> Result<bool, Fault> {
        let mut any = false;
        let first_warp = warps.first().map_or(0, |warp| warp.index);
        for number in 0..16 {
            let mut members: Vec<(u32, u32)> = Vec::new();
            let mut counts: Vec<u32> = Vec::new();
            for warp in &*warps {
                let mut lanes = 0;
                for group in &warp.groups {
                    if let State::Arrived(at, count) = group.state
                        && at == number
                    {
                        lanes |= group.lanes;
                        counts.push(count);
                        self.pc = group.pc;
                    }
                }
                if lanes != 0 {
                    members.push((warp.index, lanes));
                }
            }
            let (Some(&count), Some(&(first, lanes))) = (counts.first(), members.first()) else { continue };
            let refused = |message: String| Trap {
                lane: lanes.trailing_zeros(),
                kind: FaultKind::Deadlock(message).into(),
            };
            if counts.iter().any(|&other| other != count) {
                let trap = refused(format!("barrier {number} is for different numbers of threads"));
                return Err(self.fault(first, trap));
            }
            let whole = |&&(index, lanes): &&(u32, u32)| warps[(index - first_warp) as usize].alive == lanes;
            let came = members.iter().filter(whole).count() as u32;
            let expected = match count {
                0 => warps.iter().filter(|warp| !warp.done()).count() as u32,
                count => count / WARP,
            };
            if came > expected {
                let trap = refused(format!("{came} warps at barrier {number}, which is for {expected}"));
                return Err(self.fault(first, trap));
            }
            if came < expected || came < members.len() as u32 {
                continue;
            }
            for warp in &mut *warps {
                warp.pass_barrier(number);
            }
            if let Some(races) = &mut self.races {
                races.clocks.join(&members);
            }
            self.note_event();
            any = true;
        }
        Ok(any)
    }
}
