//! The table of the kernels' resources and predicted speeds on each GPU.

use super::assembly::{Assembled, Assembly, contains};
use super::main_path::PathShape;
use anyhow::Result;
use std::io::{ErrorKind, Write};

const TITLES: [&str; 10] =
    ["kernel", "PTX", "GPU", "registers", "SASS", "path", "per element", "loads", "stores", "FP4"];

const LEGEND: &str = "
SASS         instructions in all
path         those of the main path, on which the widest accesses move the most; +: with one turn of each of its loops,
             *: one turn of the loop that does the work
per element  these over the elements of a thread, where there is no loop
loads        bits of each global access on the main path × how many; likewise stores
FP4          the code converts E2M1
";

/// Prints a row for each GPU and each kernel whose name contains `filter`.
pub(super) fn print(assemblies: &[Assembly], filter: &str) -> Result<()> {
    match std::io::stdout().write_all(table(assemblies, filter).as_bytes()) {
        // The table is long: piping it into `head` is not an error.
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(error.into()),
        _ => Ok(()),
    }
}

fn table(assemblies: &[Assembly], filter: &str) -> String {
    let mut rows = Vec::new();
    for assembly in assemblies {
        for kernel in assembly.result.iter().flatten().filter(|kernel| kernel.name.contains(filter)) {
            rows.push(row(assembly, kernel));
        }
    }
    if rows.is_empty() {
        return format!("no kernel's name contains `{filter}`\n");
    }
    // Sorts by kernel. The sort is stable, so GPUs keep their order.
    rows.sort_by(|a, b| a[0].cmp(&b[0]));
    rows.insert(0, TITLES.map(str::to_owned));
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: [usize; TITLES.len()] = std::array::from_fn(width);
    let mut text = String::new();
    for row in &rows {
        let cells: Vec<String> =
            row.iter().zip(widths).map(|(cell, width)| format!("{cell:width$}")).collect();
        text.push_str(cells.join("  ").trim_end());
        text.push('\n');
    }
    text + LEGEND
}

fn row(assembly: &Assembly, kernel: &Assembled) -> [String; TITLES.len()] {
    let path = kernel.main_path.as_ref();
    [
        kernel.name.clone(),
        assembly.target.name.to_owned(),
        assembly.gpu.to_owned(),
        kernel.resources.registers.to_string(),
        kernel.code.len().to_string(),
        path.map_or("?".to_owned(), |path| format!("{}{}", path.instructions.len(), mark(path.shape))),
        per_element(kernel).map_or("-".to_owned(), |n| format!("{n:.2}")),
        accesses(kernel, "LDG"),
        accesses(kernel, "STG"),
        if contains(&kernel.code, ("F2FP", "E2M1")) { "yes" } else { "-" }.to_owned(),
    ]
}

fn mark(shape: PathShape) -> &'static str {
    match shape {
        PathShape::Straight => "",
        PathShape::ThroughLoops => "+",
        PathShape::OneIteration => "*",
    }
}

/// Returns the instructions of the main path per element, a static bound on the issued
/// instructions.
///
/// `None` for loops, because their number of iterations is unknown.
fn per_element(kernel: &Assembled) -> Option<f64> {
    let (elements, threads) = kernel.kernel?.elements_per_thread();
    let path = kernel.main_path.as_ref().filter(|path| path.shape == PathShape::Straight)?;
    (elements > 0).then(|| path.instructions.len() as f64 * f64::from(threads) / f64::from(elements))
}

/// Formats the accesses of a kind by width, for example `128×4 8×1`.
pub(super) fn accesses(kernel: &Assembled, name: &str) -> String {
    let Some(path) = &kernel.main_path else { return "?".to_owned() };
    let accesses = path.instructions.iter().filter_map(|i| kernel.code.instructions[*i].access());
    let widths: Vec<u32> = accesses.filter(|(kind, _)| *kind == name).map(|(_, bits)| bits).collect();
    let of_width = |bits: u32| widths.iter().filter(|width| **width == bits).count();
    let counted = [256, 128, 64, 32, 16, 8].map(|bits| (bits, of_width(bits)));
    let shown: Vec<String> =
        counted.iter().filter(|(_, n)| *n > 0).map(|(bits, n)| format!("{bits}×{n}")).collect();
    if shown.is_empty() { "-".to_owned() } else { shown.join(" ") }
}

#[cfg(test)]
mod tests {
    use super::super::main_path::main_path;
    use super::super::resources::Resources;
    use super::super::sass::tests::listing;
    use super::*;
    use microscale_kernels_abi::launch::Targets;
    use microscale_kernels_abi::{Converts, Kernel, TARGETS};

    const KERNEL: Kernel = Kernel {
        name: "k",
        dtype: None,
        threads: 32,
        elements: 64,
        shared: 0,
        converts: Converts::E2m1,
        resident: 0,
        targets: Targets::All,
    };

    #[test]
    fn a_row_counts_instructions_per_element() {
        let code = listing(
            "LDG.E.64 R4, [R2]\nF2FP.SATFINITE.E2M1.F32.PACK_AB_MERGE_C R0, R4, R5, RZ\nSTG.E.U8 [R2], R0\nEXIT",
        );
        let resources = Resources { registers: 10, ..Default::default() };
        let kernel = Assembled {
            kernel: Some(&KERNEL),
            name: "k".into(),
            resources,
            main_path: main_path(&code),
            code,
        };
        let assembly = Assembly { target: &TARGETS[0], gpu: "sm_86", result: Ok(vec![kernel]) };
        let table = table(&[assembly], "");
        let cells: Vec<&str> = table.lines().nth(1).unwrap().split_whitespace().collect();
        assert_eq!(cells, ["k", "sm_80", "sm_86", "10", "4", "4", "2.00", "64×1", "8×1", "yes"]);
    }
}
