//! Sizes of matrices and of their operands in products.

use std::fmt;
use std::num::NonZeroUsize;
use std::str::FromStr;

use microscale::Shape;

/// The size of a matrix, `ROWSxCOLS`, or of several, `ROWSxCOLSxCOUNT`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Size {
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
    /// Number of matrices; 1 except for products.
    pub batches: usize,
    /// Rows of activations; `None` for one row, and for operations without activations.
    pub tokens: Option<NonZeroUsize>,
    /// Number of experts per row of activations; 0 without experts.
    pub top_k: usize,
}

/// Maximum rows of activations: more than any batch or prompt.
const TOKENS: usize = 1 << 16;

impl Size {
    /// Checks the limits on tokens and memory.
    pub(crate) fn check(&self) -> Result<(), String> {
        let tokens = self.tokens.map_or(0, NonZeroUsize::get);
        if tokens > TOKENS {
            return Err(format!("--tokens {tokens} is more than the {TOKENS} allowed"));
        }
        // A size that overflows is refused when it is measured.
        let Some(bytes) = self.bytes(tokens) else { return Ok(()) };
        // Only checks that the allocation succeeds. The memory is never written.
        Vec::<u8>::new().try_reserve_exact(bytes).map_err(|_| {
            let needed = bytes.div_ceil(1 << 30);
            format!("{self} takes {needed} GiB of memory, which there are not; choose a smaller --shape or fewer --tokens")
        })
    }

    /// Returns the bytes of operands and results in f32, each with a second copy for the check.
    fn bytes(&self, tokens: usize) -> Option<usize> {
        let matrices = self.rows.checked_mul(self.cols)?.checked_mul(self.batches)?;
        let others = tokens.checked_mul(self.rows.checked_add(self.cols)?)?;
        matrices.checked_add(others)?.checked_mul(2 * size_of::<f32>())
    }

    /// Returns the rows of all matrices, and the columns.
    pub(super) fn all_rows(&self) -> Shape {
        // If the product saturates, later checks refuse the shape.
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
