//! Which kernel is the fastest for a product: a small table, which `microscale bench --tune` measures.

use std::fmt::Write;
use std::sync::OnceLock;

use super::gemv::GemvKernel;
use crate::error::Result;
use crate::recipe::Words;

/// The table that is built in, measured on an H200.
const TEXT: &str = include_str!("gemv_choices.txt");

/// A kernel for so many rows, of all matrices, and so many columns.
#[derive(Debug, PartialEq, Eq)]
pub struct GemvChoices {
    /// Columns of a matrix, rising.
    cols: Vec<usize>,
    /// Rows, rising, each with a kernel for each number of columns.
    rows: Vec<(usize, Vec<GemvKernel>)>,
}

impl GemvChoices {
    /// What [`Self::new`] is to be asked for by who measures a new table.
    pub const ROWS: [usize; 8] = [128, 512, 1024, 2048, 4096, 8192, 16384, 32768];
    /// The same of columns.
    pub const COLS: [usize; 6] = [256, 1024, 2048, 4096, 8192, 16384];

    /// A table over [`Self::ROWS`] and [`Self::COLS`].
    ///
    /// # Errors
    /// The first one of `fastest`, which is not called again.
    pub fn new(mut fastest: impl FnMut(usize, usize) -> Result<GemvKernel>) -> Result<Self> {
        let mut row = |rows| {
            let kernels = Self::COLS.iter().map(|cols| fastest(rows, *cols)).collect::<Result<_>>()?;
            Ok((rows, kernels))
        };
        let rows = Self::ROWS.iter().map(|rows| row(*rows)).collect::<Result<_>>()?;
        Ok(Self { cols: Self::COLS.to_vec(), rows })
    }

    /// The one that is built in.
    pub(super) fn built_in() -> &'static Self {
        static CHOICES: OnceLock<GemvChoices> = OnceLock::new();
        CHOICES.get_or_init(|| {
            // A test sees to it that it can be read.
            Self::parse(TEXT).unwrap_or(Self { cols: Vec::new(), rows: Vec::new() })
        })
    }

    /// The kernel of the next larger numbers in the table, or of its largest.
    pub(super) fn kernel(&self, rows: usize, cols: usize) -> GemvKernel {
        let row = self.rows.iter().find(|(most, _)| rows <= *most).or(self.rows.last());
        let col =
            self.cols.iter().position(|most| cols <= *most).unwrap_or(self.cols.len().saturating_sub(1));
        row.and_then(|(_, kernels)| kernels.get(col)).copied().unwrap_or(GemvKernel::Rows4)
    }

    /// As a file: a line of columns, and one for each number of rows.
    pub fn text(&self, measured: &str) -> String {
        let mut text =
            format!("# The fastest kernel by rows and columns: `microscale bench --tune`, {measured}\n");
        let cols: Vec<_> = self.cols.iter().map(usize::to_string).collect();
        // Writing to a string cannot fail.
        let _ = writeln!(text, "rows {}", cols.join(" "));
        for (rows, kernels) in &self.rows {
            let words: Vec<_> = kernels.iter().map(|kernel| kernel.word()).collect();
            let _ = writeln!(text, "{rows} {}", words.join(" "));
        }
        text
    }

    fn parse(text: &str) -> Option<Self> {
        let mut lines = text.lines().filter(|line| !line.starts_with('#')).map(str::split_whitespace);
        let cols = lines.next()?.skip(1).map(|cols| cols.parse().ok()).collect::<Option<Vec<usize>>>()?;
        let row = |mut line: std::str::SplitWhitespace<'_>| {
            let rows = line.next()?.parse().ok()?;
            let kernels = line.map(GemvKernel::from_word).collect::<Option<Vec<_>>>()?;
            (kernels.len() == cols.len()).then_some((rows, kernels))
        };
        let rows = lines.map(row).collect::<Option<Vec<_>>>()?;
        Some(Self { cols, rows })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;

    #[test]
    fn the_table_is_read_as_it_is_written() {
        let table = GemvChoices::new(|rows, cols| Ok(GemvKernel::WORDS[(rows + cols / 256) % 3].1));
        let table = table.expect("a table");
        assert_eq!(GemvChoices::parse(&table.text("somewhere")), Some(table));
        assert_eq!(GemvChoices::parse("rows 1 2\n128 rows1"), None);
        assert_eq!(GemvChoices::parse("rows 1\n128 rows3"), None);
    }

    #[test]
    fn the_first_error_is_the_last_call() {
        let mut calls = 0;
        let table = GemvChoices::new(|_, cols| {
            calls += 1;
            if cols > 1024 { Err(Error::Wrong("gemv")) } else { Ok(GemvKernel::Rows1) }
        });
        assert!(matches!(table, Err(Error::Wrong("gemv"))));
        assert_eq!(calls, 3);
    }

    #[test]
    fn the_built_in_table_covers_every_size() {
        let table = GemvChoices::parse(TEXT).expect("a table");
        assert_eq!(table.cols, GemvChoices::COLS);
        assert_eq!(table.rows.iter().map(|(rows, _)| *rows).collect::<Vec<_>>(), GemvChoices::ROWS);
        let first = table.rows[0].1[0];
        assert_eq!((table.kernel(1, 16), table.kernel(128, 256)), (first, first));
        assert_eq!(table.kernel(129, 257), table.rows[1].1[1]);
        let last = *table.rows.last().and_then(|(_, kernels)| kernels.last()).expect("a kernel");
        assert_eq!(table.kernel(usize::MAX, usize::MAX), last);
    }
}
