//! The instruments of `bench` that measure kernels by name, layers of models, loading and launching.

use std::num::NonZeroUsize;
use std::path::Path;
use std::time::Duration;
use std::{fs, io};

use anyhow::{Context as _, anyhow};
use microscale::gpu::internals::{Layers, Times};
use microscale::gpu::{GemmConfig, Gpu, KernelId};
use microscale::{Device, Words};
use serde_json::json;

use crate::bench::case::Case;
use crate::bench::layers::Half;
use crate::bench::op::Op;
use crate::bench::size::Size;
use crate::bench::tune::tune;
use crate::failures::Usage;
use crate::pending::Pending;
use crate::streams::print;
use crate::text::table::table;

/// The products of the contest, and those with activations in 16 bits.
const CONTEST: [Op; 6] = [
    Op::GemmFp4,
    Op::QuantizeGemmFp4,
    Op::GemmWeights,
    Op::GemmFp4Gated,
    Op::GemmExpertsFp4,
    Op::GemmExperts,
];

/// Writes a table of times.
pub(super) fn write_times(
    device: &Device,
    file: &Path,
    layers: Option<Half>,
    fp8_only: bool,
) -> anyhow::Result<()> {
    let text = tune(first(device)?, times_in(file)?, layers, fp8_only)?;
    Pending::create(file)?.finish(text.trim_end())
}

/// Reads a table of times; an empty one if there is no file.
fn times_in(file: &Path) -> anyhow::Result<Times> {
    let text = match fs::read_to_string(file) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Times::default()),
        text => text.with_context(|| format!("cannot read {}", file.display()))?,
    };
    // The new table replaces the file, with all times that were read.
    Times::read(&text).map_err(|line| {
        let file = file.display();
        anyhow!("line {line} of {file} is not a product measured with this program's kernels; remove it")
    })
}

/// The device's first GPU.
fn first(device: &Device) -> microscale::Result<&Gpu> {
    match device {
        Device::Gpus(gpus) => Ok(gpus.first()),
        Device::Cpu => Err(microscale::Error::NoGpu("kernels are measured on GPUs only".into())),
    }
}

/// Prints the time that the first use of each kernel costs.
pub(super) fn load(device: &Device, json: Option<Pending>) -> anyhow::Result<()> {
    let milliseconds = |time: Duration| time.as_secs_f64() * 1e3;
    let mut table = table(&["kernel", "family", ">ms"]);
    let each = first(device)?.load_times()?;
    for (id, time) in &each {
        let kernel = id.kernel().name.to_owned();
        table.add_row([kernel, id.family().word().to_owned(), format!("{:.1}", milliseconds(*time))]);
    }
    let total: Duration = each.iter().map(|(_, time)| *time).sum();
    table.add_row(["all".into(), String::new(), format!("{:.0}", milliseconds(total))]);
    print(table.trim_fmt())?;
    let Some(file) = json else { return Ok(()) };
    let record = |(id, time): &(KernelId, Duration)| json!({ "kernel": id.kernel().name, "family": id.family().word(), "seconds": time.as_secs_f64() });
    let records: Vec<_> = each.iter().map(record).collect();
    file.finish(serde_json::to_string_pretty(&records)?)
}

/// The layers of a half, each with the operations that multiply it.
pub(super) fn layers(half: Half, ops: &[Op], on_cpu: bool) -> anyhow::Result<Vec<(Size, Vec<Op>)>> {
    if let Some(op) = ops.iter().find(|op| !op.has_tokens()) {
        let message =
            format!("--layers is for products of weights, such as gemm-weights: leave out --op {op}");
        return Err(Usage::new(message).into());
    }
    let products = match half {
        Half::Contest => &CONTEST[..],
        _ => &[Op::GemmWeights, Op::GemmExperts],
    };
    let products = products.iter().filter(|op| !on_cpu || !op.needs_gpu());
    let ops = if ops.is_empty() { products.copied().collect() } else { ops.to_vec() };
    let mut by_sizes: Vec<(Vec<Size>, Vec<Op>)> = Vec::new();
    for op in ops {
        let sizes = half.sizes(op);
        match by_sizes.iter_mut().find(|(others, _)| *others == sizes) {
            Some((_, ops)) => ops.push(op),
            None => by_sizes.push((sizes, vec![op])),
        }
    }
    let each = |(sizes, ops): (Vec<Size>, Vec<Op>)| sizes.into_iter().map(move |size| (size, ops.clone()));
    Ok(by_sizes.into_iter().flat_map(each).collect())
}

/// The numbers of tokens that layers are measured with.
pub(super) fn reported_tokens() -> Vec<NonZeroUsize> {
    let tokens = Layers::built_in().reported_tokens.iter();
    tokens.filter_map(|tokens| NonZeroUsize::new(*tokens)).collect()
}

/// A case with each configuration of `words`, if there are any.
pub(super) fn by_kernels(words: &[String], case: Case) -> anyhow::Result<Vec<Case>> {
    if words.is_empty() {
        return Ok(vec![case]);
    }
    if !case.op.has_tokens() || case.op == Op::Launch {
        let message = "--kernel is for products of weights, such as --op gemm-weights: leave it out";
        return Err(Usage::new(message).into());
    }
    let with_kernel = |word: &String| {
        let (format, dtype) = (case.recipe.format(), case.dtype);
        let config = GemmConfig::from_word(word, format, dtype);
        let config = config.ok_or_else(|| {
            let known = GemmConfig::for_operands(format, dtype).map(|config| config.to_string());
            let known = known.collect::<Vec<_>>().join(", ");
            Usage::new(format!(
                "{word:?} is no configuration for {} and {}; there are {known}",
                format.word(),
                dtype.word()
            ))
        })?;
        Ok(Case { kernel: Some(config), ..case })
    };
    words.iter().map(with_kernel).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_that_cannot_be_read_is_not_taken_for_an_empty_one() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("times.txt");
        assert!(times_in(&file).unwrap().products().is_empty());
        fs::write(&file, "# a comment\nnvfp4 512 2048 64 wgmma-128x64 7.5\n").unwrap();
        assert_eq!(times_in(&file).unwrap().products().len(), 1);
        for wrong in ["nvfp4 512 2048 64 wgmma-128x63 7.5", "nvfp4 512 2048 64 wgmma-128x64", "<html>"] {
            fs::write(&file, format!("\n{wrong}\n")).unwrap();
            let error = times_in(&file).unwrap_err().to_string();
            assert!(error.contains("line 2") && error.contains("times.txt"), "{error}");
        }
        assert!(times_in(folder.path()).unwrap_err().to_string().contains("cannot read"));
    }
}
