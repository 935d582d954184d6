//! Times of the kernels for more than eight tokens: a table, which `microscale bench --tune` measures, that the choice among them is held
//! to.

use std::fmt::Write;

use microscale_kernels_abi::gemm::TokenTile;

use super::gemm_weights_kernel::GemmWeightsKernel;
use super::gemv_weights_kernel::GemvWeightsKernel;

/// Times of kernels, those of a product one behind the other.
#[derive(Debug, Default, PartialEq)]
pub struct GemmTimes(Vec<Time>);

/// The time of a kernel, by its word, for a product of so many rows, columns and tokens.
#[derive(Debug, PartialEq)]
struct Time {
    product: [usize; 3],
    kernel: &'static str,
    microseconds: f64,
}

impl GemmTimes {
    /// The rows and columns that are measured: layers of models, few and many work tiles.
    pub const SHAPES: [[usize; 2]; 6] =
        [[2048, 2048], [4096, 4096], [14336, 4096], [4096, 14336], [8192, 8192], [8192, 28672]];
    /// The tokens that are measured.
    pub const TOKENS: [usize; 12] = [9, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024];

    /// The kernels for few tokens at a time that are measured with so many.
    pub fn few(tokens: usize) -> impl Iterator<Item = GemvWeightsKernel> {
        GemvWeightsKernel::all().filter(move |kernel| kernel.is_for_more_than_eight(tokens))
    }

    /// Returns whether a kernel for many tokens is measured with so many: one that cannot be the fastest is not.
    pub fn takes(kernel: GemmWeightsKernel, tokens: usize) -> bool {
        let largest = TokenTile::ALL.into_iter().rfind(|tile| kernel.edition.has(*tile));
        tokens <= 8 * kernel.tile.tokens() as usize || largest == Some(kernel.tile)
    }

    /// Adds the time of a kernel, by its word, for a product of so many rows, columns and tokens.
    pub fn add(&mut self, product: [usize; 3], kernel: &'static str, microseconds: f64) {
        self.0.push(Time { product, kernel, microseconds });
    }

    /// The text of a file of times.
    pub fn text(&self, measured: &str) -> String {
        // Writing to a string cannot fail.
        let mut text =
            format!("# Microseconds by rows, columns and tokens: `microscale bench --tune`, {measured}\n");
        for times in self.0.chunk_by(|a, b| a.product == b.product) {
            let [rows, cols, tokens] = times[0].product;
            let _ = write!(text, "{rows} {cols} {tokens}");
            for Time { kernel, microseconds, .. } in times {
                let _ = write!(text, " {kernel} {microseconds:.1}");
            }
            text.push('\n');
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use microscale_formats::{Format, ScaleLayout, Words};
    use microscale_kernels_abi::gemm::Edition;
    use microscale_kernels_abi::gemm_grids::GemmGrid;
    use microscale_kernels_abi::target_for;

    use super::super::gemv_weights_kernel::weights_shape;
    use crate::shape::QuantizedShape;

    /// Times of an H200.
    const MEASURED: &str = include_str!("gemm_times.txt");

    impl GemmTimes {
        fn read(text: &str) -> Option<Self> {
            let mut times = Self::default();
            for line in text.lines().skip(1) {
                let words: Vec<_> = line.split_whitespace().collect();
                let (product, kernels) = words.split_first_chunk::<3>()?;
                let [rows, cols, tokens] = product.map(str::parse);
                for pair in kernels.chunks(2) {
                    let [kernel, time] = pair else { return None };
                    let product = [rows.clone().ok()?, cols.clone().ok()?, tokens.clone().ok()?];
                    let of_many = GemmWeightsKernel::from_word(kernel).map(Words::word);
                    let word = of_many.or_else(|| GemvWeightsKernel::from_word(kernel).map(Words::word))?;
                    times.add(product, word, time.parse().ok()?);
                }
            }
            Some(times)
        }
    }

    #[test]
    fn times_are_read_as_they_are_written() {
        let mut times = GemmTimes::default();
        let many = GemmWeightsKernel::WORDS.iter().map(|(word, _)| *word);
        for (i, word) in many.chain(GemmTimes::few(16).map(Words::word)).enumerate() {
            times.add([16, 32, i / 3], word, 0.5 * i as f64);
        }
        assert_eq!(GemmTimes::read(&times.text("somewhere")), Some(times));
    }

    /// The kernel that is chosen on an H200, as one and as a GPU without warp groups, takes at most 6% longer than the fastest of those there,
    /// and 1% on average.
    #[test]
    fn chosen_kernels_are_nearly_the_fastest() {
        for (capability, edition) in [((9, 0), Edition::Wgmma), ((8, 0), Edition::Mma)] {
            let target = target_for(capability).unwrap();
            let other = GemmWeightsKernel::WORDS.iter().filter(|(_, kernel)| kernel.edition != edition);
            let other: Vec<_> = other.map(|(word, _)| *word).collect();
            let mut over = Vec::new();
            let measured = GemmTimes::read(MEASURED).expect("a table");
            for times in measured.0.chunk_by(|a, b| a.product == b.product) {
                let [rows, cols, tokens] = times[0].product;
                let weights =
                    QuantizedShape { format: Format::Nvfp4, rows, cols, scale_layout: ScaleLayout::Linear };
                let grid = |kernel: GemmWeightsKernel| {
                    let GemmWeightsKernel { edition, tile } = kernel;
                    let shared = edition.shared_bytes(tile, 227 << 10);
                    GemmGrid::new((edition, tile), weights_shape(weights), tokens as u64, 132, shared)
                };
                let few = GemvWeightsKernel::for_more_than_eight(weights, tokens);
                let many = GemmWeightsKernel::choose((target, 132), grid, few).map(Words::word);
                let chosen = many.or(few.map(|(few, _)| few.word())).expect("a kernel");
                let there = times.iter().filter(|time| !other.contains(&time.kernel));
                let by_time = |a: &&Time, b: &&Time| a.microseconds.total_cmp(&b.microseconds);
                let fastest = there.min_by(by_time).expect("a time");
                let time = times.iter().find(|time| time.kernel == chosen).expect("the chosen kernel's time");
                over.push(time.microseconds / fastest.microseconds - 1.0);
                assert!(time.microseconds <= 1.06 * fastest.microseconds, "{time:?}, {fastest:?}");
            }
            let average = over.iter().sum::<f64>() / over.len() as f64;
            assert!(average <= 0.01, "{edition:?}: {average}");
        }
    }
}
