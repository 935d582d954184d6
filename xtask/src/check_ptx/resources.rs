//! Reads the resources of each kernel from the output of `ptxas -v`.

use microscale_kernels_abi::launch::WARP;
use std::collections::BTreeMap;

/// Registers of a multiprocessor.
pub(super) const REGISTERS: u32 = 65_536;

/// Returns the registers that a warp allocates if each lane uses `of_lane`. The unit is 256.
pub(super) fn registers_of_a_warp(of_lane: u32) -> u32 {
    (of_lane * WARP).next_multiple_of(256)
}

/// The resources of a kernel.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct Resources {
    pub(super) registers: u32,
    /// Bytes of stack, and bytes of spill stores and loads. All of these are local memory.
    pub(super) stack: u32,
    pub(super) spill_stores: u32,
    pub(super) spill_loads: u32,
}

/// Parses the resources of every kernel.
pub(super) fn parse(said: &str) -> BTreeMap<String, Resources> {
    let mut kernels: BTreeMap<String, Resources> = BTreeMap::new();
    let mut current = None;
    for line in said.lines() {
        if let Some((_, rest)) = line.split_once("Compiling entry function '") {
            let name = rest.split('\'').next().unwrap_or_default();
            current = Some(kernels.entry(name.to_owned()).or_default());
        } else if let Some(kernel) = &mut current {
            let mut read = |field: fn(&mut Resources) -> &mut u32, unit: &str| {
                if let Some(number) = number_before(line, unit) {
                    *field(kernel) = number;
                }
            };
            read(|r| &mut r.registers, " registers");
            read(|r| &mut r.stack, " bytes stack frame");
            read(|r| &mut r.spill_stores, " bytes spill stores");
            read(|r| &mut r.spill_loads, " bytes spill loads");
        }
    }
    kernels
}

fn number_before(line: &str, unit: &str) -> Option<u32> {
    let (before, _) = line.split_once(unit)?;
    before.split([' ', ',']).next_back()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resources_are_parsed() {
        let said = "ptxas info    : 0 bytes gmem\n\
            ptxas info    : Compiling entry function 'a' for 'sm_90'\n\
            ptxas info    : Function properties for a\n\
            \x20   0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n\
            ptxas info    : Used 10 registers, used 0 barriers, 380 bytes cmem[0]\n\
            ptxas info    : Compiling entry function 'b' for 'sm_90'\n\
            ptxas info    : Function properties for b\n\
            \x20   320 bytes stack frame, 16 bytes spill stores, 8 bytes spill loads\n\
            ptxas info    : Used 255 registers, used 1 barriers, 320 bytes cumulative stack size\n";
        let b = Resources { registers: 255, stack: 320, spill_stores: 16, spill_loads: 8 };
        let a = Resources { registers: 10, ..Default::default() };
        assert_eq!(parse(said), BTreeMap::from([("a".to_owned(), a), ("b".to_owned(), b)]));
    }
}
