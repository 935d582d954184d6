//! Results of tasks, which compute them by panel of rows, then by token.

/// Panels per task: up to four, if each thread has at least four tasks.
pub(in crate::cpu) fn panels_per_task(panels: usize) -> usize {
    (panels / (4 * rayon::current_num_threads())).clamp(1, 4)
}

/// Cuts the results of tokens into bands of up to `rows` rows, by band, then by token.
///
/// A task writes a band. Every token has the same number of results.
pub(in crate::cpu) fn bands<'a, T>(
    tokens: impl IntoIterator<Item = &'a mut [T]>,
    rows: usize,
) -> Vec<&'a mut [T]> {
    let mut rest: Vec<_> = tokens.into_iter().map(|results| results.chunks_mut(rows)).collect();
    let count = rest.first().map_or(0, ExactSizeIterator::len);
    let mut bands = Vec::with_capacity(count * rest.len());
    for _ in 0..count {
        bands.extend(rest.iter_mut().filter_map(Iterator::next));
    }
    bands
}

/// Fills a band with results that `multiply` computes by panel of `ROWS` rows, then by token.
///
/// `by_panel` is memory for them, reused by the thread's next task.
pub(in crate::cpu) fn fill_band<const ROWS: usize, T: Copy + Default>(
    band: &mut [&mut [T]],
    by_panel: &mut Vec<T>,
    multiply: impl FnOnce(&mut [T]),
) {
    let tokens = band.len();
    by_panel.resize(band.iter().map(|out| out.len()).sum(), T::default());
    multiply(by_panel);
    for (token, out) in band.iter_mut().enumerate() {
        copy_token::<ROWS, T>(by_panel, token, tokens, out);
    }
}

/// Copies a token's results to `out`, from panels of `ROWS` rows and `tokens` tokens each. The last
/// panel has the remaining rows.
fn copy_token<const ROWS: usize, T: Copy>(by_panel: &[T], token: usize, tokens: usize, out: &mut [T]) {
    let last = out.len() / ROWS * ROWS * tokens;
    let (panels, rest) = out.as_chunks_mut::<ROWS>();
    // A short array is copied by a few instructions, and a slice by a call.
    let of_token = by_panel[..last].as_chunks::<ROWS>().0.iter().skip(token).step_by(tokens);
    panels.iter_mut().zip(of_token).for_each(|(out, results)| *out = *results);
    rest.copy_from_slice(&by_panel[last..][token * rest.len()..][..rest.len()]);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tasks_fill_the_results_of_all_tokens() {
        const ROWS: usize = 4;
        for rows in [1, 3, 4, 5, 8, 11, 16, 21] {
            for tokens in [1, 3] {
                // A result is 100 times its token, plus its row.
                let expected: Vec<_> =
                    (0..tokens).flat_map(|t| (0..rows).map(move |r| 100 * t + r)).collect();
                let mut out = vec![usize::MAX; tokens * rows];
                let mut first = 0;
                for band in bands(out.chunks_mut(rows), 2 * ROWS).chunks_mut(tokens) {
                    let last = first + band[0].len();
                    let panels = (first..last).step_by(ROWS).map(|first| first..last.min(first + ROWS));
                    let by_panel: Vec<_> = panels
                        .flat_map(|rows| {
                            (0..tokens).flat_map(move |t| rows.clone().map(move |r| 100 * t + r))
                        })
                        .collect();
                    fill_band::<ROWS, _>(band, &mut Vec::new(), |out| out.copy_from_slice(&by_panel));
                    first = last;
                }
                assert_eq!(out, expected, "{rows} rows, {tokens} tokens");
            }
        }
    }
}
