//! Tests instructions through text: operands, vectors and stateful instructions.
//!
//! `semantics` tests their results.

use super::{Run, words};
use crate::{Approximation, Launch, Schedule};

/// Returns the word that a single thread stores.
fn one(body: &str) -> u32 {
    words(&format!("{body} st.global.b32 [%out], %r1;"), 1)[0]
}

#[test]
fn carries_propagate_through_a_chain() {
    let wide = |instruction: &str, a: u64, b: u64| {
        let body = format!(
            "mov.b64 %d1, {a}; mov.b64 %d2, {b}; mov.b64 {{%r2, %r3}}, %d1; mov.b64 {{%r4, %r5}}, %d2;
            {instruction}.cc.u32 %r6, %r2, %r4; {instruction}c.cc.u32 %r7, %r3, %r5; addc.u32 %r8, 0, 0; "
        );
        let part = |register: &str| one(&format!("{body} mov.b32 %r1, {register};"));
        (u64::from(part("%r7")) << 32 | u64::from(part("%r6")), part("%r8"))
    };
    assert_eq!(wide("add", 0xffff_ffff_ffff_ffff, 1), (0, 1));
    assert_eq!(wide("add", 0x1_ffff_ffff, 2), (0x2_0000_0001, 0));
    assert_eq!(wide("sub", 0x1_0000_0000, 1), (0xffff_ffff, 0));
    assert_eq!(wide("sub", 0, 1), (u64::MAX, 1));
    let body = "mov.b64 %d1, -1; add.cc.s64 %d2, %d1, 2; addc.s64 %d3, %d1, 5; cvt.u32.u64 %r1, %d3;";
    assert_eq!(one(body), 5);
}

#[test]
fn vectors_are_packed_lowest_first() {
    assert_eq!(one("mov.b16 %h1, 0x1234; mov.b32 %r1, {%h1, %h1};"), 0x1234_1234);
    assert_eq!(one("mov.b32 %r2, 0xabcd1234; mov.b32 {_, %h1}, %r2; cvt.u32.u16 %r1, %h1;"), 0xabcd);
    assert_eq!(one("mov.b64 %d1, 0x100000002; mov.b64 {_, %r1}, %d1;"), 1);
    let body = "{ .reg .f64 %f1; mov.f64 %f1, 0d3FF8000000000000; mov.b64 {_, %r1}, %f1; }";
    assert_eq!(one(body), 0x3ff8_0000);
    let body = "{ .reg .f64 %f1; mov.b64 %f1, {0, 0x40080000}; cvt.rn.f32.f64 %r1, %f1; }";
    assert_eq!(f32::from_bits(one(body)), 3.0);
    let body = "{ .reg .b8 a, b, c; mov.b32 {a, b, _, c}, 0x44332211; mov.b32 %r1, {c, b, a, a}; }";
    assert_eq!(one(body), 0x1111_2244);
    let body =
        "{ .reg .b8 zero, b; mov.b16 {zero, _}, 0; cvt.rn.satfinite.e2m1x2.f32 b, 0fC0C00000, 0f3F000000;
        mov.b32 %r1, {b, zero, zero, b}; }";
    assert_eq!(one(body), 0xf100_00f1);
}

#[test]
fn memory_is_little_endian_and_loads_extend_by_type() {
    let read = |load: &str| {
        let body = format!("{load} st.global.b32 [%out], %r1;");
        Run::with(&body, &Launch::new(1, 1), &[0x80ff_0201, 7]).words()[0]
    };
    assert_eq!(read("ld.global.u8 %r1, [%in+2];"), 0xff);
    assert_eq!(read("ld.global.s8 %r1, [%in+2];"), 0xffff_ffff);
    assert_eq!(read("ld.global.s16 %r1, [%in+2];"), 0xffff_80ff);
    assert_eq!(read("ld.global.v2.b8 {%h1, %h2}, [%in]; mov.b32 %r1, {%h2, %h1};"), 0x0001_0002);
    assert_eq!(read("ld.global.v2.b32 {_, %r1}, [%in];"), 7);
    assert_eq!(read("ld.global.b64 %d1, [%in]; shr.u64 %d1, %d1, 28; cvt.u32.u64 %r1, %d1;"), 0x78);
    let store = "mov.b64 %d1, 0x1122334455667788; mov.b32 %r1, 0; st.global.b32 [%in], %r1; st.global.b8 [%in+1], %d1;
        ld.global.b32 %r1, [%in];";
    assert_eq!(read(store), 0x8800);
    assert_eq!(read("st.global.v2.b32 [%in], {%lane, 9}; ld.global.b32 %r1, [%in+4];"), 9);
}

#[test]
fn atomics_return_the_old_value() {
    for schedule in [Schedule::LowestFirst, Schedule::HighestFirst, Schedule::Random(4)] {
        let body = "atom.global.add.u32 %r1, [%in], 1; st.global.b32 [%out], %r1;";
        let mut words = Run::with(body, &Launch::new(1, 50).schedule(schedule), &[10]).words();
        words.sort_unstable();
        assert_eq!(words, (10..60).collect::<Vec<_>>());
    }
    let one = |operation: &str, start: u32| {
        let body = format!("atom.{operation}; ld.global.b32 %r2, [%in]; st.global.b32 [%out], %r2;");
        Run::with(&body, &Launch::new(1, 1), &[start, 0]).words()[0]
    };
    assert_eq!(one("global.cas.b32 %r1, [%in], 5, 9", 5), 9);
    assert_eq!(one("relaxed.gpu.global.cas.b32 %r1, [%in], 5, 9", 6), 6);
    assert_eq!(one("global.max.s32 %r1, [%in], 3", 0xffff_fff0), 3);
    assert_eq!(one("global.max.u32 %r1, [%in], 3", 0xffff_fff0), 0xffff_fff0);
    assert_eq!(one("global.min.s32 %r1, [%in], -1", 3), u32::MAX);
    assert_eq!(one("global.exch.b32 %r1, [%in], 8", 3), 8);
    assert_eq!(one("global.add.u64 %d1, [%in], -1", 0), u32::MAX);
}

#[test]
fn comparisons_write_one_or_two_predicates() {
    let both = "selp.b32 %r1, 1, 0, %p1; selp.b32 %r2, 2, 0, %p2; or.b32 %r1, %r1, %r2;";
    assert_eq!(one(&format!("setp.lt.s32 %p1|%p2, -1, 0; {both}")), 1);
    assert_eq!(one(&format!("setp.lt.u32 %p1|%p2, -1, 0; {both}")), 2);
    assert_eq!(one(&format!("mov.pred %p3, 0; setp.lt.and.s32 %p1|%p2, -1, 0, !%p3; {both}")), 1);
    assert_eq!(one(&format!("mov.pred %p3, -1; setp.lt.xor.s32 %p1|%p2, -1, 0, %p3; {both}")), 2);
    let nan = "0f7FC00000";
    for (comparison, expected) in
        [("lt", 0), ("ltu", 1), ("ne", 0), ("neu", 1), ("num", 0), ("nan", 1), ("eq", 0), ("equ", 1)]
    {
        let body = format!(
            "mov.b32 %r3, {nan}; setp.{comparison}.f32 %p1, %r3, 0f00000000; selp.b32 %r1, 1, 0, %p1;"
        );
        assert_eq!(one(&body), expected, "{comparison}");
    }
    assert_eq!(one("setp.eq.f32 %p1, 0f80000000, 0f00000000; selp.b32 %r1, 1, 0, %p1;"), 1);
    assert_eq!(one("slct.b32.f32 %r1, 3, 4, 0f80000000;"), 3);
    assert_eq!(one("slct.b32.s32 %r1, 3, 4, -1;"), 4);
}

#[test]
fn approximations_are_chosen() {
    let body = "rcp.approx.ftz.f32 %r1, 0f40400000; st.global.b32 [%out], %r1;";
    let under = |approximation| Run::new(body, &Launch::new(1, 1).approximation(approximation)).words()[0];
    let third = (1f32 / 3.0).to_bits();
    assert_eq!(under(Approximation::Nearest), third);
    assert_eq!(under(Approximation::Low), third - 1);
    assert_eq!(under(Approximation::High), third);
    assert_eq!(under(Approximation::Table(std::sync::Arc::new(|bits| bits + 1))), 0x4040_0001);
}

#[test]
fn quotients_and_rests_have_no_sign() {
    let narrow = |instruction: &str| {
        one(&format!("mov.b32 %r2, -7; mov.b32 %r3, 16; {instruction}.u32 %r1, %r2, %r3;"))
    };
    assert_eq!([narrow("div"), narrow("rem")], [u32::MAX / 16, 9]);
    let wide = |instruction: &str| {
        one(&format!(
            "mov.b64 %d1, -7; mov.b64 %d2, 0x100000001; {instruction}.u64 %d1, %d1, %d2; cvt.u32.u64 %r1, %d1;"
        ))
    };
    // 2^64 - 7 is (2^32 + 1) times 2^32 - 2, plus 2^32 - 5.
    assert_eq!([wide("div"), wide("rem")], [u32::MAX - 1, u32::MAX - 4]);
}
