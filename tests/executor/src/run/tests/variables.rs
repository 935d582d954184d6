//! Tests module variables in global memory.

use super::{Run, module};
use crate::{Access, Fault, FaultKind, Launch, Space};

const HEAD: &str = ".global .align 8 .b8 first[8]; .global .align 16 .b32 second[4];";

fn faulty(body: &str) -> Fault {
    Run::of(&module(HEAD, body), &Launch::new(1, 1), &[]).fault()
}

#[test]
fn start_as_zeros_and_can_be_written() {
    let body = "mov.b64 %d1, second; ld.global.v2.b32 {%r1, %r2}, [%d1+8]; ld.global.nc.b32 %r3, [first+4];
        or.b32 %r1, %r1, %r2; or.b32 %r1, %r1, %r3; st.global.b32 [second], 7; ld.global.b32 %r2, [%d1];
        shl.b32 %r2, %r2, 8; or.b32 %r1, %r1, %r2; and.b64 %d2, %d1, 31; cvt.u32.u64 %r2, %d2;
        add.s32 %r1, %r1, %r2; st.global.b32 [%out], %r1;";
    let words = Run::of(&module(HEAD, body), &Launch::new(1, 1), &[]).words();
    assert_eq!(words, [7 << 8 | 16]);
}

#[test]
fn accesses_past_the_end_are_faults() {
    let outside = |body: &str, name: &str, at: i64, size: usize| {
        let found = faulty(body);
        let FaultKind::OutOfBounds(access) = &*found.kind else { panic!("{found}") };
        let Access { space: Space::Global, buffer: Some(buffer), offset, len, .. } = access else {
            panic!("{found}")
        };
        assert_eq!((buffer.as_str(), *offset, *len), (name, at, size));
    };
    outside("ld.global.b32 %r1, [first+8];", "first", 8, 8);
    outside("st.global.b8 [second+-1], 1;", "second", -1, 16);
    let found = faulty("mov.b64 %d1, second; ld.global.b64 %d2, [%d1+4];");
    assert!(matches!(&*found.kind, FaultKind::Misaligned(_)), "{found}");
}

#[test]
fn other_values_and_unknown_lengths_are_refused() {
    let text =
        |variable: &str| format!(".version 8.8\n.target sm_90\n{variable}\n.visible .entry k() {{ ret; }}");
    for variable in [".global .b32 one = 1;", ".global .b32 some[2] = {1, 2};"] {
        let refused = crate::Module::parse(&text(variable)).expect_err("an error");
        assert!(refused.to_string().starts_with("line 3"), "{refused}");
    }
    for variable in [".global .b32 some[];", ".global .align 3 .b8 some[2];"] {
        let module = crate::Module::parse(&text(variable)).unwrap();
        module.kernel("k").expect_err("an error");
    }
}
