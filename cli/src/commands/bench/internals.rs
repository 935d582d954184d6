//! The instruments of `bench` that measure kernels by name, loading and launching.

use std::time::Duration;

use microscale::gpu::{GemmConfig, KernelId};
use microscale::{Device, Words};
use serde_json::json;

use super::{Args, opened};
use crate::bench::case::Case;
use crate::bench::op::Op;
use crate::bench::tune::tune;
use crate::failures::Usage;
use crate::pending::Pending;
use crate::streams::print;
use crate::text::table::table;

/// Returns whether the arguments ask for an instrument of this module.
pub(super) fn is_asked_for(args: &Args) -> bool {
    args.tune.is_some() || args.op.contains(&Op::Load)
}

/// Writes a table of times, or prints what the first use of each kernel costs.
pub(super) fn run(args: &Args, json: Option<Pending>) -> anyhow::Result<()> {
    let device = opened(args)?;
    let Device::Gpus(gpus) = &device else {
        return Err(microscale::Error::NoGpu("kernels are measured on GPUs only".into()).into());
    };
    print(&device)?;
    if let Some(file) = &args.tune {
        let text = tune(gpus.first(), file)?;
        Pending::create(file)?.finish(text.trim_end())?;
        return Ok(());
    }
    if args.op.len() > 1 || !args.kernel.is_empty() {
        return Err(Usage::new("load is measured by itself: give --device, --target and --json only").into());
    }
    let milliseconds = |time: Duration| time.as_secs_f64() * 1e3;
    let mut table = table(&["kernel", "family", ">ms"]);
    let each = gpus.first().load_times()?;
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

/// A case with each configuration that is asked for.
pub(super) fn by_kernels(args: &Args, case: Case) -> anyhow::Result<Vec<Case>> {
    let multiplies = matches!(case.op, Op::GemvWeights | Op::GemmWeights | Op::GemmExperts);
    if args.kernel.is_empty() {
        return Ok(vec![case]);
    }
    if !multiplies {
        let message = "--kernel is for --op gemv-weights, gemm-weights and gemm-experts: leave it out";
        return Err(Usage::new(message).into());
    }
    let with_kernel = |word: &String| {
        let config = GemmConfig::from_word(word, case.recipe.format(), case.dtype);
        let known = || {
            let configs = GemmConfig::for_operands(case.recipe.format(), case.dtype);
            configs.map(|config| config.to_string()).collect::<Vec<_>>().join(", ")
        };
        let config = config.ok_or_else(|| {
            Usage::new(format!(
                "{word:?} is no configuration for {} and {}; there are {}",
                case.recipe.format().word(),
                case.dtype.word(),
                known()
            ))
        })?;
        Ok(Case { kernel: Some(config), ..case })
    };
    args.kernel.iter().map(with_kernel).collect()
}
