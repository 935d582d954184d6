//! Runs a grid: clusters or single blocks one after the other, and the warps of a cluster in turns.

mod barriers;
mod bulk;
mod clusters;
mod compute;
mod copies;
mod flights;
mod grid;
mod matrices;
mod mbarriers;
mod memory;
mod pipes;
mod products;
mod registers;
mod step;
mod tensors;
mod together;
mod under_way;
mod warp;

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use self::grid::{Grid, Random, WARP};
use self::under_way::{Cluster, Products};
use self::warp::Warp;
use crate::fault::{Fault, FaultKind};
use crate::launch::{Argument, Coverage, Launch, Schedule, Statistics};
use crate::memory::{Memory, Shared};
use crate::module::Kernel;
use crate::race::Races;
use crate::tensor::TensorMemory;

impl Kernel {
    /// Runs the kernel on a grid. The host may read the buffers afterwards, even after a fault.
    ///
    /// # Errors
    ///
    /// The first fault in the order of the schedule, or [`FaultKind::Launch`] if the grid or the
    /// arguments do not match the kernel.
    pub fn run(
        &self,
        memory: &mut Memory,
        launch: &Launch,
        arguments: &[Argument],
    ) -> Result<Statistics, Fault> {
        let outside = |message: String| Fault {
            kernel: self.name.clone(),
            line: 0,
            instruction: String::new(),
            block: 0,
            thread: 0,
            kind: FaultKind::Launch(message).into(),
        };
        if launch.threads == 0 || launch.threads > 1024 || launch.blocks == 0 {
            return Err(outside(format!("{} blocks of {} threads", launch.blocks, launch.threads)));
        }
        // Warp groups must not span blocks. Kernels for tensor memory have none.
        let whole = if self.program.pairs.is_some() { WARP } else { products::WARPS * WARP };
        let clustered = launch.cluster > 1;
        if !(1..=clusters::MOST).contains(&launch.cluster)
            || !launch.blocks.is_multiple_of(launch.cluster)
            || clustered && !launch.threads.is_multiple_of(whole)
        {
            let Launch { blocks, threads, cluster, .. } = launch;
            return Err(outside(format!("{blocks} blocks of {threads} threads in clusters of {cluster}")));
        }
        let parameters = self.parameter_space(arguments).map_err(outside)?;
        memory.begin_launch(&self.program.global);
        let seed = match launch.schedule {
            Schedule::Random(seed) => seed,
            _ => 0,
        };
        let mut grid = Grid {
            kernel: self,
            launch,
            memory,
            parameters,
            races: launch.races.then(|| Races::new(self.program.partial)),
            random: Random(seed),
            seen: vec![0; self.program.code.len()],
            lane_instructions: 0,
            warp_instructions: 0,
            cluster: Cluster::default(),
            number: 0,
            shared: Shared::default(),
            mbarriers: BTreeMap::new(),
            bulk: Vec::new(),
            tensors: Vec::new(),
            half: None,
            pipes: Vec::new(),
            committed: Vec::new(),
            products: Vec::new(),
            events: 0,
            idle: 0,
            pc: 0,
        };
        grid.run()?;
        Ok(Statistics {
            lane_instructions: grid.lane_instructions,
            warp_instructions: grid.warp_instructions,
            coverage: Coverage { seen: grid.seen },
        })
    }

    /// Returns the parameter space with the arguments at their offsets.
    fn parameter_space(&self, arguments: &[Argument]) -> Result<Vec<u8>, String> {
        if arguments.len() != self.parameters.len() {
            return Err(format!("{} arguments for {} parameters", arguments.len(), self.parameters.len()));
        }
        let mut space = vec![0; self.program.parameters];
        for (argument, parameter) in arguments.iter().zip(&self.parameters) {
            let bytes = argument.as_bytes();
            if bytes.len() != parameter.size {
                return Err(format!(
                    "{} bytes for {} with its {}",
                    bytes.len(),
                    parameter.name,
                    parameter.size
                ));
            }
            space[parameter.offset..][..bytes.len()].copy_from_slice(bytes);
        }
        Ok(space)
    }
}

impl Grid<'_> {
    fn run(&mut self) -> Result<(), Fault> {
        let Launch { blocks, threads, cluster, .. } = *self.launch;
        let warps_of_block = threads.div_ceil(WARP);
        let mut warps: Vec<Warp> = (0..cluster * warps_of_block)
            .map(|index| Warp::new(&self.kernel.program, index, self.launch))
            .collect();
        let mut order: Vec<u32> = (0..blocks / cluster).collect();
        match self.launch.schedule {
            Schedule::LowestFirst => {}
            Schedule::HighestFirst => order.reverse(),
            Schedule::Random(_) => {
                for i in (1..order.len()).rev() {
                    order.swap(i, self.random.below(i as u32 + 1) as usize);
                }
            }
        }
        for number in order {
            self.number = number;
            self.cluster = Cluster::new(cluster, warps_of_block);
            self.shared = Shared::new(&self.kernel.program.shared, self.launch.shared, cluster);
            self.mbarriers.clear();
            self.tensors = (0..cluster).map(|_| TensorMemory::default()).collect();
            self.half = None;
            self.pipes.clear();
            self.products = warps.chunks(products::WARPS as usize).map(|_| Products::default()).collect();
            if let Some(races) = &mut self.races {
                races.clocks.start_block(number, cluster * warps_of_block * WARP);
            }
            for warp in &mut warps {
                warp.reset(&self.kernel.program, number);
            }
            self.run_cluster(&mut warps)?;
        }
        Ok(())
    }

    /// Runs all warps in turns until all are done.
    fn run_cluster(&mut self, warps: &mut [Warp]) -> Result<(), Fault> {
        let mut ready: Vec<usize> = Vec::new();
        loop {
            ready.clear();
            ready.extend((0..warps.len()).filter(|&index| warps[index].can_go_on(self.events)));
            if ready.is_empty() {
                if warps.iter().all(Warp::done) {
                    return self.land_all(warps);
                }
                self.unblock(warps)?;
                continue;
            }
            let turn = match self.launch.schedule {
                Schedule::LowestFirst => 0,
                Schedule::HighestFirst => ready.len() - 1,
                Schedule::Random(_) => {
                    if self.random.below(4) == 0 {
                        self.land_one(warps)?;
                    }
                    self.random.below(ready.len() as u32) as usize
                }
            };
            let warp = &mut warps[ready[turn]];
            warp.run(self).map_err(|trap| self.fault(warp.index, trap))?;
        }
    }
}
