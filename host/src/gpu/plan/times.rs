//! Measured times of the GEMM's configurations: a table per GPU, which `bench --tune` writes.

use std::fmt::Write as _;
use std::sync::OnceLock;

use microscale_formats::{Dtype, Format, Words};
use microscale_kernels_abi::GemmConfig;

use crate::gpu::plan::layers::Layers;

/// The tables, by a part of the GPU's name. A GPU without one uses the first: see
/// [`Times::of_gpu`].
pub(in crate::gpu) const TABLES: [(&str, &str); 2] =
    [("H100", include_str!("times/h100.txt")), ("H200", include_str!("times/h200.txt"))];

/// Times of the GEMM's configurations on one GPU.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Times {
    products: Vec<MeasuredProduct>,
}

/// The times of one product.
#[derive(Clone, Debug, PartialEq)]
pub struct MeasuredProduct {
    /// Format of the weights.
    pub weights: Format,
    /// Rows of the weights.
    pub rows: usize,
    /// Columns of the weights.
    pub cols: usize,
    /// Tokens.
    pub tokens: usize,
    /// Configurations with their times in microseconds. A table's text leaves out configurations
    /// that take more than [`Times::KEPT`] times the fastest for the same GPUs.
    pub configs: Vec<(GemmConfig, f32)>,
}

impl MeasuredProduct {
    /// Reads a line of a table.
    fn read(line: &str) -> Option<Self> {
        let mut words = line.split_whitespace();
        let weights = Format::from_word(words.next()?)?;
        let mut number = || words.next()?.parse().ok();
        let (rows, cols, tokens) = (number()?, number()?, number()?);
        let mut configs = Vec::new();
        while let Some(word) = words.next() {
            // Times hold for f16 and bf16 alike.
            let config = GemmConfig::from_word(word, weights, Dtype::Bf16)?;
            configs.push((config, words.next()?.parse().ok()?));
        }
        Some(Self { weights, rows, cols, tokens, configs })
    }
}

impl Times {
    /// A table's text has the configurations up to this multiple of the fastest time.
    pub const KEPT: f32 = 2.0;

    /// The table for a GPU, by its name. H100s and H200s have their own. Others use the H100's,
    /// which has times of `mma` kernels too: relative times of configurations depend on the number
    /// of multiprocessors and on the critical path, which the choice accounts for, more than on the
    /// memory's speed.
    ///
    /// Times of held-out layers (`layers.txt`) are left out: nothing is chosen by them.
    pub fn of_gpu(name: &str) -> &'static Self {
        static READ: OnceLock<[Times; TABLES.len()]> = OnceLock::new();
        let without_held_out = |(_, text)| {
            // A test reads the tables.
            let mut times = Self::read(text).unwrap_or_default();
            times.retain(|product| !Layers::built_in().holds_out(product.rows, product.cols));
            times
        };
        let tables = READ.get_or_init(|| TABLES.map(without_held_out));
        &tables[table(name)]
    }

    /// [`Self::of_gpu`] with the times of held-out layers, to judge choices by.
    #[cfg(test)]
    pub(in crate::gpu) fn with_held_out(name: &str) -> Self {
        Self::read(TABLES[table(name)].1).unwrap()
    }

    /// The measured products.
    pub fn products(&self) -> &[MeasuredProduct] {
        &self.products
    }

    /// Returns whether the table has a configuration's time for a product.
    pub fn has(&self, config: GemmConfig, [rows, cols, tokens]: [usize; 3]) -> bool {
        let of = |product: &&MeasuredProduct| {
            product.weights == config.weights
                && [product.rows, product.cols, product.tokens] == [rows, cols, tokens]
        };
        let found = self.products.iter().find(of);
        found.is_some_and(|product| product.configs.iter().any(|(there, _)| *there == config))
    }

    /// Adds the times of a product, replacing times of the same configurations.
    pub fn add(&mut self, product: MeasuredProduct) {
        let MeasuredProduct { weights, rows, cols, tokens, configs } = product;
        let same = |of: &&mut MeasuredProduct| {
            (of.weights, of.rows, of.cols, of.tokens) == (weights, rows, cols, tokens)
        };
        match self.products.iter_mut().find(same) {
            Some(there) => {
                there.configs.retain(|(config, _)| configs.iter().all(|(new, _)| new != config));
                there.configs.extend(configs);
            }
            None => self.products.push(MeasuredProduct { weights, rows, cols, tokens, configs }),
        }
    }

    /// Keeps some of the products.
    pub(in crate::gpu) fn retain(&mut self, keep: impl FnMut(&MeasuredProduct) -> bool) {
        self.products.retain(keep);
    }

    /// Reads a table as [`Self::text`] writes it. Empty lines are skipped.
    ///
    /// # Errors
    /// The number of the first line that is not a product's, counted from 1.
    pub fn read(text: &str) -> Result<Self, usize> {
        let lines = text.lines().enumerate();
        let of_products = lines.filter(|(_, line)| !line.starts_with('#') && !line.trim().is_empty());
        let product = |(at, line)| MeasuredProduct::read(line).ok_or(at + 1);
        Ok(Self { products: of_products.map(product).collect::<Result<_, _>>()? })
    }

    /// The text of a table: a line per product, `format rows cols tokens` and pairs of a
    /// configuration and its microseconds, the fastest first.
    pub fn text(&self, measured: &str) -> String {
        let mut text = format!(
            "# Microseconds of configurations by format, rows, columns and tokens: `microscale bench --tune`, {measured}\n"
        );
        for MeasuredProduct { weights, rows, cols, tokens, configs } in &self.products {
            // Writing to a string cannot fail.
            let _ = write!(text, "{weights} {rows} {cols} {tokens}");
            let mut configs = configs.clone();
            configs.sort_by(|(_, a), (_, b)| a.total_cmp(b));
            let fastest = |config: &GemmConfig| {
                // GPUs without `wgmma` choose among the others, and so do products of FP8.
                let (wgmma, fp8) = (config.mainloop.is_wgmma(), config.mainloop.takes_fp8());
                let of = configs
                    .iter()
                    .find(|(of, _)| of.mainloop.takes_fp8() == fp8 && (wgmma || !of.mainloop.is_wgmma()));
                of.map_or(f32::INFINITY, |(_, time)| *time)
            };
            let kept: Vec<_> =
                configs.iter().filter(|(config, time)| *time <= Self::KEPT * fastest(config)).collect();
            for (config, time) in kept {
                let _ = write!(text, " {config} {time:.2}");
            }
            text.push('\n');
        }
        text
    }
}

/// The table for a GPU's name.
pub(in crate::gpu) fn table(name: &str) -> usize {
    TABLES.iter().position(|(part, _)| name.contains(part)).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_are_read_as_they_are_written() {
        let mut times = Times::default();
        for (i, weights) in [Format::Nvfp4, Format::Mxfp4].into_iter().enumerate() {
            let configs = GemmConfig::for_operands(weights, Dtype::Bf16);
            let configs =
                configs.enumerate().map(|(n, config)| (config.with_slices(2), 10.0 + n as f32 * 0.25));
            let product =
                MeasuredProduct { weights, rows: 16, cols: 32, tokens: i, configs: configs.collect() };
            times.add(product);
        }
        let text = times.text("somewhere");
        assert_eq!(Times::read(&text).as_ref(), Ok(&times));
        assert_eq!(Times::read(&text.replace('\n', "\n\n")), Ok(times));
        for wrong in ["nvfp4 1 2", "int4 1 2 3", "nvfp4 1 2 3 mma-256x16", "nvfp4 1 2 3 mma-1x1 2.0"] {
            assert_eq!(Times::read(&format!("# {wrong}\n\n{wrong}")), Err(3), "{wrong}");
        }
    }

    #[test]
    fn built_in_tables_have_times_of_both_formats() {
        for (name, _) in TABLES {
            let name = format!("NVIDIA {name}");
            let times = Times::of_gpu(&name);
            let held_out =
                |product: &MeasuredProduct| Layers::built_in().holds_out(product.rows, product.cols);
            assert!(!times.products().iter().any(held_out));
            let kept = Times::with_held_out(&name).products.into_iter().filter(|of| !held_out(of));
            assert!(kept.eq(times.products().iter().cloned()));
            for weights in [Format::Nvfp4, Format::Mxfp4] {
                assert!(times.products().iter().any(|product| product.weights == weights), "{name}");
            }
        }
    }
}
