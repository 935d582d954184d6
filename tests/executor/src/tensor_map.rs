//! Tensor maps, which describe the source of a tensor copy (`cp.async.bulk.tensor`).
//!
//! Source: `cuTensorMapEncodeTiled` of the CUDA driver for the limits, ISA 5.5 for the boxes.

/// Size of an encoded map in bytes, and its alignment.
pub(crate) const BYTES: usize = 128;
pub(crate) const ALIGN: usize = 64;
/// The first eight bytes of an encoded map.
const MAGIC: u64 = u64::from_le_bytes(*b"msc-tmap");

/// Maximum number of dimensions.
pub(crate) const RANK: usize = 3;
/// Maximum size of a tensor along a dimension.
const MOST: u64 = 1 << 32;
/// Maximum size of a box along a dimension.
const MOST_OF_BOX: u32 = 256;
/// Alignment of the tensor, its rows and the rows of its boxes in bytes.
const UNIT: u64 = 16;
/// Bytes of a piece, and of a line: the 128-byte swizzle permutes the pieces of a line.
const PIECE: usize = 16;
const LINE: usize = 128;

/// A tensor of bytes in global memory, which tensor copies read in boxes.
///
/// This corresponds to the `CUtensorMap` of `cuTensorMapEncodeTiled` with the data type `UINT8`, no
/// interleave, element strides of 1, and zeros for elements outside of the tensor. The driver's
/// encoding of such a map is opaque, so [`Self::encode`] has an encoding of its own, which only
/// this crate reads.
///
/// A kernel takes a map as a parameter of 128 bytes ([`crate::Argument`] is `From<TensorMap>`), as
/// part of a structure, or in a buffer that no kernel of the launch writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorMap {
    address: u64,
    rank: usize,
    /// Sizes, innermost first. Missing dimensions have 1.
    dims: [u64; RANK],
    /// Bytes between neighbours along the second and the third dimension. Missing dimensions have
    /// 0.
    strides: [u64; RANK - 1],
    /// Sizes of a box. Missing dimensions have 1.
    box_dims: [u32; RANK],
    swizzle: Swizzle,
}

/// The order of 16-byte pieces in shared memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Swizzle {
    /// Rows follow each other, and their pieces keep their order (`CU_TENSOR_MAP_SWIZZLE_NONE`).
    #[default]
    None,
    /// Bits 4 to 6 of each shared address are XORed with its bits 7 to 9
    /// (`CU_TENSOR_MAP_SWIZZLE_128B`).
    Bytes128,
}

/// A run of source bytes of a bulk copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    /// The offset in the copy's bytes.
    pub(crate) at: usize,
    /// The address in global memory.
    pub(crate) from: u64,
    pub(crate) bytes: usize,
}

impl TensorMap {
    /// Makes a map of two or three dimensions, innermost first.
    ///
    /// `dims` are the tensor's sizes in elements, `box_dims` the sizes of a box. `strides` are the
    /// bytes between neighbours along the second and the third dimension.
    ///
    /// # Errors
    ///
    /// The limit of `cuTensorMapEncodeTiled` that the map exceeds. With the 128-byte swizzle, rows
    /// of a box must have exactly 128 bytes: NVIDIA does not document how shorter ones are stored.
    pub fn new(
        address: u64,
        dims: &[u64],
        strides: &[u64],
        box_dims: &[u32],
        swizzle: Swizzle,
    ) -> Result<Self, &'static str> {
        let rank = dims.len();
        if !(2..=RANK).contains(&rank) || strides.len() + 1 != rank || box_dims.len() != rank {
            return Err("a tensor needs two or three dimensions, a stride for each but the first, and a box");
        }
        if !address.is_multiple_of(UNIT) {
            return Err("the tensor's address must be a multiple of 16");
        }
        if dims.iter().any(|dim| !(1..=MOST).contains(dim)) {
            return Err("the tensor's sizes must be from 1 to 2^32");
        }
        if strides.iter().any(|stride| !stride.is_multiple_of(UNIT) || *stride >= 1 << 40) {
            return Err("the strides must be multiples of 16 below 2^40");
        }
        if box_dims.iter().any(|size| !(1..=MOST_OF_BOX).contains(size)) {
            return Err("the box's sizes must be from 1 to 256");
        }
        let row = u64::from(box_dims[0]);
        if !row.is_multiple_of(UNIT) {
            return Err("a row of the box must have a multiple of 16 bytes");
        }
        if swizzle == Swizzle::Bytes128 && row != LINE as u64 {
            return Err("a row of the box must have 128 bytes with the 128-byte swizzle");
        }
        let steps = [1].iter().chain(strides);
        let last: u128 =
            dims.iter().zip(steps).map(|(dim, step)| u128::from(dim - 1) * u128::from(*step)).sum();
        if u64::try_from(u128::from(address) + last).is_err() {
            return Err("the tensor's last address must have 64 bits");
        }
        let mut map =
            Self { address, rank, dims: [1; RANK], strides: [0; RANK - 1], box_dims: [1; RANK], swizzle };
        map.dims[..rank].copy_from_slice(dims);
        map.strides[..rank - 1].copy_from_slice(strides);
        map.box_dims[..rank].copy_from_slice(box_dims);
        Ok(map)
    }

    /// Returns the map's bytes, which a kernel must find on 64 bytes.
    pub fn encode(&self) -> [u8; 128] {
        let Self { address, rank, dims, strides, box_dims, swizzle } = *self;
        let head = [MAGIC, address, rank as u64, u64::from(swizzle == Swizzle::Bytes128)];
        let words = head.into_iter().chain(dims).chain(strides).chain(box_dims.map(u64::from));
        let mut bytes = [0; BYTES];
        for (place, word) in bytes.as_chunks_mut().0.iter_mut().zip(words) {
            *place = word.to_le_bytes();
        }
        bytes
    }

    /// Returns the map with these bytes, or the reason why there is none.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, &'static str> {
        const NONE: &str = "its bytes are not an encoded tensor map of the executor";
        let words: Vec<u64> = bytes.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word)).collect();
        let &[MAGIC, address, rank, swizzle, a, b, c, stride, other, d, e, f, ..] = &words[..] else {
            return Err(NONE);
        };
        let rank = (rank as usize).clamp(2, RANK);
        let swizzle = if swizzle == 0 { Swizzle::None } else { Swizzle::Bytes128 };
        let box_dims = [d, e, f].map(|size| size.try_into().unwrap_or(0));
        let strides = &[stride, other][..rank - 1];
        let map = Self::new(address, &[a, b, c][..rank], strides, &box_dims[..rank], swizzle)?;
        if map.encode() == bytes { Ok(map) } else { Err(NONE) }
    }

    /// Returns the number of dimensions.
    pub(crate) fn rank(&self) -> usize {
        self.rank
    }

    /// Returns the order of a box's pieces.
    pub(crate) fn swizzle(&self) -> Swizzle {
        self.swizzle
    }

    /// Returns the bytes of a box, with those outside of the tensor.
    pub(crate) fn box_bytes(&self) -> usize {
        self.box_dims.iter().map(|&size| size as usize).product()
    }

    /// Returns the runs of bytes of the box at `corner` that are in the tensor.
    pub(crate) fn runs(&self, corner: [i32; RANK]) -> Vec<Run> {
        // The indices within the box, along a dimension, that are in the tensor.
        let inside = |dim: usize| {
            let (start, end) = (i64::from(corner[dim]), self.dims[dim] as i64);
            (-start).max(0)..(end - start).min(self.box_dims[dim].into())
        };
        let row = inside(0);
        let mut runs = Vec::new();
        if row.is_empty() {
            return runs;
        }
        let place = |dim: usize, index: i64| (i64::from(corner[dim]) + index) as u64;
        let [width, height, _] = self.box_dims.map(i64::from);
        for z in inside(2) {
            for y in inside(1) {
                let offset = place(2, z) * self.strides[1] + place(1, y) * self.strides[0];
                runs.push(Run {
                    at: ((z * height + y) * width + row.start) as usize,
                    from: self.address + offset + place(0, row.start),
                    bytes: (row.end - row.start) as usize,
                });
            }
        }
        runs
    }
}

impl Swizzle {
    /// Returns the bytes for the shared address `to`, given the bytes of a box in their order.
    pub(crate) fn apply(self, to: u64, bytes: Vec<u8>) -> Vec<u8> {
        if self == Self::None {
            return bytes;
        }
        // Boxes consist of whole lines.
        let lines = bytes.as_chunks::<LINE>().0.iter().zip(to / LINE as u64..);
        let swizzled = lines.flat_map(|(line, number)| {
            let pieces = line.as_chunks::<PIECE>().0;
            (0..pieces.len()).flat_map(move |i| pieces[i ^ (number as usize % pieces.len())])
        });
        swizzled.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_limit_is_checked() {
        let of = |address, dims: &[u64], strides: &[u64], box_dims: &[u32]| {
            TensorMap::new(address, dims, strides, box_dims, Swizzle::None)
        };
        let good = [
            of(16, &[1, 1], &[0], &[16, 1]),
            of(0, &[1 << 32, 1 << 32], &[16], &[256, 256]),
            of(0, &[17, 3, 2], &[32, (1 << 40) - 16], &[240, 256, 256]),
            TensorMap::new(0, &[128, 2], &[128], &[128, 3], Swizzle::Bytes128),
        ];
        for map in good {
            let map = map.unwrap();
            assert_eq!(TensorMap::decode(&map.encode()), Ok(map));
        }
        for (bad, part) in [
            (of(0, &[16], &[], &[16]), "two or three dimensions"),
            (of(0, &[16; 4], &[16; 3], &[16; 4]), "two or three dimensions"),
            (of(0, &[16; 3], &[16], &[16; 3]), "two or three dimensions"),
            (of(0, &[16; 2], &[16], &[16; 3]), "two or three dimensions"),
            (of(8, &[16; 2], &[16], &[16; 2]), "address"),
            (of(0, &[16, 0], &[16], &[16; 2]), "sizes must be from 1 to 2^32"),
            (of(0, &[16, (1 << 32) + 1], &[16], &[16; 2]), "sizes must be from 1 to 2^32"),
            (of(0, &[16; 2], &[24], &[16; 2]), "strides"),
            (of(0, &[16; 2], &[1 << 40], &[16; 2]), "strides"),
            (of(0, &[16; 2], &[16], &[16, 0]), "from 1 to 256"),
            (of(0, &[16; 2], &[16], &[16, 257]), "from 1 to 256"),
            (of(0, &[16; 2], &[16], &[24, 1]), "multiple of 16 bytes"),
            (of(0, &[1, 1 << 32], &[1 << 39], &[16, 1]), "64 bits"),
            (TensorMap::new(0, &[128, 2], &[128], &[144, 3], Swizzle::Bytes128), "128 bytes"),
            (TensorMap::new(0, &[128, 2], &[128], &[112, 3], Swizzle::Bytes128), "128 bytes"),
        ] {
            let problem = bad.unwrap_err();
            assert!(problem.contains(part), "{problem}");
        }
    }

    #[test]
    fn changed_bytes_are_no_map() {
        let map = TensorMap::new(64, &[17, 3, 2], &[32, 96], &[32, 4, 2], Swizzle::None).unwrap().encode();
        let mut other = map;
        for at in 0..BYTES {
            other[at] ^= 0x80;
            // Some changes give another map.
            if let Ok(changed) = TensorMap::decode(&other) {
                assert_eq!(changed.encode(), other, "byte {at}");
                assert!((8..96).contains(&at), "byte {at}");
            }
            other[at] = map[at];
        }
        assert!(TensorMap::decode(&map[..120]).is_err());
        assert!(TensorMap::decode(&[0; BYTES]).is_err());
    }

    #[test]
    fn the_swizzle_exchanges_address_bits() {
        let bytes: Vec<u8> = (0..16 * 8 * 2).map(|i| (i / 16) as u8).collect();
        for to in [0u64, 128, 1024, 0x1c80] {
            let placed = Swizzle::Bytes128.apply(to, bytes.clone());
            for (i, byte) in bytes.iter().enumerate() {
                let address = to + i as u64;
                let swizzled = address ^ (address >> 7 & 7) << 4;
                assert_eq!(placed[(swizzled - to) as usize], *byte, "{to:#x}, byte {i}");
            }
        }
    }
}
