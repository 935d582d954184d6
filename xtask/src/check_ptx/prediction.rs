//! Predicts speed from machine code: the limiting resource, and the share of memory bandwidth.
//!
//! The prediction is a bound, not a simulation. A kernel cannot be faster than its bytes, its
//! instructions, or its instructions of one kind allow. Latency and conflicts make it slower: on an
//! H200 the shipped kernels reach 80 to 85 % of the issue bound (docs/lab/sass.md).

use super::assembly::Assembled;
use super::main_path::PathShape;
use super::resources::{REGISTERS, registers_of_a_warp};
use super::sass::Instruction;
use microscale_kernels_abi::Kernel;
use microscale_kernels_abi::launch::WARP;

/// A GPU according to its data sheet and the CUDA programming guide.
pub(super) struct Gpu {
    pub(super) name: &'static str,
    /// The GPU that the machine code is assembled for.
    pub(super) assembled_for: &'static str,
    pub(super) multiprocessors: f64,
    pub(super) clock_ghz: f64,
    pub(super) bandwidth_gbs: f64,
    /// Lanes per clock and multiprocessor of the integer and logic unit.
    ///
    /// Source: the guide's table of throughputs, 32-bit integer additions.
    pub(super) logic_lanes: f64,
    /// Lanes per clock and multiprocessor of the multiply-add units.
    pub(super) multiply_lanes: f64,
    /// Maximum number of resident warps per multiprocessor.
    pub(super) warps: u32,
}

/// The GPUs to predict for.
///
/// Sources: NVIDIA's data sheets of the A100 80GB SXM, H200 SXM and HGX B200 (an eighth of it), and
/// of the GeForce RTX 5090. The clocks are boost clocks. The B200's clock is not in its data sheet
/// and is taken from its driver's report.
pub(super) const GPUS: [Gpu; 4] = [
    Gpu {
        name: "A100",
        assembled_for: "sm_80",
        multiprocessors: 108.0,
        clock_ghz: 1.41,
        bandwidth_gbs: 2039.0,
        logic_lanes: 64.0,
        multiply_lanes: 64.0,
        warps: 64,
    },
    Gpu {
        name: "H200",
        assembled_for: "sm_90",
        multiprocessors: 132.0,
        clock_ghz: 1.98,
        bandwidth_gbs: 4800.0,
        logic_lanes: 64.0,
        multiply_lanes: 128.0,
        warps: 64,
    },
    Gpu {
        name: "B200",
        assembled_for: "sm_100f",
        multiprocessors: 148.0,
        clock_ghz: 1.965,
        bandwidth_gbs: 8000.0,
        logic_lanes: 64.0,
        multiply_lanes: 128.0,
        warps: 64,
    },
    Gpu {
        name: "RTX 5090",
        assembled_for: "sm_120f",
        multiprocessors: 170.0,
        clock_ghz: 2.41,
        bandwidth_gbs: 1792.0,
        logic_lanes: 128.0,
        multiply_lanes: 128.0,
        warps: 48,
    },
];

/// Lanes that can issue an instruction per clock and multiprocessor: four schedulers with a warp
/// each.
const ISSUE_LANES: f64 = 128.0;
/// Lanes of the units that are equal on all these GPUs.
///
/// Special functions include conversions of width, and memory includes shuffles.
const SPECIAL_LANES: f64 = 16.0;
const MEMORY_LANES: f64 = 32.0;

/// The unit that executes an instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Unit {
    Multiply,
    Logic,
    Special,
    Memory,
    /// Branches, uniform registers and barriers.
    Other,
}

fn unit(instruction: &Instruction) -> Unit {
    match instruction.name() {
        "FADD" | "FMUL" | "FFMA" | "IMAD" | "HADD2" | "HMUL2" | "HFMA2" | "FADD2" | "FMUL2" | "FFMA2" => {
            Unit::Multiply
        }
        "MUFU" | "I2F" | "F2I" | "F2F" | "I2FP" | "POPC" => Unit::Special,
        "LDG" | "STG" | "RED" | "ATOMG" | "SHFL" | "LDC" | "S2R" | "LDS" | "STS" => Unit::Memory,
        "BRA" | "EXIT" | "BSSY" | "BSYNC" | "WARPSYNC" | "NOP" | "CALL" | "RET" => Unit::Other,
        name if name.starts_with('U') || name.starts_with("R2U") => Unit::Other,
        _ => Unit::Logic,
    }
}

/// The expected speed of a kernel on a GPU.
pub(super) struct Prediction {
    /// Instructions per element: in total, on the multiply-add units, and on the logic unit.
    pub(super) instructions: [f64; 3],
    /// The limiting resource.
    pub(super) limiter: &'static str,
    /// Share of the bandwidth, in percent.
    pub(super) of_bandwidth: f64,
    /// Share of a multiprocessor's warps that registers allow to be resident, in percent.
    pub(super) occupancy: f64,
}

/// Predicts the speed of a kernel that has a straight main path and moves bytes.
pub(super) fn predict(gpu: &Gpu, assembled: &Assembled) -> Option<Prediction> {
    let kernel = assembled.kernel?;
    let bytes = bytes_an_element(kernel.name)?;
    let path = assembled.main_path.as_ref().filter(|path| path.shape == PathShape::Straight)?;
    let (elements, threads) = kernel.elements_per_thread();
    let each = f64::from(threads) / f64::from(elements);
    let of = |wanted: Unit| {
        path.instructions.iter().filter(|i| unit(&assembled.code.instructions[**i]) == wanted).count() as f64
            * each
    };
    let all = path.instructions.len() as f64 * each;
    let lanes_a_nanosecond = gpu.multiprocessors * gpu.clock_ghz;
    let bounds = [
        ("memory", bytes / gpu.bandwidth_gbs),
        ("issue", all / ISSUE_LANES / lanes_a_nanosecond),
        ("multiply-add", of(Unit::Multiply) / gpu.multiply_lanes / lanes_a_nanosecond),
        ("logic", of(Unit::Logic) / gpu.logic_lanes / lanes_a_nanosecond),
        ("special", of(Unit::Special) / SPECIAL_LANES / lanes_a_nanosecond),
        ("load, store, shuffle", of(Unit::Memory) / MEMORY_LANES / lanes_a_nanosecond),
    ];
    let (limiter, time) = bounds.into_iter().max_by(|a, b| a.1.total_cmp(&b.1))?;
    Some(Prediction {
        instructions: [all, of(Unit::Multiply), of(Unit::Logic)],
        limiter,
        of_bandwidth: 100.0 * bounds[0].1 / time,
        occupancy: 100.0 * occupancy(kernel, assembled.resources.registers, gpu.warps),
    })
}

/// Returns the share of a multiprocessor's warps that its registers allow.
fn occupancy(kernel: &Kernel, registers: u32, most_warps: u32) -> f64 {
    let warps_a_block = kernel.threads / WARP;
    let blocks = REGISTERS / registers_of_a_warp(registers).max(1) / warps_a_block;
    f64::from((blocks * warps_a_block).min(most_warps)) / f64::from(most_warps)
}

/// Returns the bytes that a kernel must move per element, from the kernel's name.
///
/// `None` for kernels that do not stream a matrix, and for kernels that spend most time in a loop
/// whose iterations depend on the values.
fn bytes_an_element(name: &str) -> Option<f64> {
    if name.contains("_search_") {
        return None;
    }
    let value = if name.contains("_f32") { 4.0 } else { 2.0 };
    if name.starts_with("amax") {
        return Some(value);
    }
    let (code, block) = match name {
        _ if name.starts_with("mxfp4") => (0.5, 32.0),
        _ if name.starts_with("mxfp8") => (1.0, 32.0),
        _ if name.starts_with("nvfp4") && !name.contains("plan_") => (0.5, 16.0),
        _ => return None,
    };
    Some(value + code + 1.0 / block)
}

#[cfg(test)]
mod tests {
    use super::super::main_path::main_path;
    use super::super::resources::Resources;
    use super::super::sass::tests::listing;
    use super::*;
    use microscale_kernels_abi::Converts;
    use microscale_kernels_abi::launch::Targets;

    #[test]
    fn occupancy_matches_nvidias_calculator() {
        let kernel = |threads| Kernel {
            name: "k",
            dtype: None,
            threads,
            elements: 1,
            shared: 0,
            converts: Converts::Nothing,
            resident: 0,
            targets: Targets::All,
        };
        for (threads, registers, most, expected) in [
            (128, 32, 64, 1.0),
            (128, 48, 64, 0.625),
            (128, 56, 64, 0.5625),
            (256, 64, 64, 0.5),
            (128, 40, 48, 1.0),
            (128, 255, 64, 0.125),
        ] {
            assert_eq!(
                occupancy(&kernel(threads), registers, most),
                expected,
                "{threads} threads, {registers} registers"
            );
        }
    }

    #[test]
    fn the_scarcest_resource_is_named() {
        const KERNEL: Kernel = Kernel {
            name: "amax_bf16",
            dtype: None,
            threads: 32,
            elements: 32,
            shared: 0,
            converts: Converts::Nothing,
            resident: 0,
            targets: Targets::All,
        };
        let of = |lines: &str| {
            let code = listing(lines);
            let main_path = main_path(&code);
            let resources = Resources { registers: 32, ..Default::default() };
            let assembled =
                Assembled { kernel: Some(&KERNEL), name: "amax_bf16".into(), resources, main_path, code };
            predict(&GPUS[1], &assembled).unwrap()
        };
        let little = of("LDG.E.128 R4, [R2]\nFADD R0, R4, R5\nEXIT");
        assert_eq!((little.limiter, little.of_bandwidth, little.instructions[1]), ("memory", 100.0, 1.0));
        let much = of(&format!("LDG.E.128 R4, [R2]\n{}EXIT", "LOP3.LUT R0, R4, R5, RZ\n".repeat(100)));
        assert_eq!(much.limiter, "logic");
        assert!(much.of_bandwidth < 10.0);
    }
}
