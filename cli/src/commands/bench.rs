//! `microscale bench`: measures operations against a copy of the same bytes.

use std::num::NonZeroUsize;
use std::path::PathBuf;

use comfy_table::Table;
#[cfg(feature = "internals")]
use microscale::gpu::Gpu;
use microscale::{
    ActivationRounding, Device, DeviceChoice, Dtype, Format, Numerics, Recipe, ScaleLayout, Search, Words,
};
use serde_json::json;

use crate::bench::activations::{Row, measure_activations};
use crate::bench::case::Case;
#[cfg(feature = "internals")]
use crate::bench::layers::Half;
use crate::bench::measure;
use crate::bench::measurement::Measurement;
use crate::bench::op::Op;
use crate::bench::size::Size;
use crate::failures::Usage;
use crate::options::device::{device, parse_device};
use crate::options::words::words;
use crate::outputs::Files;
use crate::pending::Pending;
use crate::streams::print;
use crate::text::table::table;

#[cfg(feature = "internals")]
mod internals;

/// Measure operations against a copy of the same bytes in the same run.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Operations to measure [default: quantize and dequantize]
    #[arg(long, value_parser = words::<Op>())]
    op: Vec<Op>,
    #[arg(long, value_parser = words::<Format>(), help = or_default::<Format>("Formats"))]
    format: Vec<Format>,
    /// Numerics [default: each format's default]
    #[arg(long, alias = "convention", value_parser = words::<Numerics>())]
    numerics: Vec<Numerics>,
    #[arg(long, value_parser = words::<ScaleLayout>(), help = or_default::<ScaleLayout>("Layouts of the scales"))]
    scale_layout: Vec<ScaleLayout>,
    #[arg(long, value_parser = words::<Search>(), help = or_default::<Search>("Searches for block scales"))]
    search: Vec<Search>,
    /// Matrices, rows by columns, for products by batches too [default: 16384x16384 on a GPU, 16384x8192 on a
    /// CPU]
    #[arg(long, value_name = "MxK[xL]")]
    shape: Vec<Size>,
    /// Measure gemm-weights and gemm-experts, or the given products, with layers of language models
    /// and, unless --tokens are given, the numbers of tokens for reports. `contest` measures
    /// products of FP4 with the shapes of GPU MODE's contest. --tune measures these dense layers
    /// [default: the tuned layers and small shapes]
    #[cfg(feature = "internals")]
    #[arg(long, value_parser = words::<Half>(), conflicts_with_all = ["shape", "top_k"])]
    layers: Option<Half>,
    /// Dtypes of the unquantized values [default: bf16, f16 and f32, as far as the operation takes them]
    #[arg(long, value_parser = words::<Dtype>())]
    dtype: Vec<Dtype>,
    /// Rows of activations that products of weights multiply with [default: 1]
    #[arg(long, value_name = "N")]
    tokens: Vec<NonZeroUsize>,
    #[arg(long, value_parser = words::<ActivationRounding>(), help = or_default::<ActivationRounding>("How gemm-weights on a CPU rounds activations"))]
    activations: Vec<ActivationRounding>,
    /// Experts per token of gemm-experts and gemm-experts-fp4; the shape has all experts
    #[arg(long, value_name = "K", default_value = "4")]
    top_k: NonZeroUsize,
    /// Configurations for products of weights, such as wgmma-256x64-c2 or gemv-16x1-s8
    /// [default: the one that is chosen]
    #[cfg(feature = "internals")]
    #[arg(long, value_name = "CONFIG")]
    kernel: Vec<String>,
    /// Use the PTX of an older target, such as sm_80
    #[cfg(feature = "internals")]
    #[arg(long)]
    target: Option<String>,
    /// auto, cpu, cuda or cuda:N
    #[arg(long, default_value = "auto", value_parser = parse_device)]
    device: DeviceChoice,
    /// Measure the times of all configurations that the table in FILE does not have, and add them to it:
    /// products choose by such tables (GPU only). `--op gemm-fp8` leaves it at products with FP8
    /// activations
    #[cfg(feature = "internals")]
    #[arg(long, value_name = "FILE", conflicts_with_all = ["shape", "dtype", "tokens", "format"])]
    tune: Option<PathBuf>,
    /// Write the measurements to a file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// The help of an option that has a default.
fn or_default<T: Words + Default>(what: &str) -> String {
    format!("{what} [default: {}]", T::default().word())
}

/// The values of an option, or its default.
fn given_or_default<T: Clone + Default>(given: &[T]) -> Vec<T> {
    if given.is_empty() { vec![T::default()] } else { given.to_vec() }
}

/// Runs the subcommand.
pub(crate) fn run(args: Args) -> anyhow::Result<()> {
    if args.device == DeviceChoice::CudaAll {
        return Err(Usage::new("bench measures one device: name it, --device cuda:0 say").into());
    }
    #[cfg(feature = "internals")]
    let written = [args.json.as_deref(), args.tune.as_deref()];
    #[cfg(not(feature = "internals"))]
    let written = [args.json.as_deref()];
    Files { written: &written, ..Files::default() }.check()?;
    let json = args.json.as_deref().map(Pending::create).transpose()?;
    let device = opened(&args)?;
    #[cfg(feature = "internals")]
    if let Some(file) = &args.tune {
        print(&device)?;
        let fp8_only = args.op == [Op::GemmFp8];
        if !args.op.is_empty() && !fp8_only {
            return Err(Usage::new("--tune takes no operation but --op gemm-fp8").into());
        }
        return internals::write_times(&device, file, args.layers, fp8_only);
    }
    #[cfg(feature = "internals")]
    if args.op.contains(&Op::Load) {
        if args.op.len() > 1 || !args.kernel.is_empty() {
            let message = "load is measured by itself: give --device, --target and --json only";
            return Err(Usage::new(message).into());
        }
        print(&device)?;
        return internals::load(&device, json);
    }
    if args.op.contains(&Op::Activations) {
        if args.op.len() > 1 || !args.format.is_empty() || !args.dtype.is_empty() {
            let message = "activations are measured by themselves: give --device, --shape and --json only";
            return Err(Usage::new(message).into());
        }
        print(&device)?;
        return activations(&args, &device, json);
    }
    let cases = cases(&args, recipes(&args)?, matches!(device, Device::Cpu))?;
    print(&device)?;
    let measurements = cases.iter().map(|case| measure(case, &device)).collect::<Result<Vec<_>, _>>()?;
    print(rows(&measurements).trim_fmt())?;
    if let Some(json) = json {
        let records: Vec<_> = measurements.iter().map(record).collect();
        json.finish(serde_json::to_string_pretty(&records)?)?;
    }
    Ok(())
}

/// Measures quantizing activations.
fn activations(args: &Args, device: &Device, json: Option<Pending>) -> anyhow::Result<()> {
    let shapes: Vec<_> = args.shape.iter().map(|size| (size.rows, size.cols)).collect();
    let measured = measure_activations(device, &shapes)?;
    let mut table = table(&["activations", "shape", ">µs", ">GB/s", ">copy GB/s", ">of copy"]);
    for row in &measured {
        let rate = |seconds: f64| format!("{:.1}", row.bytes as f64 / seconds / 1e9);
        table.add_row([
            row.what.clone(),
            format!("{}x{}", row.shape.rows, row.shape.cols),
            format!("{:.2}", row.seconds * 1e6),
            rate(row.seconds),
            row.copy_seconds.map_or("–".into(), rate),
            row.copy_seconds.map_or("–".into(), |copy| format!("{:.3}", copy / row.seconds)),
        ]);
    }
    print(table.trim_fmt())?;
    let Some(file) = json else { return Ok(()) };
    let record = |row: &Row| {
        json!({
            "op": "activations",
            "what": row.what,
            "rows": row.shape.rows,
            "cols": row.shape.cols,
            "bytes": row.bytes,
            "device": device.to_string(),
            "median_seconds": row.seconds,
            "copy_seconds": row.copy_seconds,
        })
    };
    file.finish(serde_json::to_string_pretty(&measured.iter().map(record).collect::<Vec<_>>())?)
}

/// The device, on a GPU with the PTX of the target that is asked for.
fn opened(args: &Args) -> anyhow::Result<Device> {
    #[cfg(feature = "internals")]
    if let Some(target) = &args.target {
        let ordinal = if let DeviceChoice::Cuda(ordinal) = args.device { ordinal } else { 0 };
        return Ok(Device::Gpus(Gpu::with_target(ordinal, target)?.into()));
    }
    device(args.device)
}

/// The sizes, without tokens, and the operations to measure on each.
fn shapes(args: &Args, on_cpu: bool) -> anyhow::Result<Vec<(Size, Vec<Op>)>> {
    #[cfg(feature = "internals")]
    if let Some(half) = args.layers {
        return internals::layers(half, &args.op, on_cpu);
    }
    let mut ops = args.op.clone();
    if ops.is_empty() {
        ops = vec![Op::Quantize, Op::Dequantize];
    }
    let mut shapes = args.shape.clone();
    if shapes.is_empty() {
        shapes.push(Size {
            rows: 16384,
            cols: if on_cpu { 8192 } else { 16384 },
            batches: 1,
            tokens: None,
            top_k: 0,
        });
    }
    Ok(shapes.into_iter().map(|size| (size, ops.clone())).collect())
}

/// The requested cases. Mistakes are reported before the first is measured.
fn cases(args: &Args, recipes: Vec<Recipe>, on_cpu: bool) -> anyhow::Result<Vec<Case>> {
    let all = [Dtype::Bf16, Dtype::F16, Dtype::F32];
    let dtypes = if args.dtype.is_empty() { &all[..] } else { &args.dtype };
    let mut cases = Vec::new();
    for recipe in recipes {
        for (size, ops) in shapes(args, on_cpu)? {
            for &dtype in dtypes {
                for &op in &ops {
                    if !args.dtype.is_empty() || op.takes(dtype, on_cpu) {
                        let roundings = given_or_default(&args.activations);
                        let sizes = sizes(args, op, size);
                        let sizes = sizes
                            .iter()
                            .flat_map(|size| roundings.iter().map(move |rounding| (*size, *rounding)));
                        for (size, activations) in sizes {
                            let case = Case {
                                op,
                                recipe,
                                dtype,
                                activations,
                                size,
                                #[cfg(feature = "internals")]
                                kernel: None,
                            };
                            #[cfg(feature = "internals")]
                            cases.extend(internals::by_kernels(&args.kernel, case)?);
                            #[cfg(not(feature = "internals"))]
                            cases.push(case);
                        }
                    }
                }
            }
        }
    }
    for case in &cases {
        case.op.check(case.dtype, case.size, on_cpu).map_err(Usage::new)?;
        case.op.check_activations(case.activations, on_cpu).map_err(Usage::new)?;
        case.size.check().map_err(Usage::new)?;
    }
    Ok(cases)
}

/// A size with each number of tokens.
fn sizes(args: &Args, op: Op, size: Size) -> Vec<Size> {
    let experts = op.is_of_experts() && size.top_k == 0;
    let size = if experts { Size { top_k: args.top_k.get(), ..size } } else { size };
    let with_tokens = |tokens: &NonZeroUsize| Size { tokens: Some(*tokens), ..size };
    if !args.tokens.is_empty() {
        return args.tokens.iter().map(with_tokens).collect();
    }
    if size.tokens.is_some() {
        return vec![size];
    }
    #[cfg(feature = "internals")]
    if args.layers.is_some() {
        return internals::reported_tokens().iter().map(with_tokens).collect();
    }
    vec![Size { tokens: op.has_tokens().then_some(NonZeroUsize::MIN), ..size }]
}

/// Every recipe that is asked for.
fn recipes(args: &Args) -> anyhow::Result<Vec<Recipe>> {
    let mut recipes = Vec::new();
    for format in given_or_default(&args.format) {
        let default = [Numerics::default_for(format)];
        let numerics = if args.numerics.is_empty() { &default[..] } else { &args.numerics };
        for &numerics in numerics {
            for scale_layout in given_or_default(&args.scale_layout) {
                for search in given_or_default(&args.search) {
                    recipes.push(Recipe { scale_layout, search, ..Recipe::of(format, numerics)? });
                }
            }
        }
    }
    Ok(recipes)
}

fn rows(measurements: &[Measurement]) -> Table {
    let mut header = vec![
        "op",
        "format",
        "numerics",
        "scales",
        "search",
        "dtype",
        "shape",
        ">µs",
        ">Gelem/s",
        ">GB/s",
        ">copy GB/s",
        ">of copy",
    ];
    let with_reads = measurements.iter().any(|m| m.read_seconds.is_some());
    if with_reads {
        header.extend([">read GB/s", ">of read"]);
    }
    let with_kernels = measurements.iter().any(|m| m.kernel.is_some());
    if with_kernels {
        header.extend(["kernel", ">Tflop/s", ">of tensor cores"]);
    }
    let mut table = table(&header);
    let rate = |rate: Option<f64>| rate.map_or("–".into(), |rate| format!("{:.1}", rate / 1e9));
    let ratio = |ratio: Option<f64>| ratio.map_or("–".into(), |ratio| format!("{ratio:.3}"));
    for m in measurements {
        let moved = m.bytes > 0;
        let figure = |text: String| if moved { text } else { "–".into() };
        let elements: f64 =
            [m.size.rows, m.size.cols, m.size.batches].map(|count| count as f64).iter().product();
        let mut row = vec![
            m.op.word().to_owned(),
            figure(m.recipe.format().to_string()),
            figure(m.recipe.scheme.numerics().map_or("–", Numerics::word).to_owned()),
            figure(m.recipe.scale_layout.word().to_owned()),
            figure(m.recipe.search.word().to_owned()),
            figure(match m.activations {
                ActivationRounding::Exact => m.dtype.word().to_owned(),
                rounding => format!("{}, {}", m.dtype.word(), rounding.word()),
            }),
            figure(m.size.to_string()),
            format!("{:.2}", m.median_seconds * 1e6),
            figure(format!("{:.2}", elements / m.median_seconds / 1e9)),
            figure(format!("{:.1}", m.bytes_per_second() / 1e9)),
            rate(m.copy_bytes_per_second()),
            ratio(m.ratio()),
        ];
        if with_reads {
            row.extend([rate(m.read_bytes_per_second()), ratio(m.read_ratio())]);
        }
        if with_kernels {
            let tera = m.operations_per_second().map_or("–".into(), |rate| format!("{:.1}", rate / 1e12));
            row.extend([m.kernel.clone().unwrap_or("–".into()), tera, ratio(m.tensor_core_ratio())]);
        }
        table.add_row(row);
    }
    table
}

/// A measurement as its JSON object.
fn record(m: &Measurement) -> serde_json::Value {
    json!({
        "op": m.op.word(),
        "format": m.recipe.format().word(),
        "numerics": m.recipe.scheme.numerics().map(Numerics::word),
        "scale_layout": m.recipe.scale_layout.word(),
        "search": m.recipe.search.word(),
        "dtype": m.dtype.word(),
        "activations": m.activations.word(),
        "rows": m.size.rows,
        "cols": m.size.cols,
        "batches": m.size.batches,
        "tokens": m.size.tokens,
        "top_k": m.size.top_k,
        "device": m.device,
        "threads": m.threads,
        "bytes": m.bytes,
        "median_seconds": m.median_seconds,
        "bytes_per_second": m.bytes_per_second(),
        "copy_bytes_per_second": m.copy_bytes_per_second(),
        "ratio": m.ratio(),
        "read_bytes_per_second": m.read_bytes_per_second(),
        "read_ratio": m.read_ratio(),
        "kernel": m.kernel,
        "operations_per_second": m.operations_per_second(),
        "tensor_core_ratio": m.tensor_core_ratio(),
    })
}
