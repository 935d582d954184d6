//! Executes some of the library's kernels and compares with the library on the CPU, bit for bit.
//!
//! The tests use every target, schedule and approximation. `microscale-tests` covers every kernel
//! with every option.

use std::mem::offset_of;

use half::bf16;
use microscale::formats::nvfp4::{Arithmetic, Direction};
use microscale::formats::{E2m1, GlobalScale};
use microscale::{Format, Global, NonFinite, Numerics, Recipe, Scheme, Shape, dequantize, quantize};
use microscale_executor::{Approximation, Argument, Buffer, Launch, Memory, Module, Schedule, Statistics};
use microscale_formats::plan::NvPlan;
use microscale_kernels_abi::{
    ApplyGlobal, BlockGrid, GlobalSlot, Kernel, MxOptions, NvOptions, Ptx, REPORT_SLOTS, ReportSlot,
    ScaleGrid, TARGETS, Target, kernels,
};

/// Returns the kernels of a target.
fn module(target: &'static Target) -> Module {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../host/ptx");
    Module::parse(&Ptx::read_all(folder.as_ref(), target).unwrap().to_string()).unwrap()
}

/// Makes an argument from a structure of `kernels-abi`.
fn argument<T: Copy>(value: &T) -> Argument {
    // SAFETY: all callers pass structures made of numbers of one size, which have no padding, so
    // every byte is initialized.
    unsafe { Argument::of(value) }
}

/// Makes the argument for NVFP4's options, whose padding is two bytes among words.
fn options_argument(options: &NvOptions) -> Argument {
    let arithmetic = offset_of!(NvOptions, plan) + offset_of!(NvPlan, quantizer);
    let start = arithmetic + offset_of!(Arithmetic, zero_scale) + 1;
    assert_eq!(start + 2, arithmetic + offset_of!(Arithmetic, quotient));
    // SAFETY: the padding follows `zero_scale`, at an offset that relies on `arithmetic` being the
    // quantizer's first field. All other fields, at every depth, are words or the two scale bytes
    // before the padding, so every other byte is initialized.
    unsafe { Argument::of_padded(options, &[start, start + 1]) }
}

/// Returns launches whose options must not matter.
fn launches() -> Vec<(Schedule, Approximation)> {
    vec![
        (Schedule::LowestFirst, Approximation::Nearest),
        (Schedule::HighestFirst, Approximation::Low),
        (Schedule::Random(1), Approximation::High),
        (Schedule::Random(2), Approximation::Scattered(3)),
    ]
}

struct Trial<'a> {
    module: &'a Module,
    launch: Launch,
    memory: Memory,
    /// Elements, in one row.
    elements: usize,
}

impl Trial<'_> {
    fn run(&mut self, name: &str, arguments: &[Argument]) -> Statistics {
        let Kernel { threads, elements, .. } = kernels().find(|kernel| kernel.name == name).unwrap();
        let padded = self.elements.next_multiple_of(32) as u32;
        let launch = Launch { blocks: padded.div_ceil(*elements), threads: *threads, ..self.launch.clone() };
        let kernel = self.module.kernel(name).unwrap();
        kernel.run(&mut self.memory, &launch, arguments).unwrap_or_else(|fault| panic!("{fault}"))
    }

    /// Allocates codes, scales and a zeroed report.
    fn outputs(&mut self, block: usize) -> [Buffer; 3] {
        let blocks = self.elements.div_ceil(block);
        let report = vec![0; REPORT_SLOTS * size_of::<ReportSlot>()];
        [
            self.memory.allocate("codes", blocks * block / 2),
            self.memory.allocate("scales", blocks),
            self.memory.allocate_from("report", &report),
        ]
    }

    fn grids(&self, block: usize) -> [Argument; 2] {
        let cols = self.elements as u64;
        let grid = BlockGrid::new(1, cols, cols, block as u64).unwrap();
        [argument(&grid), argument(&ScaleGrid::linear(cols.div_ceil(block as u64)))]
    }
}

fn bytes<T: Copy, const N: usize>(values: &[T], bits: impl Fn(T) -> [u8; N]) -> Vec<u8> {
    values.iter().flat_map(|&value| bits(value)).collect()
}

/// Returns values of many magnitudes, some of them zero or not finite.
fn values(elements: usize, seed: u64) -> Vec<f32> {
    let mut random = fastrand::Rng::with_seed(seed);
    let value = |_| match random.u32(..400) {
        0 => f32::INFINITY,
        1 => f32::NAN,
        2..20 => 0.0,
        20..30 => -0.0,
        _ => (random.f32() - 0.5) * 2f32.powi(random.i32(-6..6)),
    };
    (0..elements).map(value).collect()
}

#[test]
fn mxfp4_of_bf16_round_trips() {
    let recipe = Recipe { non_finite: NonFinite::Propagate, ..Recipe::default() };
    let Scheme::Mxfp4(arithmetic) = recipe.scheme else { unreachable!() };
    for target in &TARGETS {
        let module = module(target);
        for (elements, seed) in [(9000, 1), (64, 2), (1, 3), (4096, 4)] {
            let input: Vec<bf16> = values(elements, seed).into_iter().map(bf16::from_f32).collect();
            let expected = quantize(&input, Shape::new(1, elements), &recipe).unwrap().tensor;
            for (schedule, approximation) in launches() {
                let launch = Launch::default().schedule(schedule).approximation(approximation);
                let mut trial = Trial { module: &module, launch, memory: Memory::new(), elements };
                let given =
                    trial.memory.allocate_from("values", &bytes(&input, |x| x.to_bits().to_le_bytes()));
                let [codes, scales, report] = trial.outputs(32);
                let [grid, scale_grid] = trial.grids(32);
                let options = MxOptions {
                    ties: 0,
                    mantissa_addend: arithmetic.scale_rule.mantissa_addend::<E2m1>(),
                    negative_zero: arithmetic.negative_zero as u32,
                    saturate_non_finite: 0,
                };
                let arguments = [
                    given.into(),
                    codes.into(),
                    scales.into(),
                    report.into(),
                    grid.clone(),
                    scale_grid.clone(),
                ];
                let arguments = [&arguments[..], &[argument(&options)]].concat();
                let statistics = trial.run("mxfp4_quantize_bf16_even_aligned", &arguments);
                assert!(statistics.lane_instructions > 0);
                assert_eq!(
                    trial.memory.bytes(codes).unwrap(),
                    expected.codes(),
                    "{}, {elements}",
                    target.name
                );
                assert_eq!(
                    trial.memory.bytes(scales).unwrap(),
                    expected.scales(),
                    "{}, {elements}",
                    target.name
                );

                let back = trial.memory.allocate("back", elements * 2);
                let arguments = [codes.into(), scales.into(), back.into(), grid, scale_grid];
                trial.run("mxfp4_dequantize_bf16_aligned", &arguments);
                let wanted = bytes(&dequantize::<bf16>(&expected), |x: bf16| x.to_bits().to_le_bytes());
                assert_eq!(trial.memory.bytes(back).unwrap(), wanted, "{}, {elements}", target.name);
            }
        }
    }
}

#[test]
fn nvfp4_of_f32_round_trips() {
    let numerics = Numerics::CompressedTensors;
    let arithmetic = numerics.nvfp4().unwrap();
    let given = match arithmetic.direction {
        Direction::Divisor => GlobalScale::Divisor(2688.0 / 13.0),
        Direction::Multiplier => GlobalScale::Multiplier(13.0 / 2688.0),
    };
    let recipe = Recipe::of(Format::Nvfp4, numerics).unwrap().with_global(Global::Given(given));
    let recipe = Recipe { non_finite: NonFinite::Propagate, ..recipe };
    for target in &TARGETS {
        let module = module(target);
        for (elements, seed) in [(9000, 5), (16, 6), (3, 7)] {
            let input = values(elements, seed);
            let expected = quantize(&input, Shape::new(1, elements), &recipe).unwrap().tensor;
            for (schedule, approximation) in launches() {
                let launch = Launch::default().schedule(schedule).approximation(approximation);
                let mut trial = Trial { module: &module, launch, memory: Memory::new(), elements };
                let values = trial.memory.allocate_from("values", &bytes(&input, f32::to_le_bytes));
                let slot = trial.memory.allocate_from("global", &[0; size_of::<GlobalSlot>()]);
                let [codes, scales, report] = trial.outputs(16);
                let [grid, scale_grid] = trial.grids(16);
                let plan = NvPlan::new(arithmetic, given.value());
                let options = NvOptions { plan, saturate_non_finite: 0 };
                let arguments = [values, codes, scales, slot, report].map(Argument::from);
                let rest = [grid.clone(), scale_grid.clone(), options_argument(&options)];
                trial.run("nvfp4_quantize_f32_given_aligned", &[&arguments[..], &rest].concat());
                assert_eq!(
                    trial.memory.bytes(codes).unwrap(),
                    expected.codes(),
                    "{}, {elements}",
                    target.name
                );
                assert_eq!(
                    trial.memory.bytes(scales).unwrap(),
                    expected.scales(),
                    "{}, {elements}",
                    target.name
                );

                let back = trial.memory.allocate("back", elements * 4);
                let apply = match arithmetic.direction {
                    Direction::Divisor => ApplyGlobal::Divisor,
                    Direction::Multiplier => ApplyGlobal::Multiplier,
                };
                let arguments = [codes, scales, slot, back].map(Argument::from);
                let rest = [grid, scale_grid, (apply as u32).into()];
                trial.run("nvfp4_dequantize_f32_aligned", &[&arguments[..], &rest].concat());
                let wanted = bytes(&dequantize::<f32>(&expected), f32::to_le_bytes);
                assert_eq!(trial.memory.bytes(back).unwrap(), wanted, "{}, {elements}", target.name);
            }
        }
    }
}
