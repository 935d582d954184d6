//! The sizes of matrices, and of the operands that they are multiplied with.

use std::fmt;
use std::num::NonZeroUsize;
use std::str::FromStr;

use microscale::Shape;

/// The rows and columns of a matrix, written `ROWSxCOLS`, or of several, written `ROWSxCOLSxCOUNT`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Size {
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
    /// Matrices; 1 but for products.
    pub batches: usize,
    /// Rows of activations that weights are multiplied with; none is one, and what other operations have.
    pub tokens: Option<NonZeroUsize>,
    /// Matrices that a row of activations is multiplied with, where they are experts' weights; 0 where they are not.
    pub top_k: usize,
}

/// The most rows of activations: more than any batch or prompt that is multiplied at once.
const TOKENS: usize = 1 << 16;

impl Size {
    /// Makes sure that it can be measured, or says why not: there are limits on tokens and memory.
    pub(crate) fn check(&self) -> Result<(), String> {
        let tokens = self.tokens.map_or(0, NonZeroUsize::get);
        if tokens > TOKENS {
            return Err(format!("--tokens {tokens} is more than the {TOKENS} allowed"));
        }
        // More than can be counted is refused where it is measured.
        let Some(bytes) = self.bytes(tokens) else { return Ok(()) };
        // Whether it can be had is all that is asked: nothing is written to it.
        Vec::<u8>::new().try_reserve_exact(bytes).map_err(|_| {
            let needed = bytes.div_ceil(1 << 30);
            format!("{self} takes {needed} GiB of memory, which there are not; choose a smaller --shape or fewer --tokens")
        })
    }

    /// The bytes of operands and results as f32, each with another copy to check the results by.
    fn bytes(&self, tokens: usize) -> Option<usize> {
        let matrices = self.rows.checked_mul(self.cols)?.checked_mul(self.batches)?;
        let others = tokens.checked_mul(self.rows.checked_add(self.cols)?)?;
        matrices.checked_add(others)?.checked_mul(2 * size_of::<f32>())
    }

    /// Rows of all matrices, and columns.
    pub(super) fn all_rows(&self) -> Shape {
        // If the product saturates, the shape is too large for whatever is done with it next.
        Shape::new(self.rows.saturating_mul(self.batches), self.cols)
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rows, cols, batches, tokens, top_k } = self;
        write!(f, "{rows}x{cols}")?;
        if *batches != 1 {
            write!(f, "x{batches}")?;
        }
        match tokens.map(NonZeroUsize::get) {
            None => Ok(()),
            Some(1) => write!(f, ", 1 token"),
            Some(tokens) => write!(f, ", {tokens} tokens"),
        }?;
        if *top_k > 0 { write!(f, ", {top_k} experts each") } else { Ok(()) }
    }
}

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let parts: Option<Vec<usize>> =
            text.split(['x', 'X']).map(|part| part.parse().ok().filter(|count| *count > 0)).collect();
        match parts.as_deref() {
            Some(&[rows, cols]) => Ok(Self { rows, cols, batches: 1, tokens: None, top_k: 0 }),
            Some(&[rows, cols, batches]) => Ok(Self { rows, cols, batches, tokens: None, top_k: 0 }),
            _ => Err(format!(
                "{text} is not a shape; write rows and columns as 8192x4096, several matrices as 8192x4096x2"
            )),
        }
    }
}
