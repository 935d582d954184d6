//! `microscale devices`: lists the CPU's instruction sets and the GPUs.

use anyhow::Result;
use microscale::Words;
use microscale::cpu::Isa;

use crate::streams::print;
#[cfg(feature = "cuda")]
use crate::text::table::{bytes, table};

#[derive(clap::Args)]
pub(crate) struct Args {}

pub(crate) fn run(_: Args) -> Result<()> {
    let best = Isa::best();
    let available: Vec<_> = Isa::available().map(|isa| isa.word()).collect();
    let mut text = format!(
        "CPU     {}, {} threads\n        instruction sets: {}; {} is used\n\n",
        std::env::consts::ARCH,
        rayon::current_num_threads(),
        available.join(", "),
        best.word(),
    );
    text += &gpus();
    print(text)
}

#[cfg(feature = "cuda")]
fn gpus() -> String {
    let devices = match microscale::gpu::devices() {
        Err(microscale::Error::NoGpu(why)) => return format!("GPU     none: {why}"),
        Err(error) => return format!("GPU     none: {error}"),
        Ok(devices) if devices.is_empty() => return "GPU     none: the driver lists none".into(),
        Ok(devices) => devices,
    };
    let mut rows = table(&["GPU", "name", ">compute capability", ">memory", "embedded PTX"]);
    for info in devices {
        let (major, minor) = info.compute_capability;
        let target = info.target.unwrap_or("none: not supported");
        let (name, capability) = (format!("cuda:{}", info.ordinal), format!("{major}.{minor}"));
        rows.add_row([&name, &info.name, &capability, &bytes(info.memory_bytes), target]);
    }
    rows.trim_fmt()
}

#[cfg(not(feature = "cuda"))]
fn gpus() -> String {
    "GPU     none: this program was built without the feature cuda".into()
}
