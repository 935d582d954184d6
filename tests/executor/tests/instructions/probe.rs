//! Tests one instruction at a time: loads operands, executes it, and stores the result.

use std::collections::BTreeSet;

use microscale_executor::{Launch, Memory, Module};
use rayon::prelude::*;

/// The expected result for three operands, the first in the low bits.
///
/// `None` where the documentation leaves the result open.
pub(super) type Oracle = fn([u64; 3]) -> Option<u64>;

/// An instruction, its usage, its inputs and its oracle.
///
/// Operands are `%a %b %c` (32 bits), `%la…` (64), `%ha…` (16) and `%pa…` (predicates, from the
/// lowest bit). Results are `%d %ld %hd %pd`. The one that the text names is stored.
pub(super) struct Check {
    pub(super) opcode: &'static str,
    pub(super) text: &'static str,
    pub(super) inputs: Vec<[u64; 3]>,
    pub(super) oracle: Oracle,
}

/// Executes an instruction on each input.
pub(super) fn results(text: &str, inputs: &[[u64; 3]]) -> Vec<u64> {
    let result = ["%ld", "%hd", "%pd"].into_iter().find(|result| text.contains(result)).unwrap_or("%d");
    let stored = match result {
        "%ld" => "st.global.b64 [%to], %ld;",
        "%hd" => "cvt.u64.u16 %ld, %hd; st.global.b64 [%to], %ld;",
        "%pd" => "selp.b64 %ld, 1, 0, %pd; st.global.b64 [%to], %ld;",
        _ => "cvt.u64.u32 %ld, %d; st.global.b64 [%to], %ld;",
    };
    let operands = ["a", "b", "c"].into_iter().enumerate().map(|(i, name)| {
        format!(
            "ld.global.b64 %l{name}, [%from+{}]; cvt.u32.u64 %{name}, %l{name}; cvt.u16.u64 %h{name}, %l{name};
             and.b64 %ld, %l{name}, 1; setp.ne.b64 %p{name}, %ld, 0;\n",
            i * 8
        )
    });
    let module = format!(
        ".version 8.8 .target sm_100f .address_size 64
        .visible .entry probe(.param .u64 inputs, .param .u64 outputs, .param .u32 count) {{
            .reg .b64 %from; .reg .b64 %to; .reg .b64 %place; .reg .b32 %number; .reg .b32 %block; .reg .b32 %size; .reg .pred %past;
            .reg .b32 %a; .reg .b32 %b; .reg .b32 %c; .reg .b32 %d; .reg .b64 %la; .reg .b64 %lb; .reg .b64 %lc; .reg .b64 %ld;
            .reg .b16 %ha; .reg .b16 %hb; .reg .b16 %hc; .reg .b16 %hd; .reg .pred %pa; .reg .pred %pb; .reg .pred %pc; .reg .pred %pd;
            ld.param.u64 %from, [inputs]; ld.param.u64 %to, [outputs]; ld.param.u32 %size, [count];
            mov.u32 %number, %tid.x; mov.u32 %block, %ctaid.x; mad.lo.u32 %number, %block, 128, %number;
            setp.ge.u32 %past, %number, %size;
            @%past bra $done;
            mul.wide.u32 %place, %number, 24; add.s64 %from, %from, %place;
            mul.wide.u32 %place, %number, 8; add.s64 %to, %to, %place;
            {}
            {text}
            {stored}
        $done:
            ret;
        }}",
        operands.collect::<String>()
    );
    let module = Module::parse(&module).unwrap_or_else(|error| panic!("{text}: {error}"));
    let kernel = module.kernel("probe").unwrap_or_else(|error| panic!("{text}: {error}"));
    let bytes: Vec<u8> = inputs.iter().flatten().flat_map(|word| word.to_le_bytes()).collect();
    let mut memory = Memory::new();
    let from = memory.allocate_from("inputs", &bytes);
    let to = memory.allocate("outputs", inputs.len() * 8);
    let launch = Launch::new(inputs.len().div_ceil(128) as u32, 128).races(false);
    let arguments = [from.into(), to.into(), (inputs.len() as u32).into()];
    kernel.run(&mut memory, &launch, &arguments).unwrap_or_else(|fault| panic!("{text}: {fault}"));
    let found = memory.bytes(to).expect("a result for each");
    found.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word)).collect()
}

/// Runs all checks.
pub(super) fn run(checks: &[Check]) {
    checks.par_iter().for_each(|check| {
        let found = results(check.text, &check.inputs);
        let mut compared = 0;
        for (input, found) in check.inputs.iter().zip(found) {
            let Some(expected) = (check.oracle)(*input) else { continue };
            assert_eq!(
                found, expected,
                "{}: {input:#x?} gives {found:#x} instead of {expected:#x}",
                check.text
            );
            compared += 1;
        }
        assert!(
            compared * 2 > check.inputs.len(),
            "{}: only {compared} of {} compared",
            check.text,
            check.inputs.len()
        );
    });
}

/// Returns the opcodes of checks.
pub(super) fn opcodes(checks: &[Check]) -> BTreeSet<&'static str> {
    checks.iter().map(|check| check.opcode).collect()
}

/// Returns triples of edge cases, and of random numbers that share bits with them and each other.
pub(super) fn triples(edges: &[u64], random: usize, seed: u64) -> Vec<[u64; 3]> {
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut triples = Vec::new();
    for &a in edges {
        for &b in edges {
            triples.push([a, b, edges[rng.usize(..edges.len())]]);
        }
    }
    for _ in 0..random {
        let mut one = [rng.u64(..), rng.u64(..), rng.u64(..)];
        for i in 0..3 {
            one[i] = match rng.u32(..8) {
                0 => edges[rng.usize(..edges.len())],
                // Close to another operand, or close to its negative.
                1 => one[(i + 1) % 3].wrapping_add(rng.u64(..5)).wrapping_sub(2),
                2 => one[(i + 1) % 3] ^ 0x8000_0000 ^ rng.u64(..4),
                _ => one[i],
            };
        }
        triples.push(one);
    }
    triples
}

/// Returns f32 values with special rules, their neighbours, and ordinary ones.
pub(super) fn f32_edges() -> Vec<u64> {
    let mut edges = Vec::new();
    for bits in [
        0,
        1,
        2,
        0x7F_FFFF,
        0x80_0000,
        0x80_0001,
        0x3380_0000,
        0x3F00_0000,
        0x3F7F_FFFF,
        0x3F80_0000,
        0x3F80_0001,
        0x3FC0_0000,
        0x4000_0000,
        0x4040_0000,
        0x4B80_0000,
        0x477F_E000,
        0x477F_F000,
        0x387F_C000,
        0x3880_0000,
        0x43E0_0000,
        0x43E8_0000,
        0x43E8_0001,
        0x4760_0000,
        0x4770_0000,
        0x7F00_0000,
        0x7F7F_0000,
        0x7F7F_FFFF,
        0x7F80_0000,
        0x7F80_0001,
        0x7FC0_0000,
        0x7FFF_FFFF,
    ] {
        edges.extend([bits, bits | 0x8000_0000]);
    }
    edges
}

/// Returns triples for f32 instructions, many with close exponents.
pub(super) fn f32_triples(seed: u64) -> Vec<[u64; 3]> {
    let mut triples = triples(&f32_edges(), 150_000, seed);
    let mut rng = fastrand::Rng::with_seed(seed + 1);
    for _ in 0..150_000 {
        let exponent = rng.u64(1..255);
        let mut near = || {
            let exponent = (exponent + rng.u64(..7)).saturating_sub(3).clamp(0, 255);
            // Few bits, so that sums and products are often exact or ties.
            let mantissa = if rng.bool() { rng.u64(..1 << 23) } else { rng.u64(..1 << 5) << rng.u32(..19) };
            rng.u64(..2) << 31 | exponent << 23 | mantissa & 0x7F_FFFF
        };
        triples.push([near(), near(), near()]);
    }
    triples
}
