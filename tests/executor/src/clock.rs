//! Vector clocks: which accesses each thread knows to be complete.
//!
//! A block's members are its threads, its warp groups and its mbarriers. A warp group reads for its
//! asynchronous matrix products, and an mbarrier writes for the copies that it counts. A warp's
//! loads and stores of tensor memory also have members, and so have a thread's asynchronous
//! instructions for it. A warp's time advances when one of its threads releases, a warp group's
//! time with every product, an mbarrier's with every phase. A member that knows time t of another
//! member knows that the other's accesses before t are complete.

use std::collections::BTreeMap;
use std::rc::Rc;

/// A thread of a block, or a member that acts for several threads.
pub(crate) type Member = usize;

/// The times of the members of other blocks.
pub(crate) type Elsewhere = BTreeMap<u32, Rc<Vec<u32>>>;

/// The times that a member knows, for its own block and for other blocks.
#[derive(Clone, Debug, Default)]
pub(crate) struct Known {
    own: Rc<Vec<u32>>,
    elsewhere: Option<Rc<Elsewhere>>,
}

impl Known {
    /// Returns the time before which a member's accesses are known to be complete.
    #[inline]
    pub(crate) fn time(&self, member: Member) -> u32 {
        self.own.get(member).copied().unwrap_or(0)
    }

    /// [`Self::time`] for a member of another block.
    pub(crate) fn time_elsewhere(&self, block: u32, member: Member) -> u32 {
        let times = self.elsewhere.as_ref().and_then(|elsewhere| elsewhere.get(&block));
        times.and_then(|times| times.get(member)).copied().unwrap_or(0)
    }

    /// Learns a member's time.
    pub(crate) fn learn(&mut self, member: Member, time: u32) {
        if self.time(member) >= time {
            return;
        }
        let own = Rc::make_mut(&mut self.own);
        if own.len() <= member {
            own.resize(member + 1, 0);
        }
        own[member] = time;
    }

    /// Learns everything that another member of the block knows.
    pub(crate) fn join(&mut self, other: &Self) {
        join_times(&mut self.own, &other.own);
        if let Some(elsewhere) = &other.elsewhere {
            self.join_elsewhere(elsewhere);
        }
    }

    fn join_elsewhere(&mut self, elsewhere: &Rc<Elsewhere>) {
        match &mut self.elsewhere {
            None => self.elsewhere = Some(elsewhere.clone()),
            Some(mine) if Rc::ptr_eq(mine, elsewhere) => {}
            Some(mine) => join_blocks(Rc::make_mut(mine), elsewhere),
        }
    }

    /// Learns the times that were recorded for all blocks.
    pub(crate) fn hear(&mut self, said: &Elsewhere, block: u32) {
        if let Some(own) = said.get(&block) {
            join_times(&mut self.own, own);
        }
        if said.keys().any(|&of| of != block) {
            let others = said.iter().filter(|(of, _)| **of != block);
            self.join_elsewhere(&Rc::new(others.map(|(&of, times)| (of, times.clone())).collect()));
        }
    }

    /// Records the known times for all blocks.
    pub(crate) fn tell(&self, block: u32, said: &mut Elsewhere) {
        join_times(said.entry(block).or_default(), &self.own);
        if let Some(elsewhere) = &self.elsewhere {
            join_blocks(said, elsewhere);
        }
    }

    /// Forgets times that another member of the block does not know. Times of other blocks are
    /// kept.
    fn meet(&mut self, other: &Self) {
        if Rc::ptr_eq(&self.own, &other.own) {
            return;
        }
        for (member, time) in Rc::make_mut(&mut self.own).iter_mut().enumerate() {
            *time = (*time).min(other.time(member));
        }
    }

    fn same(&self, other: &Self) -> bool {
        let elsewhere = match (&self.elsewhere, &other.elsewhere) {
            (None, None) => true,
            (Some(a), Some(b)) => Rc::ptr_eq(a, b),
            _ => false,
        };
        elsewhere && Rc::ptr_eq(&self.own, &other.own)
    }
}

/// Keeps the later of each pair of times.
///
/// Equal vectors are shared, so that the next comparison is short.
fn join_times(mine: &mut Rc<Vec<u32>>, other: &Rc<Vec<u32>>) {
    let behind = |a: &[u32], b: &[u32]| {
        a.iter().enumerate().all(|(member, &time)| time <= b.get(member).copied().unwrap_or(0))
    };
    if Rc::ptr_eq(mine, other) || behind(other, mine) {
        return;
    }
    if behind(mine, other) {
        *mine = other.clone();
        return;
    }
    let mine = Rc::make_mut(mine);
    mine.resize(mine.len().max(other.len()), 0);
    for (mine, &other) in mine.iter_mut().zip(other.iter()) {
        *mine = (*mine).max(other);
    }
}

fn join_blocks(mine: &mut Elsewhere, other: &Elsewhere) {
    for (&block, times) in other {
        join_times(mine.entry(block).or_default(), times);
    }
}

/// Returns the times that all these clocks have.
fn common<'a>(mut clocks: impl Iterator<Item = &'a Known>) -> Known {
    let mut common = clocks.next().cloned().unwrap_or_default();
    clocks.for_each(|known| common.meet(known));
    common
}

/// Returns the lanes of a mask.
fn lanes_of(mask: u32) -> impl Iterator<Item = usize> {
    (0..32).filter(move |lane| mask >> lane & 1 == 1)
}

/// The clocks of all members of the current block, and releases to other blocks.
#[derive(Debug, Default)]
pub(crate) struct Clocks {
    pub(crate) block: u32,
    /// The number of members that are threads, 32 per warp.
    pub(crate) threads: usize,
    known: Vec<Known>,
    /// The time of each warp.
    times: Vec<u32>,
    /// The clock of each thread at its last fence for other blocks.
    published: Vec<Option<Known>>,
    /// Published clocks that relaxed loads have read. A fence makes them known.
    heard: Vec<Elsewhere>,
    /// Proxy fences of each warp, with their time and lanes.
    fences: Vec<Vec<ProxyFence>>,
    /// The clock of each thread at its last `tcgen05.fence::after_thread_sync`.
    seen: Vec<Known>,
    /// Clocks recorded by atomic writes, by address.
    places: BTreeMap<u64, Elsewhere>,
}

/// A fence after which asynchronous accesses see earlier writes of its lanes, and the copies whose
/// completion a lane has observed.
#[derive(Clone, Debug)]
struct ProxyFence {
    time: u32,
    lanes: u32,
    /// The fence covers only mbarrier initializations.
    barriers_only: bool,
    /// The clocks of its lanes, in order.
    known: Vec<Known>,
}

impl ProxyFence {
    /// Returns the lanes that had observed a write that `agent` made at `time`.
    fn observers(&self, agent: Member, time: u32) -> impl Iterator<Item = usize> {
        let lanes = if self.barriers_only { 0 } else { self.lanes };
        let observed = move |known: &Known| known.time(agent) > time;
        lanes_of(lanes).zip(&self.known).filter(move |(_, known)| observed(known)).map(|(lane, _)| lane)
    }
}

impl Clocks {
    /// Starts a block. Its members know nothing.
    pub(crate) fn start_block(&mut self, block: u32, threads: u32) {
        let warps = threads.div_ceil(32) as usize;
        let members = warps * 32 + warps.div_ceil(4);
        *self = Self {
            block,
            threads: warps * 32,
            known: vec![Known::default(); members],
            times: vec![0; warps],
            published: vec![None; warps * 32],
            heard: vec![Elsewhere::new(); warps * 32],
            fences: vec![Vec::new(); warps],
            seen: vec![Known::default(); warps * 32],
            places: std::mem::take(&mut self.places),
        };
    }

    /// `tcgen05.fence::after_thread_sync` of these lanes.
    pub(crate) fn tensor_fence(&mut self, warp: u32, lanes: u32) {
        for thread in lanes_of(lanes).map(|lane| warp as usize * 32 + lane) {
            self.seen[thread].clone_from(&self.known[thread]);
        }
    }

    /// Returns the times that all these lanes knew at their last
    /// `tcgen05.fence::after_thread_sync`.
    pub(crate) fn seen(&self, warp: u32, lanes: u32) -> Known {
        common(lanes_of(lanes).map(|lane| &self.seen[warp as usize * 32 + lane]))
    }

    /// Returns whether some thread knows a later time of a member.
    pub(crate) fn knows(&self, member: Member, time: u32) -> bool {
        self.known[..self.threads].iter().any(|known| known.time(member) > time)
    }

    /// Returns the member that reads for a warp group's products.
    pub(crate) fn of_group(&self, group: u32) -> Member {
        self.threads + group as usize
    }

    /// Adds a member for an mbarrier.
    pub(crate) fn add_member(&mut self) -> Member {
        self.known.push(Known::default());
        self.known.len() - 1
    }

    pub(crate) fn time(&self, warp: u32) -> u32 {
        self.times[warp as usize]
    }

    pub(crate) fn known(&self, member: Member) -> &Known {
        &self.known[member]
    }

    /// Gives a member that acts for others the clock of those others.
    pub(crate) fn instruct(&mut self, member: Member, known: Known) {
        self.known[member] = known;
    }

    /// Joins the clocks and accesses of these lanes into `said`. Later accesses are not included.
    pub(crate) fn release(&mut self, warp: u32, lanes: u32, said: &mut Known) {
        let first = warp as usize * 32;
        let time = &mut self.times[warp as usize];
        *time += 1;
        // Lanes that met at a barrier share a clock.
        let mut last: Option<&Known> = None;
        for known in lanes_of(lanes).map(|lane| &self.known[first + lane]) {
            if !last.is_some_and(|last| last.same(known)) {
                said.join(known);
            }
            last = Some(known);
        }
        for lane in lanes_of(lanes) {
            said.learn(first + lane, *time);
        }
    }

    /// Joins `said` into the clocks of these lanes. Lanes that shared a clock still share it.
    pub(crate) fn acquire(&mut self, warp: u32, lanes: u32, said: &Known) {
        let mut last: Option<(Known, Known)> = None;
        for lane in lanes_of(lanes) {
            let known = &mut self.known[warp as usize * 32 + lane];
            match &last {
                Some((before, after)) if before.same(known) => *known = after.clone(),
                _ => {
                    let before = known.clone();
                    known.join(said);
                    last = Some((before, known.clone()));
                }
            }
        }
    }

    /// Executes a barrier: each of these lanes learns the accesses of all of them.
    pub(crate) fn join(&mut self, lanes: &[(u32, u32)]) {
        let mut said = Known::default();
        let mut published: Option<Known> = None;
        for &(warp, lanes) in lanes {
            self.release(warp, lanes, &mut said);
            for lane in lanes_of(lanes) {
                if let Some(known) = &self.published[warp as usize * 32 + lane] {
                    published.get_or_insert_default().join(known);
                }
            }
        }
        for &(warp, lanes) in lanes {
            for lane in lanes_of(lanes) {
                let thread = warp as usize * 32 + lane;
                self.known[thread] = said.clone();
                self.published[thread].clone_from(&published);
            }
        }
    }

    /// Returns the times that all these lanes know.
    pub(crate) fn common(&self, warp: u32, lanes: u32) -> Known {
        common(lanes_of(lanes).map(|lane| &self.known[warp as usize * 32 + lane]))
    }

    /// `fence.acq_rel.gpu` of these lanes.
    pub(crate) fn fence(&mut self, warp: u32, lanes: u32) {
        for lane in lanes_of(lanes) {
            let thread = warp as usize * 32 + lane;
            let heard = std::mem::take(&mut self.heard[thread]);
            self.known[thread].hear(&heard, self.block);
            let mut said = Known::default();
            self.release(warp, 1 << lane, &mut said);
            self.published[thread] = Some(said);
        }
    }

    /// `fence.proxy.async` or `fence.mbarrier_init` of these lanes.
    pub(crate) fn proxy_fence(&mut self, warp: u32, lanes: u32, barriers_only: bool) {
        let first = warp as usize * 32;
        let known = lanes_of(lanes).map(|lane| self.known[first + lane].clone()).collect();
        let time = &mut self.times[warp as usize];
        self.fences[warp as usize].push(ProxyFence { time: *time, lanes, barriers_only, known });
        *time += 1;
    }

    /// Returns whether a lane fenced its write at `time` and `member` knows of the fence.
    pub(crate) fn fenced(&self, (warp, lane): (u32, u32), time: u32, member: Member, barrier: bool) -> bool {
        let fences = &self.fences[warp as usize];
        let from = fences.partition_point(|fence| fence.time < time);
        let of_lane = |fence: &&ProxyFence| fence.lanes >> lane & 1 == 1 && (barrier || !fence.barriers_only);
        let writer = warp as usize * 32 + lane as usize;
        fences[from..]
            .iter()
            .find(of_lane)
            .is_some_and(|fence| member == writer || self.known[member].time(writer) > fence.time)
    }

    /// Returns whether a thread observed a write that `agent` made at `time`, then executed a
    /// fence, and an access of `member`, issued by `warp`, is ordered after the fence.
    ///
    /// A product of a warp group is ordered after fences that every lane of the warp executed.
    pub(crate) fn observed_and_fenced(
        &self,
        (agent, time): (Member, u32),
        (warp, member): (u32, Member),
    ) -> bool {
        let lane_fenced = |lane: usize| {
            self.fences[warp as usize].iter().any(|fence| fence.observers(agent, time).any(|of| of == lane))
        };
        let is_group = (self.threads..self.threads + self.times.len().div_ceil(4)).contains(&member);
        if is_group && (0..32).all(lane_fenced) {
            return true;
        }
        self.fences.iter().enumerate().any(|(warp, fences)| {
            let knows = |fence: &ProxyFence, lane: usize| {
                let thread = warp * 32 + lane;
                member == thread || self.known[member].time(thread) > fence.time
            };
            fences.iter().any(|fence| fence.observers(agent, time).any(|lane| knows(fence, lane)))
        })
    }

    /// An atomic load of a lane from global memory.
    pub(crate) fn atomic_load(&mut self, (warp, lane): (u32, u32), address: u64, acquires: bool) {
        let Some(said) = self.places.get(&address) else { return };
        let thread = (warp * 32 + lane) as usize;
        if acquires {
            self.known[thread].hear(said, self.block);
        } else {
            join_blocks(&mut self.heard[thread], said);
        }
    }

    /// An atomic store of a lane to global memory.
    ///
    /// A read-modify-write keeps earlier releases.
    pub(crate) fn atomic_store(
        &mut self,
        (warp, lane): (u32, u32),
        address: u64,
        releases: bool,
        reads: bool,
    ) {
        let thread = (warp * 32 + lane) as usize;
        if !reads {
            self.places.remove(&address);
        }
        if releases {
            let mut said = Known::default();
            self.release(warp, 1 << lane, &mut said);
            said.tell(self.block, self.places.entry(address).or_default());
        } else if let Some(published) = &self.published[thread] {
            published.tell(self.block, self.places.entry(address).or_default());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_join_is_the_later_of_both_clocks() {
        let (mut a, mut b) = (Known::default(), Known::default());
        a.learn(3, 5);
        b.learn(1, 2);
        b.learn(3, 4);
        a.join(&b);
        assert_eq!([0, 1, 2, 3, 9].map(|member| a.time(member)), [0, 2, 0, 5, 0]);
        b.join(&a);
        assert!(a.same(&b));
    }

    #[test]
    fn blocks_acquire_each_others_clocks() {
        let mut clocks = Clocks::default();
        clocks.start_block(7, 64);
        clocks.atomic_store((1, 3), 100, true, true);
        clocks.start_block(2, 64);
        clocks.atomic_load((0, 0), 100, false);
        assert_eq!(clocks.known(0).time_elsewhere(7, 35), 0);
        clocks.fence(0, 1);
        assert_eq!(clocks.known(0).time_elsewhere(7, 35), 1);
        assert_eq!(clocks.known(1).time_elsewhere(7, 35), 0);
        clocks.join(&[(0, 3)]);
        assert_eq!(clocks.known(1).time_elsewhere(7, 35), 1);
    }
}
