//! Launches, and what must come of them.

use std::mem::offset_of;

use microscale::{Element, Format, GlobalScale, Position, QuantizedTensor, Report, Shape};
use microscale_executor::{Argument, Buffer, Launch, Memory, Module, Statistics};
use microscale_formats::nvfp4::{Arithmetic, Direction};
use microscale_formats::plan::NvPlan;
use microscale_kernels_abi::{
    ApplyGlobal, GlobalSlot, Kernel, NvOptions, Ptx, REPORT_SLOTS, ReportSlot, Target, kernels,
};

/// A target's PTX: the modules of all families as one.
pub(crate) fn ptx(target: &'static Target) -> Ptx {
    let folder = microscale_test_support::data_dir().join("host/ptx");
    Ptx::read_all(&folder, target).unwrap_or_else(|error| panic!("{error}"))
}

/// A kernel's description.
pub(crate) fn kernel(name: &str) -> &'static Kernel {
    kernels().find(|kernel| kernel.name == name).unwrap_or_else(|| panic!("no kernel {name}"))
}

/// Bytes of shared memory that a thread block has, at most.
pub(super) const MOST_SHARED: u32 = 227 << 10;

/// A kernel with its arguments, and the elements that the launch covers; thread blocks, if the kernel has no number of
/// elements for each.
pub(crate) struct Step {
    pub(crate) kernel: String,
    pub(crate) elements: u64,
    /// Threads in a thread block, and bytes of shared memory, where they are not the kernel's own.
    pub(crate) shape: Option<(u32, u32)>,
    /// Thread blocks of a cluster; 1 if there are none.
    pub(crate) cluster: u32,
    pub(crate) arguments: Vec<Argument>,
}

impl Step {
    /// Thread blocks, threads in each, and bytes of shared memory of each.
    pub(crate) fn launch(&self) -> (u32, u32, u32) {
        let Kernel { threads, elements, shared, .. } = kernel(&self.kernel);
        let blocks = self.elements.div_ceil(u64::from((*elements).max(1)));
        let (threads, shared) = self.shape.unwrap_or((*threads, *shared));
        (u32::try_from(blocks).expect("a small launch"), threads, shared)
    }
}

/// Says what is wrong with memory.
type Check = Box<dyn Fn(&Memory) -> Result<(), String>>;

/// Launches, one after the other, and what must lie in memory afterwards.
pub(crate) struct Prepared {
    pub(crate) memory: Memory,
    pub(crate) steps: Vec<Step>,
    pub(crate) checks: Vec<Check>,
}

impl Prepared {
    /// Nothing yet.
    pub(crate) fn new() -> Self {
        Self { memory: Memory::new(), steps: Vec::new(), checks: Vec::new() }
    }

    /// Adds a launch.
    pub(crate) fn step(&mut self, kernel: impl Into<String>, elements: u64, arguments: Vec<Argument>) {
        self.steps.push(Step { kernel: kernel.into(), elements, shape: None, cluster: 1, arguments });
    }

    /// Says how the last launch differs from what the kernel says of itself: a launch that a GPU could do.
    pub(crate) fn shaped(&mut self, threads_and_shared: (u32, u32)) {
        let (threads, shared) = threads_and_shared;
        let step = self.steps.last_mut().expect("a launch");
        let could = threads <= kernel(&step.kernel).threads && shared <= MOST_SHARED;
        assert!(could, "{}: {threads} threads, {shared} bytes of shared memory", step.kernel);
        step.shape = Some(threads_and_shared);
    }

    /// Launches the last step in clusters of so many thread blocks.
    pub(crate) fn in_clusters(&mut self, cluster: u32) {
        self.steps.last_mut().expect("a launch").cluster = cluster;
    }

    /// The values of a matrix, with nothing before or behind them; or with the first one right behind a
    /// multiple of 16 bytes.
    pub(crate) fn values<T: Element>(&mut self, values: &[T], odd: bool) -> Argument {
        let bytes = bytemuck::cast_slice(values);
        if odd {
            return self.memory.allocate_from_aligned("values", bytes, size_of::<T>() as u64).into();
        }
        self.memory.allocate_from("values", bytes).into()
    }

    /// The slot of a tensor's global scale, zeros where there is none as in the library, and what a kernel does with it.
    pub(crate) fn global_scale(&mut self, tensor: &QuantizedTensor) -> (Argument, Argument) {
        self.global_scales(&[tensor])
    }

    /// The slots of several tensors, whose global scales have one direction, and what a kernel does with them.
    pub(crate) fn global_scales(&mut self, tensors: &[&QuantizedTensor]) -> (Argument, Argument) {
        let mut slots = vec![0; tensors.len() * size_of::<GlobalSlot>()];
        for (slot, tensor) in slots.chunks_mut(size_of::<GlobalSlot>()).zip(tensors) {
            let value = tensor.global_scale().map_or(0.0, GlobalScale::value).to_le_bytes();
            slot[offset_of!(GlobalSlot, scale)..][..value.len()].copy_from_slice(&value);
        }
        let apply = match tensors[0].global_scale().map(GlobalScale::direction) {
            Some(Direction::Divisor) => ApplyGlobal::Divisor,
            Some(Direction::Multiplier) => ApplyGlobal::Multiplier,
            None => ApplyGlobal::Absent,
        };
        (self.memory.allocate_from("global", &slots).into(), (apply as u32).into())
    }

    /// All bytes of the buffer must be these.
    pub(crate) fn expect(&mut self, what: &'static str, buffer: Buffer, expected: Vec<u8>) {
        self.checks.push(Box::new(move |memory| {
            let found = memory.bytes(buffer).map_err(|error| format!("{what}: {error}"))?;
            match found.iter().zip(&expected).position(|(found, expected)| found != expected) {
                None if found.len() == expected.len() => Ok(()),
                None => Err(format!("{what}: {} bytes instead of {}", found.len(), expected.len())),
                Some(i) => {
                    Err(format!("{what}: byte {i} is {:#04x} instead of {:#04x}", found[i], expected[i]))
                }
            }
        }));
    }

    /// A report that must become this one.
    pub(crate) fn report(&mut self, shape: Shape, format: Format, expected: Report) -> Argument {
        let zeros = vec![0; REPORT_SLOTS * size_of::<ReportSlot>()];
        let buffer = self.memory.allocate_from("report", &zeros);
        self.checks.push(Box::new(move |memory| {
            let bytes = memory.bytes(buffer).map_err(|error| error.to_string())?;
            let found = read_report(&bytes, shape, format);
            if found == expected { Ok(()) } else { Err(format!("report: {found:?} instead of {expected:?}")) }
        }));
        buffer.into()
    }

    /// Runs the launches on the first module that has each kernel. Gives the memory afterwards and what each launch
    /// did, or says what is wrong: a fault, or what lies in memory.
    pub(crate) fn run(
        self,
        modules: &[&Module],
        launch: &Launch,
    ) -> Result<(Memory, Vec<(String, Statistics)>), String> {
        let Self { mut memory, steps, checks } = self;
        let mut all = Vec::new();
        for step in steps {
            let (blocks, threads, shared) = step.launch();
            let launch = Launch { blocks, threads, shared, cluster: step.cluster, ..launch.clone() };
            let Step { kernel: name, arguments, .. } = step;
            let module = modules.iter().find(|module| module.kernels().any(|kernel| kernel == name));
            let compiled =
                module.ok_or("no such kernel")?.kernel(&name).map_err(|error| error.to_string())?;
            let done = compiled.run(&mut memory, &launch, &arguments).map_err(|fault| fault.to_string())?;
            all.push((name, done));
        }
        for check in &checks {
            check(&memory)?;
        }
        Ok((memory, all))
    }
}

/// The sum of a report's slots.
fn read_report(bytes: &[u8], shape: Shape, format: Format) -> Report {
    let mut report = Report::default();
    let mut first = 0;
    for slot in bytes.as_chunks::<{ size_of::<ReportSlot>() }>().0 {
        let field = |offset: usize| u64::from_le_bytes(*slot[offset..].first_chunk().unwrap());
        report.nan += field(offset_of!(ReportSlot, nan));
        report.infinite += field(offset_of!(ReportSlot, infinite));
        report.clipped_blocks += field(offset_of!(ReportSlot, clipped));
        report.flushed_blocks += field(offset_of!(ReportSlot, flushed));
        report.saturated_scales += field(offset_of!(ReportSlot, scale_saturated));
        report.rescaled_blocks += field(offset_of!(ReportSlot, rescaled));
        report.tried_scales += field(offset_of!(ReportSlot, tried));
        first = first.max(field(offset_of!(ReportSlot, first_non_finite)));
    }
    let row_elements = shape.cols.next_multiple_of(format.block()) as u64;
    report.first_non_finite = (first != 0)
        .then(|| Position { row: (!first / row_elements) as usize, col: (!first % row_elements) as usize });
    report
}

/// The argument of a structure of `kernels-abi` that is passed by value.
pub(crate) fn argument<T: Copy + Plain>(value: &T) -> Argument {
    // SAFETY: that is what `Plain` promises.
    unsafe { Argument::of(value) }
}

/// The arguments of products with one matrix for all tokens, where others have a plan and two lists of rows: nulls.
pub(crate) fn no_experts() -> [Argument; 3] {
    [0u64; 3].map(Argument::from)
}

/// Structures without padding.
///
/// # Safety
/// Every byte of a value is initialised.
pub(crate) unsafe trait Plain {}
// SAFETY: fields are numbers, the wide ones first, up to a multiple of the widest.
unsafe impl Plain for microscale_kernels_abi::BlockGrid {}
// SAFETY: as above.
unsafe impl Plain for microscale_kernels_abi::ScaleGrid {}
// SAFETY: as above.
unsafe impl Plain for microscale_kernels_abi::Divider {}
// SAFETY: as above.
unsafe impl Plain for microscale_kernels_abi::MxOptions {}
// SAFETY: as above.
unsafe impl Plain for microscale_kernels_abi::gemv::GemvGrid {}
// SAFETY: as above.
unsafe impl Plain for microscale_kernels_abi::weights::WeightsGrid {}
// SAFETY: as above.
unsafe impl Plain for microscale_kernels_abi::weights::PipelinedGrid {}
// SAFETY: as above.
unsafe impl Plain for microscale_kernels_abi::gemm_grids::ArrangeGrid {}
// SAFETY: as above.
unsafe impl Plain for microscale_kernels_abi::gemm_grids::GemmGrid {}
// SAFETY: as above.
unsafe impl Plain for microscale_kernels_abi::experts::RouteGrid {}
// SAFETY: as above.
unsafe impl Plain for microscale_kernels_abi::Epilogue {}
// SAFETY: as above.
unsafe impl Plain for microscale_kernels_abi::epilogue::SplitGrid {}
// SAFETY: as above.
unsafe impl Plain for microscale_kernels_abi::epilogue::MergeGrid {}
// SAFETY: as above.
unsafe impl Plain for microscale_kernels_abi::experts::PlanGrid {}

/// NVFP4's options as an argument.
pub(crate) fn nv_options(options: &NvOptions) -> Argument {
    // Two bytes behind the one of the least scale and the one of the zero scale are nobody's.
    let arithmetic = offset_of!(NvOptions, plan) + offset_of!(NvPlan, quantizer);
    let start = arithmetic + offset_of!(Arithmetic, zero_scale) + 1;
    assert_eq!(start + 2, arithmetic + offset_of!(Arithmetic, quotient));
    // SAFETY: all other fields, at every depth, are words, and the arithmetic is the quantizer's first.
    unsafe { Argument::of_padded(options, &[start, start + 1]) }
}
