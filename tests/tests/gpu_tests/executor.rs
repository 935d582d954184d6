//! Compares the executor with the GPU: the same PTX, the same inputs, and every intermediate value.
//!
//! Kernels are rewritten to store each instruction's result too, in one slot per thread and
//! instruction (the last result, in loops). Such a kernel runs on the GPU and in the executor, and
//! then every byte of memory must be equal. Results of tensor cores are only checked against their
//! error bound. For `rcp.approx` the executor uses the GPU's results, which another test compares
//! with the documentation. The executor places buffers and shared memory at the GPU's addresses.

use std::collections::BTreeMap;
use std::ffi::{CString, c_void};
use std::sync::Arc;

use microscale::gpu::Gpu;
use microscale::gpu::cudarc::driver::{CudaSlice, CudaStream, DevicePtr, result, sys};
use microscale::gpu::internals::weights_map;
use microscale::{Dtype, Format};
use microscale_executor::{Approximation, Argument, Launch, Memory, Module, Swizzle, TensorMap};
use microscale_kernels_abi::gemm::WeightsShape;
use microscale_kernels_abi::gemm::params::WeightsBoxes;
use microscale_kernels_abi::launch::Targets;
use microscale_kernels_abi::{GemmConfig, Kernel, TARGETS, kernels_for};

use crate::executor_tests::case::{Prepared, Step, ptx};
use crate::executor_tests::cases::{Case, cases};

/// PTX that the driver has loaded. It is never unloaded.
struct Loaded(sys::CUmodule);

impl Loaded {
    fn new(gpu: &Gpu, text: &str) -> Result<Self, String> {
        gpu.context().bind_to_thread().map_err(|error| format!("{error:?}"))?;
        let text = CString::new(text).expect("no zero byte");
        // SAFETY: `text` is a string that ends with a zero byte, and a context is current.
        let module = unsafe { result::module::load_data(text.as_ptr().cast::<c_void>()) };
        module.map(Self).map_err(|error| format!("the driver refuses it: {error:?}"))
    }

    /// Launches with `cluster` thread blocks per cluster, and waits.
    ///
    /// # Safety
    /// The parameters must match the kernel's, and the kernel must stay within the memory that they
    /// point to.
    unsafe fn launch(
        &self,
        stream: &Arc<CudaStream>,
        name: &str,
        ((blocks, threads, shared), cluster): ((u32, u32, u32), u32),
        parameters: &mut [Vec<u8>],
    ) -> Result<(), String> {
        let name = CString::new(name).expect("no zero byte");
        let mut pointers: Vec<_> =
            parameters.iter_mut().map(|bytes| bytes.as_mut_ptr().cast::<c_void>()).collect();
        // SAFETY: the module is loaded. The caller guarantees that the parameters match and that
        // the kernel stays within its memory. The attribute and the pointers outlive the call.
        unsafe {
            let function =
                result::module::get_function(self.0, name).map_err(|error| format!("{error:?}"))?;
            // Dynamic shared memory above 48 KiB must be opted into.
            let limit = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            result::function::set_function_attribute(function, limit, shared as i32)
                .map_err(|error| format!("{error:?}"))?;
            let dimension = sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x: cluster, y: 1, z: 1 };
            let mut attribute = sys::CUlaunchAttribute_st {
                id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION,
                pad: [0; 4],
                value: sys::CUlaunchAttributeValue { clusterDim: dimension },
            };
            let config = sys::CUlaunchConfig_st {
                gridDimX: blocks,
                gridDimY: 1,
                gridDimZ: 1,
                blockDimX: threads,
                blockDimY: 1,
                blockDimZ: 1,
                sharedMemBytes: shared,
                hStream: stream.cu_stream(),
                attrs: &raw mut attribute,
                // Older GPUs have no clusters.
                numAttrs: u32::from(cluster > 1),
            };
            let (config, arguments) = (&raw const config, pointers.as_mut_ptr());
            sys::cuLaunchKernelEx(config, function, arguments, std::ptr::null_mut())
                .result()
                .map_err(|error| format!("{error:?}"))?;
        }
        stream.synchronize().map_err(|error| format!("{error:?}"))
    }
}

/// Returns the address of dynamic shared memory on this GPU, and the start of shared memory among
/// generic addresses.
///
/// The kernels have no other variables in shared memory.
fn shared_placement(gpu: &Gpu) -> (u32, u64) {
    const PROBE: &str = ".version 7.0
.target sm_80
.address_size 64
.extern .shared .align 16 .b8 shared[];
.visible .entry probe(.param .u64 to)
{
    .reg .b64 %rd<5>;
    ld.param.u64 %rd1, [to];
    mov.u64 %rd2, shared;
    cvta.shared.u64 %rd3, %rd2;
    st.global.b64 [%rd1], %rd2;
    st.global.b64 [%rd1+8], %rd3;
    ret;
}
";
    let stream = gpu.stream();
    let to: CudaSlice<u64> = stream.alloc_zeros(2).expect("memory");
    let mut parameters = [to.device_ptr(stream).0.to_le_bytes().to_vec()];
    let loaded = Loaded::new(gpu, PROBE).expect("the probe");
    // SAFETY: the parameter is the probe's, and its single thread stores both numbers of the buffer.
    unsafe { loaded.launch(stream, "probe", ((1, 1, 1024), 1), &mut parameters) }.expect("the probe runs");
    let found = stream.clone_dtoh(&to).expect("memory");
    (u32::try_from(found[0]).expect("an address in shared memory"), found[1] - found[0])
}

/// Returns this GPU's approximate reciprocals of 1 to 2, by mantissa.
fn reciprocals(gpu: &Gpu) -> Vec<u32> {
    approximated(gpu, &(0..1u32 << 23).map(|mantissa| 0x3F80_0000 | mantissa).collect::<Vec<_>>())
}

/// Runs `rcp.approx.ftz.f32` on the GPU.
fn approximated(gpu: &Gpu, operands: &[u32]) -> Vec<u32> {
    const PROBE: &str = ".version 7.0
.target sm_80
.address_size 64
.visible .entry probe(.param .u64 from, .param .u64 to, .param .u32 count)
{
    .reg .pred %p<2>; .reg .b32 %r<8>; .reg .b64 %rd<6>;
    ld.param.u64 %rd1, [from]; ld.param.u64 %rd2, [to]; ld.param.u32 %r1, [count];
    mov.u32 %r2, %ctaid.x; mov.u32 %r3, %ntid.x; mov.u32 %r4, %tid.x;
    mad.lo.u32 %r5, %r2, %r3, %r4;
    setp.ge.u32 %p1, %r5, %r1;
    @%p1 ret;
    mul.wide.u32 %rd3, %r5, 4;
    add.s64 %rd4, %rd1, %rd3; add.s64 %rd5, %rd2, %rd3;
    ld.global.b32 %r6, [%rd4];
    rcp.approx.ftz.f32 %r7, %r6;
    st.global.b32 [%rd5], %r7;
    ret;
}
";
    let stream = gpu.stream();
    let from = stream.clone_htod(operands).expect("memory");
    let to: CudaSlice<u32> = stream.alloc_zeros(operands.len()).expect("memory");
    let count = operands.len() as u32;
    let addresses = [from.device_ptr(stream).0, to.device_ptr(stream).0];
    let mut parameters: Vec<_> = addresses.iter().map(|address| address.to_le_bytes().to_vec()).collect();
    parameters.push(count.to_le_bytes().to_vec());
    let loaded = Loaded::new(gpu, PROBE).expect("the probe");
    // SAFETY: the parameters are the probe's, and both buffers have `count` numbers.
    unsafe { loaded.launch(stream, "probe", ((count.div_ceil(256), 256, 0), 1), &mut parameters) }
        .expect("the probe runs");
    stream.clone_dtoh(&to).expect("memory")
}

/// Derives the reciprocal of any normal number from the table of 1 to 2.
///
/// The GPU scales by powers of two, and results below the normal numbers are zero.
fn scaled(table: &[u32], bits: u32) -> u32 {
    let of_mantissa = f32::from_bits(table[(bits & 0x7F_FFFF) as usize]);
    let exponent = 127 - (bits >> 23 & 0xFF) as i32;
    let result = (f64::from(of_mantissa) * 2f64.powi(exponent)) as f32;
    let result = if result < f32::MIN_POSITIVE { 0.0 } else { result };
    result.to_bits() | bits & 0x8000_0000
}

/// Checks the documented properties of the approximation, which the next test relies on.
pub(crate) fn reciprocals_match_the_gpu(gpu: &Gpu) {
    let table = reciprocals(gpu);
    for (mantissa, &found) in table.iter().enumerate() {
        let exact = 1.0 / (1.0 + mantissa as f64 / f64::from(1 << 23));
        let ulp = if mantissa == 0 { 2f64.powi(-23) } else { 2f64.powi(-24) };
        let error = (f64::from(f32::from_bits(found)) - exact).abs() / ulp;
        assert!(error <= 1.0, "1 / {:e} is off by {error} units", 1.0 + mantissa as f64 / f64::from(1 << 23));
    }
    let mut rng = fastrand::Rng::with_seed(95);
    let normal: Vec<u32> =
        (0..1 << 22).map(|_| rng.u32(..)).filter(|bits| f32::from_bits(*bits).is_normal()).collect();
    for (bits, found) in normal.iter().zip(approximated(gpu, &normal)) {
        assert_eq!(found, scaled(&table, *bits), "1 / {:e}", f32::from_bits(*bits));
    }
    // Subnormals count as zeros.
    let special = [0, 1, 0x7F_FFFF, 0x8000_0000, 0x8000_0001, 0x7F80_0000, 0xFF80_0000, 0x7FC0_0000];
    let infinity = 0x7F80_0000;
    let sign = 0x8000_0000;
    let expected = [infinity, infinity, infinity, infinity | sign, infinity | sign, 0, sign, 0x7FFF_FFFF];
    assert_eq!(approximated(gpu, &special), expected);
}

/// Returns a module with one kernel that stores every result, and the line of each slot.
fn traced<'a>(text: &'a str, name: &str) -> (String, Vec<&'a str>) {
    let header = &text[..text.find(".visible .entry").expect("a kernel")];
    let start = text.find(&format!(".visible .entry {name}(")).expect("the kernel");
    let end = start + text[start..].find("\n}\n").expect("its end") + 3;
    let (signature, body) = text[start..end].split_once("\n)\n{\n").expect("parameters and a body");
    let mut lines = String::new();
    let mut places = Vec::new();
    let mut declared = false;
    for line in body.lines() {
        if !declared && !line.trim_start().starts_with(".reg") {
            declared = true;
            lines += "\t.reg .b64 %trace<4>;\n\t.reg .b32 %number<5>;\n\tld.param.b64 %trace1, [trace_results];\n\t\
                      ld.param.b32 %number4, [trace_stride];\n\tmov.u32 %number1, %ctaid.x;\n\tmov.u32 %number2, %ntid.x;\n\t\
                      mov.u32 %number3, %tid.x;\n\tmad.lo.u32 %number1, %number1, %number2, %number3;\n\t\
                      mul.wide.u32 %trace2, %number1, %number4;\n\tadd.s64 %trace3, %trace1, %trace2;\n";
        }
        lines += line;
        lines.push('\n');
        for (guard, register) in results(line) {
            let place = places.len() * 8;
            places.push(line.trim());
            lines += &match register.trim_start_matches('%').trim_end_matches(|c: char| c.is_ascii_digit()) {
                "p" => format!(
                    "\tselp.b32 %number2, 1, 0, {register};\n\t{guard}st.global.b32 [%trace3+{place}], %number2;\n"
                ),
                "rs" => format!("\t{guard}st.global.b16 [%trace3+{place}], {register};\n"),
                "rd" => format!("\t{guard}st.global.b64 [%trace3+{place}], {register};\n"),
                _ => format!("\t{guard}st.global.b32 [%trace3+{place}], {register};\n"),
            };
        }
    }
    let text = format!(
        "{header}{signature},\n\t.param .u64 trace_results,\n\t.param .u32 trace_stride\n)\n{{\n{lines}"
    );
    (text, places)
}

/// Returns the registers that a line's statements write, each with its guard.
fn results(line: &str) -> Vec<(String, &str)> {
    let mut found = Vec::new();
    for statement in line.trim().trim_start_matches('{').trim_end_matches('}').split(';') {
        let mut statement = statement.trim();
        let mut guard = String::new();
        if let Some(rest) = statement.strip_prefix('@') {
            let (predicate, rest) = rest.split_once(char::is_whitespace).unwrap_or((rest, ""));
            (guard, statement) = (format!("@{predicate} "), rest.trim());
        }
        let Some((opcode, operands)) = statement.split_once(char::is_whitespace) else { continue };
        let name = opcode.split('.').next().unwrap_or_default();
        if ["", "st", "red", "bra", "brx", "ret", "trap", "bar"].contains(&name) || opcode.starts_with('$') {
            continue;
        }
        let operands = operands.trim();
        let first = match operands.strip_prefix('{') {
            Some(list) => list.split('}').next().unwrap_or_default(),
            None => operands.split(',').next().unwrap_or_default(),
        };
        let numbered = |register: &&str| {
            let digits =
                register.trim_start_matches("%rd").trim_start_matches("%rs").trim_start_matches("%r");
            register.starts_with('%') && digits.trim_start_matches("%p").parse::<u32>().is_ok()
        };
        found.extend(
            first.split([',', '|']).map(str::trim).filter(numbered).map(|register| (guard.clone(), register)),
        );
    }
    found
}

/// A copy of a case's buffer on the GPU, at the same offset from a multiple of 256.
struct Mirror {
    memory: CudaSlice<u8>,
    /// Bytes before its start.
    offset: usize,
    address: u64,
}

/// Copies a case's buffers to the GPU and makes it use them.
///
/// The executor places its buffers at the GPU's addresses, so pointers are equal too.
fn mirrored(gpu: &Gpu, prepared: &mut Prepared) -> Vec<Mirror> {
    let stream = gpu.stream();
    let buffers: Vec<_> = prepared.memory.buffers().collect();
    let mut mirrors = Vec::new();
    let mut addresses = BTreeMap::new();
    for buffer in buffers {
        let bytes = prepared.memory.bytes_or(buffer, 0);
        let offset = (buffer.address() % 256) as usize;
        let memory = stream.clone_htod(&[vec![0; offset], bytes, vec![0; 1]].concat()).expect("memory");
        let address = memory.device_ptr(stream).0 + offset as u64;
        addresses.insert(buffer.address(), address);
        prepared.memory.place(buffer, address);
        mirrors.push(Mirror { memory, offset, address });
    }
    for Argument::Bytes(bytes) in prepared.steps.iter_mut().flat_map(|step| &mut step.arguments) {
        let address = bytes.as_slice().try_into().map(u64::from_le_bytes).ok();
        if let Some(address) = address.and_then(|address| addresses.get(&address)) {
            *bytes = address.to_le_bytes().to_vec();
        }
    }
    mirrors
}

/// Launches a step on the GPU, and waits.
fn launch(gpu: &Gpu, module: &Loaded, step: &Step, what: &str) {
    let mut parameters: Vec<_> = step.arguments.iter().map(|Argument::Bytes(bytes)| bytes.clone()).collect();
    // SAFETY: the parameters match the kernel's, as in the library's own launches. Their buffers
    // have mirrors of the same size on the GPU, and the executor's tests show that every case stays
    // within them.
    unsafe { module.launch(gpu.stream(), &step.kernel, (step.launch(), step.cluster), &mut parameters) }
        .unwrap_or_else(|error| panic!("{what}: {error}"));
}

/// Runs a case on the GPU, and checks memory like after the executor.
fn check(gpu: &Gpu, plain: &Loaded, case: &Case) {
    let mut prepared = (case.make)();
    let mirrors = mirrored(gpu, &mut prepared);
    prepared.steps.iter().for_each(|step| launch(gpu, plain, step, &case.what));
    let buffers: Vec<_> = prepared.memory.buffers().collect();
    for (buffer, mirror) in buffers.into_iter().zip(&mirrors) {
        let found = gpu.stream().clone_dtoh(&mirror.memory).expect("memory");
        prepared.memory.write(buffer, 0, &found[mirror.offset..found.len() - 1]);
    }
    for check in &prepared.checks {
        check(&prepared.memory)
            .unwrap_or_else(|wrong| panic!("{}, {}: {wrong} on the GPU", case.kernel, case.what));
    }
}

/// Runs a case whose last kernel stores every result, on both, and compares memory.
///
/// Returns the number of compared results.
fn run(
    gpu: &Gpu,
    loaded: &Loaded,
    plain: &Loaded,
    modules: [&Module; 2],
    places: &[&str],
    case: &Case,
    table: &Arc<Vec<u32>>,
) -> u64 {
    let stream = gpu.stream();
    let mut prepared = (case.make)();
    let last = prepared.steps.len() - 1;
    let (blocks, threads, _) = prepared.steps[last].launch();
    let stride = places.len() as u64 * 8;
    // Zeros, so that slots of unexecuted instructions are equal too.
    let results = vec![0; (u64::from(blocks) * u64::from(threads) * stride) as usize];
    let results = prepared.memory.allocate_from("results", &results);
    prepared.steps[last].arguments.extend([results.into(), (stride as u32).into()]);

    let mirrors = mirrored(gpu, &mut prepared);
    let results = mirrors.last().expect("the results").address;
    for (i, step) in prepared.steps.iter().enumerate() {
        launch(gpu, if i == last { loaded } else { plain }, step, &case.what);
    }

    let table = Arc::clone(table);
    let approximation = Approximation::Table(Arc::new(move |bits| scaled(&table, bits)));
    let launch = Launch { approximation, races: false, ..Launch::default() };
    let (expected, _) =
        prepared.run(&modules, &launch).unwrap_or_else(|wrong| panic!("{}: {wrong}", case.what));
    let (case, kernel) = (&case.what, &case.kernel);
    let mut compared = 0;
    for (buffer, mirror) in expected.buffers().zip(&mirrors) {
        let found = stream.clone_dtoh(&mirror.memory).expect("memory");
        let (found, ours) = (&found[mirror.offset..], expected.bytes_or(buffer, 0));
        if mirror.address != results {
            let Some(at) = ours.iter().zip(found).position(|(ours, gpus)| ours != gpus) else { continue };
            panic!(
                "{kernel}, {case}: byte {at} of a buffer is {:#04x} on the GPU, {:#04x} here",
                found[at], ours[at]
            );
        }
        // The payload of a NaN is unspecified: the assembler turns a minimum, which has its own
        // NaN, into a comparison and a selection, and an f64 sum keeps an operand's. Later results
        // may differ in those bits too, and lanes exchange halves of them.
        let words = |bytes: &[u8]| {
            bytes.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word)).collect::<Vec<_>>()
        };
        let other_nan = |(found, ours): (&u64, &u64)| found != ours && is_nan(*found) && is_nan(*ours);
        let other_nans = words(found).iter().zip(&words(&ours)).any(other_nan);
        for (thread, ours) in ours.chunks(stride as usize).enumerate() {
            let found = &found[thread * stride as usize..];
            for ((ours, found), line) in ours.as_chunks().0.iter().zip(found.as_chunks().0).zip(places) {
                let (found, ours) = (u64::from_le_bytes(*found), u64::from_le_bytes(*ours));
                if other_nan((&found, &ours)) || (found != ours && other_nans && line.starts_with("shfl")) {
                    break;
                }
                // Counts of other threads may differ too.
                if found != ours && line.starts_with("ld.relaxed") {
                    break;
                }
                let what =
                    || format!("`{line}` of thread {thread} gives {found:#x} on the GPU, {ours:#x} here");
                assert_eq!(found, ours, "{kernel}, {case}: {}", what());
                compared += 1;
            }
        }
    }
    compared
}

/// Returns whether a result is a NaN as f32 or as f64.
fn is_nan(result: u64) -> bool {
    if result >> 32 == 0 { f32::from_bits(result as u32).is_nan() } else { f64::from_bits(result).is_nan() }
}

/// Tests the kernels of the targets that this GPU runs.
///
/// Of the last target it tests only kernels that the others lack.
pub(crate) fn matches_the_gpu(gpu: &Gpu) {
    let table = Arc::new(reciprocals(gpu));
    let (shared, window) = shared_placement(gpu);
    let all = cases();
    let mut compared = 0;
    for target in ["sm_80", "sm_90", "sm_90a"] {
        let described = TARGETS.iter().find(|of| of.name == target).expect("a target");
        if described.wgmma && gpu.info().compute_capability != (9, 0) {
            continue;
        }
        let text = ptx(described).to_string();
        let whole = Module::parse(&text).expect("PTX").with_shared_at(shared, window);
        let plain = Loaded::new(gpu, &text).expect("PTX");
        let own = |kernel: &Kernel| !described.wgmma || kernel.targets == Targets::WithWgmma;
        for kernel in kernels_for(described).filter(|kernel| own(kernel)) {
            let (tails, own): (Vec<_>, Vec<_>) = all
                .iter()
                .filter(|case| case.kernel == kernel.name && case.runs_on(described))
                .partition(|case| case.tail);
            if own.is_empty() {
                continue; // The plans' kernels, which run before others.
            }
            // Tensor cores add in another order than the executor, and results of asynchronous
            // products cannot be traced.
            let is_asynchronous = |case: &&Case| {
                case.mainloop.is_some_and(|mainloop| mainloop.traits().targets == Targets::WithWgmma)
            };
            if own.iter().any(|case| case.by_tensor_cores || is_asynchronous(case)) {
                own.iter().for_each(|case| check(gpu, &plain, case));
                continue;
            }
            let (text, places) = traced(&text, kernel.name);
            let module = Module::parse(&text).unwrap_or_else(|error| panic!("{}: {error}", kernel.name));
            let module = module.with_shared_at(shared, window);
            let loaded = Loaded::new(gpu, &text).unwrap_or_else(|error| panic!("{}: {error}", kernel.name));
            for case in own.iter().step_by(own.len().div_ceil(3)).chain(tails.get(16)) {
                compared += run(gpu, &loaded, &plain, [&module, &whole], &places, case, &table);
            }
        }
    }
    println!("{compared} results of instructions compared");
    assert!(compared > 10_000_000, "only {compared} results compared");
}

/// Copies one box to shared memory, and from there to `p0`.
const COPIES_A_BOX: &str = ".version 8.0
.target sm_90
.address_size 64
.extern .shared .align 1024 .b8 shared[];
.visible .entry box(
.param .u64 p0,
.param .u32 p1,
.param .u32 p2,
.param .u32 p3,
.param .align 128 .b8 p4[128]
)
{
    .reg .pred %p<4>;
    .reg .b32 %r<12>;
    .reg .b64 %rd<6>;
    ld.param.u64 %rd1,[p0];
    ld.param.u32 %r1,[p1];
    ld.param.u32 %r2,[p2];
    ld.param.u32 %r3,[p3];
    mov.b64 %rd2,p4;
    cvta.param.u64 %rd3,%rd2;
    mov.u32 %r4,shared;
    add.s32 %r5,%r4,16384;
    mov.u32 %r6,%tid.x;
    setp.ne.u32 %p1,%r6,0;
    @%p1 bra $L_2;
    mbarrier.init.shared.b64 [%r5],1;
    fence.mbarrier_init.release.cluster;
    mov.u32 %r7,16384;
    mbarrier.arrive.expect_tx.shared.b64 _,[%r5],%r7;
    cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%r4],[%rd3,{%r1,%r2,%r3}],[%r5];
$L_2:
    bar.sync 0;
$L_3:
    mbarrier.try_wait.parity.shared.b64 %p2,[%r5],0;
    @!%p2 bra $L_3;
    shl.b32 %r8,%r6,2;
$L_4:
    add.s32 %r9,%r4,%r8;
    ld.shared.b32 %r10,[%r9];
    cvt.u64.u32 %rd4,%r8;
    add.s64 %rd5,%rd1,%rd4;
    st.global.b32 [%rd5],%r10;
    add.s32 %r8,%r8,512;
    setp.lt.u32 %p3,%r8,16384;
    @%p3 bra $L_4;
    ret;
}
";

/// The host's tensor maps and the executor's: both describe the same boxes.
pub(crate) fn tensor_copies_match_the_gpu(gpu: &Gpu) {
    if gpu.info().compute_capability.0 < 9 {
        return;
    }
    const BYTES: usize = 16384;
    const LAUNCH: (u32, u32, u32) = (1, 128, BYTES as u32 + 8);
    let stream = gpu.stream();
    let loaded = Loaded::new(gpu, COPIES_A_BOX).unwrap();
    let module = Module::parse(COPIES_A_BOX).unwrap();
    let mut random = fastrand::Rng::with_seed(1);
    let mut boxes_inside = 0;
    for (format, rows, blocks, matrices) in
        [(Format::Mxfp4, 300, 19, 3), (Format::Nvfp4, 130, 44, 2), (Format::Mxfp4, 7, 1, 1)]
    {
        let config = GemmConfig::from_word("tcgen05-128x128", format, Dtype::Bf16).unwrap();
        let shape = WeightsShape { rows, cols: blocks * format.block() as u64, blocks };
        let boxes = WeightsBoxes::new(config, shape, matrices).unwrap();
        let WeightsBoxes { sizes, strides, box_sizes } = boxes;
        let codes: Vec<u8> = (0..sizes.iter().product()).map(|_| random.u8(..)).collect();
        let there = stream.clone_htod(&codes).unwrap();
        let map = weights_map(there.device_ptr(stream).0, &boxes).unwrap();
        let mut places = vec![[0; 3]];
        for z in 0..matrices as u32 {
            for y in (0..rows as u32).step_by(128) {
                places.extend((0..sizes[0] as u32).step_by(128).map(|x| [x, y, z]));
            }
        }
        for place in places {
            boxes_inside += usize::from(place[0] + 128 <= sizes[0] as u32);
            let out: CudaSlice<u8> = stream.alloc_zeros(BYTES).unwrap();
            let mut parameters = vec![out.device_ptr(stream).0.to_le_bytes().to_vec()];
            parameters.extend(place.map(|at| at.to_le_bytes().to_vec()));
            parameters.push(map.iter().flat_map(|word| word.to_le_bytes()).collect());
            // SAFETY: the parameters are the kernel's, and it writes all bytes of the buffer.
            unsafe { loaded.launch(stream, "box", (LAUNCH, 1), &mut parameters) }.unwrap();
            let found = stream.clone_dtoh(&out).unwrap();

            let mut memory = Memory::new();
            let codes = memory.allocate_from_aligned("codes", &codes, 16);
            let out = memory.allocate_aligned("out", BYTES, 16);
            let map = TensorMap::new(codes.address(), &sizes, &strides, &box_sizes, Swizzle::Bytes128);
            let [x, y, z] = place.map(Argument::from);
            let arguments = [out.into(), x, y, z, map.unwrap().into()];
            let launch = Launch::new(1, LAUNCH.1).shared(LAUNCH.2);
            module.kernel("box").unwrap().run(&mut memory, &launch, &arguments).unwrap();
            assert!(found == memory.bytes(out).unwrap(), "{format}, {rows} rows, box at {place:?}");
        }
    }
    assert!(boxes_inside > 0);
}
