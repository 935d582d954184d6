//! Shapes of GPU MODE's contest on NVFP4, of its files `problems/nvidia/*/task.yml`
//! (<https://github.com/gpu-mode/reference-kernels>).

use std::num::NonZeroUsize;

use super::op::Op;
use super::size::Size;

/// Products: tokens (M in the contest), rows of weights (N) and columns (K).
const GEMM: [[usize; 3]; 3] = [[128, 7168, 16384], [128, 4096, 7168], [128, 7168, 2048]];

/// Gated products: tokens, rows of each of two matrices, and columns.
const DUAL: [[usize; 3]; 4] = [[256, 4096, 7168], [512, 4096, 7168], [256, 3072, 4096], [512, 3072, 7168]];

/// Grouped products: tokens of each matrix, and rows and columns of all.
const GROUPED: [(&[usize], [usize; 2]); 4] = [
    (&[80, 176, 128, 72, 64, 248, 96, 160], [4096, 7168]),
    (&[40, 76, 168, 72, 164, 148, 196, 160], [7168, 2048]),
    (&[192, 320], [3072, 4096]),
    (&[128, 384], [4096, 1536]),
];

fn grouped((counts, [rows, cols]): (&[usize], [usize; 2])) -> Size {
    let tokens = NonZeroUsize::new(counts.iter().sum());
    Size { rows, cols, batches: counts.len(), tokens, top_k: 1 }
}

/// Returns the sizes that an operation multiplies, with their tokens.
pub(crate) fn sizes(op: Op) -> Vec<Size> {
    if op.is_of_experts() {
        return GROUPED.map(grouped).to_vec();
    }
    let (shapes, matrices) = if op == Op::GemmFp4Gated { (&DUAL[..], 2) } else { (&GEMM[..], 1) };
    let size = |[tokens, rows, cols]: [usize; 3]| Size {
        rows: matrices * rows,
        cols,
        batches: 1,
        tokens: NonZeroUsize::new(tokens),
        top_k: 0,
    };
    shapes.iter().copied().map(size).collect()
}

/// Returns the tokens of each matrix of a grouped product of the contest; `None` for other sizes.
pub(super) fn counts(size: Size) -> Option<&'static [usize]> {
    GROUPED.into_iter().find(|shape| grouped(*shape) == size).map(|(counts, _)| counts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_the_contests() {
        let text = |op| sizes(op).iter().map(Size::to_string).collect::<Vec<_>>().join(", ");
        assert!(text(Op::GemmFp4).starts_with("7168x16384"), "{}", text(Op::GemmFp4));
        assert!(text(Op::GemmFp4Gated).starts_with("8192x7168"), "{}", text(Op::GemmFp4Gated));
        for size in sizes(Op::GemmExpertsFp4) {
            let counts = counts(size).expect("a grouped product");
            assert_eq!(Some(counts.iter().sum()), size.tokens.map(usize::from), "{size}");
        }
        assert_eq!(counts(sizes(Op::GemmFp4)[0]), None);
    }
}
