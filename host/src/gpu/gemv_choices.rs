//! Choices of the fastest kernel for a product: small tables, which `microscale bench --tune` measures.

use std::fmt::Write;
use std::sync::OnceLock;

use super::gemv_kernel::GemvKernel;
use super::gemv_weights_kernel::GemvWeightsKernel;
use crate::error::Result;
use microscale_formats::{Format, Words};

/// The built-in tables, measured on an H200.
const PRODUCTS: &str = include_str!("gemv_choices.txt");
const WEIGHTS: &str = include_str!("gemv_weights_choices.txt");

/// Kernels that a table chooses from.
pub trait Tuned: Words {
    /// The numbers of rows, of all matrices together, that are measured for a new table.
    const ROWS: &'static [usize];
    /// The numbers of columns that are measured.
    const COLS: &'static [usize];
    /// The kernel that is taken if a table cannot be read.
    const OTHERWISE: Self;
}

impl Tuned for GemvKernel {
    const ROWS: &'static [usize] = &[128, 512, 1024, 2048, 4096, 8192, 16384, 32768];
    const COLS: &'static [usize] = &[256, 1024, 2048, 4096, 8192, 16384];
    const OTHERWISE: Self = Self::Rows4;
}

impl Tuned for GemvWeightsKernel {
    // Layers of models among them: where they leave multiprocessors without rows is not what powers of two
    // tell.
    const ROWS: &'static [usize] = &[256, 1024, 2048, 4096, 5120, 8192, 14336, 16384, 28672];
    const COLS: &'static [usize] = &[512, 1024, 2048, 4096, 8192, 14336, 28672];
    const OTHERWISE: Self = Self::OTHERWISE;
}

/// A kernel for so many rows and so many columns.
#[derive(Debug, PartialEq, Eq)]
pub struct GemvChoices<K> {
    /// Columns of a matrix, rising.
    cols: Vec<usize>,
    /// Rows, rising, each with a kernel for each number of columns.
    rows: Vec<(usize, Vec<K>)>,
}

impl<K: Tuned> GemvChoices<K> {
    /// A table over [`Tuned::ROWS`] and [`Tuned::COLS`].
    ///
    /// # Errors
    /// The first one of `fastest`, which is not called again.
    pub fn new(mut fastest: impl FnMut(usize, usize) -> Result<K>) -> Result<Self> {
        let mut row = |rows| {
            let kernels = K::COLS.iter().map(|cols| fastest(rows, *cols)).collect::<Result<_>>()?;
            Ok((rows, kernels))
        };
        let rows = K::ROWS.iter().map(|rows| row(*rows)).collect::<Result<_>>()?;
        Ok(Self { cols: K::COLS.to_vec(), rows })
    }

    /// The kernel of the next larger numbers in the table, or of its largest.
    pub(super) fn kernel(&self, rows: usize, cols: usize) -> K {
        let row = self.rows.iter().find(|(most, _)| rows <= *most).or(self.rows.last());
        let col =
            self.cols.iter().position(|most| cols <= *most).unwrap_or(self.cols.len().saturating_sub(1));
        row.and_then(|(_, kernels)| kernels.get(col)).copied().unwrap_or(K::OTHERWISE)
    }

    /// The table as lines: one of columns, and one for each number of rows.
    fn lines(&self) -> String {
        let cols: Vec<_> = self.cols.iter().map(usize::to_string).collect();
        let mut text = format!("rows {}\n", cols.join(" "));
        for (rows, kernels) in &self.rows {
            let words: Vec<_> = kernels.iter().map(|kernel| kernel.word()).collect();
            // Writing to a string cannot fail.
            let _ = writeln!(text, "{rows} {}", words.join(" "));
        }
        text
    }

    fn parse<'a>(lines: impl IntoIterator<Item = &'a str>) -> Option<Self> {
        let mut lines = lines.into_iter().map(str::split_whitespace);
        let cols = lines.next()?.skip(1).map(|cols| cols.parse().ok()).collect::<Option<Vec<usize>>>()?;
        let row = |mut line: std::str::SplitWhitespace<'_>| {
            let rows = line.next()?.parse().ok()?;
            let kernels = line.map(K::from_word).collect::<Option<Vec<_>>>()?;
            (kernels.len() == cols.len()).then_some((rows, kernels))
        };
        let rows = lines.map(row).collect::<Option<Vec<_>>>()?;
        Some(Self { cols, rows })
    }
}

/// The first line of a file of tables.
fn title(measured: &str) -> String {
    format!("# The fastest kernel by rows and columns: `microscale bench --tune`, {measured}\n")
}

impl GemvChoices<GemvKernel> {
    /// The built-in table.
    pub(super) fn built_in() -> &'static Self {
        static CHOICES: OnceLock<GemvChoices<GemvKernel>> = OnceLock::new();
        // A test sees to it that it can be read.
        CHOICES.get_or_init(|| Self::read(PRODUCTS).unwrap_or(Self { cols: Vec::new(), rows: Vec::new() }))
    }

    /// The text of a file of choices.
    pub fn text(&self, measured: &str) -> String {
        title(measured) + &self.lines()
    }

    fn read(text: &str) -> Option<Self> {
        Self::parse(text.lines().skip(1))
    }
}

/// Tables for weights of a format times so many tokens.
#[derive(Debug, PartialEq, Eq)]
pub struct GemvWeightsChoices {
    /// The tables by format, with tokens rising.
    tables: Vec<(Format, usize, GemvChoices<GemvWeightsKernel>)>,
}

impl GemvWeightsChoices {
    /// The formats that are measured for new tables.
    pub const FORMATS: [Format; 2] = [Format::Nvfp4, Format::Mxfp4];
    /// The tokens. Others have the kernel for the next of these, and more that of the last, if no kernel for more takes the weights.
    pub const TOKENS: [usize; 4] = [1, 2, 4, 8];

    /// Tables over [`Self::FORMATS`] and [`Self::TOKENS`].
    ///
    /// # Errors
    /// The first one of `fastest`, which says the kernel for each number of tokens, given a format, rows and
    /// columns; it is not called again.
    pub fn new(
        mut fastest: impl FnMut(Format, usize, usize) -> Result<[GemvWeightsKernel; Self::TOKENS.len()]>,
    ) -> Result<Self> {
        let mut tables = Vec::new();
        for format in Self::FORMATS {
            let mut found = Vec::new();
            for rows in GemvWeightsKernel::ROWS {
                for cols in GemvWeightsKernel::COLS {
                    found.push(fastest(format, *rows, *cols)?);
                }
            }
            for (i, tokens) in Self::TOKENS.into_iter().enumerate() {
                let mut kernels = found.iter().map(|kernels| kernels[i]);
                let next = |_, _| Ok(kernels.next().unwrap_or(GemvWeightsKernel::OTHERWISE));
                tables.push((format, tokens, GemvChoices::new(next)?));
            }
        }
        Ok(Self { tables })
    }

    /// The built-in tables.
    pub(super) fn built_in() -> &'static Self {
        static CHOICES: OnceLock<GemvWeightsChoices> = OnceLock::new();
        // A test sees to it that they can be read.
        CHOICES.get_or_init(|| Self::read(WEIGHTS).unwrap_or(Self { tables: Vec::new() }))
    }

    /// The kernel for the next larger number of tokens.
    pub(super) fn kernel(
        &self,
        format: Format,
        rows: usize,
        cols: usize,
        tokens: usize,
    ) -> GemvWeightsKernel {
        let of_format = || self.tables.iter().filter(|(of, ..)| *of == format);
        let table = of_format().find(|(_, most, _)| tokens <= *most).or(of_format().next_back());
        table.map_or(GemvWeightsKernel::OTHERWISE, |(.., table)| table.kernel(rows, cols))
    }

    /// The text of a file of choices.
    pub fn text(&self, measured: &str) -> String {
        let mut text = title(measured);
        for (format, tokens, table) in &self.tables {
            // Writing to a string cannot fail.
            let _ = write!(text, "tokens {tokens} {}\n{}", format.word(), table.lines());
        }
        text
    }

    fn read(text: &str) -> Option<Self> {
        let lines: Vec<_> = text.lines().skip(1).collect();
        let tables = lines.chunk_by(|_, next| !next.starts_with("tokens "));
        let table = |lines: &[&str]| {
            let (first, rest) = lines.split_first()?;
            let (tokens, format) = first.strip_prefix("tokens ")?.split_once(' ')?;
            let table = GemvChoices::parse(rest.iter().copied())?;
            Some((Format::from_word(format)?, tokens.parse().ok()?, table))
        };
        Some(Self { tables: tables.map(table).collect::<Option<_>>()? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;

    /// A kernel by numbers.
    fn some<K: Words>(numbers: [usize; 3]) -> Result<K> {
        Ok(K::WORDS[numbers.iter().sum::<usize>() / 256 % K::WORDS.len()].1)
    }

    #[test]
    fn tables_are_read_as_they_are_written() {
        let table = GemvChoices::<GemvKernel>::new(|rows, cols| some([rows, cols, 0])).expect("a table");
        assert_eq!(GemvChoices::read(&table.text("somewhere")), Some(table));
        for wrong in ["#\nrows 1 2\n128 rows1", "#\nrows 1\n128 rows3", "#\nrows 1\nx rows1", "#"] {
            assert_eq!(GemvChoices::read(wrong), None, "{wrong}");
        }
        let kernel = |i: usize, rows, cols| some([1000 * i, rows, cols]).expect("a kernel");
        let tables = GemvWeightsChoices::new(|format, rows, cols| {
            let of_format = if format == Format::Nvfp4 { 0 } else { 4 };
            Ok([0, 1, 2, 3].map(|i| kernel(of_format + i, rows, cols)))
        });
        let tables = tables.expect("tables");
        assert_eq!(GemvWeightsChoices::read(&tables.text("somewhere")), Some(tables));
        for wrong in
            ["#\nrows 1\n128 m1-1x1", "#\ntokens x nvfp4\nrows 1", "#\ntokens 1 nvfp4\nrows 1\n1 rows1"]
        {
            assert_eq!(GemvWeightsChoices::read(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn the_first_error_is_the_last_call() {
        let mut calls = 0;
        let mut fails = |cols| {
            calls += 1;
            if cols > 1024 { Err(Error::Wrong("gemv")) } else { Ok(()) }
        };
        let table = GemvChoices::new(|_, cols| fails(cols).map(|()| GemvKernel::Rows1));
        assert!(matches!(table, Err(Error::Wrong("gemv"))));
        let tables =
            GemvWeightsChoices::new(|_, _, cols| fails(cols).map(|()| [GemvWeightsKernel::OTHERWISE; 4]));
        assert!(matches!(tables, Err(Error::Wrong("gemv"))));
        assert_eq!(calls, 3 + 3);
    }

    #[test]
    fn the_built_in_tables_cover_every_size() {
        fn covers<K: Tuned + std::fmt::Debug>(table: &GemvChoices<K>) {
            assert_eq!(table.cols, K::COLS);
            assert_eq!(table.rows.iter().map(|(rows, _)| *rows).collect::<Vec<_>>(), K::ROWS);
            let first = table.rows[0].1[0];
            assert_eq!((table.kernel(1, 16), table.kernel(K::ROWS[0], K::COLS[0])), (first, first));
            assert_eq!(table.kernel(K::ROWS[0] + 1, K::COLS[0] + 1), table.rows[1].1[1]);
            let last = *table.rows.last().and_then(|(_, kernels)| kernels.last()).expect("a kernel");
            assert_eq!(table.kernel(usize::MAX, usize::MAX), last);
        }
        covers(&GemvChoices::read(PRODUCTS).expect("a table"));
        let tables = GemvWeightsChoices::read(WEIGHTS).expect("tables");
        for of_format in tables.tables.chunks(4).zip(GemvWeightsChoices::FORMATS).map(|(of, format)| {
            let found: Vec<_> = of.iter().map(|(format, tokens, _)| (*format, *tokens)).collect();
            assert_eq!(found, GemvWeightsChoices::TOKENS.map(|tokens| (format, tokens)));
            of
        }) {
            of_format.iter().for_each(|(.., table)| covers(table));
            for (tokens, of) in [(1, 0), (2, 1), (3, 2), (8, 3), (100, 3)] {
                let (format, _, table) = &of_format[of];
                assert_eq!(tables.kernel(*format, 4096, 4096, tokens), table.kernel(4096, 4096));
            }
        }
        assert_eq!(tables.tables.len(), 8);
    }
}
