//! Sums over the lanes of a warp.

use microscale_formats::dot::STREAMS;

use crate::hardware::warp;

/// Adds up the lanes' streams: lanes 16 apart first, then 8, and so on. While a lane has sums of
/// several rows, it gives half of them to its partner. At the end lane `l` has the sum of row
/// `l / (32 / ROWS)`.
#[inline(always)]
pub(crate) fn total<const ROWS: usize>(mut sums: [f64; ROWS]) -> f64 {
    let (mut left, mut distance) = (ROWS, STREAMS as u32 / 2);
    while distance > 0 {
        if left > 1 {
            left /= 2;
            let upper = warp::lane() & distance != 0;
            for i in 0..left {
                let (low, high) = (sums[i], sums[i + left]);
                let (keeps, gives) = if upper { (high, low) } else { (low, high) };
                sums[i] = keeps + warp::shuffle_xor_f64(gives, distance);
            }
        } else {
            sums[0] += warp::shuffle_xor_f64(sums[0], distance);
        }
        distance /= 2;
    }
    sums[0]
}

/// Adds the sum of the lane whose number differs in bit `bit`.
#[inline(always)]
pub(crate) fn add_partner(sum: f32, bit: u32) -> f32 {
    sum + f32::from_bits(warp::shuffle_xor(sum.to_bits(), bit))
}

/// Adds two sums of two lanes, whose numbers differ in bit `bit`. The lane without the bit gets the
/// first total, the other lane the second.
#[inline(always)]
pub(crate) fn split_with_partner([first, second]: [f32; 2], bit: u32) -> f32 {
    let (kept, given) = if warp::lane() & bit == 0 { (first, second) } else { (second, first) };
    kept + f32::from_bits(warp::shuffle_xor(given.to_bits(), bit))
}
