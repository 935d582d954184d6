//! Kernels of several warps and blocks, run under every schedule.

use microscale_executor::{Approximation, Fault, FaultKind, Launch, Memory, Module, Schedule};

pub(super) const SCHEDULES: [Schedule; 6] = [
    Schedule::LowestFirst,
    Schedule::HighestFirst,
    Schedule::Random(1),
    Schedule::Random(2),
    Schedule::Random(3),
    Schedule::Random(4),
];

/// A test kernel.
///
/// Its body finds the addresses of its input and output in `%in` and `%out`, its thread in
/// `%number` and its block in `%block`. `%shared` holds the address of the variable `bytes` in
/// shared memory, aligned to 1024 bytes. Two mbarriers, `%full` and `%empty`, follow it.
pub(super) struct Kernel<'a> {
    pub(super) text: &'a str,
    pub(super) blocks: u32,
    pub(super) threads: u32,
    pub(super) cluster: u32,
    /// Size of `bytes`.
    pub(super) shared: usize,
    pub(super) given: &'a [u8],
    /// Size of the output, which starts as zeros.
    pub(super) output: usize,
    /// Enables the race detector.
    pub(super) races: bool,
}

impl Kernel<'_> {
    pub(super) fn under(&self, schedule: Schedule) -> Result<Vec<u8>, Fault> {
        self.with(schedule, Approximation::Nearest)
    }

    pub(super) fn with(&self, schedule: Schedule, approximation: Approximation) -> Result<Vec<u8>, Fault> {
        let Self { text, shared, .. } = self;
        // Only these GPUs have tensor memory.
        let target = if text.contains("tcgen05") { "sm_100f" } else { "sm_90a" };
        let module = format!(
            ".version 8.8 .target {target} .address_size 64
            .visible .entry test(.param .u64 input, .param .u64 output) {{
                .shared .align 1024 .b8 bytes[{shared}]; .shared .align 8 .b8 first[64]; .shared .align 8 .b8 second[64];
                .reg .b64 %in, %out, %wide, %l<16>; .reg .b32 %number, %block, %shared, %full, %empty, %r<32>;
                .reg .pred %p, %q, %first; .reg .f32 %d<128>; .reg .b32 %a<4>; .reg .b64 %b;
                ld.param.u64 %in, [input]; ld.param.u64 %out, [output]; mov.u32 %shared, bytes;
                mov.u32 %full, first; mov.u32 %empty, second;
                mov.u32 %number, %tid.x; mov.u32 %block, %ctaid.x; setp.eq.u32 %first, %number, 0;
                {text}
                ret;
            }}"
        );
        let module = Module::parse(&module).unwrap_or_else(|error| panic!("{text}: {error}"));
        let kernel = module.kernel("test").unwrap_or_else(|error| panic!("{text}: {error}"));
        let mut memory = Memory::new();
        let input = memory.allocate_from("in", self.given);
        let output = memory.allocate_from("out", &vec![0; self.output]);
        let launch = Launch::new(self.blocks, self.threads).cluster(self.cluster).schedule(schedule);
        let launch = launch.limit(1_000_000).races(self.races);
        kernel.run(&mut memory, &launch.approximation(approximation), &[input.into(), output.into()])?;
        Ok(memory.bytes(output).unwrap())
    }

    /// Returns the output, which must be equal under every schedule.
    #[track_caller]
    pub(super) fn stored(&self) -> Vec<u8> {
        let found = SCHEDULES.map(|schedule| {
            self.under(schedule).unwrap_or_else(|fault| panic!("{schedule:?}: {fault}, {}", self.text))
        });
        assert!(found.iter().all(|other| *other == found[0]), "{}: {found:?}", self.text);
        found[0].clone()
    }

    /// Checks that the fault is of the expected kind under every schedule.
    #[track_caller]
    pub(super) fn faults(&self, expected: fn(&FaultKind) -> bool) {
        for schedule in SCHEDULES {
            match self.under(schedule) {
                Ok(_) => panic!("{schedule:?}: no fault, {}", self.text),
                Err(fault) => assert!(expected(&fault.kind), "{schedule:?}: {fault}, {}", self.text),
            }
        }
    }
}

/// Converts bytes to words.
pub(super) fn words(bytes: &[u8]) -> Vec<u32> {
    bytes.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)).collect()
}

/// Returns a wait for an mbarrier's phase of a parity, with its own labels.
pub(super) fn wait(barrier: &str, parity: &str, label: &str) -> String {
    format!(
        "$again_{label}: mbarrier.try_wait.parity.shared.b64 %q, [{barrier}], {parity};
        @%q bra $passed_{label}; bra.uni $again_{label}; $passed_{label}:"
    )
}
