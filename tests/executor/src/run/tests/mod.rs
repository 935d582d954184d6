//! Small kernels that test run-time behavior.

mod clusters;
mod faults;
mod flow;
mod instructions;
mod races;
mod shared;
mod tensor_copies;
mod variables;

use crate::{Argument, Buffer, Error, Fault, FaultKind, Launch, Memory, Module, Schedule, Statistics};

const SCHEDULES: [Schedule; 4] =
    [Schedule::LowestFirst, Schedule::HighestFirst, Schedule::Random(1), Schedule::Random(99)];

/// Declarations of every test kernel. `%lane` is the thread, `%out` the address of its word in
/// `out`.
const HEAD: &str = "
    .reg .pred %p<8>; .reg .b16 %h<8>; .reg .b32 %r<32>; .reg .b64 %d<16>; .reg .b32 %lane; .reg .b64 %out, %in;
    mov.u32 %lane, %tid.x;
    ld.param.u64 %out, [out];
    ld.param.u64 %in, [in];
    mul.wide.u32 %d0, %lane, 4;
    add.s64 %out, %out, %d0;
";

fn module(head: &str, body: &str) -> Module {
    let text = format!(
        ".version 8.8\n.target sm_100f\n.address_size 64\n{head}
        .visible .entry k(.param .u64 .ptr .align 4 out, .param .u64 in) {{ {HEAD} {body} ret; }}"
    );
    Module::parse(&text).unwrap()
}

/// A run of a test kernel with one word per thread in `out`, and 32 words in `in`.
struct Run {
    memory: Memory,
    out: Buffer,
    result: Result<Statistics, Fault>,
}

impl Run {
    fn new(body: &str, launch: &Launch) -> Self {
        Self::with(body, launch, &(0..32).collect::<Vec<_>>())
    }

    fn with(body: &str, launch: &Launch, input: &[u32]) -> Self {
        Self::of(&module("", body), launch, input)
    }

    fn of(module: &Module, launch: &Launch, input: &[u32]) -> Self {
        let kernel = module.kernel("k").unwrap_or_else(|error| panic!("{error}"));
        let mut memory = Memory::new();
        let out = memory.allocate("out", 4 * launch.threads as usize);
        let input: Vec<u8> = input.iter().flat_map(|word| word.to_le_bytes()).collect();
        let input = memory.allocate_from("in", &input);
        let result = kernel.run(&mut memory, launch, &[out.into(), input.into()]);
        Self { memory, out, result }
    }

    /// Returns the words of `out`.
    fn words(self) -> Vec<u32> {
        self.result.unwrap_or_else(|fault| panic!("{fault}"));
        let bytes = self.memory.bytes(self.out).unwrap();
        bytes.chunks_exact(4).map(|word| u32::from_le_bytes(word.try_into().unwrap())).collect()
    }

    fn fault(self) -> Fault {
        self.result.expect_err("a fault")
    }
}

/// Returns the words that a kernel writes, which must be equal under every schedule.
fn words(body: &str, threads: u32) -> Vec<u32> {
    let under = |schedule| Run::new(body, &Launch::new(1, threads).schedule(schedule)).words();
    let first = under(SCHEDULES[0]);
    for schedule in SCHEDULES {
        assert_eq!(under(schedule), first, "{schedule:?}");
    }
    first
}

/// Returns a kernel's fault under the first schedule. The kind must be equal under every schedule.
fn fault(body: &str, threads: u32) -> Fault {
    let under = |schedule| Run::new(body, &Launch::new(1, threads).schedule(schedule)).fault();
    let first = under(SCHEDULES[0]);
    for schedule in SCHEDULES {
        let other = under(schedule);
        assert_eq!(std::mem::discriminant(&*other.kind), std::mem::discriminant(&*first.kind), "{other}");
    }
    first
}

/// Returns why a kernel is not lowered.
fn refused(body: &str) -> Error {
    module("", body).kernel("k").expect_err("an error")
}

#[test]
fn launches_with_wrong_arguments_or_sizes_are_refused() {
    let module = module("", "");
    let kernel = module.kernel("k").unwrap();
    let mut memory = Memory::new();
    let run = |memory: &mut Memory, launch: Launch, arguments: &[Argument]| {
        let fault = kernel.run(memory, &launch, arguments).unwrap_err();
        assert!(matches!(*fault.kind, FaultKind::Launch(_)), "{fault}");
    };
    run(&mut memory, Launch::new(1, 1025), &[1u64.into(), 1u64.into()]);
    run(&mut memory, Launch::new(0, 32), &[1u64.into(), 1u64.into()]);
    run(&mut memory, Launch::new(1, 32), &[1u64.into()]);
    run(&mut memory, Launch::new(1, 32), &[1u64.into(), 1u32.into()]);
    assert_eq!(kernel.parameters().len(), 2);
    assert_eq!(kernel.parameters()[1].name, "in");
}

#[test]
fn statistics_and_coverage_count_executed_instructions() {
    let body = "setp.lt.u32 %p1, %lane, 40; @%p1 bra $low; mov.u32 %r1, 7; $low: @!%p1 exit; mov.u32 %r2, 1;
        mov.u32 %r1, 1; st.global.b32 [%out], %r1;";
    let module = module("", body);
    let kernel = module.kernel("k").unwrap();
    let run = Run::of(&module, &Launch::new(1, 32), &[]);
    let mut statistics = run.result.unwrap();
    let never: Vec<&str> = statistics.coverage.never_executed().map(|i| kernel.instruction(i).1).collect();
    assert_eq!(never, ["mov.u32 %r1, 7", "@!%p1 exit"]);
    assert_eq!(statistics.lane_instructions, 12 * 32 - 32);
    assert_eq!(statistics.warp_instructions, 12);
    let branch = (0..kernel.len()).find(|&i| kernel.instruction(i).1.contains("bra")).unwrap();
    assert!(statistics.coverage.executed(branch) && !statistics.coverage.skipped(branch));

    let other = Run::of(&module, &Launch::new(1, 64), &[]).result.unwrap();
    statistics.merge(&other);
    assert!(statistics.coverage.skipped(branch));
    assert_eq!(statistics.coverage.never_executed().count(), 0);
}
