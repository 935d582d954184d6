//! Logic, shifts, bit fields, bit counts and permutations.
//!
//! Source: ISA 9.7.8, with 9.7.1 for fields and counts and 9.7.9 for `prmt`.

use crate::lanes::{Pure, lanes};

/// Returns the function of an opcode of this family.
pub(crate) fn pure(opcode: &[&str]) -> Option<Pure> {
    logic(opcode)
        .or_else(|| shifts(opcode))
        .or_else(|| fields(opcode))
        .or_else(|| counts(opcode))
        .or_else(|| permutes(opcode))
}

/// `and`, `or`, `xor`, `not`, `cnot`, `lop3`.
fn logic(opcode: &[&str]) -> Option<Pure> {
    Some(match opcode {
        ["and", "b16"] => lanes!(WWW, |a, b| a & b; B16 B16 B16),
        ["and", "b32"] => lanes!(WWW, |a, b| a & b; B32 B32 B32),
        ["and", "b64"] => lanes!(LLL, |a, b| a & b; B64 B64 B64),
        ["or", "b16"] => lanes!(WWW, |a, b| a | b; B16 B16 B16),
        ["or", "b32"] => lanes!(WWW, |a, b| a | b; B32 B32 B32),
        ["or", "b64"] => lanes!(LLL, |a, b| a | b; B64 B64 B64),
        ["xor", "b16"] => lanes!(WWW, |a, b| a ^ b; B16 B16 B16),
        ["xor", "b32"] => lanes!(WWW, |a, b| a ^ b; B32 B32 B32),
        ["xor", "b64"] => lanes!(LLL, |a, b| a ^ b; B64 B64 B64),
        ["not", "b16"] => lanes!(WW, |a| !a & 0xffff; B16 B16),
        ["not", "b32"] => lanes!(WW, |a| !a; B32 B32),
        ["not", "b64"] => lanes!(LL, |a| !a; B64 B64),
        ["lop3", "b32"] => lanes!(WWWWW, |a, b, c, table| lop3(a, b, c, table); B32 B32 B32 B32 B32),
        _ => return None,
    })
}

/// `lop3`: selects bit 4·a + 2·b + c of the table for each bit of the operands.
fn lop3(a: u32, b: u32, c: u32, table: u32) -> u32 {
    (0..8).fold(0, |result, row| {
        let pick = |x: u32, bit: u32| if row >> bit & 1 == 1 { x } else { !x };
        let here = pick(a, 2) & pick(b, 1) & pick(c, 0);
        result | if table >> row & 1 == 1 { here } else { 0 }
    })
}

/// `shl`, `shr` (shifts beyond the width count as the width), and `shf` of a pair of words.
fn shifts(opcode: &[&str]) -> Option<Pure> {
    Some(match opcode {
        ["shl", "b16"] => lanes!(WWW, |a, n| if n > 15 { 0 } else { a << n & 0xffff }; B16 B16 B32),
        ["shl", "b32"] => lanes!(WWW, |a, n| if n > 31 { 0 } else { a << n }; B32 B32 B32),
        ["shl", "b64"] => lanes!(LLW, |a, n| if n > 63 { 0 } else { a << n }; B64 B64 B32),
        ["shr", "b16" | "u16"] => lanes!(WWW, |a, n| if n > 15 { 0 } else { a >> n }; B16 B16 B32),
        ["shr", "b32" | "u32"] => lanes!(WWW, |a, n| if n > 31 { 0 } else { a >> n }; B32 B32 B32),
        ["shr", "b64" | "u64"] => lanes!(LLW, |a, n| if n > 63 { 0 } else { a >> n }; B64 B64 B32),
        ["shr", "s16"] => {
            lanes!(WWW, |a, n| (a as u16 as i16 >> n.min(15)) as u16 as u32; B16 B16 B32)
        }
        ["shr", "s32"] => lanes!(WWW, |a, n| (a as i32 >> n.min(31)) as u32; B32 B32 B32),
        ["shr", "s64"] => lanes!(LLW, |a, n| (a as i64 >> n.min(63)) as u64; B64 B64 B32),
        ["shf", "l", "clamp", "b32"] => {
            lanes!(WWWW, |a, b, n| (pair(a, b) << n.min(32) >> 32) as u32; B32 B32 B32 B32)
        }
        ["shf", "l", "wrap", "b32"] => {
            lanes!(WWWW, |a, b, n| (pair(a, b) << (n & 31) >> 32) as u32; B32 B32 B32 B32)
        }
        ["shf", "r", "clamp", "b32"] => {
            lanes!(WWWW, |a, b, n| (pair(a, b) >> n.min(32)) as u32; B32 B32 B32 B32)
        }
        ["shf", "r", "wrap", "b32"] => {
            lanes!(WWWW, |a, b, n| (pair(a, b) >> (n & 31)) as u32; B32 B32 B32 B32)
        }
        _ => return None,
    })
}

fn pair(low: u32, high: u32) -> u64 {
    u64::from(low) | u64::from(high) << 32
}

/// `bfe` and `bfi`. Positions and lengths are taken modulo 256.
fn fields(opcode: &[&str]) -> Option<Pure> {
    Some(match opcode {
        ["bfe", "u32"] => lanes!(WWWW, |a, p, n| extract(u64::from(a), p, n) as u32; B32 B32 B32 B32),
        ["bfe", "u64"] => lanes!(LLWW, |a, p, n| extract(a, p, n); B64 B64 B32 B32),
        ["bfe", "s32"] => {
            lanes!(WWWW, |a, p, n| signed_extract(a as i32 as i64, p, n, 31) as u32; B32 B32 B32 B32)
        }
        ["bfe", "s64"] => lanes!(LLWW, |a, p, n| signed_extract(a as i64, p, n, 63) as u64; B64 B64 B32 B32),
        ["bfi", "b32"] => {
            lanes!(WWWWW, |a, b, p, n| insert(u64::from(a), u64::from(b), p, n) as u32; B32 B32 B32 B32 B32)
        }
        ["bfi", "b64"] => lanes!(LLLWW, |a, b, p, n| insert(a, b, p, n); B64 B64 B64 B32 B32),
        _ => return None,
    })
}

/// Returns a mask of the lowest `length` bits, all if `length` is 64 or more.
fn low_bits(length: u32) -> u64 {
    1u64.checked_shl(length).map_or(u64::MAX, |bit| bit - 1)
}

fn extract(a: u64, position: u32, length: u32) -> u64 {
    let (position, length) = (position & 0xff, length & 0xff);
    a.checked_shr(position).unwrap_or(0) & low_bits(length)
}

/// The sign is the field's last bit, or the operand's if the field extends beyond it.
fn signed_extract(a: i64, position: u32, length: u32, msb: u32) -> i64 {
    let (position, length) = (position & 0xff, length & 0xff);
    if length == 0 {
        return 0;
    }
    let sign = a >> (position + length - 1).min(msb) & 1;
    // Bits above the operand equal the sign, because `a` is sign-extended.
    let field = a >> position.min(63);
    let mask = low_bits(length) as i64;
    if sign == 1 { field | !mask } else { field & mask }
}

fn insert(a: u64, b: u64, position: u32, length: u32) -> u64 {
    let (position, length) = (position & 0xff, length & 0xff);
    let mask = low_bits(length).checked_shl(position).unwrap_or(0);
    (a.checked_shl(position).unwrap_or(0) & mask) | (b & !mask)
}

/// `popc`, `clz`, `bfind`, `brev`.
fn counts(opcode: &[&str]) -> Option<Pure> {
    Some(match opcode {
        ["popc", "b32"] => lanes!(WW, |a| a.count_ones(); B32 B32),
        ["popc", "b64"] => lanes!(WL, |a| a.count_ones(); B32 B64),
        ["clz", "b32"] => lanes!(WW, |a| a.leading_zeros(); B32 B32),
        ["clz", "b64"] => lanes!(WL, |a| a.leading_zeros(); B32 B64),
        ["brev", "b32"] => lanes!(WW, |a| a.reverse_bits(); B32 B32),
        ["brev", "b64"] => lanes!(LL, |a| a.reverse_bits(); B64 B64),
        ["bfind", "u32"] => lanes!(WW, |a| find(u64::from(a)); B32 B32),
        ["bfind", "u64"] => lanes!(WL, |a| find(a); B32 B64),
        ["bfind", "s32"] => lanes!(WW, |a| find(u64::from(a ^ (a as i32 >> 31) as u32)); B32 B32),
        ["bfind", "s64"] => lanes!(WL, |a| find(a ^ (a as i64 >> 63) as u64); B32 B64),
        ["bfind", "shiftamt", "u32"] => lanes!(WW, |a| shift(find(u64::from(a)), 31); B32 B32),
        ["bfind", "shiftamt", "u64"] => lanes!(WL, |a| shift(find(a), 63); B32 B64),
        ["bfind", "shiftamt", "s32"] => {
            lanes!(WW, |a| shift(find(u64::from(a ^ (a as i32 >> 31) as u32)), 31); B32 B32)
        }
        ["bfind", "shiftamt", "s64"] => {
            lanes!(WL, |a| shift(find(a ^ (a as i64 >> 63) as u64), 63); B32 B64)
        }
        _ => return None,
    })
}

/// Returns the highest set bit, or all ones if there is none.
fn find(a: u64) -> u32 {
    a.checked_ilog2().unwrap_or(u32::MAX)
}

fn shift(found: u32, msb: u32) -> u32 {
    if found == u32::MAX { found } else { msb - found }
}

/// `prmt`.
fn permutes(opcode: &[&str]) -> Option<Pure> {
    Some(match opcode {
        ["prmt", "b32"] => lanes!(WWWW, |a, b, c| permute(a, b, c); B32 B32 B32 B32),
        ["prmt", "b32", "f4e"] => lanes!(WWWW, |a, b, c| by_table(a, b, c, F4E); B32 B32 B32 B32),
        ["prmt", "b32", "b4e"] => lanes!(WWWW, |a, b, c| by_table(a, b, c, B4E); B32 B32 B32 B32),
        ["prmt", "b32", "rc8"] => lanes!(WWWW, |a, b, c| by_table(a, b, c, RC8); B32 B32 B32 B32),
        ["prmt", "b32", "ecl"] => lanes!(WWWW, |a, b, c| by_table(a, b, c, ECL); B32 B32 B32 B32),
        ["prmt", "b32", "ecr"] => lanes!(WWWW, |a, b, c| by_table(a, b, c, ECR); B32 B32 B32 B32),
        ["prmt", "b32", "rc16"] => lanes!(WWWW, |a, b, c| by_table(a, b, c, RC16); B32 B32 B32 B32),
        _ => return None,
    })
}

/// Picks a byte of {b, a} for each nibble. The nibble's highest bit replicates that byte's sign.
fn permute(a: u32, b: u32, selector: u32) -> u32 {
    let bytes = pair(a, b);
    (0..4).fold(0, |result, i| {
        let choice = selector >> (4 * i);
        let byte = (bytes >> (8 * (choice & 7))) as u8;
        let byte = if choice & 8 == 0 { byte } else { (byte as i8 >> 7) as u8 };
        result | u32::from(byte) << (8 * i)
    })
}

/// The modes' selectors for the two low bits of `c` from 0 to 3.
///
/// Highest byte first, as in the ISA's table.
const F4E: [u32; 4] = [0x3210, 0x4321, 0x5432, 0x6543];
const B4E: [u32; 4] = [0x5670, 0x6701, 0x7012, 0x0123];
const RC8: [u32; 4] = [0x0000, 0x1111, 0x2222, 0x3333];
const ECL: [u32; 4] = [0x3210, 0x3211, 0x3222, 0x3333];
const ECR: [u32; 4] = [0x0000, 0x1110, 0x2210, 0x3210];
const RC16: [u32; 4] = [0x1010, 0x3232, 0x1010, 0x3232];

fn by_table(a: u32, b: u32, c: u32, table: [u32; 4]) -> u32 {
    permute(a, b, table[(c & 3) as usize])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bit_fields_match_the_isa_bit_by_bit() {
        let mut random = fastrand::Rng::with_seed(1);
        for _ in 0..20_000 {
            let (a, b) = (random.u64(..), random.u64(..));
            let (p, n) = (random.u32(..80), random.u32(..80));
            for msb in [31u32, 63] {
                let (a, b) = if msb == 31 { (a & 0xffff_ffff, b & 0xffff_ffff) } else { (a, b) };
                let bit = |x: u64, i: u32| x >> i & 1;
                let (mut unsigned, mut signed, mut inserted) = (0, 0, b);
                let sign = if n == 0 { 0 } else { bit(a, (p + n - 1).min(msb)) };
                for i in 0..=msb {
                    let inside = i < n && p + i <= msb;
                    unsigned |= if inside { bit(a, p + i) } else { 0 } << i;
                    signed |= if inside { bit(a, p + i) } else { sign } << i;
                    if inside {
                        inserted = inserted & !(1 << (p + i)) | bit(a, i) << (p + i);
                    }
                }
                let extended = if msb == 31 { a as u32 as i32 as i64 } else { a as i64 };
                let width = low_bits(msb + 1);
                assert_eq!(extract(a, p, n), unsigned);
                assert_eq!(signed_extract(extended, p, n, msb) as u64 & width, signed, "{a:x} {p} {n}");
                assert_eq!(insert(a, b, p, n) & width, inserted);
            }
        }
    }

    #[test]
    fn permuting_and_tables() {
        assert_eq!(permute(0x8382_8180, 0x0706_0504, 0x7531), 0x0705_8381);
        assert_eq!(permute(0x8382_8180, 0x0706_0504, 0xf8c9), 0x00ff_00ff);
        assert_eq!(by_table(0x0302_0100, 0x0706_0504, 1, B4E), 0x0607_0001);
        assert_eq!(lop3(0xf0, 0xcc, 0xaa, 0xe8), 0xe8);
        assert_eq!(find(0), u32::MAX);
        assert_eq!(shift(find(1), 31), 31);
    }
}
