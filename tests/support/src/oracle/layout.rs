//! The 128×4 scale layout as a walk through memory: which scale is at the next byte.

/// Swizzles linear scales `[rows, blocks]`.
///
/// Tiles of 128 rows by 4 blocks go from left to right, then from top to bottom. A tile has 32
/// lines of 16 bytes, and a line holds four blocks each of four rows that are 32 apart. Missing
/// scales are zero.
pub fn swizzle(linear: &[u8], rows: usize, blocks: usize) -> Vec<u8> {
    assert_eq!(linear.len(), rows * blocks);
    let mut bytes = Vec::new();
    for first_row in (0..rows).step_by(128) {
        for first_block in (0..blocks).step_by(4) {
            for line in 0..32 {
                for quarter in 0..4 {
                    for block in first_block..first_block + 4 {
                        let row = first_row + quarter * 32 + line;
                        bytes.push(if row < rows && block < blocks {
                            linear[row * blocks + block]
                        } else {
                            0
                        });
                    }
                }
            }
        }
    }
    bytes
}

/// Returns the linear scales of swizzled ones.
pub fn unswizzle(swizzled: &[u8], rows: usize, blocks: usize) -> Vec<u8> {
    let tiles_across = blocks.div_ceil(4);
    let byte = |row: usize, block: usize| {
        let tile = row / 128 * tiles_across + block / 4;
        swizzled[tile * 512 + row % 32 * 16 + row % 128 / 32 * 4 + block % 4]
    };
    (0..rows)
        .flat_map(|row| (0..blocks).map(move |block| (row, block)))
        .map(|(row, block)| byte(row, block))
        .collect()
}
