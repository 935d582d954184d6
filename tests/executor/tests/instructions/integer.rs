//! Tests integers, bits and predicates against the PTX ISA (9.7.1, 9.7.6 to 9.7.9).

use super::probe::{Check, Oracle, run, triples};

const W: u64 = 0xFFFF_FFFF;
const H: u64 = 0xFFFF;

fn s32(a: u64) -> i64 {
    i64::from(a as u32 as i32)
}

fn flag(condition: bool) -> Option<u64> {
    Some(u64::from(condition))
}

/// Returns the high word of a 128-bit addition, which includes the carry of the low words.
fn carried([a, b, c]: [u64; 3]) -> Option<u64> {
    Some(b.wrapping_add(c).wrapping_add(u64::from(a.checked_add(c).is_none())))
}

/// Picks a byte out of eight for each nibble of the selector.
///
/// A nibble's top bit replicates the byte's sign.
fn permuted([a, b, c]: [u64; 3]) -> Option<u64> {
    let bytes = (a & W | b << 32).to_le_bytes();
    Some((0..4).fold(0, |word, i| {
        let nibble = c >> (4 * i) & 0xF;
        let byte = bytes[(nibble & 7) as usize];
        let byte = if nibble & 8 == 0 { byte } else { ((byte as i8) >> 7) as u8 };
        word | u64::from(byte) << (8 * i)
    }))
}

/// Picks four bytes out of eight by a mode-specific function of a position from 0 to 3.
fn picked([a, b, c]: [u64; 3], which: impl Fn(usize, usize) -> usize) -> Option<u64> {
    let bytes = (a & W | b << 32).to_le_bytes();
    let word = [0, 1, 2, 3].map(|i| bytes[which((c & 3) as usize, i)]);
    Some(u32::from_le_bytes(word).into())
}

/// Selects, for each bit, the table row that the operands' bits name.
fn looked_up([a, b, c]: [u64; 3], table: u64) -> Option<u64> {
    Some((0..32).fold(0, |word, i| {
        let row = (a >> i & 1) * 4 + (b >> i & 1) * 2 + (c >> i & 1);
        word | (table >> row & 1) << i
    }))
}

/// Extracts a field with the sign of its last bit, or of the word's if the field extends beyond it.
fn signed_field(a: u64, place: u64, length: u64) -> u64 {
    let (place, length) = (place & 0xFF, length & 0xFF);
    if length == 0 {
        return 0;
    }
    let sign = s32(a) >> (place + length - 1).min(31) & 1;
    (0..32).fold(0, |word, i| {
        let bit = if i < length && place + i < 32 { s32(a) >> (place + i) & 1 } else { sign };
        word | (bit as u64) << i
    })
}

/// Inserts `length` low bits of the first operand into the second, from bit `place` on.
fn inserted([a, b, c]: [u64; 3]) -> Option<u64> {
    let (place, length) = (c & 63, c >> 8 & 63);
    Some((0..32).fold(0, |word, i| {
        let inside = i >= place && i < place + length;
        word | (if inside { a >> (i - place) } else { b >> i } & 1) << i
    }))
}

/// Extracts `length` bits from bit `place` on of a word of `bits` bits, without bits beyond it.
///
/// Only the low byte of `place` and `length` counts.
fn field(a: u64, place: u64, length: u64, bits: u64) -> u64 {
    let (place, length) = (place & 0xFF, length & 0xFF);
    (0..length.min(bits)).filter(|i| place + i < bits).fold(0, |word, i| word | (a >> (place + i) & 1) << i)
}

fn shifted_left(a: u64, by: u64, bits: u32) -> u64 {
    let by = (by & W).min(u64::from(bits)) as u32;
    if by >= 64 { 0 } else { a << by & (u64::MAX >> (64 - bits)) }
}

fn shifted_right(a: u64, by: u64, bits: u32) -> u64 {
    let by = (by & W).min(u64::from(bits)) as u32;
    if by >= 64 { 0 } else { (a & (u64::MAX >> (64 - bits))) >> by }
}

/// Returns four products of signed or unsigned bytes plus the third operand, in wide integers.
fn dot([a, b, c]: [u64; 3], signed: [bool; 2]) -> Option<u64> {
    let byte = |word: u64, i: u32, signed: bool| {
        let byte = (word >> (8 * i) & 0xFF) as i64;
        if signed && byte > 127 { byte - 256 } else { byte }
    };
    let sum: i64 = (0..4).map(|i| byte(a, i, signed[0]) * byte(b, i, signed[1])).sum();
    Some((sum + (c & W) as i64).rem_euclid(1 << 32) as u64)
}

pub(super) fn checks() -> Vec<Check> {
    let table: Vec<(&str, &str, Oracle)> = vec![
        ("and.b16", "and.b16 %hd, %ha, %hb;", |[a, b, _]| Some(a & b & H)),
        ("and.b32", "and.b32 %d, %a, %b;", |[a, b, _]| Some(a & b & W)),
        ("and.b64", "and.b64 %ld, %la, %lb;", |[a, b, _]| Some(a & b)),
        ("and.pred", "and.pred %pd, %pa, %pb;", |[a, b, _]| Some(a & b & 1)),
        ("or.b16", "or.b16 %hd, %ha, %hb;", |[a, b, _]| Some((a | b) & H)),
        ("or.b32", "or.b32 %d, %a, %b;", |[a, b, _]| Some((a | b) & W)),
        ("or.b64", "or.b64 %ld, %la, %lb;", |[a, b, _]| Some(a | b)),
        ("or.pred", "or.pred %pd, %pa, %pb;", |[a, b, _]| Some((a | b) & 1)),
        ("xor.b16", "xor.b16 %hd, %ha, %hb;", |[a, b, _]| Some((a ^ b) & H)),
        ("xor.b32", "xor.b32 %d, %a, %b;", |[a, b, _]| Some((a ^ b) & W)),
        ("xor.pred", "xor.pred %pd, %pa, %pb;", |[a, b, _]| Some((a ^ b) & 1)),
        ("not.b32", "not.b32 %d, %a;", |[a, _, _]| Some(!a & W)),
        ("not.b64", "not.b64 %ld, %la;", |[a, _, _]| Some(!a)),
        ("not.pred", "not.pred %pd, %pa;", |[a, _, _]| Some(!a & 1)),
        ("shl.b16", "shl.b16 %hd, %ha, %b;", |[a, b, _]| Some(shifted_left(a, b, 16))),
        ("shl.b32", "shl.b32 %d, %a, %b;", |[a, b, _]| Some(shifted_left(a, b, 32))),
        ("shl.b64", "shl.b64 %ld, %la, %b;", |[a, b, _]| Some(shifted_left(a, b, 64))),
        ("shr.u16", "shr.u16 %hd, %ha, %b;", |[a, b, _]| Some(shifted_right(a, b, 16))),
        ("shr.u32", "shr.u32 %d, %a, %b;", |[a, b, _]| Some(shifted_right(a, b, 32))),
        ("shr.u64", "shr.u64 %ld, %la, %b;", |[a, b, _]| Some(shifted_right(a, b, 64))),
        ("shr.s32", "shr.s32 %d, %a, %b;", |[a, b, _]| Some((s32(a) >> (b & W).min(31)) as u64 & W)),
        ("add.s16", "add.s16 %hd, %ha, %hb;", |[a, b, _]| Some(a.wrapping_add(b) & H)),
        ("add.s32", "add.s32 %d, %a, %b;", |[a, b, _]| Some(a.wrapping_add(b) & W)),
        ("add.s64", "add.s64 %ld, %la, %lb;", |[a, b, _]| Some(a.wrapping_add(b))),
        ("add.cc.s64", "add.cc.s64 %ld, %la, %lc;", |[a, _, c]| Some(a.wrapping_add(c))),
        ("addc.cc.s64", "add.cc.s64 %ld, %la, %lc; addc.cc.s64 %ld, %lb, %lc;", carried),
        ("sub.s16", "sub.s16 %hd, %ha, %hb;", |[a, b, _]| Some(a.wrapping_sub(b) & H)),
        ("sub.s32", "sub.s32 %d, %a, %b;", |[a, b, _]| Some(a.wrapping_sub(b) & W)),
        ("sub.s64", "sub.s64 %ld, %la, %lb;", |[a, b, _]| Some(a.wrapping_sub(b))),
        ("neg.s16", "neg.s16 %hd, %ha;", |[a, _, _]| Some(a.wrapping_neg() & H)),
        ("neg.s32", "neg.s32 %d, %a;", |[a, _, _]| Some(a.wrapping_neg() & W)),
        ("neg.s64", "neg.s64 %ld, %la;", |[a, _, _]| Some(a.wrapping_neg())),
        ("mul.lo.s32", "mul.lo.s32 %d, %a, %b;", |[a, b, _]| Some(a.wrapping_mul(b) & W)),
        ("mul.lo.s64", "mul.lo.s64 %ld, %la, %lb;", |[a, b, _]| Some(a.wrapping_mul(b))),
        ("mul.hi.u32", "mul.hi.u32 %d, %a, %b;", |[a, b, _]| Some(((a & W) * (b & W)) >> 32)),
        ("mul.hi.u64", "mul.hi.u64 %ld, %la, %lb;", |[a, b, _]| {
            Some(((u128::from(a) * u128::from(b)) >> 64) as u64)
        }),
        ("mul.wide.u16", "mul.wide.u16 %d, %ha, %hb;", |[a, b, _]| Some((a & H) * (b & H))),
        ("mul.wide.s32", "mul.wide.s32 %ld, %a, %b;", |[a, b, _]| Some((s32(a) * s32(b)) as u64)),
        ("mul.wide.u32", "mul.wide.u32 %ld, %a, %b;", |[a, b, _]| Some((a & W) * (b & W))),
        ("mad.lo.s32", "mad.lo.s32 %d, %a, %b, %c;", |[a, b, c]| Some(a.wrapping_mul(b).wrapping_add(c) & W)),
        ("mad.lo.u32", "mad.lo.u32 %d, %a, %b, %c;", |[a, b, c]| Some(a.wrapping_mul(b).wrapping_add(c) & W)),
        ("mad.wide.u32", "mad.wide.u32 %ld, %a, %b, %lc;", |[a, b, c]| {
            Some(((a & W) * (b & W)).wrapping_add(c))
        }),
        // Division by zero has no documented result.
        ("div.u32", "div.u32 %d, %a, %b;", |[a, b, _]| (a & W).checked_div(b & W)),
        ("div.u64", "div.u64 %ld, %la, %lb;", |[a, b, _]| a.checked_div(b)),
        ("mad.lo.s64", "mad.lo.s64 %ld, %la, %lb, %lc;", |[a, b, c]| Some(a.wrapping_mul(b).wrapping_add(c))),
        ("dp4a.s32.s32", "dp4a.s32.s32 %d, %a, %b, %c;", |operands| dot(operands, [true, true])),
        ("dp4a.s32.u32", "dp4a.s32.u32 %d, %a, %b, %c;", |operands| dot(operands, [true, false])),
        ("dp4a.u32.s32", "dp4a.u32.s32 %d, %a, %b, %c;", |operands| dot(operands, [false, true])),
        ("dp4a.u32.u32", "dp4a.u32.u32 %d, %a, %b, %c;", |operands| dot(operands, [false, false])),
        ("min.s16", "min.s16 %hd, %ha, %hb;", |[a, b, _]| Some(u64::from((a as i16).min(b as i16) as u16))),
        ("min.s32", "min.s32 %d, %a, %b;", |[a, b, _]| Some(s32(a).min(s32(b)) as u64 & W)),
        ("min.u32", "min.u32 %d, %a, %b;", |[a, b, _]| Some((a & W).min(b & W))),
        ("min.u64", "min.u64 %ld, %la, %lb;", |[a, b, _]| Some(a.min(b))),
        ("min.u16", "min.u16 %hd, %ha, %hb;", |[a, b, _]| Some((a & H).min(b & H))),
        ("max.s32", "max.s32 %d, %a, %b;", |[a, b, _]| Some(s32(a).max(s32(b)) as u64 & W)),
        ("max.u16", "max.u16 %hd, %ha, %hb;", |[a, b, _]| Some((a & H).max(b & H))),
        ("max.u32", "max.u32 %d, %a, %b;", |[a, b, _]| Some((a & W).max(b & W))),
        ("max.u64", "max.u64 %ld, %la, %lb;", |[a, b, _]| Some(a.max(b))),
        ("popc.b32", "popc.b32 %d, %a;", |[a, _, _]| Some(u64::from((a & W).count_ones()))),
        ("bfe.u32", "bfe.u32 %d, %a, %b, %c;", |[a, b, c]| Some(field(a & W, b, c, 32))),
        ("bfe.u64", "bfe.u64 %ld, %la, %b, %c;", |[a, b, c]| Some(field(a, b, c, 64))),
        ("bfe.s32", "bfe.s32 %d, %a, %b, %c;", |[a, b, c]| Some(signed_field(a, b, c))),
        (
            "bfi.b32",
            "and.b32 %d, %c, 63; shr.u32 %c, %c, 8; and.b32 %c, %c, 63; bfi.b32 %d, %a, %b, %d, %c;",
            inserted,
        ),
        ("lop3.b32", "lop3.b32 %d, %a, %b, %c, 0xE8;", |o| looked_up(o, 0xE8)),
        ("lop3.b32", "lop3.b32 %d, %a, %b, %c, 0xCA;", |o| looked_up(o, 0xCA)),
        ("lop3.b32", "lop3.b32 %d, %a, %b, %c, 0x1B;", |o| looked_up(o, 0x1B)),
        ("shf.l.wrap.b32", "shf.l.wrap.b32 %d, %a, %b, %c;", |[a, b, c]| {
            let n = c & 31;
            Some((b << n | (a & W) >> (32 - n)) & W)
        }),
        ("shf.r.wrap.b32", "shf.r.wrap.b32 %d, %a, %b, %c;", |[a, b, c]| {
            let n = c & 31;
            Some(((a & W) >> n | b << (32 - n)) & W)
        }),
        ("prmt.b32", "prmt.b32 %d, %a, %b, %c;", permuted),
        ("prmt.b32.f4e", "prmt.b32.f4e %d, %a, %b, %c;", |o| picked(o, |n, i| n + i)),
        ("prmt.b32.b4e", "prmt.b32.b4e %d, %a, %b, %c;", |o| picked(o, |n, i| (n + 8 - i) % 8)),
        ("prmt.b32.rc8", "prmt.b32.rc8 %d, %a, %b, %c;", |o| picked(o, |n, _| n)),
        ("prmt.b32.ecl", "prmt.b32.ecl %d, %a, %b, %c;", |o| picked(o, |n, i| n.max(i))),
        ("prmt.b32.ecr", "prmt.b32.ecr %d, %a, %b, %c;", |o| picked(o, |n, i| n.min(i))),
        ("prmt.b32.rc16", "prmt.b32.rc16 %d, %a, %b, %c;", |o| picked(o, |n, i| n % 2 * 2 + i % 2)),
        ("selp.b16", "selp.b16 %hd, %ha, %hb, %pc;", |[a, b, c]| Some(if c & 1 == 1 { a } else { b } & H)),
        ("selp.b32", "selp.b32 %d, %a, %b, %pc;", |[a, b, c]| Some(if c & 1 == 1 { a } else { b } & W)),
        ("selp.b64", "selp.b64 %ld, %la, %lb, %pc;", |[a, b, c]| Some(if c & 1 == 1 { a } else { b })),
        ("setp.eq.b16", "setp.eq.b16 %pd, %ha, %hb;", |[a, b, _]| flag(a & H == b & H)),
        ("setp.ne.b16", "setp.ne.b16 %pd, %ha, %hb;", |[a, b, _]| flag(a & H != b & H)),
        ("setp.lt.u16", "setp.lt.u16 %pd, %ha, %hb;", |[a, b, _]| flag(a & H < b & H)),
        ("setp.gt.u16", "setp.gt.u16 %pd, %ha, %hb;", |[a, b, _]| flag(a & H > b & H)),
        ("setp.eq.b32", "setp.eq.b32 %pd, %a, %b;", |[a, b, _]| flag(a & W == b & W)),
        ("setp.ne.b32", "setp.ne.b32 %pd, %a, %b;", |[a, b, _]| flag(a & W != b & W)),
        ("setp.ne.u32", "setp.ne.u32 %pd, %a, %b;", |[a, b, _]| flag(a & W != b & W)),
        ("setp.eq.u32", "setp.eq.u32 %pd, %a, %b;", |[a, b, _]| flag(a & W == b & W)),
        ("setp.gt.s32", "setp.gt.s32 %pd, %a, %b;", |[a, b, _]| flag(s32(a) > s32(b))),
        ("setp.lt.s32", "setp.lt.s32 %pd, %a, %b;", |[a, b, _]| flag(s32(a) < s32(b))),
        ("setp.le.s32", "setp.le.s32 %pd, %a, %b;", |[a, b, _]| flag(s32(a) <= s32(b))),
        ("setp.ge.s32", "setp.ge.s32 %pd, %a, %b;", |[a, b, _]| flag(s32(a) >= s32(b))),
        ("setp.lt.u32", "setp.lt.u32 %pd, %a, %b;", |[a, b, _]| flag(a & W < b & W)),
        ("setp.le.u32", "setp.le.u32 %pd, %a, %b;", |[a, b, _]| flag(a & W <= b & W)),
        ("setp.gt.u32", "setp.gt.u32 %pd, %a, %b;", |[a, b, _]| flag(a & W > b & W)),
        ("setp.ge.u32", "setp.ge.u32 %pd, %a, %b;", |[a, b, _]| flag(a & W >= b & W)),
        ("setp.eq.b64", "setp.eq.b64 %pd, %la, %lb;", |[a, b, _]| flag(a == b)),
        ("setp.ne.b64", "setp.ne.b64 %pd, %la, %lb;", |[a, b, _]| flag(a != b)),
        ("setp.lt.s64", "setp.lt.s64 %pd, %la, %lb;", |[a, b, _]| flag((a as i64) < (b as i64))),
        ("setp.lt.u64", "setp.lt.u64 %pd, %la, %lb;", |[a, b, _]| flag(a < b)),
        ("setp.le.u64", "setp.le.u64 %pd, %la, %lb;", |[a, b, _]| flag(a <= b)),
        ("setp.gt.u64", "setp.gt.u64 %pd, %la, %lb;", |[a, b, _]| flag(a > b)),
        ("setp.ge.u64", "setp.ge.u64 %pd, %la, %lb;", |[a, b, _]| flag(a >= b)),
        ("cvt.u64.u16", "cvt.u64.u16 %ld, %ha;", |[a, _, _]| Some(a & H)),
        ("cvt.u64.u32", "cvt.u64.u32 %ld, %a;", |[a, _, _]| Some(a & W)),
        ("cvt.s64.s32", "cvt.s64.s32 %ld, %a;", |[a, _, _]| Some(s32(a) as u64)),
        ("cvt.u32.u64", "cvt.u32.u64 %d, %la;", |[a, _, _]| Some(a & W)),
        ("cvt.u32.u16", "cvt.u32.u16 %d, %ha;", |[a, _, _]| Some(a & H)),
        ("cvt.u16.u32", "cvt.u16.u32 %hd, %a;", |[a, _, _]| Some(a & H)),
        ("cvt.u16.u64", "cvt.u16.u64 %hd, %la;", |[a, _, _]| Some(a & H)),
        // Rust's conversions round to nearest, ties to even.
        ("cvt.rn.f32.u16", "cvt.rn.f32.u16 %d, %ha;", |[a, _, _]| {
            Some(u64::from(((a & H) as f32).to_bits()))
        }),
        ("cvt.rn.f32.s32", "cvt.rn.f32.s32 %d, %a;", |[a, _, _]| Some(u64::from((s32(a) as f32).to_bits()))),
        ("cvt.rn.f32.u32", "cvt.rn.f32.u32 %d, %a;", |[a, _, _]| Some(u64::from(((a & W) as f32).to_bits()))),
        ("mov.b16", "mov.b16 %hd, %ha;", |[a, _, _]| Some(a & H)),
        ("mov.b32", "mov.b32 %d, {%ha, %hb};", |[a, b, _]| Some(a & H | (b & H) << 16)),
        ("mov.b64", "mov.b64 {_, %d}, %la;", |[a, _, _]| Some(a >> 32)),
        ("mov.pred", "mov.pred %pd, %pa;", |[a, _, _]| Some(a & 1)),
    ];
    let edges: Vec<u64> = [
        0,
        1,
        7,
        15,
        16,
        31,
        32,
        33,
        63,
        64,
        65,
        127,
        255,
        256,
        0x7FFF,
        0x8000,
        0xFFFF,
        0x7FFF_FFFF,
        0x8000_0000,
        W,
    ]
    .into_iter()
    .flat_map(|edge| [edge, edge << 32, u64::MAX - edge, edge | 0x5A5A_0000_0000])
    .collect();
    let checks = table.into_iter().zip(400..);
    checks
        .map(|((opcode, text, oracle), seed)| Check {
            opcode,
            text,
            inputs: triples(&edges, 150_000, seed),
            oracle,
        })
        .collect()
}

#[test]
fn integers() {
    run(&checks());
}
