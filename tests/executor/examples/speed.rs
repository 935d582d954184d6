//! Measures the executor's speed: lane-instructions per second on one core.
//!
//! `cargo run --release -p microscale-executor --example speed`

use std::time::Instant;

use microscale_executor::{Argument, Launch, Memory, Module};
use microscale_kernels_abi::{
    BlockGrid, Family, MxOptions, Ptx, REPORT_SLOTS, ReportSlot, ScaleGrid, TARGETS,
};

const ELEMENTS: usize = 1024 * 1024;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    for target in ["sm_80", "sm_120f"] {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../host/ptx");
        let of = TARGETS.iter().find(|of| of.name == target).ok_or("no such target")?;
        let text = Ptx::read(folder.as_ref(), Family::Quantize, of)?.to_string();
        let start = Instant::now();
        let module = Module::parse(&text)?;
        println!("{target}: module read in {:.1?}", start.elapsed());
        for dtype in ["bf16", "f32"] {
            let name = format!("mxfp4_quantize_{dtype}_even_aligned");
            let start = Instant::now();
            let kernel = module.kernel(&name)?;
            println!("  {name}: lowered in {:.1?}", start.elapsed());
            for races in [true, false] {
                let mut memory = Memory::new();
                let bytes = if dtype == "f32" { 4 } else { 2 };
                let mut random = fastrand::Rng::with_seed(1);
                let values: Vec<u8> = (0..ELEMENTS)
                    .flat_map(|_| (random.f32() - 0.5).to_bits().to_be_bytes().into_iter().take(bytes).rev())
                    .collect();
                let values = memory.allocate_from("values", &values);
                let codes = memory.allocate("codes", ELEMENTS / 2);
                let scales = memory.allocate("scales", ELEMENTS / 32);
                let report = vec![0; REPORT_SLOTS * size_of::<ReportSlot>()];
                let report = memory.allocate_from("report", &report);
                let grid = BlockGrid::new(1, ELEMENTS as u64, ELEMENTS as u64, 32).ok_or("an empty grid")?;
                let options =
                    MxOptions { mantissa_addend: 0, ties: 0, negative_zero: 0, saturate_non_finite: 0 };
                // SAFETY: each structure consists of numbers of one size, so it has no padding and
                // every byte is initialized.
                let [grid, scale_grid, options] = unsafe {
                    [Argument::of(&grid), Argument::of(&ScaleGrid::linear(1)), Argument::of(&options)]
                };
                let arguments =
                    [values.into(), codes.into(), scales.into(), report.into(), grid, scale_grid, options];
                let blocks = ELEMENTS.div_ceil(4096) as u32;
                let launch = Launch::new(blocks, 128).races(races);
                let start = Instant::now();
                let statistics = kernel.run(&mut memory, &launch, &arguments)?;
                let seconds = start.elapsed().as_secs_f64();
                println!(
                    "    races {races}: {} lane-instructions, {:.0} million a second, {:.0} ns a warp instruction",
                    statistics.lane_instructions,
                    statistics.lane_instructions as f64 / seconds / 1e6,
                    seconds * 1e9 / statistics.warp_instructions as f64,
                );
            }
        }
    }
    Ok(())
}
