//! Launches and their expected results.

use std::mem::offset_of;

use microscale::{Element, Format, GlobalScale, Position, QuantizedTensor, Report, Shape};
use microscale_executor::{Argument, Buffer, Launch, Memory, Module, Statistics};
use microscale_formats::nvfp4::{Arithmetic, Direction};
use microscale_formats::plan::NvPlan;
use microscale_kernels_abi::{
    ApplyGlobal, GlobalSlot, Kernel, NvOptions, Ptx, REPORT_SLOTS, ReportSlot, Target, kernels,
};

/// Returns a target's PTX, with the modules of all families merged.
pub(crate) fn ptx(target: &'static Target) -> Ptx {
    let folder = microscale_test_support::data_dir().join("host/ptx");
    Ptx::read_all(&folder, target).unwrap_or_else(|error| panic!("{error}"))
}

/// Returns a kernel's description.
pub(crate) fn kernel(name: &str) -> &'static Kernel {
    kernels().find(|kernel| kernel.name == name).unwrap_or_else(|| panic!("no kernel {name}"))
}

/// Maximum shared memory of a thread block in bytes.
pub(super) const MOST_SHARED: u32 = 227 << 10;

/// A kernel with its arguments and the number of elements to cover.
///
/// Kernels without a number of elements per thread block count thread blocks instead.
pub(crate) struct Step {
    pub(crate) kernel: String,
    pub(crate) elements: u64,
    /// Threads per thread block and bytes of shared memory, if they differ from the kernel's
    /// defaults.
    pub(crate) shape: Option<(u32, u32)>,
    /// Thread blocks per cluster, or 1 without clusters.
    pub(crate) cluster: u32,
    pub(crate) arguments: Vec<Argument>,
}

impl Step {
    /// Returns the number of thread blocks, and the threads and bytes of shared memory of each.
    pub(crate) fn launch(&self) -> (u32, u32, u32) {
        let Kernel { threads, elements, shared, .. } = kernel(&self.kernel);
        let blocks = self.elements.div_ceil(u64::from((*elements).max(1)));
        let (threads, shared) = self.shape.unwrap_or((*threads, *shared));
        (u32::try_from(blocks).expect("a small launch"), threads, shared)
    }
}

/// A check of memory that returns a message if it fails.
type Check = Box<dyn Fn(&Memory) -> Result<(), String>>;

/// Launches in order, and checks of memory afterwards.
pub(crate) struct Prepared {
    pub(crate) memory: Memory,
    pub(crate) steps: Vec<Step>,
    pub(crate) checks: Vec<Check>,
}

impl Prepared {
    /// Makes a case without launches.
    pub(crate) fn new() -> Self {
        Self { memory: Memory::new(), steps: Vec::new(), checks: Vec::new() }
    }

    /// Adds a launch.
    pub(crate) fn step(&mut self, kernel: impl Into<String>, elements: u64, arguments: Vec<Argument>) {
        self.steps.push(Step { kernel: kernel.into(), elements, shape: None, cluster: 1, arguments });
    }

    /// Overrides the thread block size and shared memory of the last launch. A GPU must support
    /// them.
    pub(crate) fn shaped(&mut self, threads_and_shared: (u32, u32)) {
        let (threads, shared) = threads_and_shared;
        let step = self.steps.last_mut().expect("a launch");
        let most = kernel(&step.kernel);
        let could = threads <= most.threads && shared <= most.shared;
        assert!(could, "{}: {threads} threads, {shared} bytes of shared memory", step.kernel);
        step.shape = Some(threads_and_shared);
    }

    /// Launches the last step in clusters of `cluster` thread blocks.
    pub(crate) fn in_clusters(&mut self, cluster: u32) {
        self.steps.last_mut().expect("a launch").cluster = cluster;
    }

    /// Allocates the values of a matrix with nothing around them.
    ///
    /// With `odd`, the first value comes directly after a multiple of 16 bytes.
    pub(crate) fn values<T: Element>(&mut self, values: &[T], odd: bool) -> Argument {
        let bytes = bytemuck::cast_slice(values);
        if odd {
            return self.memory.allocate_from_aligned("values", bytes, size_of::<T>() as u64).into();
        }
        self.memory.allocate_from("values", bytes).into()
    }

    /// Returns the slot of a tensor's global scale, and how a kernel applies it.
    ///
    /// Without a global scale the slot is zeros, as in the library.
    pub(crate) fn global_scale(&mut self, tensor: &QuantizedTensor) -> (Argument, Argument) {
        self.global_scales(&[tensor])
    }

    /// Returns the slots of several tensors whose global scales share a direction, and how to apply
    /// them.
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

    /// Expects the buffer to hold exactly these bytes.
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

    /// Adds a report with its expected contents.
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

    /// Runs each launch on the first module that has its kernel.
    ///
    /// Returns the memory and the statistics of each launch, or a message about a fault or about
    /// wrong memory.
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

/// Returns the sum of a report's slots.
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

/// Makes an argument from a structure of `kernels-abi` that is passed by value.
pub(crate) fn argument<T: Copy + Plain>(value: &T) -> Argument {
    // SAFETY: `T: Plain` guarantees that every byte of the value is initialized.
    unsafe { Argument::of(value) }
}

/// Returns null arguments for the plan and row lists of experts, for products with a single matrix.
pub(crate) fn no_experts() -> [Argument; 3] {
    [0u64; 3].map(Argument::from)
}

/// Structures without padding.
///
/// # Safety
/// Every byte of a value must be initialized.
pub(crate) unsafe trait Plain {}
// SAFETY: the fields are numbers, widest first, and fill a multiple of the widest one's size, so
// there is no padding. The same holds for each structure below.
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
unsafe impl Plain for microscale_kernels_abi::gemm::gemv::PlainParams {}
// SAFETY: as above.
unsafe impl Plain for microscale_kernels_abi::gemm::gemv::GemvParams {}
// SAFETY: as above.
unsafe impl Plain for microscale_kernels_abi::gemm::params::PackParams {}
// SAFETY: as above.
unsafe impl Plain for microscale_kernels_abi::gemm::params::GemmParams {}
// SAFETY: as above.
unsafe impl Plain for microscale_kernels_abi::gemm::fp4::Fp4Params {}
// SAFETY: as above.
unsafe impl Plain for microscale_kernels_abi::gemm::decoding::DecodingParams {}
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
// SAFETY: as above.
unsafe impl Plain for microscale_kernels_abi::gptq::LoadParams {}
// SAFETY: as above.
unsafe impl Plain for microscale_kernels_abi::gptq::BatchParams {}
// SAFETY: five numbers of eight bytes, then an even number of words, so there is no padding.
unsafe impl Plain for microscale_kernels_abi::ActivationParams {}
// SAFETY: a number of eight bytes and six words, another of eight bytes, and fourteen words, so
// there is no padding.
unsafe impl Plain for microscale_kernels_abi::activations::KvParams {}

/// Makes the argument for NVFP4's options.
pub(crate) fn nv_options(options: &NvOptions) -> Argument {
    // The two bytes after the least scale and the zero scale are padding.
    let arithmetic = offset_of!(NvOptions, plan) + offset_of!(NvPlan, quantizer);
    let start = arithmetic + offset_of!(Arithmetic, zero_scale) + 1;
    assert_eq!(start + 2, arithmetic + offset_of!(Arithmetic, quotient));
    // SAFETY: the padding is at an offset that relies on `arithmetic` being the quantizer's first
    // field. All other fields, at every depth, are words or the two scale bytes, so every other
    // byte is initialized.
    unsafe { Argument::of_padded(options, &[start, start + 1]) }
}
