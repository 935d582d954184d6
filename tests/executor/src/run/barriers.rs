//! Barriers of a block, or of some of its threads (ISA 9.7.13, `barrier`), and what happens when no warp can go
//! on.

use super::grid::{Grid, WARP};
use super::warp::{State, Warp};
use crate::fault::{Fault, FaultKind, Trap};
use crate::launch::Schedule;

/// How often threads that spin are let go on without an event, before they count as spinning for ever.
const PATIENCE: u32 = 3;

impl Grid<'_> {
    /// No warp can go on. Threads pass their barriers, copies land, and those that spin may look again.
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

    /// Threads of any block pass their barriers. Returns whether any pass.
    fn release(&mut self, warps: &mut [Warp]) -> Result<bool, Fault> {
        let mut any = false;
        for of_block in warps.chunks_mut(self.launch.threads.div_ceil(WARP) as usize) {
            any |= self.release_block(of_block)?;
        }
        Ok(any)
    }

    /// Threads of a block pass the barriers at which all of them are; one for the block is for all threads of it that have
    /// not exited (9.7.12, `exit`: threads that exit and hold up a barrier release it). Returns whether any
    /// pass.
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
