//! Results in the order that tasks compute them in: by panel of rows, then by token.

/// Copies a token's results to `out`, from panels of `ROWS` rows and `tokens` tokens each. The last
/// panel has the remaining rows.
pub(in crate::cpu) fn copy_token<const ROWS: usize, T: Copy>(
    by_panel: &[T],
    token: usize,
    tokens: usize,
    out: &mut [T],
) {
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
    fn results_are_found_by_token() {
        const ROWS: usize = 4;
        for rows in [0, 3, 4, 5, 8, 11] {
            let tokens = 3;
            // A result is 100 times its token, plus its row.
            let panels = (0..rows).step_by(ROWS).map(|first| first..rows.min(first + ROWS));
            let by_panel: Vec<usize> = panels
                .flat_map(|rows| (0..tokens).flat_map(move |t| rows.clone().map(move |row| 100 * t + row)))
                .collect();
            for token in 0..tokens {
                let mut out = vec![usize::MAX; rows];
                copy_token::<ROWS, _>(&by_panel, token, tokens, &mut out);
                assert_eq!(out, (0..rows).map(|row| 100 * token + row).collect::<Vec<_>>());
            }
        }
    }
}
